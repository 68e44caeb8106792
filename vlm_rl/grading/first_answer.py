r"""Find where a response's reasoning first states the right answer, and how much is said after it.

The reasoning is the text up to the last `</think>`; where there is no block, the response up to its last \boxed. It
is cut into statements: sentences, lines, and what comes before a word that reopens the question ("wait", "check").
A statement states the value that it ends with: the last \boxed{}, what follows its last "=" or its last verb ("is",
"get"), or its last number, formula or letter of an option. The grader decides whether that value is the gold; a
number in passing does not count.

The overthinking share is the share of the reasoning's characters after the first statement that is right. It is
the complement of the outcome efficiency of Chen et al. (arXiv 2412.21187), with statements in place of whole
solutions and characters in place of tokens, so that checkpoints with different tokenizers compare. A small integer
can be met by chance on the way to a result, which overstates the share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from vlm_rl.grading.grader import Grader, GradeTask, try_grade
from vlm_rl.grading.number_words import parse_words
from vlm_rl.grading.quantities import split_quantity
from vlm_rl.templates import END_THINK, TEMPLATES, THINK, boxes

MAX_GRADED = 200  # different values of one response that are compared with the gold
MAX_UNDECIDED = 3  # comparisons that time out; after them only those that need no worker are made
_TAIL = 200  # characters at the end of a statement that are read
_LONGEST = 60  # characters of a stated value

# A full stop ends a sentence where white space follows, perhaps behind closing signs: 3.5 is a number.
_END = re.compile(r"[.!?][)\]\"'*$]{0,4}(?=\s|\Z)|[。！？]|\n+")
_REOPENS = re.compile(
    r"\b(?:(?:but |oh |hmm,? )?wait|hmm|alternatively|(?:let me |let's |let us |to |double-)?check)\b", re.IGNORECASE
)
_VERB = re.compile(
    r"\b(?:is|are|was|be|equals?|gets?|gives?|have|has|makes?|leaves?|answer|option|choice|total)\b"
    r"|等于|答案|结果|[是为得选共即有]",
    re.IGNORECASE,
)
_SIGNS = re.compile(r"\s*([-=+*/^])\s*")
_EQUATION = re.compile(r"([^=\n,;:。，；：]{1,80})=([^=\n,;:。，；：]{1,80})$")
_FORMULA = re.compile(r"(?:\$|\\\(|\\\[)([^$]{1,80}?)(?:\$|\\\)|\\\])$")
_NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_PLAIN = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")
_CLOSING = " \t\r\n.!?。！？,;:*_"


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The first statement of the right answer; places are characters from the beginning of the response."""

    start: int
    end: int  # where the statement ends
    text: str  # the value that the grader found right
    after: int  # characters of the reasoning that follow
    share_after: float  # of the reasoning's characters: the overthinking share, in [0, 1]


def reasoning_span(response: str) -> tuple[int, int]:
    """Return (start, end) of the reasoning in a response, without white space at its ends."""
    start, end = 0, response.rfind(END_THINK)
    is_block = end >= 0 or response.lstrip().startswith(THINK)
    if end < 0:
        box = -1 if is_block else response.rfind("\\boxed")
        end = box if box >= 0 else len(response)
    inside = response[:end].lstrip()
    if inside.startswith(THINK):
        start = end - len(inside) + len(THINK)
    return _stripped(response, start, end)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the ends of a part of a text without its white space."""
    part = text[start:end]
    kept = part.strip()
    start += len(part) - len(part.lstrip()) if kept else 0
    return start, start + len(kept)


def statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each statement of a text, in order; time linear in its length."""
    cuts = sorted(
        {*(match.end() for match in _END.finditer(text)), *(match.start() for match in _REOPENS.finditer(text))}
    )
    start = 0
    for end in (*cuts, len(text)):
        part = _stripped(text, start, end)
        if part[0] < part[1]:
            yield part
        start = end


def stated_values(statement: str, gold: str = "") -> list[str]:
    """Return the values that a statement may end with, the surest first, without repetition.

    Only a value with a digit or a command of LaTeX, a single letter, or the gold's own text is worth a comparison.
    """
    tail = statement[-_TAIL:]
    if r"\boxed" in tail:
        return [content.strip() for content in (boxes(tail) or [])[-1:]]
    tail = tail.rstrip(_CLOSING)
    formula = _FORMULA.search(tail)
    candidates = [formula[1].rpartition("=")[2]] if formula else []
    verbs = list(_VERB.finditer(tail))
    for rest in (tail.rpartition("=")[2] if "=" in tail else "", tail[verbs[-1].end() :] if verbs else ""):
        rest = rest.strip(_CLOSING)
        number = _NUMBER.match(rest)
        candidates += [rest, number[0] if number else ""]
    candidates.append(tail.split()[-1] if tail.split() else "")
    values = dict.fromkeys(
        value.strip(_CLOSING + "$()") if "\\" not in value else value.strip("$ ") for value in candidates
    )
    return [value for value in values if len(value) <= _LONGEST and _is_worth_it(value, gold)]


def _is_worth_it(value: str, gold: str) -> bool:
    is_letter = len(value) == 1 and value.isalpha()
    is_own_text = bool(value) and value.casefold() == gold.casefold()
    return bool(re.search(r"[\d\\]", value)) or is_letter or is_own_text or _is_number_in_words(value)


def _is_number_in_words(value: str) -> bool:
    """Return whether a value is `twelve`, `twelve apples`, 十二 or 十二个."""
    return parse_words(value) is not None or parse_words(split_quantity(value).body) is not None


def repeats_equation(statement: str, question: str) -> bool:
    """Return whether a statement ends with an equation of the question: it restates what is given."""
    match = _EQUATION.search(statement.rstrip(_CLOSING + "$)"))
    if match is None or "=" not in question:
        return False
    left, right, asked = (_SIGNS.sub(r"\1", text.replace("$", " ")).strip() for text in (*match.groups(), question))
    for place in re.finditer(re.escape(f"={right}"), asked):
        known = re.search(r"[^\s=,;:]+$", asked[: place.start()])
        is_whole = re.match(r"\.?[0-9A-Za-z+*/^-]", asked[place.end() :]) is None
        if is_whole and known and left.endswith(known[0]):
            return True
    return False


def find_first_answer(task: GradeTask, *, grader: Grader | None = None) -> tuple[FirstAnswer | None, int]:
    """Return (the first statement of the right answer or None, the number of the grader's comparisons).

    Args:
        task: the response with its gold; its template does not matter.
        grader: its worker processes make the symbolic comparisons, each within their limit of CPU time. Without one
            a value that needs them does not count, and no process is started.

    At most MAX_GRADED values are compared, so that a hostile response costs a bounded time.
    """
    begin, stop = reasoning_span(task.response)
    golds = (task.gold,) if isinstance(task.gold, str) else task.gold
    judged: set[str] = set()
    undecided = compared = 0
    is_settled = task.answer_type != "choice" and not task.meta
    for start, end in statements(task.response[begin:stop]):
        statement = task.response[begin + start : begin + end]
        if task.question and repeats_equation(statement[-_TAIL:], task.question):
            continue
        for value in stated_values(statement, golds[0]):
            if value in judged:
                continue
            if len(judged) >= MAX_GRADED:
                return None, compared
            judged.add(value)
            if is_settled and differ_as_numbers(value, golds):
                continue
            compared += 1
            asked = replace(task, response=rf"\boxed{{{value}}}", template=TEMPLATES["plain"])
            grade = try_grade(asked, {}, {})
            if grade is None and grader is not None and undecided < MAX_UNDECIDED:
                grade = grader.grade_many([asked])[0]
                undecided += grade.verdict in ("timeout", "error")
            if grade is not None and grade.correct:
                after = stop - begin - end
                return FirstAnswer(begin + start, begin + end, value, after, after / (stop - begin)), compared
    return None, compared


def differ_as_numbers(value: str, golds: Sequence[str]) -> bool:
    """Tell whether a value and all golds are plain decimals, none of which equals it: to the grader they differ too.

    This is a hundred times faster than the grader, and most values in a reasoning are such numbers.
    """
    if not _PLAIN.fullmatch(value) or not all(_PLAIN.fullmatch(gold) for gold in golds):
        return False
    return all(Decimal(value) != Decimal(gold) for gold in golds)
