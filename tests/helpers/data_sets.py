"""Data sets in their authors' layouts for tests: written to files, and read by the project's readers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.benchmark_rows import write_annotations
from tests.helpers.images import encoded, smooth_noise
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.records import BlankImage, DroppedRow, ImageReference, RowError, TypesetImage
from vlm_rl.types import Problem


def _read(image: ImageReference) -> bytes:
    assert not isinstance(image, BlankImage | TypesetImage), "preparation draws it"
    return image.read()


def read_problems(source: str, path: Path, split: str = "") -> tuple[dict[str, Problem], Counter[str]]:
    """Return the problems by id, with the bytes of their images, and the dropped rows by reason.

    A row whose image cannot be read is dropped, too.
    """
    problems: dict[str, Problem] = {}
    dropped: Counter[str] = Counter()
    for row in SOURCES[source].read(path, split):
        if isinstance(row, DroppedRow):
            dropped[row.reason] += row.count
            continue
        try:
            problems[row.problem.id] = replace(row.problem, images=tuple(_read(image) for image in row.images))
        except RowError as error:
            dropped[error.reason] += 1
    return problems, dropped


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a Parquet file whose schema follows from them; returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def write_json_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines; returns the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_row(content: object, gold: object, index: object, **extra: object) -> dict[str, Any]:
    """Return a row of DAPO's file; `content` is the text of its one message, or a list of messages."""
    return {
        "data_source": "math_dapo",
        "prompt": content if isinstance(content, list) else [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index, **extra},
    }


def dapo_file(file: Path, rows: list[tuple[str, str]]) -> Path:
    """Write (problem, gold) rows as DAPO's training file, its instruction around each problem."""
    full = [
        dapo_row(DAPO_HEAD + problem + DAPO_TAIL, gold, f"uuid-{index}") for index, (problem, gold) in enumerate(rows)
    ]
    return write_parquet(file, full)


def write_sample(source: str, folder: Path) -> int:
    """Write a few made rows of a benchmark, with their images, below `folder`; returns how many rows."""
    if source == "dapo":
        texts = ("How many?", "Which?")
        rows = [dapo_row(text, "7", number, raw_problem=text) for number, text in enumerate(texts)]
        write_parquet(folder / "aime-2024.parquet", rows)
        return len(rows)
    count = 0
    for file in write_annotations(source, folder):
        text = file.read_text()
        tree = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        for row in tree.values() if isinstance(tree, dict) else tree:
            name = row.get("image") or row.get("image_path") or row.get("imagename")
            if name:
                image = file.parent / ("images" if "imagename" in row else "") / name
                image.parent.mkdir(exist_ok=True)
                image.write_bytes(encoded(smooth_noise(100, 90, seed=count)))
            count += 1
    return count
