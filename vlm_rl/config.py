"""The configuration of a run: strict models, read from YAML with dotted overrides.

    config = load_config("configs/toy.yaml", ["algorithm.name=ba", "train.lr=1e-5"])

An unknown key is an error that names its path and the nearest known key. Nothing in a file is executed or
interpolated. Options of DeepSpeed and vLLM pass through unchanged in ``train.deepspeed`` and ``rollout.vllm``. This
module imports no torch.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from vlm_rl.errors import UserError
from vlm_rl.foreign_names import translate

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LayerPatches = Literal["auto"] | bool
Rows = Literal["auto", "padded"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
ModelPart = Literal["tower", "merger", "language_model"]
_Model = TypeVar("_Model", bound="ConfigSection")

# What a resume may change; any other change would make it a different run.
MUTABLE_KEYS = (
    "train.steps",
    "checkpoint.",
    "log.",
    "eval.",
    "rollout.max_gap",
    "rollout.server",  # where the servers are, their token, and how long to wait for them
    "train.max_skipped_in_a_row",
    "reward.function_timeout",
    *(f"reward.judge.{key}" for key in ("url", "api_key_env", "concurrency", "timeout", "retries", "cache")),
)


class ConfigSection(BaseModel):
    """The base of every section: it refuses unknown keys, converts no types, and its values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each pair of values that do not fit together."""
        yield from ()

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if messages := list(self.conflicts()):
            raise ValueError("\n".join(messages))
        return self


class LoraConfig(ConfigSection):
    """Low-rank adapters: the model stays as it is, and (alpha / rank) B A is trained beside its matrices."""

    rank: PositiveInt = 16
    """Rows of A and columns of B. A matrix [out, in] gets rank * (in + out) parameters to train."""
    alpha: PositiveInt = 32
    """The adapter's product is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["language_model"], min_length=1)
    """Which linear layers get an adapter: all of a part (language_model, tower, merger), or those of the language
    model with this name, such as q_proj. The output head and the embeddings get none."""
    dropout: NonNegativeFloat = 0.0
    """Must be 0: the sampler has no dropout, so that its distribution would differ from the learner's."""
    load_in_4bit: bool = False
    """QLoRA: keep the linear layers of the language model in 4 bits (NF4). On GPUs, with bitsandbytes."""
    sync: Literal["merged", "adapter"] = "merged"
    """What reaches the engine after an update: the merged weights, or the adapter alone beside the base model that it
    keeps. adapter needs the vllm sampler and targets in the language model, and no merging of the whole model."""

    def conflicts(self) -> Iterator[str]:
        if self.dropout:
            yield (
                f"dropout is {self.dropout}, and the sampler has none: its distribution would differ from the "
                "learner's; leave it at 0"
            )
        if self.sync == "adapter" and self.load_in_4bit:
            yield (
                "sync is adapter, and load_in_4bit is true: the engine's base model has 16 bits, and the learner's "
                "has 4; use sync=merged"
            )
        if self.sync == "adapter" and (parts := sorted({"tower", "merger"} & {*self.targets})):
            yield (f"sync is adapter, and targets names {', '.join(parts)}, where vLLM applies none: use sync=merged")


class ModelConfig(ConfigSection):
    """The policy: which model, and how it uses memory."""

    path: str
    """A Hugging Face folder of a model family that docs/models.md lists."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on an accelerator, float32 on a CPU."""
    freeze: list[ModelPart] = []
    """Parts that are not trained: tower (the vision tower), merger (what maps its output to the language model), or
    language_model (all else, output head included)."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the layers and recompute the rest in the backward pass."""
    offload_activations: bool = False
    """Keep those inputs in host memory. On a CPU they are there anyway."""
    rows: Rows = "auto"
    """How the learner computes the responses to a prompt. auto: behind one copy of the prompt where that is exact for
    the model, else padded. padded: each response in a row of its own, behind its own copy of the prompt, through
    transformers' own attention. That is exact for every causal text model, and computes the prompt again for each
    response."""
    layer_patches: LayerPatches = "auto"
    """Compute RMSNorm, SiLU-gated MLP and the vision tower's patch embedding and attention by our own code: the same
    numbers with less memory and fewer calls. on, off, or auto: on for a CPU, where that code has run, off for a GPU,
    where it has not."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and freeze everything else; null trains the model itself. See docs/lora.md."""

    def conflicts(self) -> Iterator[str]:
        targets = self.lora.targets if self.lora else []
        parts = {target if target in get_args(ModelPart) else "language_model" for target in targets}
        if both := sorted(parts & {*self.freeze}):
            yield (
                f"freeze names {', '.join(both)}, and lora.targets gives adapters there: leave out the one or the "
                "other; a part without adapters stays as it is"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            yield (
                "offload_activations needs gradient_checkpointing: it moves the inputs that checkpointing keeps; "
                "without checkpointing it would also move the weights that every layer keeps for its backward pass"
            )


class DataConfig(ConfigSection):
    """What is trained and evaluated on, and how a prompt is rendered."""

    train: list[str] = Field(min_length=1)
    """Prepared sets (folders written by `vlm-rl prepare`)."""
    eval: list[str] = []
    """Prepared sets to evaluate on during training."""
    max_prompt_tokens: PositiveInt = 4096
    """Longest prompt, image tokens included. Longer ones are left out of training and counted; none is ever cut."""
    min_pixels: PositiveInt = 3136
    """Fewest pixels of an image; those of the sets' preparation."""
    max_pixels: PositiveInt = 1_003_520
    """Images are resized once to between min_pixels and max_pixels, on the pixel grid of the model's processor."""
    template: Literal["think_answer", "think_box", "plain"] = "think_answer"
    """How the prompt asks for the answer, and what format is rewarded: tags, a box after tags, or neither."""
    allow_test_rows: bool = False
    """Allow training on rows of a benchmark. It stamps the run and its checkpoints CONTAMINATED."""


class HadwConfig(ConfigSection):
    """History-aware difficulty weighting; see docs/algorithms/hadw.md."""

    enabled: bool = False
    """Weight prompts by how difficult they are against the belief so far."""
    scale: PositiveFloat = 1.3
    """lambda of the paper."""
    eta: PositiveFloat = 5.0
    """eta of the paper: scale of the belief's step size."""
    window: PositiveInt = 10
    """m of the paper: how many past beliefs determine how fast the belief moves."""
    variant: Literal["adaptive", "hard"] = "adaptive"
    """adaptive: the belief moves by a step that follows the spread of past beliefs; hard: it is the mean accuracy."""


class AlgorithmConfig(ConfigSection):
    """A named row of vlm_rl.algorithms, with any single factor overridden."""

    name: str = "luspo"
    """The row of vlm_rl.algorithms that sets what is null below; docs/algorithms.md describes each."""
    advantage: Literal["group_norm", "group_center", "leave_one_out"] | None = None
    """Baseline and scale of a response's reward within its group; null: the algorithm's."""
    ratio: Literal["token", "sequence"] | None = None
    """New over old probability, of each token or of the whole response; null: the algorithm's."""
    surrogate: Literal["clip", "cispo"] | None = None
    """How the ratio is limited: PPO's clipped minimum, or a clipped weight on the log-prob; null: the algorithm's."""
    aggregation: Literal["sequence", "token", "length_weighted", "constant", "balanced"] | None = None
    """How tokens are weighted in the batch's loss; null: the algorithm's."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below 1 - clip_low; null: the algorithm's."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above 1 + clip_high; null: the algorithm's."""
    dynamic_sampling: bool | None = None
    """Draw more prompts in place of groups whose responses all have the same reward; null: the algorithm's."""
    max_sampling_rounds: PositiveInt = 3
    """How many times dynamic sampling may draw prompts for one step."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom of the group's standard deviation."""
    correction_cap: PositiveFloat = 2.0
    """Cap of the truncated importance correction for the gap between sampler and learner."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the frozen reference, model.path; with 0 no reference is loaded."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    mask_truncated: bool = False
    """Overlong filtering (DAPO): a response cut at rollout.max_tokens is rewarded but not trained on."""
    hadw: HadwConfig = HadwConfig()


class RewardPartConfig(ConfigSection):
    """What each part below has in common."""

    weight: float = 1.0
    """Its value times this is added to the reward. Of no use in another role."""
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
    """The function, as module.function."""
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


class JudgeConfig(RewardPartConfig):
    """A model behind an OpenAI-compatible endpoint that scores each response; see docs/rewards.md."""

    url: str
    """Up to and including /v1."""
    model: str
    """The model's name there."""
    prompt: str
    """A text file that holds {response} and may hold {question}, {answer} and {extracted}, the response's answer."""
    parser: Literal["number", "yes_no", "json"] = "number"
    """How the score is read from the reply: its last number, its last yes or no, or "score" in its last JSON."""
    lowest: float = 0.0
    """The score whose value is 0."""
    highest: float = 1.0
    """The range of the judge's scores, of which the value is 0 and 1. A score outside it is no score."""
    images: bool = False
    """Send the problem's images too."""
    max_tokens: PositiveInt = 512
    """Longest reply in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Of the judge's sampling; 0 is greedy."""
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
                "url is no plain http(s) address such as http://127.0.0.1:8000/v1; a key goes into an environment "
                "variable, see api_key_env"
            )
        if self.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            yield "api_key_env must be the name of an environment variable, such as JUDGE_API_KEY"
        if not self.lowest < self.highest:
            yield f"lowest is {self.lowest} and highest {self.highest}: lowest must be below highest"


_PART_NAMES = (
    *("accuracy", "format", "overlong", "coin", "repetition", "brevity", "function", "iou", "point_in_box", "judge"),
    "total",
)


class RewardConfig(ConfigSection):
    """The parts of the reward; vlm_rl.rewards has the formula."""

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
    function: str = ""
    """Your own part of the reward, as module.function; the run stops where it fails. Needs allow_function."""
    function_weight: float = 1.0
    """What its value is multiplied by; may be negative."""
    functions: dict[str, FunctionConfig] = {}
    """Several functions of your own, by name. Needs allow_function."""
    function_timeout: PositiveFloat = 60.0
    """Seconds that one call of any of these may take: for a response, or for a batch where it takes one."""
    allow_function: bool = False
    """Allow importing your functions, which runs the code of their modules."""
    iou: IouConfig | None = None
    """A box in the answer against the problem's gold box."""
    point_in_box: GroundingConfig | None = None
    """1 where the answer's point is in the problem's gold box."""
    judge: JudgeConfig | None = None
    undecided: Literal["zero", "drop"] = "zero"
    """What to do with a response that grader, function or judge could not judge: that part is 0, and for the grader
    the answer wrong (zero), or the response is left out (drop)."""
    grader_workers: PositiveInt = 2
    """Processes on each rank that compare answers symbolically."""
    grader_timeout: PositiveFloat = 5.0
    """CPU seconds for one symbolic comparison."""

    def conflicts(self) -> Iterator[str]:
        paths = {f"functions.{name}.path": function.path for name, function in self.functions.items()}
        for key, path in {"function": self.function, **paths}.items():
            if path and not self.allow_function:
                yield (
                    f"reward.{key} is {path!r}, and importing it runs the code of its module: "
                    "read that code, then set reward.allow_function=true"
                )
        for name in self.functions:
            if name in _PART_NAMES or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                yield (
                    f"functions.{name}: a function's name has small letters, digits and _, and is none of "
                    f"{', '.join(_PART_NAMES)}"
                )
        judges = [name for name, section in self.named_parts.items() if section.role == "accuracy"]
        if len(judges) > 1:
            yield f"{' and '.join(judges)} have the role accuracy, which only one part can have"

    @property
    def named_parts(self) -> dict[str, RewardPartConfig]:
        """Return the sections of the parts that have one, by name, in the order in which they are added."""
        sections = {"iou": self.iou, "point_in_box": self.point_in_box, "judge": self.judge}
        return {**self.functions, **{name: section for name, section in sections.items() if section is not None}}


def is_server_address(text: str) -> bool:
    """Tell whether this is http://HOST:PORT, or https, and nothing more."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:
        return False


class RolloutConfig(ConfigSection):
    """How responses are sampled."""

    sampler: Literal["auto", "vllm", "transformers", "server"] = "auto"
    """The engine; auto: vllm where it is installed, else transformers. server: those of rollout.servers."""
    servers: list[str] | str = []
    """The addresses of servers that `vlm-rl serve` has started, such as http://127.0.0.1:8000, or a file with one a
    line, which is read again before each sync. See docs/scaling.md."""
    server_token: str = "~/.cache/vlm_rl/server_token"
    """The file with the token that the servers ask for. `vlm-rl serve` writes it where it is missing."""
    server_timeout: PositiveFloat = 600.0
    """Seconds to wait while no server answers; then the run saves its state and ends with exit code 75."""
    prompts_per_step: PositiveInt = 128
    """P: prompts in a rollout batch, over all ranks."""
    responses_per_prompt: PositiveInt = 8
    """G: responses to each prompt."""
    max_tokens: PositiveInt = 4096
    """Longest response in tokens; L_max of the overlong penalty."""
    temperature: PositiveFloat = 1.0
    """Of the sampling; the learner's log-probs have it too."""
    top_p: float = 1.0
    """Must be 1: otherwise the sampler's distribution would differ from the learner's."""
    top_k: int = 0
    """Must be 0 (off), for the same reason."""
    max_gap: PositiveFloat | None = None
    """The run stops, before the update, where |learner's log-prob - sampler's|, averaged over tokens, is larger.
    null: 0.001 for a float32 model, 0.1 for a bfloat16 one."""
    batch_size: PositiveInt = 256
    """Responses that one rank's engine, or one server, generates at the same time."""
    vllm: dict[str, Any] = {}
    """Passed to vllm.LLM unchanged. Options that the learner decides are refused, and so is tensor parallelism: each
    rank has an engine with the whole model."""

    def conflicts(self) -> Iterator[str]:
        if bool(self.servers) != (self.sampler == "server"):
            yield (
                f"sampler is {self.sampler!r} and servers is {self.servers!r}: sampler: server needs addresses, "
                "and no other engine uses them"
            )
        if isinstance(self.servers, list):
            yield from (
                f"servers: {url!r} is not an address such as http://127.0.0.1:8000"
                for url in self.servers
                if not is_server_address(url)
            )
        if self.top_p != 1.0 or self.top_k != 0:
            yield (
                f"training needs top_p 1 and top_k 0, got top_p {self.top_p} and top_k {self.top_k}: "
                "with truncated sampling the learner would differentiate a different distribution"
            )


class TrainConfig(ConfigSection):
    """Optimizer steps, their batches, and DeepSpeed."""

    steps: PositiveInt = 100
    """Rollout steps; each takes prompts_per_step / mini_batch_prompts optimizer steps."""
    mini_batch_prompts: PositiveInt = 16
    """Prompts of one optimizer step, over all ranks; at most rollout.prompts_per_step."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens in one packed row; a group's prompt counts once."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW or SGD."""
    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    lr_by_part: dict[ModelPart, NonNegativeFloat] = {}
    """Learning rates of single parts of the model, named as in model.freeze; the others have lr."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 along a cosine until the last step."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of a gradient; a larger one is scaled down to it."""
    fixed_grad_norm: PositiveFloat | None = None
    """Rescale every gradient to this norm instead of clipping, to compare rules whose losses differ in scale."""
    max_skipped_in_a_row: PositiveInt = 5
    """The run aborts after this many optimizer steps in a row that the gradient guard refused."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed's ZeRO: 1 divides the optimizer's state over the ranks, 2 the gradients too, 3 the weights too."""
    deepspeed: dict[str, Any] = {}
    """Merged over the DeepSpeed configuration that the learner builds."""


class EvalConfig(ConfigSection):
    """Evaluation during training."""

    every: NonNegativeInt = 0
    """Rollout steps between evaluations on data.eval; 0 switches them off."""
    samples: PositiveInt = 1
    """k of avg@k; with temperature 0 it must be 1."""
    temperature: NonNegativeFloat = 0.0
    """Of the sampling; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens; null: rollout.max_tokens."""

    def conflicts(self) -> Iterator[str]:
        if self.temperature == 0 and self.samples != 1:
            yield (
                f"greedy decoding (temperature 0) always gives the same answer: samples must be 1, not {self.samples}"
            )


class CheckpointConfig(ConfigSection):
    """When checkpoints are written, and which are kept."""

    every: PositiveInt = 50
    """Rollout steps between checkpoints; the last step is always saved."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_every: NonNegativeInt = 0
    """Also keep, for ever, each step that is a multiple of this; 0 keeps none."""


class LogConfig(ConfigSection):
    """What is shown and logged besides metrics.jsonl."""

    trackers: list[TrackerName] = []
    """Where metrics are also sent."""
    samples_every: NonNegativeInt = 10
    """Rollout steps between tables of sample responses in the terminal; 0 prints none."""


class Config(ConfigSection):
    """The configuration of a run."""

    seed: int = 0
    """Of the order of prompts and of the sampling."""
    out: str
    """The run directory."""
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def conflicts(self) -> Iterator[str]:
        lora = self.model.lora
        if lora is not None and lora.sync == "adapter" and self.rollout.sampler not in ("auto", "vllm"):
            yield (
                f"model.lora.sync is adapter, and rollout.sampler is {self.rollout.sampler}, which takes merged "
                "weights alone: use the vllm sampler, or model.lora.sync=merged"
            )
        yield from _conflict_of_4bit(self.model, self.train)
        prompts, mini = self.rollout.prompts_per_step, self.train.mini_batch_prompts
        if mini > prompts:
            yield (
                f"train.mini_batch_prompts ({mini}) is above rollout.prompts_per_step ({prompts}): "
                "a mini-batch is a part of the rollout batch; lower the first or raise the second"
            )
        row = self.rollout.max_tokens
        if self.train.micro_batch_tokens < row:
            yield (
                f"train.micro_batch_tokens ({self.train.micro_batch_tokens}) is below rollout.max_tokens ({row}): "
                "a response is never split, so a packed row must hold the longest one"
            )
        if self.reward.overlong_buffer > self.rollout.max_tokens:
            yield (
                f"reward.overlong_buffer ({self.reward.overlong_buffer}) is above rollout.max_tokens "
                f"({self.rollout.max_tokens}): every response would be penalised"
            )
        if self.data.eval and "every" not in self.eval.model_fields_set:
            yield (
                f"data.eval names {', '.join(self.data.eval)}, and eval.every is not given, so that nothing would be "
                "evaluated: set eval.every to a number of rollout steps, or to 0 to leave it off"
            )


# -- supervised fine-tuning ------------------------------------------------------------------------


def _conflict_of_4bit(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    if model.lora is not None and model.lora.load_in_4bit and train.zero_stage == 3:
        yield (
            "model.lora.load_in_4bit is true, and train.zero_stage is 3, which cannot divide packed weights: use "
            "stage 2"
        )


class SftDataConfig(DataConfig):
    """What is learned by `vlm-rl sft`, and how a prompt is rendered."""

    train: list[str] = Field(min_length=1)
    """Prepared sets whose rows hold a response (`vlm-rl prepare --response COLUMN`)."""
    eval: list[str] = []
    """Must be empty: `vlm-rl eval` measures the checkpoints."""
    max_response_tokens: PositiveInt = 4096
    """Longest response in tokens. Longer ones are left out and counted; none is ever cut."""

    def conflicts(self) -> Iterator[str]:
        if self.eval:
            yield f"eval names {', '.join(self.eval)}, and nothing is evaluated here: run vlm-rl eval on a checkpoint"


class SftTrainConfig(TrainConfig):
    """Optimizer steps of `vlm-rl sft`, their batches, and DeepSpeed."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    mini_batch_prompts: PositiveInt = 16
    """Responses of one optimizer step, over all ranks, each behind its prompt."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens in one packed row, prompts included."""
    lr: PositiveFloat = 1e-5
    """Learning rate after the warm-up."""


class SftCheckpointConfig(CheckpointConfig):
    """When `vlm-rl sft` writes checkpoints, and which are kept."""

    every: PositiveInt = 50
    """Optimizer steps between checkpoints; the last step is always saved."""


class SftLogConfig(ConfigSection):
    """What `vlm-rl sft` logs besides metrics.jsonl."""

    trackers: list[TrackerName] = []
    """Where metrics are also sent."""


class SftConfig(ConfigSection):
    """The configuration of supervised fine-tuning, `vlm-rl sft`."""

    seed: int = 0
    """Of the order of the responses, and of new adapters."""
    out: str
    """The run directory."""
    model: ModelConfig
    data: SftDataConfig
    train: SftTrainConfig = SftTrainConfig()
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()
    log: SftLogConfig = SftLogConfig()

    def conflicts(self) -> Iterator[str]:
        yield from _conflict_of_4bit(self.model, self.train)
        budget, longest = self.train.micro_batch_tokens, self.data.max_response_tokens
        if budget < longest:
            yield (
                f"train.micro_batch_tokens ({budget}) is below data.max_response_tokens ({longest}): "
                "a response is never split, so a packed row must hold the longest one"
            )


# -- reading and writing ---------------------------------------------------------------------------


def load_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the configuration of `vlm-rl sft`. Raises UserError as load_config does."""
    raw, where = read_tree(path, overrides), str(path)
    return parse_tree(SftConfig, _renamed(_tuples(raw), where), where, overrides)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key.path=value`` overrides, and validate.

    Raises UserError with the file or the override at fault, the key's path, the value, and the nearest known key.
    """
    return parse_config(read_tree(path, overrides), where=str(path), overrides=overrides)


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a YAML file as plain values and apply the overrides. Raises UserError where it cannot be read."""
    path = Path(path)
    try:
        tree = OmegaConf.load(path)
        if not OmegaConf.is_dict(tree):
            raise UserError(f"{path}: the top level must be a mapping of sections, as in the files of configs/")
        for item in overrides:
            tree = _with_override(tree, item)
        return OmegaConf.to_container(tree, resolve=False)
    except FileNotFoundError:
        raise UserError(f"no configuration file at {path}; the shipped ones are in configs/") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {_one_line(error)}") from None


def _with_override(tree: Any, item: str) -> Any:
    key, equals, _ = item.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"override {item!r} is not of the form key.path=value, e.g. train.lr=1e-5")
    try:
        return OmegaConf.merge(tree, OmegaConf.from_dotlist([item]))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"override {item!r} cannot be read: {_one_line(error)}") from None


def parse_config(raw: Any, where: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Validate a tree of plain values as a run's configuration. Raises UserError as load_config does.

    ``where`` and ``overrides`` say in messages where the tree comes from; the overrides are applied already.
    """
    return parse_tree(Config, _renamed(_tuples(raw), where) if isinstance(raw, dict) else raw, where, overrides)


def parse_tree(kind: type[_Model], raw: Any, where: str, overrides: Sequence[str] = ()) -> _Model:
    """Validate a tree of plain values as a model of class ``kind``. Raises UserError as load_config does.

    Args:
        kind: the class of the whole tree.
        raw: the tree.
        where: where the tree comes from, for messages.
        overrides: those that are applied already, for messages.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{where}: the top level must be a mapping of sections, not {type(raw).__name__}")
    for key, value in _strings(raw):
        if "${" in value:
            place = _place(key, where, overrides)
            raise UserError(f"{place}: {key} is {value!r}: interpolation is not supported; write the value itself")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(where, detail, kind, overrides)]
        if all(detail["type"] == "value_error" and detail["loc"] for detail in error.errors()):  # of sections alone
            lines += _conflict_lines(_unchecked(kind, raw).conflicts(), where, "", overrides)
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def _unchecked(kind: type[_Model], raw: dict[str, Any]) -> _Model:
    """Return the section with values that are valid one by one, so that more conflicts can be looked for."""
    values = {}
    for name, value in raw.items():
        annotation = kind.model_fields[name].annotation
        sections = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
        section = next((item for item in sections if issubclass(item, ConfigSection)), None)
        if section is None or not isinstance(value, dict):
            values[name] = value
        elif get_origin(annotation) is dict:
            values[name] = {key: _unchecked(section, item) for key, item in value.items()}
        else:
            values[name] = _unchecked(section, value)
    return kind.model_construct(**values)


def _place(key: str, where: str, overrides: Sequence[str]) -> str:
    """Return where a key got its value: the last override that touches it, or else the file."""
    path = f"{key.replace('[', '.').replace(']', '')}."
    for item in reversed(overrides):
        name = f"{item.partition('=')[0]}."
        if path.startswith(name) or name.startswith(path):
            return f"override {item!r}"
    return where


def save_config(config: Config | SftConfig, path: Path) -> None:
    """Write the resolved configuration; load_config or load_sft_config reads it back to an equal one."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def changed_keys(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ between two dumped configurations."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [
            key for name in keys for key in changed_keys(old.get(name), new.get(name), f"{prefix}.{name}".lstrip("."))
        ]
    return [] if old == new or (isinstance(old, list | tuple) and list(old) == list(new)) else [prefix]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _strings(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, str):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _strings(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _strings(value, f"{prefix}[{index}]")


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    """Turn `betas`, a list in YAML, into the tuple that strict validation asks for."""
    train = raw.get("train")
    if isinstance(train, dict) and isinstance(train.get("betas"), list):
        raw = {**raw, "train": {**train, "betas": tuple(train["betas"])}}
    return raw


def _renamed(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Give the old key model.freeze_vision its new name. Raises UserError where both are given."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("freeze_vision"), bool):
        return raw
    if model.get("freeze"):
        raise UserError(f"{where}: model.freeze_vision is the old name of a part of model.freeze: remove it")
    model = dict(model)
    if model.pop("freeze_vision"):
        model["freeze"] = ["tower", "merger"]
        _note("model.freeze_vision=true is read as model.freeze=[tower, merger], its name today")
    return {**raw, "model": model}


@cache
def _note(text: str) -> None:
    """Print a line to standard error, once, and on one rank alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)


def _explain(where: str, detail: Any, kind: type[BaseModel], overrides: Sequence[str]) -> list[str]:
    """Return the lines that explain an error of pydantic's."""
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "value_error":
        return _conflict_lines(detail["msg"].removeprefix("Value error, ").split("\n"), where, path, overrides)
    where = _place(path, where, overrides)
    if detail["type"] == "extra_forbidden":
        if theirs := list(translate(path, detail["input"])):
            return [f"{where}: unknown key: {line}" for line in theirs]
        known = _known_keys(kind, detail["loc"][:-1])
        close = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
        return [f"{where}: unknown key {path}: {hint}"]
    if detail["type"] == "missing":
        return [f"{where}: {path} is missing; add it, because it has no default"]
    return [f"{where}: {path} is {detail['input']!r}: {detail['msg']}"]


def _conflict_lines(messages: Iterable[str], where: str, path: str, overrides: Sequence[str]) -> list[str]:
    """Return messages about values that do not fit together, from the file, the overrides or both."""
    given = [item for item in overrides if item.startswith(f"{path}." if path else "")]
    place = f"{where} with {' '.join(given)}" if given else where
    return [f"{place}: {path + ': ' if path else ''}{message}" for message in messages]


def _known_keys(section: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    names = iter(location)
    for name in names:
        if isinstance(name, str):  # a number is an index into a list of sections
            annotation = section.model_fields[name].annotation
            section = _section_type(annotation)
            if get_origin(annotation) is dict:
                next(names, None)  # the name of a section in it
    return list(section.model_fields)


def _section_type(annotation: Any) -> type[BaseModel]:
    if get_origin(annotation) in (Union, UnionType, list, dict):
        annotation = next(arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel))
    return annotation


def is_plain_address(url: str) -> bool:
    """Tell whether an address has scheme, host and path alone: no name, password, query or fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bare


BENCHMARK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_benchmark_name(name: str) -> str:
    """Return the name if results can be stored under it. Raises UserError otherwise.

    The name of a prepared set is that of its folder.
    """
    if not BENCHMARK_NAME.fullmatch(name):
        raise UserError(
            f"results cannot be stored under the name {name!r}: a set is named after its folder, which may hold "
            "only letters, digits, dot, dash and underscore; rename the folder"
        )
    return name
