"""The section `reward`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.names import is_plain_address, is_variable_name


class RewardPartConfig(ConfigSection):
    """What each part below has in common."""

    weight: float = 1.0
    """Its value times this is added to the reward. Only for the role part; other roles refuse it."""
    role: Literal["part", "accuracy", "logged"] = "part"
    """part: added to the reward. accuracy: it decides, instead of the grader, whether the response is right: from 0.5
    on. logged: a metric and nothing else."""

    def conflicts(self) -> Iterator[str]:
        if self.role != "part" and self.weight != 1.0:
            place = "reward.accuracy is the weight then" if self.role == "accuracy" else "it is not rewarded"
            yield f"weight is {self.weight} in the role {self.role}, where {place}: leave it out"


class FunctionConfig(RewardPartConfig):
    """A reward function of your own; docs/rewards.md gives its arguments."""

    path: str
    """The function, as module.function; cell:NAME is one that only the process has that called vlm_rl.fit."""
    on_failure: Literal["undecided", "stop"] = "undecided"
    """What follows where it fails: the response is treated as reward.undecided says, or the run stops."""


class GroundingConfig(RewardPartConfig):
    """A part that compares coordinates in the answer with the problem's gold box."""

    coordinates: Literal["auto", "pixels", "thousandths"] = "auto"
    """What the model writes: pixels of the resized image, or thousandths of its sides. auto: as its family does."""


class IouConfig(GroundingConfig):
    """The overlap of the answer's box with the gold box: shared area over covered area."""

    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """1 from this overlap on, else 0; null: the overlap itself."""


class EndpointPartConfig(RewardPartConfig):
    """A part that a server decides."""

    url: str
    """Up to and including /v1."""
    model: str
    """The model's name there."""
    images: bool = False
    """Send the problem's images too."""
    api_key_env: str = ""
    """The environment variable that holds the API key; "" sends none."""
    concurrency: PositiveInt = 16
    """Requests of one rank at the same time."""
    timeout: PositiveFloat = 60.0
    """Seconds for a whole reply."""
    retries: NonNegativeInt = 3
    """Further attempts after a failure that may pass, with a pause that doubles each time from one second on."""
    cache: str = ""
    """Folder of replies that are not asked for again; "": judge_cache in the run's directory."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if not is_plain_address(self.url):
            yield (
                "url is not a plain http(s) address such as http://127.0.0.1:8000/v1; a key goes into an environment "
                "variable, see api_key_env"
            )
        if self.api_key_env and not is_variable_name(self.api_key_env):
            yield "api_key_env must be the name of an environment variable, such as JUDGE_API_KEY"


class JudgeConfig(EndpointPartConfig):
    """A model behind an OpenAI-compatible endpoint that scores each response in words; see docs/rewards.md."""

    prompt: str
    """A text file that holds {response} and may hold {question}, {answer} and {extracted}, the response's answer."""
    parser: Literal["number", "yes_no", "json"] = "number"
    """How the score is read from the reply: its last number, its last yes or no, or "score" in its last JSON."""
    lowest: float = 0.0
    """The score whose value is 0."""
    highest: float = 1.0
    """The score whose value is 1. A score outside lowest to highest does not count."""
    max_tokens: PositiveInt = 512
    """Longest reply in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 is greedy."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if not self.lowest < self.highest:
            yield f"lowest is {self.lowest} and highest {self.highest}: lowest must be below highest"


class RewardModelConfig(EndpointPartConfig):
    """A reward model on a server of vLLM that classifies: the probability that it gives a response; see
    docs/rewards.md."""

    url: str
    """Of the server, without /v1."""
    label: NonNegativeInt = 0
    """Which of its labels counts, from 0; a model with one label has 0."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.url.rstrip("/").endswith("/v1"):
            yield f"url is {self.url!r}: vLLM classifies beside /v1, at /classify; leave /v1 out"


class RewardConfig(ConfigSection):
    """The parts of the reward; vlm_rl.rewards.reward has the formula."""

    accuracy: NonNegativeFloat = 1.0
    """Reward for a right answer."""
    format: NonNegativeFloat = 0.5
    """Reward for a response in the template's format."""
    overlong_buffer: NonNegativeInt = 512
    """The last tokens before max_tokens, over which the penalty grows; 0 switches it off."""
    overlong_factor: NonNegativeFloat = 0.3
    """The penalty at max_tokens. LUSPO has 0.3; DAPO has 1.0 for rewards of +1 and -1, so 0.5 for 1 and 0."""
    coin: NonNegativeFloat = 0.0
    """Weight of a fair coin, tossed without looking at the response: a control, which should not change length."""
    repetition: NonNegativeFloat = 0.0
    """Largest penalty for repeated n-grams of tokens, reached where all repeat; 0 switches it off."""
    repetition_ngram: PositiveInt = 20
    """n of the n-grams."""
    brevity: NonNegativeFloat = 0.0
    """Bonus for a short right answer: this much at zero tokens, falling to 0 at max_tokens. 0 switches it off."""
    tool_use: NonNegativeFloat = 0.0
    """Bonus for a right answer after a call that an environment's tool has answered; DeepEyes has one. 0 switches it
    off."""
    group_length: NonNegativeFloat = 0.0
    """Penalty of a group's longest response where all are right; it falls with the response's length and with the
    group's share of right ones, so a prompt that nobody solves is not shortened. prime-rl has 0.25. 0 switches it
    off."""
    function: str = ""
    """Your own part of the reward, as module.function; the run stops where it fails. Needs allow_function."""
    function_weight: float = 1.0
    """What its value is multiplied by; may be negative."""
    functions: dict[str, FunctionConfig] = {}
    """Several functions of your own, by name. Needs allow_function."""
    function_timeout: PositiveFloat = 60.0
    """Seconds that one call of any of these may take: for a response, a prompt or a batch, whichever it takes."""
    allow_function: bool = False
    """Allow importing your functions, which runs the code of their modules."""
    iou: IouConfig | None = None
    """A box in the answer against the problem's gold box."""
    point_in_box: GroundingConfig | None = None
    """1 where the answer's point is in the problem's gold box."""
    judge: JudgeConfig | None = None
    reward_model: RewardModelConfig | None = None
    undecided: Literal["zero", "drop"] = "zero"
    """What to do with a response that grader, function or judge could not judge: that part is 0, and for the grader
    the answer wrong (zero), or the response is left out (drop)."""
    max_undecided: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A run stops, saved and without this update, where more than this share of a step's responses got no verdict; 1
    never stops it."""
    grader_workers: PositiveInt = 2
    """Worker processes per rank for symbolic comparisons. As many model-written programs run at a time."""
    grader_timeout: PositiveFloat = 5.0
    """CPU seconds for one symbolic comparison."""

    def conflicts(self) -> Iterator[str]:
        paths = {f"functions.{name}.path": function.path for name, function in self.functions.items()}
        for key, path in {"function": self.function, **paths}.items():
            if path and not self.allow_function:
                yield (
                    f"{key} is {path!r}, and importing it runs the code of its module: "
                    "read that code, then set reward.allow_function=true"
                )
        reserved = {*RewardConfig.model_fields, "overlong", "total"}  # what metrics of parts are called
        for name in self.functions:
            if name in reserved or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                yield (
                    f"functions.{name}: a function's name has small letters, digits and _, and is neither a key of "
                    "reward nor overlong or total"
                )
        if len(judges := self._accuracy_parts()) > 1:
            yield f"{' and '.join(judges)} have the role accuracy, which only one part can have"

    @property
    def accuracy_part(self) -> str | None:
        """Return the name of the part with the role accuracy; None if the grader decides."""
        return next(iter(self._accuracy_parts()), None)

    @property
    def pays_nothing(self) -> bool:
        """Return whether every response has the reward 0."""
        sections = (*self.functions.values(), self.iou, self.point_in_box, self.judge, self.reward_model)
        weights = [section.weight for section in sections if section and section.role == "part"]
        overlong = self.overlong_factor if self.overlong_buffer else 0.0
        weights += [overlong, self.function_weight if self.function else 0.0]
        return not any(
            (self.accuracy, self.format, self.coin, self.repetition, self.brevity, self.tool_use, *weights)
        )

    def _accuracy_parts(self) -> list[str]:
        ours = {name: getattr(self, name) for name in ("iou", "point_in_box", "judge", "reward_model")}
        sections: dict[str, RewardPartConfig | None] = {**self.functions, **ours}
        return [name for name, section in sections.items() if section and section.role == "accuracy"]
