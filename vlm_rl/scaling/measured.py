"""The rates of a run: the assumed ones, scaled until they give the seconds that the run measured.

The assumptions keep the shape: what a longer response, a fuller engine or one more rank changes. The run sets the
scale, one for its rollouts and one for log-probs and updates, at its own number of cards and with its own lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from vlm_rl.config import Config
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.scaling.lengths import BatchLengths, lengths_of_step
from vlm_rl.scaling.rates import PhaseRates
from vlm_rl.scaling.simulator import Pace, Sides, simulate
from vlm_rl.scaling.update import Rows, UpdateTime, useful_cost

LEARNER_PHASES = (
    "image_features",
    "old_logprobs",
    "blind_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "update",
)
_MOST_STEPS = 12  # of a run are simulated again


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run's own seconds say."""

    rates: PhaseRates
    seconds: Mapping[str, float]  # a step, measured, by phase
    rollout_scale: float  # measured over simulated seconds
    batches: Sequence[BatchLengths]  # of the steps that were looked at
    train: Sequence[float]  # seconds of each, by the rates
    sides: Sides
    cards: int  # of an engine

    def again(self, *, ahead: int, skipped: int = 0, saves: bool = True) -> Pace:
        """Simulate the run's own steps on its own cards. Only servers can be ahead."""
        return simulate(
            self.batches,
            replace(self.sides, ahead=ahead),
            decoding=self.rates.decoding.times(1 / self.cards),
            train=self.train,
            sync=self.rates.sync,
            other=self.rates.other - (0.0 if saves else self.seconds["save"]),
            skipped=skipped,
        )


def sides_of(config: Config, *, ranks: int) -> Sides:
    """Return who sampled and who trained in a run on so many ranks."""
    rollout, is_served = config.rollout, config.rollout.sampler == "server"
    engines = len(rollout.servers) if is_served else max(1, ranks // rollout.tensor_parallel)
    return Sides(engines=engines, ranks=ranks, places=rollout.batch_size, is_served=is_served)


def measured_rates(
    run: RunDirectory,
    assumed: PhaseRates,
    rows: Rows,
    *,
    ranks: int,
    prompts_of: Callable[[int], list[int]],
) -> MeasuredRun:
    """Scale assumed rates to a run. Its first step, which pays for caches, is left out.

    Args:
        run: its folder.
        assumed: for the run's own model and settings.
        rows: how it filled its rows.
        ranks: of its learner.
        prompts_of: makes up the tokens of so many prompts, which a run does not store.

    Raises UserError if fewer than two steps are logged, or none has its responses.
    """
    config = run.config()
    stored = set(run.rollout_steps())
    records = [record for record in run.metrics() if "timing/update" in record]
    records = [record for record in records[1:] if int(record["step"]) in stored][-_MOST_STEPS:]
    if not records:
        raise UserError(f"{run.path}: no step after its first has both seconds and responses: train longer")
    sides, cards = sides_of(config, ranks=ranks), config.rollout.tensor_parallel
    size, count = config.rollout.responses_per_prompt, len(records)
    lengths = [lengths_of_step(run, int(record["step"]), responses=size) for record in records]
    batches = [BatchLengths(prompts_of(len(groups)), groups.tolist()) for groups in lengths]
    decoding = assumed.decoding.times(1 / cards)
    one_step = partial(simulate, sides=sides, decoding=decoding, train=[0.0], sync=0.0, other=0.0)
    simulated = sum(one_step([batch]).rollout for batch in batches)
    train = [_train_seconds(batch, assumed, rows, config, ranks=ranks) for batch in batches]
    seconds = _seconds(records)
    rollout_scale, learner_scale = seconds["rollout"] * count / simulated, seconds["learner"] * count / sum(train)
    return MeasuredRun(
        rates=replace(
            assumed,
            decoding=assumed.decoding.times(rollout_scale),
            learner_scale=learner_scale,
            sync=seconds["sync"],
            wake=0.0,  # in the run's sync, if its engine slept
            other=seconds["other"] + seconds["save"],
        ),
        seconds=seconds,
        rollout_scale=rollout_scale,
        batches=batches,
        train=[learner_scale * each for each in train],
        sides=sides,
        cards=cards,
    )


def _train_seconds(batch: BatchLengths, rates: PhaseRates, rows: Rows, config: Config, *, ranks: int) -> float:
    minis = batch.mini_batches(config.train.mini_batch_prompts)
    time = UpdateTime.of(minis, rows, ranks=ranks, waits_at_rows=config.train.zero_stage >= 2)
    return rates.train_seconds(time.cost_per_rank(useful_cost(batch, rows)), ranks=ranks, rows=time.rows)


def _seconds(records: list[dict[str, float]]) -> dict[str, float]:
    """Return a step's mean seconds: rollout, learner, sync, all else, and a save, which is not in step_time."""

    def mean(*names: str) -> float:
        return fmean(sum(record.get(name, 0.0) for name in names) for record in records)

    phases = {
        "rollout": mean("timing/rollout"),
        "learner": mean(*(f"timing/{name}" for name in LEARNER_PHASES)),
        "sync": mean("timing/sync"),
    }
    return phases | {"other": mean("step_time") - sum(phases.values()), "save": mean("timing/save")}
