"""Hold the problems that the chosen checkpoints share, as columns, and filter and order them.

C: the chosen checkpoints, the baseline first. P: the shared problems in the baseline's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlm_rl.demo.numbers.library import EvaluatedCheckpoint, Library
from vlm_rl.demo.numbers.responses import Responses, positions
from vlm_rl.demo.numbers.url_state import MAX_OTHERS, NO_CATEGORY, SortColumn, UrlState

# difficulty classes by the pass rate before training: the upper end of each, and what the page calls it
DIFFICULTIES = {
    "never": (0.0, "never solved"),
    "rarely": (0.25, "up to 25 %"),
    "sometimes": (0.5, "up to 50 %"),
    "often": (0.75, "up to 75 %"),
    "mostly": (1.0 - 1e-9, "below 100 %"),
    "always": (1.0, "always solved"),
}


@dataclass(frozen=True, eq=False)
class ProblemTable:
    """What a problem's row says: one number per checkpoint, or one for all."""

    checkpoints: tuple[EvaluatedCheckpoint, ...]
    ids: list[str]  # P
    row_CP: tuple[np.ndarray, ...]  # of each checkpoint: the places of the shared problems in its own list
    score_CP: np.ndarray  # share of right samples
    length_CP: np.ndarray  # mean tokens over the samples
    category_P: np.ndarray
    cluster_P: np.ndarray  # a number shared by problems that were made from one: intervals are over these
    base_rate_P: np.ndarray  # pass rate before training; NaN where that evaluation lacks the problem
    base_when: str = "before training"  # or at which checkpoint, where none of step 0 is stored
    faults: tuple[str, ...] = ()  # why evaluations are not among those of the difficulty

    @property
    def num_problems(self) -> int:
        """Return how many problems the table has, filtered or not."""
        return len(self.ids)

    @cached_property
    def difficulty_P(self) -> np.ndarray:
        """Return the key of each problem's difficulty class; "" if the pass rate is unknown."""
        ends = np.array([end for end, _ in DIFFICULTIES.values()])
        names = np.array([*DIFFICULTIES, ""], dtype=object)
        place = np.searchsorted(ends, np.nan_to_num(self.base_rate_P, nan=2.0))
        return names[np.minimum(place, len(DIFFICULTIES))]

    def any_P(self, index: int, mask_R: np.ndarray) -> np.ndarray:
        """Mark the shared problems for which a mask over the responses of checkpoint `index` holds once."""
        return self.checkpoints[index].responses.any_P(mask_R)[self.row_CP[index]]

    def inside(self, index: int, keep_P: np.ndarray) -> np.ndarray:
        """Mark the responses of checkpoint `index` that are to the kept problems."""
        responses = self.checkpoints[index].responses
        kept = np.zeros(len(responses.ids), dtype=bool)
        kept[self.row_CP[index][keep_P]] = True
        return kept[responses.problem_R]


def build_table(library: Library, benchmark: str, keys: Sequence[str]) -> ProblemTable:
    """Align the checkpoints' evaluations; without any, an empty table. Raises UserError if one cannot be read."""
    if not library.checkpoints:
        nothing = np.zeros((0, 0))
        return ProblemTable((), [], (), nothing, nothing, np.zeros(0, dtype=object), np.zeros(0, int), np.zeros(0))
    known = library.checkpoints[benchmark]
    chosen = tuple(known[key] for key in keys)
    columns = [checkpoint.responses for checkpoint in chosen]
    shared = set(columns[0].ids).intersection(*(column.ids for column in columns[1:]))
    ids = [name for name in columns[0].ids if name in shared]
    rows = tuple(positions(column.ids, ids) for column in columns)
    shape = (len(chosen), len(ids))
    bases = library.base_keys(benchmark)
    faults = {key: known[key].fault for key in bases if known[key].fault}  # those of other runs, perhaps
    return ProblemTable(
        checkpoints=chosen,
        ids=ids,
        row_CP=rows,
        score_CP=np.array([column.score_P[row] for column, row in zip(columns, rows, strict=True)]).reshape(shape),
        length_CP=np.array(
            [column.mean_P(column.length_R)[row] for column, row in zip(columns, rows, strict=True)], dtype=np.float64
        ).reshape(shape),
        category_P=columns[0].category_P[rows[0]],
        cluster_P=np.unique(columns[0].cluster_P[rows[0]], return_inverse=True)[1],
        base_rate_P=base_rate([known[key].responses for key in bases if key not in faults], ids),
        base_when=f"at {known[bases[0]].label}" if known[bases[0]].step else "before training",
        faults=tuple(faults.values()),
    )


def base_rate(before: Sequence[Responses], ids: Sequence[str]) -> np.ndarray:
    """Return each problem's share of right samples over these evaluations; NaN where none has it."""
    right, count = np.zeros(len(ids)), np.zeros(len(ids))
    index = {name: place for place, name in enumerate(ids)}
    for responses in before:
        place = np.array([index.get(name, -1) for name in responses.ids], dtype=np.int64)
        at = place[responses.problem_R]
        known = at >= 0
        right += np.bincount(at[known], weights=responses.correct_R[known], minlength=len(ids))
        count += np.bincount(at[known], minlength=len(ids))
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, right / np.maximum(count, 1), np.nan)


# -- filters -------------------------------------------------------------------------------------


def keep(table: ProblemTable, url: UrlState) -> np.ndarray:
    """Mark the shared problems that pass every filter of the address."""
    kept = np.ones(table.num_problems, dtype=bool)
    focus = _focus(table, url)
    if url.change:
        against = [index for index in focus if index] or list(range(1, len(table.checkpoints)))
        kept &= _any([changed(table, index, url.change) for index in against], kept)
    if url.category:
        kept &= np.isin([str(name) or NO_CATEGORY for name in table.category_P], url.category)
    if url.difficulty:
        kept &= np.isin(table.difficulty_P.astype(str), url.difficulty)
    if url.verdict or url.flags or url.low is not None or url.high is not None:
        kept &= _any([table.any_P(index, _responses_wanted(table, index, url)) for index in focus], kept)
    if url.ranges and len(table.checkpoints) > 1:
        low, high, pair_low, pair_high = url.ranges
        before, after = table.length_CP[0], table.length_CP[pair_of(table, url)]
        kept &= (low <= before) & (before <= high) & (pair_low <= after) & (after <= pair_high)
    if url.text:
        kept &= _any(
            [table.any_P(i, table.checkpoints[i].responses.holds_text_R(url.text)) for i in focus],
            kept,
        )
    return kept


def pair_of(table: ProblemTable, url: UrlState) -> int:
    """Return the place of the checkpoint that the overview compares with the baseline; 0 if there is no other.

    Where the address names none, it is the one whose mean length differs most, filters aside.
    """
    others = range(1, len(table.checkpoints))
    named = [index for index in others if table.checkpoints[index].key == url.pair]
    if named or not others or not table.num_problems:
        return named[0] if named else len(others)
    mean_C = table.length_CP.mean(axis=1)
    return max(others, key=lambda index: abs(mean_C[index] - mean_C[0]))


def _focus(table: ProblemTable, url: UrlState) -> list[int]:
    """Return the checkpoints that the filters look at."""
    named = [index for index, checkpoint in enumerate(table.checkpoints) if checkpoint.key == url.focus]
    return named or list(range(len(table.checkpoints)))


def _responses_wanted(table: ProblemTable, index: int, url: UrlState) -> np.ndarray:
    """Mark one checkpoint's responses with the wanted verdict, length and one of the flags, all on the same one."""
    responses = table.checkpoints[index].responses
    wanted = np.ones(len(responses.problem_R), dtype=bool)
    if url.verdict:
        wanted &= responses.correct_R == (url.verdict == "correct")
    if url.low is not None:
        wanted &= responses.length_R >= url.low
    if url.high is not None:
        wanted &= responses.length_R <= url.high
    if url.flags:
        wanted &= _any([flag_mask(responses, name) for name in url.flags], wanted)
    return wanted


def flag_mask(responses: Responses, name: str) -> np.ndarray:
    """Mark the responses with one of url_state.FLAGS."""
    if name == "cut":
        return responses.cut_R
    if name == "format":
        return responses.format_fault_R
    return responses.no_answer_R if name == "no_answer" else responses.failed_R


def changed(table: ProblemTable, index: int, how: str) -> np.ndarray:
    """Mark the problems whose score moved from the baseline to checkpoint `index` as one of url_state.CHANGES says.

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
    return np.any([np.zeros_like(like), *masks], axis=0)


def ordered(table: ProblemTable, keep_P: np.ndarray, sort: str, focus: str = "") -> np.ndarray:
    """Return the indices of the kept problems in order; ties stay in the data set's order.

    Args:
        table: of the page.
        keep_P: bool, the problems that pass the filters.
        sort: a key of url_state.SORTS, or a column of the table as SortColumn writes it.
        focus: key of the checkpoint whose growth is meant; "" for the last.
    """
    kept = np.flatnonzero(keep_P)
    if not len(kept) or not sort:
        return kept
    column = SortColumn.parse(sort)
    if column is not None:
        _, rank = np.unique(_values(table, column)[kept], return_inverse=True)
        return kept[np.argsort(-rank if column.is_descending else rank, kind="stable")]
    rows = [index for index, checkpoint in enumerate(table.checkpoints) if checkpoint.key == focus and index]
    last = rows[0] if rows else len(table.checkpoints) - 1
    lengths = table.length_CP[:, kept]
    growth = lengths[last] - lengths[0]
    keys = {
        "difference": lengths.min(axis=0) - lengths.max(axis=0),
        "growth": -growth,
        "shrink": growth,
        "longest": -lengths.max(axis=0),
        "hardest": np.nan_to_num(table.base_rate_P[kept], nan=2.0),
    }
    return kept[np.argsort(keys[sort], kind="stable")]


def _values(table: ProblemTable, column: SortColumn) -> np.ndarray:
    """Return the text of a table's cell."""
    if column.is_of_checkpoint:
        return (table.score_CP if column.name == "score" else table.length_CP)[column.checkpoint]
    if column.name == "difficulty":
        return np.nan_to_num(table.base_rate_P, nan=2.0)
    return np.array(table.ids) if column.name == "id" else table.category_P.astype(str)


# -- the address on this data --------------------------------------------------------------------


def settle(url: UrlState, library: Library) -> tuple[UrlState, list[str]]:
    """Return the address with its defaults filled in, and a sentence for each thing in it that does not exist.

    A checkpoint that cannot be read gets one too, where it would have been among the defaults.
    """
    unknown: list[str] = []
    runs = tuple(name for name in url.runs if name in library.runs)
    if not library.checkpoints:
        return replace(url, benchmark="", base="", others=(), focus="", runs=runs), unknown
    benchmark = url.benchmark if url.benchmark in library.checkpoints else library.first_benchmark()
    if url.benchmark and benchmark != url.benchmark:
        unknown.append(f"there is no benchmark {url.benchmark} here; this is {benchmark}")
    known = library.checkpoints[benchmark]
    asked = [key for key in dict.fromkeys(url.keys) if key]
    there = [key for key in asked if key in known]
    if benchmark == url.benchmark or not url.benchmark:
        unknown += [f"there is no checkpoint {key} on {benchmark} here" for key in asked if key not in known]
    base = url.base if url.base in known else ""
    if not there:
        (base, *others), faults = library.opening(benchmark)
        unknown += faults
    else:
        base = base or there[0]
        others = [key for key in there if key != base]
    others = others[:MAX_OTHERS]
    column = SortColumn.parse(url.sort)
    return (
        replace(
            url,
            benchmark=benchmark,
            base=base,
            others=tuple(others),
            focus=url.focus if url.focus in (base, *others) else "",
            pair=url.pair if url.pair in others else "",
            runs=runs,
            sort="" if column is not None and column.checkpoint > len(others) else url.sort,
        ),
        unknown,
    )
