"""A supervised start on reasoning traces, with the learner that reinforcement uses afterwards.

One pass over (problem, response) examples in the order given; the loss is the mean over response
tokens of minus the log-likelihood, the images go through the same packing as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.distributed import barrier, init_ranks, rank, world_size
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import TrainGroup, pack_row, plan_rows
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.losses import supervised_loss
from vlm_rl.run.terminal import progress
from vlm_rl.types import Problem, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Example:
    """A problem and the whole response to learn, the template's prefill included."""

    problem: Problem
    response: str


def warm_start(
    examples: Sequence[Example],
    out: Path,
    *,
    model_path: Path,
    builder: PromptBuilder,
    config: TrainConfig,
    batch_size: int,
) -> Path:
    """Train on the examples, `batch_size` of them per optimizer step, and write a Hugging Face folder.

    ``config.mini_batch_prompts`` is not used; a batch here is single responses.
    """
    device = init_ranks()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    policy = Policy(load_model(model_path, dtype=dtype), banned_ids=builder.banned_ids, temperature=1.0)
    batches = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    learner = Learner(policy, config, total_optimizer_steps=len(batches))
    prompts: dict[str, Prompt] = {}
    with progress("warm start", total=len(batches)) as advance:
        for batch in batches:
            groups = _groups(batch, builder, prompts)
            plan = plan_rows(
                [len(group.prompt.ids) for group in groups],
                [[len(group.rollouts[0].ids)] for group in groups],
                budget=config.micro_batch_tokens,
                num_ranks=world_size(),
            )
            rows = [pack_row(groups, chunks, partial(rope_positions, policy.model)) for chunks in plan[rank()]]
            result = learner.update(rows, supervised_loss)
            advance(note=f"loss {result.loss:.3f}")
    learner.save_model(out)
    if rank() == 0:
        (builder.processor or builder.tokenizer).save_pretrained(out)
    barrier()
    return out


def _groups(batch: Sequence[Example], builder: PromptBuilder, prompts: dict[str, Prompt]) -> list[TrainGroup]:
    """Groups of one response, each token weighing 1 / (tokens of the batch)."""
    responses = [builder.encode_response(example.response) for example in batch]
    weight = 1.0 / sum(map(len, responses))
    groups = []
    for example, ids in zip(batch, responses, strict=True):
        problem = example.problem
        if problem.id not in prompts:
            prompts[problem.id] = builder.build(problem)
        rollout = Rollout(problem.id, 0, ids, np.zeros(len(ids), np.float32), example.response, "stop", 0)
        groups.append(
            TrainGroup(prompts[problem.id], [rollout], np.ones(1), np.full(1, weight), use_correction=False)
        )
    return groups
