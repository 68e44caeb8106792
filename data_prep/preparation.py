"""Turn a data set's own files into a prepared set: checked, its images on the model's grid, its rows counted.

    report = prepare("virl39k", Path("ViRL39K"), Path("data/virl39k"), Options(max_pixels=1_003_520))

A prepared set is a folder with data.parquet, manifest.json (where the rows came from, how many were
dropped and why), dropped.jsonl (examples of every reason), report.html and README.md (a data set card). It appears
complete or not at all. Until then its finished shards are in `.NAME.partial` beside it; after a kill the same call
resumes there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.card import licence_of, write_card
from vlm_rl.data_prep.filters import cached, count_prompt_tokens, screen_row
from vlm_rl.data_prep.input_checksums import describe_inputs
from vlm_rl.data_prep.leakage import check_prepared
from vlm_rl.data_prep.merge_shards import SetCounts, merge_shards
from vlm_rl.data_prep.options import GoldCheck, Options, TokenCount
from vlm_rl.data_prep.partial_set import HopelessError, PartialSet
from vlm_rl.data_prep.prepared_images import prepare_image
from vlm_rl.data_prep.prepared_set import FORMAT, schema, write_manifest
from vlm_rl.data_prep.readers.generic import GenericSet, read_mapped
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.records import DroppedRow, RowError, UsableRow
from vlm_rl.data_prep.report import write_report
from vlm_rl.data_prep.shards import ScreenedRow, ShardRecord, ShardTask, TileTokens, make_shards
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import GRADER_VERSION
from vlm_rl.run.terminal import make_console

SHARD_ROWS = 256
# Reasons of dropped rows that may be gone when the same command runs again.
IMAGE_REASONS = ("image_missing", "image_unreadable", "image_outside")
# Options that shards do not depend on: they act when the shards are merged.
_MERGE_OPTIONS = (
    *("strict", "limit", "keep_duplicates", "against", "keep_overlap"),
    *("hold_out", "is_held_out", "seed"),
)


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What happened to the rows: rows_in = kept + the sum of dropped."""

    source: str
    options: Options
    rows_in: int
    kept: int
    dropped: Mapping[str, int]  # reason -> rows
    notes: Mapping[str, int] = field(default_factory=dict)  # what was changed or flagged in kept rows
    test_only: bool = False  # at least one row of a benchmark
    shards_reused: int = 0  # finished by an earlier call that was killed
    held_out: PrepareReport | None = None  # of the second set


def prepare(
    source: str,
    path: Path,
    out: Path,
    options: Options = Options(),  # noqa: B008 (frozen)
    *,
    gold_check: GoldCheck | None = None,
    count_tokens: TokenCount | None = None,
    tile_tokens: TileTokens | None = None,
    counted_with: Mapping[str, str] | None = None,
    revision: str = "",
    mapping: GenericSet | None = None,
    workers: int = 1,
) -> PrepareReport:
    """Read a data set and write it as a prepared set.

    Args:
        source: a key of SOURCES.
        path: the data set's folder or file.
        out: the prepared set, a new folder; the held-out problems of `options.hold_out` go to OUT-held-out.
        options: what to keep, and in what form.
        gold_check: training rows that fail it are dropped, benchmark rows kept and flagged (meta "gold_unverified").
        count_tokens: fills the column prompt_tokens.
        tile_tokens: counts the tokens of images, where the model of `count_tokens` cuts them into tiles.
        counted_with: what `count_tokens` counts with, for the manifest.
        revision: the commit, if `path` came from the hub.
        mapping: for the source generic, the mapping of the data at `path`; None if `path` is its YAML file.
        workers: processes for the images; 1 is this process. More need the caller's main module to be
            importable (`if __name__ == "__main__"`).

    Raises UserError for an unknown source, an existing `out`, bad options, a bad row in strict mode, or
    when no row is left.
    """
    path, out = Path(path), Path(out)
    check_arguments(source, path, options, workers=workers, counts_tokens=count_tokens is not None)
    # What shards depend on: if any of it differs, the shards of an earlier call are of no use.
    plan = {
        "format": FORMAT,
        "inputs": {
            "source": source,
            "revision": revision,
            "files": describe_inputs(source, path, mapping),
            **({"mapping": mapping.model_dump(exclude_defaults=True)} if mapping else {}),
        },
        "options": {key: value for key, value in options.record().items() if key not in _MERGE_OPTIONS},
        "grader_version": GRADER_VERSION if gold_check else None,
        "counted_with": dict(counted_with or {}),
        "shard_rows": _shard_rows(options),
    }
    rows = read_mapped(path, mapping, named=path) if mapping else SOURCES[source].read(path, options.split)
    reports = []
    with PartialSet(out, plan, holds_out=options.hold_out > 0) as partial:
        stream = _ShardStream(options, partial, cached(gold_check) if gold_check else None, count_tokens, tile_tokens)
        stream.make(_with_progress(rows, f"preparing {source}", stream), workers=workers)
        stems = [partial.stem(number) for number in range(stream.num_shards)]
        for (build, place), side in zip(partial.outs.items(), options.sides(), strict=True):
            counts = merge_shards(stems, build, side)
            if counts.kept == 0:
                first = "".join(f"; {example['where']}: {example['detail']}" for example in counts.examples[:1])
                raise HopelessError(f"{place}: no row is left to write; dropped: {dict(counts.dropped)}{first}")
            reports.append(_report(source, side, counts, stream))
            _write_facts(build, reports[-1], counts, plan, name=place.name)
            write_card(build, licence=licence_of(path))
        partial.publish()
    return replace(reports[0], held_out=next(iter(reports[1:]), None))


def check_arguments(source: str, path: Path, options: Options, *, workers: int, counts_tokens: bool) -> None:
    """Raise UserError for arguments of `prepare` with which nothing can be prepared."""
    if source not in SOURCES:
        raise UserError(f"no data source {source!r}; known: {', '.join(SOURCES)}, mix")
    if not path.exists():
        raise UserError(f"{path}: does not exist; give the folder or file of {source} on this machine")
    options.check()
    if workers < 1:
        raise UserError(f"--workers {workers}: give at least 1")
    check_prepared(options.against)
    if options.max_prompt_tokens is not None and not counts_tokens:
        raise UserError("--max-prompt-tokens needs a tokenizer to count with; name a model folder with --tokenizer")


def _shard_rows(options: Options) -> int:
    """Return the rows of a shard: fewer for a small limit, so that few are prepared in vain."""
    return SHARD_ROWS if options.limit is None else max(8, min(SHARD_ROWS, options.limit))


@dataclass(slots=True)
class _ShardStream:
    """The rows of a data set on their way into shards."""

    options: Options
    partial: PartialSet
    gold_check: GoldCheck | None
    count_tokens: TokenCount | None
    tile_tokens: TileTokens | None
    rows_in: int = 0
    num_shards: int = 0
    num_reused: int = 0
    num_kept: int = 0  # in the finished shards so far

    def make(self, rows: Iterable[UsableRow | DroppedRow], *, workers: int) -> None:
        """Make every shard that an earlier call has not finished."""
        stems: list[Path] = []

        def tasks() -> Iterator[ShardTask]:
            for task in self._tasks(rows, schema()):
                stems.append(task.stem)
                yield task

        # With a limit shards are made one at a time, so that none is made in vain.
        unexpected = make_shards(tasks(), workers=1 if self.options.limit is not None else workers)
        for number, row in enumerate(unexpected):
            self._check_strict(row)
            if self.options.limit is not None and (record := ShardRecord.load(stems[number])) is not None:
                self._count(record)

    def _tasks(self, rows: Iterable[UsableRow | DroppedRow], arrow_schema: Any) -> Iterator[ShardTask]:
        """Yield a task for every shard that is not finished yet."""
        stream, size = iter(rows), _shard_rows(self.options)
        while batch := list(islice(stream, size)):
            stem = self.partial.stem(self.num_shards)
            self.num_shards += 1
            self.rows_in += sum(row.count if isinstance(row, DroppedRow) else 1 for row in batch)
            record = ShardRecord.load(stem)
            if record is not None and not self._is_mended(batch, record):
                self.num_reused += 1
                self._check_strict(record.first_unexpected)
                self._count(record)
            else:
                screened = tuple(self._screen(row) for row in batch)
                grid, most = self.options.grid, self.options.max_prompt_tokens
                yield ShardTask(stem, screened, grid, most, arrow_schema, self.tile_tokens)
            if self.options.limit is not None and self.num_kept >= self.options.limit:
                return

    def _is_mended(self, batch: Sequence[UsableRow | DroppedRow], record: ShardRecord) -> bool:
        """Tell whether an image for which a finished shard dropped a row can be used by now."""
        for row, then in zip(batch, record.rows, strict=False):
            if isinstance(then, DroppedRow) and then.reason in IMAGE_REASONS and isinstance(row, UsableRow):
                with suppress(RowError):
                    for reference in row.images:
                        prepare_image(reference, where="", grid=self.options.grid, test_only=row.problem.test_only)
                    return True
        return False

    def _screen(self, row: UsableRow | DroppedRow) -> ScreenedRow | DroppedRow:
        if isinstance(row, DroppedRow):
            self._check_strict(row)
            return row
        try:
            screened = screen_row(row, self.options, self.gold_check)
            return ScreenedRow(screened, count_prompt_tokens(self.count_tokens, screened.problem))
        except RowError as error:
            dropped = error.dropped(row.where)
            self._check_strict(dropped)
            return dropped

    def _count(self, record: ShardRecord) -> None:
        self.num_kept += sum(not isinstance(row, DroppedRow) for row in record.rows)

    def _check_strict(self, row: DroppedRow | None) -> None:
        if self.options.strict and row is not None and not row.known:
            raise HopelessError(f"{row.where}: {row.detail} ({row.reason}); fix the row or prepare without --strict")


def _report(source: str, options: Options, counts: SetCounts, stream: _ShardStream) -> PrepareReport:
    return PrepareReport(
        source=source,
        options=options,
        rows_in=counts.rows_in,
        kept=counts.kept,
        dropped=dict(sorted(counts.dropped.items())),
        notes=dict(sorted(counts.notes.items())),
        test_only=counts.test_only,
        shards_reused=stream.num_reused,
    )


def _write_facts(
    folder: Path, report: PrepareReport, counts: SetCounts, plan: Mapping[str, Any], *, name: str
) -> None:
    """Write manifest.json, dropped.jsonl and report.html beside data.parquet."""
    options = report.options
    assert report.rows_in == report.kept + sum(report.dropped.values()), report
    lines = [json.dumps(example, ensure_ascii=False, sort_keys=True) for example in counts.examples]
    (folder / "dropped.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    source = SOURCES[report.source]
    write_manifest(
        folder,
        {
            **plan["inputs"],
            "hub": source.hub,
            "published_rows": list(source.rows),
            "options": options.record(),
            "min_pixels": options.min_pixels,
            "max_pixels": options.max_pixels,
            "patch_size": options.patch_size,
            "grader_version": plan["grader_version"],
            "counted_with": plan["counted_with"],
            "rows_in": report.rows_in,
            "kept": report.kept,
            "dropped": report.dropped,
            "notes": report.notes,
            "test_only": report.test_only,
        },
    )
    write_report(folder, name=name, seed=options.seed)


def _with_progress(
    rows: Iterable[UsableRow | DroppedRow], title: str, stream: _ShardStream
) -> Iterator[UsableRow | DroppedRow]:
    """Yield the rows and show on a terminal how many have been read."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = make_console()
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        for row in rows:
            yield row
            progress.update(task, description=f"{title}: {stream.rows_in} rows")
