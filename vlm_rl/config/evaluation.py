"""The section eval: evaluation during training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from vlm_rl.config.base import ConfigSection


class SetSamplingConfig(ConfigSection):
    """How one set of data.eval is answered, where it differs from the others."""

    samples: PositiveInt | None = None
    """k of avg@k; null: eval.samples."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; null: eval.temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability of the ids that are sampled from; null: eval.top_p."""


class EvalConfig(ConfigSection):
    """Evaluation during training."""

    every: NonNegativeInt = 0
    """Rollout steps between evaluations on data.eval; 0 switches them off."""
    samples: PositiveInt = 1
    """k of avg@k; with temperature 0 it must be 1."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1: from all."""
    max_tokens: PositiveInt | None = None
    """Longest response in tokens; null: rollout.max_tokens."""
    by_set: dict[str, SetSamplingConfig] = {}
    """Samples, temperature and top_p of single sets, by the last part of their path:
    {aime24: {samples: 32, temperature: 1}}."""

    def conflicts(self) -> Iterator[str]:
        for name in (None, *self.by_set):
            samples, temperature, _ = self.sampling(name)
            if temperature == 0 and samples != 1:
                where = "" if name is None else f"by_set.{name}: "
                yield (
                    f"{where}greedy decoding (temperature 0) always gives the same answer: samples must be 1, not "
                    f"{samples}"
                )

    def sampling(self, name: str | None) -> tuple[int, float, float]:
        """Return samples, temperature and top_p of a set."""
        own = self.by_set.get(name or "", SetSamplingConfig())
        samples, temperature, top_p = self.samples, self.temperature, self.top_p
        return (
            samples if own.samples is None else own.samples,
            temperature if own.temperature is None else own.temperature,
            top_p if own.top_p is None else own.top_p,
        )
