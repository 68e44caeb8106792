"""The panel of the table: a row per problem with score and tokens of each checkpoint, in the order chosen."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.demo.numbers.problem_table import DIFFICULTIES
from vlm_rl.demo.numbers.url_state import SORT_COLUMNS, SortColumn
from vlm_rl.demo.panels.page_state import PageState, order_names
from vlm_rl.demo.panels.problem import empty_panel
from vlm_rl.demo.web.rendering import render
from vlm_rl.report.html import name_images

ROWS = 100  # on the page at a time
_QUESTION = 90  # characters of a question in its row
_BEST_FIRST = ("score", "length")  # columns whose first click puts the largest on top


@dataclass(frozen=True, slots=True)
class ColumnHead:
    """The heading of a column, which orders the problems."""

    title: str
    next_sort: str  # what a click makes of the address's `sort`
    direction: str  # of the present order: ascending, descending, or empty
    is_of_checkpoint: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """What one checkpoint made of a problem."""

    score: str  # a sign, or how many samples are right
    kind: str  # right, not or some
    length: float  # mean tokens of the samples


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """One problem."""

    problem_id: str
    category: str
    difficulty: str
    question: str
    cells: tuple[Cell, ...]
    is_shown: bool


def table_panel(state: PageState) -> Markup:
    """Return the part of the table that holds the problem shown."""
    if state.emptiness:
        return empty_panel(state)
    start = state.position // ROWS * ROWS
    shown = state.order[start : start + ROWS].tolist()
    rows = [row_of(state, p) for p in shown]
    before, after = max(start - ROWS, 0), min(start + ROWS, len(state.order) - 1)
    return render(
        "table_panel",
        heads=heads_of(state),
        labels=list(zip(state.labels, state.colors, strict=True)),
        rows=rows,
        start=start,
        count=len(state.order),
        earlier=state.table.ids[state.order[before]],
        later=state.table.ids[state.order[after]],
        order=order_names(state)[state.url.sort],
    )


def heads_of(state: PageState) -> list[ColumnHead]:
    """Return the headings: one for the problem, its category and difficulty, and two for each checkpoint."""
    common = [_head(state, name, 0) for name in ("id", "category", "difficulty")]
    each = range(len(state.table.checkpoints))
    return common + [_head(state, name, index) for index in each for name in ("score", "length")]


def _head(state: PageState, name: str, index: int) -> ColumnHead:
    column = SortColumn.parse(state.url.sort)
    is_sorted = column is not None and (column.name, column.checkpoint) == (name, index)
    is_descending = column is not None and column.is_descending
    key = f"{name}.{index}" if name in _BEST_FIRST else name
    turns_down = not is_descending if is_sorted else name in _BEST_FIRST
    direction = ("descending" if is_descending else "ascending") if is_sorted else ""
    return ColumnHead(SORT_COLUMNS[name], f"{'-' if turns_down else ''}{key}", direction, name in _BEST_FIRST)


def row_of(state: PageState, p: int) -> ProblemRow:
    """Return the row of the problem at index `p` of the table."""
    table = state.table
    difficulty = str(table.difficulty_P[p])
    questions = table.checkpoints[0].responses.question_P
    question = " ".join(name_images(questions[table.row_CP[0][p]], 1).split())
    return ProblemRow(
        problem_id=table.ids[p],
        category=str(table.category_P[p]),
        difficulty=DIFFICULTIES[difficulty][1] if difficulty else "unknown",
        question=question if len(question) <= _QUESTION else f"{question[:_QUESTION]} …",
        cells=tuple(_cell(table.score_CP[i, p], table.length_CP[i, p]) for i in range(len(table.checkpoints))),
        is_shown=p == state.order[state.position],
    )


def _cell(score: float, length: float) -> Cell:
    if score in (0, 1):
        return Cell("✓" if score else "✗", "right" if score else "not", float(length))
    return Cell(f"{100 * score:.0f} %", "some", float(length))
