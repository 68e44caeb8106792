"""The demo's arithmetic and text, without gradio and without a browser."""

from __future__ import annotations

import csv
import io
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.helpers.example_run import build_run
from tests.helpers.hostile import HOSTILE
from vlm_rl.demo import lengths as stats
from vlm_rl.demo.export import csv_bytes, export, samples
from vlm_rl.demo.length_charts import lengths_html
from vlm_rl.demo.library import Library, find_runs
from vlm_rl.demo.live_context import Around, asked_slots
from vlm_rl.demo.mathtext import math_html, value_html
from vlm_rl.demo.page_state import Scenes, choose_slots
from vlm_rl.demo.panels import lengths_panel, problem_panel, take_html
from vlm_rl.demo.pictures import images_of
from vlm_rl.demo.record import record
from vlm_rl.demo.recorded import RECORDED, default_folders
from vlm_rl.demo.summary import count_html, filter_words, judgement, summary_html
from vlm_rl.demo.svg import Frame, ticks
from vlm_rl.demo.table import keep, ordered, settle
from vlm_rl.demo.tokens import TokenCounter
from vlm_rl.demo.training import training_html
from vlm_rl.demo.url_state import FILTERS, UNFILTERED, View
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.stats import estimate


def rows_of(lengths: list[int], verdicts: list[str], *, samples: int = 1, **changes) -> list[dict]:
    """One record per response: problem p0 has the first `samples` of them, and so on."""
    return [
        {
            "problem_id": f"p{index // samples}",
            "sample_index": index % samples,
            "prompt_text": "",
            "response": rf"<think>word{index} of it</think><answer>\boxed{{{index}}}</answer>",
            "length": length,
            "stop_reason": "stop",
            "extracted": str(index),
            "gold": "7",
            "verdict": verdict,
            "path": "number",
            "reason": "",
            "has_box": True,
            "category": "even" if index // samples % 2 == 0 else "odd",
            "image_sha256": [],
            "image_sizes": [],
            "image": None,
            "question": f"question {index // samples}",
        }
        | {key: value[index] for key, value in changes.items()}
        for index, (length, verdict) in enumerate(zip(lengths, verdicts, strict=True))
    ]


RIGHT, WRONG = "correct", "wrong"


@pytest.fixture
def small(tmp_path) -> Scenes:
    """Two checkpoints, four problems: p0 becomes right, p1 wrong, p2 stays right, p3 stays wrong."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=())
    summary = {"template": "think_answer"}
    run.write_eval("set", 0, rows_of([10, 20, 30, 40], [WRONG, RIGHT, RIGHT, WRONG]), summary)
    after = rows_of(
        [15, 20, 20, 80], [RIGHT, WRONG, RIGHT, "timeout"], stop_reason=["stop", "stop", "stop", "length"]
    )
    run.write_eval("set", 2, after, summary)
    return Scenes(Library([run.path]))


def kept(scenes: Scenes, query: str) -> list[str]:
    scene = scenes.of(View.parse(query))
    return [scene.table.ids[p] for p in scene.order]


# -- the view and the address --------------------------------------------------------------------


def test_an_address_is_the_view_and_back():
    view = View(
        benchmark="a b",
        base="x/y@0",
        others=("x/y@4", "ä&=@1"),
        low=0,
        high=12,
        text="50 % + ?",
        flags=("cut",),
        fold=1,
    )
    assert View.parse("?" + view.query()) == view and View.parse("") == View() and View().query() == ""
    assert view.patched(UNFILTERED) == replace(view, low=None, high=None, text="", flags=())
    assert set(FILTERS) <= set(View.__slots__)


@given(st.text(max_size=60))
def test_no_address_breaks_the_page(query):
    view = View.parse(query)
    assert View.parse(view.query()) == view


def test_nonsense_in_the_address_counts_for_nothing():
    assert View.parse(
        "low=-3&high=1e9&step=x&tab=evil&change=DROP&flags=cut&flags=evil&sample=9999999999999"
    ) == View(flags=("cut",))
    assert len(View.parse("text=" + "x" * 5000).text) == 200


def test_a_link_to_what_is_gone_says_so(small):
    view, lost = settle(View.parse("benchmark=other&base=run@0&others=run@9"), small.library)
    assert view.keys == ("run@0",) and view.benchmark == "set" and "no benchmark other" in lost[0]
    view, lost = settle(View.parse("base=run@7&others=run@2"), small.library)
    assert view.keys == ("run@2",) and lost == ["there is no checkpoint run@7 on set here"]
    assert settle(View(), small.library)[0].keys == ("run@0", "run@2")


# -- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", ["p0", "p1", "p2", "p3"]),
        ("change=right", ["p0"]),
        ("change=wrong", ["p1"]),
        ("change=changed", ["p0", "p1"]),
        ("change=both_right", ["p2"]),
        ("change=both_wrong", ["p3"]),
        ("flags=cut", ["p3"]),
        ("flags=timeout&flags=cut", ["p3"]),
        ("flags=timeout&focus=run@0", []),
        ("flags=format", []),
        ("category=odd", ["p1", "p3"]),
        ("difficulty=always", ["p1", "p2"]),  # right at step 0
        ("low=30", ["p2", "p3"]),
        ("low=30&focus=run@2", ["p3"]),
        ("low=16&high=20", ["p1", "p2"]),  # p2 has 20 tokens at step 2
        ("verdict=wrong&focus=run@0", ["p0", "p3"]),
        ("verdict=correct&low=40", []),  # both on the same response
        ("text=WORD1", ["p1"]),
        ("text=question+2", ["p2"]),
        ("text=.*", []),  # text, not a pattern
        ("sort=growth", ["p3", "p0", "p1", "p2"]),
        ("sort=shrink", ["p2", "p1", "p0", "p3"]),
        ("sort=longest", ["p3", "p2", "p1", "p0"]),
        ("sort=hardest", ["p0", "p3", "p1", "p2"]),
    ],
)
def test_filters(small, query, ids):
    assert kept(small, query) == ids


def test_a_format_fault_is_what_the_template_forbids(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    texts = [r"<think>a</think><answer>\boxed{1}</answer>", r"\boxed{1}", "<think>never closed"]
    run.write_eval("set", 0, rows_of([1, 2, 3], [RIGHT] * 3, response=texts), {"template": "think_answer"})
    assert kept(Scenes(Library([run.path])), "flags=format") == ["p1", "p2"]


def test_only_shared_problems_are_compared(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    rows = rows_of([1, 2, 3], [RIGHT, WRONG, WRONG])
    run.write_eval("set", 0, rows, {})
    run.write_eval("set", 1, rows[:0:-1], {})  # the last two, backwards
    scene = Scenes(Library([run.path])).of(View())
    assert scene.table.ids == ["p1", "p2"] and scene.table.length_CP.tolist() == [[2, 3], [2, 3]]


# -- numbers -------------------------------------------------------------------------------------


def test_the_summary_by_hand(small):
    before, after = small.of(View()).summaries
    assert (before.accuracy, before.median, before.mean, before.cut) == (0.5, 25, 25, 0)
    assert before.p90 == pytest.approx(37)  # 0.9 of the way along 10, 20, 30, 40: between the last two
    assert (after.accuracy, after.median, after.cut) == (0.5, 20, 0.25)
    assert after.tokens.mean == pytest.approx((5 + 0 - 10 + 40) / 4) and (after.won, after.lost) == (1, 1)
    alone = small.of(View.parse("change=right")).summaries[1]
    assert (alone.won, alone.lost) == (1, 0)
    assert alone.num_problems == 1 and alone.tokens.mean == 5 and not alone.tokens.has_interval
    nothing = small.of(View.parse("text=nowhere")).summaries[1]
    assert nothing.num_problems == 0 and math.isnan(nothing.accuracy)


def test_several_samples_count_by_problem(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    run.write_eval("set", 0, rows_of([10, 20, 30, 50], [RIGHT, WRONG, WRONG, WRONG], samples=2), {})
    run.write_eval("set", 1, rows_of([10, 40, 30, 50], [RIGHT, RIGHT, RIGHT, WRONG], samples=2), {})
    scene = Scenes(Library([run.path])).of(View())
    assert scene.table.score_CP.tolist() == [[0.5, 0], [1, 0.5]] and scene.table.length_CP[1].tolist() == [25, 40]
    assert scene.table.difficulty_P.tolist() == ["sometimes", "never"]
    assert keep(scene.table, View.parse("change=right")).tolist() == [True, True]
    page = problem_panel(Scenes(scene.library).of(View.parse("sample=1")))
    assert "2 of 2 right" in page and "1 of 2 right" in page and "right more often" in page


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.lists(st.integers(1, 400), min_size=1, max_size=9))
def test_distributions_hold_every_response_once(first, second):
    arrays = [np.array(first), np.array(second)]
    edges = stats.bin_edges(arrays)
    assert len(np.unique(np.diff(edges))) == 1 and len(edges) <= 27
    for one in arrays:
        shares = stats.histogram(one, edges)
        assert shares.sum() == pytest.approx(1)
        for low, high, share in zip(edges, edges[1:], shares, strict=False):
            assert share == pytest.approx(np.mean((one >= low) & (one < high)))
        x, y = stats.ecdf(one)
        assert y[-1] == pytest.approx(1) and all(y[i] == pytest.approx(np.mean(one <= x[i])) for i in range(len(x)))


def test_the_spread_of_known_lengths():
    found = stats.spread(np.arange(101))
    assert (found.num, found.p10, found.p25, found.median, found.p75, found.p90) == (101, 10, 25, 50, 75, 90)
    assert stats.spread(np.array([])).num == 0 and math.isnan(stats.spread(np.array([])).median)


def test_difficulty_classes_and_pairs(small):
    table = small.of(View()).table
    everything = np.ones(4, dtype=bool)
    never, always = stats.by_difficulty(table, 1, everything)
    assert (never.difficulty, never.num_problems, never.length, never.accuracy) == ("never", 2, 47.5, 0.5)
    assert (always.difficulty, always.length, always.accuracy, always.cut) == ("always", 20, 0.5, 0)
    found = stats.pairs(table, 1, everything)
    assert [(pair.problem_id, pair.change, pair.moved) for pair in found] == [
        ("p2", -10, 0),
        ("p1", 0, -1),
        ("p0", 5, 1),
        ("p3", 40, 0),
    ]
    assert [pair.problem_id for pair in stats.pairs(table, 1, everything, limit=2)] == ["p2", "p3"]  # both ends


def test_the_checkpoints_beside_the_baseline_are_compared_with_each_other(tmp_path):
    for name, lengths, verdicts in (
        ("a", [10, 20, 30, 40], [WRONG, RIGHT, RIGHT, WRONG]),
        ("b", [15, 26, 37, 48], [WRONG, RIGHT, RIGHT, RIGHT]),
    ):
        run = build_run(tmp_path / name, steps=2, eval_steps=(), seed=ord(name))
        run.write_eval("set", 0, rows_of([9, 9, 9, 9], [WRONG] * 4), {})
        run.write_eval("set", 2, rows_of(lengths, verdicts), {})
    scene = Scenes(Library([tmp_path])).of(View.parse("base=a@0&others=b@0&others=b@2&others=a@2"))
    [duel] = stats.duels(scene.table, scene.keep_P)  # the last one of each run
    assert (duel.index, duel.against) == (3, 2)
    assert duel.tokens.mean == -(5 + 6 + 7 + 8) / 4 and duel.score.mean == -0.25
    page = summary_html(scene)
    assert "<strong>shorter, accuracy: no clear change</strong>" in page and "base=b%402&amp;others=a%402" in page
    assert "duels" not in summary_html(Scenes(scene.library).of(View.parse("base=a@0&others=b@2")))
    assert "duels" not in summary_html(Scenes(scene.library).of(View.parse("base=a@0&others=b@2&others=a@2&text=no")))


def test_a_run_is_drawn_in_the_colour_of_its_latest_checkpoint(tmp_path):
    run = build_run(tmp_path / "run", steps=4)
    scene = Scenes(Library([run.path])).of(View.parse("base=run@0&others=run@4&others=run@2"))
    assert scene.colors == [0, 1, 2] and scene.run_slots() == {"run": 1}
    assert scene.run_groups() == [("run", 1, ("run",))]


def test_what_is_missing_is_called_by_its_name(tmp_path):
    bare = build_run(tmp_path / "bare", steps=2, eval_steps=())
    scene = Scenes(Library([bare.path])).of(View())
    assert "no evaluation yet" in problem_panel(scene) and "no evaluation yet" in lengths_panel(scene)
    assert "no evaluation yet" in take_html(scene) and "<svg" in training_html(scene.library, scene.view, {})
    assert summary_html(scene) == "<div class='summary n0'></div>" and count_html(scene) == ""
    with pytest.raises(UserError, match="no evaluation yet"):
        export(scene, "page.html")
    empty = build_run(tmp_path / "empty", steps=2, eval_steps=())
    empty.write_eval("set", 0, rows_of([], []), {})
    empty.write_eval("set", 2, rows_of([1], [RIGHT]), {})
    library = Library([empty.path])
    scene = Scenes(library).of(View.parse("base=empty@0"))
    assert "of step 0 on set holds no rows" in problem_panel(scene) and "nothing to count" in summary_html(scene)
    assert "No problem passes the filters" in lengths_panel(Scenes(library).of(View.parse("base=empty@2&low=9")))
    assert export(scene, "page.html") and len(samples(scene)) == 0


def test_results_of_an_evaluation_name_no_algorithm(tmp_path):
    build_run(tmp_path / "trained", steps=1, num_problems=2, algorithm="ba")
    build_run(tmp_path / "evaluated", steps=1, num_problems=2, metrics=False)
    assert [run.title for run in Library([tmp_path]).runs.values()] == ["evaluated", "trained (BA)"]


def test_the_rollouts_of_each_run_can_be_read(tmp_path):
    library = Library([build_run(tmp_path / name, steps=2, num_problems=2).path for name in "ab"])
    page = training_html(library, Scenes(library).of(View.parse("rollouts=b&step=1")).view, {})
    assert "Rollouts of b, step 1" in page and "<option value='b' selected>" in page
    assert "Rollouts of a, step 2" in training_html(library, Scenes(library).of(View.parse("rollouts=c")).view, {})


def test_difficulty_says_where_it_was_measured(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=4)
    scene = Scenes(Library([run.path])).of(View())
    assert scene.table.base_when == "before training"
    for path in (run.path / "eval").rglob("*step-000000*"):
        path.unlink()
    scene = Scenes(Library([run.path])).of(View())
    assert scene.table.base_when.endswith("step 1")


def test_the_filters_are_said_and_the_counts_lead_to_their_problems(small):
    query = "change=right&focus=run@2&difficulty=never&low=1&text=of+it&flags=cut&category=even&verdict=correct"
    words = filter_words(small.of(View.parse(query)))
    assert words[:5] == ["became right", "right", "cut at the limit", "even", "never solved"]
    assert words[5:] == ["at least 1 tokens", "“of it”", "looked for in step 2"]
    page = summary_html(small.of(View()))
    assert (
        "data-go='change=right&amp;focus=run%402&amp;tab=problems&amp;at=' tabindex='0' role='button'>better on 1<"
        in page
    )
    for change, ids in (("right", ["p0"]), ("wrong", ["p1"])):
        assert kept(small, f"change={change}&focus=run@2") == ids
    assert "became right" in count_html(small.of(View.parse("change=right")))


def test_a_choice_by_verdict_is_said_to_prove_nothing(small):
    assert "prove nothing" in count_html(small.of(View.parse("change=right")))
    assert "prove nothing" not in count_html(small.of(View.parse("low=1"))) + count_html(small.of(View()))


def test_the_words_follow_the_intervals():
    longer, shorter, unclear = estimate([4, 5, 6]), estimate([-4, -5, -6]), estimate([-5, 0, 5, 1])
    assert judgement(longer, estimate([0.4, 0.5, 0.6])) == "longer, more often right"
    assert judgement(shorter, unclear) == "shorter, accuracy: no clear change"
    assert judgement(unclear, estimate([-0.4, -0.5, -0.6])) == "length: no clear change, less often right"
    assert judgement(estimate([0, 0, 0]), unclear) == "same length, accuracy: no clear change"
    assert judgement(estimate([3]), unclear) == "too few problems to say"


def test_gradient_mass_over_training_adds_up(tmp_path):
    curves = Library([build_run(tmp_path / "run", steps=20).path]).runs["run"].curves()
    steps, mass = stats.gradient_mass([curves], columns=5)
    assert steps.tolist() == [1, 5, 9, 13, 17] and mass.shape == (10, 5)
    assert mass.sum(axis=0) == pytest.approx(np.ones(5))
    assert stats.gradient_mass([curves, curves], columns=5)[1] == pytest.approx(mass)


def test_lengths_over_training_are_those_of_the_rollouts(tmp_path):
    run = build_run(tmp_path / "run", steps=8)
    opened = Library([run.path]).runs["run"]
    curve = stats.length_curve([opened], "toy-test")
    assert curve.sampled and curve.steps.tolist() == list(range(1, 9))
    assert curve.median[3] == np.median(run.rollouts(4, ["length"])["length"].to_numpy())
    shutil.rmtree(run.path / "rollouts")  # then the evaluations speak
    assert stats.length_curve([Library([run.path]).runs["run"]], "toy-test").steps.tolist() == [0, 4, 8]


# -- tokens of reasoning and answer --------------------------------------------------------------


def test_reasoning_and_answer_add_up_to_the_stored_length(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))
    texts = ["<think> a b c </think> 4", "just 4", "<think> a b never closed", "<think> a </think> b </think> 4"]
    split = TokenCounter(path).split(texts, np.array([7, 3, 99, 7]))
    assert split.reasoning_R.tolist() == [5, 0, 99, 5] and split.answer_R.tolist() == [2, 3, 0, 2]
    given_start = TokenCounter(path).split(["<think> a b </think> 4"], np.array([5]), prefill="<think> ")
    assert given_start.reasoning_R.tolist() == [3]


# -- what is written on the page -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"so \boxed{\frac{1}{2}} it is", [r"\boxed{\frac{1}{2}}"]),
        (r"$x^2$ and \(y\) and \[z\] and $$w$$", ["x^2", "y", "z", "w"]),
        ("it costs $5 and $6", []),
        ("for $5-$6 each", []),
        (r"\boxed{never closed", []),
        ("$a\nb$", []),
        (r"\boxed{a \} b}", [r"\boxed{a \} b}"]),
        ("$" + "x" * 3000 + "$", []),
        (r"a $ b$ and $c $ d", []),
        (r"$5 and \$6, $n$ of them", ["n"]),
    ],
)
def test_formulas_are_found(text, formulas):
    html = math_html(text)
    assert [part.partition("<")[0] for part in html.split("'>")[1:]] == formulas


def test_a_formula_by_itself_takes_the_blank_lines_around_it_along():
    assert (
        math_html("so\n\n$$x$$\n\nand $y$ too")
        == "so<span class='tex display'>x</span>and <span class='tex'>y</span> too"
    )


def test_a_formula_is_escaped_like_everything_else():
    for text in ("$<img src='x'>$", r"\boxed{<img src='x'>}"):
        assert "<img" not in math_html(text) and "&lt;img src=&#x27;x&#x27;&gt;" in math_html(text)


@given(st.text(max_size=80))
def test_no_text_becomes_markup(text):
    for html in (math_html(text), value_html(text)):
        for known in ("<span class='tex'>", "<span class='tex display'>", "<span class='tag'>", "</span>"):
            html = html.replace(known, "")
        assert not set("<>'\"") & set(html)


def test_hostile_text_is_inert_in_every_panel_and_export(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=2, response=HOSTILE, question=HOSTILE)
    scene = Scenes(Library([run.path])).of(View())
    pages = [problem_panel(scene), summary_html(scene), lengths_html(scene), take_html(scene)]
    pages += [training_html(scene.library, scene.view, {}), export(scene, "page.html").decode()]
    for page in pages:
        assert (
            "<script" not in page and "<form" not in page and "onerror='" not in page and "evil.example'" not in page
        )
    assert "&lt;script&gt;" in pages[0] and "&lt;script&gt;" in pages[-1]


def test_colours_stay_when_others_come_and_go():
    known = [f"run@{step}" for step in range(9)]
    assert choose_slots(["run@0", "run@2"], known) == {"run@0": 0, "run@2": 2}
    assert choose_slots(["run@0", "run@1", "run@2"], known)["run@2"] == 2
    several = choose_slots(["run@0", "run@6", "run@7"], known)  # 6 and 0, 7 and 1 want the same
    assert len(set(several.values())) == 3 and several["run@0"] == 0


def test_the_checkpoints_that_people_compare_never_change_their_colours(tmp_path):
    for index, name in enumerate("abcde"):
        build_run(tmp_path / name, steps=4, num_problems=2, seed=index)
    scenes = Scenes(Library([tmp_path]))
    ends = [f"{name}@4" for name in "abcde"]
    whole = scenes.of(View(base="a@0", others=tuple(ends)))
    assert sorted(whole.colors) == [0, 1, 2, 3, 4, 5]
    for two in pairwise(ends):
        assert scenes.of(View(base=two[0], others=two[1:])).slots.items() <= whole.slots.items()


def test_the_live_panel_has_the_pages_checkpoints_colours_and_problem(tmp_path):
    for rule in ("ba", "grpo"):
        for seed in (0, 1):
            build_run(tmp_path / rule / f"seed-{seed}", steps=2, seed=seed, algorithm=rule, num_problems=3)
    scenes = Scenes(Library([tmp_path]))
    names = {
        f"{rule}/seed-{seed} · step {step}": (rule, seed, step)
        for rule in ("ba", "grpo")
        for seed in (0, 1)
        for step in (0, 2)
    }
    around = Around(scenes, {name: f"{rule}/seed-{seed}@{step}" for name, (rule, seed, step) in names.items()})
    query = "base=ba/*@0&others=grpo/*@2&others=ba/seed-1@2&at=toy-test-0001"
    scene = scenes.of(View.parse(query))
    shown = ["ba/seed-0 · step 0", "grpo/seed-0 · step 2", "ba/seed-1 · step 2"]  # of pooled seeds the first
    assert around.shown(query) == shown
    colors = around.colors(query, [*reversed(shown), "ba/seed-0 · step 2", "a server"])
    assert [colors[name] for name in shown] == [f"var(--c{slot})" for slot in scene.colors]
    assert len(set(colors.values())) == 5
    example = around.problem(query)
    assert example is not None and example.title == "toy-test-0001" and example.question == "Count the red squares."
    assert example.image == scene.table.checkpoints[0].responses.records("toy-test-0001")[0]["image"][0]
    assert around.problem("text=nowhere") is None


def test_everyone_asked_has_a_colour_of_its_own():
    known = [f"run@{step}" for step in range(12)]
    shown = {f"run@{step}": step for step in range(6)}
    slots = asked_slots([*known[6:11], "server"], shown, known)  # none of them is on the page
    assert len(set(slots.values())) == 6 and set(range(6, 10)) <= set(slots.values())
    assert asked_slots(["server", "run@3"], shown, known) == {"run@3": 3, "server": 6}
    assert asked_slots(["run@7"], {"run@0": 0}, known) == {"run@7": 1}  # as on the page, were it shown there


def test_ticks_are_round_and_inside():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100] and ticks(0.1, 0.9, count=4) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8]
    )
    assert ticks(3, 3) == [3] and ticks(0, 3, whole=True) == [0, 1, 2, 3]
    frame = Frame((0, 10), (0, 1))
    assert frame.x(0) == frame.left and frame.x(10) == frame.width - frame.right and frame.y(0) == frame.floor


# -- exports -------------------------------------------------------------------------------------


def test_the_table_holds_the_view_row_by_row(small):
    scene = small.of(View.parse("change=changed&sort=growth"))
    table = samples(scene)
    assert table["problem_id"].to_pylist() == ["p0", "p0", "p1", "p1"]
    assert table["checkpoint"].to_pylist() == ["run@0", "run@2"] * 2
    assert table["length_change"].to_pylist() == [0, 5, 0, 0] and table["score_change"].to_pylist() == [0, 1, 0, -1]
    back = pq.read_table(io.BytesIO(export(scene, "samples.parquet")))
    assert back.equals(table)
    rows = list(csv.DictReader(io.StringIO(export(scene, "samples.csv").decode())))
    assert [row["length"] for row in rows] == ["10", "15", "20", "20"]
    alone = export(scene, "page.html").decode()
    assert "<button" not in alone and "data-go='" not in alone and "<svg" in alone
    with pytest.raises(UserError, match="can be exported"):
        export(scene, "../secrets")


def test_a_spreadsheet_runs_nothing_and_numbers_stay_numbers(small):
    table = samples(small.of(View())).slice(0, 4)
    place = table.schema.get_field_index("extracted")
    cells = ["=HYPERLINK(1)", "-3", "+cmd|x", "-1.5e3"]
    table = table.set_column(place, "extracted", [cells])
    written = [row["extracted"] for row in csv.DictReader(io.StringIO(csv_bytes(table).decode()))]
    assert written == ["'=HYPERLINK(1)", "-3", "'+cmd|x", "-1.5e3"]


# -- opening -------------------------------------------------------------------------------------


def test_seeds_of_a_comparison_are_pooled_and_its_baseline_comes_first(tmp_path):
    for rule in ("ba", "grpo"):
        for seed in (0, 1):
            build_run(tmp_path / rule / f"seed-{seed}", steps=2, seed=seed, algorithm=rule, num_problems=3)
    (tmp_path / "comparison.json").write_text('{"rules": ["grpo", "ba"]}')
    library = Library([tmp_path])
    assert list(library.runs) == ["grpo/seed-0", "grpo/seed-1", "ba/seed-0", "ba/seed-1"]
    assert library.first_choice("toy-test") == ("grpo/*@0", "grpo/*@2", "ba/*@2")
    scene = Scenes(library).of(View())
    alone = Scenes(library).of(View.parse("base=grpo/seed-0@2&others=grpo/seed-1@2")).table
    assert scene.table.score_CP[1] == pytest.approx(alone.score_CP.mean(axis=0))
    assert scene.table.checkpoints[1].label == "grpo · step 2 · 2 seeds"


def test_a_broken_run_is_named_and_left_out(tmp_path):
    good = build_run(tmp_path / "good", steps=2, num_problems=3)
    build_run(tmp_path / "bad", steps=2, num_problems=3)
    (tmp_path / "bad" / "config.yaml").write_text("algorithm: [")
    library = Library([good.path, tmp_path / "bad"])
    assert list(library.runs) == ["good"] and len(library.faults) == 1 and "bad was left out" in library.faults[0]
    path = good.evals()[0].path
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        Scenes(Library([good.path])).of(View())


def test_mistakes_are_the_users(tmp_path):
    bare = build_run(tmp_path / "bare", steps=1, eval_steps=(), metrics=False)
    with pytest.raises(UserError, match="nothing to show"):
        Library([bare.path])
    with pytest.raises(UserError, match="no run directory"):
        Library([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"there is no config\.yaml"):
        find_runs(tmp_path / "empty")


def test_images_come_from_the_prepared_set_where_the_record_has_none(tmp_path):
    import pyarrow as pa

    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"id": ["p0", "p1"], "images": [[{"bytes": b"zero"}], []]}), folder / "data.parquet")
    blank = {"image": None, "problem_id": "p0"}
    assert images_of(blank, "set", [str(tmp_path / "none"), str(folder)]) == (b"zero",)
    assert images_of({**blank, "problem_id": "p1"}, "set", [str(folder)]) == ()
    assert images_of(blank, "other", [str(folder)]) == () and images_of({"image": [b"own"]}, "set", []) == (b"own",)


def test_a_run_can_be_made_small_and_the_recorded_ones_are(tmp_path):
    run = build_run(tmp_path / "run", steps=5, num_problems=9)
    small = RunDirectory(record(run, tmp_path / "small", num_problems=4))
    assert [len(set(one.rows(["problem_id"])["problem_id"].to_pylist())) for one in small.evals()] == [4, 4, 4]
    assert small.rollout_steps() == [1, 5] and not small.rollouts(5)["token_ids"].to_pylist()[0]
    with pytest.raises(UserError, match="exists already"):
        record(run, tmp_path / "small")
    size = sum(path.stat().st_size for path in RECORDED.rglob("*") if path.is_file())
    assert 0 < size < 1_000_000 and len(Library([RECORDED]).runs) == 2


def test_without_an_argument_the_quickstart_or_the_recorded_run_opens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert default_folders() == [RECORDED] and "recorded" in capsys.readouterr().out
    build_run(Path("runs/quickstart"), steps=1, num_problems=1)
    assert default_folders() == [Path("runs/quickstart")]


def test_only_the_page_itself_needs_gradio():
    code = (
        "import vlm_rl.demo.export, vlm_rl.demo.training, sys; print('gradio' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_orders_keep_ties_in_place(small):
    table = small.of(View()).table
    nothing = np.zeros(4, dtype=bool)
    assert ordered(table, nothing, "growth").tolist() == []
    same = replace(table, length_CP=np.ones((2, 4)))
    assert ordered(same, ~nothing, "growth").tolist() == [0, 1, 2, 3]


def test_the_exported_page_shows_twenty_problems_with_the_one_at_hand(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=30)
    page = export(Scenes(Library([run.path])).of(View.parse("at=toy-test-0028")), "page.html").decode()
    assert page.count("class='example-page'") == 20 and "toy-test-0028" in page and "20 of 30 problems" in page
    assert "leads to" not in page and " data-go='" not in page
