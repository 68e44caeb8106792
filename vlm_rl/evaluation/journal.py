"""What an evaluation has answered so far, on disk: a killed one goes on where it was, and regrades nothing.

    with Journal.open(path, settings) as journal:
        journal.done["p7"]              # the records of a problem that was answered before
        journal.add([records, ...])     # flushed to the disk before it returns

One JSON line per problem behind a first line with the settings. A last line that was cut by the kill is dropped;
other settings start afresh, since their answers are others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Record = dict[str, Any]


class Journal:
    """Append-only; one per set and rank. Use `open`."""

    def __init__(self, path: Path, file: IO[str], done: dict[str, list[Record]]) -> None:
        self.path = path
        self.done = done  # problem id -> its records, without images
        self._file = file

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Journal:
        """The journal at `path` with what it holds for these settings, or a new one."""
        head = json.dumps(settings, sort_keys=True)
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a cut last line has no newline
        done: dict[str, list[Record]] = {}
        if lines and lines[0] == head.encode():
            for line in lines[1:]:
                records = json.loads(line)
                done[records[0]["problem_id"]] = records
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")  # a kill while this is written leaves the old one in place
        journal = cls(path, fresh.open("w", encoding="utf-8"), {})
        journal._file.write(head + "\n")
        journal.add(list(done.values()))
        fresh.replace(path)
        return journal

    def add(self, groups: Sequence[Sequence[Record]]) -> None:
        """Keep the records of finished problems; on disk when this returns."""
        for records in groups:
            kept = [{**record, "image": None} for record in records]
            self._file.write(json.dumps(kept, ensure_ascii=True) + "\n")
            self.done[records[0]["problem_id"]] = kept
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """The result is written: nothing is left to go on with."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
