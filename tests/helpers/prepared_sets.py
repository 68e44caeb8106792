"""Prepared sets for tests: written from finished problems, and read back as plain rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vlm_rl.data_prep.prepared_set import DATA, SetWriter, schema, to_row, write_manifest
from vlm_rl.types import Problem


def write_problems(problems: Iterable[Problem], out: Path, facts: dict[str, Any] | None = None) -> Path:
    """Write finished problems as the prepared set `out`, with `facts` in its manifest; returns `out`."""
    out.mkdir(parents=True)
    with SetWriter(out / DATA, schema()) as writer:
        writer.add_rows(map(to_row, problems))
    write_manifest(out, {**(facts or {}), "kept": writer.num_rows})
    return out


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a prepared set."""
    return pq.read_table(folder / DATA).to_pylist()


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared set."""
    return json.loads((folder / "manifest.json").read_text())
