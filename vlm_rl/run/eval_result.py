"""A finished evaluation in the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlm_rl.config import recorded_template
from vlm_rl.errors import UserError
from vlm_rl.run.eval_record import LATER_COLUMNS, READ_SCHEMA
from vlm_rl.run.run_files import first_records, read_records
from vlm_rl.templates import Template


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A finished evaluation of one policy on one benchmark."""

    benchmark: str
    step: int
    path: Path
    summary: Mapping[str, Any]

    @property
    def template(self) -> Template | None:
        """Return the template of the prompts; None if the summary records none."""
        return recorded_template(self.summary)

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the records as a table, all columns (EvalRecord) or the named ones, in their types.

        Columns that an older file lacks are left out. Raises UserError for a damaged file.
        """
        advice = "delete it, or evaluate again"
        return read_records(self.path, columns, READ_SCHEMA, later=LATER_COLUMNS, advice=advice)

    def first_rows(self, count: int, columns: Sequence[str]) -> pa.Table:
        """Return the first records, `count` at most, as `rows` does, without reading the whole file."""
        advice = "delete it, or evaluate again"
        return first_records(self.path, count, columns, READ_SCHEMA, later=LATER_COLUMNS, advice=advice)

    @property
    def accuracy(self) -> float:
        """Return the summary's accuracy. Raises UserError if it has none."""
        value = self.summary.get("accuracy")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            place = self.path.with_suffix(".json")
            raise UserError(f"{place}: its accuracy is {value!r:.80}; delete it, or evaluate again")
        return value
