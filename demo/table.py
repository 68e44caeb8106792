"""The problems that the chosen checkpoints share, as columns, and the filters on them.

C: the chosen checkpoints, the baseline first. P: the shared problems in the baseline's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlm_rl.demo.library import Checkpoint, Library
from vlm_rl.demo.responses import Responses, places
from vlm_rl.demo.url_state import View

# difficulty classes by the pass rate before training; the upper end of each
DIFFICULTIES = {
    "never": (0.0, "never solved"),
    "rarely": (0.25, "up to 25 %"),
    "sometimes": (0.5, "up to 50 %"),
    "often": (0.75, "up to 75 %"),
    "mostly": (1.0 - 1e-9, "below 100 %"),
    "always": (1.0, "always solved"),
}


@dataclass(frozen=True, eq=False)
class Table:
    """What a problem's row says: one number per checkpoint, or one for all."""

    checkpoints: tuple[Checkpoint, ...]
    ids: list[str]  # P
    row_CP: tuple[np.ndarray, ...]  # of each checkpoint: where the shared problems stand in its own list
    score_CP: np.ndarray  # share of right samples
    length_CP: np.ndarray  # mean tokens over the samples
    category_P: np.ndarray
    base_rate_P: np.ndarray  # pass rate before training; NaN where that evaluation lacks the problem
    base_when: str = "before training"  # or at which checkpoint, where none of step 0 is stored

    @property
    def num_problems(self) -> int:
        return len(self.ids)

    @cached_property
    def difficulty_P(self) -> np.ndarray:
        """The key of each problem's difficulty class; "" where the pass rate is unknown."""
        ends = np.array([end for end, _ in DIFFICULTIES.values()])
        names = np.array([*DIFFICULTIES, ""], dtype=object)
        found = np.searchsorted(ends, np.nan_to_num(self.base_rate_P, nan=2.0))
        return names[np.minimum(found, len(DIFFICULTIES))]

    def over(self, index: int, mask_R: np.ndarray) -> np.ndarray:
        """Of checkpoint `index`: for which shared problems does a mask over its responses hold once?"""
        return self.checkpoints[index].responses.any_P(mask_R)[self.row_CP[index]]

    def inside(self, index: int, keep_P: np.ndarray) -> np.ndarray:
        """Mask over the responses of checkpoint `index`: those to the kept problems."""
        responses = self.checkpoints[index].responses
        kept = np.zeros(len(responses.ids), dtype=bool)
        kept[self.row_CP[index][keep_P]] = True
        return kept[responses.problem_R]


def build_table(library: Library, benchmark: str, keys: Sequence[str]) -> Table:
    """Align the checkpoints' evaluations; without any, an empty table. Raises UserError where one cannot be read."""
    if not library.checkpoints:
        nothing = np.zeros((0, 0))
        return Table((), [], (), nothing, nothing, np.zeros(0, dtype=object), np.zeros(0))
    found = library.checkpoints[benchmark]
    chosen = tuple(found[key] for key in keys)
    columns = [one.responses for one in chosen]
    shared = set(columns[0].ids).intersection(*(one.ids for one in columns[1:]))
    ids = [name for name in columns[0].ids if name in shared]
    rows = tuple(places(one.ids, ids) for one in columns)
    shape = (len(chosen), len(ids))
    bases = library.base_keys(benchmark)
    return Table(
        checkpoints=chosen,
        ids=ids,
        row_CP=rows,
        score_CP=np.array([one.score_P[row] for one, row in zip(columns, rows, strict=True)]).reshape(shape),
        length_CP=np.array(
            [one.mean_P(one.length_R)[row] for one, row in zip(columns, rows, strict=True)], dtype=np.float64
        ).reshape(shape),
        category_P=columns[0].category_P[rows[0]],
        base_rate_P=base_rate([found[key].responses for key in bases], ids),
        base_when=f"at {found[bases[0]].label}" if found[bases[0]].step else "before training",
    )


def base_rate(before: Sequence[Responses], ids: Sequence[str]) -> np.ndarray:
    """Per problem the share of right samples over these evaluations; NaN where none has it."""
    right, count = np.zeros(len(ids)), np.zeros(len(ids))
    index = {name: place for place, name in enumerate(ids)}
    for one in before:
        place = np.array([index.get(name, -1) for name in one.ids], dtype=np.int64)
        at = place[one.problem_R]
        known = at >= 0
        right += np.bincount(at[known], weights=one.correct_R[known], minlength=len(ids))
        count += np.bincount(at[known], minlength=len(ids))
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, right / np.maximum(count, 1), np.nan)


# -- filters -------------------------------------------------------------------------------------


def keep(table: Table, view: View) -> np.ndarray:
    """Mask over the shared problems: those that pass every filter of the view."""
    kept = np.ones(table.num_problems, dtype=bool)
    focus = _focus(table, view)
    if view.change:
        against = [index for index in focus if index] or list(range(1, len(table.checkpoints)))
        kept &= _any([changed(table, index, view.change) for index in against], kept)
    if view.category:
        kept &= np.isin(table.category_P.astype(str), view.category)
    if view.difficulty:
        kept &= np.isin(table.difficulty_P.astype(str), view.difficulty)
    if view.verdict or view.flags or view.low is not None or view.high is not None:
        kept &= _any([table.over(index, _responses_wanted(table, index, view)) for index in focus], kept)
    if view.text:
        kept &= _any(
            [table.over(i, table.checkpoints[i].responses.holds_text_R(view.text)) for i in focus],
            kept,
        )
    return kept


def _focus(table: Table, view: View) -> list[int]:
    """The checkpoints that the filters look at."""
    named = [index for index, one in enumerate(table.checkpoints) if one.key == view.focus]
    return named or list(range(len(table.checkpoints)))


def _responses_wanted(table: Table, index: int, view: View) -> np.ndarray:
    """Mask over one checkpoint's responses: verdict, length and one of the flags, all on the same response."""
    responses = table.checkpoints[index].responses
    wanted = np.ones(len(responses.problem_R), dtype=bool)
    if view.verdict:
        wanted &= responses.correct_R == (view.verdict == "correct")
    if view.low is not None:
        wanted &= responses.length_R >= view.low
    if view.high is not None:
        wanted &= responses.length_R <= view.high
    if view.flags:
        wanted &= _any([flag_mask(responses, name) for name in view.flags], wanted)
    return wanted


def flag_mask(responses: Responses, name: str) -> np.ndarray:
    """Responses with one of view.FLAGS."""
    if name == "cut":
        return responses.cut_R
    if name == "format":
        return responses.format_fault_R
    return responses.no_answer_R if name == "no_answer" else responses.failed_R


def changed(table: Table, index: int, how: str) -> np.ndarray:
    """Problems whose score moved from the baseline to checkpoint `index` as one of view.CHANGES says.

    With several samples, "right in both" means at least half of them.
    """
    before, after = table.score_CP[0], table.score_CP[index]
    masks = {
        "changed": before != after,
        "right": after > before,
        "wrong": after < before,
        "both_right": (before == after) & (after >= 0.5),
        "both_wrong": (before == after) & (after < 0.5),
    }
    return masks[how]


def _any(masks: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    found = np.zeros_like(like)
    for mask in masks:
        found = found | mask
    return found


def ordered(table: Table, keep_P: np.ndarray, sort: str, focus: str = "") -> np.ndarray:
    """Indices of the kept problems in the order of view.SORTS; ties stay in the order of the set."""
    kept = np.flatnonzero(keep_P)
    if not len(kept) or not sort:
        return kept
    rows = [index for index, one in enumerate(table.checkpoints) if one.key == focus and index]
    last = rows[0] if rows else len(table.checkpoints) - 1
    growth = (table.length_CP[last] - table.length_CP[0])[kept]
    keys = {
        "growth": -growth,
        "shrink": growth,
        "longest": -table.length_CP[:, kept].max(axis=0),
        "hardest": np.nan_to_num(table.base_rate_P[kept], nan=2.0),
    }
    return kept[np.argsort(keys[sort], kind="stable")]


# -- the view on this data -----------------------------------------------------------------------


def settle(view: View, library: Library) -> tuple[View, list[str]]:
    """The view with everything that exists filled in, and a sentence for what the address names in vain."""
    lost: list[str] = []
    runs = tuple(name for name in view.runs if name in library.runs)
    if not library.checkpoints:
        return replace(view, benchmark="", base="", others=(), focus="", runs=runs), lost
    benchmark = view.benchmark if view.benchmark in library.checkpoints else library.benchmarks[0]
    if view.benchmark and benchmark != view.benchmark:
        lost.append(f"there is no benchmark {view.benchmark} here; this is {benchmark}")
    known = library.checkpoints[benchmark]
    asked = [key for key in dict.fromkeys(view.keys) if key]
    there = [key for key in asked if key in known]
    if benchmark == view.benchmark or not view.benchmark:
        lost += [f"there is no checkpoint {key} on {benchmark} here" for key in asked if key not in known]
    base = view.base if view.base in known else ""
    if not there:
        base, *others = library.first_choice(benchmark)
    else:
        base = base or there[0]
        others = [key for key in there if key != base]
    return (
        replace(
            view,
            benchmark=benchmark,
            base=base,
            others=tuple(others[:5]),
            focus=view.focus if view.focus in (base, *others) else "",
            runs=runs,
        ),
        lost,
    )
