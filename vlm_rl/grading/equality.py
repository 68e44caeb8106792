r"""Decide whether an answer equals the gold: by exact rules first, by math-verify where they leave it open.

The first rule that applies decides, in this order: the same text or words; families of solutions; approximations;
labels and equations; ratios; inequalities and intervals; unions, matrices, sets, tuples and lists, item by item;
numbers as exact rationals, with percent signs and units; exact closed forms (roots, \pi, polynomials); math-verify.
math-verify is not asked if both sides are rational, have units or are closed forms.

Nothing here waits. A rule that needs math-verify calls `ask`, which returns None while the result is not known; then
the decision is pending too. The caller gets all results that were asked for in one batch, and compares again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from vlm_rl.grading.clock_times import may_be_ratio, parse_time, parse_time_range
from vlm_rl.grading.containers import (
    Collection,
    as_rational,
    as_roots,
    bare_items,
    has_names,
    item_key,
    matrix_rows,
    order_matters,
    pair_off,
    parse_collection,
    relate_signs_alike,
    sort_by_name,
    unmatched,
    with_set_braces,
)
from vlm_rl.grading.decision import Decision, all_equal, any_equal, refusal
from vlm_rl.grading.derivatives import name_derivatives
from vlm_rl.grading.equations import (
    EQUALS,
    chain_agrees,
    different_names,
    is_identity,
    is_list,
    is_solved,
    numbers_agree,
    ratio_terms,
    remainder_parts,
    same_curve,
    same_label,
    same_ratio,
    split_equation,
    value_label,
    with_remainder,
    without_units,
)
from vlm_rl.grading.inequalities import as_intervals, has_relation
from vlm_rl.grading.latex import canonical, clean, split_top_level
from vlm_rl.grading.limits import MAX_SYMBOLIC_ITEMS
from vlm_rl.grading.quantities import (
    Margin,
    split_quantity,
)
from vlm_rl.grading.questions import asks_factors, asks_ratio, uses_indices
from vlm_rl.grading.rational import TooLargeError, is_date
from vlm_rl.grading.solution_families import (
    INTEGERS,
    parse_family,
    rename_parameter,
    same_names,
    same_numbers,
    with_parameter_of,
)
from vlm_rl.grading.values import ValueComparison
from vlm_rl.grading.vectors import columns_alike, may_be_equal, same_dimension, vector_components
from vlm_rl.grading.worded_answers import compare_wording, is_prose, normalized_words, same_worded_range
from vlm_rl.grading.written_forms import is_factorization, is_range, parse_form, same_range, written_like

_UNION, _ABOUT = frozenset(["\\cup"]), frozenset(["\\approx"])
_INTRODUCTION = re.compile(
    r"(?:(?:the|our|so|thus|hence|therefore),? ){0,2}(?:correct |final |right )?"
    r"(?:answer|result|value|solution|ans\.?)(?: is|:| equals)[: ]*|答案[是为:]+ ?",
    re.IGNORECASE,
)
_TILDE = re.compile(r"(?<=[0-9%]) ?~ ?(?=[0-9])")
_MEMBERSHIP = re.compile(r"^[a-z] ?\\in(?![A-Za-z]) ?")  # x \in (1,2)
_POINT_NAME = re.compile(r"^[A-Z](?:_\{[0-9]\})?'* ?(?=\()")  # A(2,3)
_TUPLE_NAMES = re.compile(r"^\(([a-z](?: ?, ?[a-z])+)\) ?(?:=|\\in(?![A-Za-z])) ?")  # (p,q) = (5,2)
_SET_DESCRIPTION = re.compile(r"[<>=]|\\(?:le|ge|ne|mathbb|setminus|backslash)(?![A-Za-z])")
_ALTERNATIVES = re.compile(r"(?<![A-Za-z\\])(?:or|either|oder|ou)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")
_APPROXIMATE = re.compile(r"\\(?:approx|sim|simeq|cong|doteq)(?![A-Za-z])|\.\.\.|\\[lc]?dots(?![A-Za-z])")
_CONTINUED = re.compile(r"[-+*] ?\\dots(?![A-Za-z])|\\(?:cdot|times) ?\\dots(?![A-Za-z])")  # 1+2+\dots+10
_CONNECTIVE_SIGN = re.compile(r"\\(?:land|wedge|lor|vee)(?![A-Za-z])")
_CONNECTIVE = re.compile(rf"{_CONNECTIVE_SIGN.pattern}| (?:and|or) ")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.([0-9]+))?")


@dataclass(frozen=True, slots=True)
class AnswerComparison(ValueComparison):
    """Compare answers to one problem.

    A rule is a method that returns a Decision, or None if it does not apply. All texts but those of `compare` are
    `clean`.
    """

    def compare(self, gold: str, answer: str) -> Decision:
        """Decide whether two raw texts are equal. Raises UndecidedError for texts that are not evaluated."""
        try:
            left = clean(with_set_braces(gold))
            right = without_introduction(clean(_TILDE.sub("-", answer) if is_range(left) else answer))
            if self.answer_type != "text":
                left, right = columns_alike(*name_derivatives(left, right))
            return self._decide(left, right, is_whole=True)
        except TooLargeError as error:
            raise refusal(str(error)) from None
        except RecursionError:
            raise refusal("a text too deeply nested") from None

    def _decide(self, gold: str, answer: str, *, is_whole: bool = False, is_computed: bool = False) -> Decision:
        """Decide between two texts, which are the whole answers or parts of them, such as the items of a set.

        In a chain such as 17-12=5, whose parts `is_computed` marks, 17-12 is a difference and no score.
        """
        decision = (
            self._text(gold, answer)
            or (None if is_computed else self._written_form(gold, answer))
            or self._time(gold, answer)
            or (self._family(gold, answer) if is_whole else None)
            or self._remainder(gold, answer)
            or self._approximation(gold, answer, is_whole=is_whole)
            or self._equation(gold, answer)
            or self._ratio(gold, answer)
            or self._relation(gold, answer)
        )
        if decision:
            return decision
        if _MEMBERSHIP.match(gold) and as_intervals(gold) and bare_items(answer)[1:]:
            return Decision(False, "interval")  # x \in (1,2) names no point
        gold, answer = _MEMBERSHIP.sub("", gold), _MEMBERSHIP.sub("", answer)
        return self._container(gold, answer) or self._quantity(gold, answer, is_whole=is_whole)

    # -- texts and words -----------------------------------------------------------------------

    def _text(self, gold: str, answer: str) -> Decision | None:
        """Accept equal texts, words and outcomes; refuse a different date and `\\pm` for `\\mp` beside `\\pm`."""
        if not answer:
            return Decision(not gold, "text")
        if canonical(gold) == canonical(answer):
            return Decision(True, "text")
        if (self.answer_type == "text" or is_prose(gold)) and normalized_words(gold) == normalized_words(answer):
            return Decision(True, "text")
        if is_prose(gold) and same_worded_range(gold, answer):
            return Decision(True, "text")
        if decision := compare_wording(gold, answer):
            return decision
        if not relate_signs_alike(gold, answer):
            return Decision(False, "text")
        return Decision(False, "text") if is_date(gold) else None

    # -- scores, ranges, sizes -----------------------------------------------------------------

    def _written_form(self, gold: str, answer: str) -> Decision | None:
        """Compare `3-2`, `5-7 cm` and `3 x 4` numeral by numeral: a gold with such signs is no calculation."""
        form = parse_form(gold)
        if form is None:
            return Decision(True, "written_form") if same_range(gold, answer) else None
        given = written_like(form, answer)
        any_order = is_factorization(form) or (form.kind == "times" and asks_factors(self.question))
        return Decision(given is not None and form.equals(given, any_order=any_order), "written_form")

    # -- times ---------------------------------------------------------------------------------

    def _time(self, gold: str, answer: str) -> Decision | None:
        """Compare 4:30 with a time as a time; it is a ratio only where the question or the other side says so."""
        if (wanted := parse_time_range(gold)) is not None:
            return Decision(wanted == parse_time_range(answer), "time")
        wanted = parse_time(gold)
        if wanted is None or asks_ratio(self.question):
            return None
        given = parse_time(answer)
        return None if given is None and may_be_ratio(gold, answer) else Decision(wanted == given, "time")

    # -- families of solutions -----------------------------------------------------------------

    def _family(self, gold: str, answer: str) -> Decision | None:
        r"""Compare `k\pi, k \in \mathbb{Z}` by the numbers that it holds, or by its text with the same parameter."""
        if self.answer_type == "text":
            return None
        answer_family = parse_family(answer)
        gold_family = answer_family and (parse_family(gold) or with_parameter_of(answer_family, gold))
        if answer_family is None or gold_family is None:
            return None
        body = rename_parameter(answer_family, gold_family.parameter)
        if body is None or gold_family.domain != answer_family.domain or not same_names(gold_family, answer_family):
            return Decision(False, "family")
        if gold_family.domain == INTEGERS:
            same = same_numbers(gold_family, replace(answer_family, body=body, parameter=gold_family.parameter))
            if same is not None:
                return Decision(same, "family")
        return self._decide(gold_family.body, body)

    # -- approximations, equations and ratios --------------------------------------------------

    def _approximation(self, gold: str, answer: str, *, is_whole: bool) -> Decision | None:
        r"""Read `5\sqrt{2} \approx 7.07` as a single value if its right side is its left side rounded.

        `\approx 7.07` alone is its number where the problem states a margin, and refused elsewhere.
        """
        if not _APPROXIMATE.search(answer) or _APPROXIMATE.search(gold):
            return None
        sides = split_top_level(answer, EQUALS)
        values = [side for side in sides if not _APPROXIMATE.search(_CONTINUED.sub("", side))]
        if values != [answer] and len(values) == len(sides) and not _APPROXIMATE.search(sides[-1]):
            said = [side for side in sides if not _APPROXIMATE.search(side)]
            return self._decide(gold, "=".join(said), is_whole=is_whole)  # 1+2+\dots+10=55 says 55
        parts = split_top_level(answer, _ABOUT)
        number = split_quantity(parts[-1]).body
        if self._margin and len(parts) == 2 and not parts[0] and as_rational(number) is not None:
            return self._decide(gold, parts[1], is_whole=is_whole)
        digits = _DECIMAL.fullmatch(number)
        if len(parts) != 2 or not parts[0] or digits is None:
            return Decision(False, "approximate")
        exact = self._decimal(split_quantity(split_top_level(parts[0], EQUALS)[-1]).body)
        if exact is None:
            return Decision(None, "approximate")
        margin = Margin(places=len(digits[1] or ""))
        if isinstance(exact, str) or not margin.allows(exact, Fraction(digits[0])):
            return Decision(False, "approximate")
        first = self._decide(gold, parts[0])
        return self._decide(gold, parts[1]) if first.equal is False else first

    def _equation(self, gold: str, answer: str) -> Decision | None:
        """Compare the values of `x = 5`, `x = 10/2 = 5` and `|3-8| = 5`, and curves such as `y = 2x+3`."""
        if "=" not in gold and "=" not in answer:
            return None
        if is_identity(gold) or is_identity(answer):
            return Decision(False, "equation")  # 3=3 says nothing
        golds, answers = split_equation(gold), split_equation(answer)
        if len(golds) == len(answers) == 1:  # 3+5=8 says 8
            return None if (golds[0], answers[0]) == (gold, answer) else self._decide(golds[0], answers[0])
        if is_list(golds) or is_list(answers):
            return None
        gold_label, answer_label = value_label(golds), value_label(answers)
        is_ratio = ":" in f"{gold_label}{answer_label}"
        compare = self._named_ratio if is_ratio else self._decide
        if len(golds) == 1 and answer_label:
            return compare(gold, answers[-1]) if chain_agrees(answers[1:]) else Decision(False, "equation")
        if len(answers) == 1 and gold_label:
            return compare(golds[-1], answer)
        if len(golds) == 1 or len(answers) == 1:
            return self._chain(golds, answers)
        if is_ratio and canonical(golds[0]) != canonical(answers[0]):
            return Decision(False, "ratio")
        if is_ratio:
            return compare(golds[-1], answers[-1])
        if gold_label and answer_label and different_names(golds, answers):
            return Decision([*map(canonical, golds)] == [*map(canonical, reversed(answers))], "equation")  # CD=AB
        if gold_label and answer_label and chain_agrees(answers[1:]) and same_label(golds, answers):
            return self._decide(golds[-1], answers[-1])
        if is_solved(golds) != is_solved(answers):
            return Decision(False, "equation")  # 2x=6 for x=3 repeats the question
        if len(golds) == len(answers) == 2 and same_curve(golds, answers):
            return Decision(True, "closed_form")
        return self._symbolic(gold, answer)

    def _remainder(self, gold: str, answer: str) -> Decision | None:
        r"""Compare `2 \pmod{5}` with a remainder of the same modulus, or with a gold that is the remainder alone."""
        given, modulus = remainder_parts(answer)
        if modulus is None or "\\pmod" in given:
            return None
        wanted, gold_modulus = remainder_parts(gold)
        if gold_modulus is None:
            is_reduced = given.isdecimal() and int(given) < modulus and "\\equiv" not in answer
            return self._decide(gold, given) if is_reduced and "\\pmod" not in gold else None
        return self._decide(wanted, given) if gold_modulus == modulus else Decision(False, "equation")

    def _chain(self, golds: list[str], answers: list[str]) -> Decision:
        """Compare a value with `|3-8| = 5`: every member of the chain must have that value."""
        golds, answers = (
            [*(with_remainder(without_units(part)) for part in side[:-1]), side[-1]] for side in (golds, answers)
        )
        if not numbers_agree([*golds, *answers]):
            return Decision(False, "equation")
        pairs = [(gold, answer) for gold in golds for answer in answers]
        verdicts = [self._decide(gold, answer, is_computed=True).equal for gold, answer in pairs]
        return Decision(all_equal(verdicts), "equation")

    def _named_ratio(self, gold: str, answer: str) -> Decision:
        """Compare the values of V_1:V_2, of which 4:30 is not a time."""
        return self._ratio(gold, answer) or self._decide(gold, answer)

    def _ratio(self, gold: str, answer: str) -> Decision | None:
        """Compare `3:4` with a ratio of as many terms, or one of two terms with a quotient."""
        if self.answer_type == "text" or not (ratio_terms(gold) or ratio_terms(answer)):
            return None
        golds, answers = ratio_terms(gold) or [gold], ratio_terms(answer) or [answer]
        if len(golds) == len(answers):
            return Decision(same_ratio(golds, answers), "ratio")
        if max(len(golds), len(answers)) > 2:
            return Decision(False, "ratio")
        left, right = (
            rf"\frac{{{terms[0]}}}{{{terms[1]}}}" if len(terms) == 2 else terms[0] for terms in (golds, answers)
        )
        return self._decide(left, right)

    # -- inequalities --------------------------------------------------------------------------

    def _relation(self, gold: str, answer: str) -> Decision | None:
        """Compare inequalities in one variable, and what is written as a range, interval by interval."""
        if not has_relation(gold) and not has_relation(answer):
            return None
        left, right = as_intervals(gold), as_intervals(answer)
        if left is None and not has_relation(gold) and not _SET_DESCRIPTION.search(gold):
            return Decision(False, "relation")  # a value is asked for, not a range
        if left is None or (right is None and has_relation(answer)):
            return None
        if right is None or (left.variable and right.variable and left.variable != right.variable):
            return Decision(False, "relation")
        if len(left.parts) != len(right.parts):
            return self._symbolic("\\cup ".join(left.parts), "\\cup ".join(right.parts))
        return self._items(list(left.parts), list(right.parts), ordered=False, path="relation")

    # -- sets, tuples, intervals, lists, matrices ----------------------------------------------

    def _container(self, gold: str, answer: str) -> Decision | None:
        """Compare what has parts; statements joined by "and" never equal statements joined by "or"."""
        connectives = _connectives(gold), _connectives(answer)
        if all(connectives) and connectives[0] != connectives[1]:
            return Decision(False, "bare")
        return (
            self._union(gold, answer)
            or self._matrix(gold, answer)
            or self._vector(gold, answer)
            or self._collection(gold, answer)
        )

    def _vector(self, gold: str, answer: str) -> Decision | None:
        """Compare a vector in two notations by its components: (3,-4), a column, 3i-4j."""
        wanted, given = vector_components(gold), vector_components(answer)
        if wanted is None or given is None or not may_be_equal(wanted[0], given[0]):
            return None
        golds, answers = same_dimension(wanted[1], given[1], {wanted[0], given[0]})
        return self._items(golds, answers, ordered=True, path="tuple")

    def _union(self, gold: str, answer: str) -> Decision | None:
        r"""Compare `(-\infty,1)\cup(3,4)` part by part."""
        golds, answers = split_top_level(gold, _UNION), split_top_level(answer, _UNION)
        if len(golds) == 1 and len(answers) == 1:
            return None
        if len(golds) == len(answers):
            return self._items(golds, answers, ordered=False, path="union")
        if as_rational(gold) is None and as_rational(answer) is None:
            return self._symbolic(gold, answer)  # two sets, one of which may be written in fewer parts
        return Decision(False, "union")

    def _matrix(self, gold: str, answer: str) -> Decision | None:
        """Compare matrices entry by entry, whatever their brackets."""
        golds, answers = matrix_rows(gold), matrix_rows(answer)
        if golds is None or answers is None:
            return None
        if [len(row) for row in golds] != [len(row) for row in answers]:
            return Decision(False, "matrix")
        return self._items([*chain(*golds)], [*chain(*answers)], ordered=True, path="matrix")

    def _collection(self, gold: str, answer: str) -> Decision | None:
        """Compare sets, tuples, intervals and lists item by item, and refuse a list where one value is asked for."""
        point = _POINT_NAME.match(gold)  # A(2,3) may be called A or nothing, but not B
        if point and (answer.startswith(point.group().strip()) or not _POINT_NAME.match(answer)):
            gold = _POINT_NAME.sub("", gold)
        golds = parse_collection(gold, self.answer_type)
        # In an answer "3 or 5" is a list only where several values are asked for; elsewhere it is a guess.
        asks_for_several = golds is not None and golds.kind in ("bare", "set")
        if _ALTERNATIVES.search(answer) and not asks_for_several and not _ALTERNATIVES.search(gold):
            return Decision(False, "guess_list")
        if golds is not None and golds.kind == "tuple":
            answer = _POINT_NAME.sub("", answer)
        if golds is not None and (names := _TUPLE_NAMES.match(answer)) and has_names(golds):
            letters = re.findall("[a-z]", names[1])
            if letters != sorted(letters):
                return Decision(False, golds.kind)  # (q,p) = (5,2) for p=5, q=2
            answer = answer[names.end() :]
        answers = parse_collection(answer, self.answer_type)
        is_bare = answers is not None and answers.kind == "bare"
        if golds is None and is_bare and as_rational(split_quantity(answer).body) is not None:
            answers = None  # 3,250 for 3250
        if self.answer_type == "list" and golds is None and answers is not None:
            golds = Collection("bare", [gold])
        if golds is None and answers is None:
            return None
        if golds is None or answers is None:
            if _SET_DESCRIPTION.search(gold) or _SET_DESCRIPTION.search(answer):
                return self._symbolic(gold, answer)
            return Decision(False, "guess_list" if golds is None else golds.kind)
        by_index = uses_indices(self.question)
        if not by_index:
            golds, answers = as_roots(golds), as_roots(answers)
        ordered = order_matters(golds, answers, self.answer_type, by_index=by_index)
        if ordered is None:
            return Decision(False, golds.kind)
        golds, answers = sort_by_name(golds, answers)
        # The order inside an alternative, such as p=5,q=2 of a list of two, counts.
        has_groups = any(len(bare_items(item)) > 1 for item in golds.items)
        rules = replace(self, answer_type="expression") if has_groups and self.answer_type == "list" else self
        if "set" in (golds.kind, answers.kind):
            key = rules._item_key
            return rules._members(golds.distinct_items(key), answers.distinct_items(key), path=golds.kind)
        return rules._items(golds.items, answers.items, ordered=ordered, path=golds.kind)

    @property
    def _item_key(self) -> Callable[[str], str]:
        """Return the function that keys an item: equal keys mean equal items. A text is not read as a number."""
        return canonical if self.answer_type == "text" else item_key

    def _members(self, golds: list[str], answers: list[str], *, path: str) -> Decision:
        """Decide whether every member of either set equals one of the other: 2 and \\sqrt{4} are one member."""
        if len(golds) == len(answers):
            decision = self._items(golds, answers, ordered=False, path=path)
            if decision.equal is not False:
                return decision
        left, right = unmatched(golds, answers, self._item_key)
        if len(left) + len(right) > MAX_SYMBOLIC_ITEMS:
            return Decision(False, path)
        verdicts = [any_equal([self._decide(gold, answer).equal for answer in answers]) for gold in left]
        verdicts += [any_equal([self._decide(gold, answer).equal for gold in golds]) for answer in right]
        return Decision(all_equal(verdicts), path)

    def _items(self, golds: list[str], answers: list[str], *, ordered: bool, path: str) -> Decision:
        """Decide item by item. Every pair is compared, so that all symbolic queries are asked in one batch."""
        if len(golds) != len(answers):
            return Decision(False, path)
        if ordered:
            verdicts = [self._decide(gold, answer).equal for gold, answer in zip(golds, answers, strict=True)]
            return Decision(all_equal(verdicts), path)
        left, right = unmatched(golds, answers, self._item_key)
        if len(left) > MAX_SYMBOLIC_ITEMS:
            raise refusal(f"{len(left)} items to pair off")
        return Decision(pair_off([[self._decide(gold, answer).equal for answer in right] for gold in left]), path)


def without_introduction(text: str) -> str:
    """Return a `clean` text without "The answer is" at its start."""
    return _INTRODUCTION.sub("", text, count=1) if _INTRODUCTION.match(text) else text


def _connectives(text: str) -> set[str]:
    """Return "and" and "or" as far as they join the statements of a text."""
    words = _CONNECTIVE.findall(text) if has_relation(text) else _CONNECTIVE_SIGN.findall(text)
    return {"and" if word in (" and ", "\\land", "\\wedge") else "or" for word in words}
