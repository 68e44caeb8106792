"""The tables of `vlm-rl train --dry-run` and `vlm-rl sft --dry-run`."""

from __future__ import annotations

import json
import math

from rich.table import Table

from vlm_rl.learner.architectures import PADDED_COST
from vlm_rl.learner.checkpoint_size import planned_room
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.planning.dry_run import DryRun
from vlm_rl.planning.fits import engine_share, sft_verdict, verdict
from vlm_rl.planning.memory import most_resident, optimizer_is_offloaded, row_images, row_tokens
from vlm_rl.run.terminal import make_console

_GIB = 2**30


def print_dry_run(plan: DryRun, *, card: float | None = None, samples: bool = True) -> None:
    """Print the plan as tables, and the DeepSpeed block as JSON.

    Args:
        plan: what is printed.
        card: the bytes of a GPU, to say whether the plan fits; None leaves that out.
        samples: whether the run samples responses; `vlm-rl sft` does not.
    """
    console = make_console()
    config, t, r = plan.config, plan.config.train, plan.config.rollout
    dtype = str(plan.dtype).removeprefix("torch.")
    console.print(f"model      {short_name(config.model.path)}, {_billions(plan.num_parameters)} parameters, {dtype}")
    lora = config.model.lora
    for part, count in plan.num_parameters_of.items():
        rate = f"lr {t.lr_by_part.get(part, t.lr):g}"
        is_frozen = lora is not None or part in config.model.freeze
        console.print(f"           {part} {_billions(count)} ({'frozen' if is_frozen else rate})")
    if lora is not None:
        adapters = f"rank {lora.rank} on {plan.num_adapted} linear layers"
        adapters += ", the base model's in 4 bits" if lora.load_in_4bit else ""
        console.print(f"           LoRA: {_billions(plan.num_trainable)} parameters trained, {adapters}")
    console.print(f"           built on the meta device from {plan.model_source}")
    batch = f"{r.prompts_per_step} prompts x {r.responses_per_prompt} responses"
    if plan.is_padded:
        console.print(f"rows       padded, {PADDED_COST}")
    batch = f"{config.algorithm.name}, {batch}" if samples else f"supervised, {r.prompts_per_step} responses"
    console.print(f"algorithm  {batch} a step")
    console.print(_memory_table(plan, samples=samples, card=card))
    totals = ", ".join(f"{n}: {_gib(m.update)}" for n, m in plan.memory_by_ranks.items())
    console.print(f"{'update phase' if samples else 'together'} by number of ranks, GiB: {totals}")
    if card is not None:
        console.print(verdict(plan, card) if samples else sft_verdict(plan, card), soft_wrap=True)
    elif plan.is_on_gpu:
        console.print("does it fit? say --gpu-memory GB, the size of your cards")
    if samples:
        console.print(_tokens_table(plan))
    per_step = f"{plan.updates_per_step} steps per rollout step, " if samples else ""
    console.print(
        f"optimizer  {per_step}{plan.optimizer_steps:,}{' in all' if samples else ' steps'} "
        f"({t.optimizer}, lr {t.lr:g}, {t.warmup_steps} warm-up, {t.schedule})"
    )
    for line in planned_room(plan).lines():
        console.print(line, soft_wrap=True)
    console.print("DeepSpeed block:")
    console.print(json.dumps(plan.deepspeed, indent=2))


def _memory_table(plan: DryRun, *, samples: bool, card: float | None) -> Table:
    m, stage, checkpointing = plan.memory, plan.config.train.zero_stage, plan.config.model.gradient_checkpointing
    many = "rank" if plan.num_ranks == 1 else "ranks"
    table = Table(title=f"memory per rank, ZeRO {stage} on {plan.num_ranks} {many}", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("what it is")
    where = "divided" if stage == 3 else "whole on every rank"
    if most_resident(plan.config.train) < math.inf:
        where = "those in use; ZeRO 3 keeps the others in host memory"
    table.add_row("weights", _gib(m.weights), where)
    summed = "divided; summed over the ranks after each row"
    if stage < 2:
        summed = "whole; summed over the ranks once a step"
    elif stage == 2 and plan.num_ranks > 1:
        summed += f". train.zero_stage=1 sums once a step, and holds {_gib(plan.num_ranks * m.gradients)} GiB"
    table.add_row("gradients", _gib(m.gradients), summed)
    if optimizer_is_offloaded(plan.config.train):
        table.add_row("optimizer", _gib(m.optimizer), "in host memory, where DeepSpeed takes the step")
    else:
        table.add_row("optimizer", _gib(m.optimizer), "divided" if stage >= 1 else "whole on every rank")
    images = f" with {row_images(plan.config)} images" if "tower" in plan.num_parameters_of else ""
    table.add_row(
        "activations",
        _gib(m.activations),
        f"estimate: a row of {row_tokens(plan.config):,} tokens{images}, "
        f"{'with' if checkpointing else 'without'} gradient checkpointing, "
        f"{'patched' if plan.is_patched else 'unpatched'} layers",
    )
    table.add_row("output head", _gib(m.head), "logits in chunks; its weight's gradient in float32, and a product")
    table.add_row("buckets", _gib(m.buckets), "DeepSpeed's reduce_bucket_size")
    if not samples:
        table.add_row("together", _gib(m.update), "", style="bold")
        return table
    update = "the sum so far" if m.is_served else "the sum so far; the engine sleeps"
    table.add_row("update phase", _gib(m.update), update, style="bold", end_section=True)
    engine = "on each rollout server, not here" if m.is_served else "the rollout engine's own, dropped in the update"
    shared = plan.config.rollout.tensor_parallel
    if shared > 1:
        engine += f"; divided among {shared} cards"
    table.add_row("engine weights", _gib(m.engine_weights), engine)
    kept = (
        "with the learner's weights; its optimizer is in host memory"
        if m.host_optimizer
        else "with the learner's weights and optimizer"
    )
    table.add_row("rollout phase", _gib(m.rollout), kept, style="bold")
    if card is not None and plan.is_on_gpu and not m.is_served:
        share = engine_share(plan.config)
        what = f"{share:g} of the card: its weights, CUDA graphs, and the cache in what is left"
        table.add_row("engine's share", _gib(int(share * card)), what)
        table.add_row("with that share", _gib(int(m.kept + share * card)), "the rollout phase, at most", style="bold")
    place = "on each server" if m.is_served else "on top"
    if shared > 1:
        place += ", each of its cards" if m.is_served else ", on each card"
    table.add_row(
        "key-value cache",
        _gib(m.kv_cache),
        f"at most, {place}: "
        f"{plan.responses_side_by_side} responses side by side at full length, "
        f"{plan.kv_bytes_per_token / 1024:g} KiB a token; with less, some of them wait",
    )
    _add_host_rows(table, plan)
    return table


def _add_host_rows(table: Table, plan: DryRun) -> None:
    m, ranks = plan.memory, plan.num_ranks
    table.add_section()
    what = "its share and one matrix at a time" if plan.config.train.zero_stage == 3 else "the whole model"
    table.add_row("host: loading", _gib(ranks * m.loading), f"all ranks, each {what}")
    if m.host_optimizer:
        when = "while responses are drawn" if m.is_moved else "with float32 gradients: the step is taken there"
        table.add_row("host: optimizer", _gib(ranks * m.host_optimizer), f"all ranks, {when}")
    if m.host_weights:
        table.add_row("host: weights", _gib(ranks * m.host_weights), "all ranks, each its shards")
    if m.host_engine:
        table.add_row("host: engines", _gib(ranks * m.host_engine), "base models of sleeping engines")
    if m.checkpoint_copies:
        copies = "all ranks, while an asynchronous save is written: a copy of the checkpoint"
        table.add_row("host: checkpoint", _gib(m.checkpoint_copies), copies)


def _tokens_table(plan: DryRun) -> Table:
    table = Table(title="tokens per rollout step, at most", title_justify="left")
    table.add_column("part")
    table.add_column("tokens", justify="right")
    table.add_column("what it is")
    c, r = plan.config, plan.config.rollout
    prompts, responses = plan.max_prompt_tokens_per_step, plan.max_response_tokens_per_step
    times = f"{r.responses_per_prompt} times, with padded rows" if plan.is_padded else "once per group"
    table.add_row("prompts", f"{prompts:,}", f"{r.prompts_per_step} x {c.data.max_prompt_tokens:,}, {times}")
    table.add_row("responses", f"{responses:,}", f"{plan.responses_per_step:,} x {r.max_tokens:,}")
    table.add_row("per rank", f"{(prompts + responses) // plan.num_ranks:,}", f"of {plan.num_ranks}")
    return table


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size >= 0.01 * _GIB or size == 0 else f"{size / _GIB:.1g}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
