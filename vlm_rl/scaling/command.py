"""`vlm-rl plan CONFIG`: simulate the steps of a run on some cards, colocated and split, and say which is fastest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.model_files.model_folder import read_model_config
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.terminal import make_console
from vlm_rl.run.writing import writing
from vlm_rl.scaling.answers import FASTER, SLOWER, advice, as_json, table, write_plot
from vlm_rl.scaling.divisions import Division, Workload, again, divide, plans, rivals
from vlm_rl.scaling.lengths import LONGEST, MEAN, BatchLengths, groups_of_run, made_up, of_groups
from vlm_rl.scaling.measured import MeasuredRun, measured_rates
from vlm_rl.scaling.rates import (
    CardSpeed,
    PhaseRates,
    assumed_rates,
    described,
    with_decode_rate,
    with_learner_rate,
)
from vlm_rl.scaling.update import Rows

Line = tuple[str, str]  # an input, and what it is taken as, with its source


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan rests on."""

    work: Workload
    lines: tuple[Line, ...]
    measured: MeasuredRun | None

    @property
    def sentence(self) -> str:
        """Return in one sentence whether the rates were measured."""
        if self.measured is None:
            return "All rates are assumptions: --run takes a run's own"
        return "The run's own seconds set the scale; how they change with the number of cards is assumed"


def plan(options: argparse.Namespace, config: Config) -> None:
    """Print a table and advice for each number of cards, and write plot and JSON where they are asked for.

    Raises UserError for what training would refuse, and for a run that does not measure what is needed.
    """
    console = make_console()
    basis = basis_of(options, config)
    for name, text in basis.lines:
        console.print(f"{name:<14}{text}", soft_wrap=True)
    answers: dict[int, list[Division]] = {}
    advised: dict[int, str] = {}
    for gpus in options.gpus:
        answers[gpus] = divide(basis.work, gpus, options.ahead)
        otherwise = {
            f"{factor:g} times as long": again(_decoding_times(basis.work, factor), rivals(answers[gpus], FASTER))
            for factor in (FASTER, SLOWER)
        }
        advised[gpus] = advice(answers[gpus], otherwise, basis.sentence)
        console.print()
        console.print(table(answers[gpus]), soft_wrap=True)
        console.print(f"\n{advised[gpus]}.", soft_wrap=True)
    if options.plot is not None:
        with writing(options.plot):
            console.print(f"plot: {write_plot(answers, advised, basis.lines, options.plot)}")
    if options.json is not None:
        text = json.dumps(as_json(answers, advised, basis.lines), indent=1) + "\n"
        with writing(options.json):
            write_atomically(options.json, lambda place: place.write_text(text, encoding="utf-8"))


def basis_of(options: argparse.Namespace, config: Config) -> Basis:
    """Return the work that is divided, and what it rests on."""
    colocated, served = plans(config, options.gpus)
    rates, lines, measured = _rates(options, config, colocated)
    batches, lengths = _batches(options, config, colocated)
    work = Workload(
        colocated=colocated,
        served=served,
        batches=batches,
        rows=rows_of(colocated),
        rates=rates,
        card=options.gpu_memory * 1e9,
        skipped=2 + max(options.ahead),
    )
    if options.decode_tokens_per_second is not None:
        places = colocated.config.rollout.batch_size
        faster = with_decode_rate(
            rates, options.decode_tokens_per_second, places=places, context=work.context - _mean(batches) / 2
        )
        work = replace(work, rates=faster)
        given = f"{options.decode_tokens_per_second:g} tokens/s of {places} responses on a card (given)"
        lines.append(("decoding", given))
    return Basis(work, (_workload_line(config, colocated, served), lengths, *lines), measured)


def _decoding_times(work: Workload, factor: float) -> Workload:
    return replace(work, rates=replace(work.rates, decoding=work.rates.decoding.times(factor)))


# -- lengths ---------------------------------------------------------------------------------------


def _mean(batches: Sequence[BatchLengths]) -> float:
    return float(np.mean([length for batch in batches for group in batch.responses for length in group]))


def _batches(options: argparse.Namespace, config: Config, dry: DryRun) -> tuple[list[BatchLengths], Line]:
    """Return a batch for each step, the same for every division, and what they are."""
    rollout, rng = config.rollout, np.random.default_rng(options.seed)
    mean = MEAN * rollout.max_tokens / LONGEST
    run = options.lengths if options.lengths is not None else options.run
    if isinstance(run, float):
        mean, run = run, None
    count = options.steps + 2 + 2 * max(options.ahead)
    make = partial(_made_up_batch, config=config, dry=dry)
    batches = [make(rng, rollout.prompts_per_step, mean=mean) for _ in range(count)]
    source = "made up: log-normal, not measured"
    if run is not None:
        folder = RunDirectory(run).open()
        groups = groups_of_run(folder, responses=folder.config().rollout.responses_per_prompt)
        batches = [of_groups(rng, batch, groups, longest=rollout.max_tokens) for batch in batches]
        source = f"{len(groups)} groups of {run}, its last quarter"
    prompts = np.mean([prompt for batch in batches for prompt in batch.prompts])
    text = (
        f"responses of {_mean(batches):,.0f} tokens on average, at most {rollout.max_tokens:,} "
        f"({source}); prompts of {prompts:,.0f} (made up)"
    )
    return batches, ("lengths", text)


def _made_up_batch(
    rng: np.random.Generator, prompts: int, *, config: Config, dry: DryRun, mean: float
) -> BatchLengths:
    return made_up(
        rng,
        prompts,
        responses=config.rollout.responses_per_prompt,
        mean=mean,
        longest=config.rollout.max_tokens,
        longest_prompt=config.data.max_prompt_tokens,
        has_image=_has_images(dry),
    )


def _has_images(dry: DryRun) -> bool:
    return "tower" in dry.sizes.by_part


# -- rates -----------------------------------------------------------------------------------------


def rows_of(dry: DryRun) -> Rows:
    """Return how a learner fills its rows."""
    train, hidden_size = dry.config.train, dry.sizes.config.get_text_config().hidden_size
    return Rows(train.micro_batch_tokens, hidden_size, dry.is_padded, train.sequence_parallel)


def _passes(dry: DryRun) -> float:
    """Return the forward passes over a batch before its updates, as session.mini_batches does them."""
    rollout, train, algorithm = dry.config.rollout, dry.config.train, dry.config.algorithm
    if _has_images(dry) and (resolve_algorithm(algorithm).credit != "uniform" or algorithm.perception_coef > 0):
        own = 2.0  # with the image and without it
    elif train.old_logprobs == "learner":
        own = max(0.0, 1 - train.mini_batch_prompts / rollout.prompts_per_step)  # all but the first mini-batch
    else:
        own = 0.0
    return own + (algorithm.kl_coef > 0) + dry.teacher / dry.num_parameters


def rates_of(dry: DryRun, card: CardSpeed) -> PhaseRates:
    """Return the assumed rates of a configuration."""
    config = dry.config
    return assumed_rates(
        card,
        parameters=dry.sizes.by_part["language_model"],
        all_parameters=dry.num_parameters,
        kv_bytes=dry.kv_bytes_per_token * config.rollout.tensor_parallel,
        itemsize=dry.dtype.itemsize,
        is_checkpointed=config.model.gradient_checkpointing is not False,
        zero_stage=config.train.zero_stage,
        updates=dry.updates_per_step,
        passes=_passes(dry),
    )


def _rates(
    options: argparse.Namespace, config: Config, dry: DryRun
) -> tuple[PhaseRates, list[Line], MeasuredRun | None]:
    """Return the rates and each of their sources in words."""
    given = {"bandwidth": options.bandwidth, "operations": options.operations}
    card = CardSpeed(**{name: value * 1e12 for name, value in given.items() if value is not None})
    rates = rates_of(dry, card)
    lines = [*described(card).items()]
    measured = None
    if options.run is not None:
        measured = measure(RunDirectory(options.run), card, ranks=options.run_gpus)
        of_run = measured.rates
        rates = replace(
            rates,
            decoding=rates.decoding.times(measured.rollout_scale),
            learner_scale=of_run.learner_scale,
            sync=of_run.sync,
            wake=of_run.wake,
            other=of_run.other,
        )
        lines.append(_measured_line(options, measured))
    if options.sync_seconds is not None:
        rates = replace(rates, sync=options.sync_seconds)
        lines.append(("sync", f"{rates.sync:g} s (given)"))
    elif measured is None:
        lines.append(("sync", f"{rates.sync:g} s, and {rates.wake:g} s more where an engine sleeps (ours)"))
    if measured is None:
        lines.append(("else", "prompts, grades, logs and saves are not counted"))
        _, raw = read_model_config(config.model.path)
        if "num_experts_per_tok" in raw.get("text_config", raw):
            lines.append(("experts", "every expert is counted as read and computed: give --run, or the two rates"))
    if options.learner_tokens_per_second is not None:
        rates = replace(with_learner_rate(rates, options.learner_tokens_per_second), learner_scale=1.0)
        lines.append(("update", f"{options.learner_tokens_per_second:g} tokens/s on a card (given)"))
    return rates, lines, measured


def measure(run: RunDirectory, card: CardSpeed, *, ranks: int) -> MeasuredRun:
    """Return the measurements of a run on so many learner's ranks."""
    config = run.config()
    dry = dry_run(config, num_ranks=ranks)

    def prompts_of(count: int) -> list[int]:
        return list(_made_up_batch(np.random.default_rng(0), count, config=config, dry=dry, mean=1.0).prompts)

    return measured_rates(run, rates_of(dry, card), rows_of(dry), ranks=ranks, prompts_of=prompts_of)


def _measured_line(options: argparse.Namespace, measured: MeasuredRun) -> Line:
    seconds, count = measured.seconds, len(measured.batches)
    return (
        "measured",
        f"over {count} steps of {options.run} on {options.run_gpus} learner's cards, times what is "
        f"assumed: rollout {seconds['rollout']:.2f} s ({measured.rollout_scale:.3g}), log-probs and updates "
        f"{seconds['learner']:.2f} s ({measured.rates.learner_scale:.3g}); sync {seconds['sync']:.2f} s, else "
        f"{measured.rates.other:.2f} s, on any number of cards",
    )


def _workload_line(config: Config, colocated: DryRun, served: DryRun) -> Line:
    r, t = config.rollout, config.train
    return (
        "a step",
        f"{short_name(config.model.path)}, {r.prompts_per_step} prompts x {r.responses_per_prompt} "
        f"responses, updates of {t.mini_batch_prompts} prompts, ZeRO {t.zero_stage}; engines on {r.tensor_parallel} "
        f"card{'s' * (r.tensor_parallel > 1)} sample {colocated.config.rollout.batch_size} responses at once, "
        f"servers {served.config.rollout.batch_size}",
    )
