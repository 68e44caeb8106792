"""The settings of an evaluation: the command line, then the run, then the benchmark's protocol."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vlm_rl.cli import main
from vlm_rl.config import Config, parse_config, save_config
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.protocols import OTHER_SETS
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, eval_template
from vlm_rl.evaluation.settings import SetSettings, choose_environment, choose_settings, split_note


def chosen(name: str | None, run: Config | None = None, **given: Any) -> SetSettings:
    silent = dict.fromkeys(("template", "mode", "temperature", "samples", "top_p", "max_tokens"))
    options = argparse.Namespace(**(silent | given))
    return choose_settings(options, BENCHMARKS[name] if name else None, run)


def run_with(**sections: Any) -> Config:
    tree = {"out": "runs/x", "model": {"path": "m"}, "data": {"train": ["d"], **sections.pop("data", {})}}
    return parse_config(tree | sections)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_setting_of_a_protocol_can_be_used_and_has_a_source(name: str) -> None:
    benchmark = BENCHMARKS[name]
    protocol, template = benchmark.protocol, benchmark.stated_template
    settings = [template, *(getattr(protocol, field.name) for field in fields(protocol))]
    assert all(setting.source for setting in settings)
    assert protocol.split.value in ("", *benchmark.files.splits)
    assert eval_template(template.value) is not None
    assert (protocol.samples.value > 1) == (protocol.temperature.value > 0)
    for mode in (None, "official"):
        how = chosen(name, mode=mode)
        assert how.params.responses == protocol.samples.value
        assert how.sources["temperature"] == protocol.temperature.source


def test_a_foreign_model_is_measured_by_the_protocol() -> None:
    aime = chosen("aime24")
    assert (aime.params.temperature, aime.params.top_p, aime.params.responses) == (1.0, 0.7, 32)
    assert (aime.params.max_tokens, aime.template.name, aime.mode) == (32_768, "think_answer", "strict")
    assert chosen("mathvision").params.max_tokens == 4096 and chosen("mathvision").params.temperature == 0
    unknown = chosen(None)
    assert (
        (unknown.params.max_tokens, unknown.params.responses)
        == (2048, 1)
        == (
            OTHER_SETS.max_tokens.value,
            OTHER_SETS.samples.value,
        )
    )


def test_official_asks_in_the_authors_words_but_a_policy_in_its_own() -> None:
    official = chosen("mathvision", mode="official")
    assert official.template.name == "mathvision" and official.prompt is BENCHMARKS["mathvision"].prompt
    assert chosen("logicvista", mode="official").template.name == "plain"
    run = run_with(data={"template": "think_box"})
    for mode in (None, "strict", "official"):
        policy = chosen("mathvision", run, mode=mode)
        assert policy.template.name == "think_box" and policy.sources["template"] == "the run's data.template"


def test_a_policy_keeps_the_longest_response_of_its_run() -> None:
    run = run_with(rollout={"max_tokens": 8192})
    assert chosen("mathvision", run).params.max_tokens == 8192  # not cut at the protocol's 4,096
    shorter = run_with(rollout={"max_tokens": 900}, eval={"max_tokens": 700})
    assert chosen("aime24", shorter).params.max_tokens == 700
    assert chosen("aime24", shorter).params.responses == 32
    assert chosen("aime24", shorter, max_tokens=8).params.max_tokens == 8


def test_what_is_given_decides() -> None:
    given = chosen("aime24", samples=4, top_p=0.9, template="plain")
    assert (given.params.responses, given.params.top_p, given.params.temperature) == (4, 0.9, 1.0)
    assert given.template.name == "plain"
    greedy = chosen("aime24", temperature=0.0)
    assert greedy.params.responses == 1
    with pytest.raises(UserError, match="--samples is 4 at temperature 0"):
        chosen("mathvision", samples=4)


def test_a_set_of_programs_takes_no_template_that_asks_for_a_box() -> None:
    own = chosen("livecodebench").template.name
    assert chosen("livecodebench", template="plain").template.name == own
    assert chosen("livecodebench", run_with(data={"template": "think_box"})).template.name == own
    assert chosen("livecodebench", template="think_code").template.name == "think_code"
    assert chosen("livecodebench", run_with(data={"template": "think_code"})).template.name == "think_code"


def test_a_default_gives_way_to_the_models_context_and_a_given_length_does_not() -> None:
    short = chosen("math500").fitted(1000)
    assert short.params.max_tokens == 1000 and short.sources["max_tokens"].startswith("the model's context")
    assert chosen("math500", max_tokens=5000).fitted(1000).params.max_tokens == 5000
    assert chosen("math500").fitted(-5).params.max_tokens == 32_768  # refused later, with both numbers
    assert "at most 1000 tokens" in short.line("math500")


def test_a_part_of_the_reported_split_is_said() -> None:
    protocol = BENCHMARKS["mathvision"].protocol
    assert split_note(protocol, "test") == ""
    assert "testmini" in (note := split_note(protocol, "testmini")) and "reported is test" in note


def test_the_protocols_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "protocols"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{printed}" for name in BENCHMARKS)
    aime = BENCHMARKS["aime24"].protocol
    (line,) = re.findall(r"^aime24\n(?:  .*\n)*?  samples +(.*)", printed, re.MULTILINE)
    assert line.split(maxsplit=1) == [str(aime.samples.value), aime.samples.source]


def test_an_evaluation_has_the_environment_of_its_run_unless_another_is_named(tmp_path: Path) -> None:
    """Off too, the prompt shows images as the run did: they may be stored larger."""
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"], "max_pixels": 7056}}
    plain = parse_config(tree, where="a run")
    tool = parse_config(tree | {"environment": {"name": "zoom", "max_turns": 3}}, where="a run")
    file = tmp_path / "run.yaml"
    save_config(tool, file)
    for given, run, name, pixels in (
        (None, None, None, None),
        (None, plain, None, None),
        (None, tool, "zoom", 7056),
        ("none", tool, None, 7056),
        ("python", tool, "python", 7056),
        ("zoom", None, "zoom", None),
        (str(file), plain, "zoom", 7056),
    ):
        environment, shown = choose_environment(given, run)
        assert (environment.name, shown if shown < 10**6 else None) == (name, pixels), given
    with pytest.raises(UserError, match="--environment is 'zomm'; known: zoom, python"):
        choose_environment("zomm", None)
