"""Make the sets of pictures that a small vision-language model learns to see from.

python -m vlm_rl.data_prep.picture_sets runs/pictures        # needs easy-vqa: make real

runs/pictures/traces        drawn pictures and easy-VQA's training pictures, with a response each, for `vlm-rl sft`
runs/pictures/heldout       drawn pictures that are in no trace, with a response each
runs/pictures/easy_vqa      easy-VQA's test questions

A study of length has sets of its own, of drawn pictures alone: traces in four styles, train and heldout.

easy-VQA (MIT, https://github.com/vzhou842/easy-VQA) asks about one shape in one colour, in words of its own.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.generic import Columns, GenericSet
from vlm_rl.data_prep.word_sets import NUM_HELDOUT, NUM_TRACES, NUM_TRAIN, StyledSets
from vlm_rl.errors import UserError
from vlm_rl.toy.counting_task import respond
from vlm_rl.toy.drawn_pictures import (
    COLOURS,
    SHAPES,
    SIDE,
    PictureQuestion,
    make_questions,
    make_styled_traces,
)
from vlm_rl.toy.smollm import INSTALL_PICTURES

# One question is asked of many pictures, and easy-VQA's have 64 x 64 pixels.
_MIXED = Options(keep_duplicates=True, min_pixels=SIDE * SIDE)
_DRAWN = Options(keep_duplicates=True)
_HEADER = ("id", "question", "answer", "image", "trace")
_Row = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class PictureSets:
    """Prepared sets of pictures."""

    traces: Path
    heldout: Path
    easy_vqa: Path


@dataclass(frozen=True, slots=True)
class PictureCounts:
    """How many questions each part has."""

    drawn: int = 16_000
    published: int = 16_000  # easy-VQA's training questions
    heldout: int = 256
    test: int = 1_000  # easy-VQA's test questions


def make_picture_sets(out: Path, *, seed: int = 0, counts: PictureCounts = PictureCounts()) -> PictureSets:
    """Make the sets below the folder `out`; those that exist are kept.

    Args:
        out: the folder.
        seed: of the drawn pictures, and of which published questions are taken.
        counts: the questions of each part.

    Raises:
        UserError: easy-vqa is not installed.
    """
    if find_spec("easy_vqa") is None:
        raise UserError(f"easy-vqa is not installed: {INSTALL_PICTURES}")
    sets = PictureSets(out / "traces", out / "heldout", out / "easy_vqa")
    if not sets.traces.exists():
        raw = _new(out / "raw" / "traces")
        drawn = make_questions(counts.drawn, seed=seed, split="train")
        rows = [*_drawn(raw, drawn, [item.trace for item in drawn]), *_published(raw, counts.published, "train")]
        _prepare(raw, sets.traces, rows, response=True)
    if not sets.heldout.exists():
        raw = _new(out / "raw" / "heldout")
        drawn = make_questions(counts.heldout, seed=seed, split="heldout")
        _prepare(raw, sets.heldout, _drawn(raw, drawn, [item.trace for item in drawn]), response=True)
    if not sets.easy_vqa.exists():
        raw = _new(out / "raw" / "easy_vqa")
        _prepare(raw, sets.easy_vqa, _published(raw, counts.test, "test"), response=False)
    return sets


def make_styled_sets(
    out: Path, *, seed: int = 0, traces: int = NUM_TRACES, train: int = NUM_TRAIN, heldout: int = NUM_HELDOUT
) -> StyledSets:
    """Make sets of drawn pictures below the folder `out`, with traces in the four styles; those that exist are kept.

    Args:
        out: the folder.
        seed: of the pictures and the traces.
        traces, train, heldout: the questions of each set.
    """
    sets = StyledSets(out / "traces", out / "train", out / "heldout")
    for folder, count in ((sets.traces, traces), (sets.train, train), (sets.heldout, heldout)):
        if not folder.exists():
            raw, questions = _new(out / "raw" / folder.name), make_questions(count, seed=seed, split=folder.name)
            rows = _drawn(raw, questions, make_styled_traces(questions, seed=seed))
            _prepare(raw, folder, rows, response=folder == sets.traces, options=_DRAWN)
    return sets


def seen(question: str, answer: str, colour: str, shape: str) -> str:
    """Return a response that says what the picture shows, and then answers.

    Args:
        question, answer: easy-VQA's.
        colour, shape: what is in the picture.
    """
    shown = f"The picture shows a {colour} {shape}."
    if answer not in ("yes", "no"):
        return respond(f"{shown} So the answer is {answer}.", answer)
    words = question.rstrip("?").split()
    asked = next(word for word in words if word in COLOURS or word in SHAPES)
    is_there = asked in (colour, shape)
    found = f"It is {'' if is_there else 'not '}{'a ' if asked in SHAPES else ''}{asked}"
    denied = " The question is whether that is missing." if _is_negated(question) else ""
    return respond(f"{shown} {found}.{denied} So the answer is {answer}.", answer)


def _drawn(raw: Path, questions: Sequence[PictureQuestion], traces: Sequence[str]) -> Iterable[_Row]:
    for item, trace in zip(questions, traces, strict=True):
        (raw / f"{item.id}.png").write_bytes(item.png)
        yield item.id, item.question, item.answer, f"{item.id}.png", trace


def _published(raw: Path, count: int, split: Literal["train", "test"]) -> Iterable[_Row]:
    """Return easy-VQA's questions, spread over the split, with the pictures copied into `raw`."""
    easy_vqa = importlib.import_module("easy_vqa")
    get = {name: getattr(easy_vqa, f"get_{split}_{name}") for name in ("questions", "image_paths")}
    questions, paths = list(zip(*get["questions"](), strict=True)), get["image_paths"]()
    shapes, colours = (_answered(questions, names) for names in (SHAPES, tuple(COLOURS)))
    known = [row for row in enumerate(questions) if row[1][2] in shapes and row[1][2] in colours]
    every = max(1, len(known) // count)
    for number, (question, answer, picture) in known[::every][:count]:
        name = f"published-{picture}.png"
        if not (raw / name).exists():
            shutil.copyfile(paths[picture], raw / name)
        text = seen(question, answer, colours[picture], shapes[picture])
        yield f"published-{split}-{number}", question, answer, name, text


def _answered(questions: Sequence[tuple[str, str, int]], names: Sequence[str]) -> dict[int, str]:
    """Return picture -> which of the names it shows, of the pictures whose questions tell."""
    shown: dict[int, str] = {}
    for question, answer, picture in questions:
        if answer in names:
            shown[picture] = answer
        asked = next((name for name in names if name in question.rstrip("?").split()), None)
        if asked and _is_affirmed(question, answer):
            shown[picture] = asked
    return shown


def _is_affirmed(question: str, answer: str) -> bool:
    """Tell whether the answer to a question of yes or no says that what is asked about is there."""
    return answer == ("no" if _is_negated(question) else "yes")


def _is_negated(question: str) -> bool:
    return bool({"no", "not"} & set(question.split()))


def _new(raw: Path) -> Path:
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    return raw


def _prepare(
    raw: Path, folder: Path, rows: Iterable[Sequence[str]], *, response: bool, options: Options = _MIXED
) -> None:
    with (raw / "questions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_HEADER, *rows])
    columns = Columns(
        question="question", answer="answer", id="id", images="image", response="trace" if response else ""
    )
    mapping = GenericSet(path=".", files=["questions.csv"], source="pictures", columns=columns)
    prepare("generic", raw, folder, options, mapping=mapping)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of the sets")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn pictures")
    options = parser.parse_args()
    make_picture_sets(options.out, seed=options.seed)


if __name__ == "__main__":
    main()
