"""A view on the data at hand: everything that the panels and the exports draw from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlm_rl.demo.lengths import Summary, summarise
from vlm_rl.demo.library import Checkpoint, Library
from vlm_rl.demo.table import Table, build_table, keep, ordered, settle
from vlm_rl.demo.url_state import View

NUM_SLOTS = 6  # colours of the page's checkpoints, which are six at most
NUM_COLORS = 10  # of the style sheet; the live panel asks others, too


@dataclass(frozen=True, eq=False)
class Scene:
    """The shared problems of the chosen checkpoints, filtered and in order."""

    library: Library
    view: View  # settled: what it names exists
    table: Table
    keep_P: np.ndarray
    order: np.ndarray  # indices of the kept problems
    position: int  # in order
    slots: dict[str, int]  # key of a checkpoint -> its colour
    notes: tuple[str, ...]

    @cached_property
    def summaries(self) -> list[Summary]:
        return summarise(self.table, self.keep_P)

    @property
    def labels(self) -> list[str]:
        return [one.label for one in self.table.checkpoints]

    @property
    def colors(self) -> list[int]:
        """One slot per checkpoint, in the order of the table."""
        return [self.slots[one.key] for one in self.table.checkpoints]

    @property
    def problem_id(self) -> str | None:
        return self.table.ids[self.order[self.position]] if len(self.order) else None

    def run_slots(self) -> dict[str, int]:
        """Colour of each run on the charts over training: its checkpoint's, the latest one's where it has several."""
        by_step = sorted(self.table.checkpoints, key=lambda one: one.step)
        return {run: self.slots[one.key] for one in by_step for run in one.runs}

    def run_groups(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """(title, colour, runs) of the runs that the checkpoints come from; seeds that are pooled stay together."""
        found: dict[tuple[str, ...], Checkpoint] = {}
        for one in self.table.checkpoints:
            if one.runs not in found or found[one.runs].step < one.step:
                found[one.runs] = one
        return [(_runs_title(runs), self.slots[one.key], runs) for runs, one in found.items()]

    @property
    def emptiness(self) -> str:
        """Why there is no problem to show, and what to do; empty where there is one."""
        if len(self.order):
            return ""
        if not self.table.checkpoints:
            return (
                "These runs hold no evaluation yet: `vlm-rl eval` or eval.every makes one. Start the demo again then."
            )
        for one in self.table.checkpoints:
            if not one.responses.ids:
                return f"The evaluation of {one.label} on {self.view.benchmark} holds no rows: evaluate again."
        if not self.table.num_problems:
            return "These checkpoints were not evaluated on the same problems. Choose others above."
        return "No problem passes the filters."


def _runs_title(runs: Sequence[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{runs[0].rpartition('/')[0]}, {len(runs)} seeds"


class Scenes:
    """Builds scenes and keeps the last tables."""

    def __init__(self, library: Library, *, size: int = 16) -> None:
        self.library = library
        self._tables: dict[tuple[str, tuple[str, ...]], Table] = {}
        self._size = size

    def of(self, view: View) -> Scene:
        """Raises UserError where an evaluation cannot be read."""
        settled, notes = settle(view, self.library)
        table = self._table(settled.benchmark, settled.keys)
        keep_P = keep(table, settled)
        order = ordered(table, keep_P, settled.sort, settled.focus)
        position = next((i for i, p in enumerate(order.tolist()) if table.ids[p] == settled.at), 0)
        slots = choose_slots(settled.keys, self.library.color_order(settled.benchmark))
        return Scene(self.library, settled, table, keep_P, order, position, slots, tuple(notes))

    def _table(self, benchmark: str, keys: tuple[str, ...]) -> Table:
        if (benchmark, keys) not in self._tables:
            if len(self._tables) >= self._size:
                self._tables.pop(next(iter(self._tables)))
            self._tables[benchmark, keys] = build_table(self.library, benchmark, keys)
        return self._tables[benchmark, keys]


def choose_slots(keys: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    """A colour for each key: by its place among all known ones, so that it stays when others come and go.

    Where two want the same, the later one takes the next that is free.
    """
    taken: dict[str, int] = {}
    for key in keys:
        wanted = known.index(key) % NUM_SLOTS if key in known else 0
        free = [slot for slot in range(NUM_SLOTS) if slot not in taken.values()] or list(range(NUM_SLOTS))
        taken[key] = min(free, key=lambda slot: (slot - wanted) % NUM_SLOTS)
    return taken
