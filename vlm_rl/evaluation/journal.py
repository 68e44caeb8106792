"""What an evaluation has answered so far, on disk: a killed one resumes there, and nothing is graded twice.

    with Journal.open(path, settings) as journal:
        journal.done["p7"]              # the records of a problem that was answered before
        journal.add([records, ...])     # flushed to the disk before it returns

The first line holds the settings; each further line is one problem. A last line that a kill cut off is dropped, and
so is a damaged one. A journal of different settings is started afresh, since its responses are of no use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.run.writing import writing


def _records(line: bytes) -> list[EvalRecord]:
    """Return the records of a problem; none if the line is damaged, so that the problem is answered again."""
    try:
        return [EvalRecord(**fields) for fields in json.loads(line)]
    except (ValueError, TypeError, RecursionError):
        return []


class Journal:
    """An append-only file, one per set and rank. Make one with `open`."""

    def __init__(self, path: Path, file: IO[str], done: dict[str, list[EvalRecord]]) -> None:
        self.path = path
        self.done = done  # problem id -> its records, without images
        self._file = file

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any]) -> Journal:
        """Return the journal at `path` with what it holds for these settings, or a new one."""
        head = json.dumps(settings, sort_keys=True)
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a cut last line has no newline
        done: dict[str, list[EvalRecord]] = {}
        if lines and lines[0] == head.encode():
            for line in lines[1:]:
                if records := _records(line):
                    done[records[0].problem_id] = records
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_name(f"{path.name}.new")  # a kill while this is written leaves the old one in place
            journal = cls(path, fresh.open("w", encoding="utf-8"), {})
            journal._file.write(head + "\n")
            journal._add(list(done.values()))
            fresh.replace(path)
        return journal

    def add(self, groups: Sequence[Sequence[EvalRecord]]) -> None:
        """Keep the records of finished problems; they are on the disk when this returns.

        Raises UserError if the file system refuses, and if the file is no longer there.
        """
        with writing(self.path):
            self.path.stat()  # a file that was removed could be written to without an error
            self._add(groups)

    def _add(self, groups: Sequence[Sequence[EvalRecord]]) -> None:
        for records in groups:
            kept = [replace(record, image=None) for record in records]
            self._file.write(json.dumps([asdict(record) for record in kept], ensure_ascii=True) + "\n")
            self.done[kept[0].problem_id] = kept
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the file, once the result is written."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # on a full disk it tries once more what `add` could not write
            self._file.close()
