"""The output head, by torch and by the fused kernels, against autograd on the whole matrix in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import head_cases
from tests.helpers.head_cases import CASES, Case, computed, errors
from vlm_rl.config import ModelConfig
from vlm_rl.errors import UserError
from vlm_rl.learner.head import LOGIT_BYTES, Head, bytes_per_logit, chunk_rows

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-5  # nats, or of a gradient's norm


FURTHER = (Case(further=7), Case(further=3, of_logp=False), Case(further=5, of_entropy=True, temperature=0.7, rows=1))


@pytest.mark.parametrize("case", [*CASES.values(), Case(soft_cap=9.0, temperature=0.7, of_entropy=True), *FURTHER])
def test_values_and_gradients_are_those_of_the_whole_matrix(case: Case) -> None:
    assert max(errors(case, computed(case))) < CLOSE


def test_the_fused_kernels_compute_the_same() -> None:
    """Under Triton's interpreter, which computes what the kernels say; a compiler and a card are not in it."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.head_cases"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured.keys() == CASES.keys()
    assert max(map(max, measured.values())) < CLOSE, measured


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bfloat16_sums_the_weights_gradient_in_float32(temperature: float) -> None:
    """Each chunk's share is rounded once, and their sum once."""
    case = Case(temperature=temperature, rows=1)
    got, wanted = computed(case, torch.bfloat16), computed(replace(case, rows=100), torch.bfloat16)
    for x, y in zip(got, wanted, strict=True):
        assert float((x.float() - y.float()).norm() / y.float().norm()) < 2**-8


def test_log_probs_without_entropies_are_the_same() -> None:
    hidden, linear, target, _ = head_cases.inputs(torch.float32)
    head = Head(linear, banned_ids=head_cases.BANNED, temperature=0.7)
    logp_K, entropy_K = head(hidden, target)
    alone_K, nothing = head(hidden, target, with_entropy=False)
    assert entropy_K is not None and nothing is None
    assert torch.equal(alone_K, logp_K)


def test_the_most_likely_ids_are_those_of_the_whole_matrix() -> None:
    hidden, linear, target, _ = head_cases.inputs(torch.float32)
    logits_KV = linear(hidden).index_fill(1, torch.tensor(head_cases.BANNED), -torch.inf) / 0.7
    expected = logits_KV.log_softmax(-1).topk(4)
    logp_K, nothing, ids_Kk, top_Kk = Head(linear, banned_ids=head_cases.BANNED, temperature=0.7)(
        hidden, target, with_entropy=False, top_k=4
    )
    assert nothing is None and torch.equal(ids_Kk, expected.indices)
    torch.testing.assert_close(top_Kk, expected.values)
    torch.testing.assert_close(logp_K, logits_KV.log_softmax(-1).gather(1, target[:, None])[:, 0])
    assert not top_Kk.requires_grad


def test_a_row_without_responses_has_gradients_of_zero() -> None:
    hidden, linear, target, _ = head_cases.inputs(torch.float32)
    logp_K, _ = Head(linear, banned_ids=(), temperature=1.0)(hidden[:0].requires_grad_(), target[:0])
    logp_K.sum().backward()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


class Peak(TorchDispatchMode):
    """Remembers the most bytes of tensors [C, V] of a chunk of 3 tokens that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor) and x.shape == (3, head_cases.VOCABULARY):
                self.alive[x.untyped_storage()._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()),
                    x.untyped_storage().nbytes(),
                )
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", [Case(), Case(temperature=0.7, of_entropy=True), Case(temperature=0.7, soft_cap=9.0, of_entropy=True)]
)
def test_a_chunk_holds_as_many_copies_as_are_planned(case: Case, dtype: torch.dtype) -> None:
    with Peak() as peak:
        computed(case, dtype)
    planned = case.rows * head_cases.VOCABULARY * bytes_per_logit(dtype, soft_cap=case.soft_cap is not None)
    assert 0.7 * planned < peak.most <= planned


def test_fewer_copies_make_larger_chunks() -> None:
    """Of Qwen2.5-VL-3B's vocabulary: two float32 copies, or the bfloat16 logits alone."""
    assert chunk_rows(151_936, torch.bfloat16) == LOGIT_BYTES // (8 * 151_936) == 883
    assert chunk_rows(151_936, torch.bfloat16, fused=True) == 3533
    assert chunk_rows(2**40, torch.float32) == 1


def test_the_fused_kernels_are_off_and_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ModelConfig(path="m").fused_head
    linear = torch.nn.Linear(4, 8, bias=False)
    with pytest.raises(UserError, match=r"model\.fused_head: this model caps its logits"):
        Head(linear, banned_ids=(), temperature=1.0, soft_cap=30.0, fused=True)
    if find_spec("triton") is not None:
        with pytest.raises(UserError, match=r"model\.fused_head needs a GPU"):
            Head(linear, banned_ids=(), temperature=1.0, fused=True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "vlm_rl.learner.head_kernels", raising=False)
    monkeypatch.delattr("vlm_rl.learner.head_kernels", raising=False)
    with pytest.raises(UserError, match=r"model\.fused_head needs Triton"):
        Head(linear, banned_ids=(), temperature=1.0, fused=True)
