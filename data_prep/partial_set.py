"""The folder in which a preparation keeps its finished shards until the whole set appears at once."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from vlm_rl.errors import UserError


def held_out_beside(out: Path) -> Path:
    """Return where the held-out problems of a set go."""
    return out.parent / f"{out.name}-held-out"


class HopelessError(UserError):
    """The same call would fail again, so its finished shards are of no use."""


class PartialSet:
    """The folder `.NAME.partial` beside the set NAME; a context manager.

    A call with the same plan continues in it; a call with a different plan empties it first. After an error it
    stays if a shard was finished, so that the same call can resume, except after a HopelessError.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], *, holds_out: bool = False) -> None:
        """Name the set `out`, everything its shards depend on, and whether there is a second one; write nothing."""
        self.out = out
        self.folder = out.parent / f".{out.name}.partial"
        self.build = self.folder / "set"
        self.outs = {self.build: out}  # where each set is built -> its place
        if holds_out:
            self.outs[self.folder / "held-out"] = held_out_beside(out)
        self._plan = json.dumps(plan, sort_keys=True, ensure_ascii=False)
        self._lock: IO[str] | None = None
        self._made: list[Path] = []  # parent folders that did not exist, innermost first

    def stem(self, number: int) -> Path:
        """Return the path of a shard's files without their suffix."""
        return self.folder / f"shard-{number:06d}"

    def publish(self) -> None:
        """Move the finished sets to their places; a reader of the first finds the second there."""
        for build, out in reversed(self.outs.items()):
            build.rename(out)

    def __enter__(self) -> PartialSet:
        for out in self.outs.values():
            if out.exists():
                raise UserError(f"{out}: already exists; choose a different folder or remove it")
        self._made = [parent for parent in self.out.absolute().parents if not parent.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open_plan()
        except BlockingIOError:
            raise UserError(f"{self.out}: another preparation is writing it; wait for it or stop it") from None
        except OSError as error:
            self._clean()
            raise UserError(f"{self.out}: cannot be written: {error}") from None
        return self

    def _open_plan(self) -> None:
        plan = self.folder / "plan.json"
        if not plan.is_file() or plan.read_text(encoding="utf-8") != self._plan:
            for item in self.folder.iterdir():
                if item.is_file() and item.name != "lock":
                    item.unlink()
            plan.write_text(self._plan, encoding="utf-8")
        for build in self.outs:
            shutil.rmtree(build, ignore_errors=True)
            build.mkdir()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = kind is None or issubclass(kind, HopelessError)
        if done or not any(self.folder.glob("shard-*.json")):
            self._clean()
        if self._lock is not None:
            self._lock.close()
        if isinstance(error, OSError):
            hint = "; run the same command again to resume from the finished shards" if self.folder.exists() else ""
            raise UserError(f"{self.out}: cannot be written: {error}{hint}") from None

    def _clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.out.exists():
            for parent in self._made:
                with suppress(OSError):
                    parent.rmdir()
