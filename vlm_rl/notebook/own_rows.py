"""Rows, tables and data sets as prepared sets, by the rules of `vlm-rl prepare`.

folders = prepared_sets(rows, "train", beside=Path("runs/first-data"), model="Qwen/Qwen2.5-VL-3B-Instruct")
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_rl.data.sets import is_prepared
from vlm_rl.data_prep.command import add_arguments, run
from vlm_rl.errors import UserError, near

COLUMNS = ("question", "answer", "images", "choices")  # what `columns` may name
_IMAGE_COLUMNS = ("image", "images")


def prepared_sets(
    data: Any,
    name: str,
    *,
    beside: Path,
    model: str,
    template: str,
    columns: Mapping[str, str | Sequence[str]],
) -> list[Path]:
    """Return the folders of prepared sets that hold this data, made where they are not there yet.

    Args:
        data: prepared sets, a path of one's own data, rows, or what can write itself as Parquet.
        name: of the set, and so of its evaluations.
        beside: folder for sets that have to be made, each below a digest of what it is made from.
        model: whose tokenizer counts the prompts.
        template: the run's data.template.
        columns: which columns hold question, answer, images and choices, where that cannot be guessed.

    Raises UserError for an empty or unfit table, and as `vlm-rl prepare` does.
    """
    if unknown := [key for key in columns if key not in COLUMNS]:
        raise UserError(f"columns names {unknown[0]!r}: {near(unknown[0], COLUMNS, otherwise=_known())}")
    if isinstance(data, str | Path) or (_is_list(data) and data and isinstance(data[0], str | Path)):
        places = [Path(place) for place in ([data] if isinstance(data, str | Path) else data)]
        if all(is_prepared(place) for place in places):
            return places
        if len(places) > 1:
            raw = next(place for place in places if not is_prepared(place))
            raise UserError(
                f"{raw} is not a prepared set: several are taken only where all are; vlm-rl prepare {raw}"
            )
        source, table, stamp = str(places[0]), b"", _stamp(places[0])
    else:
        table = _table_bytes(data, {*_IMAGE_COLUMNS, *_named(columns.get("images", ()))})
        source, stamp = "", hashlib.sha256(table).hexdigest()
    how = {"columns": {key: _named(value) for key, value in columns.items()}, "model": model, "template": template}
    folder = beside / hashlib.sha256(json.dumps([stamp, how], sort_keys=True).encode()).hexdigest()[:12]
    out = folder / name
    if is_prepared(out):
        return [out]
    folder.mkdir(parents=True, exist_ok=True)
    if not source:
        source = str(folder / f"{name}-rows.parquet")
        Path(source).write_bytes(table)
    words = [source, "--out", str(out), "--tokenizer", model, "--template", template, "--workers", "1"]
    for key, value in how["columns"].items():
        words += [f"--{key}", *value]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    try:
        run(parser.parse_args(words))
    except UserError as error:
        raise UserError(f"{error}\nfrom Python: columns={{'question': COLUMN, 'answer': COLUMN}}") from None
    return [out]


def _known() -> str:
    return f"it may name {', '.join(COLUMNS)}"


def _named(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _is_list(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def _stamp(place: Path) -> list[Any]:
    """Return enough of a user's files to notice that they have changed; of a hub id, its name."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    stats = [(str(path), path.stat()) for path in files if path.is_file()]
    return [str(place), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]


def _table_bytes(data: Any, image_columns: set[str]) -> bytes:
    """Return rows, a data frame or a data set as the bytes of a Parquet file. Raises UserError if it cannot be."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = BytesIO()
    if hasattr(data, "to_parquet"):  # a Dataset of datasets, a data frame of pandas
        data.to_parquet(place)
        return place.getvalue()
    if not (_is_list(data) and data and all(isinstance(row, Mapping) for row in data)):
        what = "an empty list" if _is_list(data) and not data else f"of type {type(data).__name__}"
        raise UserError(
            f"data is {what}: give a list of dicts such as {{'question': ..., 'answer': ..., 'image': ...}}, a "
            "Dataset, a data frame, or the path of a table or of a prepared set"
        )
    rows = [{name: _stored(value, name in image_columns) for name, value in row.items()} for row in data]
    try:
        table = pa.Table.from_pylist(rows, pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows]))
    except pa.ArrowException as error:
        raise UserError(f"data: a column's values are not all of one type: {error}; make them alike") from None
    pq.write_table(table, place)
    return place.getvalue()


def _stored(value: Any, is_image: bool) -> Any:
    """Return a value as a table holds it: an image as the bytes of its file."""
    if is_image and isinstance(value, list | tuple):
        return [_stored(item, is_image) for item in value]
    if is_image and isinstance(value, str | Path) and Path(value).is_file():
        return Path(value).read_bytes()
    if is_image and isinstance(value, Image.Image):
        place = BytesIO()
        value.save(place, format="PNG")
        return place.getvalue()
    return value
