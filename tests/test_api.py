"""The public interface: every name resolves, the examples of docs/api.md hold, and grading loads no torch."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vlm_rl

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", vlm_rl.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(vlm_rl, name).__doc__
    assert f"vlm_rl.{name}" in (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_the_version_is_that_of_the_installed_package() -> None:
    assert vlm_rl.__version__ == version("vlm-rl")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="grad_e"):
        vlm_rl.grad_e  # noqa: B018


def test_the_examples_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, "docs/api.md", None, 0)
    assert len(examples.examples) > 20
    report: list[str] = []
    doctest.DocTestRunner().run(examples, out=report.append)
    assert report == []


def test_grading_scoring_and_reading_load_no_torch(tmp_path: Path) -> None:
    code = r"""
import sys
from pathlib import Path
import vlm_rl
assert not {"numpy", "pyarrow", "pydantic"} & set(sys.modules)
assert vlm_rl.grade(r"\boxed{0.5}", "1/2").correct
assert vlm_rl.read_run(sys.argv[1]).metrics()
Path("gold.jsonl").write_text('{"id": "1", "question": "?", "answer": "2"}')
Path("mine.jsonl").write_text(r'{"id": "1", "response": "\\boxed{2}"}')
assert vlm_rl.score("math500", "mine.jsonl", annotations="gold.jsonl")["n"] == 1
assert len(vlm_rl.ALGORITHMS) > 7 and vlm_rl.compute_advantages and vlm_rl.length_metrics and vlm_rl.Belief
assert "torch" not in sys.modules
"""
    recorded = ROOT / "demo" / "assets" / "recorded" / "grpo"
    subprocess.run([sys.executable, "-c", code, str(recorded)], check=True, cwd=tmp_path)


def test_a_gold_may_be_a_number_as_a_data_frame_has_it() -> None:
    golds: list[Any] = [3, 3.0, np.int64(3), np.float64(3), [1, 3], np.array([1, 3])]
    for gold in golds:
        assert vlm_rl.grade(r"\boxed{3}", gold).verdict == "correct", repr(gold)
        assert vlm_rl.grade(r"\boxed{4}", gold).verdict == "wrong", repr(gold)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"template": "free"}, ["'free'", "think_answer"]),
        ({"answer_type": "number"}, ["'number'", "expression"]),
        ({"gold": []}, ["gold"]),
        ({"gold": None}, ["gold is None", "a number"]),
        ({"gold": ["1", None]}, ["gold is ['1', None]"]),
        ({"gold": True}, ["gold is True"]),
    ],
)
def test_a_mistake_names_the_argument_and_what_is_known(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(vlm_rl.UserError) as error:
        vlm_rl.grade(r"\boxed{1}", **{"gold": "1", **arguments})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images": "blnak"}, ["--images", "'blnak'", "shuffled"]),
        ({"mode": "offical"}, ["--mode", "'offical'", "strict"]),
        ({"sampler": "hf"}, ["--sampler", "'hf'", "transformers"]),
        ({"samples": "many"}, ["--samples", "'many'"]),
        ({"seed": -1}, ["--seed", "'-1'"]),
        ({"sampels": 4}, ["'sampels'", "samples"]),
    ],
)
def test_a_setting_of_an_evaluation_is_checked_as_the_commands_option(
    settings: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(vlm_rl.UserError) as error:
        vlm_rl.evaluate(tmp_path / "model", tmp_path / "set", tmp_path / "out", **settings)
    assert all(word in str(error.value) for word in words), error.value
