"""A pipe, a device or a text without an end, where a file is expected: one message at once, and nothing is opened."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.example_run import build_run
from tests.helpers.prepared_sets import write_problems
from vlm_rl.cli import main
from vlm_rl.config import load_config
from vlm_rl.data.sets import check_is_set
from vlm_rl.demo.numbers.library import Library
from vlm_rl.errors import UserError
from vlm_rl.rewards.judge import read_prompt
from vlm_rl.run.checkpoint_names import find_checkpoint
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.manifest import read_manifest
from vlm_rl.samplers.remote.fleet import read_addresses
from vlm_rl.samplers.remote.server_token import read_token, token_path
from vlm_rl.types import Problem
from vlm_rl.untrusted.plain_files import check_plain_tree

pytestmark = pytest.mark.timeout(60)  # whatever opens a pipe waits for ever


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("plain") / "run", steps=2, seed=0, num_problems=4).path


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "config.yaml", "log.txt", "controls.json", "CONTAMINATED.json"),
        *("eval/toy-test/step-000000.json", "eval/toy-test/step-000000.parquet", "rollouts/step-000001.parquet"),
    ],
)
def test_a_pipe_in_a_run_is_refused_by_name(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = Path(shutil.copytree(built, tmp_path / "run"))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 2
    assert f"{run / name} is no file" in capsys.readouterr().err
    other = Path(shutil.copytree(built, tmp_path / "other"))
    library = Library([run, other])
    assert list(library.runs) == ["other"] and f"{run / name} is no file" in library.faults[0]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", RunDirectory.metrics),
        ("CONTAMINATED.json", RunDirectory.contaminated),
        ("rollouts/step-000001.parquet", lambda run: run.rollouts(1, ["text"])),
        ("eval/toy-test/step-000000.json", RunDirectory.evals),
        ("eval/toy-test/step-000000.parquet", lambda run: run.evals()[0].rows(["problem_id"])),
        ("MANIFEST.json", lambda run: read_manifest(run.path)),
    ],
)
def test_each_reader_of_a_run_refuses_a_pipe_itself(
    built: Path, tmp_path: Path, name: str, read: Callable[[RunDirectory], object]
) -> None:
    """A study, a paper's table and `vlm-rl eval compare` open runs and results that nobody looked through before."""
    run = Path(shutil.copytree(built, tmp_path / "run"))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=f"{run / name} is no file"):
        read(RunDirectory(run))


def test_links_to_devices_are_refused_and_links_to_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dead").symlink_to("nothing")
    check_plain_tree(tmp_path)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="zero is no file"):
        check_plain_tree(tmp_path)


def test_a_configuration_a_set_and_a_source_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"c\.yaml is no file"):
        load_config(pipe)
    (tmp_path / "data.parquet").write_bytes(b"")
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=r"manifest\.json is no file"):
        check_is_set(tmp_path)
    table = tmp_path / "rows.csv"
    os.mkfifo(table)
    assert main(["prepare", str(table), "--out", str(tmp_path / "set")]) == 2
    assert f"{table} is no file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["table", "folder", "set"])
def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    odd = os.fsdecode(b"caf\xe9")
    folder = tmp_path / (odd if place == "folder" else "raw")
    folder.mkdir()
    table = folder / (f"{odd}.jsonl" if place == "table" else "rows.jsonl")
    table.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    before = sorted(tmp_path.rglob("*"))
    assert main(["prepare", str(folder), "--out", str(tmp_path / (odd if place == "set" else "set"))]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "UTF-8" in line]
    assert r"caf\xe9" in line and "rename the file or folder" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pipe_beside_a_source_is_not_its_card(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "rows.csv").write_text("question,answer\nhow many?,3\n")
    os.mkfifo(tmp_path / "raw" / "README.md")
    assert main(["prepare", str(tmp_path / "raw"), "--out", str(tmp_path / "set")]) == 0


def test_a_configuration_that_is_a_large_hole_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "c.yaml").open("wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(UserError, match=r"c\.yaml has more than 16 MiB"):
        load_config(tmp_path / "c.yaml")


def test_links_in_a_circle_are_named_and_cost_a_set_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (circle := tmp_path / "circle.png").symlink_to("circle.png")
    assert main(["export", str(circle), "--out", str(tmp_path / "model")]) == 2
    assert f"{circle} is a link that leads back to itself" in capsys.readouterr().err
    with pytest.raises(UserError, match="is a link that leads back to itself"):
        find_checkpoint(circle)  # as train.start_from does
    with pytest.raises(UserError, match="is a link that leads back to itself"):
        token_path(str(circle))
    rows = "".join(json.dumps({"id": n, "q": "<image> How many?", "a": "3", "i": f"{n}.png"}) + "\n" for n in "ab")
    (raw := tmp_path / "raw").mkdir()
    (raw / "rows.jsonl").write_text(rows)
    (raw / "a.png").symlink_to("a.png")
    Image.new("RGB", (32, 32)).save(raw / "b.png")
    columns = {"question": "q", "answer": "a", "id": "id", "images": "i"}
    (raw / "set.yaml").write_text(json.dumps({"path": "rows.jsonl", "source": "mine", "columns": columns}))
    assert main(["prepare", "generic", "--source", str(raw / "set.yaml"), "--out", str(tmp_path / "set")]) == 0
    assert "2 rows in, 1 kept" in capsys.readouterr().out


def test_a_path_that_a_shell_left_as_it_is_begins_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands ~ in --out=~/set."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "rows.csv").write_text("question,answer\nhow many?,3\n")
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "~/rows.csv", "--out=$HOME/set"]) == 0
    assert check_is_set(tmp_path / "home" / "set").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_run_that_cannot_be_read_leaves_the_others(built: Path, tmp_path: Path) -> None:
    """Whatever parsing raises: its own errors, recursion, a type that nobody thought of."""
    runs = [Path(shutil.copytree(built, tmp_path / name)) for name in ("good", "deep", "odd", "binary")]
    (runs[1] / "eval" / "toy-test" / "step-000000.json").write_text("[" * 100_000)
    (runs[2] / "eval" / "toy-test" / "step-000000.json").write_text("[1, 2]")
    (runs[3] / "config.yaml").write_bytes(b"\xff\x00\xfe")
    library = Library(runs)
    assert list(library.runs) == ["good"]
    assert [fault.partition(" ")[0] for fault in library.faults] == ["deep", "odd", "binary"]


@pytest.mark.parametrize(
    "words",
    [
        ["grade", "--file", "PIPE", "--out", "graded.jsonl"],
        ["grade", "--file", "golds.jsonl", "--out", "PIPE"],
        ["demo", "RUN", "--port", "1", "--token-file", "PIPE"],
        ["report", "RUN", "--out", "DEVICE"],
        ["eval", "compare", "RUN", "PIPE"],
    ],
    ids=" ".join,
)
def test_an_option_that_names_a_pipe_or_a_device_is_refused(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Whatever opens a pipe waits for ever, and a page would take the place of a device."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "golds.jsonl").write_text('{"gold": "7", "response": "7"}\n')
    os.mkfifo("PIPE")
    Path("DEVICE").symlink_to("/dev/full")
    Path("RUN").symlink_to(built)
    assert main(words) == 2
    assert f"{'DEVICE' if 'DEVICE' in words else 'PIPE'} is no file" in capsys.readouterr().err
    assert Path("DEVICE").is_symlink()


@pytest.mark.parametrize("read", [read_token, read_addresses, read_prompt], ids=lambda read: read.__name__)
def test_a_file_that_a_key_names_is_no_pipe(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """`rollout.server_token`, `rollout.servers` and `reward.judge.prompt`."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no file"):
        read(tmp_path / "pipe")


def test_a_pipe_in_a_model_folder_is_found_where_no_weights_are_needed(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    data = write_problems([Problem("one", "How many?", (), "1", "integer")], tmp_path / "set")
    assert main(["init", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "recipe.yaml")]) == 2
    assert f"{model / 'model.safetensors'} is no file" in capsys.readouterr().err
