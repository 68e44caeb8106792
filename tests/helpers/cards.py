"""Make a test's machine one with GPUs, as far as their memory is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def have_cards(monkeypatch: pytest.MonkeyPatch, count: int, size: int, *, free: int | None = None) -> None:
    """Let torch report so many equal GPUs of so many bytes, of which as many are free; None for all."""
    properties = SimpleNamespace(total_memory=size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (size if free is None else free, size))
