"""The steps of a run, simulated from one response's end to the next. Pure; times in seconds.

colocated   every card samples, then every card trains
servers     some cards sample, the others train; with ahead = k the batches of the next k steps are begun before a
            step trains, in the order of docs/scaling.md

An engine samples a token for each of its responses in every decode step. The step reads the weights once, and
the keys and values of all responses in progress. A prompt is read in once per group. Responses wait for a
place in their engine, and the groups of servers before that for a server: samplers.remote.schedule decides which, as
in a run.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from vlm_rl.samplers.remote.schedule import Schedule, rank_room
from vlm_rl.scaling.lengths import BatchLengths

_EVERYTHING = 2**62  # responses: the room of an engine in process


@dataclass(frozen=True, slots=True)
class Decoding:
    """The seconds of one engine."""

    step: float  # of a decode step, however many responses there are: the weights are read
    context: float  # of a step, for each token of context: its keys and values are read
    reading: float  # of a token that is read in: a prompt's, or what an interrupted response has already

    def times(self, factor: float) -> Decoding:
        """Return all seconds multiplied by a factor."""
        return Decoding(factor * self.step, factor * self.context, factor * self.reading)


@dataclass(eq=False, slots=True)
class _Group:
    """A group on its way through a fleet."""

    number: int  # of all that were begun
    batch: int
    rank: int  # of the learner, for which it is sampled
    prompt: int  # tokens
    left: int  # responses that are not done
    lengths: Sequence[int]  # of its responses
    is_read: bool = False


class _Engine:
    """One engine: its responses in progress, and those that wait for a place."""

    def __init__(self, name: str, decoding: Decoding, places: int, tokens: Counter[tuple[int, int]]) -> None:
        self.name = name
        self.next_end = math.inf  # when its next response ends
        self.busy = 0.0  # seconds of decoding and reading in
        self._tokens = tokens  # of all engines, sampled so far, by batch and version of the weights
        self._clock = 0.0  # until when it is simulated
        self._version = 0
        self._decoding, self._places = decoding, places
        self._steps = 0  # decode steps so far
        self._alive: list[tuple[int, int, int, _Group]] = []  # heap: last step, serial number, length, group
        self._serial = 0
        self._context = 0  # tokens of all that is alive
        self._by_batch = Counter[int]()  # responses alive
        self._waiting = deque[tuple[int, _Group]]()

    def give(self, group: _Group, now: float) -> None:
        """Add a group, from now on."""
        self.run(now)
        self._waiting.extend((length, group) for length in group.lengths)
        self._admit()

    def run(self, until: float) -> None:
        """Decode until a time: the step in progress is finished. It must not be later than the next end."""
        if self._alive and until > self._clock:
            most = self._alive[0][0] - self._steps
            self._decode(bisect_left(range(most), until - self._clock, key=self._seconds))
        self._clock = max(self._clock, until)

    def end(self) -> list[_Group]:
        """Decode until the next response ends, and return the groups that are then complete."""
        self._decode(self._alive[0][0] - self._steps)
        done = []
        while self._alive and self._alive[0][0] == self._steps:
            _, _, length, group = heapq.heappop(self._alive)
            self._context -= group.prompt + length
            self._by_batch[group.batch] -= 1
            group.left -= 1
            if group.left == 0:
                done.append(group)
        self._admit()
        return done

    def pause(self, start: float, seconds: float) -> None:
        """Take new weights: what is in progress is then read in again, each group's prompt once."""
        self.run(start)
        self._clock += seconds
        self._version += 1
        responses = self._context - sum(group.prompt for *_, group in self._alive)
        prompts = sum({group.number: group.prompt for *_, group in self._alive}.values())
        self._work((responses + prompts) * self._decoding.reading)
        self._admit()

    def busy_at(self, now: float) -> float:
        """Return the seconds of work up to a time, which must not be later than the next end."""
        self.run(now)
        return self.busy - (self._clock - now)

    def _seconds(self, steps: int) -> float:
        alive = len(self._alive)
        context = steps * self._context + alive * steps * (steps - 1) / 2
        return steps * self._decoding.step + self._decoding.context * context

    def _decode(self, steps: int) -> None:
        self._work(self._seconds(steps))
        self._steps += steps
        self._context += steps * len(self._alive)
        for batch, alive in self._by_batch.items():
            self._tokens[batch, self._version] += steps * alive

    def _work(self, seconds: float) -> None:
        self._clock += seconds
        self.busy += seconds

    def _admit(self) -> None:
        """Begin what has waited, as far as there are places, and look for the next end."""
        while self._waiting and len(self._alive) < self._places:
            length, group = self._waiting.popleft()
            if not group.is_read:
                self._work(group.prompt * self._decoding.reading)
                group.is_read = True
            heapq.heappush(self._alive, (self._steps + length, self._serial, length, group))
            self._serial += 1
            self._context += group.prompt
            self._by_batch[group.batch] += 1
        self.next_end = math.inf
        if self._alive:
            self.next_end = self._clock + self._seconds(self._alive[0][0] - self._steps)


@dataclass(frozen=True, slots=True)
class Sides:
    """Who samples and who trains."""

    engines: int
    ranks: int  # of the learner; without servers, those of an engine are neighbours
    places: int  # responses that an engine samples at once
    is_served: bool  # engines are servers, with cards of their own
    ahead: int = 0


_next_end = attrgetter("next_end")


class EngineFleet:
    """Engines side by side, and who gives them work."""

    def __init__(self, decoding: Decoding, sides: Sides, *, size: int) -> None:
        """Begin with nothing in progress: the seconds of each engine, how many there are, responses of a group."""
        self.tokens = Counter[tuple[int, int]]()  # sampled so far, by batch and version of the weights
        self.engines = [_Engine(f"{index}", decoding, sides.places, self.tokens) for index in range(sides.engines)]
        self._schedules = list[Schedule]()  # of each rank
        room = rank_room(sides.places, sides.ranks, is_ahead=sides.ahead > 0)
        for rank in range(sides.ranks):
            rooms = {f"{rank * sides.engines // sides.ranks}": _EVERYTHING}
            if sides.is_served:
                rooms = {f"{engine}": room for engine in range(sides.engines)}
            self._schedules.append(Schedule((), size=size, rooms=rooms, first=rank))
        self._groups: list[_Group] = []
        self._left: dict[int, int] = {}  # groups of each batch that are not done

    def begin(self, batch: int, lengths: BatchLengths, now: float) -> None:
        """Give out a batch, whose groups are dealt out to the ranks as `vlm_rl.distributed.share` does."""
        self._run(now)
        self._left[batch] = len(lengths.prompts)
        for index, (prompt, responses) in enumerate(zip(lengths.prompts, lengths.responses, strict=True)):
            rank = index % len(self._schedules)
            group = _Group(len(self._groups), batch, rank, prompt, len(responses), responses)
            self._schedules[rank].waiting.append(group.number)
            self._groups.append(group)
        for rank in range(len(self._schedules)):
            self._hand_out(rank, now)

    def wait(self, batch: int, now: float) -> float:
        """Run until a batch is done, and return when that was; now, if it was before."""
        while self._left[batch]:
            now = self._end(min(self.engines, key=_next_end))
        return now

    def pause(self, start: float, seconds: float) -> None:
        """Give all engines new weights; they sample nothing meanwhile."""
        self._run(start)
        for engine in self.engines:
            engine.pause(start, seconds)

    def busy(self, now: float) -> float:
        """Return the seconds of work up to a time, over all engines."""
        self._run(now)
        return sum(engine.busy_at(now) for engine in self.engines)

    def _run(self, until: float) -> None:
        while (engine := min(self.engines, key=_next_end)).next_end <= until:
            self._end(engine)

    def _end(self, engine: _Engine) -> float:
        """Run until the next response of an engine ends, and return when that is."""
        now = engine.next_end
        for group in engine.end():
            self._left[group.batch] -= 1
            self._schedules[group.rank].done(engine.name, group.number)
            self._hand_out(group.rank, now)
        return now

    def _hand_out(self, rank: int, now: float) -> None:
        while given := self._schedules[rank].next():
            engine, number = given
            self.engines[int(engine)].give(self._groups[number], now)


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
        sides: who samples and who trains.
        decoding: the seconds of an engine.
        train: the seconds of each step's log-probs and updates.
        sync: the seconds of a sync, in which nobody samples.
        other: the learner's seconds in a step for everything else.
        skipped: steps at the beginning that do not count. The last `ahead` steps never do: they begin nothing.
    """
    fleet = EngineFleet(decoding, sides, size=len(batches[0].responses[0]))
    now, begun = 0.0, 0
    times, waits, busy = [0.0], list[float](), [0.0]
    for step, seconds in enumerate(train):
        if begun == step:
            fleet.begin(step, batches[step], now)
            begun += 1
        done = fleet.wait(step, now)
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
    decoding_seconds = (busy[last] - busy[skipped]) / sides.engines
    tokens = {place: number for place, number in fleet.tokens.items() if skipped <= place[0] < last}
    return Pace(
        seconds=span / count,
        rollout=waited / count,
        learner_waits=waited / span,
        engines_wait=1 - decoding_seconds / (span if sides.is_served else waited),
        age=sum((batch - version) * number for (batch, version), number in tokens.items()) / sum(tokens.values()),
    )
