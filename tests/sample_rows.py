"""Rows that the real samples lack (several pictures, WEBP, palette, CMYK, transparency), built from them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

COLUMNS = pa.schema(
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


def dressed(image: Image.Image) -> dict[str, bytes]:
    """File name -> the same picture in a format or mode that no sample has."""
    rgb = image.convert("RGB")
    half_clear = rgb.convert("RGBA")
    half_clear.putalpha(128)
    return {
        "plain.webp": _save(rgb, "WEBP"),
        "palette.png": _save(rgb.quantize(64), "PNG"),
        "cmyk.jpg": _save(rgb.convert("CMYK"), "JPEG"),
        "clear.png": _save(half_clear, "PNG"),
        "grey.png": _save(rgb.convert("L"), "PNG"),
    }


def write_virl(folder: Path, rows: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]) -> Path:
    """A data set in ViRL39K's layout; a row needs only what it wants to say."""
    (folder / "images").mkdir(parents=True)
    for name, data in images.items():
        (folder / "images" / name).write_bytes(data)
    full = [
        {
            "question": "How many?",
            "answer": r"\boxed{1}",
            "PassRate_32BTrained": 1.0,
            "PassRate_7BBase": -1.0,
            "category": "Spatial Reasoning",
            "source": "Processed",
            "qid": f"Processed-{index}",
            "image": [],
            **row,
        }
        for index, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(full, schema=COLUMNS), folder / "39Krelease.parquet")
    return folder


def write_dressed_virl(folder: Path, sample: Path) -> Path:
    """One row per unusual format of the picture `sample`, and one row with all of them."""
    images = dressed(Image.open(sample))
    names = [f"images/{name}" for name in images]
    rows = [{"question": "<image>What is this?", "image": [name]} for name in names]
    rows.append({"question": "Compare " + " with ".join(["<image>"] * len(names)), "image": names})
    return write_virl(folder, rows, images)


def _save(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
