"""The switch `model.layer_patches`: our code in place of some layers of a transformers model, or of none.

The patches compute what transformers' own layers compute. They keep less for the backward pass (lean_layers) and make
fewer calls in the vision tower (vision). A GPU has run them (docs/gpu.md), but none has timed them against
transformers' own, so `auto` turns them off there, except for the vision tower's attention: transformers' own calls a
kernel for each window there. `liger` takes Liger's kernels in place of lean_layers (liger_layers). The switch is not
for the attention over packed rows (shared_prefix), which is always ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_rl.config import LayerPatches
from vlm_rl.learner.attention import lean_layers, liger_layers
from vlm_rl.learner.attention import vision as vision_attention


def is_patched(setting: LayerPatches, *, on_gpu: bool) -> bool:
    """Return whether norms and MLPs keep less for the backward pass than transformers' own."""
    return not on_gpu if setting == "auto" else setting == "liger" or setting


def install(model: Any, setting: LayerPatches, *, on_gpu: bool) -> list[str]:
    """Put other layers in place of the model's, as the setting says. Returns the names of what was replaced.

    Raises UserError if the setting is liger and its kernels cannot compute the model.
    """
    patched, tower = is_patched(setting, on_gpu=on_gpu), getattr(model.base_model, "visual", None)
    if not model.config.model_type.startswith("qwen"):  # GLM's has the same name and other layers
        tower = None
    if setting == "liger":
        replaced = liger_layers.install(model, on_gpu=on_gpu)
    else:
        replaced = lean_layers.install(model) if patched else []
    if tower is not None and patched:
        replaced += vision_attention.install_embedding(tower)
    if tower is not None and setting:
        replaced += vision_attention.install_attention(tower)
    return replaced


def describe(replaced: Sequence[str]) -> str:
    """Return the line that says which layers are ours; attention over packed rows always is."""
    if not replaced:
        return (
            "layers: transformers' own, but the attention over packed rows is ours "
            "(model.layer_patches is false, or auto on a GPU)"
        )
    return f"layers: patched {', '.join(replaced)} (model.layer_patches=false keeps transformers' own)"
