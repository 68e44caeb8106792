"""The sections `train`, `checkpoint` and `log`, and the whole configuration of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.algorithm import AlgorithmConfig
from vlm_rl.config.base import ConfigSection, FractionBelowOne
from vlm_rl.config.engines import deepspeed_conflicts
from vlm_rl.config.environments import EnvironmentConfig
from vlm_rl.config.evaluation import EvalConfig
from vlm_rl.config.policy import DataConfig, ModelConfig, ModelPart
from vlm_rl.config.rewards import RewardConfig
from vlm_rl.config.rollout import RolloutConfig
from vlm_rl.errors import near

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]


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
    warmup_rollout_steps: NonNegativeInt = 0
    """The same in rollout steps, in place of warmup_steps: all optimizer steps of so many. The LUSPO paper has 20."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 along a cosine until the last step."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of a gradient; a larger one is scaled down to it."""
    fixed_grad_norm: PositiveFloat | None = None
    """Rescale every gradient to this norm instead of clipping, to compare rules whose losses differ in scale."""
    old_logprobs: Literal["learner", "sampler"] = "learner"
    """The old log-probs of the ratio. learner: the learner's at the weights that sampled, those of the first
    mini-batch from its own forward pass. sampler: the engine's, which saves a pass over the other mini-batches and
    puts the engine's noise into the ratio; the gap is then measured on the first mini-batch. See
    docs/algorithms.md."""
    max_skipped_in_a_row: PositiveInt = 5
    """The run aborts after this many optimizer steps in a row that the gradient guard refused."""
    start_from: str | None = None
    """A checkpoint of a different run, RUN, RUN/60 or RUN/best, whose weights and optimizer the run begins with.
    Steps, belief and order of prompts start from the beginning. `--start-from RUN/60` sets it. model.path stays the
    KL penalty's reference."""
    sequence_parallel: PositiveInt = 1
    """So many neighbouring ranks compute one packed row together: each has a part of its tokens, and in attention a
    part of the heads, whose number this must divide (docs/scaling.md). Experimental on GPUs."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed's ZeRO: 1 divides the optimizer's state over the ranks, 2 the gradients too, 3 the weights too. 3
    is experimental on GPUs."""
    deepspeed: dict[str, Any] = {}
    """Merged over the DeepSpeed configuration that the learner builds. Keys that others decide are refused."""

    def warmup_updates(self, updates_per_step: int) -> int:
        """Return the optimizer steps of warm-up, where a rollout step takes so many."""
        return self.warmup_rollout_steps * updates_per_step or self.warmup_steps

    def conflicts(self) -> Iterator[str]:
        yield from deepspeed_conflicts(self.deepspeed)
        if self.warmup_steps and self.warmup_rollout_steps:
            yield (
                f"warmup_steps is {self.warmup_steps}, and warmup_rollout_steps is {self.warmup_rollout_steps}: "
                "leave one of them out"
            )
        if self.zero_stage < 2 and self.offload_device("offload_optimizer") != "none":
            yield (
                f"zero_stage is {self.zero_stage}, and deepspeed.zero_optimization.offload_optimizer is set: there "
                "DeepSpeed sums the gradients of rows in bfloat16, or moves nothing; set zero_stage=3, or 2"
            )
        if self.zero_stage < 3 and (device := self.offload_device("offload_param")) != "none":
            yield (
                f"zero_stage is {self.zero_stage}, and deepspeed.zero_optimization.offload_param.device is {device}: "
                "only ZeRO 3 moves weights; set zero_stage=3, or leave it out (device=none in a resume)"
            )

    def offload_device(self, what: Literal["offload_optimizer", "offload_param"]) -> str:
        """Return where DeepSpeed keeps optimizer or weights all the time: none, cpu or nvme."""
        zero = self.deepspeed.get("zero_optimization")
        options = zero.get(what) if isinstance(zero, dict) else None
        return options.get("device", "none") if isinstance(options, dict) else "none"


class CheckpointConfig(ConfigSection):
    """When checkpoints are written, and which are kept."""

    every: PositiveInt = 50
    """Rollout steps between checkpoints; the last step is always saved."""
    minutes: NonNegativeFloat = 30.0
    """Save also after the first step that ends so long after the last save; 0: only every so many steps."""
    keep_best: bool = True
    """Save the step of an evaluation that is the best so far on the first set of data.eval. RUN/best names the best
    evaluated step that is saved; it is kept either way."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept. The disk needs room for one more, while it is written."""
    keep_every: NonNegativeInt = 0
    """Also keep each step that is a multiple of this, permanently; 0 keeps none."""
    async_save: bool = False
    """Write checkpoints while the training continues; each rank holds a copy of what it writes in host memory."""


class TrackersConfig(ConfigSection):
    """What is logged besides metrics.jsonl (docs/trackers.md)."""

    trackers: list[TrackerName] = []
    """Where metrics and samples are also sent."""
    project: str = Field(default="vlm-rl", min_length=1)
    """The trackers' project; MLflow calls it an experiment."""
    group: str | None = None
    """The trackers' group of runs, e.g. the seeds of one study; null: none."""
    tags: list[str] = []
    """The trackers' tags of the run."""
    stall_minutes: NonNegativeFloat = 30.0
    """Where no rank has made progress for so long (sampled a token, computed a row, written a file), each writes
    its Python stacks and its last collective into log.txt; after the same time again the run ends with code 79. 0:
    off. See docs/reliability.md."""


class LogConfig(TrackersConfig):
    """What is shown and logged besides metrics.jsonl."""

    samples_every: NonNegativeInt = 10
    """Rollout steps between tables of sample responses, in the terminal and in trackers; 0: none."""


class Config(ConfigSection):
    """The configuration of a run."""

    seed: NonNegativeInt = 0
    """Random seed of the order of prompts and of the sampling."""
    out: str
    """The run directory."""
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def response_tokens(self) -> int:
        """Return the most tokens of a response, observed ones included, in training and in its evaluations."""
        sampled = max(self.rollout.max_tokens, (self.eval.max_tokens or 0) if self.eval.every else 0)
        return sampled + self.observed_tokens

    @property
    def observed_tokens(self) -> int:
        """Return the most tokens that an environment puts between the turns of a response."""
        return self.environment.max_observed_tokens if self.environment.name else 0

    @property
    def trained_tokens(self) -> int:
        """Return the most tokens of a response that is trained on, observed ones included."""
        return self.rollout.max_tokens + self.observed_tokens

    @property
    def context_tokens(self) -> int:
        """Return the most tokens of a prompt and its response together."""
        return self.data.max_prompt_tokens + self.response_tokens

    def shorter_rows(self, tokens: int) -> int | None:
        """Return half the tokens of a row, at least those of a longest response; None if that is no less."""
        return halved(tokens, self.trained_tokens)

    def conflicts(self) -> Iterator[str]:
        yield from _conflicts_of_environment(self.environment, self.rollout, self.data)
        yield from _conflicts_of_synced_weights(self)
        yield from conflicts_of_4bit(self.model, self.train)
        yield from conflicts_of_sequence_parallel(self.model, self.train)
        yield from _conflicts_of_evaluated_sets(self)
        yield from _conflicts_of_teacher_servers(self)
        yield from _conflicts_of_token_log_probs(self)
        yield from _conflicts_of_moved_optimizer(self)
        yield from _conflicts_of_sampled_log_probs(self)
        yield from _conflicts_of_batches_and_rows(self)


def halved(tokens: int, least: int) -> int | None:
    """Return half of the tokens, at least so many; None if that is no less."""
    half = max(tokens // 2, least)
    return half if half < tokens else None


def _conflicts_of_environment(
    environment: EnvironmentConfig, rollout: RolloutConfig, data: DataConfig
) -> Iterator[str]:
    """Check for what is not built for episodes, and for pixels that the engine would resize again."""
    if environment.name is None:
        return
    unfit = {
        "carry_over": "which continues a response token by token, not turn by turn",
        "ahead": "whose responses may hold tokens of several weights",
        "replay_routing": "which has no routing of observed tokens",
    }
    begin = f"environment.name is {environment.name}, and rollout"
    for key, why in unfit.items():
        if value := getattr(rollout, key):
            yield f"{begin}.{key} is {value}, {why}: leave one of them out"
    if rollout.tensor_parallel > 1 and rollout.sampler != "server":
        yield (
            f"{begin}.tensor_parallel is {rollout.tensor_parallel}: the ranks of an engine would be answered at "
            "different times; use rollout.sampler=server, or one rank"
        )
    if (low := environment.min_pixels or data.min_pixels) > (high := environment.max_pixels or data.max_pixels):
        yield f"environment.min_pixels ({low}) is above its max_pixels ({high}); lower the first or raise the second"
    if low < data.min_pixels or high > data.max_pixels:
        yield (
            f"environment.min_pixels and max_pixels ({low} to {high}) go beyond data.min_pixels and data.max_pixels "
            f"({data.min_pixels} to {data.max_pixels}), which the engine keeps images to: stay inside"
        )


def _conflicts_of_synced_weights(config: Config) -> Iterator[str]:
    """Check what an engine makes of the weights that it gets: adapters beside their base, and rounded ones."""
    lora = config.model.lora
    if lora is not None and lora.sync == "adapter" and config.rollout.sampler not in ("auto", "vllm"):
        yield (
            f"model.lora.sync is adapter, and rollout.sampler is {config.rollout.sampler}, which takes merged "
            "weights alone: use the vllm sampler, or model.lora.sync=merged"
        )
    if lora is not None and lora.sync == "adapter" and config.rollout.quantization:
        yield (
            f"model.lora.sync is adapter, and rollout.quantization is {config.rollout.quantization}: vLLM would "
            "add the adapter to rounded weights, which are not the learner's base; set model.lora.sync=merged"
        )
    if config.rollout.quantization and config.model.dtype == "float32":
        yield (
            f"rollout.quantization is {config.rollout.quantization}, and model.dtype is float32, which vLLM does "
            "not round: set model.dtype=bfloat16"
        )
    if lora is not None and lora.sync == "adapter" and config.rollout.tensor_parallel > 1:
        yield (
            f"model.lora.sync is adapter, and rollout.tensor_parallel is {config.rollout.tensor_parallel}: an "
            "engine on several ranks takes merged weights alone; set model.lora.sync=merged"
        )


def conflicts_of_4bit(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Check weights of 4 bits, which one stage of ZeRO cannot divide."""
    if model.lora is not None and model.lora.load_in_4bit and train.zero_stage == 3:
        yield (
            "model.lora.load_in_4bit is true, and train.zero_stage is 3, which cannot divide packed weights: use "
            "stage 2"
        )


def conflicts_of_sequence_parallel(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Check rows whose tokens are divided over ranks, which padded ones cannot be."""
    if train.sequence_parallel > 1 and model.rows == "padded":
        yield (
            f"train.sequence_parallel is {train.sequence_parallel}, and model.rows is padded: only packed rows, "
            "whose attention is ours, are divided; leave one of them out"
        )


def _conflicts_of_evaluated_sets(config: Config) -> Iterator[str]:
    """Check the names of the sets that are evaluated, and how often they are."""
    known = [Path(path).name for path in config.data.eval]
    for name in sorted(config.eval.by_set.keys() - {*known}) if known else ():
        hint = near(name, known, otherwise=f"it has {', '.join(known)}")
        yield f"eval.by_set.{name}: data.eval has no set of this name; {hint}"
    if config.data.eval and "every" not in config.eval.model_fields_set:
        yield (
            f"data.eval names {', '.join(config.data.eval)}, and eval.every is not given, so that nothing would be "
            "evaluated: set eval.every to a number of rollout steps, or to 0 to leave it off"
        )


def _conflicts_of_teacher_servers(config: Config) -> Iterator[str]:
    """Check what a teacher on servers scores."""
    if config.algorithm.distillation.servers:
        if (t := config.rollout.temperature) != 1:
            yield (
                f"rollout.temperature is {t:g}, and algorithm.distillation.servers are given, which score at 1: "
                "set it to 1, or let a teacher in this process score"
            )
        if k := config.rollout.top_k:
            yield (
                f"rollout.top_k is {k}, and algorithm.distillation.servers are given, which score over all ids, not "
                "over those that the sampler kept: leave top_k out, or let a teacher in this process score"
            )
        if (size := config.train.sequence_parallel) > 1:
            yield (
                f"train.sequence_parallel is {size}, and algorithm.distillation.servers are given: each rank of "
                "a row would ask for the same scores and might get others; set it to 1, or let a teacher in this "
                "process score"
            )
        if config.environment.name is not None:
            yield (
                f"environment.name is {config.environment.name}, and algorithm.distillation.servers are given, "
                "which score responses without observations: let a teacher in this process score"
            )


def _conflicts_of_token_log_probs(config: Config) -> Iterator[str]:
    """Check that the log-probs of more ids than the sampled one are asked of a head that computes them."""
    if config.rollout.top_k:
        others = {
            "model.fused_head": config.model.fused_head,
            "algorithm.distillation.top_k": config.algorithm.distillation.top_k,
            "environment.name": config.environment.name,
        }
        for key, value in others.items():
            if value:
                yield (
                    f"rollout.top_k is {config.rollout.top_k}, and {key} is {value}: not built for log-probs over "
                    "kept ids; leave one of them out"
                )
    if config.model.fused_head and config.algorithm.distillation.top_k:
        yield (
            f"model.fused_head is true, and algorithm.distillation.top_k is {config.algorithm.distillation.top_k}: "
            "the kernels compute the log-probs of one id a token; leave one of them out"
        )


def _conflicts_of_moved_optimizer(config: Config) -> Iterator[str]:
    """Check an optimizer that leaves the card while responses are sampled."""
    if config.rollout.offload_optimizer:
        if config.train.zero_stage < 2:
            yield (
                f"rollout.offload_optimizer is true, and train.zero_stage is {config.train.zero_stage}: only the "
                "optimizers of ZeRO 2 and 3 can be moved; set train.zero_stage=2, or leave it out"
            )
        for key in ("offload_optimizer", "offload_param"):
            if (device := config.train.offload_device(key)) != "none":
                yield (
                    f"rollout.offload_optimizer is true, and train.deepspeed.zero_optimization.{key}.device is "
                    f"{device}: DeepSpeed keeps it there all the time; leave one of them out"
                )


def _conflicts_of_sampled_log_probs(config: Config) -> Iterator[str]:
    """Check the sampler's log-probs in place of the learner's."""
    if config.train.old_logprobs == "sampler":
        if config.algorithm.rejection is not None:
            yield (
                f"train.old_logprobs is sampler, and algorithm.rejection is {config.algorithm.rejection}: the "
                "learner's own log-probs, which it compares, are not computed; use train.old_logprobs=learner"
            )
        if config.rollout.quantization:
            yield (
                f"train.old_logprobs is sampler, and rollout.quantization is {config.rollout.quantization}: the "
                "truncated importance correction, which stands for the rounding, needs the learner's own "
                "log-probs; use train.old_logprobs=learner"
            )
        for key in ("carry_over", "ahead"):
            if value := getattr(config.rollout, key):
                yield (
                    f"train.old_logprobs is sampler, and rollout.{key} is {value}: the sampler's log-probs of "
                    "older tokens are those of the weights that sampled them, and the ratio would be clipped by "
                    "their age; use train.old_logprobs=learner"
                )


def _conflicts_of_batches_and_rows(config: Config) -> Iterator[str]:
    """Check that mini-batches fit into a step, and responses into rows."""
    prompts, mini = config.rollout.prompts_per_step, config.train.mini_batch_prompts
    if mini > prompts:
        yield (
            f"train.mini_batch_prompts ({mini}) is above rollout.prompts_per_step ({prompts}): "
            "a mini-batch is a part of the rollout batch; lower the first or raise the second"
        )
    row = config.trained_tokens
    if config.train.micro_batch_tokens < row:
        of_what = (
            "rollout.max_tokens + environment.max_observed_tokens" if config.observed_tokens else "rollout.max_tokens"
        )
        yield (
            f"train.micro_batch_tokens ({config.train.micro_batch_tokens}) is below {of_what} ({row}): "
            "a response is never split, so a packed row must hold the longest one"
        )
    if config.reward.overlong_buffer > config.rollout.max_tokens:
        yield (
            f"reward.overlong_buffer ({config.reward.overlong_buffer}) is above rollout.max_tokens "
            f"({config.rollout.max_tokens}): every response would be penalised"
        )
