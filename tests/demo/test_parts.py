"""The demo's arithmetic and text, without gradio and without a browser."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace, Sequence
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.helpers.example_run import build_run
from vlm_rl.data.images import encode_png
from vlm_rl.demo.default_runs import RECORDED, default_folders, first_view
from vlm_rl.demo.files.export import csv_bytes, export, samples
from vlm_rl.demo.files.small_copy import copy_small
from vlm_rl.demo.live.context import LiveContext, asked_slots
from vlm_rl.demo.numbers import lengths as stats
from vlm_rl.demo.numbers.library import Library, find_runs
from vlm_rl.demo.numbers.pairs import comparisons
from vlm_rl.demo.numbers.problem_images import images_of
from vlm_rl.demo.numbers.problem_table import keep, ordered, settle
from vlm_rl.demo.numbers.token_counts import TokenCounter
from vlm_rl.demo.numbers.url_state import FILTERS, UNFILTERED, UrlState
from vlm_rl.demo.panels.categories import category_rows
from vlm_rl.demo.panels.lengths import lengths_panel, points_text
from vlm_rl.demo.panels.overview import overview_panel
from vlm_rl.demo.panels.page_parts import export_panel
from vlm_rl.demo.panels.page_state import PageStates, choose_slots
from vlm_rl.demo.panels.problem import columns_of, problem_panel
from vlm_rl.demo.panels.summary_cards import count_html, filter_texts, judgement, summary_html
from vlm_rl.demo.panels.table import row_of, table_panel
from vlm_rl.demo.panels.training import training_panel
from vlm_rl.demo.web.formulas import TextSpan, spans_of
from vlm_rl.demo.web.rendering import formulas_html, value_html
from vlm_rl.errors import UserError
from vlm_rl.evaluation.scores import summarise
from vlm_rl.report.html import stylesheet
from vlm_rl.report.run_curves import score_of
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.run.rollout_row import RolloutRow, rollout_rows
from vlm_rl.run.turn_record import turns_column
from vlm_rl.sandbox.limited import LimitedWorker
from vlm_rl.stats import estimate, score_interval
from vlm_rl.types import EpisodeStart, Grade, Group, Observation, ObservedTokens, Problem, Reward, Rollout, Turn


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
            "turns": None,
            "cluster": None,
            "image": None,
            "question": f"question {index // samples}",
        }
        | {key: value[index] for key, value in changes.items()}
        for index, (length, verdict) in enumerate(zip(lengths, verdicts, strict=True))
    ]


RIGHT, WRONG = "correct", "wrong"


class Elements(HTMLParser):
    """The elements of a piece of HTML with their attributes, and its text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_script else data

    def values(self, attribute: str) -> list[str | None]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


@pytest.fixture
def small(tmp_path) -> PageStates:
    """Two checkpoints, four problems: p0 becomes right, p1 wrong, p2 stays right, p3 stays wrong."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=())
    summary = {"template": "think_answer"}
    run.write_eval("set", 0, rows_of([10, 20, 30, 40], [WRONG, RIGHT, RIGHT, WRONG]), summary)
    after = rows_of(
        [15, 20, 20, 80], [RIGHT, WRONG, RIGHT, "timeout"], stop_reason=["stop", "stop", "stop", "length"]
    )
    run.write_eval("set", 2, after, summary)
    return PageStates(Library([run.path]))


def kept(states: PageStates, query: str) -> list[str]:
    state = states.of(UrlState.parse(query))
    return [state.table.ids[p] for p in state.order]


# -- the state and the address ------------------------------------------------------------------


def test_an_address_is_the_state_and_back():
    url = UrlState(
        benchmark="a b",
        base="x/y@0",
        others=("x/y@4", "ä&=@1"),
        low=0,
        high=12,
        text="50 % + ?",
        flags=("cut",),
        fold=1,
    )
    assert UrlState.parse("?" + url.query()) == url and UrlState.parse("") == UrlState() and UrlState().query() == ""
    assert url.patched(UNFILTERED) == replace(url, low=None, high=None, text="", flags=())
    assert set(FILTERS) <= set(UrlState.__slots__)


@given(st.text(max_size=60))
def test_no_address_breaks_the_page(query):
    url = UrlState.parse(query)
    assert UrlState.parse(url.query()) == url


def test_nonsense_in_the_address_is_ignored():
    assert UrlState.parse(
        "low=-3&high=1e9&step=x&tab=evil&change=DROP&flags=cut&flags=evil&sample=9999999999999"
    ) == UrlState(flags=("cut",))
    assert len(UrlState.parse("text=" + "x" * 5000).text) == 200


def test_a_link_to_what_is_gone_says_so(small):
    url, unknown = settle(UrlState.parse("benchmark=other&base=run@0&others=run@9"), small.library)
    assert url.keys == ("run@0",) and url.benchmark == "set" and "no benchmark other" in unknown[0]
    url, unknown = settle(UrlState.parse("base=run@7&others=run@2"), small.library)
    assert url.keys == ("run@2",) and unknown == ["there is no checkpoint run@7 on set here"]
    assert settle(UrlState(), small.library)[0].keys == ("run@0", "run@2")


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
        ("sort=difference", ["p3", "p2", "p0", "p1"]),  # 40, 10, 5 and 0 tokens
        ("sort=id", ["p0", "p1", "p2", "p3"]),
        ("sort=-id", ["p3", "p2", "p1", "p0"]),
        ("sort=length.1", ["p0", "p1", "p2", "p3"]),  # 15, 20, 20, 80: ties as in the data set
        ("sort=-length.1", ["p3", "p1", "p2", "p0"]),
        ("sort=-score.0", ["p1", "p2", "p0", "p3"]),
        ("sort=-category", ["p1", "p3", "p0", "p2"]),
        ("sort=difficulty", ["p0", "p3", "p1", "p2"]),
        ("sort=length.2", ["p0", "p1", "p2", "p3"]),  # there are two checkpoints
        ("text=P2", ["p2"]),  # an id
    ],
)
def test_filters(small, query, ids):
    assert kept(small, query) == ids


def test_a_format_fault_is_what_the_template_forbids(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    texts = [r"<think>a</think><answer>\boxed{1}</answer>", r"\boxed{1}", "<think>never closed"]
    run.write_eval("set", 0, rows_of([1, 2, 3], [RIGHT] * 3, response=texts), {"template": "think_answer"})
    assert kept(PageStates(Library([run.path])), "flags=format") == ["p1", "p2"]


def test_only_shared_problems_are_compared(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    rows = rows_of([1, 2, 3], [RIGHT, WRONG, WRONG])
    run.write_eval("set", 0, rows, {})
    run.write_eval("set", 1, rows[:0:-1], {})  # the last two, backwards
    state = PageStates(Library([run.path])).of(UrlState())
    assert state.table.ids == ["p1", "p2"] and state.table.length_CP.tolist() == [[2, 3], [2, 3]]


def test_the_table_has_a_row_per_problem_and_headings_that_order_it(small):
    page = Elements(table_panel(small.of(UrlState.parse("sort=-length.1&at=p1"))))
    assert "step 2, tokens ↓" in page.text
    assert [value for value in page.values("data-go") if value and value.startswith("tab=problems")] == [
        f"tab=problems&at=p{index}" for index in (3, 1, 2, 0)
    ]
    assert page.values("aria-sort") == ["descending"] and "sort=length.1&at=" in page.values("data-go")
    rows = [attributes for tag, attributes in page.elements if tag == "tr"]
    assert [row.get("class") for row in rows] == [None, None, None, "here", None, None]  # two rows are the head
    state = small.of(UrlState())
    row = row_of(state, 3)
    assert [(cell.score, cell.kind, cell.length) for cell in row.cells] == [("✗", "not", 40), ("✗", "not", 80)]
    assert (row.question, row.category, row.difficulty) == ("question 3", "odd", "never solved")


def test_a_long_table_shows_the_part_with_the_problem_at_hand(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    run.write_eval("set", 0, rows_of([1] * 250, [RIGHT] * 250), {})
    states = PageStates(Library([run.path]))
    page = Elements(table_panel(states.of(UrlState.parse("at=p130"))))
    assert "101 to 200 of 250" in page.text and len(page.elements) < 1500
    patches = page.values("data-go")
    assert "at=p0" in patches and "at=p200" in patches


def test_the_strip_counts_all_problems_that_pass(small):
    strip = problem_panel(small.of(UrlState()))
    words = " ".join(Elements(strip).text.split())
    assert "▲1 became right" in words and "▼1 became wrong" in words
    assert "●1 right in both" in words and "○1 wrong in both" in words


def test_the_caption_says_how_many_points_are_drawn():
    assert points_text(600, 600) == "One point per problem"
    assert points_text(5_000, 600).startswith("600 of 5,000 problems are drawn for each checkpoint")


_MACHADO = {  # Machado, Oliveira and Fernandes, IEEE TVCG 2009: full protanopia, deuteranopia and tritanopia
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def _linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    x = _XYZ @ linear / (_XYZ @ np.ones(3))
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _contrast(first: str, second: str) -> float:
    low, high = sorted(float(_XYZ[1] @ _linear(color)) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", [None, *_MACHADO])
def test_colours_are_told_apart_whatever_one_sees(theme, sight):
    block = stylesheet("cards").split(":root {")[1 + theme]
    color = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    matrix = np.array(_MACHADO[sight]) if sight else np.eye(3)
    seen = {name: _lab(np.clip(matrix @ _linear(value), 0, 1)) for name, value in color.items()}
    pairs = [*combinations([f"c{slot}" for slot in range(6)], 2), ("good", "bad")]
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in pairs) > 12
    for name in ("good", "bad", "warn"):  # text on its own soft ground and on a card: WCAG's AA
        assert min(_contrast(color[name], color[ground]) for ground in (f"{name}-soft", "surface")) > 4.5


# -- numbers -------------------------------------------------------------------------------------


def test_the_summary_by_hand(small):
    before, after = small.of(UrlState()).summaries
    assert (before.accuracy, before.mean, before.median, before.cut) == (0.5, 25, 25, 0)
    assert before.p90 == pytest.approx(37)  # 0.9 of the way along 10, 20, 30, 40: between the last two
    assert (after.accuracy, after.mean, after.median, after.cut) == (0.5, 33.75, 20, 0.25)
    assert "mean 34, median 20 tokens" in " ".join(Elements(summary_html(small.of(UrlState()))).text.split())
    assert after.tokens.mean == pytest.approx((5 + 0 - 10 + 40) / 4) and (after.won, after.lost) == (1, 1)
    alone = small.of(UrlState.parse("change=right")).summaries[1]
    assert (alone.won, alone.lost) == (1, 0)
    assert alone.num_problems == 1 and alone.tokens.mean == 5 and not alone.tokens.has_interval
    nothing = small.of(UrlState.parse("text=nowhere")).summaries[1]
    assert nothing.num_problems == 0 and math.isnan(nothing.accuracy)


def test_several_samples_count_by_problem(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    run.write_eval("set", 0, rows_of([10, 20, 30, 50], [RIGHT, WRONG, WRONG, WRONG], samples=2), {})
    run.write_eval("set", 1, rows_of([10, 40, 30, 50], [RIGHT, RIGHT, RIGHT, WRONG], samples=2), {})
    state = PageStates(Library([run.path])).of(UrlState())
    assert state.table.score_CP.tolist() == [[0.5, 0], [1, 0.5]] and state.table.length_CP[1].tolist() == [25, 40]
    assert state.table.difficulty_P.tolist() == ["sometimes", "never"]
    assert keep(state.table, UrlState.parse("change=right")).tolist() == [True, True]
    page = Elements(problem_panel(PageStates(state.library).of(UrlState.parse("sample=1")))).text
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


def test_difficulty_classes_and_changes(small):
    table = small.of(UrlState()).table
    everything = np.ones(4, dtype=bool)
    never, always = stats.by_difficulty(table, 1, everything)
    assert (never.difficulty, never.num_problems, never.length, never.accuracy) == ("never", 2, 47.5, 0.5)
    assert (always.difficulty, always.length, always.accuracy, always.cut) == ("always", 20, 0.5, 0)
    found = stats.problem_changes(table, 1, everything)
    assert [(pair.problem_id, pair.change, pair.moved) for pair in found] == [
        ("p2", -10, 0),
        ("p1", 0, -1),
        ("p0", 5, 1),
        ("p3", 40, 0),
    ]
    assert [pair.problem_id for pair in stats.problem_changes(table, 1, everything, limit=2)] == [
        "p2",
        "p3",
    ]  # both ends


def test_the_checkpoints_beside_the_baseline_are_compared_with_each_other(tmp_path):
    for name, lengths, verdicts in (
        ("a", [10, 20, 30, 40], [WRONG, RIGHT, RIGHT, WRONG]),
        ("b", [15, 26, 37, 48], [WRONG, RIGHT, RIGHT, RIGHT]),
    ):
        run = build_run(tmp_path / name, steps=2, eval_steps=(), seed=ord(name))
        run.write_eval("set", 0, rows_of([9, 9, 9, 9], [WRONG] * 4), {})
        run.write_eval("set", 2, rows_of(lengths, verdicts), {})
    state = PageStates(Library([tmp_path])).of(UrlState.parse("base=a@0&others=b@0&others=b@2&others=a@2"))
    *with_base, duel = comparisons(state.table, state.keep_P)  # the last one of each run
    assert [(one.index, one.against) for one in with_base] == [(1, 0), (2, 0), (3, 0)]
    assert (duel.index, duel.against) == (3, 2)
    assert duel.tokens.mean == -(5 + 6 + 7 + 8) / 4 and duel.score.mean == -0.25
    page = Elements(overview_panel(state))
    assert "a · step 2 reasons shorter than b · step 2: −6.5 tokens" in " ".join(page.text.split())
    assert urlencode({"base": "b@2", "others": "a@2", "pair": ""}) in page.values("data-go")
    for query in ("base=a@0&others=b@2", "base=a@0&others=b@2&others=a@2&text=no"):  # one run, and no problem
        assert "Show this pair" not in overview_panel(PageStates(state.library).of(UrlState.parse(query)))


def test_a_run_is_drawn_in_the_colour_of_its_latest_checkpoint(tmp_path):
    run = build_run(tmp_path / "run", steps=4)
    state = PageStates(Library([run.path])).of(UrlState.parse("base=run@0&others=run@4&others=run@2"))
    assert state.colors == [0, 1, 2] and state.run_slots() == {"run": 1}
    assert state.run_groups() == [("run", 1, ("run",))]


def test_what_is_missing_is_called_by_its_name(tmp_path):
    bare = build_run(tmp_path / "bare", steps=2, eval_steps=())
    state = PageStates(Library([bare.path])).of(UrlState())
    assert "no evaluation yet" in problem_panel(state) and "no evaluation yet" in lengths_panel(state)
    assert "no evaluation yet" in export_panel(state) and count_html(state) == ""
    assert "Reward of a response" in Elements(training_panel(state.library, state.url, {})).text
    assert "ckpt" not in summary_html(state)
    with pytest.raises(UserError, match="no evaluation yet"):
        export(state, "page.html")
    empty = build_run(tmp_path / "empty", steps=2, eval_steps=())
    empty.write_eval("set", 0, rows_of([], []), {})
    empty.write_eval("set", 2, rows_of([1], [RIGHT]), {})
    library = Library([empty.path])
    state = PageStates(library).of(UrlState.parse("base=empty@0"))
    assert "of step 0 on set holds no rows" in problem_panel(state) and "nothing to count" in summary_html(state)
    assert "No problem passes the filters" in lengths_panel(
        PageStates(library).of(UrlState.parse("base=empty@2&low=9"))
    )
    assert export(state, "page.html") and len(samples(state)) == 0


def test_results_of_an_evaluation_name_no_algorithm(tmp_path):
    build_run(tmp_path / "trained", steps=1, num_problems=2, algorithm="ba")
    build_run(tmp_path / "evaluated", steps=1, num_problems=2, metrics=False)
    assert [run.title for run in Library([tmp_path]).runs.values()] == ["evaluated", "trained (BA)"]


def test_a_rollout_s_tokens_are_in_shades_of_what_the_image_changes(tmp_path):
    """Where that is stored: 1 - e^(-2 S) in ninths, of S = .5 the sixth. Markup in a token is text."""
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    rows = run.rollouts(1).to_pylist()[:8]
    rows[0] |= {"tokens": ["<b>", " $a", " b$"], "visual_dependence": [0.5, 0.0, 0.01]}
    run.write_rollouts(1, 1, [RolloutRow(**row) for row in rows])
    library = Library([tmp_path])
    page = str(training_panel(library, PageStates(library).of(UrlState()).url, {}))
    assert page.count("mean S 0.170") == page.count("card looks") == 1
    assert '<span class="s6" title="S 0.50">&lt;b&gt;</span> $a b$</div>' in page


def test_the_key_of_the_curves_says_which_runs_were_evaluated_only(tmp_path):
    for name in ("trained", "started", "evaluated"):
        build_run(tmp_path / name, steps=2, num_problems=2, metrics=name == "trained")
    (tmp_path / "started" / "log.txt").touch()  # in its first step
    library = Library([tmp_path])
    page = " ".join(Elements(training_panel(library, PageStates(library).of(UrlState()).url, {})).text.split())
    for said in ("trained LUSPO, step 2 of 2", "started LUSPO, step 0 of 2", "evaluated evaluated only"):
        assert said in page


def test_hadw_has_curves_of_belief_and_weights_where_it_is_on(tmp_path):
    """Every run logs a belief; without weights nothing used it."""
    titles = ["HA-DW's belief", "HA-DW's weight, prompts below the belief", "HA-DW's weight, other prompts"]
    for name, weights in (("off", {}), ("on", {"hadw/weight_hard": 1.5, "hadw/weight_easy": 1.1})):
        run = build_run(tmp_path / name, steps=2, num_problems=2, metrics=False)
        for step in (1, 2):
            run.append_metrics(step, 1, {"hadw/belief": step / 4, **weights})
        library = Library([run.path])
        page = html.unescape(str(training_panel(library, PageStates(library).of(UrlState()).url, {})))
        assert [title in page for title in titles] == [name == "on"] * 3


def test_a_run_at_zero_is_drawn_beside_one_that_is_not(tmp_path):
    """Left out, nobody could tell that nothing of it was cut from that it did not say. Zeros alone have no chart."""
    for name, shares in (("a", (0.0, 0.0)), ("b", (0.5, 0.0))):
        run = build_run(tmp_path / name, steps=2, num_problems=2, metrics=False)
        for step, share in enumerate(shares, 1):
            run.append_metrics(step, 1, {"reward": 1.0, "completions/clipped_ratio": share})
    library = Library([tmp_path])
    pages = {runs: str(training_panel(library, UrlState(runs=runs), {})) for runs in (("a", "b"), ("a",))}
    title = "Share cut at the limit"
    chart = re.search(rf'aria-label="{title}"><script type="application/json">(.*?)</script>', pages["a", "b"])
    assert chart is not None and [entry["name"] for entry in json.loads(chart[1])["usermeta"]["legend"]] == ["a", "b"]
    assert title not in pages["a",]


@pytest.mark.parametrize("starts", [True, False])
def test_an_episode_reads_as_a_conversation(starts, tmp_path):
    """What was shown before the first turn stands above it, of an evaluated problem and of a training response."""
    no_ids = np.zeros(1, np.int32)
    picture = encode_png(Image.new("RGB", (56, 56)))
    turns = (
        Turn(2, "I look", Observation("seven", tool="zoom"), ObservedTokens(no_ids, no_ids, ())),
        Turn(1, "7", ending="done"),
    )
    start = EpisodeStart("a <b>board", (picture,), "") if starts else None
    rollout = Rollout(
        "p0", 0, np.zeros(3, np.int32), np.zeros(3, np.float32), "7", "stop", 0, turns=turns, start=start
    )
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    run.write_eval("set", 1, rows_of([3], [RIGHT], turns=[turns_column(rollout)]), {})
    grade = Grade("correct", "7", "number", "equal")
    problem = Problem("p0", "How many?", (), "7", "integer")
    group = Group(problem, (rollout,), (Reward({"accuracy": 1.0}, grade),), np.zeros(1))
    run.write_rollouts(1, 1, rollout_rows([group], step=1, attempt=1))
    library = Library([run.path])
    state = PageStates(library).of(UrlState())
    for page in (Elements(problem_panel(state)), Elements(training_panel(library, state.url, {}))):
        words = " ".join(html.unescape(page.text).split())
        shown = r"the environment shows first a <b>board " if starts else ""
        assert re.search(rf"{shown}turn 1 .*I look.* zoom answers seven ", words), words
        assert "turn 2 " not in words and ("shows first" in words) == starts
        assert "sampled in" not in words or "sampled in 2 turns" in words
        assert ("what was shown first" in page.values("alt")) == starts


def test_the_rollouts_of_each_run_can_be_read(tmp_path):
    library = Library([build_run(tmp_path / name, steps=2, num_problems=2).path for name in "ab"])
    states = PageStates(library)
    page = Elements(training_panel(library, states.of(UrlState.parse("rollouts=b&step=1")).url, {}))
    assert "Rollouts of b, step 1" in page.text
    assert [dict(option)["value"] for tag, option in page.elements if tag == "option" and "selected" in option] == [
        "b"
    ]
    page = Elements(training_panel(library, states.of(UrlState.parse("rollouts=c")).url, {}))
    assert "Rollouts of a, step 2" in page.text


def test_a_run_trains_while_its_lease_is_renewed_whatever_the_clocks_say(tmp_path, monkeypatch):
    directory = build_run(tmp_path / "run", steps=2, num_problems=2)
    (whole,) = Library([directory.path]).runs.values()
    run = replace(whole, num_steps=9)
    lock, metrics = directory.path / ".lock", directory.path / "metrics.jsonl"

    def is_alive(lease: str, watched: float) -> bool:
        lock.write_text(lease)
        monkeypatch.setattr("vlm_rl.demo.numbers.library.time.monotonic", lambda: watched)
        return run.is_alive()

    hour_ahead = time.time() + 3600
    os.utime(metrics, (hour_ahead, hour_ahead))  # written by a machine whose clock is an hour ahead
    assert [is_alive("1", 0.0), is_alive("2", 10.0), is_alive("2", 60.0), is_alive("2", 80.0)] == [
        False,  # nothing tells a trainer of today from one that was killed
        True,
        True,
        False,  # killed: no renewal for more than 60 s
    ]
    assert is_alive("3", 90.0)
    lock.unlink()  # the trainer ended and gave its lock back
    assert not run.is_alive()


def test_difficulty_says_where_it_was_measured(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=4)
    state = PageStates(Library([run.path])).of(UrlState())
    assert state.table.base_when == "before training"
    for path in (run.path / "eval").rglob("*step-000000*"):
        path.unlink()
    state = PageStates(Library([run.path])).of(UrlState())
    assert state.table.base_when.endswith("step 1")


def test_the_filters_are_said_and_the_counts_lead_to_their_problems(small):
    query = "change=right&focus=run@2&difficulty=never&low=1&text=of+it&flags=cut&category=even&verdict=correct"
    assert filter_texts(small.of(UrlState.parse("category=none"))) == ["no category"]
    texts = filter_texts(small.of(UrlState.parse(query)))
    assert texts[:5] == ["became right", "right", "cut at the limit", "even", "never solved"]
    assert texts[5:] == ["at least 1 tokens", "“of it”", "in step 2"]
    patches = Elements(summary_html(small.of(UrlState()))).values("data-go")
    assert UrlState.parse(patches[0]) == UrlState(change="right", focus="run@2", tab="problems")
    for change, ids in (("right", ["p0"]), ("wrong", ["p1"])):
        assert kept(small, f"change={change}&focus=run@2") == ids
    assert "became right" in count_html(small.of(UrlState.parse("change=right")))


@pytest.mark.parametrize(
    ("query", "by"),
    [
        ("change=changed", "verdicts"),
        ("verdict=correct", "verdicts"),
        ("difficulty=never", "verdicts"),  # of the samples before training, which may be the baseline's own
        ("flags=timeout", "verdicts"),
        ("low=20", "lengths"),
        ("high=20", "lengths"),
        ("flags=cut", "lengths"),
        ("verdict=correct&high=20", "verdicts and lengths"),
        ("category=odd", ""),
        ("flags=format", ""),
        ("text=word1", ""),
    ],
)
def test_a_choice_by_verdict_or_length_is_said_to_prove_nothing(small, query, by):
    text = Elements(count_html(small.of(UrlState.parse(query)))).text
    assert (f"chosen by their {by}, so" in text) if by else "prove nothing" not in text


def test_the_judgement_follows_the_intervals():
    longer, shorter, unclear = estimate([4, 5, 6]), estimate([-4, -5, -6]), estimate([-5, 0, 5, 1])
    assert judgement(longer, estimate([0.4, 0.5, 0.6])) == "longer, more often right"
    assert judgement(shorter, unclear) == "shorter, accuracy: no clear change"
    assert judgement(unclear, estimate([-0.4, -0.5, -0.6])) == "length: no clear change, less often right"
    assert judgement(estimate([0, 0, 0]), unclear) == "same length, accuracy: no clear change"
    assert judgement(estimate([3]), unclear) == "too few problems to say"


def test_gradient_mass_over_training_adds_up(tmp_path):
    curves = Library([build_run(tmp_path / "run", steps=20).path]).runs["run"].curves()
    steps, mass = stats.mass_over_training([curves], columns=5)
    assert steps.tolist() == [1, 5, 9, 13, 17] and mass.shape == (10, 5)
    assert mass.sum(axis=0) == pytest.approx(np.ones(5))
    assert stats.mass_over_training([curves, curves], columns=5)[1] == pytest.approx(mass)


def test_lengths_over_training_are_those_of_the_rollouts(tmp_path):
    run = build_run(tmp_path / "run", steps=8)
    opened = Library([run.path]).runs["run"]
    curve = stats.length_curve([opened], "toy-test")
    assert curve.sampled and curve.steps.tolist() == list(range(1, 9))
    assert curve.median[3] == np.median(run.rollouts(4, ["length"])["length"].to_numpy())
    shutil.rmtree(run.path / "rollouts")  # then the evaluations speak
    assert stats.length_curve([Library([run.path]).runs["run"]], "toy-test").steps.tolist() == [0, 4, 8]


def test_the_caption_of_lengths_over_training_says_whose_are_of_evaluations(tmp_path):
    runs = [build_run(tmp_path / name, steps=4, num_problems=2).path for name in ("sampled", "evaluated")]
    shutil.rmtree(runs[1] / "rollouts")
    said = {}
    for names in (("sampled",), ("evaluated",), ("sampled", "evaluated")):
        address = "&".join(f"others={name}@4" for name in names)
        state = PageStates(Library(runs)).of(UrlState.parse(address))
        said[names] = html.unescape(str(lengths_panel(state)))
    assert "Of all training responses of a step" in said["sampled",] and "evaluations" not in said["sampled",]
    assert "Of all stored evaluations of a step" in said["evaluated",]
    assert "Of all training responses of a step" in said["sampled", "evaluated"]
    assert "of evaluated, the stored evaluations" in said["sampled", "evaluated"]


def test_one_is_no_plural(tmp_path):
    run = build_run(tmp_path / "run", steps=1, num_problems=1, eval_steps=(0,))
    assert "1 problem, 1 checkpoint: step 0" in export_panel(PageStates(Library([run.path])).of(UrlState()))


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


def test_an_episode_has_no_one_split(tmp_path):
    """Its response is the last turn's: the tokens of the others are neither its reasoning nor its answer."""
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    turns = [{"text": "<think>where</think>zoom", "tokens": 60}, {"text": "7", "tokens": 40, "ending": "done"}]
    for step, column in ((0, None), (1, json.dumps(turns))):
        run.write_eval("set", step, rows_of([100], [RIGHT], turns=[column]), {"template": "think_answer"})
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(run.path / "tokenizer.json"))
    states = PageStates(Library([run.path]))
    state = states.of(UrlState.parse("base=run@0&others=run@1&part=answer"))
    assert "sampled in several turns" in lengths_panel(state) and "tokenizer.json" not in lengths_panel(state)
    assert [number is None for number in samples(state)["reasoning_tokens"].to_pylist()] == [False, True]
    assert "tokens, answer only" in lengths_panel(states.of(UrlState.parse("base=run@0&part=answer")))


def test_a_tokenizer_that_takes_all_memory_counts_nothing(tmp_path, monkeypatch):
    """Six replacements of a letter by 99 would make 9e11 letters of one, and abort the process."""
    worker = LimitedWorker("vlm_rl.demo.numbers.token_worker.count", cpu_seconds=5.0, memory=256 << 20)
    monkeypatch.setattr("vlm_rl.demo.numbers.token_counts._worker", worker)
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.normalizer = Sequence([Replace("a", "a" * 99)] * 6)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = TokenCounter(tmp_path / "tokenizer.json")
    assert counter.split(["<think> a </think>"], np.array([7])) is None
    worker.close()
    assert counter.split(["<think> b </think>"], np.array([7])) is None, "it is not asked again"
    assert worker._process is None


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
def test_formulas_are_recognised(text, formulas):
    assert [span.text for span in spans_of(text) if span.kind in ("tex", "tex display")] == formulas


def test_a_formula_on_its_own_lines_takes_the_blank_lines_around_it_along():
    assert spans_of("so\n\n$$x$$\n\nand $y$ too") == [
        TextSpan("text", "so"),
        TextSpan("tex display", "x"),
        TextSpan("text", "and "),
        TextSpan("tex", "y"),
        TextSpan("text", " too"),
    ]


@given(st.text(max_size=80))
def test_no_text_becomes_markup(text):
    for markup in (formulas_html(text), value_html(text)):
        assert {tag for tag, _ in Elements(markup).elements} <= {"span"}
        assert all(dict(attributes).keys() == {"class"} for _, attributes in Elements(markup).elements)


def test_colours_stay_when_others_come_and_go():
    known = [f"run@{step}" for step in range(9)]
    assert choose_slots(["run@0", "run@2"], known) == {"run@0": 0, "run@2": 2}
    assert choose_slots(["run@0", "run@1", "run@2"], known)["run@2"] == 2
    several = choose_slots(["run@0", "run@6", "run@7"], known)  # 6 and 0, 7 and 1 want the same
    assert len(set(several.values())) == 3 and several["run@0"] == 0


def test_the_checkpoints_that_people_compare_never_change_their_colours(tmp_path):
    for index, name in enumerate("abcde"):
        build_run(tmp_path / name, steps=4, num_problems=2, seed=index)
    states = PageStates(Library([tmp_path]))
    ends = [f"{name}@4" for name in "abcde"]
    whole = states.of(UrlState(base="a@0", others=tuple(ends)))
    assert sorted(whole.colors) == [0, 1, 2, 3, 4, 5]
    for two in pairwise(ends):
        assert states.of(UrlState(base=two[0], others=two[1:])).slots.items() <= whole.slots.items()


def test_the_live_panel_has_the_pages_checkpoints_colours_and_problem(tmp_path):
    for rule in ("ba", "grpo"):
        for seed in (0, 1):
            build_run(tmp_path / rule / f"seed-{seed}", steps=2, seed=seed, algorithm=rule, num_problems=3)
    states = PageStates(Library([tmp_path]))
    names = {
        f"{rule}/seed-{seed} · step {step}": (rule, seed, step)
        for rule in ("ba", "grpo")
        for seed in (0, 1)
        for step in (0, 2)
    }
    context = LiveContext(states, {name: f"{rule}/seed-{seed}@{step}" for name, (rule, seed, step) in names.items()})
    query = "base=ba/*@0&others=grpo/*@2&others=ba/seed-1@2&at=toy-test-0001"
    state = states.of(UrlState.parse(query))
    shown = ["ba/seed-0 · step 0", "grpo/seed-0 · step 2", "ba/seed-1 · step 2"]  # of pooled seeds the first
    assert context.shown(query) == shown
    colors = context.colors(query, [*reversed(shown), "ba/seed-0 · step 2", "a server"])
    assert [colors[name] for name in shown] == [f"var(--c{slot})" for slot in state.colors]
    assert len(set(colors.values())) == 5
    example = context.problem(query)
    assert example is not None and example.title == "toy-test-0001" and example.question == "Count the red squares."
    assert example.image == state.table.checkpoints[0].responses.records("toy-test-0001")[0]["image"][0]
    assert context.problem("text=nowhere") is None


def test_everyone_asked_has_a_colour_of_its_own():
    known = [f"run@{step}" for step in range(12)]
    shown = {f"run@{step}": step for step in range(6)}
    slots = asked_slots([*known[6:11], "server"], shown, known)  # none of them is on the page
    assert len(set(slots.values())) == 6 and set(range(6, 10)) <= set(slots.values())
    assert asked_slots(["server", "run@3"], shown, known) == {"run@3": 3, "server": 6}
    assert asked_slots(["run@7"], {"run@0": 0}, known) == {"run@7": 1}  # as on the page, were it shown there


# -- exports -------------------------------------------------------------------------------------


def test_the_table_holds_the_view_row_by_row(small):
    state = small.of(UrlState.parse("change=changed&sort=growth"))
    table = samples(state)
    assert table["problem_id"].to_pylist() == ["p0", "p0", "p1", "p1"]
    assert table["checkpoint"].to_pylist() == ["run@0", "run@2"] * 2
    assert table["length_change"].to_pylist() == [0, 5, 0, 0] and table["score_change"].to_pylist() == [0, 1, 0, -1]
    back = pq.read_table(io.BytesIO(export(state, "samples.parquet")))
    assert back.equals(table)
    rows = list(csv.DictReader(io.StringIO(export(state, "samples.csv").decode())))
    assert [row["length"] for row in rows] == ["10", "15", "20", "20"]
    alone = Elements(export(state, "page.html").decode())
    assert alone.values("data-go") == [] and "button" not in {tag for tag, _ in alone.elements}
    with pytest.raises(UserError, match="can be exported"):
        export(state, "../secrets")


def test_a_spreadsheet_runs_nothing_and_numbers_stay_numbers(small):
    table = samples(small.of(UrlState())).slice(0, 4)
    place = table.schema.get_field_index("extracted")
    cells = ["=HYPERLINK(1)", "-3", "+cmd|x", "-1.5e3"]
    table = table.set_column(place, "extracted", [cells])
    written = [row["extracted"] for row in csv.DictReader(io.StringIO(csv_bytes(table).decode()))]
    assert written == ["'=HYPERLINK(1)", "-3", "'+cmd|x", "-1.5e3"]


# -- opening -------------------------------------------------------------------------------------


def test_seeds_of_a_study_are_pooled_and_its_baseline_comes_first(tmp_path):
    for rule in ("ba", "grpo"):
        for seed in (0, 1):
            build_run(tmp_path / rule / f"seed-{seed}", steps=2, seed=seed, algorithm=rule, num_problems=3)
    (tmp_path / "comparison.json").write_text('{"rules": ["grpo", "ba"]}')
    library = Library([tmp_path])
    assert list(library.runs) == ["grpo/seed-0", "grpo/seed-1", "ba/seed-0", "ba/seed-1"]
    assert library.first_choice("toy-test") == ("grpo/*@0", "grpo/*@2", "ba/*@2")
    state = PageStates(library).of(UrlState())
    alone = PageStates(library).of(UrlState.parse("base=grpo/seed-0@2&others=grpo/seed-1@2")).table
    assert state.table.score_CP[1] == pytest.approx(alone.score_CP.mean(axis=0))
    assert state.table.checkpoints[1].label == "grpo · step 2 · 2 seeds"


def test_a_broken_run_is_named_and_left_out(tmp_path):
    good = build_run(tmp_path / "good", steps=2, num_problems=3)
    build_run(tmp_path / "bad", steps=2, num_problems=3)
    (tmp_path / "bad" / "config.yaml").write_text("algorithm: [")
    library = Library([good.path, tmp_path / "bad"])
    assert list(library.runs) == ["good"] and len(library.faults) == 1 and "bad was left out" in library.faults[0]
    for evaluation in good.evals():  # one of several is left out by name: test_odd_runs.py
        evaluation.path.write_bytes(evaluation.path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        PageStates(Library([good.path])).of(UrlState())


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
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(run.path / "tokenizer.json"), pretty=True)
    small = RunDirectory(copy_small(run, tmp_path / "small", num_problems=4))
    tokens = [json.loads(line) for line in (small.path / "tokenizer.json").open(encoding="utf-8")]
    assert tokens == [json.loads(tokenizer.to_str())]  # on one line
    assert [len(set(one.rows(["problem_id"])["problem_id"].to_pylist())) for one in small.evals()] == [4, 4, 4]
    assert small.rollout_steps() == [1, 5] and not small.rollouts(5)["token_ids"].to_pylist()[0]
    for whole, part in zip(run.evals(), small.evals(), strict=True):
        counted = summarise([EvalRecord(**row) for row in part.rows().to_pylist()])
        assert dict(part.summary) == {**whole.summary, **counted} and counted["num_problems"] == 4
    with pytest.raises(UserError, match="exists already"):
        copy_small(run, tmp_path / "small")
    for one in run.evals():  # as older versions wrote it
        pq.write_table(pq.read_table(one.path).drop_columns("cluster"), one.path)
    older = RunDirectory(copy_small(run, tmp_path / "older", num_problems=4))
    assert [one.rows() for one in older.evals()] == [one.rows() for one in small.evals()]
    size = sum(path.stat().st_size for path in RECORDED.rglob("*") if path.is_file())
    assert 0 < size < 1_000_000 and len(Library([RECORDED]).runs) == 2
    url = UrlState.parse(first_view([RECORDED]))
    state = PageStates(Library([RECORDED])).of(url)
    assert state.problem_id == url.at and first_view([run.path]) == ""
    columns = columns_of(state, int(state.order[state.position]))  # what it opens with has rules that differ
    assert len({column.length for column in columns}) > 1 and len({column.verdict_kind for column in columns}) > 1


def test_the_same_records_have_one_score_and_interval_everywhere():
    """In the summary that the evaluation stored, in the report, and on the demo's card."""
    state = PageStates(Library([RECORDED])).of(UrlState())
    keys = [(shown.runs[0], shown.step) for shown in state.table.checkpoints]
    cards = dict(zip(keys, state.summaries, strict=True))
    found = {(run.name, one.step): one for run in map(RunDirectory, RECORDED.iterdir()) for one in run.evals()}
    assert len(cards) > 1
    for key, card in cards.items():
        score, summary = score_of(found[key]), found[key].summary
        assert (score.num_problems, score.accuracy) == (summary["num_problems"], summary["accuracy"])
        assert (card.num_problems, card.accuracy) == (summary["num_problems"], summary["accuracy"])
        assert (score.low, score.high) == card.interval == tuple(summary["interval"])


def test_variants_of_a_seed_are_one_value_on_the_page(tmp_path):
    """Cards, comparisons and categories of three seeds of two variants. An older file does not know the seeds."""
    seeds = ["seed 0", "seed 0", "seed 1", "seed 1", "seed 2", "seed 2"]
    verdicts = [[WRONG] * 6, [RIGHT, RIGHT, WRONG, WRONG, WRONG, RIGHT], [RIGHT, RIGHT, WRONG, RIGHT, WRONG, RIGHT]]
    lengths = [[10] * 6, [20, 22, 14, 15, 30, 41], [15, 12, 24, 25, 31, 40]]
    states = []
    for name, cluster in (("new", seeds), ("older", [None] * 6)):
        for place in range(3):  # several runs, since only different ones are compared directly
            run = build_run(tmp_path / name / f"run{place}", steps=2, eval_steps=())
            rows = rows_of(lengths[place], verdicts[place], cluster=cluster, category=["even"] * 6)
            path = run.write_eval("set", 1, rows, {})
            if name == "older":
                pq.write_table(pq.read_table(path).drop_columns("cluster"), path)
        url = UrlState.parse("base=run0@1&others=run1@1&others=run2@1")
        states.append(PageStates(Library(sorted((tmp_path / name).iterdir()))).of(url))
        state, groups = states[-1], np.array(seeds if name == "new" else list("abcdef"))
        right, tokens = np.array(verdicts) == RIGHT, np.array(lengths)
        change = [right[place] * 1.0 - right[0] for place in range(3)]
        longer = [tokens[place] - tokens[0] for place in range(3)]
        for place, summary in enumerate(state.summaries):
            assert summary.interval == score_interval(right[place], groups)
            assert summary.tokens == estimate(longer[place], clusters=groups)
            assert summary.score == estimate(change[place], clusters=groups, bounds=(-1, 1))
            score = score_of(RunDirectory(tmp_path / name / f"run{place}").evals()[0])
            assert (score.low, score.high) == summary.interval
        *_, direct = comparisons(state.table, state.keep_P)
        assert direct.score == estimate(right[2] * 1.0 - right[1], clusters=groups, bounds=(-1, 1))
        assert direct.tokens == estimate(tokens[2] - tokens[1], clusters=groups)
        (category,) = category_rows(state.table, state.keep_P)
        assert [(cell.score, cell.tokens) for cell in category.cells] == [
            (estimate(change[place], clusters=groups, bounds=(-1, 1)), estimate(longer[place], clusters=groups))
            for place in (1, 2)
        ]
    new, older = states
    assert new.summaries[2].score.low < older.summaries[2].score.low and "mean change" in lengths_panel(new)


def test_without_an_argument_the_quickstart_or_the_recorded_run_opens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert default_folders() == [RECORDED] and "recorded" in capsys.readouterr().out
    build_run(Path("runs/quickstart"), steps=1, num_problems=1)
    assert default_folders() == [Path("runs/quickstart")]


def test_only_the_page_itself_needs_gradio():
    modules = "vlm_rl.demo.files.export, vlm_rl.demo.panels.training"
    code = f"import sys, {modules}; print({{'gradio', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_orders_keep_ties_in_place(small):
    table = small.of(UrlState()).table
    nothing = np.zeros(4, dtype=bool)
    assert ordered(table, nothing, "growth").tolist() == []
    same = replace(table, length_CP=np.ones((2, 4)))
    assert ordered(same, ~nothing, "growth").tolist() == [0, 1, 2, 3]


def test_the_exported_page_shows_twenty_problems_with_the_one_at_hand(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=30)
    page = Elements(
        export(PageStates(Library([run.path])).of(UrlState.parse("at=toy-test-0028")), "page.html").decode()
    )
    assert page.values("class").count("example-page") == 20
    assert "toy-test-0028" in page.text and "20 of 30 problems" in page.text and "Click" not in page.text
