r"""Sets, tuples, intervals and bare lists: how they are written, and which of them may be the same.

\{1,2\}  set: any order, duplicates count once      (1,2)  tuple: in order (or an open interval)
[1,2]    bracket: in order (or a closed interval)   (1,2]  interval: its ends must agree
1, 2     bare: any order for the answer type `list`, else in order
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from vlm_rl.grading.latex import canonical, enclosed, split_top
from vlm_rl.grading.number_words import parse_words
from vlm_rl.grading.quantities import quantity
from vlm_rl.grading.rational import parse_rational
from vlm_rl.types import AnswerType

Kind = Literal["set", "tuple", "bracket", "interval", "bare"]

_COMMAS = frozenset(",;")
_SIGNED = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_WORDS_AS_COMMAS = re.compile(r" ?,? (?:and|or) |\\(?:lor|vee|land|wedge)(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})?(?= ?=)")
_BUILDER = re.compile(r"\\mid|[|:]")


@dataclass(frozen=True, slots=True)
class Collection:
    """The items of a collection, as texts."""

    kind: Kind
    items: list[str]
    ends: str = ""  # the brackets of an interval

    @property
    def distinct_items(self) -> list[str]:
        return list({item_key(item): item for item in self.items}.values())


def collection(text: str, answer_type: AnswerType) -> Collection | None:
    """What `clean` text lists, or None if it is one value."""
    if text == "\\emptyset":
        return Collection("set", [])
    if len(_SIGNED.findall(text)) == 1 and not split_top(text, _COMMAS)[1:]:
        parts = [_SIGNED.sub(sign, text).strip().removeprefix("+").strip() for sign in "+-"]
        return Collection("set", parts)
    if (outer := enclosed(text)) is not None:
        return _enclosed(outer, answer_type)
    taken = quantity(text)
    if (answer_type != "list" or taken.unit) and as_rational(taken.body) is not None:
        return None  # 1,234 is a number, and so is $1,234 in a list
    items = bare_items(text)
    return Collection("bare", items) if len(items) > 1 else None


def bare_items(text: str) -> list[str]:
    """The parts between top-level commas, semicolons and the words and, or."""
    items = split_top(_WORDS_AS_COMMAS.sub(", ", text), _COMMAS)
    return items[:-1] if len(items) > 2 and not items[-1] else items


def in_order(gold: Collection, answer: Collection, answer_type: AnswerType) -> bool | None:
    """True: compare in order; False: in any order; None: another kind of object."""
    any_order = answer_type == "list"
    if gold.kind == "set":
        return False if answer.kind in ("set", "bare") else None
    if gold.kind == "bare":
        if answer.kind == "bare":
            return not (any_order or _names(gold) == _names(answer) != set())
        if any_order:
            return False if answer.kind in ("set", "bracket") else None
        return True if answer.kind == "tuple" else None
    if (gold.kind, answer.kind) in (("tuple", "tuple"), ("bracket", "bracket")):
        return True
    if gold.kind == "interval":
        return True if answer.kind == "interval" and gold.ends == answer.ends else None
    listed = gold.kind == "tuple" or any_order or len(gold.items) != 2
    return True if answer.kind == "bare" and listed else None


def by_name(gold: Collection, answer: Collection) -> tuple[Collection, Collection]:
    """A tuple beside `y=3, x=2`: the named side in the order of its names, which is what a tuple means."""
    if "tuple" not in (gold.kind, answer.kind):
        return gold, answer
    one, other = (replace(side, items=sorted(side.items)) if _names(side) else side for side in (gold, answer))
    return one, other


def _names(listed: Collection) -> set[str]:
    """The names in `x=2, y=3`; none unless every item has one of its own."""
    names = {match.group() for item in listed.items if (match := _NAME.match(item))}
    return names if len(names) == len(listed.items) else set()


def unmatched(golds: list[str], answers: list[str]) -> tuple[list[str], list[str]]:
    """What is left of both sides when items of equal text or number are paired off."""
    left, right = Counter(map(item_key, golds)), Counter(map(item_key, answers))
    return list((left - right).elements()), list((right - left).elements())


def pair_off(table: list[list[bool | None]]) -> bool | None:
    """Whether rows and columns pair off (equality is transitive, so greedy is enough)."""
    used: set[int] = set()
    pending = False
    for row in table:
        free = [column for column, value in enumerate(row) if column not in used and value]
        if free:
            used.add(free[0])
        elif None in row:
            pending = True
        else:
            return False
    return None if pending else True


def item_key(item: str) -> str:
    """Equal keys mean equal items: the exact number, or else the text."""
    number = as_rational(item)
    return canonical(item) if number is None else f"{number.numerator}/{number.denominator}"


def as_rational(text: str) -> Fraction | None:
    """`parse_rational`, of what stands inside one pair of parentheses too, and of numbers in words."""
    inner = enclosed(text)
    number = parse_rational(inner[1] if inner and inner[::2] == ("(", ")") else text)
    return parse_words(text) if number is None else number


def _enclosed(outer: tuple[str, str, str], answer_type: AnswerType) -> Collection | None:
    opening, inside, closing = outer
    items = split_top(inside, _COMMAS)
    if opening == "\\{" and closing == "\\}" and not _BUILDER.search(inside):
        return Collection("set", items)
    if len(items) < 2 and not (opening == "[" and answer_type == "list"):
        return None
    if opening + closing == "()":
        return Collection("tuple", items, "()")
    if opening + closing == "[]":
        return Collection("bracket", items, "[]")
    return Collection("interval", items, opening + closing)
