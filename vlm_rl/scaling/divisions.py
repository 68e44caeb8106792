"""The divisions of some cards into learner and servers: which there are, which fit, and what a step takes in each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vlm_rl.config import Config, RolloutConfig
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, Need, engine_share, fits, responses_at_once, server_need, server_share
from vlm_rl.scaling.lengths import BatchLengths
from vlm_rl.scaling.rates import PhaseRates
from vlm_rl.scaling.simulator import Pace, Sides, simulate
from vlm_rl.scaling.update import Rows, UpdateTime, useful_cost

PARTS = 8  # the servers get 1/8 to 7/8 of the cards
EQUAL = 0.98  # this share of the most responses a second counts as equal, since lengths are random
_SAMPLE = 3  # mini-batches that are planned for each number of ranks


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide cards."""

    gpus: int
    learner_cards: int
    server_cards: int  # 0: colocated
    ahead: int
    misfits: tuple[str, ...] = ()
    places: int = 0  # responses that an engine samples at once
    efficiency: float = 0.0  # of the update, among its ranks
    pace: Pace | None = None  # None if it does not fit
    responses_per_second: float = 0.0

    @property
    def is_colocated(self) -> bool:
        """Tell whether every card samples and trains."""
        return self.server_cards == 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is divided: the work of some steps, and what each part of it takes."""

    colocated: DryRun
    served: DryRun
    batches: Sequence[BatchLengths]
    rows: Rows
    rates: PhaseRates
    card: float  # bytes of a card's memory
    skipped: int  # steps that do not count, at the beginning
    _updates: dict[int, UpdateTime] = field(default_factory=dict)
    _useful: list[float] = field(default_factory=list)

    @property
    def context(self) -> float:
        """Return the mean tokens of a response with its prompt."""
        responses = sum(sum(map(len, batch.responses)) for batch in self.batches)
        tokens = sum(
            prompt * len(lengths) + sum(lengths)
            for batch in self.batches
            for prompt, lengths in zip(batch.prompts, batch.responses, strict=True)
        )
        return tokens / responses

    @property
    def useful(self) -> Sequence[float]:
        """Return the cost of each batch with every prompt once; a token costs 1."""
        if not self._useful:
            self._useful.extend(useful_cost(batch, self.rows) for batch in self.batches)
        return self._useful

    def update_on(self, ranks: int) -> UpdateTime:
        """Return the time of updates on so many ranks; planned once for each number."""
        if ranks not in self._updates:
            config = self.served.config
            minis = [mini for batch in self.batches for mini in batch.mini_batches(config.train.mini_batch_prompts)]
            sample = minis[:: max(1, len(minis) // _SAMPLE)][:_SAMPLE]
            waits = config.train.zero_stage >= 2
            self._updates[ranks] = UpdateTime.of(sample, self.rows, ranks=ranks, waits_at_rows=waits)
        return self._updates[ranks]

    def pace_of(self, division: Division) -> Pace:
        """Simulate a division that fits."""
        shared = self.served.config.rollout.tensor_parallel
        engines = (division.gpus if division.is_colocated else division.server_cards) // shared
        sides = Sides(
            engines=engines,
            ranks=division.learner_cards,
            places=division.places,
            is_served=not division.is_colocated,
            ahead=division.ahead,
        )
        rates, update = self.rates, self.update_on(division.learner_cards)
        train = [
            rates.train_seconds(update.cost_per_rank(useful), ranks=sides.ranks, rows=update.rows)
            for useful in self.useful
        ]
        return simulate(
            self.batches,
            sides,
            decoding=rates.decoding.times(1 / shared),
            train=train,
            sync=rates.sync + (rates.wake if division.is_colocated else 0.0),
            other=rates.other,
            skipped=self.skipped,
        )


def plans(config: Config, gpus: Sequence[int]) -> tuple[DryRun, DryRun]:
    """Return the dry runs of a configuration colocated and with servers, whatever its own sampler is.

    Raises UserError if training would refuse the configuration.
    """
    rollout, shared = config.rollout, config.rollout.tensor_parallel
    own = rollout.sampler == "server"
    elsewhere = {key: value for key, value in rollout.vllm.items() if key != "gpu_memory_utilization"}
    if rollout.carry_over is not None:
        raise UserError(
            f"rollout.carry_over is {rollout.carry_over}, which is not simulated here: say rollout.carry_over=null, "
            "and see docs/performance.md for what it brings"
        )
    together = rollout.model_copy(
        update={
            "sampler": "vllm",
            "servers": [],
            "ahead": 0,
            "max_age": None,
            "vllm": elsewhere if own else rollout.vllm,
        }
    )
    apart = rollout.model_copy(
        update={
            "sampler": "server",
            "servers": rollout.servers if own else ["http://127.0.0.1:8000"],
            "batch_size": rollout.batch_size if own else RolloutConfig.model_fields["batch_size"].default,
            "vllm": rollout.vllm if own else elsewhere,  # an engine's share of a card is for one of the two
            "offload_optimizer": False,
            "replay_routing": False,
        }
    )
    rows = config.train.sequence_parallel
    ranks = sorted({count - servers for count in gpus for servers in server_cards(count, shared, rows)} or {rows})
    whole = [count for count in gpus if count % math.lcm(shared, rows) == 0] or [math.lcm(shared, rows)]
    return (
        dry_run(config.model_copy(update={"rollout": together}), num_ranks=whole[0]),
        dry_run(config.model_copy(update={"rollout": apart}), num_ranks=ranks[0]),
    )


def server_cards(gpus: int, shared: int, rows: int = 1) -> list[int]:
    """Return how many cards the servers may get: about 1/8 to 7/8 of all, in whole engines of `shared` cards.

    The learner's cards are a multiple of the `rows` that compute a row together.
    """
    parts = {shared * round(gpus * part / PARTS / shared) for part in range(1, PARTS)}
    return sorted(count for count in parts if 0 < count < gpus and (gpus - count) % rows == 0)


def divide(work: Workload, gpus: int, aheads: Sequence[int]) -> list[Division]:
    """Return every division of so many cards: colocated, then by the servers' cards and by ahead."""
    return [_measured(work, division) for division in _fitting(work, gpus, aheads)]


def rivals(divisions: Sequence[Division], factor: float) -> list[Division]:
    """Return the divisions that could be the best if a phase took `factor` or 1 / `factor` times as long.

    A step then takes between `factor` and 1 / `factor` times as long, so that no other overtakes the best.
    """
    most = max((each.responses_per_second for each in divisions if each.pace), default=0.0)
    return [each for each in divisions if each.pace and each.responses_per_second >= factor * most]


def again(work: Workload, divisions: Sequence[Division]) -> list[Division]:
    """Return divisions that are known to fit or not under the rates of a different workload."""
    return [_measured(work, division) for division in divisions]


def best_of(divisions: Sequence[Division]) -> Division | None:
    """Return the division with the most responses a second; None if none fits.

    Of those within 2 % of it, the one with the youngest tokens, and then with the fewest cards for servers.
    """
    most = max((each.responses_per_second for each in divisions if each.pace), default=0.0)
    equal = [each for each in divisions if each.pace and each.responses_per_second >= EQUAL * most]
    return min(equal, key=lambda each: (each.ahead, each.server_cards), default=None)


def _measured(work: Workload, division: Division) -> Division:
    if division.misfits:
        return division
    pace = work.pace_of(division)
    first = work.batches[0]
    return replace(
        division,
        pace=pace,
        efficiency=work.update_on(division.learner_cards).efficiency,
        responses_per_second=len(first.prompts) * len(first.responses[0]) / pace.seconds,
    )


def _fitting(work: Workload, gpus: int, aheads: Sequence[int]) -> Iterator[Division]:
    """Yield the divisions with what does not fit in each."""
    config, card = work.served.config, Card(work.card, work.card)
    shared, rows = config.rollout.tensor_parallel, config.train.sequence_parallel
    sizes = {"rollout.tensor_parallel": shared, "train.sequence_parallel": rows}
    if uneven := tuple(f"{key} {size} does not divide {gpus}" for key, size in sizes.items() if gpus % size):
        yield Division(gpus, gpus, 0, 0, uneven)
    else:
        dry = work.colocated.on(gpus)
        places = _places(work, dry, engine_share(dry.config))
        yield Division(gpus, gpus, 0, 0, _faults(fits(dry, card).over), places)
    for servers in server_cards(gpus, shared, rows):
        ranks = gpus - servers
        dry = work.served.on(ranks)
        server = server_need(dry, card)
        faults = _faults([*fits(dry, card).over, *([server] if server.margin < 0 else [])])
        places = _places(work, dry, server_share(dry.config))
        for ahead in sorted(set(aheads)) if not faults else [0]:
            yield Division(gpus, ranks, servers, ahead, faults, places)


def _faults(over: Sequence[Need]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(need.fault for need in over))


def _places(work: Workload, dry: DryRun, share: float) -> int:
    """Return how many responses an engine samples at once: rollout.batch_size, or fewer if its cache fits fewer."""
    fitting = int(responses_at_once(dry, share * work.card, tokens=work.context))
    return max(1, min(dry.config.rollout.batch_size, fitting))
