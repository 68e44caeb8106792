"""Read answers with an equals sign, labels, chains and curves (`x=5`, `x=10/2=5`, `y=2x+3`), and ratios (`3:4`)."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from vlm_rl.grading.closed_form import ClosedForm, parse_closed_form
from vlm_rl.grading.containers import as_rational, bare_items
from vlm_rl.grading.latex import canonical, split_top_level
from vlm_rl.grading.quantities import parse_unit, split_quantity
from vlm_rl.grading.rational import NUMBER

EQUALS = frozenset("=")
_COLON = frozenset(":")
_TIME_OF_DAY = re.compile(r"[0-9] ?[AaPp]\.? ?[Mm]\.?$")
_LABEL = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z])[A-Za-z0-9_{}\\ .'(),]*|\([a-z](?: ?, ?[a-z])+\)"
    r"|[a-z]\^\{-1\} ?\([a-z]\)|P ?\((?:[^()]|\([^()]*\))*\)|\|[A-Z]{2}\|"  # f^{-1}(x), P(X=2), |AB|
    r"|[A-Za-z]{1,2}(?:_\{[0-9]\})?(?: ?[-+/] ?[A-Za-z]{1,2}(?:_\{[0-9]\})?){1,4}"  # the sum asked for: a+b
    r"|[A-Za-z]{1,3}(?:_\{[A-Za-z0-9]\})?(?: ?: ?[A-Za-z]{1,3}(?:_\{[A-Za-z0-9]\})?){1,4}"  # V_1:V_2
)
# What makes another number, or says that it is not this one. \frac{V_1}{V_2} and f(\frac{1}{2}) are labels.
_NO_LABEL = re.compile(
    r"\\frac(?!\{[A-Za-z]{1,3}(?:_\{[A-Za-z0-9]\})?\}\{[A-Za-z]{1,3}(?:_\{[A-Za-z0-9]\})?\})"
    r"|\\(?:sqrt|log|ln|lg)(?![A-Za-z])|(?<![A-Za-z])(?i:not|never|cannot|unequal|wrong|incorrect)(?![A-Za-z])"
)
_ARGUMENTS = re.compile(r"(?<=[A-Za-z'}]) ?\([^()]*\)")
_NAME = re.compile(r"[A-Z]{2,4}|[A-Z][a-z]+")  # AB, Alice
_DESCRIPTION = re.compile(r"[A-Za-z]{2,}[A-Za-z. ]*|[A-Za-z]")
# \log_{2} 8 and \lfloor 3.7 \rfloor, which name nothing
_EVALUATION = re.compile(
    r"\\(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|lg|exp|gcd|max|min|lfloor|lceil)(?![A-Za-z])"
    r"(?:[^A-Za-z\\]|\\(?:pi|circ|frac|sqrt|rfloor|rceil)(?![A-Za-z])|\\[{} ])*"
)
_UNIT = re.compile(r"(?<=[0-9.)}]) ([A-Za-z]+(?:\^\{[0-9]\})?)(?= ?(?:[-+*/)]|\\(?:times|cdot|div)(?![A-Za-z])|$))")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})?")
_REMAINDER = re.compile(r"([^\\]{1,100}?) ?\\pmod\{([1-9][0-9]{0,9})\}")
_CONGRUENT = re.compile(r"^[a-zA-Z](?:_\{[0-9]\})? ?\\equiv(?![A-Za-z]) ?")
_NUMERAL, _OPERATOR = re.compile(rf"-?(?:{NUMBER})"), re.compile(r"[-+/:]")
_GRAPH = {"y", "f(x)"}
_ASSIGNED = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})? ?=")
_ROOT, _INDEX = re.compile("[tx-z]"), re.compile(r"(?<=^[tx-z])_\{[0-9]\}$")  # x_1 and x_2 are two values of x
_TO = re.compile(r"(?<=[0-9)}]) to (?=[-0-9(\\])")


def split_equation(text: str) -> list[str]:
    """Return the parts between the "=" of a `clean` text, the name of a value first: `2=x` as x, 2.

    Of equal numbers only the last is left: `3+5=8` has the single part 8.
    """
    parts = split_top_level(text, EQUALS)
    if len(parts) == 1 or _VARIABLE.fullmatch(parts[0]):
        return parts
    numbers = _numbers(parts)
    if len(set(numbers)) == 1 and numbers[0] is not None:
        return parts[-1:]
    is_reversed = len(parts) == 2 and _VARIABLE.fullmatch(parts[1]) and not value_label(parts)
    return parts[::-1] if is_reversed else parts


def is_list(parts: list[str]) -> bool:
    """Return whether the parts between the "=" of a text belong to a list, such as `x=1, x=2`, not to an equation."""
    return any(len(split_top_level(part, frozenset(",;"))) > 1 for part in parts) or (
        len(parts) > 2
        and all(len(bare_items(part)) > 1 for part in parts[1:-1])
        and len(_ASSIGNED.findall("=".join(parts))) > 1
    )


def value_label(parts: list[str]) -> str | None:
    """Return the part in front of the first "=" if it only names the value, else None."""
    is_label = len(parts) > 1 and _LABEL.fullmatch(parts[0]) and not _NO_LABEL.search(_ARGUMENTS.sub("", parts[0]))
    return parts[0] if is_label and not _is_number(parts[0]) else None


def is_identity(text: str) -> bool:
    """Return whether a `clean` text such as 3=3 says of a number or a letter only that it equals itself."""
    parts = split_top_level(text, EQUALS)
    is_same_number = all(map(_NUMERAL.fullmatch, parts)) and len(set(_numbers(parts))) == 1
    return len(parts) > 1 and (is_same_number or len(set(map(canonical, parts))) == 1)


def is_solved(parts: list[str]) -> bool:
    """Return whether an equation names a value that is a number: x=3 and AB=5, but not y=2x+3 or 2x=6."""
    label = value_label(parts)
    return label is not None and not _OPERATOR.search(label) and _is_number(parts[-1])


def _is_number(text: str) -> bool:
    r"""Return whether a text is a number such as \sqrt{12} or \log_{2} 8, which names nothing."""
    form = parse_closed_form(text)
    is_constant = form is not None and all(name.isdigit() for name in form.symbols)
    return is_constant or _EVALUATION.fullmatch(text) is not None


def different_names(golds: list[str], answers: list[str]) -> bool:
    """Return whether both labels are names of figures or people, and not the same: AB and BA are one segment."""
    labels = golds[0], answers[0]
    first, second = (min(label, label[::-1]) if label.isupper() else label for label in labels)
    return first != second and all(map(_NAME.fullmatch, labels))


def same_label(golds: list[str], answers: list[str]) -> bool:
    """Return whether two labelled values may be compared: their labels agree, or are words that describe a number."""
    labels = golds[0], answers[0]
    names = {canonical(text) for text in labels}
    if any(map(_ROOT.fullmatch, labels)):
        names = {_INDEX.sub("", name) for name in names}
    if len(names) == 1 or names == _GRAPH:
        return True
    described = all(_DESCRIPTION.fullmatch(text) for text in labels) and len(labels[0]) > 1
    return described and as_rational(split_quantity(golds[-1]).body) is not None


def chain_agrees(values: list[str]) -> bool:
    """Return whether the values of a chain a = b = c name no two different numbers, and a number last if any."""
    numbers = _numbers(values)
    return numbers_agree(values) and (numbers[-1] is not None or len(set(numbers)) == 1)


def numbers_agree(values: list[str]) -> bool:
    """Return whether no two of the values are different numbers."""
    return len({*_numbers(values)} - {None}) <= 1


def _numbers(values: list[str]) -> list[Fraction | None]:
    return [as_rational(split_quantity(value).body) for value in values]


def without_units(text: str) -> str:
    """Return `12 cm+3 cm` as `12+3`: the last member of a chain states the unit."""
    return _UNIT.sub(lambda unit: "" if parse_unit(unit[1], number_before=False) else unit[0], text)


def with_remainder(text: str) -> str:
    r"""Return 2 for `17 \pmod{5}`, a member of a chain; any other text stays."""
    match = _REMAINDER.fullmatch(text)
    number = as_rational(match[1]) if match else None
    return text if match is None or number is None or number.denominator != 1 else str(number % int(match[2]))


def remainder_parts(text: str) -> tuple[str, int | None]:
    r"""Return (2, 5) for `2 \pmod{5}` and `x \equiv 2 \pmod{5}`; any other text with None."""
    match = _REMAINDER.fullmatch(_CONGRUENT.sub("", text))
    return (text, None) if match is None else (match[1].strip(), int(match[2]))


def same_curve(golds: list[str], answers: list[str]) -> bool:
    """Return whether left minus right side of one equation is a multiple of the other's: y=2x+3 and 2x-y+3=0."""
    gold, answer = _left_minus_right(*golds), _left_minus_right(*answers)
    return gold is not None and answer is not None and gold.is_proportional(answer)


def ratio_terms(text: str) -> list[str] | None:
    """Return the terms of `3:4:5` or `3 to 4`; None unless there are two or more, all closed forms, and no time."""
    if (":" not in text and " to " not in text) or _TIME_OF_DAY.search(text):
        return None
    terms = split_top_level(_TO.sub(":", text), _COLON)
    return terms if len(terms) > 1 and all(map(parse_closed_form, terms)) else None


def same_ratio(golds: list[str], answers: list[str]) -> bool:
    """Return whether two ratios of equally many terms are proportional; with a zero among them, the same."""
    left, right = ([form for term in terms if (form := parse_closed_form(term))] for terms in (golds, answers))
    pairs = list(zip(left, right, strict=True))
    if not all(form.numerator for form in (*left, *right)):  # any two products with a zero are equal
        return all(a.equals(b) for a, b in pairs)
    return all((a * d).equals(b * c) for (a, c), (b, d) in pairwise(pairs))


def _left_minus_right(left: str, right: str) -> ClosedForm | None:
    first, second = parse_closed_form(left), parse_closed_form(right)
    return None if first is None or second is None else first + -1 * second
