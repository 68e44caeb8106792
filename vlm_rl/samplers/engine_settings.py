"""What every engine is started with, whichever samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlm_rl.config import LoraConfig, Quantization

if TYPE_CHECKING:
    import torch

    from vlm_rl.data.prompts import PromptBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One model, and how it samples."""

    model_path: str
    """A Hugging Face folder; make_sampler merges an adapter in it with its base model."""
    builder: PromptBuilder
    """The prompt builder for this model."""
    max_model_len: int
    """Most tokens of a prompt, images expanded, and its response together."""
    batch_size: int
    """Responses generated side by side."""
    dtype: torch.dtype
    """Of the engine's weights."""
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to vllm.LLM as they are; transformers takes none."""
    adapter: LoraConfig | None = None
    """What `load_weights` brings in addition to the weights in `model_path`, if not these themselves."""
    tensor_parallel: int = 1
    """How many neighbouring ranks form one vLLM engine; all of them call each method together."""
    quantization: Quantization | None = None
    """How a vLLM engine rounds weights beyond `dtype` (vlm_rl.model_files.fp8)."""
    seed: int = 0
    """Of the engine itself; every response has a seed of its own."""
    returns_routing: bool = False
    """Whether rollouts bring the experts that their tokens were sent to."""
    returns_kept: bool = False
    """Whether rollouts bring the ids that truncation left of each token."""
