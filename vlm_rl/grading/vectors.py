"""Read a vector as its components: (1,2,3), a column or a row of a matrix, 3i-4j with the unit vectors i, j and k."""

from __future__ import annotations

import re

from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.containers import matrix_rows
from vlm_rl.grading.latex import outer_brackets, split_top_level

_COMMA = frozenset(",")
_NOTATIONS = {("(", ")"): "tuple", ("[", "]"): "bracket"}
# A point and an interval; matrices of different shapes.
_DIFFERENT = ({"tuple", "bracket"}, {"row", "column"}, {"row", "binomial"}, {"bracket", "binomial"})
_BRACED = r" ?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_BINOMIAL = re.compile(rf"\\binom{_BRACED}{_BRACED}")
_COLUMN = re.compile(r"\\begin ?\{(?:[pbB]|small)?(?:matrix|array)\}")
_TRANSPOSED = re.compile(r"(?<=[)\]}]) ?\^ ?\{? ?(?:T|\\top|\\intercal)(?![A-Za-z]) ?\}?$")
_UNIT_VECTOR = re.compile(
    r"\\(?:hat|vec|bar|overline) ?\{ ?\\?([ijk])(?:math)? ?\}"
    r"|(?:\\(?:hat|vec|bar|overline) ?)?\\([ij])math(?![A-Za-z])"
)
_COMBINATION = re.compile(r"[-+0-9./(){} ijk]|\\(?:frac|sqrt|cdot|times|pi)(?![A-Za-z])")

_ROOT_OF_UNIT = re.compile(r"\\sqrt ?\{[^{}]*[ijk]")


def vector_components(text: str) -> tuple[str, list[str]] | None:
    """Return (notation, components) of a `clean` text, or None.

    Notations: tuple, bracket, row, column, binomial, units, and unit for a multiple of one unit vector.
    """
    bare = _TRANSPOSED.sub("", text)
    if match := _BINOMIAL.fullmatch(bare):
        return "binomial", [match[1].strip(), match[2].strip()]
    if (rows := matrix_rows(bare)) is not None:
        cells = [cell for row in rows for cell in row]
        if len(cells) < 2 or (len(rows) > 1 and len(cells) != len(rows)):
            return None
        return ("row" if (len(rows) == 1) == (bare == text) else "column", cells)
    outer = outer_brackets(bare)
    if outer is not None and (brackets := (outer[0], outer[2])) in _NOTATIONS:
        items = split_top_level(outer[1], _COMMA)
        return (_NOTATIONS[brackets] if bare == text else "column", items) if len(items) > 1 else None
    marked = _UNIT_VECTOR.search(text) is not None
    components = _of_units(_UNIT_VECTOR.sub(lambda match: f" {match[1] or match[2]} ", text), may_be_i=marked)
    if components is None:
        return None
    return ("units" if components.count("0") < 2 else "unit", components)


def may_be_equal(notation: str, other: str) -> bool:
    """Return whether a vector may have both notations, and no rule of intervals or matrices compares them."""
    both = {notation, other}
    return both in ({"units"}, {"column"}) or (len(both) == 2 and both not in _DIFFERENT)


def columns_alike(gold: str, answer: str) -> tuple[str, str]:
    r"""Return two `clean` texts with each \binom of one as a column where the other has columns and no \binom.

    Beside a column \binom{3}{-4} is typesetting, and never the number of ways to choose.
    """
    sides = []
    for text, other in ((gold, answer), (answer, gold)):
        is_typeset = "\\binom" in text and "\\binom" not in other and _COLUMN.search(other)
        as_column = r"\\begin{pmatrix}\1\\\\\2\\end{pmatrix}"
        sides.append(_BINOMIAL.sub(as_column, text) if is_typeset else text)
    return sides[0], sides[1]


def same_dimension(golds: list[str], answers: list[str], notations: set[str]) -> tuple[list[str], list[str]]:
    """Return both without the third component 0 that unit vectors leave out: 3i-4j in a plane."""
    if notations & {"units", "unit"} and {len(golds), len(answers)} == {2, 3}:
        golds, answers = (side[:2] if len(side) == 3 and side[2] == "0" else side for side in (golds, answers))
    return golds, answers


def _of_units(text: str, *, may_be_i: bool) -> list[str] | None:
    """Return the coefficients of i, j and k; None for another expression.

    In a multiple of one of them it occurs once: k(k+1) is no vector. One of i alone must be marked as a vector, since
    3i is a complex number.
    """
    if not re.search("[ijk]" if may_be_i else "[jk]", text) or _COMBINATION.sub("", text):
        return None
    coefficients = []
    for unit in "ijk":
        others = [letter for letter in "ijk" if letter != unit]
        reduced = text
        for letter in others:
            reduced = re.sub(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", "(0)", reduced)
        reduced = re.sub(rf"(?<![A-Za-z\\]){unit}(?![A-Za-z])", "(1)", reduced)
        coefficients.append(reduced if unit in re.findall(r"(?<![A-Za-z\\])[ijk](?![A-Za-z])", text) else "0")
    form = parse_closed_form(re.sub(r"(?<![A-Za-z\\])[ijk](?![A-Za-z])", "(0)", text))
    is_homogeneous = form is not None and not form.numerator
    occurrences = len(re.findall(r"(?<![A-Za-z\\])[ijk](?![A-Za-z])", text))
    is_multiple = coefficients.count("0") == 2 and occurrences == 1 and not _ROOT_OF_UNIT.search(text)
    return coefficients if is_homogeneous and (is_multiple or coefficients.count("0") < 2) else None
