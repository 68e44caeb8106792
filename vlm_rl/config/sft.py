"""The configuration of supervised fine-tuning, `vlm-rl sft`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.policy import DataConfig, ModelConfig
from vlm_rl.config.training import (
    CheckpointConfig,
    TrackersConfig,
    TrainConfig,
    conflicts_of_4bit,
    conflicts_of_sequence_parallel,
    halved,
)


class SftDataConfig(DataConfig):
    """What is learned by `vlm-rl sft`, and how a prompt is rendered."""

    train: list[str] = Field(min_length=1)
    """Prepared sets whose rows hold a response (`vlm-rl prepare --response COLUMN`)."""
    eval: list[str] = []
    """Prepared sets whose rows hold a response, of which the loss is measured; `vlm-rl eval` measures accuracy."""
    max_response_tokens: PositiveInt = 4096
    """Longest response in tokens. Longer ones are left out and counted; none is ever cut."""


class SftTrainConfig(TrainConfig):
    """Optimizer steps of `vlm-rl sft`, their batches, and DeepSpeed."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    mini_batch_prompts: PositiveInt = 16
    """Responses of one optimizer step, over all ranks, each after its prompt."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens in one packed row, prompts included."""
    lr: PositiveFloat = 1e-5
    """Learning rate after the warm-up."""


class SftCheckpointConfig(CheckpointConfig):
    """When `vlm-rl sft` writes checkpoints, and which are kept."""

    every: PositiveInt = 50
    """Optimizer steps between checkpoints; the last step is always saved."""


class SftEvalConfig(ConfigSection):
    """When `vlm-rl sft` measures the loss on held-out responses."""

    every: NonNegativeInt = 50
    """Optimizer steps between measurements on data.eval, after the last step too; 0 switches them off."""


class SftConfig(ConfigSection):
    """The configuration of supervised fine-tuning, `vlm-rl sft`."""

    seed: NonNegativeInt = 0
    """Random seed of the order of the responses, and of new adapters."""
    out: str
    """The run directory."""
    model: ModelConfig
    data: SftDataConfig
    train: SftTrainConfig = SftTrainConfig()
    eval: SftEvalConfig = SftEvalConfig()
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()
    log: TrackersConfig = TrackersConfig()

    def shorter_rows(self, tokens: int) -> int | None:
        """Return half the tokens of a row, at least those of a longest response; None if that is no less."""
        return halved(tokens, self.data.max_response_tokens)

    def conflicts(self) -> Iterator[str]:
        yield from conflicts_of_4bit(self.model, self.train)
        yield from conflicts_of_sequence_parallel(self.model, self.train)
        if self.train.old_logprobs != "learner":
            yield "train.old_logprobs is sampler, and nothing is sampled here: leave it out"
        if self.train.warmup_rollout_steps:
            yield (
                f"train.warmup_rollout_steps is {self.train.warmup_rollout_steps}, and there are no rollout steps "
                "here: use train.warmup_steps"
            )
        budget, longest = self.train.micro_batch_tokens, self.data.max_response_tokens
        if budget < longest:
            yield (
                f"train.micro_batch_tokens ({budget}) is below data.max_response_tokens ({longest}): "
                "a response is never split, so a packed row must hold the longest one"
            )
