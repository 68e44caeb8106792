"""The steps of a run: rollout, update, sync, one after the other or beside each other (rollout.ahead). Pure.

colocated   every card draws, then every card trains
servers     some cards draw, the others train; with ahead = k the batches of the next k steps are begun before a
            step trains, in the order of docs/scaling.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlm_rl.samplers.remote.schedule import rank_room
from vlm_rl.scaling.fleet import Decoding, EngineFleet
from vlm_rl.scaling.lengths import BatchLengths


@dataclass(frozen=True, slots=True)
class Sides:
    """Who draws and who trains."""

    engines: int
    ranks: int
    places: int  # responses that an engine draws at once
    is_served: bool  # engines are servers, with cards of their own
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over the steps that count."""

    seconds: float  # a step
    rollout: float  # of it, the learner waits for responses
    learner_waits: float  # the same as a share
    engines_wait: float  # share of a step's time, on servers, or of its rollout, colocated, without a response
    age: float  # of a token, in rollout steps


def simulate(
    batches: Sequence[BatchLengths],
    sides: Sides,
    *,
    decoding: Decoding,
    train: Sequence[float],
    sync: float,
    other: float,
    skipped: int = 0,
) -> Pace:
    """Simulate a step for each batch.

    Args:
        batches: what each step trains on.
        sides: who draws and who trains.
        decoding: the seconds of an engine.
        train: the seconds of each step's log-probs and updates.
        sync: the seconds of a sync, in which nobody draws.
        other: the learner's seconds in a step for everything else.
        skipped: steps at the beginning that do not count. The last `ahead` steps never do: they begin nothing.
    """
    fleet = EngineFleet(
        decoding,
        engines=sides.engines,
        places=sides.places,
        ranks=sides.ranks,
        room=rank_room(sides.places, sides.ranks, is_ahead=sides.ahead > 0) if sides.is_served else None,
        size=len(batches[0].responses[0]),
    )
    now, begun = 0.0, 0
    times, waits, busy = [0.0], list[float](), [0.0]
    for step, seconds in enumerate(train):
        if begun == step:
            fleet.begin(step, batches[step], now)
            begun += 1
        done = max(now, fleet.wait(step))
        waits.append(done - now)
        now = done
        for batch in range(begun, min(step + sides.ahead + 1, len(batches))):
            fleet.begin(batch, batches[batch], now)
            begun += 1
        now += seconds
        fleet.pause(now, sync)
        now += sync + other
        times.append(now)
        busy.append(fleet.busy(now))
    last = len(batches) - sides.ahead
    count = last - skipped
    assert count > 0, "no step is left to count"
    span, waited = times[last] - times[skipped], sum(waits[skipped:last])
    drawing = (busy[last] - busy[skipped]) / sides.engines
    tokens = {place: number for place, number in fleet.tokens().items() if skipped <= place[0] < last}
    return Pace(
        seconds=span / count,
        rollout=waited / count,
        learner_waits=waited / span,
        engines_wait=1 - drawing / (span if sides.is_served else waited),
        age=sum((batch - version) * number for (batch, version), number in tokens.items()) / sum(tokens.values()),
    )
