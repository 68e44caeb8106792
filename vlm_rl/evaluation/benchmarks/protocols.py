"""How a benchmark is measured where the command line says nothing, and who says so: each benchmark's file has one.

BENCHMARKS["aime24"].protocol.samples.value      # 32
BENCHMARKS["aime24"].protocol.samples.source     # "LUSPO, arXiv 2602.05261, ..."

A file takes VISION, TEXT or CODE, with what is different there: replace(VISION, split=Stated("testmini", "...")).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LUSPO = "LUSPO, arXiv 2602.05261"


@dataclass(frozen=True, slots=True)
class Stated:
    """A setting with its source."""

    value: Any
    source: str  # a paper, a repository, or "ours" with the reason


@dataclass(frozen=True, slots=True)
class EvalProtocol:
    """How one benchmark is measured."""

    split: Stated  # that papers report; "" if there is one
    mode: Stated  # strict or official
    temperature: Stated  # 0 is greedy
    top_p: Stated
    samples: Stated  # responses a problem: the k of avg@k
    max_tokens: Stated  # of a response


TEXT = EvalProtocol(
    split=Stated("", "there is one"),
    mode=Stated("strict", "ours: the rule of training; give --mode official for the authors' rule"),
    temperature=Stated(0.0, "ours: hundreds of problems need no samples"),
    top_p=Stated(1.0, "ours: nothing is cut off"),
    samples=Stated(1, "ours: greedy decoding gives one response"),
    max_tokens=Stated(32_768, f"{LUSPO}: the longest response of its text runs"),
)
# replace(TEXT, **SAMPLED, samples=Stated(32, "...")) is avg@32
SAMPLED = {
    "temperature": Stated(1.0, f"{LUSPO}, prints temperature 1.0"),
    "top_p": Stated(0.7, f"{LUSPO}, prints top-p 0.7"),
}
VISION = replace(
    TEXT,
    temperature=Stated(0.0, "ours; VLMEvalKit's entry of Qwen2.5-VL too: temperature 0.01 with top-k 1"),
    max_tokens=Stated(4096, f"{LUSPO}: the longest response of its vision runs"),
)
CODE = replace(
    TEXT,
    mode=Stated("official", "its authors' tests, in our sandbox: docs/code.md says where the two differ"),
    temperature=Stated(0.0, "EvalPlus, arXiv 2305.01210: its leaderboard's pass@1 is greedy"),
)
STRICT_TEMPLATE = Stated("think_answer", "ours: strict looks where it asks for the answer")
OTHER_SETS = replace(TEXT, temperature=Stated(0.0, "ours"), max_tokens=Stated(2048, "ours"))
