"""Keep pins: problems and responses that a reader marked, each with a note, in one file of JSON lines.

    {"id": "9f2c...", "time": "2026-05-04T12:00:00Z", "benchmark": "heldout", "problem": "toy-7",
     "checkpoint": "luspo@40", "note": "counts row b twice"}

`checkpoint` is empty where the problem as a whole is pinned. The file is written whole or not at all, and one change
at a time: each takes a lock, reads what is there now and writes that with its own line more or less. So several tabs,
and several demos, lose nothing of each other's. A file that cannot be understood is never written.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from vlm_rl.errors import UserError
from vlm_rl.run.directory import write_atomically

MAX_NOTE = 2_000  # characters
MAX_BYTES = 2**20  # of the file: some five thousand short notes


class Pin(BaseModel):
    """One mark."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    time: AwareDatetime
    benchmark: str
    problem: str
    checkpoint: str  # its key; empty for the problem as a whole
    note: Annotated[str, Field(max_length=MAX_NOTE)]

    @property
    def day(self) -> str:
        """Return when it was made, for readers."""
        return f"{self.time:%Y-%m-%d}"


class PinFile:
    """The pins in one file, which need not exist yet."""

    def __init__(self, path: Path, *, is_writable: bool) -> None:
        self.path = path
        self.is_writable = is_writable
        self._last: tuple[tuple[int, ...], tuple[Pin, ...]] | None = None  # the file's stamp when it was read

    def read(self) -> tuple[Pin, ...]:
        """Return all pins, the oldest first. Raises UserError where the file does not hold notes."""
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._last is None or self._last[0] != stamp:
                self._last = stamp, self._parse(status)
            return self._last[1]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise UserError(f"the notes in {self.path} cannot be read: {error.strerror or error}") from None

    def add(self, *, benchmark: str, problem: str, checkpoint: str, note: str) -> None:
        """Pin something. A pin without a note that is there already stays as it is.

        Args:
            benchmark: of the problem.
            problem: its id.
            checkpoint: whose response is pinned; "" for the problem itself.
            note: a text, or "".

        Raises UserError for a note that is too long, where this demo takes no notes, and where the file cannot be
        changed.
        """
        note = note.strip()
        if len(note) > MAX_NOTE:
            raise UserError(f"a note has at most {MAX_NOTE:,} characters, and this one {len(note):,}: shorten it")
        fresh = Pin(
            id=secrets.token_hex(8),
            time=datetime.now(UTC).replace(microsecond=0),
            benchmark=benchmark,
            problem=problem,
            checkpoint=checkpoint,
            note=note,
        )

        def extended(pins: Sequence[Pin]) -> list[Pin]:
            places = {(pin.benchmark, pin.problem, pin.checkpoint) for pin in pins}
            is_new = note or (benchmark, problem, checkpoint) not in places
            return [*pins, fresh] if is_new else list(pins)

        self._change(extended)

    def remove(self, pin_id: str) -> None:
        """Take a pin away, if it is there. Raises UserError where the file cannot be changed, as `add` does."""
        self._change(lambda pins: [pin for pin in pins if pin.id != pin_id])

    def _change(self, edit: Callable[[Sequence[Pin]], list[Pin]]) -> None:
        """Write the pins as `edit` wants them.

        Raises UserError where this demo takes no notes, the file is damaged, full, or cannot be written.
        """
        if not self.is_writable:
            raise UserError("this demo shows notes and takes none, because others can reach it")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                before = self.read()
                after = edit(before)
                content = b"".join(pin.model_dump_json().encode() + b"\n" for pin in after)
                if len(content) > MAX_BYTES and len(after) >= len(before):
                    raise UserError(f"{self.path} is full ({MAX_BYTES:,} bytes): remove some notes first")
                if after != list(before):
                    write_atomically(self.path, lambda place: place.write_bytes(content))
        except OSError as error:
            raise UserError(
                f"the note could not be written to {self.path}: {error.strerror or error}; "
                "make room there or start the demo with a different --notes FILE"
            ) from None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep every other writer out, whether a thread or a process; the file beside it stays, since it is empty."""
        file = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _parse(self, status: os.stat_result) -> tuple[Pin, ...]:
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{self.path} is not a file: choose a different --notes FILE")
        if status.st_size > MAX_BYTES:
            raise UserError(
                f"{self.path} has {status.st_size:,} bytes, and notes have at most {MAX_BYTES:,}: move it away"
            )
        lines = self.path.read_bytes().splitlines()
        return tuple(self._pin(number, line) for number, line in enumerate(lines, 1) if line.strip())

    def _pin(self, number: int, line: bytes) -> Pin:
        try:
            return Pin.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ascii(".".join(map(str, first["loc"])))[1:81].rstrip("'")
            raise UserError(
                f"{self.path}:{number} is not a note ({f'{where}: ' if where else ''}{first['msg']}): repair or "
                "remove that line, or move the file away. Until then no notes are shown, and none are written"
            ) from None
