"""Reading what authors publish: JSON by id, JSON lists, JSON Lines, CSV and our own Parquet, as plain rows.

Rows keep the authors' column names. A row that came from an object of rows carries its key as "_key"; one of a
list carries its place as "_number".
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError
from vlm_rl.scoring.items import Answer

Fields = dict[str, Any]

TEXTS = ("response", "model_response", "prediction", "output", "completion", "model_answer", "short answer", "answer")
_VERDICTS = ("correct", "true_false", "result", "hit", "joker", "judgement")
_RIGHT, _WRONG = ("correct", "true", "1"), ("fail", "false", "wrong", "incorrect", "0")
_TRIAL = re.compile(r"(?:trial|variant|split|sample_variant)[_ -]?(\d+)", re.IGNORECASE)
_VARIANT = re.compile(r"(?i)(?:sample[_ ])?variant[_ -]?(\d+)")
_WRAPPERS = ("data", "results", "rows", "annotations", "responses", "predictions", "outputs")


def read_rows(path: Path) -> list[tuple[str, Fields]]:
    """(where, row) of every row of a file. Raises UserError for what cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        found = list(_rows_of(path))
    except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not found:
        raise UserError(f"{path}: holds no rows")
    return [(f"{path.name} {where}", row) for where, row in found]


def _rows_of(path: Path) -> Iterator[tuple[str, Fields]]:
    if path.suffix == ".parquet":
        present = pq.read_schema(path).names
        rows = pq.read_table(path, columns=[name for name in present if name != "image"]).to_pylist()
        yield from _numbered(rows)
    elif path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**27)  # a response may be long
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        yield from _one_per_variant(_numbered(rows))
    else:
        tree = _parsed(path.read_text(encoding="utf-8-sig"), as_lines=path.suffix == ".jsonl")
        if isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)) in _WRAPPERS:
            tree = next(iter(tree.values()))
        yield from _keyed(tree) if isinstance(tree, dict) else _numbered(tree)


def _parsed(text: str, *, as_lines: bool) -> Any:
    """JSON or JSON Lines, as the file's name says, else the other way round. Raises ValueError, the first way's."""
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
            raise ValueError(f"line {number} is no JSON: {error}") from None
    return rows


def _numbered(rows: Any) -> Iterator[tuple[str, Fields]]:
    if not isinstance(rows, list):
        raise ValueError(f"a table is a list or an object of rows, not {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object: {row!r:.60}")
        yield f"row {number}", {"_number": str(number), **row}


def _one_per_variant(rows: Iterable[tuple[str, Fields]]) -> Iterator[tuple[str, Fields]]:
    """DynaMath's wide table (Question ID, Variant 1, ...) as a row per variant; other rows as they are.

    Its authors publish verdicts in it, not answers: such a cell becomes the row's verdict.
    """
    for where, row in rows:
        cells = {match[1]: row[name] for name in row if (match := _VARIANT.fullmatch(str(name).strip()))}
        if not cells:
            yield where, row
            continue
        name = next((row[key] for key in ("Question ID", "question_id", "id", "ID") if row.get(key)), None)
        if name is None:
            raise ValueError(f"{where} has variants and no 'Question ID': {sorted(map(str, row))[:12]}")
        for variant, cell in cells.items():
            is_verdict = str(cell).strip().lower() in ("correct", "fail")
            text = {"response": "", "result": cell.strip()} if is_verdict else {"response": cell}
            yield f"{where} variant {variant}", {"_key": str(name).strip().lstrip("Qq"), "trial": variant, **text}


def _keyed(tree: Mapping[str, Any]) -> Iterator[tuple[str, Fields]]:
    """Rows of an object by id; a value may be the text alone, several rows, or rows by step."""
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield from ((f"row {key!r}", {"_key": key, **row}) for row in value)
        elif isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
            yield from ((f"row {key!r} {step!r}", {"ID": key, "key": step, **row}) for step, row in value.items())
        elif isinstance(value, dict):
            steps = {step: text for step, text in value.items() if re.fullmatch(r"[23]steps_(\d|multi)", step)}
            if steps:
                yield from ((f"row {key!r}", {"ID": key, "key": s, "response": text}) for s, text in steps.items())
            else:
                yield f"row {key!r}", {"_key": key, **value}
        else:
            yield f"row {key!r}", {"_key": key, "response": "" if value is None else value}


def trial_of(path: Path, place: int) -> str:
    """Which of DynaMath's trials a file belongs to: its folder's or own name says, else its place among the files."""
    for name in (path.stem, path.parent.name):
        if match := _TRIAL.search(name):
            return match[1]
    return str(place)


def answers_in(
    rows: Sequence[tuple[str, Fields]], *, ids: Sequence[str], texts: Sequence[str] = TEXTS, prefix: str = ""
) -> list[Answer]:
    """The answers of a file's rows; repeated ids, or a list in the text column, are samples of one question.

    `ids` are column names (or templates of them, "{ID}-{key}"), tried in order; `prefix` is what our own
    preparation puts in front of an id.
    """
    seen: dict[str, int] = {}
    answers: list[Answer] = []
    for where, row in rows:
        name = str(row["problem_id"]).removeprefix(prefix) if "problem_id" in row else _identity(row, ids, where)
        for text in _texts(row, texts, where):
            sample = seen.get(name, 0)
            seen[name] = sample + 1
            answers.append(_answer(row, name, text, sample))
    return answers


def _identity(row: Fields, ids: Sequence[str], where: str) -> str:
    for template in ids:
        names = re.findall(r"\{(\w+)\}", template) or [template]
        if all(row.get(name) not in (None, "") for name in names):
            if "{" in template:
                return template.format(**{name: _plain(row[name]) for name in names})
            return _plain(row[template])
    raise UserError(f"{where}: no id: wanted one of {', '.join(ids)}; the row has {sorted(row)[:12]}")


def _plain(value: Any) -> str:
    """An id as people write it: 7, 7.0 and " 7 " are one."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _texts(row: Fields, texts: Sequence[str], where: str) -> list[Any]:
    for name in texts:
        if name in row:
            value = row[name]
            return value if isinstance(value, list) else [value]
    if row.get("extraction") is not None:  # the rule starts from it
        return [""]
    raise UserError(f"{where}: no response: wanted one of {', '.join(texts)}; the row has {sorted(row)[:12]}")


def _answer(row: Fields, name: str, text: Any, sample: int) -> Answer:
    extraction = row.get("extraction")
    if isinstance(text, dict):  # DynaMath's reports keep the parsed JSON reply
        extraction, text = str(text.get("short answer", "")), json.dumps(text, ensure_ascii=False)
    return Answer(
        id=name,
        text="" if text is None else str(text),
        sample=sample,
        extraction=str(extraction) if extraction is not None else None,
        published=_published(row),
        length=row.get("length"),
        stop_reason=row.get("stop_reason"),
    )


def _published(row: Fields) -> bool | None:
    for name in _VERDICTS:
        shown = str(row.get(name)).strip().lower()
        if shown in _RIGHT or shown in _WRONG:
            return shown in _RIGHT
    return None
