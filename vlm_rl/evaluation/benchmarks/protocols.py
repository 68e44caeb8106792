"""How each benchmark is measured where the command line says nothing, and who says so: `vlm-rl eval protocols`.

PROTOCOLS["aime24"].samples.value      # 32
PROTOCOLS["aime24"].samples.source     # "LUSPO, arXiv 2602.05261, ..."

A checkpoint of a training run keeps the template and the longest response of its run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Mode
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS

_LUSPO = "LUSPO, arXiv 2602.05261"


@dataclass(frozen=True, slots=True)
class Stated:
    """A setting with its source."""

    value: Any
    source: str  # a paper, a repository, or "ours" with the reason


@dataclass(frozen=True, slots=True)
class EvalProtocol:
    """How one benchmark is measured."""

    split: Stated  # that papers report; "" where there is one
    mode: Stated  # strict or official
    template: Stated  # of models that are not checkpoints of a run, in official mode
    temperature: Stated  # 0 is greedy
    top_p: Stated
    samples: Stated  # responses a problem: the k of avg@k
    max_tokens: Stated  # of a response


_STRICT: Mode = "strict"
_MODE = Stated(_STRICT, "ours: the rule of training; give --mode official for the authors' rule")
_GREEDY = Stated(0.0, "ours; VLMEvalKit's entry of Qwen2.5-VL too: temperature 0.01 with top-k 1")
_GREEDY_TEXT = Stated(0.0, "ours: hundreds of problems need no samples")
_ALL_TOKENS = Stated(1.0, "ours: nothing is cut off")
_ONE = Stated(1, "ours: greedy decoding gives one response")
_VISION_TOKENS = Stated(4096, f"{_LUSPO}: the longest response of its vision runs")
_TEXT_TOKENS = Stated(32_768, f"{_LUSPO}: the longest response of its text runs")
_SAMPLED = {
    "temperature": Stated(1.0, f"{_LUSPO}, prints temperature 1.0"),
    "top_p": Stated(0.7, f"{_LUSPO}, prints top-p 0.7"),
}
_MODE_OF_CODE = Stated("official", "its authors' tests, in our sandbox: docs/code.md says where the two differ")
_GREEDY_CODE = Stated(0.0, "EvalPlus, arXiv 2305.01210: its leaderboard's pass@1 is greedy")
_LCB = "LiveCodeBench, lcb_runner/runner/parser.py"
_ONLY_SPLIT = Stated("", "there is one")


def _vision(name: str, split: Stated) -> EvalProtocol:
    return EvalProtocol(
        split=split,
        mode=_MODE,
        template=_template(BENCHMARKS[name]),
        temperature=_GREEDY,
        top_p=_ALL_TOKENS,
        samples=_ONE,
        max_tokens=_VISION_TOKENS,
    )


def _text(name: str, **sampled: Stated) -> EvalProtocol:
    settings = {"temperature": _GREEDY_TEXT, "top_p": _ALL_TOKENS, "samples": _ONE} | sampled
    template = _template(BENCHMARKS[name])
    return EvalProtocol(_ONLY_SPLIT, _MODE, template, max_tokens=_TEXT_TOKENS, **settings)


def _code(name: str, split: Stated, **sampled: Stated) -> EvalProtocol:
    settings = {"temperature": _GREEDY_CODE, "top_p": _ALL_TOKENS, "samples": _ONE} | sampled
    template = _template(BENCHMARKS[name])
    return EvalProtocol(split, _MODE_OF_CODE, template, max_tokens=_TEXT_TOKENS, **settings)


def _template(benchmark: Benchmark) -> Stated:
    if benchmark.prompt is None:
        return Stated("plain", "ours: its authors publish no prompt")
    return Stated(benchmark.prompt.name, benchmark.prompt.source)


PROTOCOLS: dict[str, EvalProtocol] = {
    "mathvista": _vision("mathvista", Stated("testmini", f"{_LUSPO}, Table 3: MathVista-mini")),
    "mathvision": _vision("mathvision", Stated("test", "ours: the full 3,040; testmini is a tenth of them")),
    "mathverse": _vision("mathverse", Stated("testmini", f"{_LUSPO}, Table 3, reports its Vision Only rows")),
    "logicvista": _vision("logicvista", Stated("test", "there is one")),
    "wemath": _vision("wemath", Stated("testmini", "its authors' leaderboard")),
    "dynamath": _vision("dynamath", Stated("", "all ten variants, as its authors' worst case needs")),
    "math500": _text("math500"),
    "aime24": _text("aime24", **_SAMPLED, samples=Stated(32, f"{_LUSPO}, states avg@32")),
    "aime25": _text("aime25", **_SAMPLED, samples=Stated(32, "ours: as AIME 2024")),
    "amc23": _text("amc23", **_SAMPLED, samples=Stated(32, "ours: forty problems, as AIME's thirty")),
    "minerva": _text("minerva"),
    "olympiadbench": _text("olympiadbench"),
    "humaneval_plus": _code("humaneval_plus", _ONLY_SPLIT),
    "mbpp_plus": _code("mbpp_plus", _ONLY_SPLIT),
    "livecodebench": _code(
        "livecodebench",
        Stated("release_v6", "ours: the newest release that we know; name a paper's own with --split"),
        temperature=Stated(0.2, _LCB),
        top_p=Stated(0.95, _LCB),
        samples=Stated(10, _LCB),
    ),
}

OTHER_SETS = EvalProtocol(
    split=_ONLY_SPLIT,
    mode=_MODE,
    template=Stated("think_answer", "ours"),
    temperature=Stated(0.0, "ours"),
    top_p=_ALL_TOKENS,
    samples=_ONE,
    max_tokens=Stated(2048, "ours"),
)


def describe_protocols() -> str:
    """Return each benchmark's settings, one a line, with their sources."""
    lines = []
    for name, protocol in PROTOCOLS.items():
        lines.append(name)
        for field in fields(protocol):
            stated = getattr(protocol, field.name)
            shown = "" if stated.value == "" else str(stated.value)
            lines.append(f"  {field.name:<12}{shown:<16}{stated.source}")
    return "\n".join(lines)
