"""Read the columns of an annotated row, and make a problem of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_rl.data.golds import unwrap_gold
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import RawRow
from vlm_rl.types import AnswerType, Problem


class UnusableRowError(UserError):
    """A row that cannot be judged."""

    def __init__(self, reason: str, detail: str, *, known: bool = False) -> None:
        """Keep why.

        Args:
            reason: a short key under which preparation counts such rows.
            detail: one sentence.
            known: whether this is a documented property of the published file.
        """
        super().__init__(detail)
        self.reason = reason
        self.known = known


def first_of(row: RawRow, *columns: str) -> Any:
    """Return the value of the first column that the row has and that is not empty; None if there is none."""
    return next((row[name] for name in columns if row.get(name) not in (None, "")), None)


def id_text(row: RawRow, *columns: str) -> str:
    """Return the id in the first column that the row has. Raises UnusableRowError without one."""
    value = first_of(row, *columns)
    if not isinstance(value, str | int) or isinstance(value, bool):
        reason = "id_missing" if value is None else "bad_type"
        raise UnusableRowError(reason, f"no id in {' or '.join(columns)}; the row has {shown_columns(row)}")
    return str(value)


def text(row: RawRow, *columns: str) -> str:
    """Return the text in the first column that the row has; "" if there is none. Raises for other types."""
    value = first_of(row, *columns)
    if value is not None and not isinstance(value, str):
        raise UnusableRowError("bad_type", f"{columns[0]} must be text, not {type(value).__name__} {value!r:.40}")
    return value or ""


def gold_text(row: RawRow, *columns: str) -> str:
    """Return the authors' gold as text. Raises UnusableRowError if it is missing."""
    value = first_of(row, *columns)
    if value is None or not str(value).strip():
        raise UnusableRowError(
            "answer_missing", f"no gold in {' or '.join(columns)}; the row has {shown_columns(row)}"
        )
    return str(value)


def texts(row: RawRow, column: str) -> tuple[str, ...]:
    """Return the texts of a list; () if there is none. Raises for anything else, such as a list's text."""
    value = row.get(column)
    if value is not None and not isinstance(value, list | tuple):
        raise UnusableRowError("bad_type", f"{column} must be a list, not {type(value).__name__} {value!r:.60}")
    return tuple(map(str, value or ()))


def mapping(row: RawRow, column: str) -> Mapping[str, Any]:
    """Return the object in a column; empty if there is none. Raises UnusableRowError for anything else."""
    value = row.get(column) or {}
    if not isinstance(value, Mapping):
        raise UnusableRowError("bad_type", f"{column} must be an object, not {type(value).__name__} {value!r:.60}")
    return value


def shown_columns(row: RawRow) -> list[str]:
    """Return the first dozen of the row's columns by name, for an error message."""
    return sorted(map(str, row))[:12]


def unwrapped(gold: str) -> str:
    """Return a gold without its box and dollar signs; as it is where those do not close."""
    return unwrap_gold(gold) or gold.strip()


def problem_of(
    benchmark: str,
    own_id: str,
    question: str,
    *,
    gold: str,
    answer: str,
    answer_type: AnswerType,
    meta: Mapping[str, Any],
    choices: tuple[str, ...] = (),
    category: Any = "",
) -> Problem:
    """Return a benchmark's problem: marked test-only, under the benchmark's name, without its images.

    Args:
        gold: the authors' own text; kept in the meta where it differs from `answer`.
        answer: what the grader compares with.
        meta: what else is known of the problem; entries that are None are left out.
    """
    known = {"test_only": True, **meta, "gold": gold if gold != answer else None}
    return Problem(
        id=f"{benchmark}-{own_id}",
        question=question,
        images=(),
        answer=answer,
        answer_type=answer_type,
        choices=choices,
        source=benchmark,
        category=str(category or ""),
        meta={key: value for key, value in known.items() if value is not None},
    )
