"""One rank of test_sequence_parallel.py: rows that ranks compute together, and alone."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.family_rows import WITH_EXPERTS, packed_row, routed
from tests.helpers.groups import WeighedGroup
from tests.helpers.learner_worker import TEMPERATURE, VISION_PARTS, Case, banned_ids, five_groups, fresh_model
from vlm_rl.config import LoraConfig
from vlm_rl.distributed import all_gather, init_ranks, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.reference import BaseReference
from vlm_rl.learner.sequence_parallel import group_of_ranks
from vlm_rl.losses import policy_loss

# Ratio and correction are of whole responses; KL and entropy count too.
whole_response_loss = partial(
    policy_loss,
    ratio="sequence",
    surrogate="clip",
    clip_low=0.2,
    clip_high=0.2,
    cap=2.0,
    kl_coef=0.2,
    entropy_coef=0.1,
)
LR = 0.1
TOP = 4  # further ids whose log-probs are asked for
WAYS = ("all kept", "recomputed", "recomputed inside")


def policy_of(model: Path) -> Policy:
    network = deepcopy(fresh_model(model))
    return Policy(network, banned_ids=banned_ids(network.config), temperature=TEMPERATURE)


def with_old_log_probs(row: PackedRow) -> PackedRow:
    """Return the row with random log-probs from before, of the policy and of its reference."""
    rng = np.random.default_rng(1)
    drawn = [torch.from_numpy(rng.normal(-4, 0.3, len(row.target_K)).astype(np.float32)) for _ in range(2)]
    loss = replace(row.loss, old_logp_K=drawn[0], reference_logp_K=drawn[1], mean_weight=torch.tensor(0.02))
    return replace(row, loss=loss)


def computed(policy: Policy, row: PackedRow) -> dict[str, Any]:
    """Return what a policy makes of a row, and the gradients of its loss, summed over the ranks of a group."""
    policy.zero_grad()
    logp_K, entropy_K = policy(row)
    loss, sums = whole_response_loss(logp_K, entropy_K, row.loss)
    loss.backward()
    summed = policy.ranks.sum
    routing = {key: summed(value) for key, value in policy.routers.take().items()}
    grads = {name: summed(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        *_, ids_Kk, top_Kk = policy(row, with_entropy=False, top_k=TOP)
        *_, again_Kk = policy(row, with_entropy=False, ids_Kk=ids_Kk)
        kept_Kk = torch.cat([row.target_K[:, None], ids_Kk], dim=1)
        kept_logp_K, kept_entropy_K = policy(replace(row, kept_Kk=kept_Kk))
    return {
        "logp": logp_K.detach(),
        "entropy": entropy_K.detach(),
        "ids": ids_Kk,
        "top": top_Kk,
        "again": again_Kk,
        "kept": torch.stack([kept_logp_K, kept_entropy_K]),
        "loss": loss.detach(),
        "routing": routing,
        "sums": sums,
        "grads": grads,
    }


def bare(model: Path, size: int) -> dict[str, Any]:
    """Compute a row alone, and with the other ranks of a group, by each way of recomputation.

    The groups differ: rank 0's row has all prompts and the others' fewer.
    """
    groups: list[WeighedGroup] = five_groups(model)[: 4 - rank() // size]
    config = fresh_model(model).config
    if config.model_type in WITH_EXPERTS:
        layers = config.get_text_config().num_hidden_layers
        groups = [routed(group, layers, seed) for seed, group in enumerate(groups)]
    alone = policy_of(model)
    row = with_old_log_probs(packed_row(alone, groups))
    found: dict[str, Any] = {"alone": computed(alone, row), "tokens": len(row.ids_T)}
    for way in WAYS:
        policy = policy_of(model)
        policy.share_rows(group_of_ranks(size))
        if way != WAYS[0]:
            policy.enable_checkpointing(zero_stage=3 if way == WAYS[2] else 0)
        found[way] = computed(policy, row)
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "frozen tower": {"freeze": VISION_PARTS},
    "adapters": {"lora": LoraConfig(rank=4), "checkpointing": True},
}


def stepped(model: Path, size: int, stage: int, variant: str) -> dict[str, Any]:
    """Take a step through DeepSpeed over several rows, with old log-probs and, under adapters, a KL term."""
    case = Case(model, stage, sequence_parallel=size, lr=LR, **VARIANTS[variant])
    rows = case.rows(mean_weight=0.01)
    if case.policy.has_frozen_vision:
        rows = case.learner.with_image_features(rows)
    rows = case.learner.with_old_log_probs(rows)
    if case.policy.base is not None:
        rows = case.learner.with_reference_log_probs(rows, BaseReference(case.learner.engine))
    result = case.learner.update(rows, whole_response_loss)
    found = {
        "logp": _by_member(rows),
        "delta": case.delta(),
        "loss": result.loss,
        "norm": result.grad_norm,
        "sums": dict(result.sums),
    }
    case.learner.engine.destroy()
    return found


def _by_member(rows: list[PackedRow]) -> dict[tuple[int, int], Tensor]:
    """Return the old log-probs of each response, of all ranks."""
    mine: dict[tuple[int, int], Tensor] = {}
    for row in rows:
        assert row.loss.old_logp_K is not None
        mine |= zip(row.members, row.loss.old_logp_K.split(row.loss.lengths_n.tolist()), strict=True)
    return {member: logp for each in all_gather(mine) for member, logp in each.items()}


def refused(size: int) -> str:
    """Return the message about a group that the ranks cannot form."""
    try:
        group_of_ranks(size)
    except UserError as error:
        return str(error)
    return ""


def main(models: str, out: str, size: str, stage: str = "", *variants: str) -> int:
    """Write down what `bare` returns of each model in a folder, by rank; with a ZeRO stage, `stepped` of variants."""
    init_ranks()
    found: dict[str, Any] = {"refused": refused(world_size() + 1)}
    for path in sorted(Path(models).iterdir()):
        if not stage:
            found[path.name] = all_gather(bare(path, int(size)))
        for variant in variants:
            found[f"{path.name}, {variant}"] = stepped(path, int(size), int(stage), variant)
    if rank() == 0:
        torch.save(found, out)
    return 0
