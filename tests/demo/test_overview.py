"""The demo's first tab: who reasons longer, does it pay, and a visitor's regular expression."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.demo.test_parts import RIGHT, WRONG, Elements, rows_of
from tests.helpers.example_run import build_run
from vlm_rl.demo.numbers import patterns
from vlm_rl.demo.numbers.cut_accuracy import cut_limits, cut_responses, gain_of_length
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.pairs import compare, comparisons, telling_problems
from vlm_rl.demo.numbers.patterns import count_pattern
from vlm_rl.demo.numbers.problem_table import pair_of
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.overview import length_words, overview_html, overview_panel, pay_words, score_words
from vlm_rl.demo.panels.page_state import PageState, PageStates
from vlm_rl.demo.panels.reasoning import reasoning_html
from vlm_rl.demo.panels.summary_cards import count_html
from vlm_rl.report.charts.lines import FEW as FEW_PLACES
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.charts.points import Points
from vlm_rl.report.charts.ridges import FEW, Ridge, ridges
from vlm_rl.report.charts.shares import Quantiles, quantile_bars
from vlm_rl.report.charts.versus import versus
from vlm_rl.sandbox.limited import LimitedWorker
from vlm_rl.stats import estimate


def opened(folder: Path, *evaluations: list[dict], query: str = "") -> PageState:
    """Return the page of one run with these evaluations, at steps 0, 1 and so on."""
    run = build_run(folder / "run", steps=max(1, len(evaluations)), eval_steps=())
    for step, rows in enumerate(evaluations):
        run.write_eval("set", step, rows, {"template": "think_answer"})
    others = "&".join(f"others=run@{step}" for step in range(1, len(evaluations)))
    return PageStates(Library([run.path])).of(UrlState.parse(f"base=run@0&{others}&{query}"))


FOUR = (
    rows_of([10, 20, 30, 40], [WRONG, RIGHT, RIGHT, WRONG]),
    rows_of([15, 20, 20, 80], [RIGHT, WRONG, RIGHT, WRONG]),
)


def test_a_comparison_by_hand(tmp_path):
    state = opened(tmp_path, *FOUR)
    [found] = comparisons(state.table, state.keep_P)
    assert (found.index, found.against, found.won, found.lost) == (1, 0, 1, 1)
    assert found.tokens.mean == (5 + 0 - 10 + 40) / 4 and found.score.mean == 0
    assert found.per_right == (100 / 2, 135 / 2)  # all tokens over right answers, before and after
    none = opened(tmp_path / "none", rows_of([3], [WRONG]), rows_of([4], [WRONG]))
    assert all(math.isnan(value) for value in compare(none.table, none.keep_P, 1, 0).per_right)
    page = Elements(overview_html(none)).text
    assert "no right answer against no right answer" in page and "Too few problems to say more." in page


def test_every_pair_gets_a_sentence_and_the_clearest_change_is_first(tmp_path):
    lengths = ([10, 20, 30], [11, 21, 31], [90, 95, 99])
    state = opened(tmp_path, *(rows_of(of_step, [RIGHT] * 3) for of_step in lengths))
    assert pair_of(state.table, state.url) == 2
    assert pair_of(state.table, UrlState.parse("pair=run@1")) == 1
    text = " ".join(Elements(overview_panel(state)).text.split())
    first, second = text.find("step 2 reasons longer than step 0"), text.find("step 1 reasons longer than step 0")
    assert 0 <= first < second and text.count("Tokens per right answer") == 2
    patches = Elements(overview_panel(state)).values("data-go")
    assert "pair=run%401" in patches and "data-go" not in overview_html(state, interactive=False)


@pytest.mark.parametrize(
    ("tokens", "score", "words"),
    [
        ([5.0, 6, 7], [1.0] * 9, ("reasons longer", "is more often right", "The extra length pays.")),
        ([5.0, 6, 7], [-1.0] * 9, ("reasons longer", "is less often right", "The extra length does not pay.")),
        ([-5.0, -6, -7], [-1.0] * 9, ("reasons shorter", "is less often right", "costs right answers")),
        ([-5.0, -6, -7], [1.0] * 9, ("reasons shorter", "is more often right", "Shorter, and better.")),
        ([5.0, 6, 7], [1.0, -1, 0], ("reasons longer", "is not clearly", "The extra length shows no gain.")),
        ([-5.0, -6, -7], [1.0, -1, 0], ("reasons shorter", "is not clearly", "Shorter, without a clear loss.")),
        ([5.0, -6, 7], [1.0] * 9, ("reasons about as long", "is more often right", "")),
        ([0.0, 0, 0], [0.0] * 9, ("reasons exactly as long", "is not clearly", "")),
        ([5.0], [1.0], ("reasons about as long", "is not clearly", "Too few problems")),
    ],
)
def test_the_words_of_a_change(tokens, score, words):
    length, right = estimate(tokens), estimate(score, bounds=(-1, 1))
    found = length_words(length), score_words(right), pay_words(length, right)
    assert all(wanted in said for wanted, said in zip(words, found, strict=True)), found
    assert bool(found[2]) == bool(words[2])


# -- cut at T tokens ---------------------------------------------------------------------------------


def test_a_response_that_is_cut_is_right_once_it_has_stated_the_answer(tmp_path):
    """The first response states 7 half-way through its characters, the second at its end, the third is wrong."""
    half = "The answer is 7. " + "x" * 17
    assert half.index("7.") + 2 == 16
    texts = [half, "x" * 16 + " The answer is 7.", "The answer is 7. Or 8, so \\boxed{8}"]
    rows = rows_of([34, 100, 50], [RIGHT, RIGHT, WRONG], response=texts)
    state = opened(tmp_path, rows, rows)
    cut = cut_responses(state.table, 0, np.arange(3))
    assert cut.stated_R[0] == pytest.approx(34 * 16 / len(half))
    assert cut.score_P(15).tolist()[0] == 0 and cut.score_P(17).tolist()[0] == 1
    assert cut.score_P(99).tolist() == [1, 0, 0]  # the third is whole: its verdict counts, not what it once stated
    assert cut.score_P(49).tolist()[2] == 1  # cut before it changed its mind
    assert cut.score_P(100).tolist() == [1, 1, 0] == cut.score_P(math.inf).tolist()


def test_the_last_turn_of_an_episode_begins_after_the_others(tmp_path):
    """Of 100 tokens the first turn has 60. The answer is stated at the end of the last one's first half."""
    last = "The answer is 7. " + "x" * 17
    turns = [{"text": "look", "tokens": 60}, {"text": last, "tokens": 40, "ending": "done"}]
    after = rows_of([100], [RIGHT], response=[last], turns=[json.dumps(turns)])
    state = opened(tmp_path, rows_of([100], [RIGHT], response=[last]), after, query="pattern=x")
    plain, episode = (cut_responses(state.table, index, [0]) for index in (0, 1))
    assert plain.stated_R[0] == pytest.approx(100 * 16 / len(last))
    assert episode.stated_R[0] == pytest.approx(60 + 40 * 16 / len(last))
    for page in (overview_html(state), reasoning_html(state)):  # the cut and the expression; moves and phrases
        assert Elements(page).text.count("Of an episode the last turn is read.") >= 2
    assert "episode" not in Elements(overview_html(opened(tmp_path / "plain", *FOUR))).text


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12))
def test_curves_end_at_the_accuracy(values):
    from vlm_rl.demo.numbers.cut_accuracy import CutResponses

    length = np.array([tokens for tokens, _ in values])
    correct = np.array([is_right for _, is_right in values])
    stated = np.where(np.arange(len(values)) % 2, length / 2, math.inf)
    cut = CutResponses(np.arange(len(values)), length, stated, correct, len(values))
    limits = cut_limits([length])
    assert limits[0] == 0 and limits[-1] >= length.max() and (np.diff(limits) > 0).all()
    assert cut.score_P(limits[-1]).tolist() == correct.tolist() and not cut.score_P(0).any()


def test_what_the_longer_one_gains(tmp_path):
    late = "x" * 80 + " The answer is 7."
    before = rows_of([10, 10], [RIGHT, WRONG])
    after = rows_of([100, 100], [RIGHT, RIGHT], response=[late, late])
    state = opened(tmp_path, before, after)
    gain = gain_of_length(state.table, np.arange(2), 1, 0)
    assert gain is not None and (gain.longer, gain.shorter, gain.limit) == (1, 0, 10)
    assert gain.cut == (0, 0.5) and gain.whole == (1, 0.5) and gain.gain.mean == 1
    assert gain_of_length(state.table, np.array([], dtype=int), 1, 0) is None
    text = " ".join(Elements(overview_html(state)).text.split())
    assert "Cut at 10 tokens, the mean length of step 0, step 1 would be right on 0 % and step 0 on 50 %" in text


# -- single problems and the box ------------------------------------------------------------------------


def test_problems_that_tell(tmp_path):
    state = opened(tmp_path, *FOUR)
    assert telling_problems(state.table, state.keep_P, 1, 0) == [0, 3, 2]  # won and grew, grew, shrank and right
    text = Elements(overview_html(state)).text
    for title in ("Longer, and became right", "Longer, and wrong in both", "Shorter, and right in both"):
        assert title in text
    only = np.array([True, False, False, False])
    assert telling_problems(state.table, only, 1, 0) == [0]


def test_a_box_keeps_the_problems_in_it(tmp_path):
    state = opened(tmp_path, *FOUR, query="box=0,20,0,20&pair=run@1")
    assert [state.table.ids[p] for p in state.order] == ["p0", "p1"]  # (10, 15) and (20, 20); ends are included
    said = Elements(count_html(state)).text
    assert "0 to 20 tokens at step 0 and 0 to 20 at step 1" in said and "chosen by their lengths" in said
    assert UrlState.parse("box=1,2,3").box == UrlState.parse("box=1,2,3,-4").box == "" and UrlState().ranges is None
    alone = opened(tmp_path / "alone", FOUR[0], query="box=0,1,0,1")
    assert len(alone.order) == 4  # there is no pair


# -- the visitor's expression -----------------------------------------------------------------------------


def test_an_expression_is_counted_by_checkpoint(tmp_path):
    texts = ["wait, wait", "no", "Wait", ""]
    rows = [rows_of([1] * 4, [RIGHT] * 4, response=texts), rows_of([1] * 4, [RIGHT] * 4, response=["wait"] * 4)]
    state = opened(tmp_path, *rows, query=r"pattern=\bwait\b")
    counted = count_pattern(state.table, state.keep_P, state.url.pattern)
    first, second = counted.uses
    assert (first.share, first.per_response, counted.num_problems) == (0.25, 0.5, 4)
    assert (second.share, second.per_response, second.change.mean) == (1, 1, 0.75)
    either = count_pattern(state.table, state.keep_P, r"(?i)\bwait\b|x*")  # an empty match is none
    assert either.uses[0].share == 0.5
    assert "+75.0" in Elements(overview_panel(state)).text
    assert count_pattern(state.table, np.zeros(4, dtype=bool), "x").fault


def test_a_problem_with_more_samples_counts_once(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    texts = ["a", "b", "a", "a"]
    run.write_eval("set", 0, rows_of([1] * 4, [RIGHT] * 4, samples=2, response=texts), {})
    state = PageStates(Library([run.path])).of(UrlState())
    [use] = count_pattern(state.table, state.keep_P, "a").uses
    assert use.share == 0.75


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "[", "(?P<x>a)(?P<x>b)", "*"])
def test_what_is_no_expression_says_why(tmp_path, pattern):
    state = opened(tmp_path, *FOUR)
    assert "no regular expression" in count_pattern(state.table, state.keep_P, pattern).fault


def test_an_expression_without_an_end_is_stopped_and_not_tried_again(tmp_path, monkeypatch):
    pattern = r"(x+)+y"
    rows = rows_of([1], [RIGHT], response=["x" * 60])
    state = opened(tmp_path, rows, rows)
    patterns._refused.clear()
    worker = LimitedWorker("vlm_rl.demo.numbers.pattern_worker.count", cpu_seconds=0.3, memory=256 << 20)
    monkeypatch.setattr(patterns, "_worker", worker)
    assert "it was stopped" in count_pattern(state.table, state.keep_P, pattern).fault
    assert count_pattern(state.table, state.keep_P, "x+").uses[0].share == 1  # the next one is counted
    monkeypatch.setattr(patterns, "_worker", None)
    assert "it was stopped" in count_pattern(state.table, state.keep_P, pattern).fault


# -- charts ---------------------------------------------------------------------------------------------------


def test_few_lengths_are_points_and_many_a_curve():
    few, many = Ridge("few", np.arange(FEW - 1)), Ridge("many", np.arange(float(FEW)))
    spec = ridges([few, many, Ridge("equal", np.full(50, 3)), Ridge("none", np.array([]))])
    assert spec is not None
    kinds = {
        name: [row["kind"] for row in spec["datasets"]["rows"] if row["series"] == name] for name in ("few", "many")
    }
    assert kinds["few"] == ["name"] + ["point"] * (FEW - 1)
    assert kinds["many"].count("curve") > 50 and kinds["many"].count("median") == 1 and "point" not in kinds["many"]
    assert {row["kind"] for row in spec["datasets"]["rows"] if row["series"] == "equal"} == {"name", "point"}
    assert ridges([Ridge("none", np.array([]))]) is None


@given(st.lists(st.tuples(st.floats(0, 5e3), st.floats(0, 5e3)), min_size=1, max_size=8))
def test_both_axes_have_one_scale_that_holds_every_point(places):
    x, y = (np.array(column) for column in zip(*places, strict=True))
    spec = versus([Points("a", x, y)], x_title="A", y_title="B", shapes=["circle"], brush="box=")
    assert spec is not None
    scales = [layer["encoding"][axis]["scale"]["domain"] for layer in spec["layer"] for axis in "xy"]
    assert all(scale == scales[0] for scale in scales)
    assert scales[0][0] < min(*x, *y) and max(*x, *y) < scales[0][1] and spec["usermeta"]["brush"] == "box="
    still = versus([Points("a", x, y)], x_title="A", y_title="B", shapes=["circle"])
    assert still is not None and "params" not in still["layer"][1]
    assert versus([Points("a", x[:0], y[:0])], x_title="A", y_title="B", shapes=["circle"]) is None


def test_few_measured_places_have_bars_and_many_a_band():
    def kinds(num: int) -> set[str]:
        x = np.arange(float(num))
        spec = lines([Series("a", x, x, low=x - 1, high=x + 1)])
        assert spec is not None
        shown = {row["points"] for row in spec["datasets"]["rows"]}
        assert len(shown) == 1
        return {layer["mark"]["type"] for layer in spec["layer"]} & {"area", "rule"}

    assert kinds(FEW_PLACES - 1) == {"rule"} and kinds(FEW_PLACES) == {"area"}


def test_few_values_are_points_of_a_row_of_quantiles():
    rows = [Quantiles("few", 1, 2, 3, 4, 5, points=(1.0, 5.0)), Quantiles("many", 1, 2, 3, 4, 5)]
    spec = quantile_bars(rows, x_title="%")
    assert spec is not None
    found = [(row["series"], row["median"], "p10" in row) for row in spec["datasets"]["rows"]]
    assert found == [("few", 1.0, False), ("few", 5.0, False), ("many", 3, True)]


def test_the_best_checkpoint_is_offered_and_named(tmp_path):
    run = build_run(tmp_path / "run", steps=4, eval_steps=())
    for step, right in ((0, 1), (2, 4), (3, 4), (4, 2)):
        verdicts = [RIGHT] * right + [WRONG] * (4 - right)
        run.write_eval("set", step, rows_of([10] * 4, verdicts), {"accuracy": right / 4})
    library = Library([run.path])
    assert library.best("set") == {("run",): "run@2"}  # the earliest of equals
    assert library.first_choice("set") == ("run@0", "run@2", "run@4")
    assert library.labels("set") == {
        "run@0": "step 0", "run@2": "step 2 · best", "run@3": "step 3", "run@4": "step 4"
    }  # fmt: skip
    text = " ".join(Elements(overview_html(PageStates(library).of(UrlState()))).text.split())
    assert "run, set: best 100.0% at step 2; the last, step 4, is 50.0 points lower" in text
    assert "(0 won, 2 lost)" in text


@pytest.mark.parametrize("summaries", [({}, {}), ({"accuracy": "high"}, {"accuracy": None})])
def test_without_a_stored_accuracy_none_is_the_best(tmp_path, summaries):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    for step, summary in enumerate(summaries):
        run.write_eval("set", step, rows_of([1], [RIGHT]), summary)
    library = Library([run.path])
    assert library.best("set") == {} and library.first_choice("set") == ("run@0", "run@1")
    assert "best" not in overview_html(PageStates(library).of(UrlState()))


def test_with_many_runs_the_last_ones_come_before_the_best(tmp_path):
    for name in "abcd":
        run = build_run(tmp_path / name, steps=2, eval_steps=())
        for step, verdict in ((0, WRONG), (1, RIGHT), (2, WRONG)):
            run.write_eval("set", step, rows_of([1], [verdict]), {"accuracy": float(verdict == RIGHT)})
    assert Library([tmp_path]).first_choice("set") == ("a@0", "a@2", "b@2", "c@2")
    two = Library([tmp_path / "a", tmp_path / "b"])
    assert two.first_choice("set") == ("a@0", "a@2", "b@2")
