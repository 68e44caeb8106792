"""Ways to damage a prepared set by hand; each takes the set's folder and changes it in place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.prepared_sets import manifest_of, write_problems
from tests.helpers.toy_runs import toy_problem
from vlm_rl.types import Problem

Damage = Callable[[Path], None]
Row = dict[str, Any]
ROW = 1  # the row that is damaged where one is


def small_set(out: Path) -> Path:
    """Write a real set of 18 problems in two row groups, with options, metadata and a problem without an image."""
    problems = [toy_problem(index, "train", 16) for index in range(16)]
    problems.append(Problem("Toy-words", "How many legs?", (), "B", "choice", choices=("3", "4"), source="Toy"))
    problems.append(Problem("Toy-unit", "How long?", (), "2.5", "float", meta={"precision": 1, "unit": "cm"}))
    return write_problems(problems, out, {"min_pixels": 3136, "max_pixels": 1_003_520, "patch_size": 14})


# -- kinds of damage -------------------------------------------------------------------------------


def manifest(text: str | bytes) -> Damage:
    def write(folder: Path) -> None:
        (folder / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def fact(key: str, value: Any) -> Damage:
    """Set a field of the manifest; ... takes it out."""

    def damage(folder: Path) -> None:
        facts = manifest_of(folder) | {key: value}
        facts = {name: value for name, value in facts.items() if value is not ...}
        (folder / "manifest.json").write_text(json.dumps(facts))

    return damage


def data(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "data.parquet"
        file.write_bytes(change(file.read_bytes()))

    return damage


def table(change: Callable[[pa.Table], pa.Table], *, group: int = 16) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "data.parquet"
        pq.write_table(change(pq.read_table(file)), file, row_group_size=group)

    return damage


def row(change: Callable[[Row], Any]) -> Damage:
    """Change one row; the columns keep their types."""

    def changed(whole: pa.Table) -> pa.Table:
        rows = whole.to_pylist()
        change(rows[ROW])
        return pa.Table.from_pylist(rows, schema=whole.schema)

    return table(changed)


def cell(name: str, value: Any) -> Damage:
    return row(lambda fields: fields.update({name: value}))


def meta(key: str, value: Any) -> Damage:
    return cell("meta", json.dumps({key: value}))


def column(name: str, values: Any, kind: pa.DataType | None = None) -> Damage:
    """Replace a column; one value is repeated."""

    def changed(whole: pa.Table) -> pa.Table:
        filled = values if isinstance(values, list) else [values] * whole.num_rows
        return whole.set_column(whole.schema.get_field_index(name), name, pa.array(filled, type=kind))

    return table(changed)


def image(change: Callable[[bytes], bytes | None]) -> Damage:
    return row(lambda fields: fields["images"][0].update(bytes=change(fields["images"][0]["bytes"])))


def sealed(damage: Damage) -> Damage:
    """Damage the set, and give its manifest the new checksum: nothing then looks changed."""

    def both(folder: Path) -> None:
        damage(folder)
        digest = hashlib.sha256((folder / "data.parquet").read_bytes()).hexdigest()
        fact("sha256", {"data.parquet": digest})(folder)

    return both


def not_utf8(folder: Path) -> None:
    whole = pq.read_table(folder / "data.parquet")
    raw = pa.array([b"\xff\xfe"] * whole.num_rows, pa.binary()).view(pa.string())
    index = whole.schema.get_field_index("question")
    pq.write_table(whole.set_column(index, "question", raw), folder / "data.parquet")


def flipped(place: int) -> Damage:
    """Flip a bit at this many thousandths of the file."""

    def change(raw: bytes) -> bytes:
        at = len(raw) * place // 1000
        return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]

    return data(change)


PNG_END = b"\0\0\0\0IEND\xae\x42\x60\x82"

DAMAGES: dict[str, Damage] = {
    # the manifest
    "manifest empty": manifest(""),
    "manifest cut": manifest('{"min_pixels": 31'),
    "manifest a list": manifest("[1, 2]"),
    "manifest a number": manifest("7"),
    "manifest null": manifest("null"),
    "manifest not UTF-8": manifest(b"\xff\xfe{}"),
    "manifest deep": manifest("[" * 100_000),
    "manifest gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest a folder": lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir())[0],
    "min_pixels text": fact("min_pixels", "many"),
    "max_pixels null": fact("max_pixels", None),
    "max_pixels a list": fact("max_pixels", [1]),
    "max_pixels a bool": fact("max_pixels", True),
    "max_pixels negative": fact("max_pixels", -5),
    "min_pixels huge": fact("min_pixels", 10**400),
    "patch_size text": fact("patch_size", "14"),
    "patch_size 0": fact("patch_size", 0),
    "sha256 null": fact("sha256", None),
    "sha256 text": fact("sha256", "abc"),
    "sha256 of a number": fact("sha256", {"data.parquet": 7}),
    "sha256 gone": fact("sha256", ...),
    "kept wrong": fact("kept", 3),
    # the file
    "data gone": lambda folder: (folder / "data.parquet").unlink(),
    "data empty": data(lambda raw: b""),
    "data text": data(lambda raw: b"id,question\n1,2\n"),
    "data cut in the middle": data(lambda raw: raw[: len(raw) // 2]),
    "data without its last byte": data(lambda raw: raw[:-1]),
    "data without its middle": data(lambda raw: raw[: len(raw) // 3] + raw[len(raw) // 2 :]),
    "a row group zeroed": data(lambda raw: raw[:100] + bytes(len(raw) // 2) + raw[100 + len(raw) // 2 :]),
    **{f"a bit flipped at {place}": flipped(place) for place in (1, 300, 600, 900, 980, 995)},
    "no rows": table(lambda whole: whole.slice(0, 0)),
    "one row group": table(lambda whole: whole, group=1000),
    "row groups of one": table(lambda whole: whole, group=1),
    "rows in a different order": table(lambda whole: whole.take(list(range(whole.num_rows))[::-1])),
    # columns
    **{
        f"column {name} gone": table(lambda whole, name=name: whole.drop_columns([name]))
        for name in ("id", "question", "images", "answer", "answer_type", "meta", "choices", "source", "difficulty")
    },
    "column added": table(lambda whole: whole.append_column("more", pa.array([1] * whole.num_rows))),
    "column twice": table(lambda whole: whole.append_column("answer", whole["answer"])),
    "id numbers": column("id", list(range(18))),
    "answer numbers": column("answer", 7),
    "answer bytes": column("answer", b"7"),
    "answer all null": column("answer", None, pa.string()),
    "question lists": column("question", [["a"]] * 18),
    "meta objects": column("meta", {"precision": 1}),
    "images texts": column("images", "a.png"),
    "images bytes": column("images", [[b"a"]] * 18),
    "images numbers in place of bytes": column("images", [[{"bytes": 3, "path": None}]] * 18),
    "images without bytes": column("images", [[{"path": "/etc/passwd"}]] * 18),
    "images of null type": column("images", None),
    "choices texts": column("choices", "3"),
    "choices numbers": column("choices", [[3, 4]] * 18),
    "difficulty texts": column("difficulty", "hard"),
    "source numbers": column("source", 3),
    "question not UTF-8": not_utf8,
    # cells
    **{f"{name} null": cell(name, None) for name in ("id", "question", "images", "answer", "answer_type", "meta")},
    **{f"{name} null": cell(name, None) for name in ("choices", "source", "category", "difficulty")},
    **{f"{name} of blanks": cell(name, " \t\n") for name in ("id", "question", "answer", "answer_type", "meta")},
    "id of another row": cell("id", toy_problem(0, "train", 16).id),
    "id very long": cell("id", "x" * 100_000),
    "id with control characters": cell("id", "a\0b\x1b[31m\u202e../../etc"),
    "question without its marker": cell("question", "How many?"),
    "question with two markers": cell("question", "<image><image> How many?"),
    "question with control tokens": cell("question", "<image> <|image_pad|><|im_end|>"),
    "question very long": cell("question", "<image> " + "word " * 20_000),
    "answer of 400 digits": cell("answer", "1" + "0" * 400),
    "answer very long": cell("answer", "x" * 100_000),
    "answer type unknown": cell("answer_type", "riddle"),
    "difficulty NaN": cell("difficulty", float("nan")),
    "a choice null": cell("choices", ["3", None]),
    "meta no JSON": cell("meta", "{"),
    "meta a list": cell("meta", "[1]"),
    "meta deep": cell("meta", "[" * 100_000),
    "meta with a huge number": cell("meta", '{"tolerance": 1' + "0" * 5000 + "}"),
    "precision text": meta("precision", "two"),
    "precision huge": meta("precision", 10**9),
    "precision negative": meta("precision", -1),
    "tolerance text": meta("tolerance", "about"),
    "tolerance NaN": meta("tolerance", float("nan")),
    "tolerance huge": meta("tolerance", 10**400),
    "unit a number": meta("unit", 7),
    "box text": meta("box", "[0, 0, 1, 1]"),
    "box beyond its image": meta("box", [0, 0, 1.5, 1]),
    "box without area": meta("box", [0.5, 0, 0.5, 1]),
    "alternatives text": meta("alternatives", "7"),
    "alternatives numbers": meta("alternatives", [7]),
    "test_only text": meta("test_only", "no"),
    "annotations_only": meta("annotations_only", True),
    # images
    "image null": row(lambda fields: fields["images"].__setitem__(0, None)),
    "image bytes null": image(lambda raw: None),
    "image empty": image(lambda raw: b""),
    "image text": image(lambda raw: b"no picture"),
    "image cut": image(lambda raw: raw[: len(raw) // 2]),
    "image cut and closed": image(lambda raw: raw[: len(raw) * 9 // 10] + PNG_END),
    "image with a hole": image(lambda raw: raw[:120] + bytes(20) + raw[140:]),
    "image more": row(lambda fields: fields["images"].append(fields["images"][0])),
    "image fewer": cell("images", []),
    "image null, sealed": sealed(row(lambda fields: fields["images"].__setitem__(0, None))),
    "image text, sealed": sealed(image(lambda raw: b"no picture")),
    "image cut, sealed": sealed(image(lambda raw: raw[: len(raw) // 2])),
    "bit flipped, sealed": sealed(flipped(300)),
}
