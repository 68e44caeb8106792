"""The examples of docs/rewards.md run, its configurations are valid, and its tables name what there is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlm_rl.config import Config, parse_config, read_template
from vlm_rl.config.templates import TemplateConfig
from vlm_rl.rewards.function_worker import FunctionCaller, load_reward_function
from vlm_rl.rewards.grounding import COORDINATES
from vlm_rl.rewards.judge import Judge
from vlm_rl.types import Grade, Problem

RIGHT = Grade("correct", "5", "number", "")
PROBLEM = Problem("p", "How much?", (), "5", "integer", source="set", meta={"unit": "cm"})
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


TEMPLATE = next(block for block in blocks("yaml") if block.startswith("# mine.yaml"))


def configs() -> list[Config]:
    base = {"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}}
    return [parse_config({**base, **yaml.safe_load(block)}) for block in blocks("yaml") if block != TEMPLATE]


def test_the_functions_of_the_page_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = ("maybe 5, maybe 6", PROBLEM.question)
    values: dict[str, list[Any]] = {}
    with asyncio.Runner() as runner:
        for name, section in configs()[0].reward.functions.items():
            got: dict[int, Any] = {}
            caller = FunctionCaller(load_reward_function(section.path), timeout=60)
            caller.answer(
                [(PROBLEM, text, RIGHT, 3) for text in texts],
                lambda reply, got=got: got.update({reply["index"]: reply}),
                runner,
            )
            values[name] = [got[index]["value"] for index in range(2)]
    assert values["hedging"] == [2, 0] and values["names_answer"] == [1, 0]
    assert values["apart"] == [0, 0], "both have the answer 5"
    assert 0 < values["similarity"][0] < values["similarity"][1] == 1


def test_the_template_of_the_page_finds_its_answer_and_its_keys_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEMPLATE)
    template = read_template(tmp_path / "mine.yaml").record
    assert template.answer_region("<think>Answer: 3</think>\nAnswer: 5") == "5"
    assert template.is_well_formed("<think>a</think> Answer: 5") and not template.is_well_formed("Answer: 5")
    keys = re.findall(
        r"^\| `(\w+)` \|", PAGE.partition("## A template of your own")[2].partition("\n- ")[0], re.MULTILINE
    )
    assert {*keys, "name"} == {*TemplateConfig.model_fields}


def test_the_judge_of_the_page_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    monkeypatch.chdir(tmp_path)
    (prompt,) = blocks("text")
    (tmp_path / "judge.txt").write_text(prompt)
    (config,) = [config.reward.judge for config in configs() if config.reward.judge]
    body = Judge(config, cache=tmp_path)._body((PROBLEM, "it is 5", RIGHT, 3))
    text = body["messages"][0]["content"]
    assert "Question: How much?" in text and "Reference answer: 5" in text and "Response: it is 5" in text


def test_the_tables_name_every_column_and_every_family() -> None:
    assert all(f"`{name}`" in PAGE for name in Problem.__dataclass_fields__)
    pixels, thousandths = re.findall(r"^\| (Qwen.*?) \| `(?:pixels|thousandths)`", PAGE, re.MULTILINE)
    words = {"pixels": pixels, "thousandths": thousandths}
    for model_type, coordinates in COORDINATES.items():
        name = model_type.replace("qwen", "Qwen").replace("_vl", "-VL").replace("_moe", "-MoE").replace("_", ".")
        assert name in words[coordinates].split(", "), name
