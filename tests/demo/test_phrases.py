"""Phrases of reasoning: counted as whole words, and compared problem by problem."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.example_run import build_run
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.phrases import MAX_SHOWN, PHRASES, phrase_uses
from vlm_rl.demo.numbers.problem_table import build_table
from vlm_rl.demo.numbers.responses import Responses
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.page_state import PageStates
from vlm_rl.demo.panels.reasoning import reasoning_html
from vlm_rl.stats import estimate

CHECKS = "<think>Wait, let me CHECK: two. Actually (wait) three.</think>3"
NONE = "<think>The waiter has hmmm and an assumed mistaken therefores.</think>3"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("phrases")
    for name, response in (("a", NONE), ("b", CHECKS), ("c", None)):
        build_run(folder / name, steps=2, eval_steps=(2,), response=response)
    return Library([folder])


def test_a_phrase_is_found_as_whole_words_in_any_case(library: Library) -> None:
    """Against Python's regular expressions, over responses of words alone and of parts of words."""
    keys = [f"{name}@2" for name in "abc"]
    for checkpoint in build_table(library, "toy-test", keys).checkpoints:
        texts = checkpoint.responses.texts["response"].to_pylist()
        expected = [[bool(re.search(rf"\b{re.escape(p)}\b", text.lower())) for p in PHRASES] for text in texts]
        assert checkpoint.responses.says_R(PHRASES).tolist() == expected


def test_the_change_is_paired_by_problem(library: Library) -> None:
    table = build_table(library, "toy-test", ["a@2", "b@2", "c@2"])
    kept = np.arange(table.num_problems) % 2 == 0
    names = np.array(table.ids)[kept].tolist()
    uses = phrase_uses(table, kept)
    assert [use[0].phrase for use in uses[:3]] == ["wait", "actually", "let me check"] and len(uses) <= MAX_SHOWN
    for of_phrase in uses:
        assert [use.checkpoint for use in of_phrase] == [1, 2]
        for use in of_phrase:
            sides = [table.checkpoints[i].responses for i in (0, use.checkpoint)]
            said = [_shares(side, use.phrase, names) for side in sides]
            expected = estimate(np.subtract(said[1], said[0]), bounds=(-1, 1))
            assert (use.change.mean, use.change.low) == pytest.approx((expected.mean, expected.low), nan_ok=True)
            assert use.num == sum(len(sides[1].row_of[name]) for name in names)


def test_the_change_is_over_clusters(library: Library) -> None:
    table = build_table(library, "toy-test", ["a@2", "b@2"])
    kept = np.ones(table.num_problems, dtype=bool)
    pairs = replace(table, cluster_P=np.arange(table.num_problems) // 2)
    uses = phrase_uses(pairs, kept)
    assert len(uses) > 1
    for (found,), (alone,) in zip(uses, phrase_uses(table, kept), strict=True):
        said = [_shares(checkpoint.responses, found.phrase, table.ids) for checkpoint in table.checkpoints]
        change = np.subtract(said[1], said[0])
        assert found.change == estimate(change, clusters=pairs.cluster_P, bounds=(-1, 1)) != alone.change


def _shares(responses: Responses, phrase: str, names: list[str]) -> list[float]:
    texts = responses.texts["response"].to_pylist()
    says = [bool(re.search(rf"\b{phrase}\b", text, re.IGNORECASE)) for text in texts]
    return [float(np.mean([says[row] for row in responses.row_of[name]])) for name in names]


def test_the_chart_leads_to_the_responses(library: Library, tmp_path: Path) -> None:
    state = PageStates(library).of(UrlState.parse("base=a@2&others=b@2&tab=reasoning"))
    page = reasoning_html(state)
    assert "Phrases of reasoning, against the baseline" in page
    assert "text=let+me+check" in page and "focus=b%402" in page
