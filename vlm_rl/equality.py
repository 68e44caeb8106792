r"""When two answers are equal: exact paths first, the symbolic judge for what is left.

The policy, in the order of the rules: the same text; words; labels and equations; inequalities and
intervals; sets, tuples, lists and unions item by item; numbers as exact rationals with percent signs
and units; exact closed forms (roots, \pi, polynomials); only then the symbolic judge. If both sides are
rational, or carry units, or are closed forms, the verdict here is final.

Nothing here waits: `ask` returns None while an outcome is unknown, and the comparison returns None
with it. The caller collects what was asked, decides it in one batch, and compares again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

from vlm_rl.collection import Collection, as_rational, bare_items, collection, in_order, pair_off, unmatched
from vlm_rl.mathtext import canonical, clean, is_prose, matrix, split_top
from vlm_rl.polynomial import ClosedForm, parse_closed_form
from vlm_rl.prefilter import MAX_SYMBOLIC_ITEMS, refuse_explosive, refuse_long, refused
from vlm_rl.rational import TooLargeError, parse_rational
from vlm_rl.relations import as_intervals, has_relation
from vlm_rl.units import Quantity, Unit, parse_unit, quantity
from vlm_rl.verdicts import AnswerType

Job = tuple[str, ...]
Ask = Callable[[Job], Any]  # the decided value, or None while unknown; raises Undecided

_EQUALS, _UNION = frozenset("="), frozenset(["\\cup"])
_LABEL = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z])[A-Za-z0-9_{}\\ .'(),]*|\([a-z](?: ?, ?[a-z])+\)"
    r"|[A-Za-z]{1,2}(?: ?[-+/] ?[A-Za-z]{1,2}){1,4}"  # the sum asked for: a+b
)
_DESCRIPTION = re.compile(r"[A-Za-z]{2,}[A-Za-z. ]*|[A-Za-z]")
_MEMBER = re.compile(r"^[a-z] ?\\in(?![A-Za-z]) ?")
_POINT = re.compile(r"^[A-Z](?:_\{[0-9]\})?'* ?(?=\()")
_SET_IN_WORDS = re.compile(r"[<>=]|\\(?:le|ge|ne|mathbb|setminus|backslash)(?![A-Za-z])")
_NUMBER_BASE = re.compile(r"\(?[0-9A-F)] ?\)? ?_ ?\{([^{}]*)\}")
_GUESS = re.compile(r"(?<![A-Za-z\\])(?:or|either|oder|ou)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")
_APPROXIMATE = re.compile(r"\\(?:approx|sim|simeq|cong|doteq)(?![A-Za-z])|\.\.\.|\\[lc]?dots(?![A-Za-z])")
_NO_PROOF = frozenset(["i", "e"])  # i^2 = -1, so forms that differ in i may be equal
_ASSIGNED = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})? ?=")


@dataclass(slots=True)
class Comparison:
    """The rules of one problem, and the name of the rule that decided last."""

    answer_type: AnswerType
    ask: Ask
    meta: Mapping[str, Any] = field(default_factory=dict)
    path: str = "text"

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two raw answer texts are equal; None while the judge has not spoken."""
        refuse_long(answer)
        try:
            return self._same(clean(gold), clean(answer), top=True)
        except TooLargeError as error:
            raise refused(str(error)) from None
        except RecursionError:
            raise refused("too deeply nested") from None

    def _same(self, gold: str, answer: str, *, top: bool = False) -> bool | None:
        if not answer:
            return self._decide("text", value=not gold)
        if canonical(gold) == canonical(answer):
            return self._decide("text", value=True)
        if (self.answer_type == "text" or is_prose(gold)) and _words(gold) == _words(answer):
            return self._decide("text", value=True)
        if _APPROXIMATE.search(answer) and not _APPROXIMATE.search(gold):
            return self._decide("approximate", value=False)
        if "=" in gold or "=" in answer:
            done, verdict = self._equations(gold, answer)
            if done:
                return verdict
        if has_relation(gold) or has_relation(answer):
            done, verdict = self._relations(gold, answer)
            if done:
                return verdict
        gold, answer = _MEMBER.sub("", gold), _MEMBER.sub("", answer)
        done, verdict = self._collections(gold, answer)
        if done:
            return verdict
        return self._quantities(gold, answer, top=top)

    def _decide(self, path: str, *, value: bool | None) -> bool | None:
        self.path = path
        return value

    # -- labels and equations ------------------------------------------------------------------

    def _equations(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        golds, answers = split_top(gold, _EQUALS), split_top(answer, _EQUALS)
        if (len(golds) == 1 and len(answers) == 1) or _is_list(golds) or _is_list(answers):
            return False, None
        gold_label, answer_label = _label(golds), _label(answers)
        if len(golds) == 1:
            values = answers[1:] if answer_label else answers
            if len(answers) > 1 and not _agree(values, all_numbers=not answer_label):
                return True, self._decide("equation", value=False)
            return True, self._same(gold, values[-1])
        if len(answers) == 1:
            value = self._same(golds[-1], answer) if gold_label else False
            return True, value if gold_label else self._decide("equation", value=False)
        if gold_label and answer_label and _agree(answers[1:], all_numbers=False):
            same_label = canonical(gold_label) == canonical(answer_label)
            both_described = all(_DESCRIPTION.fullmatch(label) for label in (gold_label, answer_label))
            described = both_described and len(gold_label) > 1 and as_rational(quantity(golds[-1]).body) is not None
            if same_label or described:
                return True, self._same(golds[-1], answers[-1])
        if len(golds) == len(answers) == 2:
            sides = [_difference(*pair) for pair in (golds, answers)]
            if sides[0] and sides[1] and sides[0].proportional(sides[1]):
                return True, self._decide("closed_form", value=True)
        return True, self._symbolic(gold, answer)

    # -- inequalities --------------------------------------------------------------------------

    def _relations(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        left, right = as_intervals(gold), as_intervals(answer)
        if left is None and not has_relation(gold) and not _SET_IN_WORDS.search(gold):
            return True, self._decide("relation", value=False)  # a value is asked for, not a range
        if left is None or (right is None and has_relation(answer)):
            return False, None
        if right is None or (left.variable and right.variable and left.variable != right.variable):
            return True, self._decide("relation", value=False)
        if len(left.parts) != len(right.parts):
            return True, self._symbolic("\\cup ".join(left.parts), "\\cup ".join(right.parts))
        return True, self._items(list(left.parts), list(right.parts), ordered=False, path="relation")

    # -- sets, tuples, intervals, lists --------------------------------------------------------

    def _collections(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        unions = split_top(gold, _UNION), split_top(answer, _UNION)
        if len(unions[0]) > 1 or len(unions[1]) > 1:
            if len(unions[0]) != len(unions[1]):
                sets = as_rational(gold) is None and as_rational(answer) is None
                return True, self._symbolic(gold, answer) if sets else self._decide("union", value=False)
            return True, self._items(*unions, ordered=False, path="union")
        left, right = matrix(gold), matrix(answer)
        if left is not None and right is not None:
            return True, self._matrices(left, right)
        first = collection(gold, self.answer_type)
        # In an answer, "3 or 5" is a list only where several values are asked for; elsewhere it is a guess.
        several = first is not None and first.kind in ("bare", "set")
        if _GUESS.search(answer) and not several and not _GUESS.search(gold):
            return True, self._decide("guess_list", value=False)
        if first is not None and first.kind == "tuple":
            answer = _POINT.sub("", answer)
        second = collection(answer, self.answer_type)
        if self.answer_type == "list" and first is None and second is not None:
            first = Collection("bare", [gold])
        if first is None and second is None:
            return False, None
        if first is None or second is None:
            if _SET_IN_WORDS.search(gold) or _SET_IN_WORDS.search(answer):
                return True, self._symbolic(gold, answer)
            path = "guess_list" if first is None else first.kind
            return True, self._decide(path, value=False)
        ordered = in_order(first, second, self.answer_type)
        if ordered is None:
            return True, self._decide(first.kind, value=False)
        left, right = first.items, second.items
        if "set" in (first.kind, second.kind):
            left, right = first.distinct_items, second.distinct_items
        return True, self._items(left, right, ordered=ordered, path=first.kind)

    def _matrices(self, golds: list[list[str]], answers: list[list[str]]) -> bool | None:
        if [len(row) for row in golds] != [len(row) for row in answers]:
            return self._decide("matrix", value=False)
        return self._items([*chain(*golds)], [*chain(*answers)], ordered=True, path="matrix")

    def _items(self, golds: list[str], answers: list[str], *, ordered: bool, path: str) -> bool | None:
        if len(golds) != len(answers):
            return self._decide(path, value=False)
        if ordered:
            verdicts = [self._same(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
            value = False if False in verdicts else None if None in verdicts else True
            return self._decide(path, value=value)
        left, right = unmatched(golds, answers)
        if len(left) > MAX_SYMBOLIC_ITEMS:
            raise refused(f"{len(left)} items to pair off")
        table = [[self._same(gold, answer) for answer in right] for gold in left]
        return self._decide(path, value=pair_off(table))

    # -- numbers, percent, units ---------------------------------------------------------------

    def _quantities(self, gold: str, answer: str, *, top: bool) -> bool | None:
        want, have = quantity(gold), quantity(answer)
        gold_unit = want.unit or (self._stated_unit() if top else None)
        if gold_unit is not None and have.unit is not None and gold_unit != have.unit:
            return self._decide("unit", value=False)
        if (want.unit is not None and have.percent) or (want.percent and have.unit is not None):
            return self._decide("unit", value=False)
        wanted, had = as_rational(want.body), as_rational(have.body)
        if wanted is not None and had is not None:
            return self._decide("number", value=self._numbers(want, have, wanted, had))
        if is_prose(want.body) or is_prose(have.body):
            return self._decide("text", value=_words(want.body) == _words(have.body))
        if wanted is not None and self._margin() is not None:
            return self._rounded(want, have, wanted)
        if want.percent == have.percent:
            return self._expressions(want.body, have.body)
        one = rf"\frac{{{want.body}}}{{100}}" if want.percent else want.body
        other = rf"\frac{{{have.body}}}{{100}}" if have.percent else have.body
        return self._expressions(one, other)

    def _stated_unit(self) -> Unit | None:
        stated = self.meta.get("unit")
        return parse_unit(clean(str(stated))) if stated else None

    def _numbers(self, want: Quantity, have: Quantity, wanted: Fraction, had: Fraction) -> bool:
        if want.percent == have.percent:
            return self._close(wanted, had)
        if want.percent:  # 50% is 0.5, not 50
            return self._close(wanted / 100, had)
        # A bare 50 may have asked for a percentage; a bare 0.5 is a share, so 0.5% is something else.
        return self._close(wanted, had / 100) or (abs(wanted) > 1 and self._close(wanted, had))

    def _margin(self) -> tuple[str, Any] | None:
        for name in ("tolerance", "precision"):
            if self.meta.get(name) is not None:
                return name, self.meta[name]
        return None

    def _close(self, gold: Fraction, answer: Fraction) -> bool:
        """Equal, or equal after the rounding (MathVista) or within the margin (DynaMath) the problem states."""
        if gold == answer:
            return True
        match self._margin():
            case ("tolerance", margin):
                return abs(gold - answer) <= Fraction(str(margin))
            case ("precision", digits):
                return _round(gold, int(digits)) == _round(answer, int(digits))
        return False

    def _rounded(self, want: Quantity, have: Quantity, wanted: Fraction) -> bool | None:
        """A gold with a stated precision against an exact answer such as 5\\sqrt{3}: compare its value."""
        refuse_explosive(have.body)
        decimal = self.ask(("value", have.body))
        if decimal is None:
            return self._decide("rounded", value=None)
        had = parse_rational(decimal)
        if had is None:
            return self._decide("rounded", value=False)
        return self._decide("rounded", value=self._numbers(want, have, wanted, had))

    # -- the rest ------------------------------------------------------------------------------

    def _expressions(self, gold: str, answer: str) -> bool | None:
        left, right = parse_closed_form(gold), parse_closed_form(answer)
        if left is not None and right is not None:
            same = left.equals(right)
            if same or not _NO_PROOF & (left.symbols | right.symbols):
                return self._decide("closed_form", value=same)
        return self._symbolic(gold, answer)

    def _symbolic(self, gold: str, answer: str) -> bool | None:
        if _NUMBER_BASE.findall(gold) != _NUMBER_BASE.findall(answer):
            return self._decide("number_base", value=False)  # math-verify overlooks the subscript of 12_{3}
        if "'" in answer and "'" not in gold:
            return self._decide("text", value=False)  # math-verify overlooks primes
        refuse_explosive(answer)
        return self._decide("math_verify", value=self.ask(("equal", gold, answer)))


def _words(text: str) -> str:
    return re.sub(r"[\s\"'.!-]+", " ", text).strip().casefold()


def _is_list(parts: list[str]) -> bool:
    """Whether an "=" stands in a list, such as `x=1, x=2`, and not in an equation."""
    return any(len(split_top(part, frozenset(",;"))) > 1 for part in parts) or (
        len(parts) > 2
        and all(len(bare_items(part)) > 1 for part in parts[1:-1])
        and len(_ASSIGNED.findall("=".join(parts))) > 1
    )


def _label(parts: list[str]) -> str | None:
    return parts[0] if len(parts) > 1 and _LABEL.fullmatch(parts[0]) else None


def _agree(values: list[str], *, all_numbers: bool) -> bool:
    """Members of a chain a = b = c may not name two different numbers."""
    numbers = [as_rational(quantity(value).body) for value in values]
    if None in numbers and (all_numbers or (numbers[-1] is None and len(set(numbers)) > 1)):
        return False
    return len({number for number in numbers if number is not None}) <= 1


def _difference(left: str, right: str) -> ClosedForm | None:
    one, other = parse_closed_form(left), parse_closed_form(right)
    return None if one is None or other is None else one + -1 * other


def _round(number: Fraction, digits: int) -> Fraction:
    """Half away from zero, exactly."""
    scaled = abs(number) * 10**digits + Fraction(1, 2)
    rounded = Fraction(scaled.numerator // scaled.denominator, 10**digits)
    return rounded if number >= 0 else -rounded
