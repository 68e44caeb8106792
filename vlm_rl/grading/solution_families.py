r"""Families of answers: `x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}`, whatever the parameter is called.

Over the integers two families are the same if they hold the same numbers: `k\pi` is `-k\pi+3\pi`, and also
`2k\pi` together with `\pi+2k\pi`. Other families are compared with the answer's parameter renamed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from vlm_rl.grading.closed_form import ClosedForm, parse_closed_form
from vlm_rl.grading.containers import collection
from vlm_rl.grading.latex import canonical, enclosed

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
class Family:
    """A text with a parameter, and what the parameter runs through."""

    body: str
    parameter: str
    domain: str  # Z, N, Z+, ...


def family(text: str) -> Family | None:
    """`clean` text taken apart; None unless it says what its parameter, one letter, runs through."""
    outer = enclosed(text)
    if outer is not None and outer[::2] == ("\\{", "\\}"):
        text = _BUILDER.sub("", outer[1], count=1)
    found = [match.groupdict() for match in _STATED.finditer(text)]
    names = {next(match[key] for key in "abcdef" if match[key]) for match in found}
    domains = {canonical(match["domain"] or match["same"] or INTEGERS) for match in found}
    if len(names) != 1 or len(domains) != 1:
        return None
    body, parameter = _STATED.sub(" ", text).strip(" ,;:|"), names.pop()
    domain = re.sub(r"\\mathbb|[{}^_]", "", domains.pop())
    return Family(body, parameter, domain) if _holds(body, parameter) else None


def beside(gold: str, answer: Family) -> Family | None:
    """The gold as a family of the answer's parameter, where only the answer says that it is an integer."""
    return Family(gold, answer.parameter, answer.domain) if _holds(gold, answer.parameter) else None


def renamed(answer: Family, parameter: str) -> str | None:
    """The answer's body with its parameter called as the gold's; None if something else has that name."""
    if answer.parameter == parameter:
        return answer.body
    if _holds(answer.body, parameter):
        return None
    return _letters(answer.parameter).sub(lambda match: parameter if match[1] else match[0], answer.body)


def same_numbers(gold: Family, answer: Family) -> bool | None:
    """Whether two families over the integers hold the same numbers; None if they are not linear in the parameter."""
    golds, answers = _progressions(gold), _progressions(answer)
    if not golds or not answers:
        return None
    start, unit = golds[0]
    lines = [(_multiple(offset, start, unit), step.multiple(unit)) for offset, step in (*golds, *answers)]
    if any(offset is None or not step for offset, step in lines):
        return None
    exact = [(offset, abs(step)) for offset, step in lines if offset is not None and step is not None]
    scale = math.lcm(*(step.denominator for _, step in exact))
    period = Fraction(math.lcm(*(int(step * scale) for _, step in exact)), scale)
    if sum(period / step for _, step in exact) > MAX_RESIDUES:
        return None
    held = [{(offset + step * n) % period for n in range(int(period / step))} for offset, step in exact]
    return set[Fraction]().union(*held[: len(golds)]) == set[Fraction]().union(*held[len(golds) :])


def same_names(gold: Family, answer: Family) -> bool:
    """Whether the values may be compared: of `x=...` and `x=...` or none, but neither `y=...` nor `x \\ne ...`."""
    one, other = (
        {canonical(match[0]) for item in _items(side.body) if (match := _LABEL.match(item))}
        for side in (gold, answer)
    )
    return one == other or (not (one and other) and not any("\\ne" in name for name in one | other))


def _items(body: str) -> list[str]:
    found = collection(body, "list")
    return found.items if found and found.kind in ("set", "bare") else [body]


def _progressions(one: Family) -> list[tuple[ClosedForm, ClosedForm]] | None:
    """(offset, step) of each member; None if one is no such line."""
    found = []
    for item in _items(one.body):
        form = parse_closed_form(_LABEL.sub("", item, count=1).removeprefix("+"))
        parts = form.linear(one.parameter) if form else None
        if parts is None:
            return None
        found.append(parts)
    return found


def _multiple(offset: ClosedForm, start: ClosedForm, unit: ClosedForm) -> Fraction | None:
    return (offset + -1 * start).multiple(unit)


def _holds(text: str, letter: str) -> bool:
    return any(match[1] for match in _letters(letter).finditer(text))


def _letters(letter: str) -> re.Pattern[str]:
    """Finds commands and words whole, so that group 1 is this letter on its own."""
    return re.compile(rf"\\[A-Za-z]+|and|or|({letter})")
