"""From a data set's own files to a prepared set: checked, drawn on the model's grid, counted.

    report = prepare("virl39k", Path("ViRL39K"), Path("data/virl39k"), Options(max_pixels=1_003_520))

A prepared set is a folder with data.parquet, manifest.json (where the rows came from, how many were
dropped and why), dropped.jsonl (examples of every reason) and report.html. It appears complete or not
at all. Until then finished shards lie in `.NAME.partial` beside it; the same call after a kill goes on there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.assemble import Assembly, assemble
from vlm_rl.data_prep.filters import cached, count_or_none, screen_row
from vlm_rl.data_prep.inputs import describe_inputs
from vlm_rl.data_prep.options import GoldCheck, Options, TokenCount
from vlm_rl.data_prep.overlap import check_prepared
from vlm_rl.data_prep.prepared_set import DATA, FORMAT, SetWriter, schema, to_row, write_manifest
from vlm_rl.data_prep.records import Dropped, Row, RowError
from vlm_rl.data_prep.shards import Screened, ShardRecord, ShardTask, make_shards
from vlm_rl.data_prep.sources import SOURCES
from vlm_rl.data_prep.workspace import HopelessError, Workspace
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import GRADER_VERSION
from vlm_rl.run.terminal import make_console
from vlm_rl.types import Problem

SHARD_ROWS = 256


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


def prepare(
    source: str,
    path: Path,
    out: Path,
    options: Options = Options(),  # noqa: B008 (frozen)
    *,
    gold_check: GoldCheck | None = None,
    count_tokens: TokenCount | None = None,
    counted_with: Mapping[str, str] | None = None,
    revision: str = "",
    workers: int = 1,
) -> PrepareReport:
    """Read `source` (a key of SOURCES) at `path` and write the prepared set `out`.

    gold_check: training rows that fail it are dropped, benchmark rows kept and flagged (meta
    "gold_unverified"). count_tokens: fills prompt_tokens; counted_with says with what, for the manifest.
    revision: of the hub's repository, if it came from there. workers: processes for the pictures; 1 is this
    one, and more of them need the caller's main module to be importable (`if __name__ == "__main__"`).
    Raises UserError for an unknown source, an existing `out`, bad options, a bad row in strict mode, or
    when no row is left.
    """
    if source not in SOURCES:
        raise UserError(f"no data source {source!r}; known: {', '.join(SOURCES)}, mix")
    path, out = Path(path), Path(out)
    if not path.exists():
        raise UserError(f"{path}: does not exist; give the folder or file of {source} on this machine")
    options.check()
    if workers < 1:
        raise UserError(f"--workers {workers}: need at least one")
    check_prepared(options.against)
    if options.max_prompt_tokens is not None and count_tokens is None:
        raise UserError("--max-prompt-tokens needs a tokenizer to count with; name a model folder with --tokenizer")
    inputs = {"source": source, "revision": revision, "files": describe_inputs(source, path)}
    counted = dict(counted_with or {})
    # What shards depend on: with another value of any of these an earlier call's shards are of no use.
    plan = {
        "format": FORMAT,
        "inputs": inputs,
        "options": {key: value for key, value in options.record().items() if key not in _LATER_OPTIONS},
        "grader_version": GRADER_VERSION if gold_check else None,
        "counted_with": counted,
        "shard_rows": _shard_rows(options),
    }
    items = SOURCES[source].read(path, options.split)
    with Workspace(out, plan) as space:
        stream = _Stream(options, space, cached(gold_check) if gold_check else None, count_tokens)
        rows = _with_progress(items, f"preparing {source}", stream)
        _make(stream, rows, workers=workers)
        assembly = assemble([space.stem(number) for number in range(stream.num_shards)], space.build, options)
        if assembly.kept == 0:
            first = "".join(f"; {example['where']}: {example['detail']}" for example in assembly.examples[:1])
            raise HopelessError(f"{out}: no row is left to write; dropped: {dict(assembly.dropped)}{first}")
        report = _report(source, options, assembly, stream)
        _write_facts(space.build, report, assembly, plan)
        space.publish()
    return report


_LATER_OPTIONS = ("strict", "limit", "keep_duplicates", "against", "keep_overlap", "seed")


def _shard_rows(options: Options) -> int:
    """Fewer for a small limit, so that little is prepared for nothing."""
    return SHARD_ROWS if options.limit is None else max(8, min(SHARD_ROWS, options.limit))


@dataclass(slots=True)
class _Stream:
    """Rows on their way into shards."""

    options: Options
    space: Workspace
    gold_check: GoldCheck | None
    count_tokens: TokenCount | None
    rows_in: int = 0
    num_shards: int = 0
    num_reused: int = 0
    num_kept: int = 0  # of the finished shards so far

    def tasks(self, items: Iterable[Row | Dropped], arrow_schema: Any) -> Iterator[ShardTask]:
        """A task for every shard that is not finished yet."""
        stream, size = iter(items), _shard_rows(self.options)
        while batch := list(islice(stream, size)):
            stem = self.space.stem(self.num_shards)
            self.num_shards += 1
            self.rows_in += sum(item.count if isinstance(item, Dropped) else 1 for item in batch)
            record = ShardRecord.load(stem)
            if record is not None:
                self.num_reused += 1
                self._check_strict(next((i for i in record.items if isinstance(i, Dropped) and not i.known), None))
                self._count(record)
            else:
                screened = tuple(self._screen(item) for item in batch)
                yield ShardTask(stem, screened, self.options.grid, self.options.max_prompt_tokens, arrow_schema)
            if self.options.limit is not None and self.num_kept >= self.options.limit:
                return

    def _screen(self, item: Row | Dropped) -> Screened | Dropped:
        if isinstance(item, Dropped):
            self._check_strict(item)
            return item
        try:
            row = screen_row(item, self.options, self.gold_check)
            tokens = count_or_none(self.count_tokens, row.problem)
        except RowError as error:
            dropped = Dropped(item.where, error.reason, str(error), error.known)
            self._check_strict(dropped)
            return dropped
        return Screened(row, tokens)

    def finished(self, stem: Path, bad: Dropped | None) -> None:
        """A worker is done with a shard."""
        self._check_strict(bad)
        if self.options.limit is not None and (record := ShardRecord.load(stem)) is not None:
            self._count(record)

    def _count(self, record: ShardRecord) -> None:
        self.num_kept += sum(not isinstance(item, Dropped) for item in record.items)

    def _check_strict(self, item: Dropped | None) -> None:
        if self.options.strict and item is not None and not item.known:
            raise HopelessError(
                f"{item.where}: {item.detail} ({item.reason}); mend the row or prepare without --strict"
            )


def _make(stream: _Stream, items: Iterable[Row | Dropped], *, workers: int) -> None:
    """Every shard, those of an earlier call left as they are."""
    stems: list[Path] = []

    def tasks() -> Iterator[ShardTask]:
        for task in stream.tasks(items, schema()):
            stems.append(task.stem)
            yield task

    # With a limit rows are prepared one shard at a time, so that none is prepared for nothing.
    for number, bad in enumerate(make_shards(tasks(), workers=1 if stream.options.limit is not None else workers)):
        stream.finished(stems[number], bad)


def _report(source: str, options: Options, assembly: Assembly, stream: _Stream) -> PrepareReport:
    return PrepareReport(
        source=source,
        options=options,
        rows_in=assembly.rows_in,
        kept=assembly.kept,
        dropped=dict(sorted(assembly.dropped.items())),
        notes=dict(sorted(assembly.notes.items())),
        test_only=assembly.test_only,
        shards_reused=stream.num_reused,
    )


def _write_facts(folder: Path, report: PrepareReport, assembly: Assembly, plan: Mapping[str, Any]) -> None:
    """manifest.json, dropped.jsonl and report.html beside data.parquet."""
    from vlm_rl.data_prep.report import write_report

    options = report.options
    assert report.rows_in == report.kept + sum(report.dropped.values()), report
    lines = [json.dumps(example, ensure_ascii=False, sort_keys=True) for example in assembly.examples]
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
    write_report(folder, seed=options.seed)


def write_problems(
    problems: Iterable[Problem], out: Path, manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
) -> Path:
    """Write a prepared set of finished problems, atomically, into the new folder `out`.

    `manifest` (called after the last row if it is a function) is completed with the format, the
    number of rows and the data's sha256. The pictures are taken as they are.
    Raises UserError if `out` exists, cannot be written, or there is no problem to write.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out}: already exists; choose another folder or remove it")
    made = [parent for parent in out.absolute().parents if not parent.exists()]  # innermost first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
            work = Path(name) / "set"
            work.mkdir()
            with SetWriter(work / DATA, schema()) as writer:
                writer.add_rows(map(to_row, problems))
            facts = dict(manifest() if callable(manifest) else manifest)
            if writer.num_rows == 0:
                raise UserError(f"{out}: no row is left to write; dropped: {facts.get('dropped', {})}")
            write_manifest(work, {**facts, "kept": writer.num_rows})
            work.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from None
    finally:
        if not out.exists():
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
    return out


def _with_progress(rows: Iterable[Row | Dropped], title: str, stream: _Stream) -> Iterator[Row | Dropped]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = make_console()
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        for row in rows:
            yield row
            progress.update(task, description=f"{title}: {stream.rows_in} rows")
