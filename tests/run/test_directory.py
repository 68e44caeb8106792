"""The run directory: what is written comes back, and a kill at any byte costs at most one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import disks
from tests.helpers.example_run import build_run
from tests.helpers.rollout_rows import CONFIG, rollout_row
from vlm_rl.errors import UserError
from vlm_rl.run.best import best_of
from vlm_rl.run.directory import (
    EVAL_SCHEMA,
    RunDirectory,
    distinct_names,
    write_atomically,
)
from vlm_rl.run.rollout_row import ROLLOUT_SCHEMA, RolloutRow


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create(CONFIG)


def test_create_stores_the_config(run):
    assert run.config() == CONFIG
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert run.open() is run


def test_create_takes_an_empty_folder(tmp_path):
    (tmp_path / "run").mkdir()
    assert RunDirectory(tmp_path / "run").create(CONFIG).config() == CONFIG


def test_create_follows_a_link_to_an_empty_folder(tmp_path):
    """As to a larger disk."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    run = RunDirectory(tmp_path / "run")
    run.check_new()
    assert run.create(CONFIG).open().config() == CONFIG
    assert run.path.is_symlink() and [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]
    assert [path.name for path in (tmp_path / "disk" / "run").iterdir()] == ["config.yaml"]


def test_create_refuses_a_run_and_says_resume(run):
    before = run.config_text()
    with pytest.raises(UserError, match=r"--resume"):
        RunDirectory(run.path).create(CONFIG)
    assert run.config_text() == before


def test_create_refuses_a_filled_folder_and_a_file(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("folder", "file"):
        with pytest.raises(UserError, match=name):
            RunDirectory(tmp_path / name).create(CONFIG)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "thesis.txt"]


def test_create_in_an_impossible_place_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot write the run directory"):
        RunDirectory(tmp_path / "file" / "below" / "run").create(CONFIG)
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory(tmp_path / "new" / "parents" / ("x" * 300)).create(CONFIG)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_open_names_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        RunDirectory(tmp_path / "nothing").open()
    with pytest.raises(UserError, match=r"no config\.yaml"):
        RunDirectory(tmp_path).open()


def test_what_lies_in_a_folder_that_is_no_run_is_not_looked_at(tmp_path):
    """Such as a home folder, with its sockets and a million files."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"{tmp_path} is not a run directory: it has no config.yaml"):
        RunDirectory(tmp_path).open()
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml is no file \(a pipe"):
        RunDirectory(tmp_path).open()


def test_metrics_of_the_last_attempt_win(run):
    run.append_metrics(1, 1, {"reward": 0.1, "old": 1.0})
    run.append_metrics(2, 1, {"reward": 0.2})
    run.append_metrics(1, 2, {"reward": 0.9})  # step 1 again after a resume
    run.append_metrics(1, 2, {"eval": 0.5})  # a second line of the same attempt adds its keys
    assert run.metrics() == [
        {"step": 1, "attempt": 2, "reward": 0.9, "eval": 0.5},
        {"step": 2, "attempt": 1, "reward": 0.2},
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from("ab"), st.floats(-1e300, 1e300))))
def test_metrics_equal_a_plain_reading(tmp_path_factory, lines):
    run = RunDirectory(tmp_path_factory.mktemp("m"))
    for step, attempt, key, value in lines:
        run.append_metrics(step, attempt, {key: value})
    expected = []
    for step in sorted({line[0] for line in lines}):
        last = max(attempt for s, attempt, _, _ in lines if s == step)
        values = {key: value for s, attempt, key, value in lines if s == step and attempt == last}
        expected.append({"step": step, "attempt": last, **values})
    assert run.metrics() == expected


def test_values_that_are_not_finite_stay_valid_json(run):
    run.append_metrics(1, 1, {"a": math.nan, "b": math.inf, "c": 2})
    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line == {"step": 1, "attempt": 1, "a": None, "b": None, "c": 2.0}
    (read,) = run.metrics()
    assert math.isnan(read["a"]) and math.isnan(read["b"]) and read["c"] == 2.0


def test_a_log_cut_at_any_byte_reads_and_continues(run):
    for step in (1, 2, 3):
        run.append_metrics(step, 1, {"reward": step / 10})
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)  # a line counts even if only its newline is gone
        assert len(run.metrics()) == complete, cut
        run.append_metrics(9, 2, {"reward": 0.9})
        assert path.read_bytes().startswith(whole[:cut])  # never truncated
        assert [m["step"] for m in run.metrics()] == [*range(1, complete + 1), 9], cut


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00garbage",
        b'{"step": 2',
        b"[" * 100_000,
        b'{"step": Infinity, "attempt": 1, "reward": 1}',
        b'{"step": 2, "attempt": 1e400}',
        b'{"step": 2, "attempt": 99999999999, "reward": 1}',
        b'{"step": -2, "attempt": 1}',
        b'{"step": 2, "attempt": true}',
        b'{"step": 2, "attempt": 2, "reward": "high"}',
        b'{"step": 2, "attempt": 2, "reward": [1]}',
        b'{"step": 2, "attempt": 2, "reward": 1' + b"0" * 400 + b"}",
        b'{"attempt": 2}',
        b"7",
        b"null",
    ],
)
def test_a_damaged_line_of_metrics_is_left_out(run, line):
    run.append_metrics(1, 1, {"reward": 0.1})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    run.append_metrics(2, 1, {"reward": 0.2})
    assert [(m["step"], m["attempt"], m["reward"]) for m in run.metrics()] == [(1, 1, 0.1), (2, 1, 0.2)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\udcff", "[" * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 10_000 + "}"]
)
def test_a_damaged_summary_is_named(run, text):
    run.write_eval("toy", 1, [], {"accuracy": 0.5})
    for name in ("eval/toy/step-000001.json", "controls.json", "CONTAMINATED.json"):
        (run.path / name).write_bytes(text.encode(errors="surrogateescape"))
    for read, name in [(run.evals, "step-000001.json"), (run.controls, "controls"), (run.contaminated, "CONT")]:
        with pytest.raises(UserError, match=f"{name}.* is damaged"):
            read()


@pytest.mark.parametrize("accuracy", ["null", '"x"', "NaN", "1e999", "true", "{}", "9" * 400])
def test_a_summary_without_an_accuracy_is_named(run, accuracy):
    run.write_eval("toy", 1, [], {"accuracy": 0.5})
    (run.path / "eval/toy/step-000001.json").write_text(f'{{"accuracy": {accuracy}}}')
    with pytest.raises(
        UserError, match=r"eval/toy/step-000001.json: its accuracy is .*; delete it, or evaluate again"
    ):
        best_of(run.evals(), {})


@pytest.mark.parametrize("names", ["1.5", "null", '"mathvista"', "[1]"])
def test_a_stamp_that_names_no_benchmarks_is_damaged(run, names):
    (run.path / "CONTAMINATED.json").write_text(f'{{"trained_on_test_rows_of": {names}}}')
    with pytest.raises(UserError, match=r"CONTAMINATED.json is damaged \(it names no list of benchmarks\)"):
        run.contaminated()


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("verdict", pa.array([["x"]]), "column verdict holds list<.*>, not string"),
        ("length", pa.array([1.5]), "column length holds double, not int32"),
        ("length", pa.array([2**40]), "column length holds int64, not int32"),
        ("length", pa.array([None], pa.int32()), "column length has a row without a value"),
        ("text", pa.array([b"\xff"]).view(pa.string()), "column text holds string, not string .*UTF8"),
        ("text", None, "it has 0 columns text"),
    ],
    ids=["another type", "half a token", "too many tokens", "no length", "no UTF-8", "no column"],
)
def test_rollouts_of_other_types_are_named(run, column, values, said):
    path = run.write_rollouts(1, 1, [rollout_row(1)])
    table = pq.read_table(path).drop([column])
    pq.write_table(table if values is None else table.append_column(column, values), path)
    with pytest.raises(UserError, match=f"{path}: {said}.*; delete it to continue without this step"):
        run.rollouts(1)


def test_rollouts_come_back_with_the_fixed_columns(run):
    path = run.write_rollouts(12, 1, [rollout_row(12), rollout_row(12, response_index=1, extracted="4")])
    assert path.relative_to(run.path).as_posix() == "rollouts/step-000012.parquet"
    table = run.rollouts(12)
    assert table.schema.equals(ROLLOUT_SCHEMA)
    first, second = table.to_pylist()
    assert first["text"] == "é <think>\x00" and first["logprobs"] == [-0.5, -0.25, 0.0]
    assert first["extracted"] is None and second["extracted"] == "4"
    assert run.rollouts(12, ["length"]).column_names == ["length"]


def test_damaged_records_are_named(run):
    run.write_rollouts(12, 1, [rollout_row(12)]).write_bytes(b"PAR1")
    run.write_eval("toy", 1, [], {"accuracy": 0.5}).write_bytes(b"")
    (result,) = run.evals("toy")
    for read, name in [(lambda: run.rollouts(12), "rollouts/step-000012"), (result.rows, "eval/toy/step-000001")]:
        with pytest.raises(UserError, match=f"{name}.parquet cannot be read"):
            read()


def test_half_a_surrogate_pair_is_stored_as_a_question_mark(run):
    """A program that returns one is quoted in the grade's reason, and UTF-8 has no place for it."""
    run.write_rollouts(12, 1, [rollout_row(12, extracted="a\ud83d\ude00b")])
    assert run.rollouts(12).to_pylist()[0]["extracted"] == "a??b"


def test_a_later_attempt_replaces_the_rollouts(run):
    run.write_rollouts(3, 1, [rollout_row(), rollout_row()])
    run.write_rollouts(3, 2, [rollout_row(attempt=2)])
    assert run.rollouts(3)["attempt"].to_pylist() == [2]
    assert run.rollout_steps() == [3]
    assert [path.name for path in (run.path / "rollouts").iterdir()] == ["step-000003.parquet"]


def test_a_step_without_responses_is_stored_too(run):
    run.write_rollouts(4, 1, [])
    assert run.rollouts(4).num_rows == 0 and run.rollouts(4).schema.equals(ROLLOUT_SCHEMA)


def test_missing_rollouts_say_which_there_are(run):
    run.write_rollouts(3, 1, [rollout_row()])
    with pytest.raises(UserError, match="no rollouts of step 7; it has steps 3 to 3"):
        run.rollouts(7)


def write_something_of(run: RunDirectory, what: str) -> None:
    if what == "metrics":
        run.append_metrics(1, 1, {"reward": 0.1})
    elif what == "rollouts":
        run.write_rollouts(3, 1, [rollout_row()])
    else:
        run.write_eval("toy", 3, [], {"accuracy": 0.5})


WRITTEN = ("metrics", "rollouts", "eval")


@pytest.mark.parametrize("what", WRITTEN)
def test_a_full_or_a_read_only_disk_is_a_message_with_the_file(tmp_path, what):
    try:
        with disks.small_disk(tmp_path / "small", kilobytes=256) as disk:
            run = RunDirectory(disk / "run").create(CONFIG)
            disks.fill(disk)
            with pytest.raises(UserError, match=rf"run/{what}.* could not be written: .*No space left"):
                write_something_of(run, what)
            (disk / "ballast").unlink()
            write_something_of(run, what)
            before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
            disks.make_read_only(disk)
            with pytest.raises(UserError, match=rf"run/{what}.* could not be written: .*Read-only"):
                write_something_of(run, what)
            assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    except disks.CannotMountError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("what", WRITTEN)
def test_a_run_folder_that_vanished_is_a_message_and_is_not_made_again(run, what):
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match=rf"run/{what}.* could not be written: No such file"):
        write_something_of(run, what)
    assert not run.path.exists()


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(place: Path) -> None:
        place.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_an_error_of_the_disk_names_the_file(tmp_path):
    (tmp_path / f".a.txt.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a.txt'}'"):
        write_atomically(tmp_path / "a.txt", lambda place: place.write_text("new"))


def test_evaluations_come_back_by_benchmark_and_step(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(2, 0))
    run.write_eval("other", 1, [], {"accuracy": 0.0})
    assert [(e.benchmark, e.step) for e in run.evals()] == [("other", 1), ("toy-test", 0), ("toy-test", 2)]
    (last,) = [e for e in run.evals("toy-test") if e.step == 2]
    table = last.rows()
    assert table.schema.equals(EVAL_SCHEMA)
    right = sum(verdict == "correct" for verdict in table["verdict"].to_pylist())
    assert last.summary["accuracy"] == pytest.approx(right / table.num_rows)
    assert table["image"].to_pylist()[0][0].startswith(b"\x89PNG")


def test_mappings_are_taken_as_evaluation_rows(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=(0,))
    rows = [record | {"image": None} for record in run.evals()[0].rows().to_pylist()]
    run.write_eval("copy", 0, rows, {})
    assert run.evals("copy")[0].rows()["image"].null_count == len(rows)
    with pytest.raises(KeyError):  # a row without its columns is a mistake of ours, not a null
        run.write_eval("copy", 0, [{"problem_id": "x"}], {})


def test_an_evaluation_counts_once_its_summary_is_there(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=(0, 1))
    (run.path / "eval/toy-test/step-000001.json").unlink()
    assert [e.step for e in run.evals()] == [0]


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_a_benchmark_is_a_plain_name(run, name):
    with pytest.raises(UserError, match="cannot be stored under the name"):
        run.write_eval(name, 0, [], {})
    assert not (run.path / "eval").exists()


def test_checkpoints_need_a_manifest(run):
    for name in ("step-000010", "step-000002", "step-000020", "notes"):
        (run.path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-000010", "step-000002"):
        (run.path / "checkpoints" / name / "MANIFEST.json").write_text("{}")
    assert [step for step, _ in run.checkpoints()] == [2, 10]


def test_leftovers_go_and_a_mirror_that_lives_on_keeps_its_own(run):
    names = ["eval/.a.json.1.tmp", ".metrics.jsonl.2.tmp", "trackers/.mlflow.json.3.tmp", "config.yaml"]
    for name in names:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    run.remove_leftovers()
    assert [(run.path / name).exists() for name in names] == [False, False, True, True]


def test_contamination_adds_up(run):
    assert run.contaminated() == ()
    run.stamp_contaminated(["MathVision"])
    run.stamp_contaminated(["DynaMath", "MathVision"])
    assert RunDirectory(run.path).contaminated() == ("DynaMath", "MathVision")


def test_controls_come_back(run):
    assert run.controls() == {}
    run.write_controls({"blank_images": 0.1})
    assert run.controls() == {"blank_images": 0.1}


def test_names_tell_runs_apart():
    runs = [RunDirectory(path) for path in ("/x/a/run", "/x/b/run", "/y/b/run")]
    assert distinct_names(runs[:1]) == ["run"]
    assert distinct_names(runs[:2]) == ["a/run", "b/run"]
    assert distinct_names(runs) == ["x/a/run", "x/b/run", "y/b/run"]


def test_the_schemas_are_the_rows_fields():
    assert ROLLOUT_SCHEMA.names == list(RolloutRow.__dataclass_fields__)
    assert pa.schema(list(ROLLOUT_SCHEMA)).field("policy_version").type == pa.int64()


def test_reading_a_run_needs_no_torch():
    code = "import sys, vlm_rl.run.directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
