"""Everything that the panels and the exports draw from: an address, and the data that it selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from vlm_rl.demo.numbers.lengths import Summary, checkpoint_summaries
from vlm_rl.demo.numbers.library import EvaluatedCheckpoint, Library
from vlm_rl.demo.numbers.problem_table import ProblemTable, build_table, keep, ordered, settle
from vlm_rl.demo.numbers.url_state import SORT_COLUMNS, SORTS, SortColumn, UrlState
from vlm_rl.errors import UserError

# errors of reading a file that changed while it was read
UNREADABLE = (UserError, OSError, ValueError, KeyError, pa.ArrowException)
NUM_SLOTS = 6  # colours of the page's checkpoints, which are six at most
NUM_COLORS = 10  # of the style sheet; the live panel also asks models that the page does not show


@dataclass(frozen=True, eq=False)
class PageState:
    """The shared problems of the chosen checkpoints, filtered and in order."""

    library: Library
    url: UrlState  # everything that it names exists
    table: ProblemTable
    keep_P: np.ndarray
    order: np.ndarray  # indices of the kept problems
    position: int  # in order
    slots: dict[str, int]  # key of a checkpoint -> its colour
    notes: tuple[str, ...]

    @cached_property
    def summaries(self) -> list[Summary]:
        """Return each checkpoint's scores over the problems that pass the filters."""
        return checkpoint_summaries(self.table, self.keep_P)

    @property
    def labels(self) -> list[str]:
        """Return each checkpoint's name on the page."""
        return [checkpoint.label for checkpoint in self.table.checkpoints]

    @property
    def colors(self) -> list[int]:
        """Return one slot per checkpoint, in the order of the table."""
        return [self.slots[checkpoint.key] for checkpoint in self.table.checkpoints]

    @property
    def problem_id(self) -> str | None:
        """Return the id of the problem that is shown, or None if none passes the filters."""
        return self.table.ids[self.order[self.position]] if len(self.order) else None

    @property
    def has_episodes(self) -> bool:
        """Tell whether a response was sampled in several turns: its text is that of the last one."""
        return any(checkpoint.responses.earlier_R.any() for checkpoint in self.table.checkpoints)

    @property
    def last_turn_note(self) -> str:
        """Say of numbers from the texts which turns they are of; empty without episodes."""
        return "Of an episode the last turn is read. " if self.has_episodes else ""

    def run_slots(self) -> dict[str, int]:
        """Return the colour of each run on the charts over training: that of its latest checkpoint."""
        by_step = sorted(self.table.checkpoints, key=lambda checkpoint: checkpoint.step)
        return {run: self.slots[checkpoint.key] for checkpoint in by_step for run in checkpoint.runs}

    def run_groups(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """Return (title, colour, runs) of the runs that the checkpoints come from; pooled seeds stay together."""
        latest: dict[tuple[str, ...], EvaluatedCheckpoint] = {}
        for checkpoint in self.table.checkpoints:
            if checkpoint.runs not in latest or latest[checkpoint.runs].step < checkpoint.step:
                latest[checkpoint.runs] = checkpoint
        return [(_runs_title(runs), self.slots[last.key], runs) for runs, last in latest.items()]

    @property
    def emptiness(self) -> str:
        """Say why there is no problem to show, and what to do; empty if there is one."""
        if len(self.order):
            return ""
        if not self.table.checkpoints:
            return (
                "These runs hold no evaluation yet: `vlm-rl eval` or eval.every makes one. Then start the demo again."
            )
        for checkpoint in self.table.checkpoints:
            if not checkpoint.responses.ids:
                return f"The evaluation of {checkpoint.label} on {self.url.benchmark} holds no rows: evaluate again."
        if not self.table.num_problems:
            return "These checkpoints were not evaluated on the same problems. Choose others above."
        return "No problem passes the filters."


def order_names(state: PageState) -> dict[str, str]:
    """Name each order of the problems; that of a column of the table is there while it is chosen."""
    column = SortColumn.parse(state.url.sort)
    if column is None:
        return SORTS
    name = SORT_COLUMNS[column.name]
    label = f"{state.labels[column.checkpoint]}, {name}" if column.is_of_checkpoint else name
    return {**SORTS, state.url.sort: f"{label} {'↓' if column.is_descending else '↑'}"}


def _runs_title(runs: Sequence[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{runs[0].rpartition('/')[0]}, {len(runs)} seeds"


class PageStates:
    """Builds page states and keeps the last tables."""

    def __init__(self, library: Library, *, first_view: str = "", size: int = 16) -> None:
        """Begin without tables.

        Args:
            library: the runs and their evaluations.
            first_view: the query of an address without one.
            size: tables to keep.
        """
        self.library = library
        self.first_view = first_view
        self._tables: dict[tuple[str, tuple[str, ...]], ProblemTable] = {}
        self._size = size

    def of(self, url: UrlState) -> PageState:
        """Return the page at an address. Raises UserError if an evaluation cannot be read."""
        settled, notes = settle(url, self.library)
        table = self._table(settled.benchmark, settled.keys)
        keep_P = keep(table, settled)
        order = ordered(table, keep_P, settled.sort, settled.focus)
        position = next((i for i, p in enumerate(order.tolist()) if table.ids[p] == settled.at), 0)
        slots = choose_slots(settled.keys, self.library.color_order(settled.benchmark))
        return PageState(
            self.library,
            settled,
            table,
            keep_P,
            order,
            position,
            slots,
            notes=tuple(dict.fromkeys([*notes, *table.faults])),
        )

    def _table(self, benchmark: str, keys: tuple[str, ...]) -> ProblemTable:
        if (benchmark, keys) not in self._tables:
            if len(self._tables) >= self._size:
                self._tables.pop(next(iter(self._tables)))
            self._tables[benchmark, keys] = build_table(self.library, benchmark, keys)
        return self._tables[benchmark, keys]


def choose_slots(keys: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    """Choose a colour for each key by its place among all known ones, so that it stays when others come and go.

    Where two want the same, the later key takes the next that is free.
    """
    taken: dict[str, int] = {}
    for key in keys:
        wanted = known.index(key) % NUM_SLOTS if key in known else 0
        free = [slot for slot in range(NUM_SLOTS) if slot not in taken.values()] or list(range(NUM_SLOTS))
        taken[key] = min(free, key=lambda slot: (slot - wanted) % NUM_SLOTS)
    return taken
