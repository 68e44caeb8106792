"""The settings of one set's evaluation: from the command line, else from the model's run, else from the protocol.

A checkpoint of a run keeps what belongs to the policy, the run's template and longest response. The benchmark's
protocol, in the benchmark's own file, says how it is measured: temperature, top-p, samples, mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlm_rl.config import SHIPPED_ENVIRONMENTS, Config, EnvironmentConfig, load_config
from vlm_rl.data.images import GRID, MAX_TOKENS
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Mode, PublishedPrompt
from vlm_rl.evaluation.benchmarks.protocols import OTHER_SETS, STRICT_TEMPLATE, EvalProtocol
from vlm_rl.evaluation.benchmarks.registry import eval_template, template_names
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.templates import Template

_FLAG = "the command line"


@dataclass(frozen=True, slots=True)
class SetSettings:
    """How one set is asked and judged."""

    template: Template
    prompt: PublishedPrompt | None  # a benchmark's own words
    mode: Mode
    params: SamplingParams
    sources: dict[str, str]  # of each of these, for the summary

    @property
    def may_shrink(self) -> bool:
        """Tell whether nobody asked for this very number of tokens."""
        return self.sources["max_tokens"] != _FLAG

    def fitted(self, room: int) -> SetSettings:
        """Return the settings with a longest response of at most `room` tokens, where that may be changed."""
        if not self.may_shrink or not 0 < room < self.params.max_tokens:
            return self
        sources = self.sources | {"max_tokens": f"the model's context; {self.sources['max_tokens']}, has more"}
        return replace(self, params=replace(self.params, max_tokens=room), sources=sources)

    def line(self, name: str) -> str:
        """Return the settings of the set of this name as one line of the terminal."""
        params, source = self.params, self.sources
        greedy = (
            "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}, top-p {params.top_p:g}"
        )
        return (
            f"{name}: {self.mode}, template {self.template.name} ({source['template']}), {greedy}, "
            f"k {params.responses} ({source['samples']}), at most {params.max_tokens} tokens ({source['max_tokens']})"
        )


def run_of(model: Path) -> RunDirectory | None:
    """Return the training run whose checkpoint the model is, if it is one."""
    folder = model.resolve().parent
    is_checkpoint = folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file()
    return RunDirectory(folder.parent) if is_checkpoint else None


def check_options(options: argparse.Namespace) -> None:
    """Raise UserError for a number on the command line that is out of range, and for an unknown template."""
    for name in ("samples", "max_tokens", "max_prompt_tokens", "batch_size"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} is {number}; it must be at least 1")
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        raise UserError(f"--temperature is {options.temperature}; it must be 0 (greedy) or above")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p is {options.top_p}; it must be above 0 and at most 1")
    if options.template is not None and eval_template(options.template) is None:
        raise UserError(f"--template is {options.template!r}; known: {template_names()}")


def choose_settings(options: argparse.Namespace, benchmark: Benchmark | None, run: Config | None) -> SetSettings:
    """Return the settings of a set.

    Args:
        options: those of `vlm-rl eval`; None if the command line is silent.
        benchmark: that the set's problems come from, if it is a known one.
        run: the configuration of the run whose checkpoint is measured, if it is one.

    Raises UserError for several samples at temperature 0.
    """
    protocol = OTHER_SETS if benchmark is None else benchmark.protocol
    template = STRICT_TEMPLATE if benchmark is None else benchmark.stated_template
    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def choose(name: str, *others: tuple[Any, str], is_fit: bool = True) -> Any:
        stated = template if name == "template" else getattr(protocol, name)
        given = getattr(options, name) if is_fit else None
        candidates = [(given, _FLAG), *others, (stated.value, stated.source)]
        chosen[name], sources[name] = next(pair for pair in candidates if pair[0] is not None)
        return chosen[name]

    mode = choose("mode")
    temperature = choose("temperature")
    is_greedy = options.temperature == 0
    choose("samples", *([(1, "greedy decoding gives one response")] if is_greedy else []))
    choose("top_p")
    choose("max_tokens", *_tokens_of(run))
    has_programs = benchmark is not None and benchmark.has_programs
    is_fit = options.template is None or not has_programs or _named(options.template)[0].has_program
    choose("template", *_template_of(run, mode, has_programs=has_programs), is_fit=is_fit)
    if temperature == 0 and chosen["samples"] != 1:
        raise UserError(
            f"--samples is {chosen['samples']} at temperature 0: greedy decoding gives one response; "
            "add --temperature 1.0"
        )
    asked = chosen["template"]
    named = (asked, None) if isinstance(asked, Template) else _named(asked)
    params = SamplingParams(
        temperature=temperature,
        max_tokens=chosen["max_tokens"],
        responses=chosen["samples"],
        top_p=chosen["top_p"],
    )
    return SetSettings(*named, mode=mode, params=params, sources=sources)


def choose_environment(given: str | None, run: Config | None) -> tuple[EnvironmentConfig, int]:
    """Return the environment that answers between turns, and the most pixels of an image in a prompt.

    Args:
        given: --environment: the name of a shipped one, a configuration's file, or none; None: that of the run.
        run: the configuration of the run whose checkpoint is measured, if it is one.

    Raises UserError for a name that is not known.
    """
    if given is not None and given.endswith((".yaml", ".yml")):
        run, given = load_config(given), None
    has_one = run is not None and run.environment.name is not None  # its prompts may show images smaller than stored
    shown = run.data.max_pixels if run is not None and has_one else MAX_TOKENS * GRID**2
    if given is None:
        return (run.environment if run is not None else EnvironmentConfig()), shown
    if given != "none" and given not in SHIPPED_ENVIRONMENTS:
        known = ", ".join(SHIPPED_ENVIRONMENTS)
        raise UserError(f"--environment is {given!r}; known: {known}, none, or the .yaml of a run that has one")
    return EnvironmentConfig(name=None if given == "none" else given), shown


def _tokens_of(run: Config | None) -> Sequence[tuple[int | None, str]]:
    if run is None:
        return []
    return [
        (run.eval.max_tokens, "the run's eval.max_tokens"),
        (run.rollout.max_tokens, "the run's rollout.max_tokens"),
    ]


def _template_of(run: Config | None, mode: Mode, *, has_programs: bool) -> Sequence[tuple[Template | str, str]]:
    if run is not None and (not has_programs or run.data.prompt_template.has_program):
        return [(run.data.prompt_template, "the run's data.template")]
    if has_programs:
        return []
    return [] if mode == "official" else [(STRICT_TEMPLATE.value, STRICT_TEMPLATE.source)]


def _named(name: str) -> tuple[Template, PublishedPrompt | None]:
    """Return the template of a name that `check_options` has let through."""
    named = eval_template(name)
    assert named is not None
    return named


def split_note(protocol: EvalProtocol, split: str) -> str:
    """Return a sentence where a set is not of the split that papers report; "" if it is."""
    reported = protocol.split
    if split == reported.value:
        return ""
    return f"this is the split {split or 'without a name'}; reported is {reported.value} ({reported.source})"
