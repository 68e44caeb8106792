"""The map of categories: how score and length differ from the baseline's within each category of problems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.demo.numbers.url_state import MAX_TEXT, NO_CATEGORY
from vlm_rl.demo.panels.page_state import PageState
from vlm_rl.demo.web.rendering import render
from vlm_rl.stats import Estimate, estimate

MAX_CATEGORIES = 40  # rows, those with the most problems
MIN_PROBLEMS = 5  # of a category; with fewer, its cells are grey: one problem more or less would turn them round


@dataclass(frozen=True, slots=True)
class CategoryCell:
    """One checkpoint on the problems of one category, against the baseline and paired by problem."""

    score: Estimate
    tokens: Estimate
    score_shade: float  # in [-1, 1], of the largest difference of the map; of no meaning where there are few problems
    tokens_shade: float


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category."""

    name: str
    num_problems: int
    cells: tuple[CategoryCell, ...]  # one for each checkpoint beside the baseline

    @property
    def has_few(self) -> bool:
        """Say whether there are too few problems to compare."""
        return self.num_problems < MIN_PROBLEMS

    @property
    def patch(self) -> dict[str, str] | None:
        """Return the address of its problems; None if no address can name it."""
        can_be_named = len(self.name) <= MAX_TEXT
        return {"tab": "table", "category": self.name or NO_CATEGORY, "at": ""} if can_be_named else None


def category_rows(table: ProblemTable, keep_P: np.ndarray) -> list[CategoryRow]:
    """Return a row for each category of the kept problems, the largest first and at most MAX_CATEGORIES."""
    names, counts = np.unique(table.category_P[keep_P].astype(str), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_CATEGORIES]
    others = range(1, len(table.checkpoints))
    changes: list[list[tuple[Estimate, Estimate]]] = []
    for name in names[order]:
        members = keep_P & (table.category_P.astype(str) == name)
        clusters = table.cluster_P[members]
        changes.append(
            [
                (
                    estimate((table.score_CP[index] - table.score_CP[0])[members], clusters=clusters, bounds=(-1, 1)),
                    estimate((table.length_CP[index] - table.length_CP[0])[members], clusters=clusters),
                )
                for index in others
            ]
        )
    shaded = [row for row, count in zip(changes, counts[order], strict=True) if count >= MIN_PROBLEMS]
    largest = [max((abs(pair[side].mean) for row in shaded for pair in row), default=0.0) or 1.0 for side in (0, 1)]
    return [
        CategoryRow(
            str(name),
            int(count),
            tuple(
                CategoryCell(score, tokens, score.mean / largest[0], tokens.mean / largest[1])
                for score, tokens in row
            ),
        )
        for name, count, row in zip(names[order], counts[order], changes, strict=True)
    ]


def category_map(state: PageState, *, interactive: bool = True) -> Markup:
    """Return the map, or nothing where there is one category alone or no checkpoint beside the baseline."""
    rows = category_rows(state.table, state.keep_P)
    if len(rows) < 2 or len(state.table.checkpoints) < 2:
        return Markup("")
    num_all = len(np.unique(state.table.category_P[state.keep_P].astype(str)))
    return render(
        "category_map",
        rows=rows,
        num_left_out=num_all - len(rows),
        num_cells=2 * sum(not row.has_few for row in rows) * (len(state.table.checkpoints) - 1),
        min_problems=MIN_PROBLEMS,
        labels=list(zip(state.labels, state.colors, strict=True))[1:],
        interactive=interactive,
    )
