"""A shard: a few hundred consecutive rows whose pictures are decoded, fitted and written by one worker process.

A finished shard is a Parquet file with a JSON record beside it, which says of every row whether it was
kept or why not. The record is written last: a shard without one was not finished and is made again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.filters import text_key
from vlm_rl.data_prep.pictures import Grid, Picture, prepare_picture
from vlm_rl.data_prep.prepared_set import SetWriter, sha256, to_row
from vlm_rl.data_prep.records import Dropped, Row, RowError
from vlm_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Screened:
    """A row that passed every check that needs no picture."""

    row: Row
    text_tokens: int = -1  # of its prompt, each image counted as one; -1: not counted


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What one worker is given."""

    stem: Path  # of the shard's files
    items: tuple[Screened | Dropped, ...]
    grid: Grid
    max_prompt_tokens: int | None
    schema: Any  # of Arrow


@dataclass(frozen=True, slots=True)
class Kept:
    """What later stages have to know of a row that is in the shard's file."""

    where: str
    id: str
    text_key: str  # digest of the normalised question
    answer: str
    test_only: bool
    sha256s: list[str]  # of the original pictures
    phashes: list[str]
    notes: list[str]  # what was changed or flagged
    resized: int  # pictures that were encoded anew


@dataclass(slots=True)
class ShardRecord:
    """All rows of a shard, in order: kept ones in the order of the file."""

    items: list[Kept | Dropped] = field(default_factory=list)
    sha256: str = ""

    def save(self, file: Path) -> None:
        tree = {
            "sha256": self.sha256,
            "items": [{"kind": type(item).__name__, **asdict(item)} for item in self.items],
        }
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
        temporary.rename(file)

    @classmethod
    def load(cls, stem: Path) -> ShardRecord | None:
        """The record of a shard that is finished and whole; None otherwise."""
        try:
            tree = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
            if sha256(stem.with_suffix(".parquet")) != tree["sha256"]:
                return None
        except (OSError, ValueError, KeyError):
            return None
        kinds = {"Kept": Kept, "Dropped": Dropped}
        items = [kinds[item.pop("kind")](**item) for item in tree["items"]]
        return cls(items, tree["sha256"])


def make_shard(task: ShardTask) -> Dropped | None:
    """Write one shard; returns its first bad row that is no known property of the data, for strict mode."""
    record, parquet = ShardRecord(), task.stem.with_suffix(".parquet")
    with SetWriter(parquet, task.schema) as writer:
        writer.add_rows(_finished_rows(task, record))
    record.sha256 = sha256(parquet)
    record.save(task.stem.with_suffix(".json"))
    return next((item for item in record.items if isinstance(item, Dropped) and not item.known), None)


def _finished_rows(task: ShardTask, record: ShardRecord) -> Iterator[dict[str, Any]]:
    for item in task.items:
        if isinstance(item, Dropped):
            record.items.append(item)
            continue
        try:
            kept, row = _finish(item, task)
        except RowError as error:
            record.items.append(Dropped(item.row.where, error.reason, str(error), error.known))
            continue
        record.items.append(kept)
        yield row


def _finish(item: Screened, task: ShardTask) -> tuple[Kept, dict[str, Any]]:
    row, problem = item.row, item.row.problem
    pictures = [
        prepare_picture(ref, where=f"image {index}", grid=task.grid, test_only=problem.test_only)
        for index, ref in enumerate(row.pictures)
    ]
    tokens = _prompt_tokens(item.text_tokens, pictures, task.grid)
    if task.max_prompt_tokens is not None and tokens > task.max_prompt_tokens:
        if not problem.test_only:
            detail = f"the prompt has {tokens} tokens, images expanded; the limit is {task.max_prompt_tokens}"
            raise RowError("prompt_too_long", detail, known=True)
        problem = replace(problem, meta={**problem.meta, "prompt_too_long": True})
    flags = ("markers_prepended", "blank_image", "typeset_image", "gold_unverified", "annotations_only")
    kept = Kept(
        where=row.where,
        id=problem.id,
        text_key=text_key(problem.question, problem.meta.get("typeset_text", "")),
        answer=problem.answer,
        test_only=problem.test_only,
        sha256s=[picture.original_sha256 for picture in pictures],
        phashes=[picture.phash for picture in pictures],
        notes=[key for key in (*flags, "prompt_too_long", "alternatives") if problem.meta.get(key)],
        resized=sum(not picture.is_kept for picture in pictures),
    )
    problem = replace(problem, images=tuple(picture.data for picture in pictures))
    return kept, to_row(problem, pictures, prompt_tokens=tokens)


def _prompt_tokens(text_tokens: int, pictures: Sequence[Picture], grid: Grid) -> int:
    if text_tokens < 0:
        return -1
    return text_tokens + sum(picture.width * picture.height // grid.factor**2 - 1 for picture in pictures)


# -- worker processes ------------------------------------------------------------------------------


def make_shards(tasks: Iterable[ShardTask], *, workers: int) -> Iterator[Dropped | None]:
    """`make_shard` of every task, in order, with at most two tasks per worker ahead of the answers.

    No process is started for a single task. Raises UserError if a worker dies.
    """
    if workers <= 1:
        yield from map(make_shard, tasks)
        return
    stream = iter(tasks)
    first, second = next(stream, None), next(stream, None)
    if first is None or second is None:
        yield from map(make_shard, [first] if first is not None else [])
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        waiting: deque[Future[Dropped | None]] = deque(pool.submit(make_shard, task) for task in (first, second))
        try:
            for task in stream:
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(make_shard, task))
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, most likely for want of memory; run the same command again, with "
                "fewer --workers: finished shards are kept"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def count_notes(kept: Iterable[Kept]) -> Counter[str]:
    """What was changed or flagged in kept rows."""
    notes: Counter[str] = Counter()
    for item in kept:
        notes.update(item.notes)
        notes["images"] += len(item.sha256s)
        notes["images_resized"] += item.resized
    return notes
