"""Answers with an equals sign: labels (`x = 5`), chains (`x = 10/2 = 5`), curves (`y = 2x+3`), ratios (`3:4`)."""

from __future__ import annotations

import re
from itertools import pairwise

from vlm_rl.grading.closed_form import ClosedForm, parse_closed_form
from vlm_rl.grading.containers import as_rational, bare_items
from vlm_rl.grading.latex import canonical, split_top
from vlm_rl.grading.quantities import quantity

EQUALS = frozenset("=")
_COLON = frozenset(":")
_TIME_OF_DAY = re.compile(r"[0-9] ?[AaPp]\.? ?[Mm]\.?$")
_LABEL = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z])[A-Za-z0-9_{}\\ .'(),]*|\([a-z](?: ?, ?[a-z])+\)"
    r"|[a-z]\^\{-1\} ?\([a-z]\)|P ?\((?:[^()]|\([^()]*\))*\)|\|[A-Z]{2}\|"  # f^{-1}(x), P(X=2), |AB|
    r"|[A-Za-z]{1,2}(?: ?[-+/] ?[A-Za-z]{1,2}){1,4}"  # the sum asked for: a+b
)
_DESCRIPTION = re.compile(r"[A-Za-z]{2,}[A-Za-z. ]*|[A-Za-z]")
_GRAPH = {"y", "f(x)"}
_ASSIGNED = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})? ?=")
_ROOT, _INDEX = re.compile("[tx-z]"), re.compile(r"(?<=^[tx-z])_\{[0-9]\}$")  # x_1 and x_2 are two values of x
_TO = re.compile(r"(?<=[0-9)}]) to (?=[-0-9(\\])")


def is_list(parts: list[str]) -> bool:
    """Whether an "=" stands in a list, such as `x=1, x=2`, and not in an equation."""
    return any(len(split_top(part, frozenset(",;"))) > 1 for part in parts) or (
        len(parts) > 2
        and all(len(bare_items(part)) > 1 for part in parts[1:-1])
        and len(_ASSIGNED.findall("=".join(parts))) > 1
    )


def label(parts: list[str]) -> str | None:
    """What stands in front of the first "=", if it only names the value."""
    return parts[0] if len(parts) > 1 and _LABEL.fullmatch(parts[0]) else None


def same_label(golds: list[str], answers: list[str]) -> bool:
    """Whether two labelled values may be compared: the same label, or words that describe a number."""
    labels = golds[0], answers[0]
    names = {canonical(text) for text in labels}
    if _ROOT.fullmatch(labels[0]):
        names = {_INDEX.sub("", name) for name in names}
    if len(names) == 1 or names == _GRAPH:
        return True
    described = all(_DESCRIPTION.fullmatch(text) for text in labels) and len(labels[0]) > 1
    return described and as_rational(quantity(golds[-1]).body) is not None


def members_agree(values: list[str], *, all_numbers: bool) -> bool:
    """Members of a chain a = b = c may not name two different numbers."""
    numbers = [as_rational(quantity(value).body) for value in values]
    if None in numbers and (all_numbers or (numbers[-1] is None and len(set(numbers)) > 1)):
        return False
    return len({number for number in numbers if number is not None}) <= 1


def same_curve(golds: list[str], answers: list[str]) -> bool:
    """Whether two equations' differences of both sides are multiples of each other: y=2x+3 and 2x-y+3=0."""
    one, other = (_difference(*sides) for sides in (golds, answers))
    return one is not None and other is not None and one.proportional(other)


def ratio(text: str) -> list[str] | None:
    """The terms of `3:4:5` or `3 to 4`, at least two closed forms; None for anything else, a time of day too."""
    if (":" not in text and " to " not in text) or _TIME_OF_DAY.search(text):
        return None
    terms = split_top(_TO.sub(":", text), _COLON)
    return terms if len(terms) > 1 and all(map(parse_closed_form, terms)) else None


def same_ratio(golds: list[str], answers: list[str]) -> bool:
    """Whether the terms of two ratios, equally many, are proportional."""
    left, right = ([form for term in terms if (form := parse_closed_form(term))] for terms in (golds, answers))
    return all((a * d).equals(b * c) for (a, c), (b, d) in pairwise(zip(left, right, strict=True)))


def _difference(left: str, right: str) -> ClosedForm | None:
    one, other = parse_closed_form(left), parse_closed_form(right)
    return None if one is None or other is None else one + -1 * other
