"""A prepared set on disk: data.parquet, whose images `datasets` opens as they are, and manifest.json.

Row groups are small and images are not compressed again, so that a reader can fetch a few rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vlm_rl.data_prep.prepared_images import PreparedImage
from vlm_rl.types import Problem

FORMAT = 2
ROWS_PER_GROUP = 16  # what a reader takes at a time, images included: few, since training draws single rows
DATA, MANIFEST = "data.parquet", "manifest.json"


def schema() -> Any:
    """Return the Arrow schema of data.parquet, with the metadata by which `datasets` knows the images.

    It is datasets.Features(...).arrow_schema, without the four seconds that importing `datasets` takes.
    """
    import pyarrow as pa

    text, number = pa.string(), pa.int32()
    image = pa.struct({"bytes": pa.binary(), "path": text})
    original = {"width": number, "height": number, "format": text, "sha256": text, "phash": text}
    columns = {
        "id": text,
        "question": text,
        "images": pa.list_(image),
        "answer": text,
        "answer_type": text,
        "choices": pa.list_(text),
        "source": text,
        "category": text,
        "difficulty": pa.float64(),
        "meta": text,  # JSON
        "prompt_tokens": number,  # images expanded, with the manifest's tokenizer and template; -1: not counted
        "originals": pa.list_(pa.struct(original)),  # what each image was before
    }

    def feature(kind: pa.DataType) -> dict[str, Any]:
        if kind == image:
            return {"_type": "Image"}
        if pa.types.is_list(kind):
            return {"feature": feature(kind.value_type), "_type": "List"}
        if pa.types.is_struct(kind):
            return {field.name: feature(field.type) for field in kind}
        return {"dtype": "float64" if pa.types.is_float64(kind) else str(kind), "_type": "Value"}

    features = {name: feature(kind) for name, kind in columns.items()}
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def to_row(problem: Problem, prepared: Sequence[PreparedImage] = (), *, prompt_tokens: int = -1) -> dict[str, Any]:
    """Return a problem as a row of data.parquet; `prepared` says what its images were before."""
    return {
        "id": problem.id,
        "question": problem.question,
        "images": [{"bytes": data, "path": None} for data in problem.images],
        "answer": problem.answer,
        "answer_type": problem.answer_type,
        "choices": list(problem.choices),
        "source": problem.source,
        "category": problem.category,
        "difficulty": problem.difficulty,
        "meta": json.dumps(dict(problem.meta), sort_keys=True, ensure_ascii=False),
        "prompt_tokens": prompt_tokens,
        "originals": [
            {
                "width": image.original_width,
                "height": image.original_height,
                "format": image.original_format,
                "sha256": image.original_sha256,
                "phash": image.phash,
            }
            for image in prepared
        ],
    }


@dataclass(slots=True)
class SetWriter:
    """Streams rows into a Parquet file in row groups of ROWS_PER_GROUP; a context manager."""

    file: Path
    schema: Any
    num_rows: int = 0
    _pending: list[Any] | None = None
    _writer: Any = None

    def __enter__(self) -> SetWriter:
        import pyarrow.parquet as pq

        compression: Any = dict.fromkeys(_leaves(self.schema), "zstd") | {"images.list.element.bytes": "none"}
        repeated: Any = ["answer_type", "source", "category"]
        self._writer = pq.ParquetWriter(
            self.file,
            self.schema,
            compression=compression,
            use_dictionary=repeated,
            write_statistics=False,
            store_schema=True,
        )
        self._pending = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush(1)
        self._writer.close()

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows made by `to_row`."""
        import pyarrow as pa

        group: list[Mapping[str, Any]] = []
        for row in rows:
            group.append(row)
            if len(group) == ROWS_PER_GROUP:
                self.add_table(pa.Table.from_pylist(group, schema=self.schema))
                group = []
        if group:
            self.add_table(pa.Table.from_pylist(group, schema=self.schema))

    def add_table(self, table: Any) -> None:
        """Add rows of a table with the same schema."""
        assert self._pending is not None
        self._pending.append(table)
        self.num_rows += table.num_rows
        self._flush(ROWS_PER_GROUP)

    def _flush(self, at_least: int) -> None:
        import pyarrow as pa

        assert self._pending is not None
        if sum(table.num_rows for table in self._pending) < at_least:
            return
        rows = pa.concat_tables(self._pending)
        while rows.num_rows >= at_least:
            # One chunk, so that the file's pages do not depend on the pieces in which the rows arrived.
            group = rows.slice(0, ROWS_PER_GROUP).combine_chunks()
            self._writer.write_table(group, row_group_size=ROWS_PER_GROUP)
            rows = rows.slice(ROWS_PER_GROUP)
        self._pending = [rows] if rows.num_rows else []


def _leaves(schema: Any) -> list[str]:
    """Return the paths of the file's columns as Parquet names them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    layout = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [layout.column(index).path for index in range(len(layout.names))]


def copy_rows(file: Path, wanted: Container[int], writer: SetWriter) -> None:
    """Copy the rows whose numbers are `wanted` from a Parquet file, a row group at a time."""
    import pyarrow.parquet as pq

    first = 0
    with pq.ParquetFile(file) as source:
        for group in range(source.num_row_groups):
            count = source.metadata.row_group(group).num_rows
            chosen = [index for index in range(count) if first + index in wanted]
            first += count
            if chosen:
                writer.add_table(source.read_row_group(group, use_threads=False).take(chosen))


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write manifest.json: `facts`, the format and the checksum of data.parquet."""
    facts = {**facts, "format": FORMAT, "sha256": {DATA: sha256(folder / DATA)}}
    text = json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def sha256(file: Path) -> str:
    """Return the sha256 of a file as hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
