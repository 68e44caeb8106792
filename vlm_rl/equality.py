r"""When two answers are equal: exact paths first, the symbolic judge for what is left.

The policy, in the order of the rules: the same text; labels and equations; sets, tuples, intervals,
lists and unions item by item; numbers as exact rationals with percent signs and units; only then the
symbolic judge. If both sides are rational, or carry units, the verdict here is final.

Nothing here waits: `ask` returns None while an outcome is unknown, and the comparison returns None
with it. The caller collects what was asked, decides it in one batch, and compares again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from vlm_rl.mathtext import Quantity, Unit, canonical, clean, enclosed, parse_unit, quantity, split_top
from vlm_rl.rational import TooLargeError, parse_rational
from vlm_rl.verdicts import AnswerType, Verdict

Job = tuple[str, ...]
Ask = Callable[[Job], Any]  # the decided value, or None while unknown; raises Undecided
MAX_TEXT = 20_000
MAX_SYMBOLIC_TEXT = 1_000
MAX_SYMBOLIC_ITEMS = 24

_EQUALS, _COMMAS, _UNION = frozenset("="), frozenset(",;"), frozenset(["\\cup"])
_LABEL = re.compile(r"(?:[A-Za-z]|\\[A-Za-z])[A-Za-z0-9_{}\\ .'(),]*|\([a-z](?: ?, ?[a-z])+\)")
_DESCRIPTION = re.compile(r"[A-Za-z]{2,}[A-Za-z. ]*|[A-Za-z]")
_MEMBER = re.compile(r"^[a-z] ?\\in(?![A-Za-z]) ?")
_SET_IN_WORDS = re.compile(r"[<>=]|\\(?:le|ge|lt|gt|ne|mathbb|setminus|backslash)(?![A-Za-z])")
_WORDS_AS_COMMAS = re.compile(r" ?,? (?:and|or) ")
_NUMBER_BASE = re.compile(r"[0-9)] ?_ ?\{([^{}]*)\}")
_GUESS = re.compile(r"(?<![A-Za-z\\])(?:or|either)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_APPROXIMATE = re.compile(r"\\(?:approx|sim|simeq|cong|doteq)(?![A-Za-z])|\.\.\.|\\[lc]?dots(?![A-Za-z])")
_EXPLOSIVE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("an exponent tower", re.compile(r"\^ ?\{?[^{}^]{0,40}\^ ?\{?[^{}^]{0,40}\^")),
    ("a huge power", re.compile(r"\^ ?\{? ?\(?[0-9]{5,}|[)\]}] ?\^ ?\{? ?[0-9]{3,}")),
    ("a huge factorial", re.compile(r"[0-9]{5,} ?!|\^ ?\{?[0-9]+\}? ?\)? ?!|! ?\)? ?!")),
    ("a huge binomial", re.compile(r"\\[dt]?binom[^A-Za-z]{0,80}(?:\^|[0-9]{5,})")),
    ("a long sum or product", re.compile(r"\\(?:sum|prod)(?![A-Za-z]).{0,80}(?:[0-9]{4,}|\^ ?\{?[0-9]+ ?\^)")),
)


class Undecided(Exception):  # noqa: N818  a verdict, not a fault
    """No opinion is possible: the judge timed out or failed, or the text is refused unevaluated."""

    def __init__(self, verdict: Verdict, path: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict: Verdict = verdict
        self.path = path
        self.reason = reason


@dataclass(slots=True)
class Comparison:
    """The rules of one problem, and the name of the rule that decided last."""

    answer_type: AnswerType
    ask: Ask
    meta: Mapping[str, Any] = field(default_factory=dict)
    path: str = "text"

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two raw answer texts are equal; None while the judge has not spoken."""
        if len(answer) > MAX_TEXT:
            raise Undecided("error", "prefilter", f"refused unevaluated: an answer of {len(answer)} characters")
        try:
            return self._same(clean(gold), clean(answer), top=True)
        except TooLargeError as error:
            raise Undecided("error", "prefilter", f"refused unevaluated: {error}") from None
        except RecursionError:
            raise Undecided("error", "prefilter", "refused unevaluated: too deeply nested") from None

    def _same(self, gold: str, answer: str, *, top: bool = False) -> bool | None:
        if not answer:
            return self._decide("text", value=not gold)
        if canonical(gold) == canonical(answer):
            return self._decide("text", value=True)
        if self.answer_type == "text" and _words(gold) == _words(answer):
            return self._decide("text", value=True)
        if _APPROXIMATE.search(answer) and not _APPROXIMATE.search(gold):
            return self._decide("approximate", value=False)
        if "=" in gold or "=" in answer:
            done, verdict = self._equations(gold, answer)
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
            described = both_described and len(gold_label) > 1 and _rational(quantity(golds[-1]).body) is not None
            if same_label or described:
                return True, self._same(golds[-1], answers[-1])
        return True, self._symbolic(gold, answer)

    # -- sets, tuples, intervals, lists --------------------------------------------------------

    def _collections(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        unions = split_top(gold, _UNION), split_top(answer, _UNION)
        if len(unions[0]) > 1 or len(unions[1]) > 1:
            if len(unions[0]) != len(unions[1]):
                sets = _rational(gold) is None and _rational(answer) is None
                return True, self._symbolic(gold, answer) if sets else self._decide("union", value=False)
            return True, self._items(*unions, ordered=False, path="union")
        first = self._collection(gold)
        # In an answer, "3 or 5" is a list only where several values are asked for; elsewhere it is a guess.
        several = first is not None and first.kind in ("bare", "set")
        if _GUESS.search(answer) and not several and not _GUESS.search(gold):
            return True, self._decide("guess_list", value=False)
        second = self._collection(answer)
        if first is None and second is None:
            return False, None
        if first is None or second is None:
            if _SET_IN_WORDS.search(gold) or _SET_IN_WORDS.search(answer):
                return True, self._symbolic(gold, answer)
            path = "guess_list" if first is None else first.kind
            return True, self._decide(path, value=False)
        ordered = self._order(first, second)
        if ordered is None:
            return True, self._decide(first.kind, value=False)
        left, right = first.items, second.items
        if "set" in (first.kind, second.kind):
            left, right = _distinct(left), _distinct(right)
        return True, self._items(left, right, ordered=ordered, path=first.kind)

    def _order(self, gold: _Collection, answer: _Collection) -> bool | None:
        """True: compare in order; False: in any order; None: another kind of object."""
        kinds = (gold.kind, answer.kind)
        any_order = self.answer_type == "list"
        if gold.kind == "set":
            return False if answer.kind in ("set", "bare") else None
        if gold.kind == "bare":
            if answer.kind == "bare":
                return not any_order
            if any_order:
                return False if answer.kind in ("set", "bracket") else None
            return True if answer.kind == "tuple" else None
        if kinds in (("tuple", "tuple"), ("bracket", "bracket")):
            return True
        if gold.kind == "interval":
            return True if answer.kind == "interval" and gold.ends == answer.ends else None
        listed = gold.kind == "tuple" or any_order or len(gold.items) != 2
        return True if answer.kind == "bare" and listed else None

    def _collection(self, text: str) -> _Collection | None:
        if text == "\\emptyset":
            return _Collection("set", [])
        if text.count("\\pm") == 1:
            body = text.removeprefix("\\pm").strip() if text.startswith("\\pm") else text
            parts = [body, f"-{body}"] if body != text else [text.replace("\\pm", sign) for sign in "+-"]
            return _Collection("set", parts) if not split_top(text, _COMMAS)[1:] else None
        if (outer := enclosed(text)) is not None:
            opening, inside, closing = outer
            items = split_top(inside, _COMMAS)
            if opening == "\\{" and closing == "\\}" and not re.search(r"\\mid|[|:]", inside):
                return _Collection("set", items)
            if len(items) < 2 and not (opening == "[" and self.answer_type == "list"):
                return None
            kind = {"()": "tuple", "[]": "bracket"}.get(opening + closing)
            return _Collection(kind or "interval", items, opening + closing)
        if self.answer_type != "list" and _rational(quantity(text).body) is not None:
            return None  # 1,234 is a number
        items = split_top(_WORDS_AS_COMMAS.sub(", ", text), _COMMAS)
        return _Collection("bare", items) if len(items) > 1 else None

    def _items(self, golds: list[str], answers: list[str], *, ordered: bool, path: str) -> bool | None:
        if len(golds) != len(answers):
            return self._decide(path, value=False)
        if ordered:
            verdicts = [self._same(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
            value = False if False in verdicts else None if None in verdicts else True
            return self._decide(path, value=value)
        left = Counter(_key(item) for item in golds)
        right = Counter(_key(item) for item in answers)
        rest = list((left - right).elements()), list((right - left).elements())
        if len(rest[0]) > MAX_SYMBOLIC_ITEMS:
            raise Undecided("error", "prefilter", f"refused unevaluated: {len(rest[0])} items to pair off")
        table = [[self._same(gold[1], answer[1]) for answer in rest[1]] for gold in rest[0]]
        return self._decide(path, value=_matching(table))

    # -- numbers, percent, units ---------------------------------------------------------------

    def _quantities(self, gold: str, answer: str, *, top: bool) -> bool | None:
        want, have = quantity(gold), quantity(answer)
        gold_unit = want.unit or (self._stated_unit() if top else None)
        if gold_unit is not None and have.unit is not None and gold_unit != have.unit:
            return self._decide("unit", value=False)
        wanted, had = _rational(want.body), _rational(have.body)
        if wanted is not None and had is not None:
            return self._decide("number", value=self._numbers(want, have, wanted, had))
        if wanted is not None and self._margin() is not None:
            return self._rounded(want, have, wanted)
        if self.answer_type == "text" and re.fullmatch(r"[A-Za-z][A-Za-z' -]+", gold):
            return self._decide("text", value=False)
        if want.percent != have.percent:
            one = rf"\frac{{{want.body}}}{{100}}" if want.percent else want.body
            other = rf"\frac{{{have.body}}}{{100}}" if have.percent else have.body
            return self._symbolic(one, other)
        return self._symbolic(want.body, have.body)

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
        _refuse_explosive(have.body)
        decimal = self.ask(("value", have.body))
        if decimal is None:
            return self._decide("rounded", value=None)
        had = parse_rational(decimal)
        if had is None:
            return self._decide("rounded", value=False)
        return self._decide("rounded", value=self._numbers(want, have, wanted, had))

    # -- the rest ------------------------------------------------------------------------------

    def _symbolic(self, gold: str, answer: str) -> bool | None:
        if _NUMBER_BASE.findall(gold) != _NUMBER_BASE.findall(answer):
            return self._decide("number_base", value=False)  # math-verify overlooks the subscript of 12_{3}
        _refuse_explosive(answer)
        return self._decide("math_verify", value=self.ask(("equal", gold, answer)))


@dataclass(frozen=True, slots=True)
class _Collection:
    kind: str  # set | tuple | bracket | interval (half-open) | bare
    items: list[str]
    ends: str = ""


def _words(text: str) -> str:
    return re.sub(r"[\s\"'.!-]+", " ", text).strip().casefold()


def _rational(text: str) -> Fraction | None:
    inner = enclosed(text)
    return parse_rational(inner[1] if inner and inner[::2] == ("(", ")") else text)


def _is_list(parts: list[str]) -> bool:
    return any(len(split_top(part, _COMMAS)) > 1 for part in parts)


def _label(parts: list[str]) -> str | None:
    return parts[0] if len(parts) > 1 and _LABEL.fullmatch(parts[0]) else None


def _agree(values: list[str], *, all_numbers: bool) -> bool:
    """Members of a chain a = b = c may not name two different numbers."""
    numbers = [_rational(quantity(value).body) for value in values]
    if None in numbers and (all_numbers or (numbers[-1] is None and len(set(numbers)) > 1)):
        return False
    return len({number for number in numbers if number is not None}) <= 1


def _key(item: str) -> tuple[str, str]:
    """Equal keys mean equal items; the second part is the item's text (or its exact number)."""
    number = _rational(item)
    return ("", canonical(item)) if number is None else ("", f"{number.numerator}/{number.denominator}")


def _distinct(items: list[str]) -> list[str]:
    return list({_key(item): item for item in items}.values())


def _matching(table: list[list[bool | None]]) -> bool | None:
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


def _round(number: Fraction, digits: int) -> Fraction:
    """Half away from zero, exactly."""
    scaled = abs(number) * 10**digits + Fraction(1, 2)
    rounded = Fraction(scaled.numerator // scaled.denominator, 10**digits)
    return rounded if number >= 0 else -rounded


def _refuse_explosive(text: str) -> None:
    """The cheap filter before the judge; what it misses, the judge's limits stop."""
    if len(text) > MAX_SYMBOLIC_TEXT:
        raise Undecided("error", "prefilter", f"refused unevaluated: an expression of {len(text)} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > 40:
        raise Undecided("error", "prefilter", f"refused unevaluated: {deepest} nested brackets")
    for name, pattern in _EXPLOSIVE:
        if pattern.search(text):
            raise Undecided("error", "prefilter", f"refused unevaluated: {name}")
