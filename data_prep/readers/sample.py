"""Hold the first rows of a user's table: which of its columns have a name and values that fit, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.readers.table_files import read_tables
from vlm_rl.data_prep.readers.written_values import is_missing
from vlm_rl.untrusted.visible_text import replace_invisible

SAMPLE_ROWS = 100
Names = Sequence[Sequence[str]]
Fits = Callable[[list[Any]], bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a table, and the values of its columns that are not empty; nested ones have dotted names."""

    rows: list[dict[str, Any]]
    columns: dict[str, list[Any]]


def read_sample(tables: Sequence[Path], encoding: str = "") -> Sample:
    """Read the first rows that can be read."""
    rows = [row for _, row in islice(read_tables(tables, encoding=encoding), SAMPLE_ROWS) if isinstance(row, dict)]
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in _leaves(row):
            columns.setdefault(name, [])
            if not is_missing(value) and value not in ([], {}):
                columns[name].append(value)
    return Sample(rows, columns)


_BEGINNINGS = (
    (b"<", "it is a web page or XML and not the data: download it again, or convert it"),
    (b"PK", "it is a zip archive: unpack it first"),
    (b"PAR1", "it is a Parquet file: let its name end in .parquet"),
)


def why_unreadable(tables: Sequence[Path], encoding: str = "") -> str:
    """Say why no row of tables can be read, as far as the beginning of the first tells, and what to do."""
    if next(iter(read_tables(tables, encoding=encoding)), None) is None:  # it may have a header, or a schema
        return "it is empty"
    table = tables[0]
    with table.open("rb") as file:
        head = file.read(40)
    known = next((said for begins, said in _BEGINNINGS if head.lstrip().startswith(begins)), "")
    other = f"it begins with {head[:16]!r}; give the file that its name promises, or its --encoding"
    return known or other


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and not is_struct(value) and prefix.count(".") < 3:
            yield from _leaves(value, f"{prefix}{name}.")
            if not prefix:
                yield name, value  # options may be an object of letters
        else:
            yield f"{prefix}{name}", value


def best(names: Names, fits: Fits, sample: Sample) -> list[str]:
    """Return the columns with the best name whose values fit, those that are nested least."""
    for equally_good in names:
        columns = [
            column
            for column, values in sample.columns.items()
            if values and (column.lower() in equally_good or last_name(column) in equally_good) and fits(values)
        ]
        depth = min((column.count(".") for column in columns), default=0)
        if columns := [column for column in columns if column.count(".") == depth]:
            return columns
    return []


def last_name(column: str) -> str:
    return column.rpartition(".")[2].lower()


class UndecidedColumnError(Exception):
    """Raised where the user has to say which column one of ours is.

    Attributes:
        option: of vlm-rl prepare, that decides.
        said: why it is asked.
        columns: that fit equally well; none if none fits.
    """

    def __init__(self, option: str, columns: Sequence[str] = ()) -> None:
        self.option, self.columns = option, columns
        if columns:
            self.said = (
                f"{' and '.join(map(repr, columns))} both look like the {option}; choose with --{option} COLUMN"
            )
        else:
            self.said = f"no column looks like the {option}; name it with --{option} COLUMN"
        super().__init__(self.said)


def several(option: str, columns: Sequence[str], sample: Sample, where: str) -> str:
    return message(where, sample, UndecidedColumnError(option, columns).said)


def message(where: str, sample: Sample, said: str) -> str:
    """Return a message that ends with every column and a value of it."""
    width = max(map(len, sample.columns), default=0)
    lines = [f"  {name:{width}}  {describe_value(values)}" for name, values in sample.columns.items()]
    return "\n".join([f"{where}: {said}", "its columns, each with a value:", *lines])


def describe_value(values: Sequence[Any]) -> str:
    """Return a value of a column on one line that a terminal can show."""
    if not values:
        return "(empty)"
    value = values[0]
    if isinstance(value, bytes) or (isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)):
        return "an image or other bytes"
    text = value if isinstance(value, str) else repr(value)
    text = replace_invisible(" ".join(text[:500].split()), lambda _: "?")
    return text if len(text) <= 70 else f"{text[:67]}..."


def is_struct(value: Mapping[str, Any]) -> bool:
    """Say whether an object is an image as datasets stores it."""
    return bool(value) and {*value} <= {"bytes", "path"}
