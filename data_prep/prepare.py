"""From a data set's own files to a prepared set: checked, drawn on the model's grid, counted.

    report = prepare("virl39k", Path("ViRL39K"), Path("out/virl"), min_pixels=3136, max_pixels=1_003_520)

A prepared set is a folder with data.parquet (columns of `features()`, which `datasets` reads as they are)
and manifest.json (where the rows came from, how many were dropped and why, sha256 of the data). It
appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.rows import Dropped, Row, RowError
from data_prep.sources import SOURCES
from vlm_rl.answers import GRADER_VERSION
from vlm_rl.errors import UserError
from vlm_rl.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image, encode_png, fit_to_grid, grid_size
from vlm_rl.terminal import make_console
from vlm_rl.tiny import CONTROL_TOKENS
from vlm_rl.types import IMAGE_MARKER, Problem

FORMAT = 1
ROWS_PER_GROUP = (
    16  # a row group is what a reader takes at a time, pictures included: few, since training draws single rows
)

GoldCheck = Callable[[Problem], bool]


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What happened to the rows: rows_in = kept + the sum of dropped."""

    source: str
    min_pixels: int
    max_pixels: int
    rows_in: int
    kept: int
    dropped: Mapping[str, int]  # reason -> rows
    notes: Mapping[str, int] = field(default_factory=dict)  # what was changed or flagged in kept rows
    test_only: bool = False  # at least one row of a benchmark


def prepare(
    source: str,
    path: Path,
    out: Path,
    *,
    min_pixels: int = 3136,
    max_pixels: int = 1_003_520,
    strict: bool = False,
    limit: int | None = None,
    blank_image: bool = False,
    gold_check: GoldCheck | None = None,
) -> PrepareReport:
    """Read `source` (a key of SOURCES) at `path` and write the prepared set `out`.

    strict: the first bad row is a UserError with file and row; otherwise it is dropped and counted.
    limit: stop after this many kept rows. blank_image: rows without a picture get a white one.
    gold_check: tells whether the grader accepts the gold as an answer to itself; training rows that
    fail are dropped, benchmark rows kept and flagged (meta "gold_unverified").
    Raises UserError for an unknown source, an existing `out`, or when no row is left.
    """
    if source not in SOURCES:
        raise UserError(f"no data source {source!r}; known: {', '.join(SOURCES)}")
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: does not exist; give the folder or file of {source} on this machine")
    grid_size(28, 28, min_pixels=min_pixels, max_pixels=max_pixels)  # refuses an impossible range
    run = _Run(min_pixels, max_pixels, strict, limit, blank_image, gold_check)

    checked_by = {} if gold_check is None else {"grader_version": GRADER_VERSION}

    def report() -> PrepareReport:
        return PrepareReport(
            source=source,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            rows_in=run.rows_in,
            kept=run.kept,
            dropped=dict(sorted(run.dropped.items())),
            notes=dict(sorted(run.notes.items())),
            test_only=run.test_only,
        )

    rows = _with_progress(SOURCES[source](path), f"preparing {source}", run)
    write_problems(run.keep(rows), out, lambda: asdict(report()) | checked_by)
    return report()


def write_problems(
    problems: Iterable[Problem], out: Path, manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
) -> Path:
    """Write a prepared set: data.parquet and manifest.json, atomically, into the new folder `out`.

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
            kept = _write_parquet(problems, work / "data.parquet")
            facts = dict(manifest() if callable(manifest) else manifest)
            if kept == 0:
                raise UserError(f"{out}: no row is left to write; dropped: {facts.get('dropped', {})}")
            facts |= {"format": FORMAT, "kept": kept, "sha256": {"data.parquet": _sha256(work / "data.parquet")}}
            text = json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            (work / "manifest.json").write_text(text, encoding="utf-8")
            work.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from None
    finally:
        if not out.exists():
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
    return out


@dataclass(slots=True)
class _Run:
    """The options of one preparation and its running counts."""

    min_pixels: int
    max_pixels: int
    strict: bool
    limit: int | None
    blank_image: bool
    gold_check: GoldCheck | None
    rows_in: int = 0
    kept: int = 0
    test_only: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)

    def keep(self, rows: Iterable[Row | Dropped]) -> Iterator[Problem]:
        """The finished problems; every other row is counted, or stops a strict run."""
        for row in rows:
            self.rows_in += 1
            if isinstance(row, Dropped):
                self._drop(row)
                continue
            try:
                problem = self._finish(row)
            except RowError as error:
                self._drop(Dropped(row.where, error.reason, str(error), error.known))
                continue
            self.kept += 1
            self.test_only |= problem.test_only
            yield problem
            if self.kept == self.limit:
                return

    def _drop(self, row: Dropped) -> None:
        if self.strict and not row.known:
            raise UserError(f"{row.where}: {row.detail} ({row.reason}); mend the row or prepare without --strict")
        self.dropped[row.reason] += 1

    def _finish(self, row: Row) -> Problem:
        problem = row.problem
        if problem.id in self.ids:
            raise RowError("duplicate_id", f"the id {problem.id!r} appeared before")
        for token in CONTROL_TOKENS:
            if token in problem.question:
                raise RowError("control_token", f"the question holds the model's control token {token}")
        fitted = [self._fit(data, index, problem.test_only) for index, data in enumerate(problem.images)]
        problem = replace(problem, images=tuple(data for data, _ in fitted))
        if self.blank_image and not fitted:
            problem = self._with_blank(problem)
        if self.gold_check is not None and not self.gold_check(problem):
            if not problem.test_only:
                raise RowError(
                    "gold_unverified", f"the answer {problem.answer!r:.60} is not graded right against itself"
                )
            problem = replace(problem, meta={**problem.meta, "gold_unverified": True})
        self.ids.add(problem.id)
        self.notes["images"] += len(fitted)
        self.notes["images_resized"] += sum(resized for _, resized in fitted)
        self.notes.update(
            key for key in ("markers_prepended", "blank_image", "gold_unverified") if problem.meta.get(key)
        )
        return problem

    def _fit(self, data: bytes, index: int, test_only: bool) -> tuple[bytes, bool]:
        """The picture on the grid as PNG, and whether it had to be resized."""
        try:
            image = decode_image(data, where=f"image {index}", limits=TEST_LIMITS if test_only else DEFAULT_LIMITS)
        except UserError as error:
            raise RowError("image_unreadable", str(error)) from None
        fitted = fit_to_grid(image, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return encode_png(fitted), fitted is not image

    def _with_blank(self, problem: Problem) -> Problem:
        height, width = grid_size(28, 28, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        white = encode_png(Image.new("RGB", (width, height), "white"))
        return replace(
            problem,
            question=f"{IMAGE_MARKER}\n{problem.question}",
            images=(white,),
            meta={**problem.meta, "blank_image": True},
        )


def _with_progress(rows: Iterable[Row | Dropped], title: str, run: _Run) -> Iterator[Row | Dropped]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = make_console()
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        for row in rows:
            yield row
            progress.update(task, description=f"{title}: {run.rows_in} rows, {run.kept} kept")


def _write_parquet(problems: Iterable[Problem], file: Path) -> int:
    """Stream the problems into one Parquet file; returns their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = features().arrow_schema
    kept, group = 0, []
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            group.clear()

        for problem in problems:
            group.append(to_row(problem))
            kept += 1
            if len(group) == ROWS_PER_GROUP:
                flush()
        if group:
            flush()
    return kept


def features() -> Any:
    """The columns of data.parquet, as datasets.Features."""
    from datasets import Features, List, Value
    from datasets import Image as ImageFeature

    text = Value("string")
    return Features(
        {
            "id": text,
            "question": text,
            "images": List(ImageFeature()),
            "answer": text,
            "answer_type": text,
            "choices": List(text),
            "source": text,
            "category": text,
            "difficulty": Value("float64"),
            "meta": text,  # JSON
        }
    )


def to_row(problem: Problem) -> dict[str, Any]:
    """A problem as a row of data.parquet."""
    return {
        "id": problem.id,
        "question": problem.question,
        "images": [{"bytes": data, "path": None} for data in problem.images],
        "answer": problem.answer,
        "answer_type": problem.answer_type,
        "choices": list(problem.choices),
        "source": problem.source,
        "category": problem.category,
        "difficulty": problem.difficulty,
        "meta": json.dumps(dict(problem.meta), sort_keys=True, ensure_ascii=False),
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
