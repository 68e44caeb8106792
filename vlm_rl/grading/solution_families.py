r"""Read families of solutions with a parameter: `x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}`.

Over the integers two families are the same if they hold the same numbers: `k\pi` is `-k\pi+3\pi`, and also `2k\pi`
together with `\pi+2k\pi`. Other families are compared as texts, with the answer's parameter renamed to the gold's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from vlm_rl.grading.closed_form import ClosedForm, parse_closed_form
from vlm_rl.grading.containers import parse_collection
from vlm_rl.grading.latex import canonical, outer_brackets

INTEGERS = "Z"
MAX_RESIDUES = 500  # numbers of one period

_LEAD = r"[ ,;:|]{0,4}(?:(?:and |where |with |for ){0,3})(?:(?:any|all|some|every|each|an) ){0,2}"
_DOMAIN = r"(?:\\mathbb\{[ZNQR]\}|[ZNQR](?![A-Za-z]))(?:\^(?:\{ ?[+*] ?\}|[+*])|_\{ ?[+*0] ?\}|_\+)?"
_DOTS = r"(?:\\[lc]?dots|\.\.\.)"
_STATED = re.compile(
    rf"\( ?{_LEAD}(?P<a>[a-z]) ?\\in ?(?P<domain>{_DOMAIN}) ?\)"
    rf"|{_LEAD}(?P<b>[a-z]) ?\\in ?(?P<same>{_DOMAIN})"
    rf"|\(? ?{_LEAD}(?:integers? (?P<c>[a-z])(?![A-Za-z])|(?<![A-Za-z\\])(?P<d>[a-z])(?: is)?(?: an| any)? integer"
    rf"|(?P<e>[a-z]) ?[为是] ?整数|(?P<f>[a-z]) ?= ?0 ?, ?\\pm ?1 ?, ?\\pm ?2 ?,(?: ?\\pm ?3 ?,)? ?{_DOTS}) ?\)?"
)
_BUILDER = re.compile(r"(?P<name>[a-z]|\\theta|\\alpha) ?(?:\\mid|[|:]) ?(?=(?P=name) ?(?:=|\\ne))")
_LABEL = re.compile(r"([a-z]|\\theta|\\alpha|\\varphi|\\phi) ?(?:=|\\ne(?![A-Za-z])) ?")


@dataclass(frozen=True, slots=True)
class SolutionFamily:
    """A text with a parameter."""

    body: str
    parameter: str  # a letter
    domain: str  # what the parameter runs through: Z, N, Z+, ...


def parse_family(text: str) -> SolutionFamily | None:
    """Split a `clean` text into body, parameter and domain; return None unless it states exactly one of each."""
    outer = outer_brackets(text)
    if outer is not None and outer[::2] == ("\\{", "\\}"):
        text = _BUILDER.sub("", outer[1], count=1)
    statements = list(_STATED.finditer(text))
    parameters = {next(match[key] for key in "abcdef" if match[key]) for match in statements}
    domains = {canonical(match["domain"] or match["same"] or INTEGERS) for match in statements}
    if len(parameters) != 1 or len(domains) != 1:
        return None
    body, parameter = _STATED.sub(" ", text).strip(" ,;:|"), parameters.pop()
    domain = re.sub(r"\\mathbb|[{}^_]", "", domains.pop())
    return SolutionFamily(body, parameter, domain) if _mentions(body, parameter) else None


def with_parameter_of(answer: SolutionFamily, gold: str) -> SolutionFamily | None:
    """Return a gold that states no domain as a family of the answer's parameter, or None if it does not hold that."""
    return SolutionFamily(gold, answer.parameter, answer.domain) if _mentions(gold, answer.parameter) else None


def rename_parameter(answer: SolutionFamily, parameter: str) -> str | None:
    """Return the answer's body with its parameter renamed, or None if the name is taken."""
    if answer.parameter == parameter:
        return answer.body
    if _mentions(answer.body, parameter):
        return None
    return _letters(answer.parameter).sub(lambda match: parameter if match[1] else match[0], answer.body)


def same_numbers(gold: SolutionFamily, answer: SolutionFamily) -> bool | None:
    """Return whether two families over the integers hold the same numbers; None if that cannot be told.

    Each member must be an arithmetic progression, all of their offsets and steps rational multiples of one number.
    Then the families repeat after a common period, and their numbers within one period are compared.
    """
    golds, answers = _progressions(gold), _progressions(answer)
    if not golds or not answers:
        return None
    start, unit = golds[0]
    lines = [((offset + -1 * start).ratio(unit), step.ratio(unit)) for offset, step in (*golds, *answers)]
    if any(offset is None or not step for offset, step in lines):
        return None
    exact = [(offset, abs(step)) for offset, step in lines if offset is not None and step is not None]
    scale = math.lcm(*(step.denominator for _, step in exact))
    period = Fraction(math.lcm(*(int(step * scale) for _, step in exact)), scale)
    if sum(period / step for _, step in exact) > MAX_RESIDUES:
        return None
    numbers = [{(offset + step * n) % period for n in range(int(period / step))} for offset, step in exact]
    return set[Fraction]().union(*numbers[: len(golds)]) == set[Fraction]().union(*numbers[len(golds) :])


def same_names(gold: SolutionFamily, answer: SolutionFamily) -> bool:
    """Return whether the labels of two families are the same, or one has none and the other no `x \\ne`."""
    left, right = (
        {canonical(match[0]) for item in _items(side.body) if (match := _LABEL.match(item))}
        for side in (gold, answer)
    )
    return left == right or (not (left and right) and not any("\\ne" in name for name in left | right))


def _items(body: str) -> list[str]:
    """Return the members that a body lists, or the body if it is a single one."""
    members = parse_collection(body, "list")
    return members.items if members and members.kind in ("set", "bare") else [body]


def _progressions(family: SolutionFamily) -> list[tuple[ClosedForm, ClosedForm]] | None:
    """Return (offset, step) of each member, or None if a member is not linear in the parameter."""
    progressions = []
    for item in _items(family.body):
        form = parse_closed_form(_LABEL.sub("", item, count=1).removeprefix("+"))
        parts = form.linear_parts(family.parameter) if form else None
        if parts is None:
            return None
        progressions.append(parts)
    return progressions


def _mentions(text: str, letter: str) -> bool:
    """Return whether a letter is in the text on its own, not as a part of a command or a word."""
    return any(match[1] for match in _letters(letter).finditer(text))


def _letters(letter: str) -> re.Pattern[str]:
    """Return a pattern that matches commands and words whole; group 1 is the letter where it is on its own."""
    return re.compile(rf"\\[A-Za-z]+|and|or|({letter})")
