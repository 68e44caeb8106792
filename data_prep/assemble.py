"""From finished shards to one file: what only all rows together can tell (ids, duplicates, overlap)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.filters import duplicates
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.overlap import Benchmarks, overlaps
from vlm_rl.data_prep.prepared_set import DATA, SetWriter, schema
from vlm_rl.data_prep.records import Dropped
from vlm_rl.data_prep.shards import Kept, ShardRecord, count_notes
from vlm_rl.data_prep.workspace import HopelessError
from vlm_rl.errors import UserError

EXAMPLES = 200  # of each reason; every match with a benchmark is listed


@dataclass(slots=True)
class Assembly:
    """The counts of a finished set: rows_in = kept + the sum of dropped."""

    rows_in: int = 0
    kept: int = 0
    test_only: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)  # dropped rows, and matches that were kept

    def drop(self, item: Dropped) -> None:
        self.rows_in += item.count
        self.dropped[item.reason] += item.count
        if self.dropped[item.reason] - item.count < EXAMPLES or item.reason == "benchmark_overlap":
            self.examples.append(
                {"where": item.where, "reason": item.reason, "detail": item.detail, "rows": item.count}
            )


def assemble(stems: Sequence[Path], folder: Path, options: Options) -> Assembly:
    """Write folder/data.parquet from the shards. Raises UserError in strict mode for an id that occurs twice."""
    records = [_open(stem) for stem in stems]
    rows = [item for record in records for item in record.items if isinstance(item, Kept)]
    gone = _repeated_ids(rows, strict=options.strict)
    if not options.keep_duplicates:
        gone = {**duplicates(rows), **gone}
    result = Assembly()
    matches = _matches(stems, rows, gone, options)
    for index, match in matches.items():
        if options.keep_overlap:
            result.notes["benchmark_overlap"] += 1
            result.examples.append({"where": rows[index].where, "kept": True, **asdict(match)})
        else:
            gone[index] = Dropped(rows[index].where, "benchmark_overlap", match.detail, known=True)
    with SetWriter(folder / DATA, schema()) as writer:
        number = 0
        for stem, record in zip(stems, records, strict=True):
            first, chosen = number, []
            for item in record.items:
                if result.kept + len(chosen) == options.limit:
                    break
                if isinstance(item, Dropped):
                    result.drop(item)
                    continue
                if number in gone:
                    result.drop(gone[number])
                else:
                    chosen.append(number - first)
                number += 1
            number = first + sum(isinstance(item, Kept) for item in record.items)
            kept = [rows[first + index] for index in chosen]
            result.kept += len(kept)
            result.rows_in += len(kept)
            result.notes += count_notes(kept)
            result.test_only |= any(row.test_only for row in kept)
            _copy(stem, chosen, writer)
    return result


def _open(stem: Path) -> ShardRecord:
    record = ShardRecord.load(stem)
    if record is None:
        raise UserError(f"{stem.name} was changed while the set was being made; run the same command again")
    return record


def _repeated_ids(rows: Sequence[Kept], *, strict: bool) -> dict[int, Dropped]:
    seen: set[str] = set()
    gone: dict[int, Dropped] = {}
    for index, row in enumerate(rows):
        if row.id in seen:
            detail = f"the id {row.id!r} appeared before"
            if strict:
                raise HopelessError(f"{row.where}: {detail} (duplicate_id); mend the row or prepare without --strict")
            gone[index] = Dropped(row.where, "duplicate_id", detail)
        seen.add(row.id)
    return gone


def _matches(
    stems: Sequence[Path], rows: Sequence[Kept], gone: dict[int, Dropped], options: Options
) -> dict[int, Any]:
    """Row number -> what it shares with a benchmark, of the training rows that are still there."""
    if not options.against:
        return {}

    def texts() -> Iterator[tuple[int, str, Sequence[str]]]:
        for index, question in enumerate(_questions(stems)):
            if index not in gone and not rows[index].test_only:
                yield index, question, rows[index].phashes

    return overlaps(texts(), Benchmarks.open(options.against))


def _questions(stems: Sequence[Path]) -> Iterator[str]:
    """The text of every row in the shards, the one that we drew into a picture included."""
    import pyarrow.parquet as pq

    for stem in stems:
        table = pq.read_table(stem.with_suffix(".parquet"), columns=["question", "meta"])
        for question, meta in zip(table["question"].to_pylist(), table["meta"].to_pylist(), strict=True):
            yield json.loads(meta).get("typeset_text") or question


def _copy(stem: Path, chosen: Sequence[int], writer: SetWriter) -> None:
    """Rows of one shard, a row group at a time."""
    import pyarrow.parquet as pq

    if not chosen:
        return
    wanted, first = set(chosen), 0
    with pq.ParquetFile(stem.with_suffix(".parquet")) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            indices = [index for index in range(table.num_rows) if first + index in wanted]
            first += table.num_rows
            writer.add_table(table if len(indices) == table.num_rows else table.take(indices))
