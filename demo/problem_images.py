"""Find the images of a problem: those stored with its record, else those of the prepared set on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def images_of(record: Mapping[str, Any], benchmark: str, sets: Sequence[str]) -> tuple[bytes, ...]:
    """Return encoded images; none where neither place has them. `sets` are the folders that a run evaluates on."""
    if record["image"]:
        return tuple(record["image"])
    for folder in sets:
        path = Path(folder) / "data.parquet"
        if path.parent.name == benchmark and path.is_file():
            return _from_set(path, str(record["problem_id"]))
    return ()


@lru_cache(maxsize=64)
def _from_set(path: Path, problem_id: str) -> tuple[bytes, ...]:
    try:
        rows = pq.read_table(path, columns=["images"], filters=[("id", "==", problem_id)]).to_pylist()
    except (OSError, pa.ArrowException):
        return ()
    images = rows[0]["images"] or () if rows else ()
    return tuple(image["bytes"] if isinstance(image, Mapping) else image for image in images)
