"""The families of models: which ones the learner computes exactly, and which parts they are made of.

Packed rows give every response its own prompt and itself to attend to, in full, within a window, or by the state of
linear attention. A layer that caps its scores computes something else there, and nothing would fail: the run would
train on wrong log-probs. Such a model is computed in padded rows, each response alone after a copy of its prompt. A
model trains only if its type is in SUPPORTED or padded rows are asked for, and only without the features in
`_unsupported_features`. `self_check` compares the numbers of each model at start-up. docs/models.md lists what is
tested for each family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vlm_rl.config import ModelConfig, ModelPart, RowFormat
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import check_vision
from vlm_rl.model_files.routers import num_experts


@dataclass(frozen=True, slots=True)
class Family:
    """A type of model. All else about it, positions and image features too, comes from its transformers classes."""

    tower: str = ""  # what the names of the vision tower's parameters hold, mergers included; "" for a text model
    mergers: tuple[str, ...] = ()  # the same of the layers that map the tower's outputs to the language model
    padded: bool = False  # whether its rows are padded whatever model.rows says

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
_GLM_VL = Family("model.visual.", ("model.visual.downsample.", "model.visual.merger."))
_IDEFICS3 = Family("model.vision_model.", ("model.connector.",))
_PIXTRAL = Family("model.vision_tower.", ("model.multi_modal_projector.",))
_QWEN_VL = Family("model.visual.", ("model.visual.merger.",))
_QWEN3_VL = Family("model.visual.", ("model.visual.merger.", "model.visual.deepstack_merger_list."))

PADDED_COST = "which computes the prompt again for each of its responses"

SUPPORTED = {
    "gemma2": Family(padded=True),  # soft caps
    # An image's tokens attend to each other.
    "gemma3": Family("model.vision_tower.", ("model.multi_modal_projector.",), padded=True),
    "gemma3_text": _TEXT,
    "gemma4": Family("model.vision_tower.", ("model.embed_vision.",), padded=True),  # likewise, behind a window
    "glm46v": _GLM_VL,
    "glm4v": _GLM_VL,
    "glm4v_moe": _GLM_VL,
    "idefics3": _IDEFICS3,
    "internvl": Family("model.vision_tower.", ("model.multi_modal_projector.",)),
    "llama": _TEXT,
    "llava": _PIXTRAL,
    "llava_onevision": Family("model.vision_tower.", ("model.multi_modal_projector.", "model.image_newline")),
    "mistral": _TEXT,
    "mistral3": _PIXTRAL,
    "qwen2": _TEXT,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3": _TEXT,
    "qwen3_5": _QWEN_VL,
    "qwen3_5_moe": _QWEN_VL,
    "qwen3_moe": _TEXT,
    "qwen3_next": _TEXT,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "smolvlm": _IDEFICS3,
}


def family_of(config: Any) -> Family:
    """Return the family of a transformers configuration; a type not in SUPPORTED counts as text."""
    return SUPPORTED.get(config.model_type, _TEXT)


def is_padded(config: Any, rows: RowFormat) -> bool:
    """Return whether each response of this model is computed after a copy of its prompt, as model.rows says."""
    return rows == "padded" or family_of(config).padded


def active_window(config: Any) -> int | None:
    """Return how many tokens a layer with a window attends to, itself included; None for a model without one."""
    text = config.get_text_config()
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None


def convolution_width(config: Any) -> int | None:
    """Return how many tokens a layer of linear attention convolves; None for a model without one."""
    text = config.get_text_config()
    has_one = "linear_attention" in (getattr(text, "layer_types", None) or ())
    return getattr(text, "linear_conv_kernel_dim", None) if has_one else None


def check_architecture(config: Any, *, path: object, rows: RowFormat = "auto") -> None:
    """Raise UserError unless the learner computes this model exactly.

    Args:
        config: the transformers configuration of the model.
        path: the model's folder, for the message.
        rows: model.rows.
    """
    is_vision = hasattr(config, "vision_config")
    remedy = "" if is_vision else f"; or set model.rows=padded, {PADDED_COST}"
    if config.model_type not in SUPPORTED and (is_vision or rows != "padded"):
        raise UserError(
            f"model.path {path}: the learner does not support models of type {config.model_type!r}, whose layers may "
            f"read a packed row differently: use one of {', '.join(SUPPORTED)}{remedy}"
        )
    check_vision(config, path=path)
    text_type = config.get_text_config().model_type
    is_known = text_type in SUPPORTED or text_type.removesuffix("_text") in SUPPORTED
    if is_vision and not is_known and not text_type.startswith(config.model_type):
        raise UserError(
            f"model.path {path}: the learner does not support models of type {config.model_type!r} whose language "
            f"model is of type {text_type!r}, whose layers may read a packed row differently: use one with a "
            "language model of a supported type, such as qwen2"
        )
    padded = is_padded(config, rows)
    for feature, is_exact_alone in _unsupported_features(config.get_text_config(), is_vision=is_vision):
        if not (padded and is_exact_alone):
            raise UserError(
                f"model.path {path}: the learner does not support {feature}: its log-probs would be wrong on "
                f"{'padded' if padded else 'packed'} rows; use a model without it"
                f"{remedy if is_exact_alone else ''}"
            )


@contextmanager
def naming_untested(config: Any) -> Iterator[None]:
    """Turn what fails in a `with` block into a UserError, where the model is of a type that no test knows.

    Padded rows take any causal text model, and some of transformers' classes are called in ways of their own. What
    fails for a model in SUPPORTED is our fault, and keeps its traceback.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
        if config.model_type in SUPPORTED or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UserError(
            f"a model of type {config.model_type!r} cannot be trained here: no test knows this type, and "
            f"transformers' own code of it failed in padded rows ({type(error).__name__}: {str(error)[:200]}); use "
            f"one of {', '.join(SUPPORTED)}"
        ) from error


def check_parts(config: Any, model: ModelConfig, *, lr_by_part: Collection[ModelPart]) -> None:
    """Raise UserError if nothing would be trained, or if a part has a learning rate and is not trained.

    Args:
        config: of the model.
        model: says what is frozen, and what gets an adapter.
        lr_by_part: the parts with a learning rate of their own.
    """
    parts, model_type, freeze = family_of(config).parts, config.model_type, model.freeze
    if {*parts} <= {*freeze}:
        raise UserError(
            f"model.freeze names {', '.join(parts)}, and a {model_type} model has no other part: "
            "leave one of them out, so that something is trained"
        )
    trained = {*parts} - {*freeze}
    if model.lora is not None:
        trained &= model.lora.parts
    for part in lr_by_part:
        if part not in trained:
            reason = "model.freeze freezes" if part in freeze else "model.lora gives no adapter"
            reason = reason if part in parts else f"a {model_type} model does not have"
            raise UserError(f"train.lr_by_part names {part}, which {reason}: remove it from there")


def check_routing(config: Any, *, replay: bool) -> None:
    """Raise UserError if routing would be replayed and there is none."""
    if replay and not num_experts(config.get_text_config()):
        raise UserError(
            f"rollout.replay_routing is true, and a {config.model_type} model has no experts: leave it out"
        )


def _unsupported_features(text: Any, *, is_vision: bool) -> Iterator[tuple[str, bool]]:
    """Yield what packed rows would compute differently, as `key value`, and whether padded rows are exact for it."""
    kinds = {"full_attention", "sliding_attention"}
    if convolution_width(text) is not None:
        kinds.add("linear_attention")
    layer_types = sorted(set(getattr(text, "layer_types", None) or ()) - kinds)
    yield from ((f"layer_types {kind!r}", True) for kind in layer_types)
    for key in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(text, key, None):
            yield f"{key} {getattr(text, key)}", True
    if kind := getattr(text, "use_bidirectional_attention", False):
        yield f"use_bidirectional_attention {kind}", kind == "vision"  # of images, for which padded rows have masks
    if is_vision and (size := getattr(text, "hidden_size_per_layer_input", 0)):
        yield f"hidden_size_per_layer_input {size}", False  # no test knows these layers of Gemma 4
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(text, key, 0):
            yield f"{key} {getattr(text, key)}", False  # noise that the sampler does not have
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # of all layers, or by their type
    for kind in sorted({each.get("rope_type", "default") for each in ropes} & {"dynamic", "longrope"}):
        yield f"rope_type {kind!r}, which depends on the length of the row", False
