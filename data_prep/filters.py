"""Which rows stay: checks of one row alone, and duplicates among rows."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_rl.data_prep.options import GoldCheck, Options, TokenCount
from vlm_rl.data_prep.pictures import Blank, Typeset
from vlm_rl.data_prep.records import Dropped, Row, RowError
from vlm_rl.errors import UserError
from vlm_rl.toy.tiny_model import CONTROL_TOKENS
from vlm_rl.types import IMAGE_MARKER, Problem

if TYPE_CHECKING:
    from vlm_rl.data_prep.shards import Kept

NEAR_BITS = 32  # of 256: resizing or encoding a picture anew changes fewer, another picture some 100
TYPESET_QUESTION = f"{IMAGE_MARKER}\nSolve the problem in the image."


# -- one row ---------------------------------------------------------------------------------------


def screen_row(row: Row, options: Options, gold_check: GoldCheck | None) -> Row:
    """The row as it goes on to its pictures. Raises RowError if a filter that needs none drops it."""
    problem = row.problem
    for token in CONTROL_TOKENS:
        if token in problem.question:
            raise RowError("control_token", f"the question holds the model's control token {token}")
    if not problem.test_only:
        if problem.answer_type in options.exclude_types:
            raise RowError("answer_type", f"answers of type {problem.answer_type} are excluded", known=True)
        rate = problem.difficulty
        if rate >= 0 and not options.min_pass_rate <= rate <= options.max_pass_rate:
            wanted = f"{options.min_pass_rate} to {options.max_pass_rate}"
            raise RowError("pass_rate", f"the pass rate {rate:.4g} is outside {wanted}", known=True)
    if gold_check is not None and not gold_check(problem):
        if not problem.test_only:
            detail = f"the answer {problem.answer!r:.60} is not graded right against itself"
            raise RowError("gold_unverified", detail, known=True)
        row = replace(row, problem=replace(problem, meta={**problem.meta, "gold_unverified": True}))
    return _with_text_image(row, options)


def _with_text_image(row: Row, options: Options) -> Row:
    """A problem without pictures gets the one that the options ask for."""
    problem = row.problem
    if row.pictures or options.text_image == "none" or problem.meta.get("annotations_only"):
        return row
    if options.text_image == "blank":
        problem = replace(
            problem, question=f"{IMAGE_MARKER}\n{problem.question}", meta={**problem.meta, "blank_image": True}
        )
        return replace(row, problem=problem, pictures=(Blank(),))
    text = problem.question
    meta = {**problem.meta, "typeset_image": True, "typeset_text": text}
    return replace(row, problem=replace(problem, question=TYPESET_QUESTION, meta=meta), pictures=(Typeset(text),))


def cached(gold_check: GoldCheck) -> GoldCheck:
    """The check made once for each different gold: many rows say "B" or "12"."""
    known: dict[tuple[object, ...], bool] = {}

    def check(problem: Problem) -> bool:
        rules = tuple(problem.meta.get(key) for key in ("precision", "tolerance", "unit"))
        key = (problem.answer, problem.answer_type, problem.choices, rules)
        if key not in known:
            if len(known) > 100_000:
                known.clear()
            known[key] = gold_check(problem)
        return known[key]

    return check


def count_or_none(count_tokens: TokenCount | None, problem: Problem) -> int:
    """Tokens of the prompt with each image as one; -1 where nothing counts them. Raises RowError."""
    try:
        return -1 if count_tokens is None else count_tokens(problem)
    except UserError as error:  # a text that forms one of this tokenizer's control tokens
        raise RowError("control_token", str(error)) from None


# -- among rows ------------------------------------------------------------------------------------

_IGNORED = re.compile(r"\s|\$|\\[,;:! ]|\\(?:left|right|displaystyle|mathrm|text)(?![a-z])|[{}]")


def normalised(text: str) -> str:
    """Text without what two copies of a problem may differ in: case, spacing, dollars, braces, a final stop."""
    return _IGNORED.sub("", unicodedata.normalize("NFKC", text).casefold()).rstrip(".?!:")


def text_key(question: str, drawn_text: str = "") -> str:
    """Digest of the normalised question; `drawn_text` is what stands in a picture that we drew."""
    return hashlib.blake2b(normalised(question + drawn_text).encode(), digest_size=12).hexdigest()


def duplicates(rows: Sequence[Kept]) -> dict[int, Dropped]:
    """Position -> why it goes, of the training rows that repeat an earlier one.

    Same text and the very same pictures: one stays, or none where the golds disagree. Same text and
    pictures that only look the same (NEAR_BITS): the later one goes if its gold agrees; with another
    gold it is another problem, a diagram with another number in it.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if not row.test_only:
            groups[row.text_key].append(index)
    found: dict[int, Dropped] = {}
    for members in groups.values():
        if len(members) > 1:
            found.update(_exact(members, rows))
            found.update(_near([index for index in members if index not in found], rows))
    return found


def _exact(members: Sequence[int], rows: Sequence[Kept]) -> Iterator[tuple[int, Dropped]]:
    same: Mapping[tuple[str, ...], list[int]] = defaultdict(list)
    for index in members:
        same[tuple(rows[index].sha256s)].append(index)
    for copies in same.values():
        first = rows[copies[0]]
        golds = {normalised(rows[index].answer) for index in copies}
        if len(golds) > 1:
            votes = ", ".join(sorted({rows[index].answer for index in copies}))
            detail = f"copies of this problem ({first.id} first) disagree about the answer: {votes:.200}"
            yield from ((index, Dropped(rows[index].where, "gold_conflict", detail, known=True)) for index in copies)
        else:
            detail = f"the same problem and pictures as {first.id}"
            yield from ((i, Dropped(rows[i].where, "duplicate", detail, known=True)) for i in copies[1:])


def _near(members: Sequence[int], rows: Sequence[Kept]) -> Iterator[tuple[int, Dropped]]:
    stay: list[int] = []
    for index in members:
        row = rows[index]
        twin = next((i for i in stay if _looks_the_same(row, rows[i])), None)
        if twin is None:
            stay.append(index)
        else:
            detail = f"the same text as {rows[twin].id}, and pictures that look the same"
            yield index, Dropped(row.where, "near_duplicate", detail, known=True)


def _looks_the_same(row: Kept, other: Kept) -> bool:
    if len(row.phashes) != len(other.phashes) or normalised(row.answer) != normalised(other.answer):
        return False
    pairs = zip(row.phashes, other.phashes, strict=True)
    return all((int(a, 16) ^ int(b, 16)).bit_count() <= NEAR_BITS for a, b in pairs)


def hash_words(phashes: Sequence[str]) -> np.ndarray:
    """Perceptual hashes as uint64 [n, 4]."""
    return np.frombuffer(b"".join(map(bytes.fromhex, phashes)), dtype=np.uint64).reshape(-1, 4)
