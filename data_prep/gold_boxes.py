"""Read the gold box of a row, and turn it into fractions of its image once the image's size is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_rl.data_prep.prepared_images import PreparedImage
from vlm_rl.data_prep.records import RowError

_SLACK = 1.0  # pixels that a box may reach beyond its image: annotators round


def read_raw_boxes(value: Any, box_format: str) -> list[list[float]]:
    """Return [[x1, y1, x2, y2], ...] of four numbers in the format xyxy or xywh, or of a list of such boxes.

    Raises RowError for anything else.
    """
    several = isinstance(value, list | tuple) and value and all(isinstance(box, list | tuple) for box in value)
    boxes = [_read_raw_box(box, box_format) for box in (value if several else [value])]
    return [box for number, box in enumerate(boxes) if box not in boxes[:number]]


def _read_raw_box(value: Any, box_format: str) -> list[float]:
    is_numbers = isinstance(value, list | tuple) and len(value) == 4
    if not is_numbers or not all(type(v) in (int, float) and math.isfinite(v) for v in value):
        raise RowError("bad_box", f"the box must be four numbers, not {value!r:.60}")
    x1, y1, x2, y2 = value
    if box_format == "xywh":
        x2, y2 = x1 + x2, y1 + y2
    if not (x1 < x2 and y1 < y2):
        raise RowError("bad_box", f"the box {value!r:.60} has no area; box_format is {box_format}")
    return [x1, y1, x2, y2]


def with_fractions(meta: Mapping[str, Any], images: Sequence[PreparedImage]) -> Mapping[str, Any]:
    """Return meta with the gold box as `box`, in fractions of the image's sides; a list where there are several.

    Pixels are those of the image before it was resized, upright. Raises RowError if a box has no place.
    """
    if "raw_boxes" not in meta:
        return meta
    rest = {key: value for key, value in meta.items() if key not in ("raw_boxes", "box_unit")}
    (image,) = images
    boxes = [_fractions(box, meta["box_unit"], image) for box in meta["raw_boxes"]]
    return {**rest, "box": boxes if boxes[1:] else boxes[0]}


def _fractions(box: Sequence[float], unit: str, image: PreparedImage) -> list[float]:
    sides = (image.original_width, image.original_height)
    if unit != "pixels":
        sides = (1000, 1000) if unit == "thousandths" else (1, 1)
    slack = _SLACK / max(image.original_width, image.original_height) if unit == "fractions" else _SLACK
    if min(box) < -slack or any(corner > side + slack for corner, side in zip(box, sides * 2, strict=True)):
        raise RowError("bad_box", f"the box {box} lies outside its image of {sides[0]} x {sides[1]} {unit}")
    x1, y1, x2, y2 = (min(1.0, max(0.0, corner / side)) for corner, side in zip(box, sides * 2, strict=True))
    if not (x1 < x2 and y1 < y2):
        raise RowError("bad_box", f"the box {box} has no area inside its image")
    return [x1, y1, x2, y2]
