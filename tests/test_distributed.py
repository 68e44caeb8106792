"""How a process joins its group: what needs a GPU is looked at in the call, all else runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from vlm_rl.distributed import COLLECTIVE_TIMEOUT, init_ranks


def test_on_gpus_nccl_gets_its_card_and_gloo_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 1)
    assert init_ranks() == device
    assert calls == [(("cpu:gloo,cuda:nccl",), {"timeout": COLLECTIVE_TIMEOUT, "device_id": device})]
