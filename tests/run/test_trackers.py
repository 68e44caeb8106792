"""Trackers: what each is told of a run, that a resume continues it, and that a broken one harms nothing.

Clients that are not installed are skipped; docs/trackers.md says how an environment with all of them is made.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.example_run import build_run, square_image
from tests.helpers.prepared_sets import write_problems
from vlm_rl.cli import main
from vlm_rl.config import TrackersConfig
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.mirror import NUM_SAMPLES, Mirror, Progress
from vlm_rl.run.trackers.registry import TRACKERS, check_trackers
from vlm_rl.run.tracking import Tracking
from vlm_rl.types import Problem

LOG = {"project": "toys", "group": "seeds", "tags": ["first"], "samples_every": 2}
HOSTILE = "<img src=x onerror=\"document.title='owned'\"> | `code`\nWhich?"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run of four steps with three evaluations, and the prepared set that it was trained on."""
    monkeypatch.chdir(tmp_path)
    for name, folder in (("TRACKIO_DIR", "trackio"), ("SWANLAB_SAVE_DIR", "swanlab"), ("WANDB_DIR", "wandb")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    problems = [
        Problem(f"toy-{step}-{n}", f"<image>{HOSTILE}", (square_image(["red"] * 9),), "9", "integer")
        for step in range(1, 6)
        for n in range(8)
    ]
    write_problems(problems, tmp_path / "data/toy-train")
    yield build_run(tmp_path / "run", steps=4, eval_steps=(0, 2, 4), num_problems=4)


def events_of(run: RunDirectory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    guidance = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
    return EventAccumulator(str(run.path / "tensorboard"), size_guidance=guidance).Reload()


def mirror(run: RunDirectory, name: str = "tensorboard") -> Mirror:
    """Send what the tracker does not have, in this process."""
    mirrored = Mirror(run, name, LOG)
    mirrored.catch_up()
    mirrored.tracker.close()
    return mirrored


def test_tensorboard_has_every_scalar_and_the_responses(run) -> None:
    mirror(run)
    events = events_of(run)
    for record in run.metrics():
        for name in record.keys() - {"step", "attempt"}:
            assert math.isclose(
                {e.step: e.value for e in events.Scalars(name)}[record["step"]], record[name], rel_tol=1e-6
            )
    accuracies = [(e.step, e.value) for e in events.Scalars("eval/toy-test/accuracy")]
    assert accuracies == [(r.step, pytest.approx(r.summary["accuracy"])) for r in run.evals()]
    assert {"eval/toy-test/interval/low", "eval/toy-test/interval/high"} <= set(events.Tags()["scalars"])
    for name, column in (("length", "length"), ("reward", "reward")):
        histograms = events.Histograms(f"histograms/{name}")
        assert [h.step for h in histograms] == [1, 2, 3, 4]
        values = run.rollouts(3)[column].to_pylist()
        assert histograms[2].histogram_value.num == sum(histograms[2].histogram_value.bucket) == len(values)
        assert histograms[2].histogram_value.sum == pytest.approx(sum(values))
    assert [e.step for e in events.Images("samples/1")] == [2, 4]
    assert len(events.Tags()["images"]) == NUM_SAMPLES
    assert "toys" in text_of(events, "project") and "first" in text_of(events, "tags")


def text_of(events, tag: str, index: int = 0) -> str:
    return events.Tensors(tag)[index].tensor_proto.string_val[0].decode()


def test_a_table_shows_the_text_of_responses_as_it_is(run) -> None:
    mirror(run)
    table = text_of(events_of(run), "samples", 1)
    assert len(table.splitlines()) == 2 + NUM_SAMPLES
    assert all(line.count("|") == 2 + 9 - 1 for line in table.splitlines())
    assert "&lt;img src=x" in table and "<img" not in table and "&lt;think&gt;" in table
    assert "&#124; `code`<br>Which?" in table and "| 9 |" in table


def test_an_episode_is_a_conversation_beside_its_crops(run) -> None:
    crop = base64.b64encode(square_image(["blue"] * 9)).decode()
    seen = {"tool": "zoom", "text": "", "error": "", "images": [crop, "AAAA"]}  # the second is no image
    turns = [{"text": "let me look", "tokens": 3, "answer": seen}, {"text": "nine", "tokens": 1, "ending": "done"}]
    for step, column in ((2, json.dumps(turns)), (4, "[3]")):  # the second was written by somebody else
        path = run.path / "rollouts" / f"step-{step:06d}.parquet"
        table = pq.read_table(path).drop_columns("turns")
        pq.write_table(table.append_column("turns", pa.array([column] * len(table))), path)
    mirror(run)
    events = events_of(run)
    assert text_of(events, "samples", 0).count("let me look<br><br>[zoom: an image, an image]<br><br>nine") == 8
    assert "&lt;think&gt;" in text_of(events, "samples", 1)
    assert [image.width for image in events.Images("samples/1")] == [84 + 4 + 84, 84]


def test_a_resume_continues_the_same_run_and_sends_each_step_once(run) -> None:
    first = mirror(run)
    before = {record["step"]: record["reward"] for record in run.metrics()}
    for step in (3, 4, 5):  # steps 3 and 4 are trained again
        run.append_metrics(step, 2, {"reward": 100.0 + step, "bad": math.nan})
    run.append_metrics(5, 2, {"timing/save": 2.0})  # a second line of the step
    again = mirror(run)
    assert again.progress.id == first.progress.id
    events = events_of(run)
    rewards = {e.step: e.value for e in events.Scalars("reward")}
    assert rewards == {**{step: pytest.approx(before[step]) for step in before}, 5: 105.0}
    assert len(events.Scalars("reward")) == 5 and len(events.Scalars("eval/toy-test/accuracy")) == 3
    assert [(e.step, e.value) for e in events.Scalars("timing/save")] == [(5, 2.0)]
    assert "bad" not in events.Tags()["scalars"]


def test_lines_that_a_machine_lost_as_it_went_down_hide_no_later_step(run) -> None:
    """What is appended is not forced to disk, as the mirror's progress is."""
    mirror(run)
    file = run.path / "metrics.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)[:2]
    file.write_bytes(b"".join(kept))
    for step in (5, 6):
        run.append_metrics(step, 2, {"reward": float(step)})
    assert mirror(run).progress.step == 6
    assert [e.step for e in events_of(run).Scalars("reward")] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_comes_after_its_own_step_and_before_the_next(run) -> None:
    steps = [step for step, _ in Mirror(run, "tensorboard", LOG)._events()]
    assert steps == sorted(steps) and steps == [0, 1, 2, 2, 3, 4, 4]


def test_a_set_that_is_gone_costs_only_the_questions(run) -> None:
    Path("data/toy-train/data.parquet").unlink()
    mirror(run)
    events = events_of(run)
    assert "&lt;think&gt;" in text_of(events, "samples") and "images" in events.Tags() and not events.Tags()["images"]


def test_a_run_on_a_benchmarks_rows_is_tagged(run) -> None:
    run.stamp_contaminated(["mathvista"])
    mirror(run)
    assert "CONTAMINATED" in text_of(events_of(run), "tags")


def test_an_absent_tracker_is_the_users_error() -> None:
    absent = [name for name in TRACKERS if importlib.util.find_spec(name) is None]
    for name in absent:
        with pytest.raises(UserError, match=f"{name} is not installed"):
            check_trackers([name])


def test_a_folder_of_its_name_is_no_tracker(tmp_path, monkeypatch) -> None:
    """wandb writes into one, and `python -m vlm_rl` looks for modules in the working folder."""
    (tmp_path / "absent_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="absent_tracker is not installed"):
        check_trackers(["absent_tracker"])


def test_track_needs_a_tracker(run, capsys) -> None:
    assert main(["track", str(run.path)]) == 2
    assert "log.trackers is empty" in capsys.readouterr().err


# -- the processes -----------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_said_once_and_what_is_missing_can_be_sent(run, capsys) -> None:
    (run.path / "tensorboard").write_text("not a folder")
    tracking = Tracking(run.path, TrackersConfig(trackers=["tensorboard"]))
    lines: list[str] = []
    deadline = time.monotonic() + 300
    while not lines and time.monotonic() < deadline:
        lines = tracking.complaints()
        time.sleep(0.2)
    assert len(lines) == 1 and "tensorboard does not have all of the run" in lines[0]
    assert f"vlm-rl track {run.path} log.trackers=[tensorboard]" in lines[0]
    assert tracking.complaints() == tracking.close() == []
    (run.path / "tensorboard").unlink()
    assert main(["track", str(run.path), "log.trackers=[tensorboard]"]) == 0
    assert capsys.readouterr().out == f"tensorboard: tensorboard --logdir {run.path.parent}\n"
    assert [e.step for e in events_of(run).Scalars("reward")] == [1, 2, 3, 4]


def test_a_tracker_that_dies_says_how(run) -> None:
    tracking = Tracking(run.path, TrackersConfig(trackers=["tensorboard"]))
    (process,) = tracking._processes.values()
    process.kill()
    process.wait()
    (line,) = tracking.complaints()
    assert "tensorboard does not have all of the run: it ended with exit code -9" in line


@pytest.mark.slow
def test_a_tracker_that_hangs_is_left_behind(run) -> None:
    """The prepared set is on a file system that never answers: a pipe that nobody writes into."""
    file = Path("data/toy-train/data.parquet")
    file.unlink()
    os.mkfifo(file)
    tracking = Tracking(run.path, TrackersConfig(trackers=["tensorboard"], project="p"), samples_every=2)
    (pid,) = [process.pid for process in tracking._processes.values()]
    (line,) = tracking.close(seconds=1)
    assert "tensorboard does not have all of the run: it did not finish" in line
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert Progress.read(run.path, "tensorboard").step < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_every_client_takes_a_whole_run_and_continues_it(run, name, monkeypatch) -> None:
    """Without a network and without a login, through the real client in a process of its own."""
    pytest.importorskip(name, reason=f"{name} is not installed (docs/trackers.md)")
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    command = ["track", str(run.path), f"log.trackers=[{name}]", "log.project=toys", "log.samples_every=2"]
    assert main([*command, "log.group=seeds", "log.tags=[first]"]) == 0
    first = Progress.read(run.path, name)
    assert (first.step, first.error, len(first.evals)) == (4, "", 3), (run.path / f"trackers/{name}.log").read_text()
    run.append_metrics(5, 1, {"reward": 0.125})
    assert main(command) == 0
    assert Progress.read(run.path, name).id == first.id and Progress.read(run.path, name).step == 5
    CHECKS[name](run, first.id)


def in_wandb(run: RunDirectory, identity: str) -> None:
    stored = b"".join(file.read_bytes() for file in run.path.glob("wandb/offline-run-*/*.wandb"))
    assert all(
        word in stored for word in (identity.encode(), b"eval/toy-test/accuracy", b"histograms/length", b"seeds")
    )
    tables = [file.read_text() for file in run.path.glob("wandb/offline-run-*/files/media/table/samples*.json")]
    assert len(tables) == 2 and all("toy-2-" in table or "toy-4-" in table for table in tables)


def in_trackio(run: RunDirectory, identity: str) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("toys", f"run-{identity}")
    rewards = {log["step"]: log["reward"] for log in logs if "reward" in log}
    assert rewards == {record["step"]: pytest.approx(record["reward"]) for record in run.metrics()}
    assert [log["step"] for log in logs if "samples" in log] == [2, 4]
    assert [log["step"] for log in logs if "histograms/length" in log] == [1, 2, 3, 4]


def in_mlflow(run: RunDirectory, identity: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    stored = client.get_run(identity)
    assert (stored.data.tags["group"], stored.data.tags["first"]) == ("seeds", "true")
    assert stored.data.params["rollout.max_tokens"] == "64"
    history = {metric.step: metric.value for metric in client.get_metric_history(identity, "reward")}
    assert history == {record["step"]: pytest.approx(record["reward"]) for record in run.metrics()}
    assert [file.path for file in client.list_artifacts(identity, "samples")] == [
        "samples/step-000002.json",
        "samples/step-000004.json",
    ]


def in_swanlab(run: RunDirectory, identity: str) -> None:
    stored = b"".join(file.read_bytes() for file in run.path.glob(f"swanlog/run-*-{identity}/*.swanlab"))
    assert b"eval/toy-test/accuracy" in stored and b"samples" in stored and b"histograms/length" in stored


@pytest.mark.slow
def test_swanlabs_local_mode_is_left_as_it_is(run, monkeypatch, capsys) -> None:
    """Its runs have no address, and its dashboard knows no offline run."""
    for name in ("swanlab", "swanboard"):
        pytest.importorskip(name, reason=f"{name} is not installed (docs/trackers.md)")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    assert main(["track", str(run.path), "log.trackers=[swanlab]", "log.project=toys"]) == 0
    assert f"swanlab watch {run.path / 'swanlog'}" in capsys.readouterr().out
    assert len(list(run.path.glob("swanlog/run-*"))) == 1 and (run.path / "swanlog/runs.swanlab").exists()


CHECKS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow, "swanlab": in_swanlab}


@pytest.mark.slow
def test_trackios_dashboard_shows_the_run_in_a_browser(run, monkeypatch) -> None:
    """Curves and the table, with the text of a hostile response as text."""
    trackio = pytest.importorskip("trackio", reason="trackio is not installed (docs/trackers.md)")
    from tests.helpers.browser import open_page

    mirror(run, "trackio")
    app, url, *_ = trackio.show(project="toys", open_browser=False, block_thread=False)
    try:
        with open_page(url.split("?")[0] + "?project=toys") as visit:
            visit.page.get_by_text("Media & Tables", exact=True).click(timeout=60_000)
            visit.page.get_by_text("samples", exact=True).first.wait_for(timeout=60_000)
            text = visit.page.inner_text("body")
            assert "<think>" in text and HOSTILE.split("|")[0].strip() in text
            assert visit.page.title() != "owned"
            images = visit.page.eval_on_selector_all("td img", "all => all.map(image => image.className)")
            assert len(images) >= NUM_SAMPLES and all(
                "table-image" in name for name in images
            )  # and none of a response
            visit.page.get_by_text("Metrics", exact=True).first.click()
            visit.page.get_by_text("entropy", exact=True).first.wait_for(timeout=60_000)
    finally:
        app.close()
