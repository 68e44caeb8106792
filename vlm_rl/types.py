"""The value types that travel between the stages of training, one per arrow.

    Problem -> Prompt -> Rollout -> Reward -> Group -> PackedRow -> learner

Shape suffixes used throughout the project:

    P  prompts in a mini-batch          T  tokens of a packed row
    G  responses per prompt             V  vocabulary
    N  responses, N = P * G             H  hidden size
    R  tokens of one response           K  response tokens of a packed row (the ones with a loss)

Rewards and advantages are float64, log-probs float32, ids int64 inside torch and int32 at rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch  # for annotations alone: the grader and the scorers import this module and load no torch
    from PIL import Image

IMAGE_MARKER = "<image>"

AnswerType = Literal["choice", "integer", "float", "expression", "text", "list"]
StopReason = Literal["stop", "length"]
Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The grader's judgement of one response."""

    verdict: Verdict
    extracted: str | None  # the final answer, as it is written in the response
    path: str  # the rule that decided, e.g. "number", "choice", "math_verify"
    reason: str  # one sentence for a reader

    @property
    def correct(self) -> bool:
        """Tell whether the verdict is `correct`; all others count as wrong."""
        return self.verdict == "correct"


@dataclass(frozen=True, slots=True)
class Problem:
    """An image-text problem with a checkable answer: a row of a prepared set."""

    id: str  # unique in its set
    question: str  # holds one IMAGE_MARKER per image, in order
    images: Sequence[bytes]  # encoded PNG, JPEG or WEBP; a prepared set reads them from disk at each use
    answer: str  # the gold, without \boxed{}
    answer_type: AnswerType
    choices: tuple[str, ...] = ()  # the texts of options A, B, C, ...
    source: str = ""
    category: str = ""
    difficulty: float = -1.0  # pass rate of a reference model in [0, 1]; -1 is unknown
    # JSON; known keys: test_only, precision, tolerance, unit, alternatives, box (the gold box, in fractions),
    # response (a whole one to learn from)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def test_only(self) -> bool:
        """Tell whether this is a row of a benchmark, which training refuses unless it is allowed explicitly."""
        return bool(self.meta.get("test_only", False))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem rendered for one model, as both the sampler and the learner get it."""

    problem_id: str
    text: str  # the rendered chat, generation prompt and prefill included
    prefill: str  # the tail of `text` that counts as the start of the response, often ""
    ids: np.ndarray  # int32 [P_tokens], one image placeholder per merged visual token (learner)
    sampler_ids: np.ndarray  # int32, one placeholder per image (vLLM expands it)
    images: tuple[Image.Image, ...]  # RGB, already on the model's grid; not resized again
    vision: Mapping[str, torch.Tensor]  # opaque model inputs (pixel_values, image_grid_thw); {} for text


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled response."""

    problem_id: str
    index: int  # 0 .. G-1 inside its group
    ids: np.ndarray  # int32 [R], the generated tokens, the end-of-sequence token included
    logprobs: np.ndarray  # float32 [R], the sampler's, with temperature and banned ids applied
    text: str  # decoded without special tokens, without the prompt's prefill
    stop_reason: StopReason
    policy_version: int  # optimizer steps that the sampling weights had taken


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one response, in parts."""

    parts: Mapping[str, float]  # accuracy, format, overlong, and the parts that the configuration turns on
    grade: Grade
    dropped: bool = (
        False  # left out of its group because it was not judged: it has no advantage and is in no baseline
    )
    logged: Mapping[str, float] = field(default_factory=dict)  # values that are only metrics, by name; may be NaN
    undecided: Mapping[str, str] = field(default_factory=dict)  # function or judge -> why it gave no value, or ""
    cost: Mapping[str, int] = field(default_factory=dict)  # the judge's requests, cached replies and tokens

    @property
    def total(self) -> float:
        """Return the sum of the parts."""
        return float(sum(self.parts.values()))


Call = tuple[Problem, str, Grade, int]  # of a reward function: problem, response, grade, tokens
Outcome = float | str | None  # a value, why there is none, or None: this problem does not ask for one


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt's G responses with their rewards and advantages: the unit that training works on."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]
    advantages_G: np.ndarray  # float64 [G]

    @property
    def lengths_G(self) -> np.ndarray:
        """Return the tokens of each response, int64 [G]."""
        return np.array([len(r.ids) for r in self.rollouts], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What the loss needs of one packed row besides the current log-probs: K response tokens of n responses."""

    old_logp_K: torch.Tensor | None  # None: one mini-batch per rollout batch, so they are the current ones, detached
    sampler_logp_K: torch.Tensor | None  # the log-probs that the sampler reported; None: no correction
    response_K: torch.Tensor  # int64, which of the n responses each token belongs to
    lengths_n: torch.Tensor  # int64
    advantages_n: torch.Tensor
    weights_n: torch.Tensor  # weight of each token of the response
    mean_weight: torch.Tensor | float = 0.0  # 1 / tokens of the optimizer step: a token's weight in KL and entropy
    reference_logp_K: torch.Tensor | None = None  # the frozen reference's, where there is a KL term
