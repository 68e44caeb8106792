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

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch  # for annotations alone: the grader and the scorers import this module and load no torch
    from PIL import Image

T = TypeVar("T")

IMAGE_MARKER, VIDEO_MARKER = "<image>", "<video>"

AnswerType = Literal["choice", "integer", "float", "expression", "text", "list", "code"]
StopReason = Literal["stop", "length", "unfinished"]  # unfinished: continues in a later step (rollout.carry_over)
Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]
NamedTensors = Iterable[tuple[str, "torch.Tensor"]]  # the tensors of a model


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
    question: str  # holds a marker for each image and each video, in order
    images: Sequence[bytes]  # encoded PNG, JPEG or WEBP; a prepared set reads them from disk at each use
    # A video's frames are among the images, where its marker is.
    answer: str  # the gold, without \boxed{}
    answer_type: AnswerType
    choices: tuple[str, ...] = ()  # the texts of options A, B, C, ...
    source: str = ""
    category: str = ""
    difficulty: float = -1.0  # pass rate of a reference model in [0, 1]; -1 is unknown
    # JSON; known keys: test_only, precision, tolerance, unit, alternatives, box (the gold box, in fractions),
    # response (a whole one to learn from), videos (the seconds of each video's frames), tests (of a program, packed)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def test_only(self) -> bool:
        """Tell whether this is a row of a benchmark, which training refuses unless it is allowed explicitly."""
        return bool(self.meta.get("test_only", False))

    @property
    def videos(self) -> Sequence[Sequence[float]]:
        """Return the seconds at which each video shows its frames."""
        return self.meta.get("videos", ())


def split_at_markers(question: str, videos: Sequence[Sequence[float]]) -> tuple[list[str], list[str]]:
    """Return the texts around the markers of a question, and the markers.

    Without a video, VIDEO_MARKER is a word like any other.
    """
    parts = re.split(f"({IMAGE_MARKER}|{VIDEO_MARKER})" if videos else f"({IMAGE_MARKER})", question)
    return parts[::2], parts[1::2]


def marker_fault(question: str, num_images: int, videos: Sequence[Sequence[float]]) -> str:
    """Return how a question's markers differ from its images and videos, as the end of a sentence; "" if they agree.

    `num_images` counts the frames of the videos too.
    """
    markers, num_frames = split_at_markers(question, videos)[1], sum(map(len, videos))
    counts = markers.count(IMAGE_MARKER), markers.count(VIDEO_MARKER)
    if counts == (num_images - num_frames, len(videos)):
        return ""
    fault = f"has {counts[0]} {IMAGE_MARKER} markers in its question but {num_images - num_frames} images"
    return f"{fault}, and {counts[1]} {VIDEO_MARKER} markers but {len(videos)} videos" if videos else fault


def group_by_marker(question: str, pictures: Sequence[T], videos: Sequence[Sequence[float]]) -> list[list[T]]:
    """Return the pictures of each marker: one for an image, and more for a video."""
    rest, times = iter(pictures), iter(videos)
    markers = split_at_markers(question, videos)[1]
    return [[*islice(rest, 1 if marker == IMAGE_MARKER else len(next(times)))] for marker in markers]


def name_videos(question: str, videos: Sequence[Sequence[float]]) -> str:
    """Return the question for readers: each video's marker becomes the times of its frames."""
    for times in videos:
        shown = f"[video: frames at {', '.join(f'{time:g}' for time in times)} s]"
        question = question.replace(VIDEO_MARKER, shown, 1)
    return question


def times_fault(times: Any) -> str:
    """Describe a fault in the seconds of a video's frames as the end of a sentence; "" if there is none."""
    if not isinstance(times, list) or len(times) < 2:
        return "has a video with less than two frames"
    for time in times:
        if type(time) not in (int, float) or not 0 <= time < math.inf:
            return f"has a video with a frame at {time!r:.40} seconds"
    for before, after in pairwise(times):
        if after <= before:
            return f"has a video whose times do not increase: {after} comes after {before} seconds"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The frames of a video."""

    frames: tuple[Image.Image, ...]  # RGB, all of one size
    seconds: Sequence[float]  # when each is shown

    def pixels(self) -> np.ndarray:
        """Return the frames as uint8 [frames, height, width, 3]."""
        return np.stack([np.asarray(frame) for frame in self.frames])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem rendered for one model, as both the sampler and the learner get it."""

    problem_id: str
    text: str  # the rendered chat, generation prompt and prefill included
    prefill: str  # the tail of `text` that counts as the start of the response, often ""
    ids: np.ndarray  # int32 [P_tokens], one placeholder per merged visual token (learner)
    sampler_ids: np.ndarray  # int32, one placeholder per image or video (vLLM expands it)
    images: tuple[Image.Image, ...]  # RGB, already on the model's grid; not resized again
    vision: Mapping[str, torch.Tensor]  # opaque model inputs (pixel_values, image_grid_thw); {} for text
    videos: tuple[Video, ...] = ()  # like the images
    epoch: int = 0  # of the order: a problem that one step takes twice gets different responses
    start: EpisodeStart | None = None  # ends the user's turn, where an environment shows something first
    start_tokens: int = 0  # of `ids`, which `start` adds

    @property
    def pictures(self) -> tuple[Image.Image, ...]:
        """Return the images, then the frames of each video."""
        return (*self.images, *(frame for video in self.videos for frame in video.frames))


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeStart:
    """What an environment shows before the first turn, as a part of the prompt, which a problem's responses share."""

    text: str
    images: tuple[bytes, ...]  # PNG of RGB on the model's grid: the very pixels; they follow the text
    digest: str  # of what reset returned, and must return again for each response


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What an environment shows: first, or in answer to a turn. No token of it has a loss, and none is in |y|."""

    text: str = ""
    images: tuple[bytes, ...] = ()  # encoded; they follow the text
    error: str = ""  # why the turn's call failed, where it did
    tool: str = ""  # what was called


@dataclass(frozen=True, slots=True, eq=False)
class ObservedTokens:
    """An observation as the model reads it, from behind the sampled turn's last token to the next turn's first."""

    ids: np.ndarray  # int32, one placeholder per merged visual token (learner)
    sampler_ids: np.ndarray  # int32, one placeholder per image (vLLM expands it)
    images: tuple[bytes, ...]  # PNG of RGB on the model's grid: the very pixels, small enough for all ranks


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the policy sampled at a stretch, and what the environment answered."""

    num_tokens: int  # sampled, the end-of-turn token included
    text: str  # decoded without special tokens
    observation: Observation | None = None  # None: the episode ended here
    observed: ObservedTokens | None = None  # the same for the model
    ending: str = ""  # why the episode ended here: done, length, or the limit that it reached
    num_before: int = 0  # tokens before it: the prompt, what was sampled and observed
    num_cached: int = 0  # of these, whose keys and values the engine had


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds:
    """The ids that top-p and top-k left to sample from, of each token of a response, end to end."""

    ids: np.ndarray  # int32 [sum of counts]
    counts: np.ndarray  # int32 [R], 1 at least

    @classmethod
    def of(cls, by_token: Sequence[Sequence[int] | np.ndarray]) -> KeptIds:
        """Join the ids of each token."""
        return cls(np.concatenate(by_token).astype(np.int32), np.array([len(ids) for ids in by_token], np.int32))

    def table(self, width: int) -> np.ndarray:
        """Return the ids as int64 [R, width], filled up with -1."""
        table = np.full((len(self.counts), width), -1, dtype=np.int64)
        table[np.arange(width) < self.counts[:, None]] = self.ids
        return table


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled response. With an environment it is an episode of several turns, of which this holds the policy's.

    `ids` and `logprobs` are what was sampled, in all turns, so a length is always one of sampled tokens. What was
    observed between them is in `turns` alone.
    """

    problem_id: str
    index: int  # 0 .. G-1 inside its group
    ids: np.ndarray  # int32 [R], the generated tokens, the end-of-sequence token included
    logprobs: np.ndarray  # float32 [R], the sampler's, with temperature and banned ids applied
    text: str  # decoded without special tokens, without the prompt's prefill; of an episode the last turn's
    stop_reason: StopReason
    policy_version: int  # optimizer steps of the weights that sampled the last tokens
    older: tuple[tuple[int, int], ...] = ()  # (policy version, tokens) of the tokens of earlier weights, in order
    # Which K experts each layer's router sent the tokens to, integers [tokens, layers, K], where routing is replayed:
    # for the R - 1 tokens that the sampler read, and, in the first response of a group, for the prompt's.
    experts: np.ndarray | None = None
    prompt_experts: np.ndarray | None = None
    turns: tuple[Turn, ...] = ()  # of an episode; (): there is no environment
    num_cached: int = 0  # prompt tokens whose keys and values the engine had, where it says so
    kept: KeptIds | None = None  # what truncation left to sample from; None: all ids
    start: EpisodeStart | None = None  # the prompt's, as a part of which it is never in `turns`

    @property
    def observed(self) -> list[tuple[int, ObservedTokens]]:
        """Return (sampled tokens before it, what was observed) of each observation, in order."""
        ends = accumulate(turn.num_tokens for turn in self.turns)
        return [(end, turn.observed) for end, turn in zip(ends, self.turns, strict=True) if turn.observed is not None]

    @property
    def num_observed(self) -> int:
        """Return the tokens that were observed between the sampled ones."""
        return sum(len(observed.ids) for _, observed in self.observed)

    @property
    def versions_R(self) -> np.ndarray:
        """Return the policy version that sampled each token, int64 [R]."""
        versions, counts = [version for version, _ in self.older], [count for _, count in self.older]
        all_versions = np.array([*versions, self.policy_version], dtype=np.int64)
        return np.repeat(all_versions, [*counts, len(self.ids) - sum(counts)])


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one response, in parts."""

    parts: Mapping[str, float]  # accuracy, format, overlong, and the parts that the configuration turns on
    grade: Grade
    dropped: bool = False  # left out of its group, since it was not judged: no advantage, and in no baseline
    logged: Mapping[str, float] = field(default_factory=dict)  # values that are only metrics, by name; may be NaN
    undecided: Mapping[str, str] = field(default_factory=dict)  # function or judge -> why it gave no value, or ""
    cost: Mapping[str, int] = field(default_factory=dict)  # the judge's requests, cached replies and tokens

    @property
    def total(self) -> float:
        """Return the sum of the parts."""
        return float(sum(self.parts.values()))

    @property
    def undecided_because(self) -> str:
        """Return why the grader, or a part that counts, could not judge the response; "" if all could."""
        if self.grade.verdict in ("timeout", "error"):
            return f"{self.grade.path}: {self.grade.reason}"
        return next((f"{name}: {why}" for name, why in self.undecided.items() if why and name in self.parts), "")


NUM_TENTHS = 10  # by length, in metrics
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
    def start(self) -> EpisodeStart | None:
        """Return the environment's observation before the first turn of each response, if there is one."""
        return self.rollouts[0].start

    @property
    def shows_images(self) -> bool:
        """Tell whether the prompt has images."""
        return bool(self.problem.images or (self.start is not None and self.start.images))

    @property
    def lengths_G(self) -> np.ndarray:
        """Return the sampled tokens of each response, int64 [G]: |y| of every rule."""
        return np.array([len(r.ids) for r in self.rollouts], dtype=np.int64)

    @property
    def sizes_G(self) -> np.ndarray:
        """Return the tokens of each response that a model computes, int64 [G]: the observed ones too."""
        return np.array([len(r.ids) + r.num_observed for r in self.rollouts], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What the loss needs of one packed row besides the current log-probs: K response tokens of n responses."""

    old_logp_K: torch.Tensor | None  # None: no step since the sampling, so they are the current ones, detached
    sampler_logp_K: torch.Tensor | None  # the log-probs that the sampler reported; None: no correction
    response_K: torch.Tensor  # int64, which of the n responses each token belongs to
    lengths_n: torch.Tensor  # int64
    advantages_n: torch.Tensor
    weights_n: torch.Tensor  # weight of each token of the response
    mean_weight: torch.Tensor | float = 0.0  # 1 / tokens of the optimizer step: a token's weight in KL and entropy
    reference_logp_K: torch.Tensor | None = None  # the frozen reference's, where there is a KL term
    tenth_n: torch.Tensor | None = None  # int64, 0 to 9 by length in the step, where clipping is counted by it
    fresh_K: torch.Tensor | None = None  # bool: the gap is measured here; None: on all tokens
    credit_K: torch.Tensor | None = None  # what each token counts inside its response; None: 1
    blind_logp_K: torch.Tensor | None = None  # given a blank image, where the loss needs it; NaN without an image
    teacher_logp_K: torch.Tensor | None = None  # the teacher's, if there is one
    teacher_ids_Kk: torch.Tensor | None = None  # int64, the teacher's k most likely ids, where the loss is over them
    teacher_top_Kk: torch.Tensor | None = None  # its log-probs of these ids
    old_is_sampler: bool = False  # old_logp_K is sampler_logp_K, so that the gap is measured on the current log-probs
