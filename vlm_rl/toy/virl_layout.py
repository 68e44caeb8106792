"""Write data sets in ViRL39K's layout: a Parquet file beside a folder of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

VIRL_COLUMNS = pa.schema(
    {
        "question": pa.string(),
        "answer": pa.string(),
        "PassRate_32BTrained": pa.float64(),
        "PassRate_7BBase": pa.float64(),
        "category": pa.string(),
        "source": pa.string(),
        "qid": pa.string(),
        "image": pa.list_(pa.string()),
    }
)
_DEFAULTS = {
    "question": "How many?",
    "answer": r"\boxed{1}",
    "PassRate_32BTrained": 1.0,
    "PassRate_7BBase": -1.0,  # not measured
    "category": "Spatial Reasoning",
    "source": "Processed",
    "image": [],
}


def write_virl(folder: Path, rows: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]) -> Path:
    """Write a data set into the new folder `folder`, and return it.

    Args:
        folder: gets 39Krelease.parquet and images/.
        rows: only the columns that differ from the defaults; without a qid a row is called Processed-NUMBER.
        images: file name in images/ -> encoded bytes.
    """
    (folder / "images").mkdir(parents=True)
    for name, data in images.items():
        (folder / "images" / name).write_bytes(data)
    full = [{**_DEFAULTS, "qid": f"Processed-{number}", **row} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(full, schema=VIRL_COLUMNS), folder / "39Krelease.parquet")
    return folder
