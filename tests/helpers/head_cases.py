"""Cases of the output head, in float64 by autograd on the whole matrix, and what the head computes.

    TRITON_INTERPRET=1 python -m tests.helpers.head_cases   # the fused kernels, on a CPU; prints the largest errors

A process of its own for that: Triton reads the variable when it is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlm_rl.learner import head as head_module
from vlm_rl.learner.head import Head

TOKENS, HIDDEN, VOCABULARY = 7, 16, 5003  # two of the kernels' blocks, the second one not full
BANNED = (3, 4100, 5002)


@dataclass(frozen=True)
class Case:
    """Which gradients arrive, and how the logits are scaled."""

    temperature: float = 1.0
    soft_cap: float | None = None
    further: int = 0  # ids of each token beside its target, whose log-probs are in the loss too
    rows: int = 3  # of a chunk
    of_logp: bool = True
    of_entropy: bool = False


CASES = {
    "log-probs": Case(),
    "at a temperature": Case(temperature=0.7),
    "entropies": Case(temperature=1.3, of_logp=False, of_entropy=True),
    "both": Case(temperature=0.7, of_entropy=True, rows=1),
    "one chunk": Case(of_entropy=True, rows=100),
}


def inputs(dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Return hidden states, a head that makes some tokens almost certain, targets, and a weight for each token."""
    generator = torch.Generator().manual_seed(0)
    hidden_KH = torch.randn(TOKENS, HIDDEN, generator=generator)
    hidden_KH[0] *= 5
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    linear.weight.data = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    target_K = torch.randint(5, 4000, (TOKENS,), generator=generator)
    return hidden_KH.to(dtype), linear, target_K, torch.randn(TOKENS, generator=generator)


def reference(case: Case) -> list[Tensor]:
    """Return log-probs, entropies and the gradients of hidden states and weight, in float64."""
    hidden_KH, linear, target_K, weight_K = inputs(torch.float64)
    hidden_KH.requires_grad_()
    logits_KV = linear(hidden_KH)
    if case.soft_cap is not None:
        logits_KV = case.soft_cap * torch.tanh(logits_KV / case.soft_cap)
    logits_KV = (logits_KV / case.temperature).index_fill(1, torch.tensor(BANNED), -torch.inf)
    logp_KV = logits_KV.log_softmax(-1)
    logp_K = logp_KV.gather(1, target_K[:, None])[:, 0]
    entropy_K = -(logp_KV.exp() * logp_KV.index_fill(1, torch.tensor(BANNED), 0.0)).sum(-1)
    top_Kk = logp_KV.gather(1, further_ids(case, target_K)) if case.further else None
    _loss(case, logp_K, entropy_K, weight_K.double(), top_Kk).backward()
    assert hidden_KH.grad is not None and linear.weight.grad is not None
    return [logp_K.detach(), entropy_K.detach(), hidden_KH.grad, linear.weight.grad]


def computed(case: Case, dtype: torch.dtype = torch.float32, *, fused: bool = False) -> list[Tensor]:
    """Return the same from the head."""
    hidden_KH, linear, target_K, weight_K = inputs(dtype)
    hidden_KH.requires_grad_()
    head = Head(linear, banned_ids=BANNED, temperature=case.temperature, soft_cap=case.soft_cap, fused=fused)
    whole = head_module.LOGIT_BYTES
    size = head_module.bytes_per_logit(dtype, fused=fused, soft_cap=case.soft_cap is not None)
    head_module.LOGIT_BYTES = case.rows * size * VOCABULARY
    try:
        if case.further:
            logp_K, entropy_K, top_Kk = head(hidden_KH, target_K, ids_Kk=further_ids(case, target_K))
        else:
            (logp_K, entropy_K), top_Kk = head(hidden_KH, target_K), None
        _loss(case, logp_K, entropy_K, weight_K, top_Kk).backward()
    finally:
        head_module.LOGIT_BYTES = whole
    assert hidden_KH.grad is not None and linear.weight.grad is not None
    return [logp_K.detach(), entropy_K.detach(), hidden_KH.grad, linear.weight.grad]


def further_ids(case: Case, target_K: Tensor) -> Tensor:
    """Return different ids [K, further], of every second token with the target among them."""
    generator = torch.Generator().manual_seed(1)
    ids_Kk = torch.stack([5 + torch.randperm(3995, generator=generator)[: case.further] for _ in target_K])
    is_there_K = (ids_Kk == target_K[:, None]).any(1)
    ids_Kk[::2, 0] = torch.where(is_there_K, ids_Kk[:, 0], target_K)[::2]
    return ids_Kk


def _loss(case: Case, logp_K: Tensor, entropy_K: Tensor, weight_K: Tensor, top_Kk: Tensor | None) -> Tensor:
    loss = case.of_logp * (logp_K * weight_K).sum() + case.of_entropy * (entropy_K * weight_K.flip(0)).sum()
    if top_Kk is not None:
        loss = loss + (top_Kk.exp() * top_Kk * weight_K.roll(1)[:, None]).sum()
    return loss


def errors(case: Case, got: list[Tensor]) -> list[float]:
    """Return the largest difference of values, relative above 1, and that of each gradient over its norm."""
    wanted = reference(case)
    values = [
        float(((x.double() - y).abs() / y.abs().clamp(min=1)).max()) for x, y in zip(got[:2], wanted[:2], strict=True)
    ]
    return values + [float((x.double() - y).norm() / y.norm()) for x, y in zip(got[2:], wanted[2:], strict=True)]


if __name__ == "__main__":
    print(json.dumps({name: errors(case, computed(case, fused=True)) for name, case in CASES.items()}))
