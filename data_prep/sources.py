"""Readers of the public data sets, each in its authors' own layout: files in, Problems out.

A reader yields a `Row` for every usable row and a `Dropped` for every other one, so that
in = kept + dropped closes. To add a data set: write a reader, name it in SOURCES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_prep.golds import infer_answer_type, parse_choices, unwrap_gold, with_choices
from data_prep.rows import (
    Dropped,
    Fields,
    Row,
    RowError,
    convert_rows,
    json_lines,
    json_rows,
    one_file,
    parquet_rows,
    read_inside,
    text_of,
)
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, AnswerType, Problem

Reader = Callable[[Path], Iterator[Row | Dropped]]


def read_virl39k(path: Path) -> Iterator[Row | Dropped]:
    """TIGER-Lab/ViRL39K (and our toy set): one Parquet file beside its images folder.

    `path` is the folder or the Parquet file. `PassRate_32BTrained` becomes the difficulty, -1 where
    it is not annotated.
    """
    table = one_file(path, "39Krelease.parquet", "*.parquet")
    columns = ["question", "answer", "PassRate_32BTrained", "category", "source", "qid", "image"]

    def convert(row: Fields) -> Problem:
        names = row["image"] or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowError("bad_type", f"image must be a list of paths, not {names!r:.80}")
        gold = _gold(row["answer"])
        question = text_of(row, "question")
        kind, choices = _type_and_choices(gold, question)
        rate = row["PassRate_32BTrained"]
        return Problem(
            id=text_of(row, "qid"),
            question=question,
            images=tuple(read_inside(table.parent, name) for name in names),
            answer=gold,
            answer_type=kind,
            choices=choices,
            source=f"virl39k/{row['source'] or 'unknown'}",
            category=row["category"] or "",
            difficulty=float(rate) if isinstance(rate, float) and 0 <= rate <= 1 else -1.0,
        )

    return convert_rows(parquet_rows(table, columns), convert)


DAPO_PREFIX = re.compile(
    r"\ASolve the following math problem step by step\..*?where \$Answer is the answer to the problem\.\s*", re.S
)
DAPO_SUFFIX = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")


def read_dapo(path: Path) -> Iterator[Row | Dropped]:
    """BytedTsinghua-SIA/DAPO-Math-17k: text only, every problem about a hundred times.

    The instruction around the problem is removed; a problem is kept once, and not at all where its
    copies disagree about the answer. Files with `extra_info.raw_problem` are DAPO's validation set
    (AIME): their rows are marked test-only.
    """
    table = one_file(path, "data/dapo-math-17k.parquet", "*.parquet")
    first: dict[str, tuple[str, Problem]] = {}
    disputed: set[str] = set()
    for item in convert_rows(parquet_rows(table, ["prompt", "reward_model", "extra_info"]), _dapo_problem):
        if isinstance(item, Dropped):
            yield item
            continue
        problem = item.problem
        if problem.question not in first:
            first[problem.question] = (item.where, problem)
            continue
        if first[problem.question][1].answer != problem.answer:
            disputed.add(problem.question)
        yield Dropped(item.where, "duplicate", "the problem appeared before", known=True)
    for question, (where, problem) in first.items():
        if question in disputed:
            yield Dropped(where, "gold_conflict", "copies of this problem disagree about the answer", known=True)
        else:
            yield Row(where, problem)


def _dapo_problem(row: Fields) -> Problem:
    prompt, model, extra = row["prompt"], row["reward_model"], row["extra_info"]
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], dict):
        raise RowError("bad_type", f"prompt must be a list of one message, not {prompt!r:.80}")
    if not isinstance(model, dict) or not isinstance(extra, dict):
        raise RowError("bad_type", "reward_model and extra_info must be objects")
    question = DAPO_SUFFIX.sub("", DAPO_PREFIX.sub("", text_of(prompt[0], "content"))).strip()
    gold = _gold(model.get("ground_truth"))
    index = extra.get("index")  # a UUID in the training file, a number in the validation file
    if index is None:
        raise RowError("id_missing", "extra_info.index is missing")
    return Problem(
        id=f"dapo-{index}",
        question=question,
        images=(),
        answer=gold,
        answer_type=infer_answer_type(gold),
        source="dapo",
        category="math",
        meta={"test_only": True} if "raw_problem" in extra else {},
    )


_NUMBERED_MARKER = re.compile(r"<image\d+>")


def read_mathvision(path: Path) -> Iterator[Row | Dropped]:
    """MathLLMs/MathVision: testmini.jsonl or test.jsonl beside its images folder.

    One merged picture per problem even where the text names several: the first `<imageN>` becomes
    the picture, the others stay text.
    """
    table = one_file(path, "testmini.jsonl", "*.jsonl")

    def convert(row: Fields) -> Problem:
        gold, options = _gold(row.get("answer")), [str(option) for option in row.get("options") or []]
        question = _NUMBERED_MARKER.sub(IMAGE_MARKER, text_of(row, "question"), count=1)
        if options:
            bare = options == list("ABCDE"[: len(options)])  # the options are drawn in the picture
            listed = f"{question}\nChoices: {', '.join(options)}"
            question = listed if bare else with_choices(question, options)
        return Problem(
            id=f"mathvision-{text_of(row, 'id')}",
            question=question,
            images=(read_inside(table.parent, text_of(row, "image")),),
            answer=gold,
            answer_type="choice" if options else infer_answer_type(gold),
            choices=tuple(options),
            source="mathvision",
            category=str(row.get("subject") or ""),
            meta={"test_only": True, "level": row.get("level")},
        )

    return convert_rows(json_lines(table), convert)


_DYNAMATH_TYPES: dict[str, AnswerType] = {"float": "float", "multiple choice": "choice", "text": "text"}


def read_dynamath(path: Path) -> Iterator[Row | Dropped]:
    """DynaMath: folders trial1, trial2, ... with a dataset.json each; a seed problem has one variant in each."""
    tables = sorted(path.glob("trial*/dataset.json"), key=lambda table: _trial(table))
    if not tables:
        raise UserError(f"{path}: no trial1/dataset.json there; give the folder that holds trial1, trial2, ...")
    for table in tables:

        def convert(row: Fields, table: Path = table) -> Problem:
            kind = _DYNAMATH_TYPES.get(row.get("answer_type", ""))
            if kind is None:
                raise RowError("bad_type", f"answer_type {row.get('answer_type')!r} is none of {[*_DYNAMATH_TYPES]}")
            question = _picture_first(text_of(row, "question"))
            tolerance = {"tolerance": 0.001} if kind == "float" else {}
            return Problem(
                id=f"dynamath-{row['key']}-v{_trial(table)}",
                question=question,
                images=(read_inside(table.parent, text_of(row, "image")),),
                answer=_gold(row.get("answer")),
                answer_type=kind,
                choices=parse_choices(question) if kind == "choice" else (),
                source="dynamath",
                category=str(row.get("subject") or ""),
                meta={
                    "test_only": True,
                    "seed": row["key"],
                    "variant": _trial(table),
                    "level": row.get("level"),
                    **tolerance,
                },
            )

        yield from convert_rows(json_rows(table), convert)


def read_wemath(path: Path) -> Iterator[Row | Dropped]:
    """We-Math: testmini.json beside the folders 2steps and 3steps. A problem is several rows of one ID."""
    table = one_file(path, "testmini.json", "*.json")

    def convert(row: Fields) -> Problem:
        choices = parse_choices(text_of(row, "option"))
        if not choices:
            raise RowError("options", f"the options cannot be told apart: {row['option']!r:.120}")
        return Problem(
            id=f"wemath-{text_of(row, 'ID')}-{text_of(row, 'key')}",
            question=_picture_first(with_choices(text_of(row, "question"), choices)),
            images=(read_inside(table.parent, text_of(row, "image_path")),),
            answer=_gold(row.get("answer")),
            answer_type="choice",
            choices=choices,
            source="wemath",
            category=str(row.get("knowledge concept") or ""),
            meta={"test_only": True, "problem": row["ID"], "key": row["key"]},
        )

    return convert_rows(json_rows(table), convert)


_LOGICVISTA_NO_GOLD = {"v1_382"}


def read_logicvista(path: Path) -> Iterator[Row | Dropped]:
    """LogicVista: dataset.json beside its images folder. A gold may hold two letters ("A, C")."""
    table = one_file(path, "dataset.json", "dataset*.json")

    def convert(row: Fields) -> Problem:
        if row["key"] in _LOGICVISTA_NO_GOLD:
            raise RowError("answer_missing", "published without an answer", known=True)
        gold, question = _gold(row.get("answer")), _picture_first(text_of(row, "question"))
        letters = re.fullmatch(r"[A-I](\s*,\s*[A-I])*", gold) is not None
        skills = row.get("skill") or [""]
        return Problem(
            id=f"logicvista-{row['key']}",
            question=question,
            images=(read_inside(table.parent / "images", text_of(row, "imagename")),),
            answer=gold,
            answer_type="choice" if letters else infer_answer_type(gold),
            choices=parse_choices(question) if letters else (),
            source="logicvista",
            category=str(skills[0]),
            meta={"test_only": True},
        )

    return convert_rows(json_rows(table), convert)


def _picture_first(question: str) -> str:
    """For layouts that name the picture in a column and never in the question."""
    return f"{IMAGE_MARKER}\n{question}"


def _type_and_choices(gold: str, question: str) -> tuple[AnswerType, tuple[str, ...]]:
    kind = infer_answer_type(gold)
    return kind, parse_choices(question) if kind == "choice" else ()


def _gold(answer: Any) -> str:
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise RowError("answer_missing", "the answer is missing")
    if not isinstance(answer, str):
        raise RowError("bad_type", f"the answer must be text, not {type(answer).__name__} {answer!r:.40}")
    gold = unwrap_gold(answer)
    if gold is None:
        raise RowError("gold_broken", f"the answer's boxes or braces do not close: {answer!r:.80}")
    if not gold:
        raise RowError("answer_missing", f"the answer is empty: {answer!r:.40}")
    return gold


def _trial(table: Path) -> int:
    digits = table.parent.name.removeprefix("trial")
    return int(digits) if digits.isdigit() else 0


SOURCES: dict[str, Reader] = {
    "virl39k": read_virl39k,
    "dapo": read_dapo,
    "mathvision": read_mathvision,
    "dynamath": read_dynamath,
    "wemath": read_wemath,
    "logicvista": read_logicvista,
}
