"""The sections `train`, `checkpoint` and `log`, and the whole configuration of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config import conflicts
from vlm_rl.config.algorithm import AlgorithmConfig
from vlm_rl.config.base import ConfigSection, FractionBelowOne
from vlm_rl.config.engines import deepspeed_conflicts
from vlm_rl.config.environments import EnvironmentConfig
from vlm_rl.config.evaluation import EvalConfig
from vlm_rl.config.policy import DataConfig, ModelConfig, ModelPart
from vlm_rl.config.rewards import RewardConfig
from vlm_rl.config.rollout import RolloutConfig

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
    Steps, belief and order of prompts begin anew. `--start-from RUN/60` sets it. model.path stays the KL penalty's
    reference."""
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
        yield from conflicts.of_environment(self.environment, self.rollout, self.data)
        yield from conflicts.of_synced_weights(self)
        yield from conflicts.of_4bit(self.model, self.train)
        yield from conflicts.of_sequence_parallel(self.model, self.train)
        yield from conflicts.of_evaluated_sets(self)
        yield from conflicts.of_teacher_servers(self)
        yield from conflicts.of_token_log_probs(self)
        yield from conflicts.of_moved_optimizer(self)
        yield from conflicts.of_sampled_log_probs(self)
        yield from conflicts.of_batches_and_rows(self)


def halved(tokens: int, least: int) -> int | None:
    """Return half of the tokens, at least so many; None if that is no less."""
    half = max(tokens // 2, least)
    return half if half < tokens else None
