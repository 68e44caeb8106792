"""The command line: a user's mistake is one message, exit code 2, and nothing left behind."""

from __future__ import annotations

import argparse
import errno
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open

import vlm_rl
from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Runner
from vlm_rl import cli
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.commands import measuring, reporting
from vlm_rl.commands.missing_library import install_advice
from vlm_rl.commands.refusal import refuse
from vlm_rl.config import parse_config
from vlm_rl.data.images import encode_png
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.errors import DISK_ERRORS, FILE_LIMITS, UserError, is_any_of
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.virl_layout import write_virl
from vlm_rl.types import Problem

COMMANDS = (
    *("prepare", "init", "config", "plan", "sft", "train", "serve", "eval", "score", "grade", "study", "paper"),
    *("report", "demo", "track", "export", "quickstart", "doctor"),
)
PICTURE = encode_png(Image.new("RGB", (56, 56), "red"))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a command that must fail as a user's mistake; returns its message."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        before = snapshot(tmp_path)
        assert cli.main([str(argument) for argument in arguments]) == 2
        return only_message(capsys.readouterr().err, before, tmp_path)

    return run


def only_message(stderr: str, before: dict[str, bytes | None], folder: Path) -> str:
    assert "Traceback" not in stderr
    messages = [line for line in stderr.splitlines() if line.startswith("vlm-rl: ")]
    assert len(messages) == 1, stderr
    assert stderr.rstrip().splitlines()[-1] == messages[0], "the message comes last and is one line"
    assert snapshot(folder) == before, "something was left behind"
    return messages[0]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def toy_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four prepared problems with a picture each."""
    raw = tmp_path_factory.mktemp("raw") / "virl"
    rows = [{"question": f"<image>How many? ({n})", "image": ["images/a.png"]} for n in range(4)]
    write_virl(raw, rows, {"a.png": PICTURE})
    out = tmp_path_factory.mktemp("sets") / "four"
    prepare("virl39k", raw, out)
    return out


def training(tmp_path: Path, model: Path, data: Path, **sections: str) -> Path:
    """A small valid configuration file; keyword arguments are more lines."""
    lines = [
        f"out: {tmp_path / 'run'}",
        f"model: {{path: {model}}}",
        f"data: {{train: [{data}], max_prompt_tokens: 256}}",
        "rollout: {sampler: transformers, prompts_per_step: 2, responses_per_prompt: 2, max_tokens: 8}",
        "reward: {overlong_buffer: 4}",
        "train: {steps: 1, mini_batch_prompts: 2, micro_batch_tokens: 512}",
    ]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


# -- help ------------------------------------------------------------------------------------------


def test_the_commands_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^    (\w+)\b", shown, re.M) == list(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "eval compare", "eval export", "eval protocols"])
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert f"usage: vlm-rl {command}" in capsys.readouterr().out


def test_the_old_name_of_study_works_and_says_so(refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused("study", "nowhere.yaml")
    assert cli.main(["compare", "nowhere.yaml"]) == 2
    note, message = capsys.readouterr().err.splitlines()
    assert "vlm-rl study" in note and "nowhere.yaml" in message


def test_evaluating_needs_a_model_sets_and_a_folder(refused) -> None:
    assert "--model" in refused("eval")
    assert "--out" in refused("eval", "--model", "m", "--data", "compare")  # a set may bear an action's name


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "vlm_rl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vlm-rl {vlm_rl.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["eval", "--model"],
        ["prepare"],
        ["quickstart", "--seeds", "0,b"],
        ["quickstart", "--seed", "-1"],
        ["demo", "--port", "70000"],
    ],
)
def test_a_command_that_cannot_be_understood_exits_with_2(arguments: Sequence[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: vlm-rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sampels", "4"], "there is no --sampels; did you mean --samples?"),
        (["--sampels=4"], "there is no --sampels; did you mean --samples?"),
        (["--qqq", "4"], "there is no --qqq; --help lists all"),
        (["--batch", "x"], "invalid int value: 'x'"),  # the beginning of an option's name is enough
    ],
)
def test_an_unknown_option_of_eval_is_named_and_not_its_value(words: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--model", "m", "--data", "d", *words])
    assert told in capsys.readouterr().err


def test_each_command_has_two_examples_that_it_understands() -> None:
    commands = cli._parser()._subparsers._group_actions[0].choices
    for name, command in commands.items():
        _, *examples = command.format_help().partition("examples:")[2].split("\n  ")
        assert len(examples) == 2, name
        for example in examples:
            program, *words = shlex.split(example)
            options, rest = cli._parser().parse_known_args(words)
            assert program == "vlm-rl" and callable(options.command), example
            assert all("=" in word for word in rest), (example, rest)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["trian"], "train"), (["dmo"], "demo"), (["eval", "--sampler", "vlm"], "vllm")],
)
def test_a_near_miss_is_asked_for(arguments: Sequence[str], meant: str, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "installs"),
    [
        ("deepspeed", "pip install deepspeed"),
        ("deepspeed.ops", "pip install deepspeed"),
        ("gradio", "pip install gradio markdown-it-py tokenizers"),
        ("markdown_it.token", "pip install markdown-it-py gradio tokenizers"),
        ("PIL", "pip install pillow"),
        ("nobody_s_module", None),
        ("vlm_rl.missing", None),
        ("", None),
    ],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(module: str, installs: str | None) -> None:
    advice = install_advice(module)
    assert advice is None if installs is None else advice is not None and advice.endswith(installs)


def test_a_command_without_its_library_is_one_line() -> None:
    code = "import sys; sys.modules['gradio'] = None; from vlm_rl import cli; sys.exit(cli.main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    said = "gradio is not installed, and this command needs it: pip install gradio markdown-it-py tokenizers"
    assert done.stderr == f"vlm-rl: {said}\n"


def test_no_heavy_library_is_loaded_before_the_arguments_are_parsed() -> None:
    code = """
import sys
import vlm_rl
from vlm_rl import cli
try:
    cli.main(["train", "--help"])
except SystemExit:
    assert not {"torch", "transformers", "numpy", "pydantic", "gradio", "vllm"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_place_that_cannot_be_written_is_a_message(refused, tmp_path: Path) -> None:
    """Whatever the command: what the file system refuses about a path is the user's to change."""
    (tmp_path / "golds.jsonl").write_text('{"id": "1", "options": [], "answer": "1"}')
    (tmp_path / "answers.json").write_text('[{"id": 1, "response": "1"}]')
    (tmp_path / "file").write_text("")
    message = refused(
        "score",
        "--benchmark=mathvision",
        *("--annotations", tmp_path / "golds.jsonl", "--responses", tmp_path / "answers.json"),
        *("--json", tmp_path / "file" / "scores.json"),
    )
    assert f"{tmp_path / 'file'}" in message and "choose a different one" in message


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_grade", lambda options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["grade", "--gold", "1", "--response", "1"])


# -- prepare -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "images", "words"),
    [
        ({"question": "<image>?", "image": ["images/a.png"]}, {"a.png": b"no picture"}, ["row 1", "image 0"]),
        ({"question": "<image>?", "image": ["images/a.png"]}, {"a.png": PICTURE[:60]}, ["row 1", "image 0"]),
        ({"question": "<image>?", "image": ["images/b.png"]}, {}, ["row 1", "images/b.png"]),
        ({"question": "<image> <image>?", "image": ["images/a.png"]}, {"a.png": PICTURE}, ["row 1", "2", "1 images"]),
        ({"question": "?", "answer": ""}, {}, ["row 1", "answer"]),
        ({"question": "?", "answer": None}, {}, ["row 1", "answer"]),
    ],
    ids=["unreadable", "cut", "missing", "markers", "empty-answer", "no-answer"],
)
def test_a_bad_row_stops_a_strict_preparation(refused, tmp_path: Path, row, images, words) -> None:
    raw = write_virl(tmp_path / "raw", [{"question": "good"}, {**row, "qid": "bad"}], images)
    message = refused("prepare", "virl39k", "--source", raw, "--out", tmp_path / "out" / "set", "--strict")
    assert all(word in message for word in ["39Krelease.parquet", *words]), message


def test_a_bad_row_is_counted_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_virl(tmp_path / "raw", [{"question": "good"}, {"question": "bad", "answer": ""}], {})
    assert cli.main(["prepare", "virl39k", "--source", str(raw), "--out", str(tmp_path / "set")]) == 0
    assert "2 rows in, 1 kept, dropped: 1 answer_missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["virl", "--source", "raw", "--out", "set"], ["'virl'", "virl39k"]),
        (["virl39k", "--source", "nowhere", "--out", "set"], ["nowhere", "does not exist"]),
        (["virl39k", "--source", "raw", "--out", "file/set"], ["file/set", "cannot be written"]),
        (["virl39k", "--source", "raw", "--out", "file"], ["file", "already exists"]),
        (["virl39k", "--source", "raw", "--out", "set", "--max-pixels", "10"], ["10"]),
    ],
)
def test_what_cannot_be_prepared(refused, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    write_virl(tmp_path / "raw", [{"question": "good"}], {})
    (tmp_path / "file").write_text("")
    message = refused("prepare", *arguments)
    assert all(word in message for word in words), message


# -- train: what is seen before anything is loaded ---------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=nowhere/model", ["nowhere/model", "download"]),
        ("data.train=[nowhere/set]", ["nowhere/set", "vlm-rl prepare"]),
        ("train.mini_batch_prompts=3", ["train.mini_batch_prompts (3)", "rollout.prompts_per_step (2)"]),
        ("train.micro_batch_tokens=4", ["train.micro_batch_tokens (4)", "rollout.max_tokens (8)"]),
        ("train.lrr=1", ["train.lrr", "'lr'"]),
        ("algorithm.name=lupso", ["lupso", "'luspo'"]),
        ("data.max_pixels=2000000", ["max_pixels", "1003520", "2000000"]),
    ],
)
def test_what_training_refuses_at_once(
    refused, tmp_path: Path, tiny_model: Path, toy_set: Path, override: str, words: list[str]
) -> None:
    message = refused("train", training(tmp_path, tiny_model, toy_set), override)
    assert all(word in message for word in words), message


def test_rows_of_a_benchmark_are_refused(refused, tmp_path: Path, tiny_model: Path) -> None:
    problem = Problem("m-1", "What?", (), "1", "integer", source="mathvision", meta={"test_only": True})
    data = write_problems([problem], tmp_path / "set", {})
    message = refused("train", training(tmp_path, tiny_model, data))
    assert "mathvision" in message and "data.allow_test_rows=true" in message


def test_resuming_what_is_not_there(refused, tmp_path: Path, tiny_model: Path, toy_set: Path) -> None:
    message = refused("train", training(tmp_path, tiny_model, toy_set), "--resume")
    assert str(tmp_path / "run") in message


def test_a_dry_run_needs_neither_data_nor_weights(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).resolve().parents[2] / "configs" / "virl39k_luspo_7b.yaml"
    assert cli.main(["train", str(recipe), "--dry-run", "--ranks", "8"]) == 0
    shown = capsys.readouterr().out
    assert "8.29 B parameters" in shown and "ZeRO 2 on 8 ranks" in shown
    assert list(tmp_path.iterdir()) == []


# -- train: what is seen later, in a process of its own ------------------------------------------------


@pytest.fixture
def refused_alone(runner: Runner, tmp_path: Path) -> Callable[..., str]:
    """Run a command in its own process; it must be refused as `refused` says. Returns the message."""

    def run(*arguments: object) -> str:
        before = snapshot(tmp_path)
        result = runner(*arguments)
        assert result.code == 2, result.output
        return only_message(result.output, before, tmp_path)

    return run


def test_a_response_limit_above_the_context(refused_alone, tmp_path: Path, tiny_model: Path, toy_set: Path) -> None:
    config = training(tmp_path, tiny_model, toy_set)
    message = refused_alone("train", config, "rollout.max_tokens=40000", "train.micro_batch_tokens=50000")
    assert "rollout.max_tokens" in message and "40256" in message and "32768" in message


def test_an_output_folder_that_cannot_be_written(
    refused_alone, tmp_path: Path, tiny_model: Path, toy_set: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = training(tmp_path, tiny_model, toy_set)
    message = refused_alone("train", config, f"out={tmp_path / 'file' / 'run'}")
    assert "file/run" in message and "choose a different place" in message


def test_a_run_directory_that_exists(refused_alone, tmp_path: Path, tiny_model: Path, toy_set: Path) -> None:
    config = training(tmp_path, tiny_model, toy_set)
    tree = {"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}}
    RunDirectory(tmp_path / "run").create(parse_config(tree))
    message = refused_alone("train", config)
    assert str(tmp_path / "run") in message and "--resume" in message


# -- eval ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], ["nowhere", "download"]),
        (["--data", "nowhere"], ["nowhere", "vlm-rl prepare"]),
        (["--template", "free"], ["'free'", "think_answer"]),
        (["--samples", "4"], ["--samples", "4", "--temperature"]),
        (["--samples", "0"], ["--samples", "0"]),
        (["--temperature", "-1"], ["--temperature", "-1"]),
        (["--temperature", "nan"], ["--temperature", "nan"]),
        (["--top-p", "0"], ["--top-p", "0"]),
        (["--max-tokens", "40000"], ["--max-tokens", "44096", "32768"]),
        (["--out", "other"], ["other", "neither an empty folder"]),
        (["--out", "run"], ["run", "four", "step 0", "already"]),
    ],
)
def test_what_cannot_be_evaluated(
    refused, tmp_path: Path, tiny_model: Path, toy_set: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("mine")
    tree = {"out": "run", "model": {"path": "x"}, "data": {"train": ["x"]}}
    RunDirectory(tmp_path / "run").create(parse_config(tree)).write_eval("four", 0, [], {"accuracy": 0.0})
    message = refused("eval", "--model", tiny_model, "--data", toy_set, "--out", "new", *arguments)
    assert all(word in message for word in words), message


def test_two_sets_of_one_name_are_refused(refused, tmp_path: Path, tiny_model: Path, toy_set: Path) -> None:
    message = refused("eval", "--model", tiny_model, "--data", toy_set, toy_set, "--out", "new")
    assert "'four'" in message


@pytest.mark.slow
def test_an_evaluation_can_be_reported(runner: Runner, tmp_path: Path, tiny_model: Path, toy_set: Path) -> None:
    out = tmp_path / "results"
    base = ["eval", "--model", tiny_model, "--data", toy_set, "--out", out, "--max-tokens", 8]
    done = runner(*base, "--sampler", "transformers", "--temperature", "1.0", "--samples", 3)
    assert done.code == 0, done.output
    [result] = RunDirectory(out).open().evals()
    assert (result.benchmark, result.step, result.rows().num_rows) == ("four", 0, 12)
    assert result.summary["num_problems"] == 4 and result.summary["k"] == 3
    line = [line for line in done.output.splitlines() if line.startswith("four:")][-1]
    assert f"avg@3 {result.summary['accuracy']:.3f} [" in line and "n 4" in line
    assert f"box {result.summary['box_share']:.2f}" in line
    assert f"truncated {result.summary['truncated_share']:.2f}" in line
    blank = runner(*base, "--sampler", "transformers", "--images", "blank")
    assert blank.code == 0, blank.output
    assert [result.benchmark for result in RunDirectory(out).evals()] == ["four", "four-blank"]
    assert cli.main(["report", str(out), "--out", str(tmp_path / "report.html")]) == 0
    assert "this folder holds no training" in (tmp_path / "report.html").read_text()


# -- the others ----------------------------------------------------------------------------------------


def test_grading_one_response(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grade", "--gold", "1/2", "--response", r"So \boxed{0.5}"]) == 0
    shown = capsys.readouterr().out
    assert "extracted: 0.5" in shown and "verdict: correct" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["grade", "--gold", "1", "--response", "1", "--template", "free"], ["'free'", "think_answer"]),
        (["report", "nowhere"], ["nowhere", "vlm-rl train"]),
        (["report", "other"], ["other", "config.yaml"]),
        (["report", "run", "--out", "file/report.html"], ["file/report.html"]),
        (["demo", "nowhere"], ["nowhere"]),
        (["demo", "run"], ["no evaluation"]),
        (["quickstart", "--out", "other"], ["other exists already", "remove it,", "--out"]),
        (["quickstart", "--out", "stopped"], ["stopped-data exists already", "remove it,", "--out"]),
        (["quickstart", "--out", "run", "--tools"], ["run, run-data exist already", "remove them,", "--out"]),
        (["quickstart", "--algorithm", "ppo"], ["'ppo'", "known names: grpo"]),
    ],
)
def test_other_mistakes(refused, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    for name in ("other", "stopped-data", "run-data"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    tree = {"out": "run", "model": {"path": "x"}, "data": {"train": ["x"]}}
    RunDirectory(tmp_path / "run").create(parse_config(tree))
    message = refused(*arguments)
    assert all(word in message for word in words), message


def test_a_message_goes_to_stderr_and_stdout_stays_empty(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise UserError("the place: what is wrong; the next step")

    monkeypatch.setattr(reporting, "_report", fail)
    assert cli.main(["report", "x"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "vlm-rl: the place: what is wrong; the next step\n")


def test_a_reader_that_went_away_is_no_fault() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vlm_rl", "grade", "--gold", "1", "--response", r"\boxed{1}"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_overrides_may_stand_behind_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).resolve().parents[2] / "configs" / "virl39k_luspo_7b.yaml")
    assert cli.main(["train", recipe, "--dry-run", "algorithm.name=lupso"]) == 2
    assert "did you mean 'luspo'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", recipe, "--dry-run", "--rnaks=8"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --rnaks=8" in capsys.readouterr().err


def test_a_full_disk_below_standard_output_is_one_message() -> None:
    words = [sys.executable, "-m", "vlm_rl", "grade", "--gold", "1", "--response", "1"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("vlm-rl: [Errno 28] No space left on device: free some space"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EIO, "make the place writable"), (errno.EMFILE, "allow more open files")],
)
def test_what_the_system_refuses_is_one_message(
    number: int, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise OSError(number, os.strerror(number), "page.html")

    monkeypatch.setattr(reporting, "_report", refuse)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)  # it would be pytest's
    assert cli.main(["report", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"vlm-rl: [Errno {number}] {os.strerror(number)}: 'page.html': ") and advice in said
    assert said.count("\n") == 1


# -- started without torchrun --------------------------------------------------------------------------


def started_by_srun(tasks: int, nodes: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as srun starts a task; it may import nothing heavy before it refuses."""
    code = """
import sys
from vlm_rl import cli
sys.argv = ["vlm-rl", *sys.argv[1:]]
code = cli.main()
assert "torch" not in sys.modules and "transformers" not in sys.modules, "imported before the refusal"
sys.exit(code)
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_NTASKS": "8"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_several_tasks_of_srun_without_torchrun_are_refused_with_the_right_command() -> None:
    one = started_by_srun(8, 1, "train", "recipe.yaml", "out=my runs/a")
    assert one.returncode == 2 and one.stdout == "", one.stderr
    assert (
        "srun --ntasks 1 --ntasks-per-node 1 torchrun --nproc-per-node 8 --shutdown-timeout 1800 "
        "-m vlm_rl train recipe.yaml 'out=my runs/a'"
    ) in one.stderr
    two = started_by_srun(16, 2, "eval", "--model", "m", "--data", "d", "--out", "o")
    assert two.returncode == 2, two.stderr
    assert "--ntasks 2 --ntasks-per-node 1 torchrun --nproc-per-node 8" in two.stderr and "--nnodes 2" in two.stderr


@pytest.mark.parametrize(
    ("tasks", "variables"),
    [(1, {}), (8, {"RANK": "0"})],
    ids=["a batch script of a larger job", "torchrun below srun"],
)
def test_one_task_and_torchrun_are_not_refused(tasks: int, variables: dict[str, str]) -> None:
    process = started_by_srun(tasks, 1, "train", "missing.yaml", **variables)
    assert "missing.yaml" in process.stderr and "srun" not in process.stderr


# -- help ------------------------------------------------------------------------------------------


def test_help_explains_every_option_with_its_default() -> None:
    parsers = {"": cli._parser()}
    for name, parser in [*parsers.items()]:
        parsers |= _commands(name, parser)
    for name, parser in [*parsers.items()]:
        parsers |= _commands(name, parser)
    for name, parser in parsers.items():
        text = " ".join(parser.format_help().split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) or action.default == argparse.SUPPRESS:
                continue
            assert action.help, (name, action.dest)
            if isinstance(action.default, str | int | float) and action.default not in ("", False):
                assert f"(default: {action.default}" in text, (name, action.dest)


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [("quickstart", "--algorithm", ALGORITHMS), ("score", "--benchmark", BENCHMARKS)],
    ids=["quickstart", "score"],
)
def test_help_lists_the_names_that_an_option_takes(command: str, option: str, names: Iterable[str]) -> None:
    parser = _commands("", cli._parser())[f" {command}"]
    said = next(action.help for action in parser._actions if option in action.option_strings)
    assert said is not None
    assert set(re.findall(r"[a-z0-9_]+", said.partition(":")[0])) - {"or"} == set(names)


def _commands(name: str, parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {f"{name} {inner}": child for commands in found for inner, child in commands.items()}


def test_a_rank_that_refuses_alone_says_so_and_waits_no_longer_than_it_must(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait in a collective and never come; two ranks with different reasons are both heard."""
    monkeypatch.setattr("vlm_rl.commands.refusal._PATIENCE", 0.1)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank, message in (("0", "no model"), ("1", "no data")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert refuse(message) == 2
    assert capsys.readouterr().err == "vlm-rl: no model\nvlm-rl: no data\n"


def test_a_rank_that_refuses_last_may_find_that_the_others_have_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first to see all of them removes the folder where they meet, while another one reads it."""
    look = os.scandir

    def looks_late(folder: str | Path) -> Any:
        monkeypatch.setattr("os.scandir", look)
        shutil.rmtree(folder)
        return look(folder)

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.scandir", looks_late)
    assert refuse("no model") == 2 and os.scandir is look
    assert capsys.readouterr().err == "vlm-rl: no model\n"


def test_a_process_leaves_its_ranks_at_its_end_and_not_before() -> None:
    """NCCL warns of one that does not. An engine that is still there would look for its groups in vain."""
    code = (
        "import atexit, torch.distributed as dist\n"
        "from vlm_rl.cli import main\n"
        "from vlm_rl.distributed import init_ranks\n"
        "atexit.register(lambda: print('at the end', dist.is_initialized()))\n"
        "init_ranks()\n"
        "assert main(['config', 'rollout.top_k']) == 0\n"
        "print('after a command', dist.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["after a command True", "at the end False"], done.stderr


def test_a_library_that_hides_the_number_of_an_error_is_understood(tiny_model: Path) -> None:
    """Safetensors opens a file twice, and raises a RuntimeError where there is no descriptor for the second time."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, high))
    try:
        with pytest.raises(RuntimeError) as caught:
            safe_open(tiny_model / "model.safetensors", framework="pt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))
    assert is_any_of(FILE_LIMITS, caught.value) and not is_any_of(DISK_ERRORS, caught.value)
    assert not is_any_of(FILE_LIMITS, OSError(errno.EIO, "Too many open files"))
