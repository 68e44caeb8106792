r"""Read sets, tuples, intervals, lists and matrices, and say which kinds may equal each other, and in which order.

\{1,2\}  set: any order, duplicates count once
(1,2)    tuple, or an open interval: in order
[1,2]    bracket, a list or a closed interval: in order
(1,2]    interval: in order, with the same ends
1, 2     bare: in any order if the answer type is `list`, else in order
1; 2     bare: in any order
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from vlm_rl.grading.latex import canonical, is_one_group, outer_brackets, split_top_level
from vlm_rl.grading.number_words import parse_words
from vlm_rl.grading.quantities import split_quantity
from vlm_rl.grading.rational import parse_rational
from vlm_rl.grading.written_forms import parse_form
from vlm_rl.types import AnswerType

Kind = Literal["set", "tuple", "bracket", "interval", "bare"]

_COMMAS = frozenset(",;")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_SEMICOLON = frozenset(";")
_OR = re.compile(r" ?,? or |\\(?:lor|vee)(?![A-Za-z])")
_CONJUNCTION = re.compile(r" ?,? (?:and|or) |\\(?:lor|vee|land|wedge)(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})?(?= ?=)")  # x_{1} of x_{1} = 2
_LONG_NAME = re.compile(r"(?:[A-Za-z]{1,20}|\\[a-z]{2,7})(?:_\{[A-Za-z0-9]\})?(?= ?=)")  # AB, Alice, \alpha
_ROOT = re.compile(r"([tx-z])_\{[0-9]\}")  # x_1 and x_2 are two values of x
_SUCH_THAT = re.compile(r"\\mid|[|:]")  # of \{x | x>2\}
_DESCRIBED = re.compile(r" ?[a-z](?: ?\\in ?[A-Za-z\\{}]+)? ?(?:\\mid(?![A-Za-z])|[|:])")
_MATRIX = re.compile(
    r"^[(\[]? ?\\begin ?\{(?:(?:[pbB]|small)?(?:matrix|array)|cases)\}(?: ?\{[clr| ]*\})? ?(.*?) ?"
    r"\\end ?\{[a-zB]+\} ?[)\]]?$"
)
_ROWS, _CELLS = frozenset(["\\\\"]), frozenset("&")


@dataclass(frozen=True, slots=True)
class Collection:
    """A set, tuple, interval or list: its kind, its items as texts, and the brackets of an interval."""

    kind: Kind
    items: list[str]
    ends: str = ""
    is_unordered: bool = False  # of a bare list: alternatives, with semicolons between them

    def distinct_items(self, key: Callable[[str], str]) -> list[str]:
        """Return the items, one of each key."""
        return list({key(item): item for item in self.items}.values())


def parse_collection(text: str, answer_type: AnswerType) -> Collection | None:
    """Return the collection that a `clean` text writes out, or None if it is a single value."""
    collection = _as_written(text, answer_type)
    return collection and _with_both_signs(collection)


def _as_written(text: str, answer_type: AnswerType) -> Collection | None:
    if text == "\\emptyset":
        return Collection("set", [])
    if _PLUS_MINUS.search(text) and len(values := _both_values(text)) > 1:
        return Collection("set", values)
    if (outer := outer_brackets(text)) is not None:
        return _bracketed(*outer, answer_type)
    quantity = split_quantity(text)
    if (answer_type != "list" or quantity.unit) and as_rational(quantity.body) is not None:
        return None  # 1,234 is a number, and so is $1,234 in a list
    items = bare_items(text)
    is_unordered = len(split_top_level(text, _SEMICOLON)) > 1
    return Collection("bare", items, is_unordered=is_unordered) if len(items) > 1 else None


def relate_signs_alike(gold: str, answer: str) -> bool:
    r"""Return whether both of two `clean` texts have opposite signs, as in `x=\pm 2, y=\mp 3`, or neither has."""
    signs = [_PLUS_MINUS.findall(text) for text in (gold, answer)]
    return min(map(len, signs)) < 2 or len({len(set(side)) for side in signs}) == 1


def _with_both_signs(collection: Collection) -> Collection:
    r"""Return `0, \pm 2` as 0, 2 and -2, in any order; values of several names stay: `x=\pm 2, y=\pm 3`."""
    text = ",".join(collection.items)
    names = {match.group() for item in collection.items if (match := _LONG_NAME.match(item))}
    if collection.kind not in ("bare", "set") or not _PLUS_MINUS.search(text) or len(names) > 1 or "\\mp" in text:
        return collection
    values = [value for item in collection.items for value in _both_values(item)]
    return replace(collection, items=values, is_unordered=True)


def _both_values(text: str) -> list[str]:
    r"""Return the two values of `3\pm 2`; the text itself unless it is one value with one such sign."""
    outer = outer_brackets(text)
    inside = outer[1] if outer and outer[0] == "\\{" else text
    if len(_PLUS_MINUS.findall(text)) != 1 or bare_items(inside)[1:]:
        return [text]
    return [_computed(_PLUS_MINUS.sub(sign, text).strip().removeprefix("+").strip()) for sign in "+-"]


def _computed(text: str) -> str:
    r"""Return `x=3-2` of `x=3\pm2` as x=1, since 3-2 alone is a score; what is no fraction stays."""
    label, equals, value = text.rpartition("=")
    number = as_rational(value)
    return text if number is None else f"{label}{equals}{number}"


def with_set_braces(gold: str) -> str:
    r"""Return a raw gold {1,2,3}, whose backslashes are lost, as \{1,2,3\}; any other gold stays.

    Of an answer this would be wrong: there {1,2} may be LaTeX's group.
    """
    text = gold.strip().strip("$").strip().removesuffix(".")
    inside = text[1:-1]
    has_items = "=" not in inside and len(split_top_level(inside, _COMMAS)) > 1
    is_set = is_one_group(text) and (has_items or _DESCRIBED.match(inside) is not None)
    return rf"\{{{inside}\}}" if is_set and parse_rational(inside) is None else gold


def bare_items(text: str) -> list[str]:
    """Return the parts between commas, semicolons and the words "and" and "or" outside all brackets.

    Alternatives of several items each stay whole: `p=5,q=2;p=7,q=2` and `p=5,q=2 or p=7,q=2` have two parts.
    """
    groups = split_top_level(_OR.sub(";", text), _SEMICOLON)
    sizes = {len(_flat_items(group)) for group in groups}
    is_grouped = len(groups) > 1 and len(sizes) == 1 and sizes != {1}
    # "1, 2 or 3, 4" has four parts, but values with names come together.
    if is_grouped and (";" in text or all(_names(Collection("bare", _flat_items(group))) for group in groups)):
        return groups
    return _flat_items(text)


def _flat_items(text: str) -> list[str]:
    items = split_top_level(_CONJUNCTION.sub(", ", text), _COMMAS)
    return items[:-1] if len(items) > 2 and not items[-1] else items


def as_roots(collection: Collection) -> Collection:
    """Return `x_1=1, x_2=4` as the values x=1 and x=4, in any order; any other collection stays."""
    names = [match.group() for item in collection.items if (match := _NAME.match(item))]
    letters = {_ROOT.sub(r"\1", name) for name in names}
    if collection.kind != "bare" or len(names) != len(collection.items) or len(letters) != 1:
        return collection
    if not all(map(_ROOT.fullmatch, names)) or len(set(names)) != len(names):
        return collection
    items = [_ROOT.sub(r"\1", item, count=1) for item in collection.items]
    return replace(collection, items=items, is_unordered=True)


def order_matters(
    gold: Collection, answer: Collection, answer_type: AnswerType, *, by_index: bool = False
) -> bool | None:
    """Return whether the items must come in the same order; None if the two kinds can never be equal.

    Args:
        gold: The gold's items.
        answer: The answer's items.
        answer_type: Of the type `list` bare items come in any order.
        by_index: Whether x_1 and x_2 are two unknowns, and not two values of x.
    """
    any_order = (answer_type == "list" or gold.is_unordered) and not _asks_by_name(gold, answer, by_index=by_index)
    if gold.kind == "set":
        return False if answer.kind in ("set", "bare") else None
    if gold.kind == "bare":
        if answer.kind == "bare":
            return not (any_order or _names(gold) == _names(answer) != set())
        if any_order:
            return False if answer.kind in ("set", "bracket") else None
        in_order = ("tuple", "bracket") if answer_type == "list" else ("tuple",)
        return True if answer.kind in in_order else None
    if (gold.kind, answer.kind) in (("tuple", "tuple"), ("bracket", "bracket")):
        return True
    if gold.kind == "interval":
        return True if answer.kind == "interval" and gold.ends == answer.ends else None
    listed = gold.kind == "tuple" or any_order or len(gold.items) != 2
    return True if answer.kind == "bare" and listed else None


def sort_by_name(gold: Collection, answer: Collection) -> tuple[Collection, Collection]:
    """Return both with the items of `y=3, x=2` in the order of their names if the other one is a tuple: (2,3)."""
    if "tuple" not in (gold.kind, answer.kind):
        return gold, answer
    left, right = (replace(side, items=sorted(side.items)) if _names(side) else side for side in (gold, answer))
    return left, right


def has_names(collection: Collection) -> bool:
    """Return whether a bare list names its values, or those of each alternative: `p=5, q=2` or `p=5,q=2;p=7,q=2`."""
    groups = [Collection("bare", items) for item in collection.items if len(items := bare_items(item)) > 1]
    return collection.kind == "bare" and all(map(_names, groups or [collection]))


def _names(collection: Collection) -> set[str]:
    """Return the names in `x=2, y=3`, or none unless every item has a name of its own."""
    names = {match.group() for item in collection.items if (match := _NAME.match(item))}
    return names if len(names) == len(collection.items) else set()


def _asks_by_name(gold: Collection, answer: Collection, *, by_index: bool) -> bool:
    """Return whether the gold gives different names to its values and the answer names none: 2, 3 for x=2, y=3."""
    labels = [match.group() for item in gold.items if (match := _LONG_NAME.match(item))]
    names = {label if by_index else _ROOT.sub(r"\1", label) for label in labels}
    is_named = gold.kind == "bare" and len(labels) == len(gold.items) and len(names) > 1
    return is_named and not any(_LONG_NAME.match(item) for item in answer.items)


def unmatched(golds: list[str], answers: list[str], key: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """Return the items of both sides, as their keys, that are left when those of equal keys are paired off."""
    left, right = Counter(map(key, golds)), Counter(map(key, answers))
    return list((left - right).elements()), list((right - left).elements())


def pair_off(table: list[list[bool | None]]) -> bool | None:
    """Return whether the rows of a table of equal items pair off with its columns; None while that is open.

    A cell is None while its comparison is pending. Equality is transitive, so the first free match will do.
    """
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
    """Return the exact number of an item, or else its canonical text: equal keys mean equal items."""
    number = None if parse_form(item) else as_rational(item)
    return canonical(item) if number is None else f"{number.numerator}/{number.denominator}"


def as_rational(text: str) -> Fraction | None:
    """Return the exact value of a number, of one in parentheses or of one in words; None for anything else."""
    inner = outer_brackets(text)
    number = parse_rational(inner[1] if inner and inner[::2] == ("(", ")") else text)
    return parse_words(text) if number is None else number


def matrix_rows(text: str) -> list[list[str]] | None:
    """Return the cells of a matrix or column in any brackets, row by row; None for a determinant and the rest."""
    match = _MATRIX.match(text)
    if match is None or "\\begin" in match[1]:
        return None
    rows = [split_top_level(row, _CELLS) for row in split_top_level(match[1], _ROWS)]
    return rows[:-1] if len(rows) > 1 and rows[-1] == [""] else rows


def _bracketed(opening: str, inside: str, closing: str, answer_type: AnswerType) -> Collection | None:
    """Return the collection that a pair of brackets encloses, or None if it encloses a single value."""
    items = split_top_level(inside, _COMMAS)
    if opening == "\\{" and closing == "\\}" and not _SUCH_THAT.search(inside):
        return Collection("set", items)
    if len(items) < 2 and not (opening == "[" and answer_type == "list"):
        return None
    if opening + closing == "()":
        return Collection("tuple", items, "()")
    if opening + closing == "[]":
        return Collection("bracket", items, "[]")
    return Collection("interval", items, opening + closing)
