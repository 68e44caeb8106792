"""The families of models: which ones the learner computes exactly, and which parts they are made of.

Packed rows give every response its own prompt and itself to attend to, in full. A layer that attends to a window
only, caps its scores or carries a state along the row computes something else there, and nothing would fail: the run
would train on wrong log-probs. So a model trains only if its type is in SUPPORTED, and only without the features in
`_unsupported_features`. `self_check` compares the numbers of each model at start-up. docs/models.md lists what is
tested for each family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from vlm_rl.config import ModelPart
from vlm_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """A type of model. All else about it, positions and image features too, comes from its transformers classes."""

    tower: str = ""  # what the names of the vision tower's parameters hold, mergers included; "" for a text model
    mergers: tuple[str, ...] = ()  # the same of the layers that map the tower's outputs to the language model

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """Return the parts that a model of this type has."""
        return ("tower", "merger", "language_model") if self.tower else ("language_model",)

    def part_of(self, name: str) -> ModelPart:
        """Return the part of the model that a parameter belongs to; wrappers may put something before its name."""
        if any(merger in name for merger in self.mergers):
            return "merger"
        return "tower" if self.tower and self.tower in name else "language_model"


_TEXT = Family()
_QWEN_VL = Family("model.visual.", ("model.visual.merger.",))
_QWEN3_VL = Family("model.visual.", ("model.visual.merger.", "model.visual.deepstack_merger_list."))

SUPPORTED = {
    "llama": _TEXT,
    "mistral": _TEXT,
    "qwen2": _TEXT,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3": _TEXT,
    "qwen3_moe": _TEXT,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
}


def check_architecture(config: Any, *, path: object, longest: int) -> None:
    """Raise UserError unless the learner computes this model exactly.

    Args:
        config: the transformers configuration of the model.
        path: the model's folder, for the message.
        longest: tokens of the longest prompt and response together.
    """
    if config.model_type not in SUPPORTED:
        raise UserError(
            f"model.path {path}: the learner does not support models of type {config.model_type!r}, whose layers may "
            f"read a packed row differently: use one of {', '.join(SUPPORTED)}"
        )
    for feature in _unsupported_features(config.get_text_config(), longest):
        raise UserError(
            f"model.path {path}: the learner does not support {feature}: "
            "its log-probs would be wrong on packed rows; use a model without it"
        )


def check_parts(model_type: str, *, freeze: Collection[ModelPart], lr_by_part: Collection[ModelPart]) -> None:
    """Raise UserError where nothing would be trained, or where a part has a learning rate and is not trained."""
    parts = SUPPORTED[model_type].parts
    if {*parts} <= {*freeze}:
        raise UserError(
            f"model.freeze names {', '.join(parts)}, and a {model_type} model has no other part: "
            "leave one of them out, so that something is trained"
        )
    for part in lr_by_part:
        if part in freeze or part not in parts:
            reason = "model.freeze freezes" if part in freeze else f"a {model_type} model does not have"
            raise UserError(f"train.lr_by_part names {part}, which {reason}: remove it from there")


def _unsupported_features(text: Any, longest: int) -> Iterator[str]:
    """Yield the features of a text configuration that packed rows would compute differently, as `key value`."""
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if window is not None and window < longest:  # a window that no row fills changes nothing
        yield f"sliding_window {window} below the {longest} tokens of the longest prompt and response"
    kinds = {"full_attention", "sliding_attention"}
    yield from (f"layer_types {kind!r}" for kind in sorted(set(getattr(text, "layer_types", None) or ()) - kinds))
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"):
        if getattr(text, key, None):
            yield f"{key} {getattr(text, key)}"
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(text, key, 0):
            yield f"{key} {getattr(text, key)}"  # noise that the sampler does not have
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
        yield f"rope_type {kind!r}, which depends on the length of the row"
