"""Make shards: a worker process decodes, fits and writes the images of a few hundred consecutive rows.

A finished shard is a Parquet file with a JSON record beside it, which says for every row whether it was
kept or why not. The record is written last: a shard without a record is not finished and is made again.
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
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.duplicates import text_key
from vlm_rl.data_prep.gold_boxes import with_fractions
from vlm_rl.data_prep.prepared_images import Grid, PreparedImage, prepare_image
from vlm_rl.data_prep.prepared_set import SetWriter, sha256, to_row
from vlm_rl.data_prep.records import DroppedRow, KeptRow, RowError, UsableRow
from vlm_rl.errors import UserError
from vlm_rl.types import group_by_marker, name_videos
from vlm_rl.untrusted.json_object import read_object


@dataclass(frozen=True, slots=True)
class ScreenedRow:
    """A row that passed every check that needs no image."""

    row: UsableRow
    text_tokens: int = -1  # of its prompt, each image and pair of frames counted as one; -1: not counted


@dataclass(frozen=True, slots=True)
class TileTokens:
    """Counts the tokens of an image where the model cuts it into tiles; travels to worker processes."""

    model: Path
    min_pixels: int
    max_pixels: int

    def count(self, image: PreparedImage) -> int:
        """Return the tokens of an image in its prompt."""
        return _tile_tokens(self, (image.width, image.height))


@lru_cache(maxsize=1)
def _open_builder(tiles: TileTokens) -> Any:
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.templates import TEMPLATES

    return PromptBuilder(
        tiles.model, template=TEMPLATES["think_answer"], min_pixels=tiles.min_pixels, max_pixels=tiles.max_pixels
    )


@lru_cache(maxsize=10_000)
def _tile_tokens(tiles: TileTokens, size: tuple[int, int]) -> int:
    from PIL import Image

    builder = _open_builder(tiles)
    return len(builder.expansions([builder.fit(Image.new("RGB", size))])[0])


@dataclass(frozen=True, slots=True)
class ShardTask:
    """The work of a single call of `make_shard`."""

    stem: Path  # of the shard's files
    rows: tuple[ScreenedRow | DroppedRow, ...]
    grid: Grid
    max_prompt_tokens: int | None
    schema: Any  # of Arrow
    tile_tokens: TileTokens | None = None  # for models that cut images into tiles


_KINDS = {"Kept": KeptRow, "Dropped": DroppedRow}  # as the JSON record names them


@dataclass(slots=True)
class ShardRecord:
    """All rows of a shard, in order; the kept ones are in the shard's file in this order."""

    rows: list[KeptRow | DroppedRow] = field(default_factory=list)
    sha256: str = ""

    @property
    def first_unexpected(self) -> DroppedRow | None:
        """Return the first bad row that is not a documented property of the data: strict mode stops at it."""
        return next((row for row in self.rows if isinstance(row, DroppedRow) and not row.known), None)

    def save(self, file: Path) -> None:
        """Write the record as JSON, whole or not at all."""
        names = {kind: name for name, kind in _KINDS.items()}
        tree = {"sha256": self.sha256, "items": [{"kind": names[type(row)], **asdict(row)} for row in self.rows]}
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
        temporary.rename(file)

    @classmethod
    def load(cls, stem: Path) -> ShardRecord | None:
        """Return the record of a shard that is finished and whole, or None."""
        try:
            tree = read_object(stem.with_suffix(".json").read_bytes())
            if sha256(stem.with_suffix(".parquet")) != tree["sha256"]:
                return None
        except (OSError, ValueError, KeyError):
            return None
        return cls([_KINDS[item.pop("kind")](**item) for item in tree["items"]], tree["sha256"])


def make_shard(task: ShardTask) -> DroppedRow | None:
    """Write a shard; returns the row at which strict mode stops, if there is one."""
    record, parquet = ShardRecord(), task.stem.with_suffix(".parquet")
    with SetWriter(parquet, task.schema) as writer:
        writer.add_rows(_finished_rows(task, record))
    record.sha256 = sha256(parquet)
    record.save(task.stem.with_suffix(".json"))
    return record.first_unexpected


def _finished_rows(task: ShardTask, record: ShardRecord) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file, and put every row of the task into the record."""
    for item in task.rows:
        if isinstance(item, DroppedRow):
            record.rows.append(item)
            continue
        try:
            kept, row = _finish(item, task)
        except RowError as error:
            record.rows.append(error.dropped(item.row.where))
            continue
        record.rows.append(kept)
        yield row


def _finish(screened: ScreenedRow, task: ShardTask) -> tuple[KeptRow, dict[str, Any]]:
    """Prepare a row's images; returns its record and the row of data.parquet. Raises RowError."""
    row, problem = screened.row, screened.row.problem
    images = [
        prepare_image(reference, where=f"image {index}", grid=task.grid, test_only=problem.test_only)
        for index, reference in enumerate(row.images)
    ]
    problem = replace(problem, meta=with_fractions(problem.meta, images))
    groups = group_by_marker(problem.question, images, problem.videos)
    for group in groups:
        if len(sizes := {f"{image.width} x {image.height}" for image in group}) > 1:
            raise RowError("bad_video", f"the frames of a video differ in size: {' and '.join(sorted(sizes))} pixels")
    tokens = _prompt_tokens(screened.text_tokens, groups, task)
    if task.max_prompt_tokens is not None and tokens > task.max_prompt_tokens:
        if not problem.test_only:
            detail = f"the prompt has {tokens} tokens, images expanded; the limit is {task.max_prompt_tokens}"
            raise RowError("prompt_too_long", detail, known=True)
        problem = replace(problem, meta={**problem.meta, "prompt_too_long": True})
    flags = ("markers_prepended", "blank_image", "typeset_image", "gold_unverified", "annotations_only")
    flags += ("prompt_too_long", "alternatives", "system")
    kept = KeptRow(
        where=row.where,
        id=problem.id,
        text_key=text_key(name_videos(problem.question, problem.videos), problem.meta.get("typeset_text", "")),
        answer=problem.answer,
        test_only=problem.test_only,
        sha256s=[image.original_sha256 for image in images],
        phashes=[image.phash for image in images],
        notes=[key for key in flags if problem.meta.get(key)],
        resized=sum(not image.is_kept for image in images),
    )
    problem = replace(problem, images=tuple(image.data for image in images))
    return kept, to_row(problem, images, prompt_tokens=tokens)


def _prompt_tokens(text_tokens: int, groups: Sequence[Sequence[PreparedImage]], task: ShardTask) -> int:
    """Return the tokens of a prompt with the pictures of each marker; -1 where they are not counted."""
    if text_tokens < 0:
        return -1
    if task.tile_tokens is not None:  # no model with tiles takes videos here
        return text_tokens + sum(task.tile_tokens.count(group[0]) - 1 for group in groups)
    tokens = [group[0].width * group[0].height // task.grid.factor**2 - 1 for group in groups]
    return text_tokens + sum(-(-len(group) // 2) * more for group, more in zip(groups, tokens, strict=True))


# -- worker processes ------------------------------------------------------------------------------


def make_shards(tasks: Iterable[ShardTask], *, workers: int) -> Iterator[DroppedRow | None]:
    """Yield `make_shard` of every task, in order, with at most two tasks per worker ahead of the results.

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
        waiting: deque[Future[DroppedRow | None]] = deque(pool.submit(make_shard, task) for task in (first, second))
        try:
            for task in stream:
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(make_shard, task))
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, most likely because memory ran out; run the same command again with "
                "fewer --workers: finished shards are kept"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _end_with_parent() -> None:
    """End this worker when its parent is killed; it would otherwise wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def count_notes(kept: Iterable[KeptRow]) -> Counter[str]:
    """Count what was changed or flagged in kept rows."""
    notes: Counter[str] = Counter()
    for row in kept:
        notes.update(row.notes)
        notes["images"] += len(row.sha256s)
        notes["images_resized"] += row.resized
    return notes
