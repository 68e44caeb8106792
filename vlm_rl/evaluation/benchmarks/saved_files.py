"""Read files that authors publish as plain rows: JSON by id, JSON lists, JSON Lines, CSV and our own Parquet.

Rows keep the authors' column names. A row of an object of rows has its key in "_key", a row of a list its place in
"_number". A value in the place of a row is in "_value".
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError

Fields = dict[str, Any]

_TRIAL = re.compile(r"(?i)(?:sample[_ -]?)?(?:trial|variant|split)[_ -]?(\d+)")
_STEP = re.compile(r"[23]steps_(\d|multi)")
_WRAPPERS = ("data", "results", "rows", "annotations", "responses", "predictions", "outputs")


def read_rows(path: Path) -> list[tuple[str, Fields]]:
    """Return (where, row) of every row of a file. Raises UserError for what cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; check the path")
    try:
        rows = list(_rows_of(path))
    except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise UserError(f"{path}: holds no rows; give a file that has some")
    return [(f"{path.name} {where}", row) for where, row in rows]


def _rows_of(path: Path) -> Iterator[tuple[str, Fields]]:
    if path.suffix == ".parquet":
        present = pq.read_schema(path).names
        rows = pq.read_table(path, columns=[name for name in present if name != "image"]).to_pylist()
        yield from _numbered(rows)
    elif path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**27)  # a response may be long
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        for number, row in enumerate(rows):
            if None in row:
                raise ValueError(f"row {number} has more cells than the header: quote answers that hold a separator")
        yield from _one_per_variant(_numbered(rows))
    else:
        tree = _parsed(path.read_text(encoding="utf-8-sig"), as_lines=path.suffix == ".jsonl")
        if isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)) in _WRAPPERS:
            tree = next(iter(tree.values()))
        yield from _keyed(tree) if isinstance(tree, dict) else _numbered(tree)


def _parsed(text: str, *, as_lines: bool) -> Any:
    """Parse as JSON or JSON Lines: as the suffix says, else as the other. Raises the first attempt's ValueError."""
    first, second = (_parsed_lines, json.loads) if as_lines else (json.loads, _parsed_lines)
    try:
        tree = first(text)
        if as_lines and len(tree) == 1 and isinstance(tree[0], list):  # a list of rows on one line
            return tree[0]
        return tree
    except ValueError as error:
        try:
            return second(text)
        except ValueError:
            raise error from None


def _parsed_lines(text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
    return rows


def _numbered(rows: Any) -> Iterator[tuple[str, Fields]]:
    if not isinstance(rows, list):
        raise ValueError(f"a table is a list or an object of rows, not {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object: {row!r:.60}")
        yield f"row {number}", {"_number": str(number), **row}


def _one_per_variant(rows: Iterable[tuple[str, Fields]]) -> Iterator[tuple[str, Fields]]:
    """Yield a row per variant of DynaMath's wide table (Question ID, Variant 1, ...); other rows as they are.

    The authors publish verdicts in it instead of answers: such a cell becomes the row's verdict. They number Q1, Q2.
    """
    for where, row in rows:
        name = next((row[key] for key in ("Question ID", "question_id", "id", "ID") if row.get(key)), None)
        named = {} if name is None else {"_key": re.sub(r"^[Qq](?=\d+$)", "", str(name).strip())}
        cells = {match[1]: row[key] for key in row if (match := _TRIAL.fullmatch(str(key).strip()))}
        if not cells:
            yield where, named | row
            continue
        if not named:
            raise ValueError(f"{where} has variants and no 'Question ID': {sorted(map(str, row))[:12]}")
        for variant, cell in cells.items():
            is_verdict = str(cell).strip().lower() in ("correct", "fail")
            text = {"_value": "", "result": cell.strip()} if is_verdict else {"_value": cell}
            yield f"{where} variant {variant}", {**named, "trial": variant, **text}


def _keyed(tree: Mapping[str, Any]) -> Iterator[tuple[str, Fields]]:
    """Yield the rows of an object by id; a value may be the text alone, several rows, or rows by step."""
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield from ((f"row {key!r}", {"_key": key, **row}) for row in value)
        elif isinstance(value, dict) and value and all(_is_part(*item) for item in value.items()):
            yield from ((f"row {key!r} {part!r}", {**_nested_names(key, part), **row}) for part, row in value.items())
        elif isinstance(value, dict):
            steps = {step: text for step, text in value.items() if _STEP.fullmatch(step)}
            if steps:
                yield from ((f"row {key!r}", {"ID": key, "key": s, "_value": text}) for s, text in steps.items())
            else:
                yield f"row {key!r}", {"_key": key, **value}
        else:
            yield f"row {key!r}", {"_key": key, "_value": value}


def _is_part(name: str, row: Any) -> bool:
    """Say whether this is a row, named by its step, trial or seed; a column may hold an object, too."""
    return isinstance(row, dict) and bool(name.isdigit() or _STEP.fullmatch(name) or _TRIAL.fullmatch(name))


def _nested_names(outer: str, inner: str) -> Fields:
    """Return the id of a row two objects deep: DynaMath's trial and seed in either order, or We-Math's ID and key."""
    if match := _TRIAL.fullmatch(outer):
        return {"_key": inner, "trial": match[1]}
    if match := _TRIAL.fullmatch(inner):
        return {"_key": outer, "trial": match[1]}
    return {"ID": outer, "key": inner}


def with_trial(row: Fields, path: Path, place: int) -> Fields:
    """Return the row with "trial": which of DynaMath's trials it belongs to.

    The row says so (trial or variant), else the name of its file or folder (trial3, 3.json), else the file's place.
    """
    said = row.get("trial", row.get("variant"))
    if said not in (None, ""):
        return {**row, "trial": str(said).lower().removeprefix("trial").removeprefix("variant").strip(" _-")}
    match = _TRIAL.search(path.stem) or re.fullmatch(r"0*(\d+)", path.stem) or _TRIAL.fullmatch(path.parent.name)
    return {**row, "trial": match[1] if match else str(place)}
