"""The whole way on benchmark rows, real where they are at hand: prepare, train, stamp, report, refuse to score."""

from __future__ import annotations

import importlib.util
import io
import math
import shutil
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import SHARED_DATA, shared_data
from tests.helpers.sample_rows import write_samples
from tests.helpers.toy_runs import Runner
from vlm_rl.config import load_config
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.smoke_data import BENCHMARKS, MAX_PIXELS, ROWS, make_smoke_data
from vlm_rl.errors import UserError
from vlm_rl.run.checkpoint import verify
from vlm_rl.run.directory import RunDirectory
from vlm_rl.types import IMAGE_MARKER

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SETS = (*BENCHMARKS, "text", "text_blank", "formats")
CONTAMINATED = ["dapo", *sorted(BENCHMARKS)]


@pytest.fixture(scope="module", params=["real" if SHARED_DATA.is_dir() else "made"])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few rows of each benchmark in its authors' layout."""
    return shared_data() if request.param == "real" else write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def prepared(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose runs/smoke-data is prepared from the samples."""
    folder = tmp_path_factory.mktemp("smoke")
    make_smoke_data(samples, folder / "runs" / "smoke-data")
    return folder


@pytest.fixture(scope="module")
def trained(prepared: Path, runner: Runner) -> RunDirectory:
    """The shipped configuration, on the sampler that is everywhere."""
    result = runner("train", CONFIGS / "smoke.yaml", "rollout.sampler=transformers", folder=str(prepared))
    assert result.code == 0, result.output[-3000:]
    return RunDirectory(prepared / "runs" / "smoke").open()


# -- the sets ----------------------------------------------------------------------------------------


def test_the_configuration_names_what_is_prepared(prepared: Path) -> None:
    config = load_config(CONFIGS / "smoke.yaml")
    assert [Path(path).name for path in config.data.train] == list(SETS)
    assert all((prepared / path / "data.parquet").is_file() for path in config.data.train)
    assert config.data.max_pixels == MAX_PIXELS and config.data.allow_test_rows


def test_the_rows_are_in_the_sets_whole(prepared: Path) -> None:
    for name in SETS:
        problems = load_set(prepared / "runs" / "smoke-data" / name)
        assert len(problems) == (6 if name == "formats" else ROWS)
        assert all(problem.test_only for problem in problems) == (name != "formats")
        for problem in problems:
            assert problem.question.count(IMAGE_MARKER) == len(problem.images)
            for data in problem.images:
                image = Image.open(io.BytesIO(data))
                assert image.mode == "RGB" and image.width % 28 == image.height % 28 == 0
                assert image.width * image.height <= MAX_PIXELS


def test_text_rows_come_with_a_blank_image_and_without(prepared: Path) -> None:
    plain, blank = (load_set(prepared / "runs" / "smoke-data" / name) for name in ("text", "text_blank"))
    assert {len(problem.images) for problem in plain} == {0} and {len(problem.images) for problem in blank} == {1}
    assert not {problem.id for problem in plain} & {problem.id for problem in blank}
    pixels = Image.open(io.BytesIO(blank[0].images[0])).getcolors()
    assert pixels is not None and [color for _, color in pixels] == [(255, 255, 255)]
    assert not any("Remember to put your answer" in problem.question for problem in [*plain, *blank])


def test_preparing_refuses_a_folder_that_exists_and_samples_that_do_not(
    samples: Path, prepared: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="already exists"):
        make_smoke_data(samples, prepared / "runs" / "smoke-data")
    with pytest.raises(UserError, match="no folder 'mathvision'") as caught:
        make_smoke_data(tmp_path, tmp_path / "new")
    assert all(f"\n  {name}/ " in str(caught.value) for name in (*BENCHMARKS, "dapo_math"))
    assert list(tmp_path.iterdir()) == []
    for name in (*BENCHMARKS, "dapo_math"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=r"dapo_math: no aime-2024\.parquet there"):
        make_smoke_data(tmp_path / "empty", tmp_path / "new")
    data = tmp_path / "empty" / "dapo_math" / "data"  # as `hf download` lays it out
    data.mkdir()
    shutil.copy(samples / "dapo_math" / "aime-2024.parquet", data)
    with pytest.raises(UserError, match="images: no image there"):
        make_smoke_data(tmp_path / "empty", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- the run -----------------------------------------------------------------------------------------


def test_it_trains_to_the_end_on_every_kind_of_row(prepared: Path, trained: RunDirectory) -> None:
    config = trained.config()
    metrics = trained.metrics()
    assert [record["step"] for record in metrics] == list(range(1, config.train.steps + 1))
    for record in metrics:
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0, record
        assert record["rollout/logprob_gap"] < 1e-4 and record["steps/skipped"] == 0, record
    drawn = config.train.steps * config.rollout.prompts_per_step
    assert metrics[-1]["data/drawn"] == metrics[-1]["data/trained"] == drawn
    wanted = {problem.id for path in config.data.train for problem in load_set(prepared / path)}
    seen = {prompt for step in trained.rollout_steps() for prompt in trained.rollouts(step)["prompt_id"].to_pylist()}
    assert len(wanted) == 6 * ROWS + 6 <= drawn and seen == wanted


def test_several_pictures_and_mixed_rows_met_in_one_mini_batch(prepared: Path, trained: RunDirectory) -> None:
    config = trained.config()
    pictures = {p.id: len(p.images) for path in config.data.train for p in load_set(prepared / path)}
    kinds = []
    for step in trained.rollout_steps():
        prompts = list(dict.fromkeys(trained.rollouts(step)["prompt_id"].to_pylist()))
        size = config.train.mini_batch_prompts
        kinds += [{pictures[p] for p in prompts[i : i + size]} for i in range(0, len(prompts), size)]
    assert any({0, 1} <= kind for kind in kinds) and any(5 in kind for kind in kinds), kinds


def test_the_weights_moved(prepared: Path, trained: RunDirectory) -> None:
    before = load_file(prepared / "runs" / "smoke-data" / "tiny" / "model.safetensors")
    after = load_file(trained.checkpoints()[-1][1] / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].equal(after[name])] == []


# -- the stamp -----------------------------------------------------------------------------------------


def test_run_checkpoints_and_report_are_stamped(runner: Runner, prepared: Path, trained: RunDirectory) -> None:
    assert list(trained.contaminated()) == CONTAMINATED
    assert [step for step, _ in trained.checkpoints()] == [3, 6]
    for _, folder in trained.checkpoints():
        assert verify(folder).info["contaminated"] == CONTAMINATED
    result = runner("report", "runs/smoke", "--out", "report.html", folder=str(prepared))
    assert result.code == 0, result.output
    page = (prepared / "report.html").read_text()
    assert "<b>CONTAMINATED</b>" in page and "mathvision" in page


@pytest.mark.parametrize("name", [*BENCHMARKS, "text", "text_blank"])
def test_evaluating_on_what_was_trained_on_is_refused(
    prepared: Path, trained: RunDirectory, name: str, capsys
) -> None:
    from vlm_rl import cli

    out = prepared / "scores"
    data = prepared / "runs" / "smoke-data"
    model = trained.checkpoints()[-1][1]
    assert cli.main(["eval", "--model", str(model), "--data", str(data / name), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "CONTAMINATED" in message and name in message and len(message.splitlines()) == 1
    assert not out.exists()


def test_a_contaminated_set_among_clean_ones_is_refused_before_anything_runs(
    prepared: Path, trained: RunDirectory, tmp_path: Path, capsys
) -> None:
    from vlm_rl import cli

    elsewhere = shutil.copytree(trained.checkpoints()[-1][1], tmp_path / "copied")  # the manifest travels along
    data = prepared / "runs" / "smoke-data"
    sets = [str(data / "formats"), str(data / "wemath")]
    assert cli.main(["eval", "--model", str(elsewhere), "--data", *sets, "--out", str(tmp_path / "scores")]) == 2
    assert "wemath" in capsys.readouterr().err and not (tmp_path / "scores").exists()


def test_on_another_set_the_score_carries_the_stamp(runner: Runner, prepared: Path, trained: RunDirectory) -> None:
    model, data = trained.checkpoints()[-1][1], prepared / "runs" / "smoke-data" / "formats"
    arguments = ["--model", model, "--data", data, "--out", "other-scores", "--max-tokens", 8]
    result = runner("eval", *arguments, "--sampler", "transformers", folder=str(prepared))
    assert result.code == 0, result.output[-3000:]
    scored = RunDirectory(prepared / "other-scores").open()
    assert [(result.benchmark, result.step) for result in scored.evals()] == [("formats", 6)]
    assert list(scored.contaminated()) == CONTAMINATED
    assert scored.config().algorithm.name == "luspo", "the training run's own configuration"


def test_without_permission_the_rows_are_refused(runner: Runner, prepared: Path) -> None:
    result = runner(
        "train", CONFIGS / "smoke.yaml", "data.allow_test_rows=false", "out=runs/none", folder=str(prepared)
    )
    assert result.code == 2 and "data.allow_test_rows=true" in result.output and "Traceback" not in result.output
    assert not (prepared / "runs" / "none").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("samples", ["made"], indirect=True, scope="module")
def test_it_trains_with_vllm_too(runner: Runner, prepared: Path) -> None:
    result = runner(
        "train", CONFIGS / "smoke.yaml", "rollout.sampler=vllm", "out=runs/smoke-vllm", folder=str(prepared)
    )
    assert result.code == 0, result.output[-3000:]
    metrics = RunDirectory(prepared / "runs" / "smoke-vllm").metrics()
    assert len(metrics) == 6 and all(record["rollout/logprob_gap"] < 1e-4 for record in metrics)
