"""The numbers of the tab Reasoning, of the map of categories and of the bands: by hand, and paired by problem."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.helpers.example_run import build_run
from vlm_rl.demo.numbers import reasoning
from vlm_rl.demo.numbers.lengths import length_bands
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.problem_table import keep
from vlm_rl.demo.numbers.reasoning import MIN_PROBLEMS, measured_problems, reasoning_at, reasoning_summaries
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels import categories
from vlm_rl.demo.panels.categories import category_map, category_rows
from vlm_rl.demo.panels.lengths import lengths_html
from vlm_rl.demo.panels.page_state import PageState, PageStates
from vlm_rl.demo.panels.problem import problem_panel
from vlm_rl.demo.panels.reasoning import reasoning_panel
from vlm_rl.stats import estimate, score_interval

AFTER = " Wait, 3."  # 9 characters of 14 are behind "So 3."
# (reasoning, verdict) of the two samples of problems 0 and 1 at step 2
SAMPLES = [
    [("So 3." + AFTER, "correct"), ("So 3.", "correct")],  # shares 9/14 and 0
    [("So 3." + AFTER, "wrong"), ("So 4. Actually 5.", "wrong")],  # stated and left; never stated
]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> PageState:
    folder = tmp_path_factory.mktemp("reasoning") / "run"
    run = build_run(folder, steps=2, eval_steps=(0,), num_problems=4)
    template = run.evals()[0].rows().to_pylist()
    for step in (0, 2):
        rows = []
        for index in range(4):
            for sample, (text, verdict) in enumerate(SAMPLES[index % 2]):
                length = 10 * (index + 1) + sample + 100 * (step == 2)
                row = {"problem_id": f"p{index}", "sample_index": sample, "gold": "3", "length": length}
                row["response"] = rf"<think>{text if step else 'It is 9.'}</think>\boxed{{3}}"
                row["verdict"] = verdict if step else ("correct" if index > 1 else "wrong")
                rows.append(template[0] | row | {"category": "" if index == 3 else f"kind {index % 2}"})
        run.write_eval("toy-test", step, rows, {})
    return PageStates(Library([folder])).of(UrlState.parse("base=run@0&others=run@2"))


def test_shares_counts_and_moves_by_hand(state: PageState) -> None:
    base, last = reasoning_summaries(state.table, [0, 1])
    assert len(base.shares) == base.num_left == 0 and math.isnan(base.mean_share)
    assert sorted(last.shares) == pytest.approx([0, 9 / 14])
    assert (last.num_correct, last.num_wrong, last.num_left) == (2, 2, 1)
    assert last.mean_share == pytest.approx(9 / 28)  # problem 0 alone has correct responses that state it
    assert np.isnan(last.share_interval).all() and not last.moves["reflection"].has_interval  # of two problems
    assert last.moves["reflection"].mean == pytest.approx((0.5 + 0.5) / 2)
    assert last.moves["backtracking"].mean == pytest.approx((0 + 0.5) / 2)
    assert last.moves["repetition"].mean == 0


@pytest.mark.parametrize("count", [MIN_PROBLEMS - 1, MIN_PROBLEMS])
def test_an_interval_needs_enough_clusters(tmp_path: Path, count: int) -> None:
    """Two variants of each seed; what they say after the answer differs between seeds."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=(), num_problems=1)
    template = build_run(tmp_path / "rows", steps=2, eval_steps=(0,), num_problems=1).evals()[0].rows().to_pylist()[0]
    rows = [
        template
        | {"problem_id": f"p{i}", "cluster": f"seed {i // 2}", "gold": "3", "verdict": "correct"}
        | {"response": rf"<think>It is 3.{' Wait, I check that.' * (i // 2)}</think>\boxed{{3}}"}
        for i in range(2 * count)
    ]
    run.write_eval("toy-test", 2, rows, {})
    table = PageStates(Library([tmp_path / "run"])).of(UrlState.parse("base=run@2")).table
    (found,) = reasoning_summaries(table, range(2 * count))
    assert len(found.shares) == 2 * count and np.isnan(found.share_interval).all() == (count < MIN_PROBLEMS)
    moves = found.moves["reflection"]
    assert moves.has_interval == (count == MIN_PROBLEMS)
    if moves.has_interval:
        seeds = np.arange(2 * count) // 2
        shares = [reasoning_at(table.checkpoints[0].responses, row).share_after for row in range(2 * count)]
        assert found.share_interval == score_interval(np.array(shares), seeds)
        counts = [reasoning_at(table.checkpoints[0].responses, row).amount("reflection") for row in range(2 * count)]
        assert (
            moves == estimate(counts, clusters=seeds, bounds=(0, math.inf)) != estimate(counts, bounds=(0, math.inf))
        )


@pytest.mark.parametrize("count", [MIN_PROBLEMS - 1, MIN_PROBLEMS])
def test_an_interval_needs_enough_problems(tmp_path: Path, count: int) -> None:
    run = build_run(tmp_path / "run", steps=2, eval_steps=(), num_problems=1)
    template = build_run(tmp_path / "rows", steps=2, eval_steps=(0,), num_problems=1).evals()[0].rows().to_pylist()[0]
    text = r"<think>It is 3. Wait, I check that.</think>\boxed{3}"
    rows = [
        template | {"problem_id": f"p{i}", "gold": "3", "verdict": "correct", "response": text} for i in range(count)
    ]
    run.write_eval("toy-test", 2, rows, {})
    state = PageStates(Library([run.path])).of(UrlState())
    (found,) = reasoning_summaries(state.table, range(count))
    shares = found.shares
    assert len(shares) == count and shares[0] > 0
    enough = count == MIN_PROBLEMS
    assert found.share_interval == score_interval(shares) if enough else np.isnan(found.share_interval).all()
    assert found.moves["reflection"].has_interval == enough
    table, _, rest = reasoning_panel(state).partition("</table>")
    assert table.count("[") == (4 if enough else 0) and f"from {MIN_PROBLEMS} problems on" in rest


def test_a_response_is_measured_once(state: PageState, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = state.table.checkpoints[1].responses
    first = reasoning_at(responses, 0)
    monkeypatch.setattr(reasoning, "measure", None)
    assert reasoning_at(responses, 0) is first


def test_the_measured_problems_are_the_same_each_time_and_bounded(
    state: PageState, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = np.ones(4, dtype=bool)
    assert sorted(measured_problems(state.table, everything)) == [0, 1, 2, 3]
    monkeypatch.setattr(reasoning, "MAX_CHARACTERS", 201)  # each problem has between 100 and 200
    some = measured_problems(state.table, everything).tolist()
    assert 1 < len(some) < 4 and measured_problems(state.table, everything).tolist() == some
    monkeypatch.setattr(reasoning, "MAX_COMPARED", 1)  # the first problem alone needs as many
    assert measured_problems(state.table, everything).tolist() == some[:1]
    kept = np.isin(np.arange(4), some[1:])
    assert measured_problems(state.table, kept).tolist() == some[1:2]  # filters keep the order
    assert "Measured on 1 of 4 problems" in reasoning_panel(state)


def test_the_panels_say_what_was_found(state: PageState) -> None:
    table = reasoning_panel(state)
    assert "of 4 correct" in table and "of 4 wrong" in table and "Said after the right answer" in table
    page = problem_panel(state)
    assert 'data-label="right answer first stated">So 3.</mark>' in page
    assert "after 35.7 % of the reasoning; 64.3 % follows" in page and "reflection 1 ×" in page


def test_categories_are_paired_by_problem(state: PageState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categories, "MIN_PROBLEMS", 1)
    rows = category_rows(state.table, np.ones(4, dtype=bool))
    assert [(row.name, row.num_problems) for row in rows] == [("kind 0", 2), ("", 1), ("kind 1", 1)]
    # kind 0 holds p0 (0 -> 1) and p2 (1 -> 1); both got 100 tokens longer
    assert rows[0].cells[0].score == estimate([1, 0], bounds=(-1, 1))
    assert rows[0].cells[0].tokens.mean == 100 and not rows[1].cells[0].score.has_interval
    assert [row.cells[0].score_shade for row in rows] == [0.5, -1, 0]
    for row, kept in ((rows[0], [True, False, True, False]), (rows[1], [False, False, False, True])):
        assert keep(state.table, UrlState().patched(urlencode(row.patch))).tolist() == kept
    html = category_map(state)
    assert "category=kind+0" in html and ">none<" in html
    assert "<button" not in category_map(state, interactive=False)


def test_cells_of_few_problems_are_grey_and_shade_no_other(state: PageState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categories, "MIN_PROBLEMS", 2)  # of the three categories one has as many
    assert category_rows(state.table, np.ones(4, dtype=bool))[0].cells[0].score_shade == 1
    html = category_map(state)
    assert html.count('few" title="1 problem: too few to compare"') == 4
    assert html.count('title="2 problems, 95 % interval') == 2 and "of 2 cells" in html


def test_a_single_category_has_no_map(tmp_path: Path) -> None:
    build_run(tmp_path / "run", steps=2, eval_steps=(0, 2), num_problems=3)
    alone = PageStates(Library([tmp_path])).of(UrlState())
    assert category_map(alone) == ""


def test_the_bands_are_quantiles_within_each_class(state: PageState) -> None:
    never, always = length_bands(state.table, 1, np.ones(4, dtype=bool))
    assert (never.difficulty, never.rate, always.difficulty, always.rate) == ("never", 0, "always", 1)
    assert (never.lengths.p25, never.lengths.median, never.lengths.p75) == tuple(
        np.quantile([110, 111, 120, 121], [0.25, 0.5, 0.75])
    )
    page = lengths_html(state)
    assert "Length by difficulty before training" in page and "difficulty=never" in page
