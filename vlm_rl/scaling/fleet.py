"""Engines that draw groups of responses, simulated from one response's end to the next. Pure; times in seconds.

An engine draws a token for each of its responses in every decode step. The step reads the weights once, and the keys
and values of all responses in progress. A prompt is read in once per group. Responses wait for a place in their
engine, and the groups of servers before that for a server: samplers.remote.schedule decides which, as in a run.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlm_rl.samplers.remote.schedule import Schedule
from vlm_rl.scaling.lengths import BatchLengths


@dataclass(frozen=True, slots=True)
class Decoding:
    """The seconds of one engine."""

    step: float  # of a decode step, however many responses there are: the weights are read
    context: float  # of a step, for each token of context: its keys and values are read
    reading: float  # of a token that is read in: a prompt's, or what an interrupted response has already

    def times(self, factor: float) -> Decoding:
        """Return all seconds multiplied by a factor."""
        return Decoding(factor * self.step, factor * self.context, factor * self.reading)

    def seconds(self, steps: int, *, alive: int, context: int) -> float:
        """Return the seconds of decode steps of `alive` responses, which begin with `context` tokens in all."""
        return steps * self.step + self.context * (steps * context + alive * steps * (steps - 1) / 2)


@dataclass(eq=False, slots=True)
class DrawnGroup:
    """A group on its way through a fleet."""

    batch: int
    prompt: int  # tokens
    lengths: Sequence[int]  # of its responses
    left: int  # responses that are not done
    place: tuple[int, int] = (0, 0)  # its schedule, and its number there
    is_read: bool = False


class SimulatedEngine:
    """One engine: its responses in progress, and those that wait for a place."""

    def __init__(self, decoding: Decoding, places: int) -> None:
        self.clock = 0.0  # until when it is simulated
        self.busy = 0.0  # seconds of drawing and reading in
        self.tokens = Counter[tuple[int, int]]()  # drawn so far, by batch and version of the weights
        self.version = 0
        self._decoding, self._places = decoding, places
        self._steps = 0  # decode steps so far
        self._alive: list[tuple[int, int, int, DrawnGroup]] = []  # heap: last step, serial number, length, group
        self._serial = 0
        self._context = 0  # tokens of all that is alive
        self._by_batch = Counter[int]()  # responses alive
        self._waiting = deque[tuple[int, DrawnGroup]]()

    def give(self, group: DrawnGroup, now: float) -> None:
        """Add a group, from now on."""
        self.draw(now)
        self.clock = max(self.clock, now)
        self._waiting.extend((length, group) for length in group.lengths)
        self._admit()

    def next_end(self) -> float:
        """Return when its next response ends; infinity without one."""
        return self.clock + self._seconds(self._alive[0][0] - self._steps) if self._alive else math.inf

    def draw(self, until: float) -> None:
        """Draw until a time: the step in progress is finished. It must not be later than the next end."""
        if self._alive and until > self.clock:
            most = self._alive[0][0] - self._steps
            self._draw(min(most, bisect_left(range(most), until - self.clock, key=self._seconds)))

    def end(self) -> list[DrawnGroup]:
        """Draw to the next end of responses, and return the groups that are done with them."""
        self._draw(self._alive[0][0] - self._steps)
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
        self.draw(start)
        self.clock = max(self.clock, start) + seconds
        self.version += 1
        groups = {id(group): group for *_, group in self._alive}.values()
        responses = self._context - sum(group.prompt for *_, group in self._alive)
        self._read(responses + sum(group.prompt for group in groups))

    def _seconds(self, steps: int) -> float:
        return self._decoding.seconds(steps, alive=len(self._alive), context=self._context)

    def _draw(self, steps: int) -> None:
        seconds = self._seconds(steps)
        self.clock += seconds
        self.busy += seconds
        self._steps += steps
        self._context += steps * len(self._alive)
        for batch, alive in self._by_batch.items():
            self.tokens[batch, self.version] += steps * alive

    def _read(self, tokens: int) -> None:
        seconds = tokens * self._decoding.reading
        self.clock += seconds
        self.busy += seconds

    def _admit(self) -> None:
        while self._waiting and len(self._alive) < self._places:
            length, group = self._waiting.popleft()
            if not group.is_read:
                self._read(group.prompt)
                group.is_read = True
            heapq.heappush(self._alive, (self._steps + length, self._serial, length, group))
            self._serial += 1
            self._context += group.prompt
            self._by_batch[group.batch] += 1


class EngineFleet:
    """Engines side by side, and who gives them work."""

    def __init__(
        self, decoding: Decoding, *, engines: int, places: int, ranks: int, room: int | None, size: int
    ) -> None:
        """Begin with nothing in progress.

        Args:
            decoding: the seconds of each engine.
            engines: how many there are.
            places: responses that an engine draws at once.
            ranks: of the learner. Without `room` those of an engine are neighbours, and it draws for them alone.
            room: responses that each rank gives a server at once, of rollout servers.
            size: responses of a group.
        """
        self.engines = [SimulatedEngine(decoding, places) for _ in range(engines)]
        self._ranks = ranks
        rooms = {str(index): room for index in range(engines)} if room is not None else {}
        self._schedules = [Schedule((), size=size, rooms=rooms, first=rank) for rank in range(ranks if rooms else 0)]
        self._groups: list[DrawnGroup] = []
        self._left: dict[int, int] = {}  # groups of each batch
        self._done: dict[int, float] = {}  # when each batch was done
        self._ends: list[tuple[float, int, int]] = []  # heap: time, engine, its changes
        self._changes = [0] * engines

    def begin(self, batch: int, lengths: BatchLengths, now: float) -> None:
        """Give out a batch, whose groups are dealt out to the ranks as `vlm_rl.distributed.share` does."""
        self.run(now)
        self._left[batch] = len(lengths.prompts)
        for index, (prompt, responses) in enumerate(zip(lengths.prompts, lengths.responses, strict=True)):
            rank = index % self._ranks
            group = DrawnGroup(batch, prompt, responses, len(responses))
            if self._schedules:
                group.place = (rank, len(self._groups))
                self._groups.append(group)
                self._schedules[rank].waiting.append(group.place[1])
            else:
                self._give(rank * len(self.engines) // self._ranks, group, now)
        for rank in range(len(self._schedules)):
            self._hand_out(rank, now)

    def wait(self, batch: int) -> float:
        """Run until a batch is done, and return when that was."""
        self.run(math.inf, enough=lambda: batch in self._done)
        return self._done[batch]

    def run(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Run to a time, or until there is enough."""
        while self._ends and self._ends[0][0] <= until and not enough():
            now, index, changes = heapq.heappop(self._ends)
            if changes != self._changes[index]:
                continue
            done = self.engines[index].end()
            self._note(index)
            for group in done:
                self._left[group.batch] -= 1
                if self._left[group.batch] == 0:
                    self._done[group.batch] = now
                if self._schedules:
                    rank, number = group.place
                    self._schedules[rank].done(str(index), number)
                    self._hand_out(rank, now)

    def pause(self, start: float, seconds: float) -> None:
        """Give all engines new weights; they draw nothing meanwhile."""
        self.run(start)
        for index, engine in enumerate(self.engines):
            engine.pause(start, seconds)
            self._note(index)

    def busy(self, now: float) -> float:
        """Return the seconds of work up to a time, over all engines."""
        self.run(now)
        for index, engine in enumerate(self.engines):
            engine.draw(now)
            self._note(index)
        return sum(engine.busy - max(0.0, engine.clock - now) for engine in self.engines)

    def tokens(self) -> Counter[tuple[int, int]]:
        """Return the tokens that were drawn, by batch and version of the weights."""
        return sum((engine.tokens for engine in self.engines), Counter[tuple[int, int]]())

    def _hand_out(self, rank: int, now: float) -> None:
        while given := self._schedules[rank].next():
            server, number = given
            self._give(int(server), self._groups[number], now)

    def _give(self, index: int, group: DrawnGroup, now: float) -> None:
        self.engines[index].give(group, now)
        self._note(index)

    def _note(self, index: int) -> None:
        self._changes[index] += 1
        if (end := self.engines[index].next_end()) < math.inf:
            heapq.heappush(self._ends, (end, index, self._changes[index]))
