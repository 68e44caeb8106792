"""Find what a model does in its reasoning: where it looks again, turns back, or repeats itself.

    reflection     a statement that pauses or checks: "wait", "hmm", "let me verify", "count again"
    backtracking   a statement that gives up what was said: "that is wrong", "alternatively", "try again"
    repetition     words within a run of REPEATED that occurred in this order before: what seq-rep-n counts (Welleck
                   et al., arXiv 1908.04319), taken over words instead of tokens

Statements are those of vlm_rl/grading/first_answer.py. One may be both reflection and backtracking. The words are
English; time is linear in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vlm_rl.grading.first_answer import statements

REPEATED = 8  # words
LABELS = {
    "first": "right answer first stated",
    "reflection": "reflection",
    "backtracking": "backtracking",
    "repetition": "repetition",
}
MOVES = ("reflection", "backtracking", "repetition")
_SAYS = {
    "reflection": re.compile(
        r"\b(?:wait|hmm+|verify|check|(?:double-?|re-?)(?:check|count|read|examine|consider|calculate|compute|think)"
        r"|(?:look|think|count)(?:ing)? (?:again|closer|back|twice)|is that right|to be sure|once more)\b",
        re.IGNORECASE,
    ),
    "backtracking": re.compile(
        r"\b(?:actually|alternatively|on second thought|(?:that|this|it)(?:'s| is| was| seems) (?:wrong|incorrect"
        r"|not (?:right|correct))|(?:i|we) (?:was|were|am|are) wrong|(?:a|my|the) (?:mistake|error)|misread"
        r"|miscounted|(?:try|start) (?:again|over)|(?:another|a different|different) (?:way|approach|method)"
        r"|scratch that|go(?:ing)? back|no, )",
        re.IGNORECASE,
    ),
}
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled stretch of a text, in characters."""

    start: int
    end: int
    kind: str  # of LABELS


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch with the same labels throughout; `begins` are those of its labels that begin with it."""

    start: int
    end: int
    kinds: tuple[str, ...]
    begins: tuple[str, ...]


def moves_of(text: str) -> list[Mark]:
    """Return the marks of a reasoning, those of each kind in order and apart from each other."""
    parts = list(statements(text))
    marks: list[Mark] = []
    for kind, says in _SAYS.items():
        last: Mark | None = None
        for start, end in parts:
            if not says.search(text, start, end):
                continue
            if last is not None and _goes_on(text, last.end, start):  # "Wait, | let me check" is one move
                marks[-1] = last = Mark(last.start, end, kind)
            else:
                last = Mark(start, end, kind)
                marks.append(last)
    return marks + list(_repetitions(text))


def _goes_on(text: str, end: int, start: int) -> bool:
    """Tell whether two statements are in one sentence: only spaces are between them, and no full stop before."""
    between = text[end:start]
    return not between.strip(" ") and text[end - 1 : end] not in ".!?。！？\"')*$"


def repeated_share(text: str, marks: Iterable[Mark]) -> float:
    """Return the share of the text's words that are marked as repetition; 0 of a text without words."""
    starts = [match.start() for match in _WORD.finditer(text)]
    repeated = sum(
        bisect_left(starts, mark.end) - bisect_left(starts, mark.start) for mark in marks if mark.kind == "repetition"
    )
    return repeated / len(starts) if starts else 0.0


def _repetitions(text: str) -> Iterator[Mark]:
    """Yield the longest stretches whose every word is in a run of REPEATED words that ended earlier in the text."""
    matches = list(_WORD.finditer(text))
    words = [match.group().strip(".,;:!?*\"'()").lower() for match in matches]
    seen: set[tuple[str, ...]] = set()
    start = end = -1  # of the stretch at hand, in words
    for place in range(len(words) - REPEATED + 1):
        run = tuple(words[place : place + REPEATED])
        if run in seen:
            if place > end:
                if end > 0:
                    yield Mark(matches[start].start(), matches[end - 1].end(), "repetition")
                start = place
            end = place + REPEATED
        seen.add(run)
    if end > 0:
        yield Mark(matches[start].start(), matches[end - 1].end(), "repetition")


def segments(marks: Sequence[Mark]) -> list[Segment]:
    """Return the marked stretches of a text, cut wherever a mark begins or ends, in order."""
    cuts = sorted({place for mark in marks for place in (mark.start, mark.end)})
    index = {place: number for number, place in enumerate(cuts)}
    kinds: list[list[str]] = [[] for _ in cuts]
    begins: list[list[str]] = [[] for _ in cuts]
    for kind in LABELS:
        for mark in marks:
            if mark.kind == kind and mark.start < mark.end:
                begins[index[mark.start]].append(kind)
                for number in range(index[mark.start], index[mark.end]):
                    kinds[number].append(kind)
    return [
        Segment(start, end, tuple(kinds[number]), tuple(begins[number]))
        for number, (start, end) in enumerate(pairwise(cuts))
        if kinds[number]
    ]
