"""Read from a question what its answer may look like: a percentage, a ratio, values of unknowns with indices."""

from __future__ import annotations

import math
import re

# "what percentage of", "by what percent", "express it as a percentage"; but not "what is 20 percent of 5"
_PERCENTAGE = re.compile(
    r"\b(?:(?:what|which|how many|find|calculate|compute|determine|express|give|write|as)\W+(?:[^\W\d_]+\W+){0,6}?"
    r"|in\W{1,3})(?:percent|per cent|\\?%)|百分(?:之几|比|率|数)",
    re.IGNORECASE,
)
_FACTORS = re.compile(r"\bfactor(?:i[sz]|ed|ing|s?\b(?! of\b| in\b))|分解", re.IGNORECASE)
_EXPANSION = re.compile(r"\b(?:expand|multiply out)|展开", re.IGNORECASE)
# x_1+2x_2=5 and x_1<x_2 tell x_1 from x_2; "the roots x_1, x_2" does not.
_NAME = r"[tx-z] ?(?:_ ?\{? ?[0-9] ?\}?|[₀-₉])"
_SIGN = r"(?:[-+*/=<>≤≥]|\\(?:le|ge|leq|geq|cdot|times)(?![A-Za-z]))"
_USES_INDICES = re.compile(rf"{_NAME}[ $]*{_SIGN}|(?:{_SIGN}|[0-9]) ?{_NAME}")
_RATIO = re.compile(r"ratio|proportion|odds|scale|比", re.IGNORECASE)
_TERMS = re.compile(r"(?<![\w.:])[0-9]{1,15}(?: ?(?::| to ) ?[0-9]{1,15})+(?![\w:]|\.[0-9])")


def asks_percentage(question: str) -> bool:
    """Return whether the question asks for a percentage."""
    return _PERCENTAGE.search(question) is not None


def asks_ratio(question: str) -> bool:
    """Return whether the question is about a ratio, so that 4:30 is not a time."""
    return _RATIO.search(question) is not None


def repeats_ratio(question: str, gold: str, answer: str) -> bool:
    """Return whether a `clean` answer is a ratio of the question, other than the gold, that can be reduced."""
    terms = _terms(answer) if _TERMS.fullmatch(answer) else []
    is_reduced = math.gcd(*terms) == 1
    if is_reduced or (_TERMS.fullmatch(gold) and _terms(gold) == terms):
        return False
    return terms in [_terms(match[0]) for match in _TERMS.finditer(question)]


def _terms(ratio: str) -> list[int]:
    return [int(term) for term in re.findall("[0-9]+", ratio)]


def uses_indices(question: str) -> bool:
    """Return whether the question has unknowns x_1, x_2, which are not two values of one x."""
    return _USES_INDICES.search(question) is not None


def asks_factors(question: str) -> bool:
    """Return whether the question asks for a factorization."""
    return _FACTORS.search(question) is not None


def asks_expansion(question: str) -> bool:
    """Return whether the question asks for a product to be multiplied out."""
    return _EXPANSION.search(question) is not None
