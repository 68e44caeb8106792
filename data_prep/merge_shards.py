"""Merge finished shards into a single file: drop repeated ids, duplicates and leaked rows, and count everything."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.duplicates import are_copies, find_duplicates
from vlm_rl.data_prep.leakage import BenchmarkIndex, Leak, find_leaks
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.partial_set import HopelessError
from vlm_rl.data_prep.prepared_set import DATA, SetWriter, copy_rows, schema
from vlm_rl.data_prep.records import DRAWN, DroppedRow, KeptRow
from vlm_rl.data_prep.shards import ShardRecord, count_notes
from vlm_rl.errors import UserError

MANY_PROBLEMS = 20  # an image of more problems than this, and than a twentieth of all, ties none of them together
EXAMPLES = 200  # of each reason; every leak is listed
LEAKED = "benchmark_overlap"  # the reason as prepared sets have always named it


@dataclass(slots=True)
class SetCounts:
    """The counts of a finished set: rows_in = kept + the sum of dropped."""

    rows_in: int = 0
    kept: int = 0
    test_only: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)  # dropped rows, and leaked rows that were kept

    def drop(self, row: DroppedRow) -> None:
        """Count a dropped row; it becomes an example if there are not enough of its reason yet."""
        self.rows_in += row.count
        self.dropped[row.reason] += row.count
        if self.dropped[row.reason] - row.count < EXAMPLES or row.reason == LEAKED:
            self.examples.append({"where": row.where, "reason": row.reason, "detail": row.detail, "rows": row.count})


def merge_shards(stems: Sequence[Path], folder: Path, options: Options) -> SetCounts:
    """Write folder/data.parquet from the shards. Raises UserError in strict mode for an id that occurs twice."""
    records = [_open(stem) for stem in stems]
    rows = [row for record in records for row in record.rows if isinstance(row, KeptRow)]
    counts = SetCounts()
    dropped, overlapping = _dropped(stems, rows, options)
    with SetWriter(folder / DATA, schema()) as writer:
        number = 0  # of the kept row in all shards
        for stem, record in zip(stems, records, strict=True):
            first, chosen = number, []
            for row in record.rows:
                if counts.kept + len(chosen) == options.limit:
                    break
                if isinstance(row, DroppedRow):
                    counts.drop(row)
                    continue
                if number in dropped:
                    counts.drop(dropped[number])
                else:
                    chosen.append(number - first)
                    if number in overlapping:
                        counts.notes[LEAKED] += 1
                        leak = asdict(overlapping[number])
                        counts.examples.append({"where": row.where, "kept": True, **leak})
                number += 1
            number = first + sum(isinstance(row, KeptRow) for row in record.rows)
            kept = [rows[first + index] for index in chosen]
            counts.kept += len(kept)
            counts.rows_in += len(kept)
            counts.notes += count_notes(kept)
            counts.test_only |= any(row.test_only for row in kept)
            copy_rows(stem.with_suffix(".parquet"), set(chosen), writer)
    return counts


def _open(stem: Path) -> ShardRecord:
    record = ShardRecord.load(stem)
    if record is None:
        raise UserError(f"{stem.name} was changed while the set was being made; run the same command again")
    return record


def _dropped(
    stems: Sequence[Path], rows: Sequence[KeptRow], options: Options
) -> tuple[dict[int, DroppedRow], Mapping[int, Leak]]:
    """Return the rows to drop by number, and the leaked rows that the options keep."""
    dropped = _repeated_ids(rows, options)
    if not options.keep_duplicates:
        dropped = {**find_duplicates(rows, gone=dropped), **dropped}
    if options.hold_out:
        dropped |= _of_the_other_set(rows, dropped, options)
    leaks = _leaks(stems, rows, dropped, options)
    if options.keep_overlap:
        return dropped, leaks
    for index, leak in leaks.items():
        dropped[index] = DroppedRow(rows[index].where, LEAKED, leak.detail, known=True)
    return dropped, {}


def _of_the_other_set(
    rows: Sequence[KeptRow], dropped: Mapping[int, DroppedRow], options: Options
) -> dict[int, DroppedRow]:
    """Return the remaining rows that are for the other set of --hold-out, by number.

    Those with the smallest digests are held out, until there are enough. A digest is of the first image where there
    is one: problems on one image are on one side. An image of many problems is a placeholder or a logo, and of no use
    for that. Raises UserError for rows of a benchmark.
    """
    left = {index: row for index, row in enumerate(rows) if index not in dropped}
    if benchmark := next((row for row in left.values() if row.test_only), None):
        raise HopelessError(f"--hold-out: {benchmark.where} is of a benchmark, which is measured whole; leave it out")
    image = {index: row.sha256s[0] for index, row in left.items() if row.sha256s and DRAWN.isdisjoint(row.notes)}
    common = Counter(image.values())
    most = max(MANY_PROBLEMS, len(left) // 20)
    members: dict[bytes, list[int]] = defaultdict(list)
    for index, row in left.items():
        key = image[index] if index in image and common[image[index]] <= most else row.text_key
        members[hashlib.sha256(key.encode()).digest()].append(index)
    held_out: set[int] = set()
    for digest in sorted(members):
        if len(held_out) < options.hold_out * len(left):
            held_out.update(members[digest])
    return {
        index: DroppedRow(row.where, "other_set", "it is for the other set of --hold-out", known=True)
        for index, row in left.items()
        if (index in held_out) != options.is_held_out
    }


def _repeated_ids(rows: Sequence[KeptRow], options: Options) -> dict[int, DroppedRow]:
    """Return the rows with the id of an earlier one, but for those copies of it that find_duplicates will drop."""
    seen: dict[str, KeptRow] = {}
    dropped: dict[int, DroppedRow] = {}
    for index, row in enumerate(rows):
        first = seen.setdefault(row.id, row)
        if first is row or (not options.keep_duplicates and are_copies(first, row)):
            continue
        detail = f"the id {row.id!r} appeared before"
        if options.strict:
            raise HopelessError(f"{row.where}: {detail} (duplicate_id); fix the row or prepare without --strict")
        dropped[index] = DroppedRow(row.where, "duplicate_id", detail)
    return dropped


def _leaks(
    stems: Sequence[Path], rows: Sequence[KeptRow], dropped: dict[int, DroppedRow], options: Options
) -> dict[int, Leak]:
    """Return the matches of the remaining training rows with a benchmark, by row number."""
    if not options.against:
        return {}

    def training_rows() -> Iterator[tuple[int, str, Sequence[str]]]:
        for index, question in enumerate(_questions(stems)):
            if index not in dropped and not rows[index].test_only:
                yield index, question, rows[index].phashes if DRAWN.isdisjoint(rows[index].notes) else []

    return find_leaks(training_rows(), BenchmarkIndex.open(options.against))


def _questions(stems: Sequence[Path]) -> Iterator[str]:
    """Yield the text of every row in the shards, including text that we drew into an image."""
    import pyarrow.parquet as pq

    for stem in stems:
        table = pq.read_table(stem.with_suffix(".parquet"), columns=["question", "meta"])
        for question, meta in zip(table["question"].to_pylist(), table["meta"].to_pylist(), strict=True):
            yield json.loads(meta).get("typeset_text") or question
