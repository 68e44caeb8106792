"""Checks of the machine: each is off where what it looks at is broken on purpose."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

import pytest
import torch

from vlm_rl.doctor import attention as attention_checks
from vlm_rl.doctor import machine
from vlm_rl.doctor.attention import attention_bf16, attention_fp32
from vlm_rl.grading import grader as grading
from vlm_rl.grading.decision import Decision
from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.model_files import model_folder


def test_a_sound_machine(tmp_path: Path) -> None:
    """Of the checks that need neither a free port nor a fast disk."""
    for check in (machine.versions, machine.GPUs, machine.memory, machine.shared_memory, machine.disk):
        answer = check(tmp_path)
        assert answer.outcome == "ok", answer
        assert answer.name == check.__name__.replace("_", " ")


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LIBRARIES", ("torch", "no-such-library"))
    assert machine.versions(tmp_path).detail == "no-such-library is not installed"


def test_a_transformers_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "version", lambda _: "5.17.0")
    answer = machine.versions(tmp_path)
    assert answer.outcome == "off" and answer.detail.startswith("Python 3.") and "torch " in answer.detail
    assert "transformers 5.17.0 is too old" in answer.detail and answer.detail.endswith("transformers>=5.18")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_driver_that_is_too_old_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi shows two cards, and torch none."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.1\necho 470.1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = machine.GPUs(tmp_path)
    assert answer.outcome == "off" and "the driver (470.1) shows 2" in answer.detail and "580" in answer.next_step


def test_a_card_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver shows two cards and torch one, which is fine where one was chosen."""
    monkeypatch.setattr(machine, "_driver_cards", lambda: (["580.1", "580.1"], "580.1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answer = machine.GPUs(tmp_path)
    assert answer.outcome == "off" and "shows 2" in answer.detail and "CUDA_VISIBLE_DEVICES" in answer.next_step
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.GPUs(tmp_path).outcome == "ok"


@pytest.mark.parametrize(("free", "outcome"), [(72, "ok"), (71, "off")])
def test_a_card_whose_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, outcome: str
) -> None:
    """A card of 80 GiB must have 72 free; the other one is empty."""
    cards = [(80 * 2**30, 80 * 2**30), (free * 2**30, 80 * 2**30)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "mem_get_info", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    answer = machine.GPUs(tmp_path)
    assert answer.outcome == outcome and f"80.0 of 80.0, {free}.0 of 80.0" in answer.detail
    assert ("nvidia-smi" in answer.next_step) is (outcome == "off")


def test_too_little_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_MEMORY", "LEAST_SHARED", "LEAST_DISK", "LEAST_SPEED"):
        monkeypatch.setattr(machine, name, 2**70)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for check in (machine.memory, machine.shared_memory, machine.disk, machine.run_folder):
        answer = check(tmp_path)
        assert answer.outcome == "off" and answer.next_step, answer
    assert not list(tmp_path.iterdir())


def test_a_name_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.host_name(tmp_path).outcome == "ok"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-machine.invalid")
    answer = machine.host_name(tmp_path)
    assert answer.outcome == "off" and "/etc/hosts" in answer.next_step


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    answer = machine.run_folder(tmp_path / "missing")
    assert answer.outcome == "off" and "cannot be written" in answer.detail


def test_a_disk_that_gives_back_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_SPEED", 0)
    assert machine.run_folder(tmp_path).outcome == "ok"
    monkeypatch.setattr(os, "fsync", lambda number: os.pwrite(number, b"a different text", 10**6))
    answer = machine.run_folder(tmp_path)
    assert answer.outcome == "off" and "is not what was written" in answer.detail


def test_a_grader_that_accepts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_compare", lambda *_: Decision(True, "number"))
    answer = machine.grader(tmp_path)
    assert answer.outcome == "off" and r"\boxed{1/3} against 1/2 is correct, not wrong" in answer.detail


def test_the_sandbox_is_proved_and_its_absence_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.sandbox(tmp_path).detail.startswith("its walls hold, proved in")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    answer = machine.sandbox(tmp_path)
    assert answer.outcome == "ok" and answer.detail.startswith("none, which only code needs: programs are not run")


def test_a_gradient_that_is_not_a_number_does_not_pass() -> None:
    """Whichever of the output and the three gradients it is in."""
    attend = attention_checks._padded(attention_checks.ON_CPU)

    def without_key_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = key.clone()
        key.register_hook(lambda gradient: gradient * float("nan"))
        return attend(query, key, value)

    assert attention_checks._error(attend, torch.float32, attention_checks.ON_CPU) < 1e-4
    error = attention_checks._error(without_key_gradient, torch.float32, attention_checks.ON_CPU)
    assert math.isnan(error)


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_attention_whose_gradients_are_wrong(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._CPU
    wrong = right._replace(backward=lambda *a, **k: tuple(factor * grad for grad in right.backward(*a, **k)))
    monkeypatch.setattr(attention, "_CPU", wrong)
    for check in (attention_fp32, attention_bf16):
        answer = check(tmp_path)
        assert answer.outcome == ("ok" if factor == 1 else "off"), answer
        assert "_scaled_dot_product_flash_attention_for_cpu" in answer.detail
