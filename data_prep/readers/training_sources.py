"""Read the public training sets, in the layouts that their authors and the hub publish."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.readers.generic import digest_row
from vlm_rl.data_prep.readers.image_files import ImageStore, image_ref
from vlm_rl.data_prep.readers.row_golds import gold_of, last_box, type_and_choices
from vlm_rl.data_prep.readers.row_limit import load_json, max_row_bytes, too_large
from vlm_rl.data_prep.readers.table_files import find_tables, read_tables
from vlm_rl.data_prep.records import (
    Converted,
    DroppedRow,
    Fields,
    RowError,
    UsableRow,
    convert_rows,
    pass_rate_of,
    text_of,
)
from vlm_rl.types import Problem

# -- ViRL39K ---------------------------------------------------------------------------------------

_NOISE_LINE = re.compile(r"^[ \t]*The above problem is with the following images?:?[ \t]*$\n?", re.M | re.I)
_SLASH_N = re.compile(r"(?:(?<=[.?!:;,>\s)])|\A)/n(?=[A-Z(<\d\s]|\Z)")  # a line break written as "/n", never m/n


def read_virl39k(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Read TIGER-Lab/ViRL39K and the counting tasks: a Parquet file beside its images folder or images.zip.

    `path` is the folder or the Parquet file. `PassRate_32BTrained` becomes the difficulty, -1 where
    it is not annotated.
    """
    tables = find_tables(path, ["39Krelease.parquet", "*.parquet"])
    columns = ["question", "answer", "PassRate_32BTrained", "category", "source", "qid", "image"]
    store = ImageStore(tables[0].parent)

    def convert(row: Fields) -> Converted:
        names = row["image"] or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowError("bad_type", f"image must be a list of paths, not {names!r:.80}")
        gold, question = gold_of(row["answer"]), clean_virl(text_of(row, "question"))
        kind, choices = type_and_choices(gold, question)
        problem = Problem(
            id=text_of(row, "qid"),
            question=question,
            images=(),
            answer=gold,
            answer_type=kind,
            choices=choices,
            source=f"virl39k/{row['source'] or 'unknown'}",
            category=row["category"] or "",
            difficulty=pass_rate_of(row["PassRate_32BTrained"]),
        )
        return problem, [store.find(name) for name in names]

    return convert_rows(read_tables(tables, columns), convert)


def clean_virl(question: str) -> str:
    """Remove the line that only announces images, and turn "/n" into the line break that it stands for."""
    return _SLASH_N.sub("\n", _NOISE_LINE.sub("", question)).strip()


# -- text ------------------------------------------------------------------------------------------


def read_polaris(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Read POLARIS-Project/Polaris-Dataset-53K: problem, answer, difficulty (a pass rate written as text)."""
    tables = find_tables(path, ["*.jsonl", "data/*.jsonl", "*.parquet", "data/*.parquet"])

    def convert(row: Fields) -> Converted:
        gold, question = gold_of(row.get("answer")), text_of(row, "problem")
        kind, choices = type_and_choices(gold, question)
        rate = pass_rate_of(row.get("difficulty"))
        return _text_problem("polaris", row, question, gold, kind=kind, choices=choices, difficulty=rate), ()

    return _with_ids(convert_rows(read_tables(tables), convert), "polaris")


def read_math(path: Path, split: str = "train") -> Iterator[UsableRow | DroppedRow]:
    """Read MATH: Hendrycks' folders (train/algebra/1.json), MATH-lighteval's Parquet, or hiyouga/math12k's.

    The gold is the `answer` column, or the last box of the solution. Rows of the test split are
    marked test-only.
    """
    folder = path / split
    files = sorted(folder.glob("*/*.json")) if path.is_dir() else []
    tables = files or find_tables(
        path, [f"data/{split}-*.parquet", f"{split}-*.parquet", f"**/{split}*.parquet", f"{split}.jsonl"]
    )

    def convert(row: Fields) -> Converted:
        question = text_of(row, "problem")
        gold = gold_of(row["answer"] if row.get("answer") is not None else last_box(text_of(row, "solution")))
        kind, choices = type_and_choices(gold, question)
        meta = {"level": row.get("level")} | ({"test_only": True} if split == "test" else {})
        category = str(row.get("type") or row.get("subject") or "")
        return _text_problem(
            "math", row, question, gold, kind=kind, choices=choices, category=category, meta=meta
        ), ()

    rows = _hendrycks_rows(files, folder) if files else read_tables(tables)
    return _with_ids(convert_rows(rows, convert), f"math-{split}")


def _hendrycks_rows(files: list[Path], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of files that hold a problem each; the file's name is the problem's id."""
    for file in sorted(files, key=lambda file: (file.parent.name, len(file.stem), file.stem)):
        name = file.relative_to(folder).with_suffix("").as_posix()
        try:
            if file.stat().st_size > max_row_bytes():
                raise too_large()
            row: Any = load_json(file.read_text(encoding="utf-8"))
        except RowError as error:
            row = error
        except (OSError, ValueError, RecursionError) as error:
            row = RowError("bad_json", f"is not JSON: {error}")
        yield f"{name}.json", {**row, "unique_id": name} if isinstance(row, dict) else row


def _text_problem(source: str, row: Fields, question: str, gold: str, *, kind: Any, **fields: Any) -> Problem:
    """Return a problem without images; its id is "" if the row has none (see `_with_ids`)."""
    name = next((row[key] for key in ("unique_id", "id", "idx") if row.get(key) not in (None, "")), "")
    identity = f"{source}-{name}" if name != "" else ""
    return Problem(
        id=identity, question=question, images=(), answer=gold, answer_type=kind, **{"source": source, **fields}
    )


def _with_ids(rows: Iterator[UsableRow | DroppedRow], prefix: str) -> Iterator[UsableRow | DroppedRow]:
    """Give rows without an id a digest of their own text, so that no other row can change it."""
    for row in rows:
        if isinstance(row, UsableRow) and not row.problem.id:
            row = replace(row, problem=replace(row.problem, id=f"{prefix}-{digest_row((), row.problem.question)}"))
        yield row


# -- geometry3k ------------------------------------------------------------------------------------


def read_geometry3k(path: Path, split: str = "train") -> Iterator[UsableRow | DroppedRow]:
    """Read hiyouga/geometry3k: Parquet with embedded images, problem, answer; newer files also id and choices.

    Rows of the validation and test splits are marked test-only.
    """
    tables = find_tables(path, [f"data/{split}-*.parquet", f"{split}-*.parquet", f"**/{split}*.parquet"])
    store = ImageStore(tables[0].parent)

    def convert(row: Fields) -> Converted:
        question = text_of(row, "problem")
        gold = gold_of(row.get("answer"))
        kind, choices = type_and_choices(gold, question)
        meta: dict[str, Any] = {} if split == "train" else {"test_only": True}
        images = [image_ref(image, store) for image in row.get("images") or []]
        problem = _text_problem("geometry3k", row, question, gold, kind=kind, choices=choices, meta=meta)
        if not problem.id:  # hundreds of questions read "Find $x$."
            problem = replace(problem, id=f"geometry3k-{split}-{digest_row(images, question, gold)}")
        return problem, images

    return convert_rows(read_tables(tables), convert)
