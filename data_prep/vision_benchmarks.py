"""Readers of the image benchmarks, each in its authors' repository layout and in the hub's.

Every row is marked test-only. Where the pictures were not downloaded the rows come as annotations
alone (meta "annotations_only"): answers to them can be scored, but no model can be run on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.golds import LETTERS, gold_of, infer_answer_type, parse_choices, with_choices
from vlm_rl.data_prep.image_files import ImageRef, ImageStore, image_ref
from vlm_rl.data_prep.records import (
    Converted,
    DroppedRow,
    Fields,
    RowError,
    UsableRow,
    convert_rows,
    id_of,
    text_of,
)
from vlm_rl.data_prep.table_files import find_tables, read_tables
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, AnswerType, Problem


class Pictures:
    """A benchmark's pictures: in the table, beside it, or not there at all."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._absent: bool | None = None

    def of(self, row: Fields, *keys: str) -> tuple[tuple[ImageRef, ...], dict[str, Any]]:
        """The row's picture under the first of `keys` that it has, and what its meta says if there is none."""
        value = next((row[key] for key in keys if row.get(key) not in (None, "")), None)
        if isinstance(value, str):
            if self._absent is None:
                self._absent = self._store.is_empty()
            if self._absent:
                return (), {"annotations_only": True, "image": value}
        if value is None:
            return (), {"annotations_only": True}
        return (image_ref(value, self._store),), {}


def _problem(
    row_id: str, question: str, *, source: str, category: Any = "", meta: dict[str, Any], **rest: Any
) -> Problem:
    return Problem(
        id=f"{source}-{row_id}",
        question=question,
        images=(),
        source=source,
        category=str(category or ""),
        meta={"test_only": True, **{key: value for key, value in meta.items() if value is not None}},
        **rest,
    )


# -- MathVista -------------------------------------------------------------------------------------

_MATHVISTA_FACETS = ("language", "source", "category", "context", "grade")  # its scores are reported by these too


def read_mathvista(path: Path, split: str = "testmini") -> Iterator[UsableRow | DroppedRow]:
    """AI4Math/MathVista: testmini.json (an object of rows) beside images/, or the hub's Parquet.

    The gold of a multiple choice is the option's text; it becomes the option's letter. Options that
    occur twice (pids 587, 740, 781) keep the first letter; texts that are no option stay text.
    """
    tables = find_tables(path, [f"{split}.json", f"data/{split}.json", f"**/{split}-*.parquet", f"{split}*.json"])
    pictures = Pictures(ImageStore(tables[0].parent))

    def convert(row: Fields) -> Converted:
        answer = row.get("answer")
        gold, choices = gold_of(answer), tuple(str(choice) for choice in row.get("choices") or ())
        kind, meta = _mathvista_type(row, choices), {}
        if kind == "choice":
            gold, kind = _letter_of(gold, choices)
        if kind == "float" and row.get("precision") is not None:
            meta["precision"] = int(row["precision"])  # the hub's file holds 1.0, the repository's 1
        unit = row.get("unit") or None
        question = text_of(row, "question") + (f" (Unit: {unit})" if unit else "")
        refs, absent = pictures.of(row, "decoded_image", "image")
        about = row.get("metadata") or {}
        problem = _problem(
            id_of(row, "pid"),
            with_choices(question, choices) if choices else question,
            source="mathvista",
            category=about.get("task"),
            meta={
                "unit": unit,
                "skills": about.get("skills"),
                "answer_type": row.get("answer_type"),
                "reported_by": {name: about[name] for name in _MATHVISTA_FACETS if about.get(name)},
                **meta,
                **absent,
            },
            answer=gold,
            answer_type=kind,
            choices=choices,
        )
        return problem, refs

    return convert_rows(read_tables(tables), convert)


def _mathvista_type(row: Fields, choices: Sequence[str]) -> AnswerType:
    if row.get("question_type") == "multi_choice" and choices:
        return "choice"
    kinds: dict[Any, AnswerType] = {"integer": "integer", "float": "float", "text": "text"}
    return kinds.get(row.get("answer_type"), "expression")  # a list there is a sequence: its order counts


def _letter_of(gold: str, choices: Sequence[str]) -> tuple[str, AnswerType]:
    stripped = [choice.strip() for choice in choices]
    if gold.strip() in stripped:
        return LETTERS[stripped.index(gold.strip())], "choice"
    return gold, "text"


# -- MathVision ------------------------------------------------------------------------------------

_NUMBERED_MARKER = re.compile(r"<image\d+>")


def read_mathvision(path: Path, split: str = "testmini") -> Iterator[UsableRow | DroppedRow]:
    """MathLLMs/MathVision: testmini.jsonl or test.jsonl beside images/, or the hub's Parquet.

    One merged picture per problem even where the text names several: the first `<imageN>` becomes
    the picture, the others stay text.
    """
    tables = find_tables(path, [f"{split}.jsonl", f"data/{split}.jsonl", f"**/{split}-*.parquet", "*.jsonl"])
    pictures = Pictures(ImageStore(tables[0].parent))

    def convert(row: Fields) -> Converted:
        gold, options = gold_of(row.get("answer")), [str(option) for option in row.get("options") or []]
        refs, absent = pictures.of(row, "decoded_image", "image")
        marker = IMAGE_MARKER if refs else "[image]"
        question = _NUMBERED_MARKER.sub(marker, text_of(row, "question"), count=1)
        if options:
            bare = options == list("ABCDE"[: len(options)])  # the options are drawn in the picture
            listed = f"{question}\nChoices: {', '.join(options)}"
            question = listed if bare else with_choices(question, options)
        problem = _problem(
            text_of(row, "id"),
            question,
            source="mathvision",
            category=row.get("subject"),
            meta={"level": row.get("level"), **absent},
            answer=gold,
            answer_type="choice" if options else infer_answer_type(gold),
            choices=tuple(options),
        )
        return problem, refs

    return convert_rows(read_tables(tables), convert)


# -- MathVerse -------------------------------------------------------------------------------------

VISION_ONLY = "Answer the question that is written in the image."


def read_mathverse(path: Path, split: str = "testmini") -> Iterator[UsableRow | DroppedRow]:
    """AI4Math/MathVerse: testmini.json beside images/, or Parquet; five versions of each problem.

    Vision Only rows have an empty question: theirs becomes the picture and one sentence. Text Only rows
    have no picture and need none.
    """
    names = [f"{split}.json", f"**/{split}-*.parquet", f"{split}*.parquet", f"{split}*.json"]
    tables = find_tables(path, names)
    root = tables[0].parent
    pictures = Pictures(ImageStore(root / "images" if (root / "images").is_dir() else root))

    def convert(row: Fields) -> Converted:
        version = text_of(row, "problem_version")
        gold, about = gold_of(row.get("answer")), row.get("metadata") or {}
        is_choice = row.get("question_type") == "multi-choice"
        question = row.get("question") or (VISION_ONLY if version == "Vision Only" else "")
        if not question:
            raise RowError("question_missing", "question is missing")
        text_only = version in ("Text Only", "Text_Only")
        refs, absent = ((), {}) if text_only else pictures.of(row, "image", "decoded_image")
        problem = _problem(
            id_of(row, "sample_index"),
            question,
            source="mathverse",
            category=about.get("subject"),
            meta={
                "version": version,
                "problem": row.get("problem_index"),
                "subfield": about.get("subfield"),
                **absent,
            },
            answer=gold.strip("()") if is_choice else gold,
            answer_type="choice" if is_choice else infer_answer_type(gold),
            choices=parse_choices(question) if is_choice else (),
        )
        return problem, refs

    return convert_rows(read_tables(tables), convert)


# -- LogicVista ------------------------------------------------------------------------------------

_LOGICVISTA_NO_GOLD = {"v1_382"}


def read_logicvista(path: Path, split: str = "test") -> Iterator[UsableRow | DroppedRow]:
    """LogicVista: dataset.json beside images/, or the hub's Parquet. A gold may hold two letters ("A, C")."""
    tables = find_tables(path, ["dataset.json", "data/dataset.json", f"**/{split}-*.parquet", "dataset*.json"])
    root = tables[0].parent
    pictures = Pictures(ImageStore(root / "images" if (root / "images").is_dir() else root))

    def convert(row: Fields) -> Converted:
        key = id_of(row, "key", "id", "index", "question_id")
        if key in _LOGICVISTA_NO_GOLD or (key.startswith("v1_") and not str(row.get("answer") or "").strip()):
            raise RowError("answer_missing", "published without an answer", known=True)
        gold, question = gold_of(row.get("answer")), text_of(row, "question")
        letters = re.fullmatch(r"[A-I](\s*,\s*[A-I])*", gold) is not None
        refs, absent = pictures.of(row, "image", "imagename")
        skills, capability = row.get("skill") or [""], row.get("broad_capability") or row.get("capability")
        problem = _problem(
            key,
            question,
            source="logicvista",
            category=skills if isinstance(skills, str) else skills[0],
            meta={"reported_by": {"capability": capability}, **absent} if capability else absent,
            answer=gold,
            answer_type="choice" if letters else infer_answer_type(gold),
            choices=parse_choices(question) if letters else (),
        )
        return problem, refs

    return convert_rows(_keyed(read_tables(tables)), convert)


def _keyed(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Rows of the hub's file have no id; their number in the published order takes its place."""
    for number, (where, row) in enumerate(rows):
        named = not isinstance(row, dict) or any(
            row.get(key) is not None for key in ("key", "id", "index", "question_id")
        )
        yield where, row if named else {**row, "key": f"v1_{number}"}


# -- We-Math ---------------------------------------------------------------------------------------


def read_wemath(path: Path, split: str = "testmini") -> Iterator[UsableRow | DroppedRow]:
    """We-Math: testmini.json beside the folders 2steps and 3steps, or Parquet. A problem is several rows."""
    tables = find_tables(path, [f"{split}.json", f"data/{split}.json", f"**/{split}-*.parquet"])
    pictures = Pictures(ImageStore(tables[0].parent))

    def convert(row: Fields) -> Converted:
        choices = parse_choices(text_of(row, "option"))
        if not choices:
            raise RowError("options", f"the options cannot be told apart: {row['option']!r:.120}")
        refs, absent = pictures.of(row, "image_path", "image")
        problem = _problem(
            f"{text_of(row, 'ID')}-{text_of(row, 'key')}",
            with_choices(text_of(row, "question"), choices),
            source="wemath",
            category=row.get("knowledge concept"),
            meta={"problem": row["ID"], "key": row["key"], **absent},
            answer=gold_of(row.get("answer")),
            answer_type="choice",
            choices=choices,
        )
        return problem, refs

    return convert_rows(read_tables(tables), convert)


# -- DynaMath --------------------------------------------------------------------------------------

_DYNAMATH_TYPES: dict[str, AnswerType] = {"float": "float", "multiple choice": "choice", "text": "text"}
_VARIANT = re.compile(r"(?:sample_variant|trial)_?(\d+)")


def read_dynamath(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """DynaMath: folders trial1, trial2, ... with a dataset.json each, or the hub's sample_variant*.parquet.

    A seed problem has one variant in each of them.
    """
    found = sorted(path.glob("trial*/dataset.json")) or sorted(path.glob("**/sample_variant*.parquet"))
    tables = [path] if path.is_file() else sorted(found, key=lambda table: (_variant(table), table.name))
    if not tables:
        raise UserError(f"{path}: no trial1/dataset.json there; give the folder that holds trial1, trial2, ...")
    for table in tables:
        pictures, variant = Pictures(ImageStore(table.parent)), _variant(table)

        def convert(row: Fields, pictures: Pictures = pictures, variant: int = variant) -> Converted:
            kind = _DYNAMATH_TYPES.get(row.get("answer_type", ""))
            if kind is None:
                raise RowError("bad_type", f"answer_type {row.get('answer_type')!r} is none of {[*_DYNAMATH_TYPES]}")
            question, seed = text_of(row, "question"), id_of(row, "key", "id")
            refs, absent = pictures.of(row, "decoded_image", "image")
            tolerance = {"tolerance": 0.001} if kind == "float" else {}
            level = row.get("level") or row.get("knowledge_level")
            problem = _problem(
                f"{seed}-v{variant}",
                question,
                source="dynamath",
                category=row.get("subject"),
                meta={"seed": seed, "variant": variant, "level": level, **tolerance, **absent},
                answer=gold_of(row.get("answer") if row.get("answer") is not None else row.get("ground_truth")),
                answer_type=kind,
                choices=parse_choices(question) if kind == "choice" else (),
            )
            return problem, refs

        yield from convert_rows(read_tables([table]), convert)


def _variant(table: Path) -> int:
    found = _VARIANT.search(table.name) or _VARIANT.search(table.parent.name)
    return int(found[1]) if found else 0
