"""The learner's end of NCCL, with a stand-in for vLLM's communicator, which needs GPUs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_rl.samplers.remote import push
from vlm_rl.samplers.remote.client import ServerError
from vlm_rl.samplers.remote.push import NcclLink, _both

SECONDS = 0.5


class Communicator:
    """Hands tensors over as NCCL does, or hangs as NCCL does where the server is gone. `destroy` ends all but one."""

    hangs_in = ""
    last: Communicator
    begun = threading.Event()

    def __init__(self, group: Any, device: Any) -> None:
        Communicator.last = self
        self.begun.set()
        self.sent: list[bytes] = []
        self.aborted, self.aborts, self.disabled = threading.Event(), 0, False
        if self.hangs_in == "connecting":
            threading.Event().wait()  # there is nothing yet to abort
        self.comm = "handle"
        self._hang("the first sum")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert src == 0 and not self.aborts
        self.sent.append(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
        self._hang("the call")
        stream.synchronize = lambda: self._hang("the card")

    def destroy(self) -> None:
        self.aborts += 1
        self.disabled = True
        self.aborted.set()

    def _hang(self, place: str) -> None:
        if self.hangs_in == place:
            self.aborted.wait()


class LimitedOnceBegun(Future[None]):
    """Its limit of time begins with the communicator: until then the machine is slow, not the server."""

    def result(self, timeout: float | None = None) -> None:
        assert Communicator.begun.wait(60)
        return super().result(timeout)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> NcclLink:
    """Return a link that has not joined, on streams of a CPU."""
    pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: stream)
    monkeypatch.setattr(Communicator, "hangs_in", "")
    monkeypatch.setattr(Communicator, "begun", threading.Event())
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    return NcclLink("127.0.0.1", 60.0, workers=1)  # a busy machine is slow, and hangs nowhere


def join(link: NcclLink) -> None:
    """Join with a worker, which meets the learner as vLLM's does."""
    from vllm.distributed.utils import StatelessProcessGroup

    where = link.init_info()
    meeting = (where["master_address"], where["master_port"], where["rank_offset"], where["world_size"])
    worker = threading.Thread(target=StatelessProcessGroup.create, args=meeting)
    worker.start()
    try:
        link.join()
    finally:
        worker.join()


def assert_silent(call: Callable[[], None], message: str = "silent for 0.5 s") -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        call()
    assert SECONDS <= time.monotonic() - begun < 20 * SECONDS


def test_a_tensor_is_sent_whole_and_in_order(link: NcclLink) -> None:
    join(link)
    tensors = [torch.arange(12.0).view(3, 4).t(), torch.arange(6).bfloat16()[::2], torch.zeros(0)]
    for tensor in tensors:
        link.send(tensor)
    assert Communicator.last.sent == [
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
    ]
    link.close()
    link.close()
    assert Communicator.last.aborts == 1
    with pytest.raises(RuntimeError, match="aborted"):
        link.send(tensors[0])


@pytest.mark.parametrize("place", ["connecting", "the first sum", "the call", "the card"])
def test_a_server_that_hangs_costs_its_time_only(link: NcclLink, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Its communicator is aborted, once there is one."""
    monkeypatch.setattr(Communicator, "hangs_in", place)
    monkeypatch.setattr(push, "Future", LimitedOnceBegun)
    if place in ("connecting", "the first sum"):
        link._seconds = SECONDS
        assert_silent(lambda: join(link))
    else:
        join(link)
        link._seconds = SECONDS
        assert_silent(lambda: link.send(torch.ones(3)))
        with pytest.raises(RuntimeError, match="aborted"):
            link.send(torch.ones(3))
    assert Communicator.last.aborts == (place != "connecting")


@pytest.mark.usefixtures("link")
def test_a_server_that_does_not_come_costs_its_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the door closed twice: its number may be that of another thread's file by then."""
    closed_again: list[int] = []

    def close(number: int) -> None:
        try:
            os.close(number)
        except OSError:
            closed_again.append(number)

    link = NcclLink("127.0.0.1", SECONDS, workers=1)
    monkeypatch.setattr(socket, "close", close)
    before = {*threading.enumerate()}  # those of other tests that hang for good
    assert_silent(link.join, "silent|[Tt]imed out")
    for thread in {*threading.enumerate()} - before:
        thread.join(5)  # it waits a little longer than its link
    assert closed_again == []


def test_without_nccl_nothing_is_taken_for_sent(link: NcclLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's communicator then drops what it is given, without a word."""

    def disabled(self: Communicator, group: Any, device: Any) -> None:
        self.disabled = True

    monkeypatch.setattr(Communicator, "__init__", disabled)
    with pytest.raises(RuntimeError, match="NCCL cannot be loaded"):
        join(link)


@pytest.mark.parametrize("place", ["the call", "the card"])
def test_a_server_that_answers_with_an_error_is_not_waited_for(
    link: NcclLink, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    join(link)
    monkeypatch.setattr(Communicator, "hangs_in", place)

    async def refuse() -> None:
        while not Communicator.last.sent:
            await asyncio.sleep(0.01)
        raise ServerError("HTTP 500")

    async def push() -> None:
        await _both(refuse(), asyncio.to_thread(link.send, torch.ones(3)), link)

    begun = time.monotonic()
    with pytest.raises(ServerError, match="500"):
        asyncio.run(push())
    assert time.monotonic() - begun < 10
