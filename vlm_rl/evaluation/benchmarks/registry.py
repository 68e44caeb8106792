"""The benchmarks that can be prepared, evaluated and scored: one file and one line each.

mathvista = BENCHMARKS["mathvista"]
template, prompt = eval_template("mathvista")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from vlm_rl.config import find_template
from vlm_rl.evaluation.benchmarks import (
    aime24,
    aime25,
    amc23,
    dynamath,
    humaneval_plus,
    livecodebench,
    logicvista,
    math500,
    mathverse,
    mathvision,
    mathvista,
    mbpp_plus,
    minerva,
    olympiadbench,
    wemath,
)
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, PublishedPrompt
from vlm_rl.evaluation.benchmarks.protocols import STRICT_TEMPLATE
from vlm_rl.templates import TEMPLATES, Template
from vlm_rl.types import Problem

BENCHMARKS: dict[str, Benchmark] = {
    "mathvista": mathvista.BENCHMARK,
    "mathvision": mathvision.BENCHMARK,
    "mathverse": mathverse.BENCHMARK,
    "logicvista": logicvista.BENCHMARK,
    "wemath": wemath.BENCHMARK,
    "dynamath": dynamath.BENCHMARK,
    "math500": math500.BENCHMARK,
    "aime24": aime24.BENCHMARK,
    "aime25": aime25.BENCHMARK,
    "amc23": amc23.BENCHMARK,
    "minerva": minerva.BENCHMARK,
    "olympiadbench": olympiadbench.BENCHMARK,
    "humaneval_plus": humaneval_plus.BENCHMARK,
    "mbpp_plus": mbpp_plus.BENCHMARK,
    "livecodebench": livecodebench.BENCHMARK,
}


def benchmark_of(problems: Sequence[Problem]) -> Benchmark | None:
    """Return the benchmark that all of the problems come from, if it is a known one."""
    sources = {problem.source for problem in problems}
    return BENCHMARKS.get(sources.pop()) if len(sources) == 1 else None


def published_prompts() -> dict[str, PublishedPrompt]:
    """Return benchmark -> the prompt that its authors publish, where they do."""
    return {name: benchmark.prompt for name, benchmark in BENCHMARKS.items() if benchmark.prompt}


def eval_template(name: str) -> tuple[Template, PublishedPrompt | None] | None:
    """Return the template of that name or file, with the published prompt if it is a benchmark's; None for none.

    Raises UserError for a file that cannot be used.
    """
    if prompt := published_prompts().get(name):
        return prompt.template, prompt
    template = find_template(name)
    return template and (template, None)


def template_names() -> str:
    """Return the names that --template accepts, joined by commas."""
    return ", ".join([*TEMPLATES, *published_prompts(), "or a YAML file of your own"])


def describe_protocols() -> str:
    """Return how each benchmark is measured by default, one setting a line, with its source."""
    lines = []
    for name, benchmark in BENCHMARKS.items():
        protocol = benchmark.protocol
        is_asked_by_us = protocol.mode.value == "strict" and not benchmark.has_programs
        template = STRICT_TEMPLATE if is_asked_by_us else benchmark.stated_template
        stated = {"split": protocol.split, "mode": protocol.mode, "template": template}
        stated |= {field.name: getattr(protocol, field.name) for field in fields(protocol)}
        lines.append(name)
        lines += [f"  {setting:<12}{default.value!s:<16}{default.source}" for setting, default in stated.items()]
    return "\n".join(lines)
