"""Mistakes that need neither torch nor a model to be seen are answered before either is imported, all at once."""

import json
import logging
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.example_run import build_run
from vlm_rl.config import RewardConfig, load_config, parse_config
from vlm_rl.errors import UserError
from vlm_rl.learner.policy import load_model
from vlm_rl.model_files import model_folder
from vlm_rl.run.checkpoint_names import find_checkpoint, resolve_model
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.run_log import RunLog
from vlm_rl.run.terminal import next_commands
from vlm_rl.session.preflight import preflight, preflight_eval

RUN_ALL = """
import contextlib, io, json, sys
from vlm_rl.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    answers.append([code, said.getvalue(), sorted({"torch", "transformers", "gradio"} & set(sys.modules))])
print(json.dumps(answers))
"""


def test_a_mistake_is_answered_before_a_heavy_import(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"out: {tmp_path}/run\nmodel: {{path: {tmp_path}/model}}\ndata: {{train: [{tmp_path}/a, {tmp_path}/b]}}\n"
    )
    (tmp_path / "file").write_text("")
    train, nowhere = ["train", str(recipe)], str(tmp_path / "nowhere")
    commands: list[tuple[list[str], list[str]]] = [
        (
            train,
            [f"no model folder at {tmp_path}/model", f"{tmp_path}/a is not a prep", f"{tmp_path}/b is not a prep"],
        ),
        (
            [*train, "algorithm.name=ppo"],
            ["algorithm.name is 'ppo'", "no model folder", f"{tmp_path}/b is not a prep"],
        ),
        ([*train, "rollout.responses_per_prompt=1"], ["every advantage would be 0", "no model folder"]),
        ([*train, "--dry-run", "rollout.responses_per_prompt=1"], ["every advantage would be 0"]),
        ([*train, "rollout.responses_per_prompt=1"], ["rollout.responses_per_prompt is 1", "nothing learned"]),
        (
            [*train, "reward.accuracy=0", "reward.format=0", "reward.overlong_buffer=0"],
            ["the weight of every part is 0", "reward.accuracy=1"],
        ),
        ([*train, f"out={tmp_path}/file/run"], ["cannot write the run directory", "no model folder"]),
        ([*train, "--resume"], [f"no run directory at {tmp_path}/run"]),
        ([*train, "--dry-run"], [f"no model folder at {tmp_path}/model, and its name is none of"]),
        (["eval", "--model", nowhere, "--data", nowhere, "--out", "x"], ["no model folder", "is not a prepared set"]),
        (["demo", nowhere], ["no run directory"]),
        (["doctor", "--model", nowhere], ["is not there"]),
        (["doctor", "--config", nowhere], ["is not there"]),
        (["plan", str(recipe)], [f"no model folder at {tmp_path}/model, and its name is none of"]),
        (["plan", str(recipe), "--gpus", "0"], ["--gpus is 0"]),
        (["plan", str(recipe), "--run", nowhere], ["--run and --run-gpus go together"]),
        (["plan", str(recipe), "--lengths", nowhere], ["no run directory"]),
        (["plan", str(recipe), "--plot", "x.jpg"], ["--plot x.jpg", ".png or .html"]),
        (["init", "--model", "m", "--data", nowhere], ["is not a prepared set"]),
        (["export", nowhere, "--out", "x"], ["no run directory"]),
        (["quickstart", "--algorithm", "ppo"], ["algorithm.name is 'ppo'"]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps([words for words, _ in commands])],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=300,
    )
    for (words, expected), (code, said, heavy) in zip(commands, json.loads(done.stdout), strict=True):
        assert (code, heavy) == (2, []), words
        assert [part for part in expected if part not in said] == [], words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "recipe.yaml"], "a refused run leaves nothing"


@pytest.mark.parametrize(
    ("changes", "pays_nothing"),
    [
        ({}, True),
        ({"accuracy": 1}, False),
        ({"overlong_buffer": 8}, False),
        ({"overlong_buffer": 8, "overlong_factor": 0}, True),
        ({"coin": 1}, False),
        ({"repetition": 0.1}, False),
        ({"point_in_box": {"weight": 0.5}}, False),
        ({"point_in_box": {"weight": 0}}, True),
        ({"iou": {"role": "accuracy"}}, True),  # it decides what reward.accuracy pays, which is nothing
        ({"functions": {"own": {"path": "a.b", "role": "logged"}}, "allow_function": True}, True),
        ({"functions": {"own": {"path": "a.b", "weight": -1}}, "allow_function": True}, False),
        ({"function": "a.b", "allow_function": True}, False),
    ],
)
def test_a_reward_whose_parts_all_weigh_nothing_is_known_before_a_run(
    changes: dict[str, Any], pays_nothing: bool
) -> None:
    values: dict[str, Any] = {"accuracy": 0, "format": 0, "overlong_buffer": 0} | changes
    assert RewardConfig(**values).pays_nothing is pays_nothing


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = build_run(tmp_path / "run", steps=1, eval_steps=())
    for step in (2, 10):
        folder = made.path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "MANIFEST.json").write_text("{}")
    (made.path / "checkpoints" / "latest").write_text("step-000010\n")
    return made


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("", 10),
        ("latest", 10),
        ("checkpoints/latest", 10),
        ("2", 2),
        ("checkpoints", 10),
        ("checkpoints/step-000002", 2),
    ],
)
def test_a_run_may_be_named_where_a_model_is_wanted(run: RunDirectory, name: str, step: int) -> None:
    folder = run.path / "checkpoints" / f"step-{step:06d}"
    assert resolve_model(run.path / name) == folder
    assert find_checkpoint(run.path / name)[1] == folder


def test_a_checkpoint_that_a_run_does_not_have(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint of step 3: it has 2, 10"):
        resolve_model(run.path / "3")
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint: it has none"):
        resolve_model(run.path)
    assert resolve_model(tmp_path / "elsewhere") == tmp_path / "elsewhere"  # what it is, others say


def test_a_resume_names_every_mistake_but_not_the_model(run: RunDirectory) -> None:
    """The checkpoint has taken the model's place; a set that is gone and a key that was changed are named."""
    config = load_config(run.path / "config.yaml")
    config = config.model_copy(update={"seed": config.seed + 1})
    with pytest.raises(UserError) as refusal:
        preflight(config, resume=True)
    assert "cannot resume with a different seed" in str(refusal.value)
    assert "is not a prepared set" in str(refusal.value) and "model" not in str(refusal.value)


def test_the_log_holds_what_is_shown_what_libraries_warn_of_and_the_end(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.info("step 1/2  \x1b[31mred")
    logging.getLogger("some.library").warning("careful")
    log.failure(ValueError("broken"))
    log.close()
    logging.getLogger("some.library").warning("too late")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].endswith("INFO vlm_rl: step 1/2  <1b>[31mred")
    assert lines[1].endswith("WARNING some.library: careful")
    assert lines[2].endswith("ERROR vlm_rl: the run ended: broken") and lines[-1] == "ValueError: broken"


def test_what_the_disk_refuses_of_the_log_ends_the_run_in_a_message(tmp_path: Path) -> None:
    """A library's warning meets the full disk first, and must not fail in the library."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log = RunLog(tmp_path)
    logging.getLogger("some.library").warning("careful")
    with pytest.raises(UserError, match=r"log\.txt could not be written: No space left on device: .* then resume"):
        log.info("step 1/2")
    log.failure(ValueError("broken"))
    log.close()


def test_the_next_commands_can_be_pasted() -> None:
    said = next_commands("my runs/a", ["data/held out"])
    assert "vlm-rl eval --model 'my runs/a' --data 'data/held out' --out 'my runs/a-eval'" in said
    assert "vlm-rl demo 'my runs/a'" in said and "vlm-rl report 'my runs/a' --out 'my runs/a/report.html'" in said


def test_nothing_is_downloaded_for_a_run_that_cannot_start(tmp_path: Path) -> None:
    """Without a network the download would be refused; what is listed is the missing set alone."""
    config = parse_config(
        {"out": str(tmp_path / "run"), "model": {"path": "Org/Tiny"}, "data": {"train": [str(tmp_path / "absent")]}},
        where="the recipe",
    )
    with pytest.raises(UserError, match="absent") as refused:
        preflight(config, resume=False)
    assert "Org/Tiny" not in str(refused.value)


def test_a_transformers_that_ignores_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run, before an evaluation, and where a model is loaded."""
    config = parse_config(
        {"out": str(tmp_path / "run"), "model": {"path": str(tmp_path)}, "data": {"train": [str(tmp_path)]}},
        where="the recipe",
    )
    for command in (
        lambda: preflight(config, resume=False),
        lambda: preflight_eval(tmp_path, [tmp_path], sampler="auto", tensor_parallel=1),
        lambda: load_model(tmp_path, dtype=torch.float32),
    ):
        monkeypatch.setattr(model_folder, "version", lambda _: "5.17.0")
        with pytest.raises(UserError, match=r"transformers 5\.17\.0 is too old.*: install transformers>=5\.18"):
            command()
        for new_enough in ("5.18.0rc1", "5.19.0", "6.0"):
            monkeypatch.setattr(model_folder, "version", lambda _, known=new_enough: known)
            with pytest.raises((UserError, OSError, ValueError)) as refused:  # there is no model
                command()
            assert "too old" not in str(refused.value)


def test_the_package_asks_for_the_transformers_that_it_accepts() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "transformers>=" + ".".join(map(str, model_folder.OLDEST_TRANSFORMERS)) in project["dependencies"]
