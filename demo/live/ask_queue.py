"""Answer one question at a time, by several backends at once; further questions wait in line."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from vlm_rl.demo.live.replies import AskSettings, Backend, LiveQuestion, Reply
from vlm_rl.errors import UserError
from vlm_rl.run.terminal import clock

ABANDONED_SECONDS = 30.0  # a page that has not looked for so long is gone: nothing is generated for it
MAX_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Limits:
    """What a page may ask for."""

    max_tokens: int = 4096
    max_question: int = 8000  # characters
    max_waiting: int = 8  # pages in line
    max_seconds: float = 600.0  # for an answer, and for a line that does not move


class Broadcast:
    """One question to several backends, each in its own thread, so that none disturbs the others."""

    def __init__(self, backends: Sequence[Backend], question: LiveQuestion, settings: AskSettings) -> None:
        self.names = [backend.name for backend in backends]
        self._replies = [Reply() for _ in backends]
        self._final: list[Reply] | None = None  # once given up
        self._cancelled = threading.Event()
        self._looked = time.monotonic()
        self._threads = [
            threading.Thread(target=self._ask, args=(index, backend, question, settings), daemon=True)
            for index, backend in enumerate(backends)
        ]

    def start(self) -> None:
        """Start a thread for every backend."""
        self._looked = time.monotonic()
        for thread in self._threads:
            thread.start()

    def replies(self) -> list[Reply]:
        """Return the columns as they are now; asking for them shows that somebody is still there."""
        self._looked = time.monotonic()
        return list(self._final or self._replies)

    def give_up(self, note: str) -> None:
        """Let every column that has not ended fail with this note, whatever its thread still does."""
        self._cancelled.set()
        states = [reply if reply.is_over else replace(reply, phase="failed", note=note) for reply in self._replies]
        self._final = states

    def cancel(self) -> None:
        """Let the threads know that nobody wants the answers any more."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Tell whether the answers are unwanted: cancelled, or nobody has looked for a while."""
        return self._cancelled.is_set() or time.monotonic() - self._looked > ABANDONED_SECONDS

    @property
    def is_over(self) -> bool:
        """Tell whether every thread has ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until every thread has ended."""
        for thread in self._threads:
            thread.join()

    def _ask(self, index: int, backend: Backend, question: LiveQuestion, settings: AskSettings) -> None:
        try:
            with closing(backend.ask(question, settings, is_cancelled=self.is_cancelled)) as states:
                for state in states:
                    self._replies[index] = state
        except UserError as error:
            self._fail(index, str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # for the operator
            self._fail(index, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])

    def _fail(self, index: int, note: str) -> None:
        self._replies[index] = replace(self._replies[index], phase="failed", note=note)


@dataclass(frozen=True, slots=True)
class AskState:
    """What a page shows of its question at one moment."""

    ahead: int  # pages before this one in line; 0: it is its turn
    names: Sequence[str]
    replies: Sequence[Reply]

    @property
    def is_over(self) -> bool:
        """Tell whether every reply has ended or failed."""
        return all(reply.is_over for reply in self.replies)


class AskQueue:
    """The line of questions that pages ask. Its methods may be called from any thread."""

    def __init__(self, backends: Sequence[Backend], *, limits: Limits | None = None) -> None:
        self.backends: Mapping[str, Backend] = {backend.name: backend for backend in backends}
        if len(self.backends) != len(backends):
            raise UserError("two of the models to ask have the same name: give the --endpoint a different one")
        self.limits = limits or Limits()
        self._changed = threading.Condition()
        self._line: list[tuple[str, Broadcast]] = []  # (page, its question); the first one has its turn

    def ask(
        self, page: str, names: Sequence[str], question: LiveQuestion, settings: AskSettings
    ) -> Generator[AskState, None, None]:
        """Yield states some five times a second until all columns are over. Leaving the iterator cancels.

        Only the last state is over, and then the page has left the line: it may ask again at once.

        Args:
            page: the visitor's page, which asks one question at a time.
            names: of the backends to ask, one for each column.
            question: to ask.
            settings: how to sample.

        Raises UserError for a question that is refused, and if the line does not move for limits.max_seconds more
        than an answer may take.
        """
        broadcast = Broadcast(self._check(names, question, settings), question, settings)
        ticket = (page, broadcast)
        with self._changed:
            if any(waiting == page for waiting, _ in self._line):
                raise UserError("this page is still asking: stop that first")
            if len(self._line) > self.limits.max_waiting:
                raise UserError(f"{len(self._line)} pages are in line already: try again later")
            self._line.append(ticket)
        is_started, seconds = False, self.limits.max_seconds
        first, moved = None, time.monotonic()
        try:
            while not broadcast.is_cancelled():
                with self._changed:
                    ahead = self._line.index(ticket)
                    if self._line[0] is not first:
                        first, moved = self._line[0], time.monotonic()
                    if ahead:
                        self._changed.wait(min(0.5, seconds))
                if ahead and time.monotonic() - moved > 2 * seconds:
                    raise UserError(
                        f"the question ahead of yours has not ended for {clock(2 * seconds)}: its model hangs; "
                        "whoever runs this demo has to start it again"
                    )
                if not ahead:
                    break
                yield AskState(ahead, broadcast.names, broadcast.replies())
            if broadcast.is_cancelled():
                last = [Reply("ended", stop="cancelled") for _ in names]
            else:
                is_started = True
                broadcast.start()
                begun = time.monotonic()
                while not broadcast.is_over:
                    if time.monotonic() - begun > seconds:
                        broadcast.give_up(f"no end after {clock(seconds)}: stopped")
                        break
                    state = AskState(0, broadcast.names, broadcast.replies())
                    if not state.is_over:  # its threads may take a moment longer
                        yield state
                    time.sleep(0.2)
                last = broadcast.replies()
        finally:
            broadcast.cancel()
            self._leave(ticket, wait=is_started)
        yield AskState(0, broadcast.names, last)

    def cancel(self, page: str) -> None:
        """End what this page asked; a page that asked nothing is not an error."""
        with self._changed:
            asked = [broadcast for waiting, broadcast in self._line if waiting == page]
        for broadcast in asked:
            broadcast.cancel()

    def _check(self, names: Sequence[str], question: LiveQuestion, settings: AskSettings) -> list[Backend]:
        unknown = [name for name in names if name not in self.backends]
        if unknown or not 1 <= len(names) <= MAX_COLUMNS or len(set(names)) != len(names):
            raise UserError(f"choose 1 to {MAX_COLUMNS} of the models in the list")
        if not question.text.strip():
            raise UserError("write a question first")
        if len(question.text) > self.limits.max_question:
            raise UserError(f"the question has {len(question.text)} characters; at most {self.limits.max_question}")
        if not 1 <= settings.max_tokens <= self.limits.max_tokens:
            raise UserError(f"the answer may have 1 to {self.limits.max_tokens} tokens, not {settings.max_tokens}")
        if not 0 <= settings.temperature <= 2:
            raise UserError(f"the temperature must be between 0 and 2, not {settings.temperature}")
        if not 0 <= settings.seed < 2**31:
            raise UserError(f"the seed must be between 0 and {2**31 - 1}, not {settings.seed}")
        return [self.backends[name] for name in names]

    def _leave(self, ticket: tuple[str, Broadcast], *, wait: bool) -> None:
        """Give the next page its turn once the last thread has ended: two questions never compute at once."""

        def leave() -> None:
            ticket[1].join()
            with self._changed:
                self._line.remove(ticket)
                self._changed.notify_all()

        if wait and not ticket[1].is_over:
            threading.Thread(target=leave, daemon=True).start()
        else:
            with self._changed:
                self._line.remove(ticket)
                self._changed.notify_all()
