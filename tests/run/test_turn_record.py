"""Episodes in a column of text: what readers get back, and what files without the column give."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.episodes import png
from vlm_rl.errors import UserError
from vlm_rl.report.examples import ProblemExample, SampleAnswer, example_html
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.rollout_row import rollout_rows
from vlm_rl.run.turn_record import LARGEST_SIDE, conversation, read_turns, turns_column
from vlm_rl.types import EpisodeStart, Grade, Group, Observation, ObservedTokens, Problem, Reward, Rollout, Turn


def rollout() -> Rollout:
    picture = png(np.random.default_rng(0), 448, 224)
    no_ids = np.zeros(1, np.int32)
    turns = (
        Turn(3, "look", Observation("", (picture,), tool="zoom"), ObservedTokens(no_ids, no_ids, (picture,))),
        Turn(2, "<b>&", Observation("Error: no", error="no", tool="zoom"), ObservedTokens(no_ids, no_ids, ())),
        Turn(1, "5", ending="done"),
    )
    return Rollout("p", 0, np.zeros(6, np.int32), np.zeros(6, np.float32), "5", "stop", 0, turns=turns)


def test_an_episode_comes_back_as_it_was_with_small_pictures() -> None:
    first, second, last = read_turns(turns_column(rollout()))
    assert (first.text, first.num_tokens, first.tool, first.answer, first.error) == ("look", 3, "zoom", "", "")
    (small,) = first.images
    assert Image.open(io.BytesIO(small)).size == (LARGEST_SIDE, LARGEST_SIDE // 2)
    assert first.addresses[0].startswith("data:image/jpeg;base64,")
    assert (second.text, second.answer, second.error, second.images) == ("<b>&", "Error: no", "no", ())
    assert (last.answer, last.images, last.ending) == ("", (), "done")


def test_what_was_shown_first_comes_before_the_turns() -> None:
    """In the column, for readers of plain text, and in a report's and the demo's pages."""
    picture = png(np.random.default_rng(0), 112, 112)
    begun = replace(rollout(), start=EpisodeStart("a <b> board", (picture,), ""))
    start, *turns = stored = read_turns(turns_column(begun))
    assert (start.is_start, start.answer, len(start.images)) == (True, "a <b> board", 1)
    assert [turn.text for turn in turns] == ["look", "<b>&", "5"] and not any(turn.is_start for turn in turns)
    assert conversation(stored).startswith("[the environment: a <b> board, an image]\n\nlook\n\n[zoom: an image]")
    grade = {"extracted": "5", "verdict": "correct", "reason": "equal"}
    sample = SampleAnswer(None, "5", **grade, length=6, truncated=False, num_correct=1, num_samples=1, earlier=())
    texts = []
    for earlier in (stored[:-1], turns[:-1]):
        sample = replace(sample, earlier=tuple(earlier))
        example = ProblemExample("p", "How many?", "5", "", (), (sample,))
        texts.append(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", str(example_html(example, ["after"])))))
    assert "the environment shows first a &lt;b&gt; board turn 1 look zoom answers turn 2" in texts[0]
    assert "shows first" not in texts[1] and "turn 1 look zoom answers turn 2" in texts[1]


def test_a_response_of_one_turn_and_an_older_file_have_none(tmp_path: Path) -> None:
    assert turns_column(replace(rollout(), turns=())) == ""
    assert read_turns("") == read_turns(None) == []
    run = RunDirectory(tmp_path)
    run.write_rollouts(1, 0, rollout_rows([group_of(replace(rollout(), turns=()))], step=1, attempt=0))
    path = tmp_path / "rollouts" / "step-000001.parquet"
    assert run.rollouts(1, ["text", "turns"]).to_pylist() == [{"text": "5", "turns": ""}]
    pq.write_table(pq.read_table(path).drop_columns(["turns"]), path)
    assert run.rollouts(1, ["text", "turns"]).column_names == ["text"]


@pytest.mark.parametrize(
    "column",
    ["5", "{", "[3]", "[[]]", "NaN", '[{"text": 1, "tokens": 2}]', '[{"text": "a", "tokens": -1}]', "[" * 100_000],
)
def test_a_column_that_was_written_by_others_is_named(column: str) -> None:
    with pytest.raises(UserError, match=r"column turns: .*; evaluate again"):
        read_turns(column)


def group_of(rollout: Rollout) -> Group:
    problem = Problem("p", "How many?", (), "5", "integer")
    reward = Reward({"accuracy": 1.0}, Grade("correct", "5", "number", "equal"))
    return Group(problem, (rollout,), (reward,), np.zeros(1))
