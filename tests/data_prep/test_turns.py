"""The turns of a conversation: which make a problem, which drop it by name, and which are left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.own_data import IMAGES
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl import cli

IMAGE = {"type": "image_url", "image_url": {"url": "0.png"}}
TEXT = {"type": "text", "text": "How"}
FINE = [("user", "What is 2 + 2?"), ("assistant", "4")]


def prepared(tmp_path: Path, *conversations: list[tuple[str, Any]], **more: str) -> list[dict]:
    """Return the prepared rows of conversations, after one that is sound."""
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    keys = ("role", "content")
    rows = [
        {"messages": [dict(zip(keys, turn, strict=True)) for turn in turns], **more}
        for turns in (FINE, *conversations)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "set")]) == 0
    return rows_of(tmp_path / "set")[1:]


@pytest.mark.parametrize(
    ("turns", "question"),
    [
        ([("user", "How many?"), ("user", [IMAGE]), ("assistant", "3")], "How many?\n<image>"),
        ([("user", [IMAGE]), ("user", "How many?"), ("assistant", "3")], "<image>\nHow many?"),
        ([("human", "Look."), ("human", "How many?"), ("gpt", "3")], "Look.\nHow many?"),
        (
            [("user", [IMAGE]), ("user", [TEXT, {"type": "text", "text": "many?"}]), ("assistant", "3")],
            "<image>\nHow\nmany?",
        ),
    ],
)
def test_turns_of_the_user_in_a_row_are_one_question(turns: list, question: str, tmp_path: Path) -> None:
    (row,) = prepared(tmp_path, turns)
    assert (row["question"], row["answer"], len(row["images"])) == (question, "3", question.count("<image>"))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("user", "a?"), ("assistant", "1"), ("user", "b?"), ("assistant", "2")], "several_turns"),
        ([("user", "a?"), ("assistant", "1"), ("user", "b?")], "several_turns"),
        ([("assistant", "Hello"), ("user", "a?")], "several_turns"),
        ([("assistant", "Hello"), ("user", "a?"), ("assistant", "1")], "several_turns"),
        ([("user", "a?"), ("assistant", "1"), ("assistant", "2")], "several_turns"),
        ([("user", "a?"), ("tool", "5"), ("assistant", "1")], "other_turns"),
        ([("human", "a?"), ("function_call", "f"), ("observation", "5"), ("gpt", "1")], "other_turns"),
        ([("user", "a?")], "turn_missing"),
        ([("system", "s")], "turn_missing"),
    ],
)
def test_what_is_no_question_with_its_answer_is_dropped_by_name(turns: list, reason: str, tmp_path: Path) -> None:
    assert prepared(tmp_path, turns) == []
    assert manifest_of(tmp_path / "set")["dropped"] == {reason: 1}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("text", ["Count in dozens.", [{"type": "text", "text": "Count in dozens."}]])
def test_system_text_is_kept_counted_and_said(
    role: str, text: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = prepared(tmp_path, [(role, text), ("user", "How many?"), ("assistant", "1/4")])
    assert row["question"] == "How many?" and json.loads(row["meta"]) == {"system": "Count in dozens."}
    assert manifest_of(tmp_path / "set")["notes"] == {"system": 1}
    assert "1 rows have a system or developer text, which a prompt holds" in capsys.readouterr().out


def test_system_texts_are_joined_and_an_empty_one_is_none(tmp_path: Path) -> None:
    turns = [("system", " "), ("developer", "Count."), ("user", "How many?"), ("assistant", "3")]
    (row,) = prepared(tmp_path, turns, system="Be brief.")
    assert json.loads(row["meta"]) == {"system": "Count.\n\nBe brief."}
    (tmp_path / "other").mkdir()
    prepared(tmp_path / "other", [("system", " "), ("user", "How many?"), ("assistant", "3")], system="")
    assert manifest_of(tmp_path / "other/set")["notes"] == {}
