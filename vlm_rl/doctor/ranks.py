"""Checks that all ranks of this machine make together, one for each GPU: collectives and DeepSpeed's step."""

from __future__ import annotations

import time
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import rope_positions
from vlm_rl.distributed import all_gather, init_ranks, rank, world_size
from vlm_rl.doctor.check import Check, phase
from vlm_rl.doctor.model import ModelUnderTest
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import Chunk, PackedRow, pack_row
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.types import Group, LossInputs, Problem, Prompt, Rollout

STEP_LIMIT = 0.1  # share of a step's norm; rounding to bfloat16 leaves a quarter of it
LENGTHS = (5, 9, 2, 14)  # tokens of the responses to each prompt
_MEBIBYTES_ON_GPU, _MEBIBYTES_ON_CPU = 256, 16


def collectives(_: ModelUnderTest) -> Check:
    """Add up a tensor over all ranks, and gather plain values from the hosts."""
    phase("connecting the ranks")
    device = init_ranks()
    backend = "NCCL" if device.type == "cuda" else "gloo"
    ranks = world_size()
    size = (_MEBIBYTES_ON_GPU if device.type == "cuda" else _MEBIBYTES_ON_CPU) * 2**20 // 4
    seconds, total = [], 0.0
    for _round in range(3):
        tensor = torch.full((size,), rank() + 1.0, device=device)
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        total = tensor.sum(dtype=torch.float64).item()  # waits for the GPU
        seconds.append(time.perf_counter() - begun)
    expected = size * ranks * (ranks + 1) / 2
    wrong = [r for r, (sum_, of_rank) in enumerate(all_gather((total, rank()))) if sum_ != expected or of_rank != r]
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    if wrong:
        advice = (
            "run with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 to see whether the link between cards is at fault"
        )
        return Check("collectives", "off", f"{backend} on {where}: ranks {wrong} got a wrong sum", advice)
    moved = 2 * (ranks - 1) / ranks * 4 * size  # bytes a rank sends and receives in a ring
    speed = f", {moved / min(seconds) / 1e9:.3g} GB/s a rank" if ranks > 1 else ""
    return Check("collectives", "ok", f"{backend} adds up over {where}{speed}")


def ZeRO_2(model: ModelUnderTest) -> Check:
    """Compare a step of ZeRO 2 in bfloat16 with plain gradient descent in float32."""
    return _zero("ZeRO 2", model, stage=2)


def ZeRO_3(model: ModelUnderTest) -> Check:
    """Compare a step of ZeRO 3 in bfloat16 with plain gradient descent in float32."""
    return _zero("ZeRO 3", model, stage=3)


def _zero(name: str, model: ModelUnderTest, *, stage: Literal[2, 3]) -> Check:
    init_ranks()
    error = step_error(model, stage)
    detail = f"a step on {world_size()} rank{'s' * (world_size() > 1)} in bfloat16 is within {error:.1%} of plain "
    detail += f"gradient descent in float32 (limit {STEP_LIMIT:.0%})"
    if error <= STEP_LIMIT:
        return Check(name, "ok", detail)
    return Check(
        name, "off", detail, f"do not train with train.zero_stage={stage} here: report this with the versions"
    )


def step_error(model: ModelUnderTest, stage: Literal[2, 3]) -> float:
    """Return by how much DeepSpeed's step differs from plain descent, as a share of its norm; the same on all ranks.

    Each rank has its own row. The step is as long as the weights, so that rounding them to bfloat16 hardly counts.
    """
    phase("plain gradient descent in float32")
    start, gradient, rows = _plain_gradient(model)
    phase("starting DeepSpeed")
    lr = _norm(start) / _norm(gradient)
    config = TrainConfig(optimizer="sgd", lr=lr, grad_clip=1e30, zero_stage=stage)
    learner = Learner(_policy(model, torch.bfloat16, shard_for=config), config, total_optimizer_steps=1)
    phase("a step of DeepSpeed")
    learner.update([rows[rank()]], _loss)
    missed = {
        name: weight.detach().cpu().float() - start[name] + lr * gradient[name]
        for name, weight in learner.stream_weights()
    }
    learner.engine.destroy()
    return float(np.max(all_gather(_norm(missed) / _norm(start))))  # NaN where one is


def _plain_gradient(model: ModelUnderTest) -> tuple[dict[str, Tensor], dict[str, Tensor], list[PackedRow]]:
    """Return the weights, rounded to bfloat16, the gradient of all ranks' rows in float32, and the rows."""
    policy = _policy(model, torch.bfloat16).float()
    device = init_ranks()
    policy.to(device)
    rows = [_row(model, policy, seed) for seed in range(world_size())]
    for row in rows:
        row = row.to(device)
        logp_K, entropy_K = policy(row)
        _loss(logp_K, entropy_K, row.loss)[0].backward()
    named = dict(policy.model.named_parameters())
    start = {name: p.detach().cpu().clone() for name, p in named.items()}
    return start, {name: p.grad.cpu() for name, p in named.items() if p.grad is not None}, rows


def _policy(model: ModelUnderTest, dtype: torch.dtype, shard_for: TrainConfig | None = None) -> Policy:
    network = load_model(model.path, dtype=dtype, shard_for=shard_for)
    return Policy(network, banned_ids=model.builder.banned_ids, temperature=1.0)


def _row(model: ModelUnderTest, policy: Policy, seed: int) -> PackedRow:
    """Return a row of random responses to each prompt, which get random advantages."""
    rng = np.random.default_rng(seed)
    groups = [_group(prompt, rng, allowed=len(model.builder.tokenizer)) for prompt in model.prompts]
    return pack_row(
        [Chunk(index, tuple(range(len(LENGTHS)))) for index in range(len(groups))],
        groups=groups,
        prompts=dict(enumerate(model.prompts)),
        weights_PG=np.zeros((len(groups), len(LENGTHS))),
        positions=partial(rope_positions, policy.model),
    )


def _group(prompt: Prompt, rng: np.random.Generator, *, allowed: int) -> Group:
    problem = Problem(id=prompt.problem_id, question="", images=(), answer="", answer_type="text")
    responses = [rng.integers(16, allowed, size=n).astype(np.int32) for n in LENGTHS]
    rollouts = [
        Rollout(prompt.problem_id, index, ids, np.zeros(len(ids), np.float32), "", "stop", 0)
        for index, ids in enumerate(responses)
    ]
    return Group(problem, tuple(rollouts), (), rng.normal(size=len(LENGTHS)))


def _loss(logp_K: Tensor, entropy_K: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return -(inputs.advantages_n[inputs.response_K] * logp_K).sum(), {}


def _norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


CHECKS = (collectives, ZeRO_2, ZeRO_3)
SUBJECT = ModelUnderTest
