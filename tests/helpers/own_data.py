"""The same three problems as users have them on disk: one writer for each form that `vlm-rl prepare PATH` reads."""

from __future__ import annotations

import base64
import csv
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.images import encoded, smooth_noise

QUESTIONS = ("How many squares are red?", "How many are blue?", "How many are green?")
ANSWERS = ("4", "007", "2")  # a reader that guesses types would make a number of the second
IMAGES = [encoded(smooth_noise(84, 84, seed=number)) for number in range(3)]
INSTRUCTION = " Put the answer in \\boxed{}."  # which other trainers write into their prompts


def _rows(**more: Any) -> list[dict[str, Any]]:
    return [
        {"question": question, "answer": answer, **{name: value(number) for name, value in more.items()}}
        for number, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]


def _files(folder: Path, inner: str) -> list[str]:
    """Write the images into a folder below, and return their paths relative to it."""
    (folder / inner).mkdir(parents=True)
    for number, data in enumerate(IMAGES):
        (folder / inner / f"{number}.png").write_bytes(data)
    return [f"{number}.png" for number in range(3)]


def _json_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _struct(number: int) -> dict[str, Any]:
    return {"bytes": IMAGES[number], "path": None}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a data set with an image column."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    return datasets.Dataset.from_list(rows, features=features)


def jsonl(folder: Path) -> None:
    """A folder of images with JSON lines beside it."""
    names = _files(folder, "images")
    _json_lines(folder / "data.jsonl", _rows(image=lambda number: f"images/{names[number]}"))


def csv_bare_names(folder: Path) -> None:
    """A CSV file that names images without their folder."""
    names = _files(folder, "pictures")
    with (folder / "questions.csv").open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["file_name", "question", "answer"])
        writer.writeheader()
        writer.writerows(_rows(file_name=lambda number: names[number]))


def tsv_base64(folder: Path) -> None:
    """A TSV file with images as base64, as VLMEvalKit has them."""
    folder.mkdir()
    rows = _rows(image=lambda number: base64.b64encode(IMAGES[number]).decode())
    with (folder / "bench.tsv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["image", "question", "answer"], delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)


def saved_dataset(folder: Path) -> None:
    """A data set of `save_to_disk`, with a cache that `map` left beside it."""
    _dataset(_rows(image=_struct)).save_to_disk(str(folder))
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"of another run")


def saved_splits(folder: Path) -> None:
    """A DatasetDict, whose split test holds the problems in a different order."""
    import datasets

    rows = _rows(image=_struct)
    splits = {"test": _dataset(rows[::-1][:2]), "train": _dataset(rows)}
    datasets.DatasetDict(**splits).save_to_disk(str(folder))


def easyr1(folder: Path) -> None:
    """Parquet files of two splits as EasyR1 reads them: problem, answer, images."""
    (folder / "data").mkdir(parents=True)
    rows = [
        {"images": [_struct(number)], "problem": f"<image>{row['question']}", "answer": row["answer"]}
        for number, row in enumerate(_rows())
    ]
    pq.write_table(pa.Table.from_pylist(rows[:2]), folder / "data/train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[2:]), folder / "data/train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "data/test-00000-of-00001.parquet")


def verl(folder: Path) -> None:
    """Parquet files as verl's geo3k.py writes them."""
    folder.mkdir()
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"<image>{row['question']}{INSTRUCTION}"}],
            "images": [_struct(number)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {
                "split": "train",
                "index": number,
                "answer": row["answer"],
                "question": f"<image>{row['question']}",
            },
        }
        for number, row in enumerate(_rows())
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "test.parquet")


def llava(folder: Path) -> None:
    """LLaVA's conversations: a JSON list, images in a folder of their own."""
    names = _files(folder, "coco/train2017")
    rows = [
        {
            "id": "same",  # LLaVA repeats the ids of images
            "image": f"train2017/{names[number]}",
            "conversations": [
                {"from": "human", "value": f"<image>\n{row['question']}"},
                {"from": "gpt", "value": f"I count them. \\boxed{{{row['answer']}}}"},
            ],
        }
        for number, row in enumerate(_rows())
    ]
    (folder / "llava.json").write_text(json.dumps(rows))


def sharegpt(folder: Path) -> None:
    """ShareGPT's conversations as LLaMA-Factory has them, with a system turn and reasoning in tags."""
    names = _files(folder, "images")
    rows = [
        {
            "images": [f"images/{names[number]}"],
            "conversations": [
                {"from": "system", "value": "You count."},
                {"from": "human", "value": f"<image>{row['question']}"},
                {"from": "gpt", "value": f"<think>one, two</think><answer>{row['answer']}</answer>"},
            ],
        }
        for number, row in enumerate(_rows())
    ]
    _json_lines(folder / "sharegpt.jsonl", rows)


def openai(folder: Path) -> None:
    """OpenAI's messages, images as data URLs."""
    folder.mkdir()
    rows = []
    for number, row in enumerate(_rows()):
        url = f"data:image/png;base64,{base64.b64encode(IMAGES[number]).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": row["question"]}]
        answer = {"role": "assistant", "content": row["answer"]}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    _json_lines(folder / "messages.jsonl", rows)


def webdataset(folder: Path) -> None:
    """Two tars: an image and a JSON for each sample."""
    folder.mkdir()
    for shard, numbers in enumerate(([0, 1], [2])):
        with tarfile.open(folder / f"shard-{shard:06d}.tar", "w") as archive:
            for number in numbers:
                facts = json.dumps(_rows()[number]).encode()
                for name, data in ((f"{number:05d}.png", IMAGES[number]), (f"{number:05d}.json", facts)):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


FORMS: dict[str, Callable[[Path], None]] = {
    form.__name__: form
    for form in (
        jsonl,
        csv_bare_names,
        tsv_base64,
        saved_dataset,
        saved_splits,
        easyr1,
        verl,
        llava,
        sharegpt,
        openai,
        webdataset,
    )
}


def workbook_with(table: Path, value: bytes, *, row: int = 2) -> None:
    """Write a workbook of one question, in a row of this number, whose text unpacks to these bytes."""
    book = openpyxl.Workbook()
    assert book.active is not None
    book.active.append(["question"])
    book.active.append(["THE TEXT"])
    book.save(table)
    with zipfile.ZipFile(table) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(table, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            far = part.replace(b'<row r="2"', b'<row r="%d"' % row).replace(b'"A2"', b'"A%d"' % row)
            archive.writestr(name, far.replace(b"THE TEXT", value).replace(b"A1:A2", b"A1:A%d" % row))
