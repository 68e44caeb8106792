"""Weights reach an engine in the layout of the published checkpoints, where transformers keeps a different one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vlm_rl.learner.policy import load_model
from vlm_rl.model_files.checkpoint_layout import as_published

# The experts of a layer: one tensor of each kind in transformers, [E, 2I, H] and [E, H, I].
PUBLISHED = {
    "qwen3_moe": {
        f"{expert}.{part}.weight": [64, 48] if part == "down_proj" else [48, 64]
        for expert in range(4)
        for part in ("gate_proj", "up_proj", "down_proj")
    },
    "qwen3_vl_moe": {"gate_up_proj": [4, 64, 96], "down_proj": [4, 48, 64]},
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_stream_and_checkpoint_have_the_published_layout(
    model_type: str, family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """What is streamed is what the learner's model saves, and what it loaded, bit for bit."""
    folder = family_model(model_type)
    model = load_model(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    streamed = dict(as_published(str(folder))((name, p.data) for name, p in model.named_parameters()))
    experts = {name.partition("experts.")[2]: [*t.shape] for name, t in streamed.items() if "layers.0.mlp.e" in name}
    assert experts == PUBLISHED[model_type]
    for path in (folder, tmp_path):
        with safe_open(path / "model.safetensors", framework="pt") as saved:
            assert streamed.keys() == {*saved.keys()}
            for name, tensor in streamed.items():
                torch.testing.assert_close(tensor, saved.get_tensor(name), rtol=0, atol=0)
