"""The doctor's checks of the engine and of the ranks: each is off where the product is broken under it."""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl.doctor import engine, ranks
from vlm_rl.doctor.check import run_checks
from vlm_rl.doctor.engine import EngineUnderTest
from vlm_rl.doctor.model import ModelUnderTest
from vlm_rl.learner import learner
from vlm_rl.learner.sync_probe import RESPONSES
from vlm_rl.samplers.base import SampleRequest
from vlm_rl.toy.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("doctor") / "model", weight_std=0.1)


def test_rare_tokens_are_taken_together() -> None:
    """With expected counts 40, 30, 20 and, together, 10: Pearson's test on these four."""
    probabilities = np.array([0.4, 0.004, 0.3, 0.2, *[0.016] * 6])
    counts = np.array([37, 1, 33, 21, 1, 2, 0, 3, 1, 1])
    expected = chisquare([37, 33, 21, 9], [40, 30, 20, 10]).pvalue
    assert engine.p_value(counts, probabilities) == pytest.approx(expected, rel=1e-12)
    assert engine.p_value(np.array([9_700, 300]), np.array([0.96, 0.04])) < engine.LEAST_P


def test_a_gap_that_is_not_a_number_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second of three cycles, and of the second of two prompts in a cycle."""
    gaps = iter([1e-5, math.nan, 2e-5])
    monkeypatch.setattr(engine, "move", lambda *_, **__: None)
    monkeypatch.setattr(engine, "sync_and_compare", lambda *_, **__: next(gaps))
    sampler = SimpleNamespace(dtype=torch.float32, name="toy", sleep=lambda: None)
    subject: Any = SimpleNamespace(engine=sampler, policy=(None, None, 1e-3), prompts=[])
    answer = engine.sync(subject)
    assert answer.outcome == "off" and "within nan" in answer.detail


@pytest.mark.parametrize(("device", "options"), [("cuda", engine.GRAPHS), ("cpu", None)])
def test_the_engine_of_a_gpu_has_the_graphs_that_a_sync_replays(
    monkeypatch: pytest.MonkeyPatch, device: str, options: Any
) -> None:
    """A sync samples RESPONSES to each of two prompts; their second token is a decoding step of all of them."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(engine, "default_device", lambda: torch.device(device))
    monkeypatch.setattr(engine, "start_sampler", lambda *_, **options: asked.update(options))
    subject: Any = EngineUnderTest(Path("model"))
    vars(subject)["policy"] = (None, 0.0, 1.0)
    assert subject.engine is None and asked["vllm_options"] == options
    assert 2 * RESPONSES in engine.GRAPHS["compilation_config"]["cudagraph_capture_sizes"]


def test_vllm_takes_these_options(model: Path) -> None:
    vllm = pytest.importorskip("vllm")
    config = vllm.EngineArgs(model=str(model), **engine.GRAPHS)
    assert config.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8] and not config.enforce_eager


# --- ranks, in a new process: DeepSpeed would change this one, and a fork would lack the threads of its groups -----


def outcomes(model: Path, sender: Connection) -> None:
    """Send the outcome of each check, as it is and with what it looks at broken."""
    subject = ModelUnderTest(model)
    sent = [[(answer.name, answer.outcome, answer.detail) for answer in run_checks(ranks.CHECKS, subject)]]
    learner.world_size = lambda: 2  # what the loss is multiplied with
    ranks.dist = SimpleNamespace(all_reduce=lambda tensor: tensor.add_(1))
    sent.append([(answer.name, answer.outcome, answer.detail) for answer in run_checks(ranks.CHECKS, subject)])
    sender.send(sent)


@pytest.mark.slow
def test_the_checks_of_the_ranks(model: Path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=outcomes, args=(model, sender))
    child.start()
    sender.close()  # so that a child that ends without an answer is noticed
    try:
        assert receiver.poll(1000), "no answer"
        sound, broken = receiver.recv()
    finally:
        child.kill()
        child.join()
    names = ["collectives", "ZeRO 2", "ZeRO 3"]
    assert [answer[:2] for answer in sound] == [(name, "ok") for name in names], sound
    assert [answer[:2] for answer in broken] == [(name, "off") for name in names], broken
    errors = [float(answer[2].split("within ")[1].split("%")[0]) for answer in broken[1:]]
    assert errors == pytest.approx([100, 100], abs=3), "a step twice as long"


# --- the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject(model: Path) -> Iterator[EngineUnderTest]:
    """One engine for all tests: vLLM where it is installed."""
    subject = EngineUnderTest(model)
    yield subject
    subject.engine.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SAMPLED", 1000)
    monkeypatch.setattr(engine, "CYCLES", 2)


@pytest.mark.usefixtures("few")
def test_they_pass_on_a_pretended_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the transformers sampler, whose weights are on the same device; vLLM's have their tests in whole runs."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with PretendedCuda():
        subject = EngineUnderTest(model)
        assert next(subject.policy[0].parameters()).device.type == "cuda"
        for check in (engine.sync, engine.sampling):
            answer = check(subject)
            assert answer.outcome == "ok" and "transformers" in answer.detail, answer


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_checks_of_the_engine(subject: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(subject.engine)
    load, generate = kind.load_weights, kind.generate
    for check in (engine.sync, engine.sampling):
        answer = check(subject)
        assert answer.outcome == "ok" and subject.engine.name in answer.detail, answer

    def load_late(self: Any, tensors: Any, *, version: int) -> None:
        """Load everything but the last change of one matrix."""
        kept = dict(subject.policy[0].model.named_parameters())["model.language_model.norm.weight"]
        load(self, ((n, t * 0.9 if t is kept else t) for n, t in tensors), version=version)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "load_weights", load_late)
        answer = engine.sync(subject)
        assert answer.outcome == "off" and "does not hold the learner's weights" in answer.detail

    def too_warm(self: Any, request: SampleRequest, **rest: Any) -> Any:
        return generate(self, replace(request, params=replace(request.params, temperature=1.5)), **rest)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "generate", too_warm)
        for check in (engine.sync, engine.sampling):
            answer = check(subject)
            assert answer.outcome == "off" and answer.next_step, answer
    assert "chi-square p" in answer.detail
