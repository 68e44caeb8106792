"""The policy: the model, and log-probs and entropies of a packed row's response tokens.

The learner must describe the distribution that the sampler drew from, so the ban on placeholder
ids and the temperature apply here too: log_softmax((logits with banned ids at -inf) / temperature).

The logits are never held for a whole row: hidden states pass through the output head in chunks,
recomputed in the backward pass, so that memory is flat in the row's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from vlm_rl import attention
from vlm_rl.packing import PackedRow

MAX_LOGITS = 2**26  # elements of the logit matrix held at once: 256 MiB in float32


def load_model(path: str | Path, *, dtype: torch.dtype, attn: str = attention.NAME) -> PreTrainedModel:
    """Weights of a Hugging Face folder as a vision-language or a text-only causal model."""
    disable_progress_bar()  # a bar for every load would bury what the run says
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_vision = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    implementation = {"text_config": attn, "vision_config": "sdpa"} if is_vision else attn
    return auto.from_pretrained(
        path, dtype=dtype, attn_implementation=implementation, trust_remote_code=False, use_safetensors=True
    )


class Policy(nn.Module):
    """A causal model that maps a packed row to log-probs and entropies of its response tokens."""

    def __init__(self, model: PreTrainedModel, *, banned_ids: Sequence[int], temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.is_vision = hasattr(model.config, "vision_config")
        self.banned: Tensor
        self.register_buffer("banned", torch.tensor(sorted(banned_ids), dtype=torch.int64), persistent=False)
        model.config.use_cache = False

    def freeze_vision(self) -> None:
        """Keep the vision tower and its merger as they are. A text-only model has none: nothing happens."""
        if self.is_vision:
            self.model.model.visual.requires_grad_(False)

    def enable_checkpointing(self) -> None:
        # Reentrant: ZeRO-3 frees parameters between forward and recomputation, which the
        # non-reentrant variant takes for a change of shape.
        self.model.gradient_checkpointing_enable({"use_reentrant": True})

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probs [K], with gradient, and entropies [K], without, float32."""
        hidden_TH = self.hidden_states(row)
        return self.score(hidden_TH.index_select(0, row.predictor_K), row.target_K)

    def hidden_states(self, row: PackedRow) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": row.ids_T[None], "position_ids": row.positions_3T[:, None]}
        if not self.is_vision:
            inputs["position_ids"] = row.positions_3T[0][None]
        elif not row.vision:
            inputs["inputs_embeds"] = self._embed_beside_vision(inputs.pop("input_ids"))
        output = self.model.model(use_cache=False, layout=row.layout, **inputs, **dict(row.vision))
        return output.last_hidden_state[0]

    def _embed_beside_vision(self, ids_1T: Tensor) -> Tensor:
        """Token embeddings of a row without images, after a pass through the vision tower that adds nothing.

        Under ZeRO every rank must reach the same parameters in the same order in each micro-batch, or
        the collectives that gather and reduce them wait for ever: embeddings, vision, layers, head.
        """
        vision = self.model.config.vision_config
        embeds_1TH = self.model.get_input_embeddings()(ids_1T)
        num_patches = vision.spatial_merge_size**2
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        features = self.model.model.get_image_features(
            torch.zeros(num_patches, size, device=ids_1T.device),
            torch.tensor([[1, vision.spatial_merge_size, vision.spatial_merge_size]], device=ids_1T.device),
        ).pooler_output
        return embeds_1TH + 0.0 * torch.cat(tuple(features)).sum()

    def score(self, hidden_KH: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies from the hidden states that predict the targets, in chunks."""
        chunk = max(1, MAX_LOGITS // self.model.config.get_text_config().vocab_size)
        if len(target_K) <= chunk:
            return self._score_chunk(hidden_KH, target_K)
        parts = [
            checkpoint(self._score_chunk, hidden, target, use_reentrant=True)
            for hidden, target in zip(hidden_KH.split(chunk), target_K.split(chunk), strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _score_chunk(self, hidden_CH: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        assert head is not None, "a causal model has an output head"
        logits_CV = head(hidden_CH).float() / self.temperature
        logits_CV = logits_CV.index_fill(1, self.banned, float("-inf"))
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        logp_C = logp_CV.gather(1, target_C[:, None])[:, 0]
        with torch.no_grad():
            # p log p is 0 at p = 0, where the product of 0 and -inf would be NaN
            entropy_C = -(logp_CV.exp() * logp_CV.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
        return logp_C, entropy_C
