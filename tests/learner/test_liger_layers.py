"""model.layer_patches=liger: Liger's kernels compute what transformers' layers compute, or are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vlm_rl.config import ModelConfig
from vlm_rl.errors import UserError
from vlm_rl.learner.attention import liger_layers
from vlm_rl.learner.attention.patches import is_patched
from vlm_rl.learner.policy import Policy, load_model

ROOT = Path(__file__).resolve().parents[2]
needs_liger = pytest.mark.skipif(
    find_spec("liger_kernel") is None, reason="liger-kernel is not installed: pip install liger-kernel"
)
CLOSE = 1e-5  # nats, or of a gradient's norm
LAYERS = {"RMSNorm (Liger)", "SiLU-gated MLP (Liger)", "rotary positions (Liger)"}
REFUSED = "Glm4Attention of this model rotates other pairs"


def compared(folders: list[Path]) -> list[dict[str, Any]]:
    """Return what tests/helpers/liger_cases.py finds, in float32, behind the check that a run makes when it loads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.liger_cases", *map(str, folders)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
@needs_liger
def test_its_layers_are_transformers_own_under_tritons_interpreter(family_model: Callable[[str], Path]) -> None:
    """With positions in three dimensions, and with norms of heads. A compiler and a card are not in it."""
    *taken, glm4 = compared([family_model("qwen2_5_vl"), family_model("qwen3"), family_model("glm4")])
    for found in taken:
        assert {*found["replaced"]} >= LAYERS
        assert max(found["log-probs"], found["gradient"]) < CLOSE
    assert REFUSED in glm4["refused"] and "set it to auto" in glm4["refused"]


@pytest.mark.parametrize(
    ("model", "norm", "is_plain"),
    [
        ("qwen2", "Qwen2RMSNorm", True),
        ("qwen3_vl", "Qwen3VLTextRMSNorm", True),
        ("llama", "LlamaRMSNorm", True),
        ("gemma2", "Gemma2RMSNorm", False),  # (1 + w) x
        ("gemma3", "Gemma3RMSNorm", False),
        ("olmo2", "Olmo2RMSNorm", False),  # rounded after the weight
    ],
)
def test_a_norm_is_known_by_what_it_computes(model: str, norm: str, is_plain: bool) -> None:
    modeling = import_module(f"transformers.models.{model}.modeling_{model}")
    assert liger_layers._is_plain_norm(getattr(modeling, norm)) is is_plain


@pytest.mark.parametrize(
    ("model", "is_plain"), [("qwen2_5_vl", True), ("llama", True), ("phi3", True), ("glm4", False)]
)
def test_a_rotation_is_known_by_what_it_computes(model: str, is_plain: bool) -> None:
    modeling = import_module(f"transformers.models.{model}.modeling_{model}")
    assert liger_layers._is_plain_rotation(modeling.apply_rotary_pos_emb) is is_plain


@needs_liger
def test_a_model_with_another_norm_is_refused_by_its_name() -> None:
    modeling = import_module("transformers.models.gemma2.modeling_gemma2")
    with pytest.raises(UserError, match=r"layer_patches=liger: Gemma2RMSNorm of this model is not w \* round"):
        liger_layers.install(nn.ModuleList([modeling.Gemma2RMSNorm(8)]), on_gpu=True)


def test_it_is_refused_where_it_cannot_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_model, dtype=torch.float32)
    if find_spec("liger_kernel") is not None:
        with pytest.raises(UserError, match="layer_patches=liger needs a GPU"):
            Policy(model, banned_ids=(), temperature=1.0, layer_patches="liger")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"layer_patches=liger needs Liger .*pip install liger-kernel"):
        Policy(model, banned_ids=(), temperature=1.0, layer_patches="liger")


def test_it_is_reached_by_its_name_alone() -> None:
    assert ModelConfig(path="m").layer_patches == "auto"
    assert ModelConfig(path="m", layer_patches="liger").layer_patches == "liger"
    assert is_patched("liger", on_gpu=True) and not is_patched("auto", on_gpu=True)
