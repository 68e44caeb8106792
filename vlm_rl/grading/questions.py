"""Read from a question what its answer may look like: a percentage, or a ratio."""

from __future__ import annotations

import re

# "what percentage of", "by what percent", "express it as a percentage"; but not "what is 20 percent of 5"
_PERCENTAGE = re.compile(
    r"\b(?:(?:what|which|how many|find|calculate|compute|determine|express|give|write|as)\W+(?:[^\W\d_]+\W+){0,6}?"
    r"|in\W{1,3})(?:percent|per cent|\\?%)|百分(?:之几|比|率|数)",
    re.IGNORECASE,
)
_FACTORS = re.compile(r"\bfactor(?:i[sz]|ed|ing|s?\b(?! of\b| in\b))|分解", re.IGNORECASE)
_EXPANSION = re.compile(r"\b(?:expand|multiply out)|展开", re.IGNORECASE)
_RATIO = re.compile(r"ratio|proportion|odds|scale|比", re.IGNORECASE)


def asks_percentage(question: str) -> bool:
    """Return whether the question asks for a percentage."""
    return _PERCENTAGE.search(question) is not None


def asks_ratio(question: str) -> bool:
    """Return whether the question is about a ratio, so that 4:30 is not a time."""
    return _RATIO.search(question) is not None


def asks_factors(question: str) -> bool:
    """Return whether the question asks for a factorization."""
    return _FACTORS.search(question) is not None


def asks_expansion(question: str) -> bool:
    """Return whether the question asks for a product to be multiplied out."""
    return _EXPANSION.search(question) is not None
