"""A supervised start on reasoning traces, with the learner that reinforcement learning uses afterwards.

One pass over (problem, response) examples in the order given. The loss is minus the mean log-likelihood of the
response tokens; the images go through the same packing as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.distributed import barrier, init_ranks, model_dtype, rank, world_size
from vlm_rl.learner.architectures import check_architecture
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import PackedRow, pack_row
from vlm_rl.learner.planning import plan_rows
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.losses import supervised_loss
from vlm_rl.run.terminal import progress
from vlm_rl.types import Group, Problem, Prompt, Rollout


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
    """Train on the examples and write the model as a Hugging Face folder. Returns the folder.

    Args:
        examples: in training order.
        out: the folder to write.
        model_path: the Hugging Face folder to start from.
        builder: renders the problems for this model.
        config: the optimizer's settings; ``mini_batch_prompts`` is not used.
        batch_size: examples per optimizer step.

    Raises UserError for a model that the learner would compute wrongly.
    """
    check_architecture(builder.config, path=model_path)
    dtype = model_dtype(init_ranks())
    model = load_model(model_path, dtype=dtype, shard_for=config)
    policy = Policy(model, banned_ids=builder.banned_ids, temperature=1.0)
    batches = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    learner = Learner(policy, config, total_optimizer_steps=len(batches))
    prompts: dict[str, Prompt] = {}
    with progress("warm start", total=len(batches)) as advance:
        for batch in batches:
            for example in batch:
                if example.problem.id not in prompts:
                    prompts[example.problem.id] = builder.build(example.problem)
            rows = _pack(
                [_group(example, builder) for example in batch],
                [prompts[example.problem.id] for example in batch],
                policy,
                budget=config.micro_batch_tokens,
            )
            result = learner.update(rows, supervised_loss)
            advance(note=f"loss {result.loss:.3f}")
    learner.save_model(out)
    if rank() == 0:
        (builder.processor or builder.tokenizer).save_pretrained(out)
    barrier()
    return out


def _group(example: Example, builder: PromptBuilder) -> Group:
    """Return the example as a group of one response; the supervised loss reads no reward, advantage or log-prob."""
    problem, ids = example.problem, builder.encode_response(example.response)
    rollout = Rollout(problem.id, 0, ids, np.zeros(len(ids), np.float32), example.response, "stop", 0)
    return Group(problem, (rollout,), rewards=(), advantages_G=np.ones(1))


def _pack(groups: Sequence[Group], prompts: Sequence[Prompt], policy: Policy, *, budget: int) -> list[PackedRow]:
    """Return this rank's rows of one batch; each token weighs 1 / (response tokens of the batch)."""
    lengths = [group.lengths_G.tolist() for group in groups]
    plan = plan_rows(
        [len(prompt.ids) for prompt in prompts],
        lengths,
        budget=budget,
        num_ranks=world_size(),
        padded=policy.is_padded,
    )
    return [
        pack_row(
            chunks,
            groups=groups,
            prompts=dict(enumerate(prompts)),
            weights_PG=np.full((len(groups), 1), 1.0 / sum(map(sum, lengths))),
            positions=partial(rope_positions, policy.model),
        )
        for chunks in plan[rank()]
    ]
