r"""Compare single values: numbers within the problem's margin, percent signs, units, and expressions.

Exact fractions and closed forms decide where both sides are such; math-verify is asked about the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.containers import as_rational
from vlm_rl.grading.decision import AskSymbolic, Decision
from vlm_rl.grading.latex import clean
from vlm_rl.grading.limits import refuse_explosive
from vlm_rl.grading.math_verify_gaps import unseen_difference
from vlm_rl.grading.number_words import parse_words
from vlm_rl.grading.quantities import (
    Margin,
    Quantity,
    Unit,
    margin_of,
    parse_unit,
    same_measure,
    same_number,
    split_quantity,
)
from vlm_rl.grading.questions import asks_percentage
from vlm_rl.grading.rational import NUMBER, parse_rational
from vlm_rl.grading.worded_answers import is_prose, normalized_words
from vlm_rl.types import AnswerType

_INFINITE = ("\\infty", "-\\infty")
_BEFORE_LETTER_UNIT = re.compile(r"(?<=[0-9.])(?=[A-Za-z]$)")  # 5m
# Of an answer of type text: 9/11, 2^3, 5! and 007 are no numbers.
_NUMERAL, _NO_NUMERAL = re.compile(rf"-?(?:{NUMBER})"), re.compile(r"[+*/^!\\_(]|[0-9] ?-|^-?0[0-9]")
_SIMPLE_FRACTION = re.compile(r"\\frac\{ ?([0-9]+) ?\}\{ ?([0-9]+) ?\}")


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """Compare values, as answers to one problem or as parts of them, such as the items of a set."""

    answer_type: AnswerType
    ask: AskSymbolic
    meta: Mapping[str, Any] = field(default_factory=dict)  # precision (digits), tolerance, unit
    question: str = ""  # "" if it is not known

    def _quantity(self, gold: str, answer: str, *, is_whole: bool) -> Decision:
        """Compare units, then numbers within the problem's margin, then what is left as expressions."""
        if (same := same_measure(gold, answer)) is not None:
            return Decision(same, "unit")
        wanted, given = split_quantity(gold), split_quantity(answer)
        # `5m` may be a product, but not where the other side is in metres.
        if wanted.unit and given.unit is None:
            spaced = split_quantity(_BEFORE_LETTER_UNIT.sub(" ", answer))
            given = spaced if spaced.unit == wanted.unit else given
        elif given.unit and wanted.unit is None:
            spaced = split_quantity(_BEFORE_LETTER_UNIT.sub(" ", gold))
            wanted = spaced if spaced.unit == given.unit else wanted
        gold_unit = wanted.unit or (self._stated_unit() if is_whole else None)
        if gold_unit is not None and given.unit is not None and gold_unit != given.unit:
            return Decision(False, "unit")
        if (wanted.unit is not None and given.percent) or (wanted.percent and given.unit is not None):
            return Decision(False, "unit")
        if self.answer_type == "text" and not _are_numbers_of_a_text(wanted, given):
            return Decision(_as_words(gold) == _as_words(answer), "text")
        gold_value, answer_value = as_rational(wanted.body), as_rational(given.body)
        by_numeral = wanted.percent or (given.percent and asks_percentage(self.question))
        percents = {"gold_percent": wanted.percent, "answer_percent": given.percent, "by_numeral": by_numeral}
        if gold_value is not None and answer_value is not None:
            same = same_number(gold_value, answer_value, self._margin, **percents)
            return Decision(same, "number" if wanted.percent == given.percent else "percent")
        if is_prose(wanted.body) or is_prose(given.body):
            return Decision(normalized_words(wanted.body) == normalized_words(given.body), "text")
        if gold_value is not None and self._margin:
            decimal = self._decimal(given.body)
            if isinstance(decimal, Fraction):
                return Decision(same_number(gold_value, decimal, self._margin, **percents), "rounded")
            return Decision(None if decimal is None else False, "rounded")
        if wanted.percent == given.percent or by_numeral:
            decision = self._expression(wanted.body, given.body)
            if wanted.percent == given.percent or decision.equal is not False:
                return decision
        left, right = (rf"\frac{{{side.body}}}{{100}}" if side.percent else side.body for side in (wanted, given))
        return self._expression(left, right)

    @property
    def _margin(self) -> Margin:
        return margin_of(self.meta)

    def _stated_unit(self) -> Unit | None:
        """Return the unit that the problem states beside the gold."""
        stated = self.meta.get("unit")
        return parse_unit(clean(str(stated))) if stated else None

    def _decimal(self, text: str) -> Fraction | str | None:
        """Return the value of a number such as 5\\sqrt{3}; "" if it is not a number, None while that is not known."""
        exact = as_rational(text)
        if exact is not None:
            return exact
        refuse_explosive(text)
        decimal = self.ask(("value", text))
        if decimal is None:
            return None
        value = parse_rational(decimal)
        return "" if value is None else value

    # -- expressions ---------------------------------------------------------------------------

    def _expression(self, gold: str, answer: str) -> Decision:
        """Compare closed forms exactly; ask math-verify about the rest. A text is no product of its letters."""
        if self.answer_type == "text":
            return Decision(False, "text")
        left, right = parse_closed_form(gold), parse_closed_form(answer)
        if left is not None and right is not None:
            return Decision(left.equals(right), "closed_form")
        if (left or gold in _INFINITE) and (right or answer in _INFINITE):  # the same infinity is the same text
            return Decision(False, "closed_form")
        return self._symbolic(gold, answer)

    def _symbolic(self, gold: str, answer: str) -> Decision:
        """Ask math-verify, unless the texts differ in what it does not see."""
        if self.answer_type == "text":
            return Decision(False, "text")  # 6:30 on a clock is not a quotient
        if (rule := unseen_difference(gold, answer)) is not None:
            return Decision(False, rule)
        refuse_explosive(answer)
        return Decision(self.ask(("equal", gold, answer)), "math_verify")


def _are_numbers_of_a_text(*sides: Quantity) -> bool:
    """Return whether two answers of type text are numbers: 1,000 and twelve; 2/3 and 20% beside a number in words."""
    if all(map(_is_numeral, sides)):
        return True
    if not any(parse_words(side.body) is not None and not _NUMERAL.search(side.body) for side in sides):
        return False
    return all(as_rational(side.body) is not None for side in sides)


def _is_numeral(side: Quantity) -> bool:
    """Return whether a text is a number in digits or in words: 1,000 and twelve, but neither 9/11 nor 007."""
    if side.percent or _NO_NUMERAL.search(side.body):
        return False
    return _NUMERAL.fullmatch(side.body) is not None or parse_words(side.body) is not None


def _as_words(text: str) -> str:
    """Return a text in words, with its fractions on one line."""
    return normalized_words(re.sub(r" ?/ ?", "/", _SIMPLE_FRACTION.sub(r"\1/\2", text)))
