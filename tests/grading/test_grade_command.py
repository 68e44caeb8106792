"""`vlm-rl grade` on files: fields and order are kept, and a bad line is one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_rl import cli


def test_a_file_keeps_its_fields_and_order(tmp_path: Path) -> None:
    rows = [
        {"id": "b", "gold": ["0.01", "0.02"], "response": r"\boxed{0.02}", "note": {"kept": [1]}},
        {"gold": 27.0, "response": r"\boxed{27}"},
        {"id": 3, "gold": "B", "response": r"\boxed{6 cm}", "choices": ["4 cm", "5 cm", "6 cm"]},
        {"gold": 2.0944, "response": r"\boxed{2.095}", "tolerance": 0.001},
        {"gold": "x", "response": "\ud800 nothing"},
        {"gold": "6 cm", "response": r"\boxed{C}", "choices": ["4 cm", "5 cm", "6 cm"]},  # choices make it a choice
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert cli.main(["grade", "--file", str(source), "--out", str(out)]) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["verdict"] for row in graded] == ["correct", "correct", "wrong", "correct", "no_answer", "correct"]
    added = {"verdict", "extracted", "path", "reason"}
    assert [{key: value for key, value in row.items() if key not in added} for row in graded] == rows
    assert all(row.keys() >= added for row in graded)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON"]),
        ("[1]", ["[1]", "object"]),
        ('{"gold": "1"}', ["'response'"]),
        ('{"response": "1"}', ["'gold'"]),
        ('{"gold": "1", "response": 5}', ["response is 5"]),
        ('{"gold": null, "response": "5"}', ["gold", "None"]),
        ('{"gold": [], "response": "5"}', ["gold is []"]),
        ('{"gold": " ", "response": "5"}', ["gold is empty"]),
        ('{"gold": "1", "response": "5", "answer_type": "maths"}', ["'maths'", "expression"]),
        ('{"gold": "1", "response": "5", "tolerance": "x"}', ["tolerance is 'x'"]),
        ('{"gold": "1", "response": "5", "tolerance": -1}', ["tolerance is -1"]),
        ('{"gold": "1", "response": "5", "choices": "AB"}', ["choices is 'AB'"]),
        ('{"gold": "1", "response": "5", "question": 7}', ["question is 7"]),
        (b'{"gold": "1", "response": "\\udcff"}'.decode("unicode_escape"), ["UTF-8"]),
    ],
)
def test_a_bad_line_is_one_message_with_its_number(tmp_path: Path, capsys, line: str, words: list[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"gold": "1", "response": r"\boxed{1}"})
    source.write_bytes(f"{good}\n\n{line}\n".encode(errors="surrogateescape"))
    assert cli.main(["grade", "--file", str(source), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"{source} line 3: " in message
    assert all(word in message for word in words), message
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--gold", "1"], ["--file", "x"], ["--out", "x"], ["--file", "x", "--out", "y", "--gold", "1"]],
)
def test_half_a_question_is_refused(capsys, arguments: list[str]) -> None:
    assert cli.main(["grade", *arguments]) == 2
    assert capsys.readouterr().err.startswith("vlm-rl: ")
