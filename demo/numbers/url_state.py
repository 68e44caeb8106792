"""What the page shows, as one value: the state of the controls and the query of the address.

UrlState.parse("base=a@0&others=a@40&low=20")  ->  UrlState(base="a@0", others=("a@40",), low=20)
url.query()                                    ->  the same text: only what differs from the default
url.patched("at=toy-7&tab=problems")           ->  what a click on a point asks for
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qs, urlencode

MAX_OTHERS = 5  # beside the baseline
MAX_QUERY = 8_000  # characters of an address
MAX_TEXT = 200  # characters of one value
NO_CATEGORY = "none"  # names an empty category: a key without a value means the default

TABS = {
    "overview": "Overview",
    "problems": "Problems",
    "table": "Table",
    "lengths": "Lengths",
    "reasoning": "Reasoning",
    "training": "Training",
    "live": "Live",
    "export": "Export",
}
CHANGES = {
    "": "any",
    "changed": "verdict changed",
    "right": "became right",
    "wrong": "became wrong",
    "both_right": "right in both",
    "both_wrong": "wrong in both",
}
FLAGS = {
    "cut": "cut at the limit",
    "format": "format fault",
    "no_answer": "no answer found",
    "timeout": "verifier timeout or error",
}
SORTS = {
    "": "Dataset order",
    "difference": "lengths differ most",
    "growth": "length grew most",
    "shrink": "length shrank most",
    "longest": "longest first",
    "hardest": "hardest first",
}
SORT_COLUMNS = {
    "id": "problem",
    "category": "category",
    "difficulty": "difficulty",
    "score": "score",
    "length": "tokens",
}  # of the table; the last two have one for each checkpoint
VERDICTS = {"": "any", "correct": "right", "wrong": "wrong or no answer"}
PARTS = {"": "whole response", "reasoning": "reasoning only", "answer": "answer only"}


@dataclass(frozen=True, slots=True)
class SortColumn:
    """A column of the table that the problems are ordered by; in an address id, score.2, or -score.2 downwards."""

    name: str  # of SORT_COLUMNS
    checkpoint: int = 0  # its place in the table
    is_descending: bool = False

    @classmethod
    def parse(cls, text: str) -> SortColumn | None:
        """Read the value of `sort`; None if it names no column."""
        match = re.fullmatch(rf"(-?)(?:(id|category|difficulty)|(score|length)\.([0-{MAX_OTHERS}]))", text)
        if match is None:
            return None
        sign, name, name_of_checkpoint, place = match.groups()
        return cls(name or name_of_checkpoint, int(place or 0), bool(sign))

    @property
    def is_of_checkpoint(self) -> bool:
        """Tell whether each checkpoint has such a column."""
        return self.name in ("score", "length")


@dataclass(frozen=True, slots=True)
class UrlState:
    """Empty values mean: the default, whatever that is for the data at hand."""

    benchmark: str = ""
    base: str = ""  # key of the baseline checkpoint
    others: tuple[str, ...] = ()  # keys of the checkpoints beside it
    tab: str = "overview"
    at: str = ""  # id of the problem shown
    sample: int = 0  # which of its samples
    fold: int = 0  # 1: the reasoning is hidden
    sort: str = ""
    part: str = ""  # which tokens the panel of lengths counts
    pair: str = ""  # key of the checkpoint that the overview compares with the baseline
    pattern: str = ""  # a regular expression that the overview counts
    # filters; those on a response hold if it holds for `focus`, or for any checkpoint without one
    focus: str = ""
    change: str = ""
    verdict: str = ""  # correct or wrong
    flags: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    difficulty: tuple[str, ...] = ()
    low: int | None = None  # tokens of a response, both ends included
    high: int | None = None
    text: str = ""
    box: str = ""  # mean tokens at the baseline and at the pair: "from,to,from,to", all ends included
    # training
    runs: tuple[str, ...] = ()
    rollouts: str = ""  # the run whose rollouts are shown
    step: int | None = None  # of these
    group: int = 0  # which prompt of that step

    @classmethod
    def parse(cls, query: str) -> UrlState:
        """Read the query of an address. Unknown keys and malformed values are ignored."""
        return cls().patched(query.lstrip("?"))

    def patched(self, query: str) -> UrlState:
        """Return this state with the keys of a query set; a key without a value goes back to its default."""
        given = parse_qs(query[:MAX_QUERY], keep_blank_values=True)
        changes = {field.name: _read(field.name, given[field.name]) for field in fields(self) if field.name in given}
        return replace(self, **changes)

    def query(self) -> str:
        """Return the query of the address, without what is at its default."""
        pairs: list[tuple[str, str]] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                pairs += [(field.name, str(item)) for item in (value if isinstance(value, tuple) else (value,))]
        return urlencode(pairs)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the checkpoints shown, the baseline first."""
        return (self.base, *self.others)

    @property
    def ranges(self) -> tuple[int, int, int, int] | None:
        """Return the ends of `box`; None without one."""
        if not self.box:
            return None
        low, high, pair_low, pair_high = map(int, self.box.split(","))
        return low, high, pair_low, pair_high

    @property
    def filtered(self) -> bool:
        """Say whether any filter is set."""
        return any(getattr(self, name) != getattr(_DEFAULT, name) for name in FILTERS)


FILTERS = ("focus", "change", "verdict", "flags", "category", "difficulty", "low", "high", "text", "box")
UNFILTERED = "&".join(f"{name}=" for name in FILTERS)  # as a patch
_ALLOWED: Mapping[str, Any] = {
    "tab": TABS,
    "sort": SORTS,
    "change": CHANGES,
    "part": PARTS,
    "verdict": VERDICTS,
}
_DEFAULT = UrlState()
_OPTIONAL = ("low", "high", "step")


def _read(name: str, texts: Sequence[str]) -> Any:
    """Return the value of a field from what the address says."""
    default = getattr(_DEFAULT, name)
    texts = [text[:MAX_TEXT] for text in texts if text]
    if isinstance(default, tuple):
        kept = tuple(dict.fromkeys(texts))
        return tuple(flag for flag in kept if flag in FLAGS) if name == "flags" else kept
    if not texts:
        return default
    if name in _OPTIONAL or isinstance(default, int):
        return int(texts[-1]) if texts[-1].isascii() and texts[-1].isdecimal() and len(texts[-1]) < 10 else default
    if name == "box":
        return texts[-1] if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9}){3}", texts[-1]) else default
    if name == "sort" and SortColumn.parse(texts[-1]):
        return texts[-1]
    return texts[-1] if texts[-1] in _ALLOWED.get(name, (texts[-1],)) else default
