"""Tokens a second, MFU and memory of a step, by hand and on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.pretended_cuda import CARD_BYTES, PretendedCuda
from vlm_rl import devices
from vlm_rl.config import Config, parse_config
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.session import speed as speed_module
from vlm_rl.session.speed import Speed

SECONDS = {"timing/rollout": 2.0, "timing/old_logprobs": 1.0, "timing/update": 4.0, "timing/sync": 9.0}


def config_of(path: Path) -> Config:
    return parse_config({"out": "x", "model": {"path": str(path)}, "data": {"train": ["x"]}})


def policy_of(path: Path) -> Policy:
    return Policy(load_model(path, dtype=torch.float32), banned_ids=(), temperature=1.0)


@pytest.fixture
def groups() -> tuple[list[Any], dict[str, int]]:
    lengths = {"a": [30, 50], "b": [20, 60]}
    groups = [
        SimpleNamespace(problem=SimpleNamespace(id=name), lengths_G=np.array(sizes), sizes_G=np.array(sizes))
        for name, sizes in lengths.items()
    ]
    return groups, {"a": 100, "b": 40}


def test_tokens_a_second_by_hand(tiny_model: Path, groups: Any) -> None:
    speed = Speed(policy_of(tiny_model), config_of(tiny_model))
    found = speed.metrics(*groups, SECONDS)
    assert found == {"speed/rollout_tokens": 160 / 2, "speed/update_tokens": (140 + 160) / (1 + 4)}
    begun_ahead = {**SECONDS, "timing/rollout": 0.0}
    assert "speed/rollout_tokens" not in Speed(policy_of(tiny_model), config_of(tiny_model)).metrics(
        *groups, begun_ahead
    )


def test_operations_by_hand(family_model: Callable[[str], Path]) -> None:
    """Six a weight and token, twelve a pair and unit of width; four where a weight is frozen. The head reads no token
    that an episode observes: of eight, two are."""
    folder = family_model("qwen3")
    policy = policy_of(folder)
    text = policy.model.config
    layers = sum(p.numel() for p in policy.model.model.layers.parameters())
    head = text.vocab_size * text.hidden_size
    pairs = 10**2 / 2 + (10 * 3 + 3**2 / 2) + (10 * 5 + 5**2 / 2)
    attention = 12 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * pairs
    speed = Speed(policy, config_of(folder))
    assert speed.operations([10], [[3, 5]], sampled=6) == 6 * layers * 18 + 6 * head * 6 + attention
    policy.freeze(["language_model"])
    frozen = Speed(policy, config_of(folder)).operations([10], [[3, 5]], sampled=6)
    assert frozen == 4 * layers * 18 + 4 * head * 6 + attention


def test_of_experts_those_count_that_a_token_is_given_to(family_model: Callable[[str], Path]) -> None:
    folder = family_model("qwen3_moe")
    policy = policy_of(folder)
    text = policy.model.config
    named = list(policy.model.model.layers.named_parameters())
    experts = sum(p.numel() for name, p in named if "experts" in name)
    others = sum(p.numel() for name, p in named if "experts" not in name)
    a_token = 6 * (others + experts * text.num_experts_per_tok / text.num_experts)
    speed = Speed(policy, config_of(folder))
    assert speed.operations([10], [[]], sampled=0) - speed.operations([0], [[]], sampled=0) == pytest.approx(
        10 * a_token + 12 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * 50
    )
    assert experts > 0


def test_memory_and_mfu_on_a_gpu(tiny_model: Path, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
        config, begun = config_of(tiny_model), list[None]()
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: begun.append(None))
        speed = Speed(policy_of(tiny_model), config)
        with speed.update():
            assert len(begun) == 1, "what the old log-probs took is no peak of the update"
        found = speed.metrics(*groups, SECONDS)
        planned = dry_run(config, num_ranks=1, on_gpu=True).memory.update
        assert found["memory/peak_gib"] == CARD_BYTES / 2 / 2**30
        assert found["memory/peak_over_planned"] == CARD_BYTES / 2 / planned
        assert found["memory/card_share"] == 0.25  # nothing is taken now, and a quarter was given back
        assert found["speed/mfu"] == speed.operations([100, 40], [[30, 50], [20, 60]], sampled=160) / (4 * 989e12)
        assert speed.warning() is None
        monkeypatch.setattr(speed_module, "all_gather", lambda mine: [mine, 0.75])  # another rank's card
        with speed.update():
            pass
        assert speed.metrics(*groups, SECONDS)["memory/card_share"] == 0.75
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (CARD_BYTES // 5, CARD_BYTES))
        with speed.update():
            pass
        line = speed.warning()
        assert line is not None and line.startswith("memory: 100% of a card was taken in this update, 40.0 GiB by")
        assert speed.warning() is None  # once


def test_a_sleeping_engine_is_not_the_learners_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts what is in vLLM's pools, also while the engine sleeps and the card has it back."""
    sizes = {(0, (0, 0)): 4, (0, (0, 1)): 8, (0, (2, 0)): 16, (1, (0, 1)): 32}  # of a device and a pool
    segments = [
        {"device": device, "segment_pool_id": pool, "allocated_size": size * 2**30}
        for (device, pool), size in sizes.items()
    ]
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
        assert devices.peak_memory()[0] == torch.cuda.max_memory_allocated() - (8 + 16) * 2**30


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("a card of tomorrow", None),
    ],
)
def test_the_peak_of_a_card_by_its_name(name: str, rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.peak_rate() is None  # on a CPU
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        assert devices.peak_rate() == rate


def test_observed_tokens_are_computed_and_not_drawn(tiny_model: Path, groups: Any) -> None:
    found, prompts = groups
    found[0].sizes_G = found[0].lengths_G + np.array([7, 0])
    speed = Speed(policy_of(tiny_model), config_of(tiny_model)).metrics(found, prompts, SECONDS)
    assert speed == {"speed/rollout_tokens": 160 / 2, "speed/update_tokens": (140 + 160 + 7) / (1 + 4)}
