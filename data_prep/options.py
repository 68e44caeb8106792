"""The options of a preparation: everything that decides which rows a prepared set holds, and in what form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from vlm_rl.data_prep.prepared_images import Grid
from vlm_rl.errors import UserError
from vlm_rl.types import AnswerType, Problem

GoldCheck = Callable[[Problem], bool]
"""Tells whether the grader accepts the gold as an answer to itself."""
TokenCount = Callable[[Problem], int]
"""Counts the tokens of the problem's whole prompt, each image as one."""
TextImage = Literal["none", "blank", "typeset"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `vlm-rl prepare`; the defaults prepare every usable row for Qwen2.5-VL."""

    split: str = ""  # "" is the source's first
    min_pixels: int = 3136
    max_pixels: int = 1_003_520
    patch_size: int = 14  # pixels; a visual token is 2 x 2 patches
    strict: bool = False  # the first bad row is an error instead of a count
    limit: int | None = None  # stop after this many kept rows
    text_image: TextImage = "none"  # what problems without an image get
    min_pass_rate: float = 0.0  # rows whose pass rate is unknown are kept
    max_pass_rate: float = 1.0
    exclude_types: tuple[str, ...] = ()  # answer types
    max_prompt_tokens: int | None = None  # images expanded
    since: str = ""  # rows of problems published before this day are left out; rows without a date are kept
    until: str = ""  # and on this day or later
    keep_duplicates: bool = False
    against: tuple[Path, ...] = ()  # prepared benchmarks that no training row may share text or images with
    keep_overlap: bool = False  # count the rows that do, but keep them
    hold_out: float = 0.0  # share of the problems that are for a second set
    is_held_out: bool = False  # this is the second set; `sides` sets it
    seed: int = 0  # of the report's random examples

    @property
    def grid(self) -> Grid:
        """Return the pixel grid that images are fitted to."""
        return Grid(self.min_pixels, self.max_pixels, 2 * self.patch_size)

    def sides(self) -> Sequence[Options]:
        """Return the options of each set that is made: with `hold_out` of two, which share the limit."""
        if not self.hold_out:
            return [self]
        if self.limit is None:
            return [self, replace(self, is_held_out=True)]
        fewer = min(max(1, round(self.hold_out * self.limit)), self.limit - 1)
        return [replace(self, limit=self.limit - fewer), replace(self, limit=fewer, is_held_out=True)]

    def check(self) -> None:
        """Raise UserError for values that no preparation can have."""
        if self.patch_size < 1:
            raise UserError(f"--patch-size {self.patch_size}: give the pixels of a patch's side, 14 for Qwen2.5-VL")
        self.grid.check()
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: keep at least one row")
        if not 0 <= self.hold_out < 1:
            raise UserError(
                f"--hold-out {self.hold_out}: give a share of the problems from 0 to below 1, such as 0.1"
            )
        if self.hold_out and self.limit == 1:
            raise UserError("--limit 1 with --hold-out: keep at least two rows, one for each set")
        if not 0 <= self.min_pass_rate <= self.max_pass_rate <= 1:
            raise UserError(
                f"--min-pass-rate {self.min_pass_rate} and --max-pass-rate {self.max_pass_rate}: "
                "need 0 <= min <= max <= 1"
            )
        for name in ("since", "until"):
            _check_day(name, getattr(self, name))
        known = get_args(AnswerType)
        if unknown := [kind for kind in self.exclude_types if kind not in known]:
            raise UserError(f"--exclude-types {unknown[0]!r}: the types are {', '.join(known)}")

    def record(self) -> dict[str, Any]:
        """Return the options as the manifest records them."""
        return {**asdict(self), "against": [path.name for path in self.against]}


def _check_day(name: str, day: str) -> None:
    try:
        is_day = not day or date.fromisoformat(day).isoformat() == day
    except ValueError:
        is_day = False
    if not is_day:
        raise UserError(f"--{name} {day!r}: give a day such as 2025-01-31")
