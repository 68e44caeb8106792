"""Readers of the text benchmarks: one function for all, since they differ in names and in the gold's form.

Every row is marked test-only. A gold is a text, a number (AMC's 27.0 is "27"), the last box of the
solution (Minerva), or a list (OlympiadBench: one string; Minerva in POLARIS' files: alternatives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.golds import gold_of, infer_answer_type, last_box, number_gold
from vlm_rl.data_prep.image_files import ImageStore, image_ref
from vlm_rl.data_prep.records import (
    Converted,
    DroppedRow,
    Fields,
    RowError,
    UsableRow,
    convert_rows,
    text_of,
)
from vlm_rl.data_prep.table_files import find_tables, read_tables
from vlm_rl.types import AnswerType, Problem

_QUESTION = ("problem", "question", "Problem")
_IDS = ("unique_id", "id", "ID", "idx", "problem_idx", "url")


@dataclass(frozen=True, slots=True)
class TextBenchmark:
    """Where a benchmark's files are and how its gold is read; called with a path it is the reader."""

    name: str
    patterns: tuple[str, ...]
    gold: Callable[[Fields], tuple[str, dict[str, Any]]]  # the gold, and what its meta says
    category: tuple[str, ...] = ("subject", "type", "subfield")

    def __call__(self, path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
        tables = find_tables(path, self.patterns)
        store = ImageStore(tables[0].parent)
        return convert_rows(_counted(read_tables(tables)), lambda row: self._convert(row, store))

    def _convert(self, row: Fields, store: ImageStore) -> Converted:
        gold, meta = self.gold(row)
        context = row.get("context")
        question = text_of(row, *_QUESTION)
        pictures = [image_ref(row[key], store) for key in _image_keys(row)]
        problem = Problem(
            id=f"{self.name}-{next((row[key] for key in _IDS if row.get(key) not in (None, '')), row['_number'])}",
            question=f"{context}\n\n{question}" if context else question,
            images=(),
            answer=gold,
            answer_type=meta.pop("type", None) or infer_answer_type(gold),
            source=self.name,
            category=str(next((row[key] for key in self.category if row.get(key)), "")),
            difficulty=-1.0,
            meta={"test_only": True, **({"level": row["level"]} if row.get("level") is not None else {}), **meta},
        )
        return problem, pictures


def _counted(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Rows of files without ids are known by their number in the published order."""
    for number, (where, row) in enumerate(rows):
        yield where, {**row, "_number": number} if isinstance(row, dict) else row


def _image_keys(row: Fields) -> list[str]:
    """image_1 ... image_9 of OlympiadBench's multimodal files, as far as the row has them."""
    return [key for key in (f"image_{number}" for number in range(1, 10)) if row.get(key)]


def _plain_gold(row: Fields) -> tuple[str, dict[str, Any]]:
    return number_gold(row.get("answer") if row.get("answer") is not None else row.get("Answer")), {}


def _minerva_gold(row: Fields) -> tuple[str, dict[str, Any]]:
    """`answer`, or the solution's last box; a list holds alternatives, any of which the grader takes."""
    answer = row.get("answer")
    if isinstance(answer, list):
        golds = list(dict.fromkeys(gold_of(item) for item in answer))
        if not golds:
            raise RowError("answer_missing", "the list of answers is empty")
        return golds[0], {"alternatives": golds[1:]} if golds[1:] else {}
    return gold_of(answer if answer is not None else last_box(text_of(row, "solution"))), {}


def _olympiad_gold(row: Fields) -> tuple[str, dict[str, Any]]:
    """One string, which holds several answers where `is_multiple_answer` says so."""
    answers = row.get("final_answer")
    if not isinstance(answers, list) or len(answers) != 1:
        raise RowError("bad_type", f"final_answer must be a list of one text, not {answers!r:.60}")
    gold = gold_of(answers[0])
    kind: AnswerType | None = "list" if row.get("is_multiple_answer") else None
    meta: dict[str, Any] = {"type": kind, "kind": row.get("answer_type")}
    if row.get("unit"):
        meta["unit"] = str(row["unit"])
    tolerance = _number(row.get("error"))
    if tolerance is not None:
        meta |= {"tolerance": tolerance, "type": "float"}
    return gold, meta


def _number(text: Any) -> float | None:
    """The tolerance of a row, as far as it is one number; a list of them belongs to several answers."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


TEXT_BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        TextBenchmark("math500", ("test.jsonl", "**/test-*.parquet", "math500*.jsonl", "*.parquet"), _plain_gold),
        TextBenchmark(
            "aime24", ("**/train-*.parquet", "aime24*.jsonl", "aime_2024*.parquet", "*.jsonl"), _plain_gold
        ),
        TextBenchmark(
            "aime25", ("aime2025*.jsonl", "test.jsonl", "**/*.parquet", "aime25*.jsonl", "*.jsonl"), _plain_gold
        ),
        TextBenchmark("amc23", ("**/t*-*.parquet", "amc23*.jsonl", "amc*.parquet", "*.jsonl"), _plain_gold),
        TextBenchmark(
            "minerva", ("**/test-*.parquet", "minerva*.jsonl", "minerva*.parquet", "*.jsonl"), _minerva_gold
        ),
        TextBenchmark(
            "olympiadbench",
            ("olympiadbench*.jsonl", "**/*OE_*_maths_en_COMP*.parquet", "**/t*-*.parquet"),
            _olympiad_gold,
        ),
    )
}
"""By name, each the reader of one benchmark."""
