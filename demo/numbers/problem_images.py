"""Find the images of a problem: those stored with its record, else those of the prepared set on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def images_of(record: Mapping[str, Any], benchmark: str, sets: Sequence[str]) -> tuple[bytes, ...]:
    """Return encoded images; none if neither place has them. `sets` are the folders that a run evaluates on."""
    if record["image"]:
        return tuple(record["image"])
    path = set_of(benchmark, sets)
    return () if path is None else _from_set(path, str(record["problem_id"]))


def set_of(benchmark: str, sets: Sequence[str]) -> Path | None:
    """Return the rows of the prepared set with the benchmark's name, where it is on this machine."""
    paths = (Path(folder) / "data.parquet" for folder in sets)
    return next((path for path in paths if path.parent.name == benchmark and path.is_file()), None)


@lru_cache(maxsize=64)
def _from_set(path: Path, problem_id: str) -> tuple[bytes, ...]:
    try:
        rows = pq.read_table(path, columns=["images"], filters=[("id", "==", problem_id)]).to_pylist()
    except (OSError, pa.ArrowException):
        return ()
    images = rows[0]["images"] or () if rows else ()
    return tuple(image["bytes"] if isinstance(image, Mapping) else image for image in images)
