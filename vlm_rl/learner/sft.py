"""Supervised fine-tuning on responses, with the learner that reinforcement learning uses afterwards.

The loss is minus the mean log-likelihood of the response tokens of a batch, the end of the turn included. Prompts and
images go through the same packing as in training. `warm_start` is one pass over examples in the order given;
vlm_rl.session.sft is a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder, PromptCache, rope_positions
from vlm_rl.data.turns import as_prompt
from vlm_rl.devices import model_dtype
from vlm_rl.distributed import all_reduce_sums, barrier, gather_shares, init_ranks, rank, share
from vlm_rl.learner.architectures import check_architecture
from vlm_rl.learner.deepspeed import least_zero_stage
from vlm_rl.learner.learner import Learner, UpdateResult
from vlm_rl.learner.packing import PackedRow, pack_row
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.row_plan import plan_rows
from vlm_rl.losses import supervised_loss
from vlm_rl.run.terminal import progress
from vlm_rl.types import Group, Problem, Rollout


@dataclass(frozen=True, slots=True)
class Example:
    """A problem and the whole response to learn, the template's prefill included."""

    problem: Problem
    response: str
    episode: Rollout | None = None  # a response of several turns, whose last one is `response`


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

    The ZeRO stage is the least that the dtype of the weights allows.

    Args:
        examples: in training order.
        out: the folder to write.
        model_path: the Hugging Face folder to start from.
        builder: renders the problems for this model.
        config: the optimizer's settings; ``mini_batch_prompts``, ``sequence_parallel`` and ``zero_stage`` are not
            used.
        batch_size: examples per optimizer step.

    Raises UserError for a model that the learner would compute wrongly.
    """
    check_architecture(builder.config, path=model_path)
    device = init_ranks()
    dtype = model_dtype(device)
    config = config.model_copy(update={"zero_stage": least_zero_stage(dtype)})
    model = load_model(model_path, dtype=dtype, device=device)
    # The ban, as in the reinforcement that follows: no probability is spent on ids that it never samples.
    policy = Policy(model, banned_ids=builder.banned_ids, temperature=1.0)
    batches = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
    learner = Learner(policy, config, total_optimizer_steps=len(batches))
    prompts = PromptCache(builder)
    with progress("warm start", total=len(batches)) as advance:
        for batch in batches:
            advance(note=f"loss {take_step(learner, batch, builder, prompts).loss:.3f}")
    learner.save_model(out)
    if rank() == 0:
        (builder.processor or builder.tokenizer).save_pretrained(out)
    barrier()
    return out


def take_step(
    learner: Learner,
    examples: Sequence[Example],
    builder: PromptBuilder,
    prompts: PromptCache,
    *,
    tokens: int | None = None,
) -> UpdateResult:
    """Take one optimizer step on a batch. Every rank gives the whole batch, and computes its part of it.

    Args:
        learner: trains the policy.
        examples: the batch.
        builder: encodes the responses.
        prompts: has or builds the prompts.
        tokens: the most of a row; None for train.micro_batch_tokens.
    """
    lengths = gather_shares([len(prompts[example.problem].ids) for example in share(examples)])
    budget = tokens or learner.config.micro_batch_tokens
    return learner.update(pack_examples(examples, lengths, builder, prompts, learner.policy, budget), supervised_loss)


def mean_loss(
    learner: Learner,
    examples: Sequence[Example],
    builder: PromptBuilder,
    *,
    batch_size: int,
    tokens: int,
) -> float:
    """Return the loss of examples at the current weights: minus the mean log-likelihood over their response tokens.

    Every rank gives all of them, and computes its part. No weight and no random number changes.

    Args:
        learner: holds the policy.
        examples: at least one.
        builder: builds the prompts, and encodes the responses.
        batch_size: examples whose prompts are in memory at a time.
        tokens: the most of a row.
    """
    total = torch.zeros((), dtype=torch.float64)
    count = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(examples), batch_size):
        batch, prompts = examples[start : start + batch_size], PromptCache(builder)
        lengths = gather_shares([len(prompts[example.problem].ids) for example in share(batch)])
        for row in pack_examples(batch, lengths, builder, prompts, learner.policy, tokens):
            is_real_K = row.loss.weights_n[row.loss.response_K] > 0  # a row of padding keeps the ranks in step
            logp_K = learner.log_probs(row)
            if learner.policy.ranks.is_first:
                total -= logp_K[is_real_K].double().sum()
                count += is_real_K.sum()
    sums = all_reduce_sums({"total": total, "count": count})
    return sums["total"] / sums["count"]


def pack_examples(
    examples: Sequence[Example],
    prompt_lengths: Sequence[int],
    builder: PromptBuilder,
    prompts: PromptCache,
    policy: Policy,
    budget: int,
) -> list[PackedRow]:
    """Return this rank's rows of one batch; each token weighs 1 / (response tokens of the batch).

    Args:
        examples: the batch.
        prompt_lengths: tokens of each example's prompt.
        builder: encodes the responses.
        prompts: has or builds the prompts that this rank needs.
        policy: computes the rows.
        budget: most tokens of a row.
    """
    groups = [_group(example, builder) for example in examples]
    lengths = [group.lengths_G.tolist() for group in groups]
    sizes = [group.sizes_G.tolist() for group in groups]
    ranks = policy.ranks
    plan = plan_rows(prompt_lengths, sizes, budget=budget, num_ranks=ranks.number, padded=policy.is_padded)
    return [
        pack_row(
            chunks,
            groups=groups,
            prompts={chunk.group: prompts[groups[chunk.group].problem] for chunk in chunks},
            weights_PG=np.full((len(groups), 1), 1.0 / sum(map(sum, lengths))),
            positions=partial(rope_positions, policy.model),
            observed=partial(as_prompt, builder),
        )
        for chunks in plan[ranks.index]
    ]


def _group(example: Example, builder: PromptBuilder) -> Group:
    """Return the example as a group of one response; the supervised loss reads no reward, advantage or log-prob."""
    problem, rollout = example.problem, example.episode
    if rollout is None:
        ids = builder.encode_response(example.response)
        rollout = Rollout(problem.id, 0, ids, np.zeros(len(ids), np.float32), example.response, "stop", 0)
    return Group(problem, (rollout,), rewards=(), advantages_G=np.ones(1))
