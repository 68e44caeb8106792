"""A finished evaluation in the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlm_rl.config import recorded_template
from vlm_rl.run.eval_record import LATER_COLUMNS
from vlm_rl.run.run_files import read_parquet, stored_columns
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
        """Return the template of the prompts; None where the summary records none."""
        return recorded_template(self.summary)

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the records as a table, with the file's columns (EvalRecord) or the named ones.

        Named columns that an older file lacks are left out. Raises UserError for a damaged file.
        """
        there = None if columns is None else stored_columns(self.path, columns, later=LATER_COLUMNS)
        return read_parquet(self.path, there, "delete it, or evaluate again")
