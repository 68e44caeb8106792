"""The tables of `vlm-rl train --dry-run` and `vlm-rl sft --dry-run`."""

from __future__ import annotations

import json
import math

from rich.table import Table

from vlm_rl.learner.architectures import PADDED_COST
from vlm_rl.learner.lora import target_layers
from vlm_rl.learner.row_sums import are_summed_here
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.planning.dry_run import DryRun
from vlm_rl.planning.fits import ROLLOUT_SHARE, UPDATE_SHARE, Card, Fit, engine_share, fits, gib, takes_share
from vlm_rl.planning.memory import most_resident, optimizer_is_offloaded, row_images, row_tokens, side_by_side
from vlm_rl.planning.remedies import MayChange, any_key, fitting_ranks, fitting_remedies, is_resumable
from vlm_rl.run.checkpoint import size_text
from vlm_rl.run.terminal import make_console

_GIB = 2**30
RECOMPUTED = {  # by model.gradient_checkpointing
    False: "without gradient checkpointing",
    "mlp": "with gradient checkpointing of the MLPs",
    True: "with gradient checkpointing",
    "auto": "with gradient checkpointing, or less by the card",
}


def print_dry_run(
    dry: DryRun, *, card: Card | None = None, resumes: bool = False, hours: str = "", shows_deepspeed: bool = False
) -> None:
    """Print whether the plan fits, on the disk too, and how long the run takes, then the plan as tables.

    Args:
        dry: what is printed.
        card: of each rank, to say whether the plan fits; None leaves that out.
        resumes: whether the plan is for a run that is resumed, most of whose keys stay.
        hours: a line about the duration; "" if nothing is known.
        shows_deepspeed: whether the DeepSpeed block follows, as JSON.
    """
    console, samples, room = make_console(), dry.samples, dry.disk_room
    if (fault := room.fault()) is not None:
        console.print(fault, soft_wrap=True)
    fit = fits(dry, card) if card is not None else None
    if fit is not None:
        disk = f"; its checkpoints, {size_text(room.most * room.size)} at most, fit on the disk"
        said = verdict(fit, is_resumable if resumes else any_key)
        console.print(said + disk * (fit.ok and fault is None), soft_wrap=True)
    elif dry.is_on_gpu:
        console.print("does it fit? say --gpu-memory GB, the size of your cards")
    if hours:
        console.print(hours, soft_wrap=True)
    config, t, r = dry.config, dry.config.train, dry.config.rollout
    dtype = str(dry.dtype).removeprefix("torch.")
    console.print(f"model      {short_name(config.model.path)}, {_billions(dry.num_parameters)} parameters, {dtype}")
    lora = config.model.lora
    for part, count in dry.sizes.by_part.items():
        rate = f"lr {t.lr_by_part.get(part, t.lr):g}"
        is_frozen = lora is not None or part in config.model.freeze
        console.print(f"           {part} {_billions(count)} ({'frozen' if is_frozen else rate})")
    if lora is not None:
        adapters = f"rank {lora.ranks} on {len(target_layers(dry.sizes.model, lora.targets))} linear layers"
        adapters += ", the base model's in 4 bits" if lora.load_in_4bit else ""
        console.print(f"           LoRA: {_billions(dry.num_trainable)} parameters trained, {adapters}")
    console.print(f"           built on the meta device from {dry.model_source}")
    batch = f"{r.prompts_per_step} prompts x {r.responses_per_prompt} responses"
    if dry.is_padded:
        console.print(f"rows       padded, {PADDED_COST}")
    batch = f"{config.algorithm.name}, {batch}" if samples else f"supervised, {r.prompts_per_step} responses"
    console.print(f"algorithm  {batch} a step")
    console.print(_memory_table(fit.dry if fit else dry, card=card))
    totals = ", ".join(f"{ranks}: {_gib(other.memory.update)}" for ranks, other in dry.by_ranks().items())
    console.print(f"{'update phase' if samples else 'together'} by number of ranks, GiB: {totals}")
    if samples:
        console.print(_tokens_table(dry))
    per_step = f"{dry.updates_per_step} steps per rollout step, " if samples else ""
    warmup = t.warmup_updates(dry.updates_per_step if samples else 1)
    console.print(
        f"optimizer  {per_step}{dry.updates_per_step * t.steps:,}{' in all' if samples else ' steps'} "
        f"({t.optimizer}, lr {t.lr:g}, {warmup} warm-up, {t.schedule})"
    )
    console.print(room.line(), soft_wrap=True)
    if shows_deepspeed:
        console.print("DeepSpeed block:")
        console.print(json.dumps(dry.deepspeed, indent=2))
    else:
        console.print("DeepSpeed  -v prints the configuration that it is given")


def verdict(fit: Fit, may_change: MayChange = any_key) -> str:
    """Return whether a run fits on a card, and if not, what would make it fit: settings, or more ranks."""
    card, samples = fit.card, fit.dry.samples
    limits = f"{UPDATE_SHARE:.0%} of it{f' in the update and {ROLLOUT_SHARE:.0%} in rollouts' * samples}"
    if fit.ok:
        left = f"a plan may take {limits}, and {fit.margin / _GIB:.1f} are left where it is tightest"
        return f"fits on {card}: of {gib(card.free)} the plan takes {_planned(fit)}; {left}"
    has = "The card has" if card.is_gpu else "Each rank has"
    lines = [f"does not fit on {card}: {fit.faults}. {has} {gib(card.free)}, for a plan {limits}."]
    if (found := fitting_remedies(fit, may_change)) is not None:
        lines += ["what would, on as many ranks:", *(f"  {remedy}  # {remedy.effect}" for remedy in found)]
    if (ranks := fitting_ranks(fit)) is not None:
        lines.append(f"so would more ranks, as it is: {ranks}" if found else f"what would, as it is: {ranks} ranks")
    if len(lines) == 1:
        kept = ", of those that a resume takes," * (may_change is is_resumable)
        lines.append(f"no settings{kept} and no ranks would: use a smaller model, model.lora, or larger cards")
    return "\n".join(lines)


def _planned(fit: Fit) -> str:
    memory = fit.dry.memory
    if not fit.dry.samples:
        return f"{memory.update / _GIB:.1f}"
    planned = f"{gib(memory.update)} in the update and "
    if memory.is_served:
        return f"{planned}{memory.rollout / _GIB:.1f} in rollouts"
    if not takes_share(memory, fit.card):
        return f"{planned}{(memory.rollout + memory.kv_cache) / _GIB:.1f} in rollouts, keys and values included"
    engine = f"the engine's {memory.engine_weights / _GIB:.1f} of weights included"
    return f"{planned}{memory.rollout / _GIB:.1f} in rollouts, {engine}"


def _memory_table(dry: DryRun, *, card: Card | None) -> Table:
    m, stage, checkpointing = dry.memory, dry.config.train.zero_stage, dry.config.model.gradient_checkpointing
    many = "rank" if dry.num_ranks == 1 else "ranks"
    table = Table(title=f"memory per rank, ZeRO {stage} on {dry.num_ranks} {many}", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("what it is")
    where = "divided" if stage == 3 else "whole on every rank"
    if most_resident(dry.config.train) < math.inf:
        where = "those in use; ZeRO 3 keeps the others in host memory"
    table.add_row("weights", _gib(m.weights), where)
    summed = "divided; summed over the ranks after each row"
    if stage < 2:
        summed = "whole; summed over the ranks once a step"
    elif stage == 2 and dry.num_ranks > 1:
        summed += f". train.zero_stage=1 sums once a step, and holds {_gib(dry.num_ranks * m.gradients)} GiB"
    elif are_summed_here(dry.config.train, dry.dtype, dry.num_ranks):
        summed = "sums over the rows in float32, and the largest tensor's of one row"
    table.add_row("gradients", _gib(m.gradients), summed)
    if optimizer_is_offloaded(dry.config.train):
        table.add_row("optimizer", _gib(m.optimizer), "in host memory, where DeepSpeed takes the step")
    else:
        table.add_row("optimizer", _gib(m.optimizer), "divided" if stage >= 1 else "whole on every rank")
    ranks = dry.config.train.sequence_parallel
    shared = f"1/{ranks} of the tokens of " if ranks > 1 else ""
    images = f" with {row_images(dry.config)} images" if "tower" in dry.sizes.by_part else ""
    table.add_row(
        "activations",
        _gib(m.activations),
        f"estimate: {shared}a row of {row_tokens(dry.config):,} tokens{images}, "
        f"{RECOMPUTED[checkpointing]}, "
        f"{'patched' if dry.is_patched else 'unpatched'} layers",
    )
    table.add_row("output head", _gib(m.head), "logits in chunks; its weight's gradient in float32, and a product")
    if m.buckets:
        table.add_row("buckets", _gib(m.buckets), "DeepSpeed's reduce_bucket_size")
    if m.frozen:
        table.add_row("frozen", _gib(m.frozen), f"{_frozen_models(dry)}, {'divided' if stage == 3 else 'whole'}")
    if not dry.samples:
        table.add_row("together", _gib(m.update), "", style="bold")
        return table
    update = "the sum so far" if m.is_served else "the sum so far; the engine sleeps"
    table.add_row("update phase", _gib(m.update), update, style="bold", end_section=True)
    if m.scoring:
        what = f"{_frozen_models(dry)}: {_gib(m.scoring)} GiB from host memory, before the update's activations"
        table.add_row("scoring phase", _gib(m.scored), what, style="bold")
    engine = "on each rollout server, not here" if m.is_served else "the rollout engine's own, dropped in the update"
    shared = dry.config.rollout.tensor_parallel
    if shared > 1:
        engine += f"; divided among {shared} cards"
    table.add_row("engine weights", _gib(m.engine_weights), engine)
    kept = (
        "with the learner's weights; its optimizer is in host memory"
        if m.host_optimizer
        else "with the learner's weights and optimizer"
    )
    table.add_row("rollout phase", _gib(m.rollout), kept, style="bold")
    if card is not None and takes_share(m, card):
        share = engine_share(dry.config)
        what = f"{share:g} of the card: its weights, CUDA graphs, and the cache in what is left"
        table.add_row("engine's share", _gib(int(share * card.total)), what)
        table.add_row(
            "with that share", _gib(int(m.kept + share * card.total)), "the rollout phase, at most", style="bold"
        )
    place = "on each server" if m.is_served else "on top"
    if shared > 1:
        place += ", each of its cards" if m.is_served else ", on each card"
    table.add_row(
        "key-value cache",
        _gib(m.kv_cache),
        f"at most, {place}: "
        f"{side_by_side(dry.config, dry.num_ranks)} responses side by side at full length, "
        f"{dry.kv_bytes_per_token / 1024:g} KiB a token{'' if m.is_portable else '; with less, some of them wait'}",
    )
    _add_host_rows(table, dry)
    return table


def _frozen_models(dry: DryRun) -> str:
    names = ["the KL term's reference"] if dry.config.algorithm.kl_coef else []
    return " and ".join([*names, f"a teacher of {_billions(dry.teacher)}"] if dry.teacher else names)


def _add_host_rows(table: Table, dry: DryRun) -> None:
    m, ranks = dry.memory, dry.num_ranks
    table.add_section()
    what = "its share and one matrix at a time" if dry.config.train.zero_stage == 3 else "the whole model"
    table.add_row("host: loading", _gib(ranks * m.loading), f"all ranks, each {what}")
    if m.host_optimizer:
        when = "while responses are sampled" if m.is_moved else "with float32 gradients: the step is taken there"
        table.add_row("host: optimizer", _gib(ranks * m.host_optimizer), f"all ranks, {when}")
    if m.host_weights:
        table.add_row("host: weights", _gib(ranks * m.host_weights), "all ranks, each its shards")
    if m.host_frozen:
        table.add_row("host: frozen", _gib(ranks * m.host_frozen), f"all ranks: {_frozen_models(dry)}")
    if m.host_engine:
        table.add_row("host: engines", _gib(ranks * m.host_engine), "models of sleeping engines")
    if m.checkpoint_copies:
        copies = "all ranks, while an asynchronous save is written: a copy of the checkpoint"
        table.add_row("host: checkpoint", _gib(m.checkpoint_copies), copies)


def _tokens_table(dry: DryRun) -> Table:
    table = Table(title="tokens per rollout step, at most", title_justify="left")
    table.add_column("part")
    table.add_column("tokens", justify="right")
    table.add_column("what it is")
    c, r = dry.config, dry.config.rollout
    prompts, responses = dry.max_prompt_tokens_per_step, dry.max_response_tokens_per_step
    times = f"{r.responses_per_prompt} times, with padded rows" if dry.is_padded else "once per group"
    table.add_row("prompts", f"{prompts:,}", f"{r.prompts_per_step} x {c.data.max_prompt_tokens:,}, {times}")
    count = r.prompts_per_step * r.responses_per_prompt
    table.add_row("responses", f"{responses:,}", f"{count:,} x {r.max_tokens:,}")
    table.add_row("per rank", f"{(prompts + responses) // dry.num_ranks:,}", f"of {dry.num_ranks}")
    return table


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size >= 0.01 * _GIB or size == 0 else f"{size / _GIB:.1g}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
