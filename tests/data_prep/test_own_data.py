"""`vlm-rl prepare PATH`: users' own data in its usual forms, and what is said where nothing can be guessed."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image, ImageDraw

from tests.helpers.images import encoded, plain_png, smooth_noise
from tests.helpers.own_data import ANSWERS, FORMS, IMAGES, QUESTIONS
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl import cli
from vlm_rl.data.golds import with_choices
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.find_data import find_data
from vlm_rl.data_prep.readers.generic import load_mapping
from vlm_rl.data_prep.readers.guess import guess
from vlm_rl.errors import UserError
from vlm_rl.grading.code_tests import CodeTests


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `vlm-rl prepare` and returns its exit code and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        code = cli.main(["prepare", *map(str, arguments)])
        return code, "".join(capsys.readouterr())

    return run


def mapped(path: Path, split: str = "", **given: str) -> dict:
    """Return what is guessed, as the YAML file says it."""
    mapping = guess(path, find_data(path, split), {ours: [name] for ours, name in given.items()})
    return yaml.safe_load(mapping.text())


def json_lines(tmp_path: Path, *rows: dict) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# -- the forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_problems(form: str, tmp_path: Path) -> None:
    """The data of the form, its guessed mapping, and the same mapping from a YAML file."""
    FORMS[form](tmp_path / "raw")
    found = find_data(tmp_path / "raw")
    mapping = guess(tmp_path / "raw", found, {})
    report = prepare("generic", tmp_path / "raw", tmp_path / "set", mapping=mapping)
    assert (report.rows_in, report.kept, report.dropped) == (3, 3, {})
    rows = rows_of(tmp_path / "set")
    assert [row["question"].replace("<image>", "").strip() for row in rows] == [*QUESTIONS]
    assert [row["question"].count("<image>") for row in rows] == [1, 1, 1]
    assert [row["answer"] for row in rows] == [*ANSWERS]
    assert [[image["bytes"] for image in row["images"]] for row in rows] == [[data] for data in IMAGES]
    assert manifest_of(tmp_path / "set")["mapping"]["columns"] == mapping.columns.model_dump(exclude_defaults=True)

    (tmp_path / "mapping.yaml").write_text(mapping.text())
    assert load_mapping(tmp_path / "mapping.yaml") == mapping
    prepare("generic", tmp_path / "mapping.yaml", tmp_path / "again")
    assert (tmp_path / "again/data.parquet").read_bytes() == (tmp_path / "set/data.parquet").read_bytes()


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ("verl", {"question": "extra_info.question", "answer": "reward_model.ground_truth", "images": "images"}),
        ("llava", {"question": "conversations", "answer": "conversations", "images": "image"}),
        ("openai", {"question": "messages", "answer": "messages", "images": "messages"}),
        ("webdataset", {"question": "json.question", "answer": "json.answer", "images": "png"}),
    ],
)
def test_nested_columns_are_named_with_dots(form: str, columns: dict[str, str], tmp_path: Path) -> None:
    FORMS[form](tmp_path / "raw")
    guessed = mapped(tmp_path / "raw")["columns"]
    assert {ours: guessed[ours] for ours in columns} == columns


@pytest.mark.parametrize(("form", "answer_form"), [("llava", "box"), ("sharegpt", "tag"), ("jsonl", None)])
def test_the_form_of_answers_is_seen(form: str, answer_form: str | None, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "raw")
    assert mapped(tmp_path / "raw").get("answer_form") == answer_form


@pytest.mark.parametrize(
    ("answers", "answer_form", "golds"),
    [
        ([0, 2], "option_number", ["A", "C"]),
        (["ten", "red"], "option_text", ["C", "A"]),
        (["A", "C"], "plain", ["A", "C"]),
        (["#### ten", "so\n#### red"], "hashes", ["C", "A"]),
    ],
)
def test_options_and_golds(answers: list, answer_form: str, golds: list[str], tmp_path: Path) -> None:
    options = [["two", "three", "ten"], ["red", "blue", "green"]]
    rows = [{"question": f"Which {n}?", "answer": answers[n], "options": options[n]} for n in range(2)]
    file = json_lines(tmp_path, *rows)
    mapping = guess(file, find_data(file), {})
    assert mapping.answer_form == answer_form
    prepare("generic", file, tmp_path / "set", mapping=mapping)
    prepared = rows_of(tmp_path / "set")
    assert [(row["answer"], row["choices"]) for row in prepared] == list(zip(golds, options, strict=True))


@pytest.mark.parametrize("keys", ["B3D", "312"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_options_may_have_labels(kind: str, keys: str, tmp_path: Path) -> None:
    """In the hub's form: an object of two lists. A few of ARC's rows count their options from 1."""
    texts = ["red", "blue", "green", "black"]
    labels = ["1234" if key.isdecimal() else "ABCD" for key in keys]
    rows = [
        {"question": f"Which {n}?", "choices": {"text": texts, "label": [*labels[n]]}, "answerKey": key}
        for n, key in enumerate(keys)
    ]
    file = json_lines(tmp_path, *rows)
    if kind == "parquet":
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file)
    mapping = guess(file, find_data(file), {})
    assert (mapping.columns.choices, mapping.answer_form) == ("choices", "plain")
    report = prepare("generic", file, tmp_path / "set", mapping=mapping)
    golds = ["ABCD"[own.index(key)] for own, key in zip(labels, keys, strict=True)]
    prepared = rows_of(tmp_path / "set")
    assert report.dropped == {}
    assert [(row["answer"], row["answer_type"], row["choices"]) for row in prepared] == [
        (gold, "choice", texts) for gold in golds
    ]


@pytest.mark.parametrize(
    ("choices", "answer", "gold", "kept"),
    [
        ({"A": "red", "B": None, "C": "blue"}, "C", "B", ["red", "blue"]),  # null: a key that only other rows have
        ({"1": "red", "2": "blue"}, 2, "B", ["red", "blue"]),
        ({"text": ["red", "blue"], "label": ["A"]}, "A", "", None),
        ({"first": ["red"], "second": ["blue"]}, "A", "", None),
        ([["red", "blue"], ["green"]], "A", "", None),
    ],
)
def test_objects_of_options(choices: Any, answer: Any, gold: str, kept: list[str] | None, tmp_path: Path) -> None:
    fine = {"question": "Which?", "choices": ["red", "blue"], "answer": "A"}
    file = json_lines(tmp_path, fine, {"question": "Which one?", "choices": choices, "answer": answer})
    mapping = guess(file, find_data(file), {"choices": ["choices"]})
    report = prepare("generic", file, tmp_path / "set", mapping=mapping)
    rows = [(row["answer"], row["choices"]) for row in rows_of(tmp_path / "set")]
    assert rows == [("A", ["red", "blue"]), *([(gold, kept)] if kept else [])]
    assert report.dropped == ({} if kept else {"bad_type": 1})


@pytest.mark.parametrize(
    ("question", "options", "is_listed"),
    [
        ("The sides are 3, 4 and 120. Which is the shortest?", ["3", "4", "12", "2"], False),
        ("Which is red?\n(A) 3\n(B) 4", ["3", "4"], True),
        ("Which is red?\nA. 3\nB. 4", ["A. 3", "B. 4"], True),
        ("Which is red?\n(A) 3\n(B) 4", ["3", "4", "5"], False),
    ],
)
def test_options_are_written_out_unless_the_question_lists_them(
    question: str, options: list[str], is_listed: bool, tmp_path: Path
) -> None:
    file = json_lines(tmp_path, {"question": question, "options": options, "answer": "B"})
    prepare("generic", file, tmp_path / "set", mapping=guess(file, find_data(file), {}))
    (row,) = rows_of(tmp_path / "set")
    assert row["question"] == (question if is_listed else with_choices(question, options))


def test_options_may_have_a_column_each(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text(
        "index\tquestion\tA\tB\tC\tanswer\n0\tWhich?\tred\tblue\t\tB\n1\tWho?\ta\tb\tc\tA\n"
    )
    assert mapped(tmp_path / "rows.tsv")["columns"]["choices"] == ["A", "B", "C"]
    file = tmp_path / "rows.tsv"
    prepare("generic", file, tmp_path / "set", mapping=guess(file, find_data(file), {}))
    assert [row["choices"] for row in rows_of(tmp_path / "set")] == [["red", "blue"], ["a", "b", "c"]]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_mapping_and_three_examples(said, tmp_path: Path) -> None:
    FORMS["jsonl"](tmp_path / "raw")
    code, text = said(tmp_path / "raw", "--out", tmp_path / "set")
    assert code == 0, text
    shown = yaml.safe_load(text.partition("--out SET)\n")[2].partition("\nexample 1")[0])
    assert shown == mapped(tmp_path / "raw")
    for number, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        assert f"example {number + 1}, data.jsonl line {number + 1}" in text
        assert f"  | {question}\n  images: images/{number}.png\n  answer: {answer} (integer)" in text
    assert "3 rows in, 3 kept, dropped: none" in text


def test_held_out_problems_are_a_set_of_their_own_and_share_no_image(said, tmp_path: Path) -> None:
    """Of 40 pictures with two questions each, a fourth; copies of a problem are dropped before the division."""
    rows = []
    for number in range(40):
        image = Image.new("RGB", (56, 56), (5 * number, 0, 0))
        ImageDraw.Draw(image).rectangle((0, 0, number, number), fill="white")
        for name, level in (("a", 1), ("b", 9)):  # the same pixels in files that differ
            image.save(tmp_path / f"{number}{name}.png", compress_level=level)
        rows += [
            {"image": f"{number}{file}.png", "answer": "4", "question": f"{word} {number}?"}
            for word, file in (("Who", "a"), ("Why", "a"), ("Who", "b"))
        ]
    file = json_lines(tmp_path, *rows)
    code, text = said(file, "--hold-out", "0.25", "--out", tmp_path / "set")
    assert code == 0 and f"{tmp_path / 'set-held-out'}: 120 rows in" in text, text
    sets = [rows_of(tmp_path / name) for name in ("set", "set-held-out")]
    words = [[row["question"].split()[-2:] for row in part] for part in sets]
    pictures = [{number for _, number in part} for part in words]
    assert not pictures[0] & pictures[1] and len(pictures[1]) == 10
    assert sorted(words[0] + words[1]) == sorted([word, f"{n}?"] for n in range(40) for word in ("Who", "Why"))
    num_trained, num_held_out = map(len, sets)
    assert f"{num_trained} kept, {num_held_out} held out, dropped: 40 near_duplicate" in text
    assert f"{num_held_out} kept, {num_trained} not held out, dropped: 40 near_duplicate" in text
    dropped = manifest_of(tmp_path / "set-held-out")["dropped"]
    assert dropped == {"near_duplicate": 40, "other_set": 80 - len(sets[1])}
    code, text = said(file, "--hold-out", "0.25", "--limit", "20", "--out", tmp_path / "few")
    few, held_out = (rows_of(tmp_path / name) for name in ("few", "few-held-out"))
    assert code == 0 and held_out and len(few) + len(held_out) <= 20
    assert not {row["question"].split()[-1] for row in few} & {row["question"].split()[-1] for row in held_out}


def test_a_picture_of_all_problems_divides_none_of_them(said, tmp_path: Path) -> None:
    (tmp_path / "blank.png").write_bytes(plain_png(56, 56))
    shared = {"image": "blank.png", "answer": "4"}
    file = json_lines(tmp_path, *({**shared, "question": f"What is number {n}?"} for n in range(100)))
    code, text = said(file, "--hold-out", "0.3", "--out", tmp_path / "set")
    assert code == 0 and len(rows_of(tmp_path / "set-held-out")) == 30, text


@pytest.mark.parametrize(("limit", "share"), [(2, 0.75), (2, 0.1), (5, 0.5)])
def test_a_limit_leaves_both_sets_a_row(said, tmp_path: Path, limit: int, share: float) -> None:
    file = json_lines(tmp_path, *({"question": f"What is {n}?", "answer": "4"} for n in range(40)))
    assert said(file, "--hold-out", share, "--limit", limit, "--out", tmp_path / "set")[0] == 0
    counts = [len(rows_of(tmp_path / name)) for name in ("set", "set-held-out")]
    assert sum(counts) <= limit and min(counts) >= 1


def test_what_cannot_be_held_out(said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = json_lines(tmp_path, *({"question": f"What is {n}?", "answer": "4"} for n in range(8)))
    (tmp_path / "old-held-out").mkdir()
    for arguments, words in (
        ([file, "--hold-out", "1", "--out", "new"], "--hold-out 1.0"),
        ([file, "--hold-out", "0.5", "--out", "old"], "old-held-out: already exists"),
        ([file, "--hold-out", "0.5", "--out", "."], ".: already exists"),
        ([file, "--hold-out", "0.999", "--out", "new"], "new: no row is left to write"),
        ([file, "--hold-out", "0.5", "--limit", "1", "--out", "new"], "--limit 1 with --hold-out: keep at least two"),
        (
            ["mix", "--source", file, "--hold-out", "0.5", "--out", "new"],
            "--hold-out: a mix is made of prepared sets",
        ),
    ):
        code, text = said(*arguments)
        assert code == 2 and words in text and "Traceback" not in text, text
        assert not any(Path(name).exists() for name in ("new", "old", "new-held-out"))


def test_a_dry_run_writes_nothing(said, tmp_path: Path) -> None:
    FORMS["easyr1"](tmp_path / "raw")
    before = sorted(tmp_path.rglob("*"))
    code, text = said(tmp_path / "raw", "--out", tmp_path / "set", "--dry-run")
    assert code == 0 and text.endswith("nothing was written\n")
    assert "split: train; for a different one: --split, of test" in text
    assert sorted(tmp_path.rglob("*")) == before
    assert said(tmp_path / "raw")[0] == 2, "--out is needed without --dry-run"


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("nosuch", ["--source", "."], "no data source 'nosuch'"),
        ("virl39k", ["--source", "/a/typo/x"], "/a/typo/x: does not exist"),
        ("rows.jsonl", ["--max-prompt-tokens", "9"], "--max-prompt-tokens needs a tokenizer"),
        ("rows.jsonl", ["--tokenizer", "none"], "none"),
    ],
)
def test_a_dry_run_makes_the_same_checks(
    said, source: str, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path, {"question": "Which?", "answer": "4"})
    monkeypatch.chdir(tmp_path)
    code, text = said(source, *options, "--out", "set")
    assert code == 2 and words in text and "Traceback" not in text
    assert said(source, *options, "--dry-run") == (code, text)


@pytest.mark.parametrize("form", ["saved_splits", "easyr1", "verl"])
def test_another_split_is_taken(form: str, said, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "raw")
    assert said(tmp_path / "raw", "--split", "test", "--out", tmp_path / "set")[0] == 0
    answers = {"saved_splits": ["2", "007"]}.get(form, ["4"])
    assert [row["answer"] for row in rows_of(tmp_path / "set")] == answers
    code, text = said(tmp_path / "raw", "--split", "tset", "--out", tmp_path / "other")
    assert code == 2 and "--split 'tset'" in text and "has test, train" in text


def test_columns_that_the_user_names_win(said, tmp_path: Path) -> None:
    rows = [{"question": "wrong", "answer": 1, "mine": {"q": f"Which {n}?", "gold": n}} for n in range(2)]
    file = json_lines(tmp_path, *rows)
    assert said(file, "--question", "mine.q", "--answer", "mine.gold", "--out", tmp_path / "set")[0] == 0
    assert [(row["question"], row["answer"]) for row in rows_of(tmp_path / "set")] == [
        ("Which 0?", "0"),
        ("Which 1?", "1"),
    ]


@pytest.mark.parametrize(
    ("row", "arguments", "words"),
    [
        ({"question": "Which?", "result": "4"}, [], ["no column looks like the answer", "--answer COLUMN", "result"]),
        ({"question": "a", "problem": "b", "answer": "4"}, [], ["'question' and 'problem'", "--question COLUMN"]),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, [], ["'instruction' and 'input'", "--question"]),
        ({"question": "a", "answer": "4"}, ["--answer", "gold"], ["--answer gold", "no row has such a column"]),
        ({"question": "a", "answer": "4", "scan": "1.png", "plot": "2.png"}, [], ["'plot' and 'scan'", "--images"]),
        ({"question": "a", "answer": "4", "image": "1.png", "images": ["2.png"]}, [], ["'image' and 'images'"]),
    ],
)
def test_what_cannot_be_told_is_asked_for(said, tmp_path: Path, row: dict, arguments: list[str], words) -> None:
    code, text = said(json_lines(tmp_path, row), *arguments, "--out", tmp_path / "set")
    assert code == 2 and all(word in text for word in words), text
    assert all(f"  {name} " in text for name in row), "every column is listed"
    assert all(str(value)[:9] in text for value in row.values()), "with a value"


def test_all_that_cannot_be_told_is_asked_for_at_once_with_the_whole_command(said, tmp_path: Path) -> None:
    row = {"frage": "Which?", "loesung": "4", "scan": "1.png", "plot": "2.png"}
    file, out = json_lines(tmp_path, row), tmp_path / "set"
    code, text = said(file, "--out", out)
    assert code == 2
    assert f"vlm-rl prepare {file} --question COLUMN --answer COLUMN --images plot|scan --out {out}" in text
    code, text = said(file, "--question", "frage", "--answer", "loesung", "--out", out)
    assert code == 2 and "looks like" not in text
    assert f"vlm-rl prepare {file} --question frage --answer loesung --images plot|scan --out {out}" in text
    code, text = said(file, "--question", "q", "--answer", "a", "--out", out)
    assert code == 2 and "--question q --answer a: no row has such a column" in text


def test_equal_columns_are_no_question(tmp_path: Path) -> None:
    assert (
        mapped(json_lines(tmp_path, {"problem": "a?", "answer": "4", "gold": "4"}))["columns"]["answer"] == "answer"
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["no table there", "it has nothing", "image,question,answer"]),
        ({"a.png": ""}, ["no table there", "a.png"]),
        ({"a.csv": "x", "b.csv": "x"}, ["several tables (a.csv, b.csv)", "name one of them"]),
        ({"data.parquet": "", "manifest.json": "{}"}, ["is a prepared set already", "data.train"]),
        ({"dataset_dict.json": '{"splits": ["train"]}'}, ["train", "state.json"]),
        ({"dataset_dict.json": '{"splits": null}'}, ["dataset_dict.json names no splits"]),
        ({"train.csv": "question,answer\n"}, ["train.csv", "none of its first 100 rows can be read"]),
        ({"train.tar": "no tar"}, ["train.tar", "cannot be read as a tar archive"]),
    ],
)
def test_a_folder_without_a_table(said, tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    for name, text in files.items():
        (tmp_path / "raw" / name).write_text(text)
    code, text = said(tmp_path / "raw", "--out", tmp_path / "set")
    assert code == 2 and all(word in text for word in words), text


def test_names_that_are_nothing_here(said, tmp_path: Path) -> None:
    """A hub id gets the command that downloads it; tests run without a network."""
    code, text = said("me/mine", "--out", tmp_path / "set")
    assert code == 2
    assert (
        "  hf download me/mine --repo-type dataset --local-dir raw/mine\n  vlm-rl prepare raw/mine --out SET" in text
    )
    assert "docs/data.md" in said("mine", "--out", tmp_path / "set")[1]
    assert "--source" in said("virl39k", "--out", tmp_path / "set")[1]


def test_a_hub_id_in_the_cache_is_pinned(said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "datasets--me--mine" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    FORMS["easyr1"](snapshot)
    monkeypatch.setattr("vlm_rl.data_prep.readers.hub.CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    code, text = said("me/mine", "--revision", commit, "--out", "set")
    assert code == 0 and "path: me/mine\n  source: mine\n" in text and f"revision: {commit}" in text, text
    assert manifest_of(tmp_path / "set")["revision"] == commit


# -- what is promised of every preparation ------------------------------------------------------------


def test_a_bad_row_is_that_rows_alone(tmp_path: Path) -> None:
    table = b'question,answer\nWhich?,1\nWhy?,2,3\n\xff\xfe,4\n"Who,\nreally?",5\nWhere?\nWhen?,\n'
    (tmp_path / "rows.csv").write_bytes(table)
    file = tmp_path / "rows.csv"
    report = prepare("generic", file, tmp_path / "set", mapping=guess(file, find_data(file), {}))
    assert (report.rows_in, report.kept) == (6, 2)
    assert report.dropped == {"answer_missing": 1, "bad_csv": 2, "bad_text": 1}
    assert [row["question"] for row in rows_of(tmp_path / "set")] == ["Which?", "Who,\nreally?"]
    dropped = [json.loads(line)["where"] for line in (tmp_path / "set/dropped.jsonl").read_text().splitlines()]
    assert dropped == [f"rows.csv line {number}" for number in (3, 4, 7, 8)]


def test_a_bad_sample_of_a_tar_is_that_samples_alone(tmp_path: Path) -> None:
    FORMS["webdataset"](tmp_path / "raw")
    with tarfile.open(tmp_path / "raw/shard-000001.tar", "a") as archive:
        (tmp_path / "broken").write_text('{"question": ')
        archive.add(tmp_path / "broken", "00007.json")
        archive.add(tmp_path / "broken", "00008.png")
    file = tmp_path / "raw"
    report = prepare("generic", file, tmp_path / "set", mapping=guess(file, find_data(file), {}))
    assert (report.kept, report.dropped) == (3, {"bad_json": 1, "json.question_missing": 1})


def test_turns_that_are_no_problem_are_dropped_and_counted(tmp_path: Path) -> None:
    def turns(*speakers: str) -> dict:
        return {"conversations": [{"from": speaker, "value": "4"} for speaker in speakers]}

    file = json_lines(
        tmp_path, turns("human", "gpt"), turns("human", "gpt", "human", "gpt"), turns("system", "human")
    )
    mapping = guess(file, find_data(file), {"answer": ["conversations"], "question": ["conversations"]})
    report = prepare("generic", file, tmp_path / "set", mapping=mapping)
    assert (report.kept, report.dropped) == (1, {"several_turns": 1, "turn_missing": 1})


def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["question,answer", *(f"How many {number}?,{number}" for number in range(600))]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(lines))
    mapping = guess(file, find_data(file), {})
    prepare("generic", file, tmp_path / "whole", mapping=mapping)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vlm_rl.data_prep.preparation.merge_shards", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare("generic", file, tmp_path / "set", mapping=mapping)
    report = prepare("generic", file, tmp_path / "set", mapping=mapping)
    assert report.shards_reused == 3  # of 256 rows
    assert (tmp_path / "set/data.parquet").read_bytes() == (tmp_path / "whole/data.parquet").read_bytes()


def test_an_image_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "secret.png").write_bytes(IMAGES[0])
    paths = ["../secret.png", f"file://{tmp_path}/secret.png", "https://example.org/a.png"]
    file = json_lines(tmp_path / "raw", *({"question": f"{path}?", "answer": "1", "image": path} for path in paths))
    with pytest.raises(UserError, match=r"'image_outside': 2, 'image_missing': 1"):
        prepare("generic", file, tmp_path / "set", mapping=guess(file, find_data(file), {}))


def test_a_column_that_is_a_mistake_in_the_yaml_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": ["a"], "a": ["1"]}), tmp_path / "rows.parquet")
    mapping = {"path": "rows.parquet", "source": "x", "columns": {"question": "q", "answer": "a", "images": ["i"]}}
    (tmp_path / "set.yaml").write_text(yaml.safe_dump(mapping))
    with pytest.raises(UserError, match=r"set\.yaml: columns names 'i', but the table has"):
        prepare("generic", tmp_path / "set.yaml", tmp_path / "out")


def test_a_column_of_responses_is_kept(tmp_path: Path, said: Callable[..., tuple[int, str]]) -> None:
    """One problem with two responses: both stay, under ids of their own, and the gold is in the response's box."""
    traces = [f"<think>{words}</think><answer>\\boxed{{4}}</answer>" for words in ("two and two", "count")]
    file = json_lines(tmp_path, *({"question": "What is 2 + 2?", "trace": trace} for trace in traces))
    words = (file, "--answer", "trace", "--response", "trace", "--keep-duplicates")
    code, output = said(*words, "--out", tmp_path / "set")
    assert code == 0 and "  > <think>two and two" in output, output
    rows = rows_of(tmp_path / "set")
    assert [json.loads(row["meta"])["response"] for row in rows] == traces
    assert {row["answer"] for row in rows} == {"4"} and len({row["id"] for row in rows}) == 2
    code, output = said(file, "--answer", "trace", "--response", "traces", "--dry-run")
    assert code == 2 and "--response traces: no row has such a column" in output


def test_programs_come_with_their_tests(tmp_path: Path, said: Callable[..., tuple[int, str]]) -> None:
    pairs = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]
    rows = [
        {"prompt": "Double a number.", "tests": json.dumps(pairs)},
        {"prompt": "Double it.", "tests": {"inputs": ["1"], "outputs": ["2"]}},
        {"prompt": "Write double.", "tests": json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "double"})},
        {"prompt": "No tests.", "tests": "[]"},
        {"prompt": "Odd tests.", "tests": "five"},
        {"prompt": "Too few.", "tests": {"inputs": ["1", "2"], "outputs": ["2"]}},
    ]
    json_lines(tmp_path, *rows)
    mapping = tmp_path / "code.yaml"
    tree = {"path": "rows.jsonl", "source": "mine", "columns": {"question": "prompt", "tests": "tests"}}
    mapping.write_text(yaml.safe_dump(tree))
    code, _ = said(mapping, "--out", tmp_path / "set")
    assert code == 0 and manifest_of(tmp_path / "set")["dropped"] == {"bad_tests": 3}
    problems = load_set(tmp_path / "set")
    kept = [CodeTests.of(problem.meta) for problem in problems]
    assert [(tests.function, tests.inputs, tests.outputs) for tests in kept] == [
        *(("", ["1", "2"], ["2", "4"]), ("", ["1"], ["2"]), ("double", [[1]], [2]))
    ]
    assert [problem.answer_type for problem in problems] == ["code"] * 3
    mapping.write_text(yaml.safe_dump({**tree, "columns": {**tree["columns"], "answer": "prompt"}}))
    code, text = said(mapping, "--out", tmp_path / "other")
    assert code == 2 and "leave out answer, box and choices" in text


@pytest.mark.parametrize("box", [[10, 20, 60, 40], "[10, 20, 60, 40]", [[1, 2, 3, 4], [5, 6, 7, 8]]])
def test_boxes_as_answers_ask_for_a_mapping(
    tmp_path: Path, said: Callable[..., tuple[int, str]], box: list[Any] | str
) -> None:
    """Corners or sizes, pixels or fractions: as texts they would be prepared, and never be right."""
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    json_lines(tmp_path, *({"question": f"Where is {n}?", "image": "0.png", "gt_bbox": box} for n in range(3)))
    code, text = said(tmp_path, "--answer", "gt_bbox", "--out", tmp_path / "set")
    assert code == 2 and "the answers in gt_bbox are boxes" in text and "box: gt_bbox}, box_format" in text


def test_numbered_columns_of_images_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """With ten or more of them, <image 2> is the image of the second column."""
    images = {f"{number}.png": encoded(smooth_noise(84, 84, seed=number)) for number in range(1, 12)}
    row = {f"image_{number}": f"{number}.png" for number in range(1, 12)} | {"question": "Which?", "answer": "3"}
    file = json_lines(tmp_path, row)
    for name, data in images.items():
        (file.parent / name).write_bytes(data)
    assert mapped(file)["columns"]["images"] == [f"image_{number}" for number in range(1, 12)]
