r"""When two answers are equal: exact paths first, the symbolic judge for what is left.

The policy, in the order of the rules: the same text; words; labels and equations; ratios; inequalities and
intervals; sets, tuples, lists and unions item by item; numbers as exact rationals with percent signs
and units; exact closed forms (roots, \pi, polynomials); only then the symbolic judge. If both sides are
rational, or carry units, or are closed forms, the verdict here is final.

Nothing here waits: `ask` returns None while an outcome is unknown, and the comparison returns None
with it. The caller collects what was asked, decides it in one batch, and compares again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.containers import (
    Collection,
    as_rational,
    bare_items,
    by_name,
    collection,
    in_order,
    pair_off,
    unmatched,
)
from vlm_rl.grading.equations import EQUALS, is_list, label, members_agree, ratio, same_curve, same_label, same_ratio
from vlm_rl.grading.inequalities import as_intervals, has_relation
from vlm_rl.grading.latex import canonical, clean, is_prose, matrix, split_top
from vlm_rl.grading.limits import MAX_SYMBOLIC_ITEMS, refuse_explosive, refused
from vlm_rl.grading.margins import Margin, margin_of, same_number
from vlm_rl.grading.math_verify_gaps import overlooked
from vlm_rl.grading.quantities import Unit, measures, parse_unit, quantity
from vlm_rl.grading.rational import TooLargeError, is_date, parse_rational
from vlm_rl.grading.solution_families import INTEGERS, beside, family, renamed, same_names, same_numbers
from vlm_rl.grading.worded_answers import by_words, words
from vlm_rl.types import AnswerType

Job = tuple[str, ...]
Ask = Callable[[Job], Any]  # the decided value, or None while unknown; raises Undecided

_UNION, _ABOUT = frozenset(["\\cup"]), frozenset(["\\approx"])
_INTRODUCTION = re.compile(
    r"(?:(?:the|our|so|thus|hence|therefore),? ){0,2}(?:correct |final |right )?"
    r"(?:answer|result|value|solution|ans\.?)(?: is|:| equals)[: ]*|答案[是为:]+ ?",
    re.IGNORECASE,
)
_MEMBER = re.compile(r"^[a-z] ?\\in(?![A-Za-z]) ?")
_POINT = re.compile(r"^[A-Z](?:_\{[0-9]\})?'* ?(?=\()")
_SET_IN_WORDS = re.compile(r"[<>=]|\\(?:le|ge|ne|mathbb|setminus|backslash)(?![A-Za-z])")
_GUESS = re.compile(r"(?<![A-Za-z\\])(?:or|either|oder|ou)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")
_APPROXIMATE = re.compile(r"\\(?:approx|sim|simeq|cong|doteq)(?![A-Za-z])|\.\.\.|\\[lc]?dots(?![A-Za-z])")
_LOGIC_SIGN = re.compile(r"\\(?:land|wedge|lor|vee)(?![A-Za-z])")
_LOGIC = re.compile(rf"{_LOGIC_SIGN.pattern}| (?:and|or) ")
_LETTER_UNIT = re.compile(r"(?<=[0-9.])(?=[A-Za-z]$)")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.([0-9]+))?")


@dataclass(slots=True)
class Comparison:
    """The rules of one problem, and the name of the rule that decided last."""

    answer_type: AnswerType
    ask: Ask
    meta: Mapping[str, Any] = field(default_factory=dict)
    path: str = "text"

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether two raw answer texts are equal; None while the judge has not spoken."""
        try:
            return self._same(clean(gold), without_introduction(clean(answer)), top=True)
        except TooLargeError as error:
            raise refused(str(error)) from None
        except RecursionError:
            raise refused("too deeply nested") from None

    def _same(self, gold: str, answer: str, *, top: bool = False) -> bool | None:
        if not answer:
            return self._decide("text", value=not gold)
        if canonical(gold) == canonical(answer):
            return self._decide("text", value=True)
        if (self.answer_type == "text" or is_prose(gold)) and words(gold) == words(answer):
            return self._decide("text", value=True)
        if (said := by_words(gold, answer)) is not None:
            return self._decide(said[0], value=said[1])
        if is_date(gold):
            return self._decide("text", value=False)
        if top and self.answer_type != "text":
            done, verdict = self._families(gold, answer)
            if done:
                return verdict
        if _APPROXIMATE.search(answer) and not _APPROXIMATE.search(gold):
            return self._approximation(gold, answer)
        if "=" in gold or "=" in answer:
            done, verdict = self._equations(gold, answer)
            if done:
                return verdict
        if self.answer_type != "text" and (ratio(gold) or ratio(answer)):
            return self._ratios(gold, answer)
        if has_relation(gold) or has_relation(answer):
            done, verdict = self._relations(gold, answer)
            if done:
                return verdict
        if _MEMBER.match(gold) and as_intervals(gold) and bare_items(answer)[1:]:
            return self._decide("interval", value=False)  # x in (1,2) is no point
        gold, answer = _MEMBER.sub("", gold), _MEMBER.sub("", answer)
        done, verdict = self._collections(gold, answer)
        if done:
            return verdict
        return self._quantities(gold, answer, top=top)

    def _decide(self, path: str, *, value: bool | None) -> bool | None:
        self.path = path
        return value

    # -- families of answers -------------------------------------------------------------------

    def _families(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        have = family(answer)
        want = have and (family(gold) or beside(gold, have))
        if have is None or want is None:
            return False, None
        body = renamed(have, want.parameter)
        if body is None or want.domain != have.domain or not same_names(want, have):
            return True, self._decide("family", value=False)
        if want.domain == INTEGERS:
            same = same_numbers(want, replace(have, body=body, parameter=want.parameter))
            if same is not None:
                return True, self._decide("family", value=same)
        return True, self._same(want.body, body)

    # -- labels and equations ------------------------------------------------------------------

    def _equations(self, gold: str, answer: str) -> tuple[bool, bool | None]:
        golds, answers = split_top(gold, EQUALS), split_top(answer, EQUALS)
        if (len(golds) == 1 and len(answers) == 1) or is_list(golds) or is_list(answers):
            return False, None
        gold_label, answer_label = label(golds), label(answers)
        if len(golds) == 1:
            values = answers[1:] if answer_label else answers
            if len(answers) > 1 and not members_agree(values, all_numbers=not answer_label):
                return True, self._decide("equation", value=False)
            return True, self._same(gold, values[-1])
        if len(answers) == 1:
            value = self._same(golds[-1], answer) if gold_label else False
            return True, value if gold_label else self._decide("equation", value=False)
        labelled = gold_label and answer_label and members_agree(answers[1:], all_numbers=False)
        if labelled and same_label(golds, answers):
            return True, self._same(golds[-1], answers[-1])
        if len(golds) == len(answers) == 2 and same_curve(golds, answers):
            return True, self._decide("closed_form", value=True)
        return True, self._symbolic(gold, answer)

    def _ratios(self, gold: str, answer: str) -> bool | None:
        golds, answers = ratio(gold) or [gold], ratio(answer) or [answer]
        if len(golds) == len(answers):
            return self._decide("ratio", value=same_ratio(golds, answers))
        if max(len(golds), len(answers)) > 2:
            return self._decide("ratio", value=False)
        one, other = (rf"\frac{{{side[0]}}}{{{side[1]}}}" if len(side) == 2 else side[0] for side in (golds, answers))
        return self._same(one, other)

    def _approximation(self, gold: str, answer: str) -> bool | None:
        r"""`5\sqrt{2} \approx 7.07` is one answer in two spellings, if the second is the first rounded."""
        parts = split_top(answer, _ABOUT)
        digits = _DECIMAL.fullmatch(quantity(parts[-1]).body)
        if len(parts) != 2 or not parts[0] or digits is None:
            return self._decide("approximate", value=False)
        exact = self._decimal(quantity(split_top(parts[0], EQUALS)[-1]).body)
        if exact is None:
            return self._decide("approximate", value=None)
        places = Margin(places=len(digits[1] or ""))
        if isinstance(exact, str) or not places.allows(exact, Fraction(digits[0])):
            return self._decide("approximate", value=False)
        first = self._same(gold, parts[0])
        return first if first is not False else self._same(gold, parts[1])

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
        logic = _logic(gold), _logic(answer)
        if all(logic) and logic[0] != logic[1]:
            return True, self._decide("bare", value=False)
        unions = split_top(gold, _UNION), split_top(answer, _UNION)
        if len(unions[0]) > 1 or len(unions[1]) > 1:
            if len(unions[0]) != len(unions[1]):
                sets = as_rational(gold) is None and as_rational(answer) is None
                return True, self._symbolic(gold, answer) if sets else self._decide("union", value=False)
            return True, self._items(*unions, ordered=False, path="union")
        left, right = matrix(gold), matrix(answer)
        if left is not None and right is not None:
            return True, self._matrices(left, right)
        point = _POINT.match(gold)  # A(2,3) may be called A or nothing, but not B
        if point and (answer.startswith(point.group().strip()) or not _POINT.match(answer)):
            gold = _POINT.sub("", gold)
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
        first, second = by_name(first, second)
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
        parts = measures(gold), measures(answer)
        if any(parts):
            return self._decide("unit", value=parts[0] == parts[1])
        want, have = quantity(gold), quantity(answer)
        if want.unit and have.unit is None and (spaced := quantity(_LETTER_UNIT.sub(" ", answer))).unit == want.unit:
            have = spaced  # `5m` may be a product, but not where metres are asked for
        gold_unit = want.unit or (self._stated_unit() if top else None)
        if gold_unit is not None and have.unit is not None and gold_unit != have.unit:
            return self._decide("unit", value=False)
        if (want.unit is not None and have.percent) or (want.percent and have.unit is not None):
            return self._decide("unit", value=False)
        wanted, had = as_rational(want.body), as_rational(have.body)
        if wanted is not None and had is not None:
            return self._decide("number", value=same_number(want, have, wanted, had, self._margin))
        if is_prose(want.body) or is_prose(have.body):
            return self._decide("text", value=words(want.body) == words(have.body))
        if wanted is not None and self._margin:
            value = self._decimal(have.body)
            if isinstance(value, Fraction):
                value = same_number(want, have, wanted, value, self._margin)
            return self._decide("rounded", value=None if value is None else value is True)
        if want.percent == have.percent:
            return self._expressions(want.body, have.body)
        one = rf"\frac{{{want.body}}}{{100}}" if want.percent else want.body
        other = rf"\frac{{{have.body}}}{{100}}" if have.percent else have.body
        return self._expressions(one, other)

    def _stated_unit(self) -> Unit | None:
        stated = self.meta.get("unit")
        return parse_unit(clean(str(stated))) if stated else None

    @property
    def _margin(self) -> Margin:
        return margin_of(self.meta)

    def _decimal(self, text: str) -> Fraction | str | None:
        """The value of a number such as 5\\sqrt{3}; "" if it is none, None while the judge has not spoken."""
        exact = as_rational(text)
        if exact is not None:
            return exact
        refuse_explosive(text)
        decimal = self.ask(("value", text))
        if decimal is None:
            return None
        value = parse_rational(decimal)
        return "" if value is None else value

    # -- the rest ------------------------------------------------------------------------------

    def _expressions(self, gold: str, answer: str) -> bool | None:
        left, right = parse_closed_form(gold), parse_closed_form(answer)
        if left is not None and right is not None:
            return self._decide("closed_form", value=left.equals(right))
        return self._symbolic(gold, answer)

    def _symbolic(self, gold: str, answer: str) -> bool | None:
        if self.answer_type == "text":
            return self._decide("text", value=False)  # a clock's 6:30 is no quotient
        if (rule := overlooked(gold, answer)) is not None:
            return self._decide(rule, value=False)
        refuse_explosive(answer)
        return self._decide("math_verify", value=self.ask(("equal", gold, answer)))


def without_introduction(text: str) -> str:
    """`clean` text without "The answer is" in front."""
    return _INTRODUCTION.sub("", text, count=1) if _INTRODUCTION.match(text) else text


def _logic(text: str) -> set[str]:
    """Whether statements are joined by and, or, both or neither."""
    joined = _LOGIC.findall(text) if has_relation(text) else _LOGIC_SIGN.findall(text)
    return {"and" if word in (" and ", "\\land", "\\wedge") else "or" for word in joined}
