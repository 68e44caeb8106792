"""The switch model.layer_patches: on, the layers are ours; off, all but attention are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from vlm_rl.config import load_config
from vlm_rl.learner.attention import vision as vision_attention
from vlm_rl.learner.attention.patches import describe, install, is_patched
from vlm_rl.learner.policy import Policy, load_model

TOY = Path(__file__).resolve().parents[2] / "configs" / "toy.yaml"


def policy_of(model: Path, patched: bool) -> Policy:
    return Policy(load_model(model, dtype=torch.float32), banned_ids=(), temperature=1.0, layer_patches=patched)


def own_forwards(model: nn.Module) -> list[str]:
    """Return the modules whose forward is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_off_leaves_transformers_own_layers(tiny_model: Path) -> None:
    policy = policy_of(tiny_model, patched=False)
    assert policy.replaced_layers == [] == own_forwards(policy.model)
    assert policy.model.model.visual.config._attn_implementation == "sdpa"
    assert "transformers' own, but the attention over packed rows" in describe(policy.replaced_layers)


def test_on_replaces_layers_and_names_them(tiny_model: Path) -> None:
    policy = policy_of(tiny_model, patched=True)
    line = describe(policy.replaced_layers)
    for kind in ("RMSNorm", "SiLU-gated MLP", "vision patch embedding", "vision attention"):
        assert kind in line
    assert policy.model.model.visual.config._attn_implementation == vision_attention.NAME
    replaced = own_forwards(policy.model)
    for name in ("visual.patch_embed.proj", "language_model.layers.0.mlp", "language_model.norm"):
        assert f"model.{name}" in replaced


@pytest.mark.parametrize(("setting", "replaced"), [("auto", ["vision attention"]), (False, [])])
def test_on_a_gpu_auto_replaces_the_attention_of_the_vision_tower(
    tiny_model: Path, setting: Literal["auto", False], replaced: list[str]
) -> None:
    """transformers' own attention calls a kernel for each window; ours gets all windows at once."""
    model = load_model(tiny_model, dtype=torch.float32)
    assert install(model, setting, on_gpu=True) == replaced
    assert own_forwards(model) == []
    assert model.model.visual.config._attn_implementation == (vision_attention.NAME if replaced else "sdpa")


@pytest.mark.parametrize(
    ("override", "on_cpu", "on_gpu"), [("auto", True, False), ("on", True, True), ("off", False, False)]
)
def test_auto_is_on_where_the_patches_have_run(override: str, on_cpu: bool, on_gpu: bool) -> None:
    """YAML reads on and off as true and false."""
    setting = load_config(TOY, [f"model.layer_patches={override}"]).model.layer_patches
    assert is_patched(setting, on_gpu=False) is on_cpu
    assert is_patched(setting, on_gpu=True) is on_gpu
