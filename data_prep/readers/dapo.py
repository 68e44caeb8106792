"""Read BytedTsinghua-SIA/DAPO-Math-17k: 1.79 million rows, which are some 17,400 problems about 100 times each.

The copies are counted while the file streams, column by column in Arrow, so that no copy ever becomes a
Python object. A problem is kept once, or not at all if its copies disagree about the answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.data_prep.readers.row_golds import gold_of
from vlm_rl.data_prep.readers.table_files import check_columns, find_tables, read_tables
from vlm_rl.data_prep.records import (
    Converted,
    DroppedRow,
    Fields,
    RowError,
    UsableRow,
    convert_rows,
    text_of,
)
from vlm_rl.errors import UserError
from vlm_rl.types import Problem

PREFIX = re.compile(
    r"\ASolve the following math problem step by step\..*?where \$Answer is the answer to the problem\.\s*", re.S
)
SUFFIX = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")
_BATCH = 65_536  # rows folded together


def strip_wrapper(prompt: str) -> str:
    """Return the problem without DAPO's instruction around it."""
    return SUFFIX.sub("", PREFIX.sub("", prompt)).strip()


@dataclass(slots=True)
class _Copies:
    """All rows that hold the same problem."""

    first: int  # number of the first row
    index: Any  # of the first row: its id
    validation: bool
    golds: Counter[Any] = field(default_factory=Counter)


def read_dapo(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Read the training file, or DAPO's validation files (AIME), whose rows are marked test-only.

    Validation files have `extra_info.raw_problem`, and their index is a number and not a UUID.
    """
    tables = find_tables(path, ["data/dapo-math-17k.parquet", "*.parquet", "data/*.parquet"])
    for table in tables:
        yield from _read_file(table)


def _read_file(table: Path) -> Iterator[UsableRow | DroppedRow]:
    problems: dict[str, _Copies] = {}
    for key, start, golds in _groups(table):
        if isinstance(golds, RowError):
            yield golds.dropped(f"{table.name} row {start}")
            continue
        question, index, validation = key
        copies = problems.setdefault(strip_wrapper(question), _Copies(start, index, validation))
        if start < copies.first:
            copies.first, copies.index = start, index
        copies.golds.update(golds)
    for question, copies in sorted(problems.items(), key=lambda item: item[1].first):
        where, total = f"{table.name} row {copies.first}", sum(copies.golds.values())
        if total > 1:
            yield DroppedRow(
                where, "duplicate", f"{total - 1} more copies of {question!r:.80}", known=True, count=total - 1
            )
        yield _fold(where, question, copies)


def _fold(where: str, question: str, copies: _Copies) -> UsableRow | DroppedRow:
    if len(copies.golds) > 1:
        votes = ", ".join(f"{gold!r} in {count}" for gold, count in copies.golds.most_common())
        detail = f"copies disagree about the answer of {question!r:.80}: {votes}"
        return DroppedRow(where, "gold_conflict", detail, known=True)
    (answer,) = copies.golds
    try:
        if not question:
            raise RowError("prompt_missing", "the prompt holds no problem")
        if copies.index is None:
            raise RowError("id_missing", "extra_info.index is missing")
        gold = gold_of(answer)
    except RowError as error:
        return error.dropped(where)
    meta = {"test_only": True} if copies.validation else {}
    return UsableRow(where, _problem(f"dapo-{copies.index}", question, gold, meta, source="dapo"))


def _problem(identity: str, question: str, gold: str, meta: dict[str, Any], *, source: str) -> Problem:
    return Problem(
        id=identity,
        question=question,
        images=(),
        answer=gold,
        answer_type=infer_answer_type(gold),
        source=source,
        category="math",
        meta=meta,
    )


_Key = tuple[str, Any, bool]


def _groups(table: Path) -> Iterator[tuple[_Key, int, Counter[Any] | RowError]]:
    """Yield ((prompt, index of its first row, is validation), first row, counts by gold) of each batch's problems.

    In place of the counts there is a RowError for a row whose prompt is not a single message.
    """
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet as pq

    pc: Any = pyarrow.compute  # its functions are made at run time

    try:
        with pq.ParquetFile(table, pre_buffer=False) as file:
            columns = ["prompt", "reward_model", "extra_info"]
            check_columns(table, file.schema_arrow.names, columns)
            start = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=columns, use_threads=False):
                flat = _flatten(batch, start)
                bad = pc.invert(pc.is_valid(flat["text"]))
                for row in flat.filter(bad)["row"].to_pylist():
                    error = RowError("bad_type", "prompt must be a list of one message with text")
                    yield ("", None, False), row, error
                good = flat.filter(pc.invert(bad))
                yield from _fold_batch(good)
                start += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{table}: cannot be read as Parquet: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{table}: its columns are not DAPO's ({error}); see docs/data.md for the schema") from None


def _flatten(batch: Any, start: int) -> Any:
    """Return flat columns text, gold, row, index, validation; text is null where a prompt is not one message."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute

    prompt = batch["prompt"]
    is_single = pc.equal(pc.list_value_length(prompt), 1)
    messages = pc.list_element(pc.if_else(is_single, prompt, pa.scalar(None, prompt.type)).drop_null(), 0)
    places = np.flatnonzero(np.asarray(pc.fill_null(is_single, False)))
    contents = pc.struct_field(messages, "content")
    at = np.full(batch.num_rows, -1)
    at[places] = np.arange(len(places))
    text = contents.take(pa.array(at, mask=at < 0))
    extra = batch["extra_info"]
    names = [extra.type.field(i).name for i in range(extra.type.num_fields)]
    validation = pc.is_valid(pc.struct_field(extra, "raw_problem")) if "raw_problem" in names else None
    return pa.table(
        {
            "text": text,
            "gold": pc.struct_field(batch["reward_model"], "ground_truth"),
            "row": pa.array(np.arange(start, start + batch.num_rows)),
            "index": pc.struct_field(extra, "index"),
            "validation": validation if validation is not None else pa.array(np.zeros(batch.num_rows, dtype=bool)),
        }
    )


def _fold_batch(flat: Any) -> Iterator[tuple[_Key, int, Counter[Any]]]:
    """Yield the groups of rows of a batch that have the same text and gold, in the form of `_groups`."""
    groups = flat.group_by(["text", "gold"], use_threads=False).aggregate(
        [("row", "min"), ("row", "count"), ("index", "first"), ("validation", "first")]
    )
    for group in groups.sort_by("row_min").to_pylist():
        key = (group["text"], group["index_first"], group["validation_first"])
        yield key, group["row_min"], Counter({group["gold"]: group["row_count"]})


def read_dapo_processed(path: Path, split: str = "all") -> Iterator[UsableRow | DroppedRow]:
    """Read open-r1/DAPO-Math-17k-Processed: `prompt` and `solution` are plain text; `split` is all, en or cn."""
    tables = find_tables(path, [f"{split}/*.parquet", f"data/{split}*.parquet", "*.parquet", "data/*.parquet"])

    def convert(row: Fields) -> Converted:
        gold = gold_of(row.get("solution"))
        index = (row.get("extra_info") or {}).get("index")
        if index is None:
            raise RowError("id_missing", "extra_info.index is missing")
        question = strip_wrapper(text_of(row, "prompt"))
        return _problem(f"dapo-{index}", question, gold, {}, source="dapo_processed"), ()

    return convert_rows(read_tables(tables, ["prompt", "solution", "extra_info"]), convert)
