"""The report: right numbers, nothing from outside, hostile text inert, and words where data is missing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.browser import cut_on_a_phone, open_page
from tests.helpers.example_run import build_run
from tests.helpers.hostile import HOSTILE, watched
from tests.helpers.pages import Page
from tests.helpers.rollout_rows import rollout_row
from vlm_rl.config import parse_config
from vlm_rl.errors import UserError
from vlm_rl.report.changes import changes_of
from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.report.charts.lines import MOST_DRAWN, Series, lines
from vlm_rl.report.charts.points import Interval, Points, forest
from vlm_rl.report.charts.ridges import Ridge, ridges
from vlm_rl.report.charts.versus import versus
from vlm_rl.report.controls import control_sentences
from vlm_rl.report.examples import ProblemExample, SampleAnswer, choose, example_html, side_by_side
from vlm_rl.report.html import data_uri, environment, split_response
from vlm_rl.report.readme_figure import write_readme_figure
from vlm_rl.report.run_curves import RunCurves, score_of
from vlm_rl.report.run_report import write_report
from vlm_rl.report.vega import still, svg
from vlm_rl.run.difficulty import by_difficulty
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.rollout_row import RolloutRow
from vlm_rl.stats import estimate, running_mean, score_interval, smooth

SECTIONS = [
    *(
        "Accuracy and length",
        "Change",
        "Reward",
        "Length",
        "Gradient mass",
        "Difficulty",
        "Updates",
        "Stability",
        "Time",
        "Examples",
        "Every metric",
    ),
    "Configuration",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return build_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(run) -> Page:
    return Page(write_report([run], run.path / "report.html"))


def test_the_page_is_self_contained(page):
    assert all(address.startswith(("#", "data:image/")) for address in page.addresses)
    assert not set(page.tags) & {"link", "iframe", "object", "form", "base"}
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.source)[0]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 3  # the bundle, the loader and the button, no other
    assert "script-src 'unsafe" not in policy and "unsafe-eval" not in policy


def test_the_headline_tells_the_evaluations_numbers(run, page):
    first, last = (e.summary["accuracy"] for e in (run.evals()[0], run.evals()[-1]))
    assert f"LUSPO: {100 * first:.1f} % → {100 * last:.1f} % on toy-test" in page.text
    for title in [*SECTIONS, "Part: accuracy", "Part: format", "Part: overlong", "Clip fraction", "Entropy"]:
        assert title in page.text
    assert "CONTAMINATED" not in page.text and "Controls" not in page.text


@pytest.mark.slow
def test_the_page_opens_in_both_themes_without_a_request(run, page, browser):
    address = (run.path / "report.html").as_uri()
    colors = {}
    for scheme in ("light", "dark"):
        with open_page(address, scheme=scheme, browser=browser) as visit:
            assert visit.requests == [address] and visit.failures == []
            assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert visit.page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            visit.page.evaluate("chartsDrawn")
            assert visit.page.evaluate(
                "[...document.querySelectorAll('.chart:not(.fold .chart)')].every(c => c.querySelector('svg path'))"
            )
            label = "document.querySelector('.chart svg text').getAttribute('fill')"
            colors[scheme] = visit.page.evaluate(f"[getComputedStyle(document.body).color, {label}]")
    assert colors["light"][0] != colors["dark"][0] and colors["light"][1] != colors["dark"][1]


@pytest.mark.slow
def test_the_tools_of_a_chart(run, page, browser, tmp_path):
    """The values as CSV, the picture, a logarithmic axis, the slider of all running means, and folded charts."""
    metrics = RunCurves(run)
    steps, reward = metrics.metric("reward")
    with open_page((run.path / "report.html").as_uri(), browser=browser) as visit:
        visit.page.evaluate("chartsDrawn")
        chart = visit.page.locator("#reward .chart").first
        for half in (None, 4):
            if half is not None:
                visit.page.locator(".smoothing input").fill(str(half))
            chart.hover()
            with visit.page.expect_download() as download:
                chart.get_by_role("button", name="CSV").click()
            head, *rows = download.value.path().read_text().splitlines()
            assert head == '"series","step","y","mean"' and download.value.suggested_filename.endswith(".csv")
            values = np.array([[float(value) for value in row.split(",")[1:]] for row in rows])
            mean = smooth(reward) if half is None else running_mean(reward, 2 * half + 1)
            np.testing.assert_allclose(values, np.c_[steps, reward, mean], rtol=1e-5)
        with visit.page.expect_download() as download:
            chart.get_by_role("button", name="PNG").click()
        with Image.open(download.value.path()) as picture:
            assert picture.width > 1000 and len(picture.getcolors(10**6)) > 10
        labels = "[...document.querySelectorAll('#length .chart svg')][0].textContent"
        before = visit.page.evaluate(labels)
        visit.page.locator("#length .chart").first.get_by_role("button", name="log").click()
        visit.page.wait_for_function(f"{labels} !== {json.dumps(before)}")
        fold = visit.page.locator(".fold").first
        assert fold.locator("svg").count() == 0
        fold.locator("summary").click()
        fold.locator("svg").first.wait_for()
        names = {name for record in run.metrics() for name in record} - {"step", "attempt"}
        shown = page.source[page.source.index('id="every-metric"') :]
        assert all(name in shown for name in names)
        assert visit.failures == []


@pytest.mark.slow
def test_a_long_curve_is_drawn_by_its_extremes_and_keeps_its_running_means(tmp_path, browser):
    rng = np.random.default_rng(0)
    reward = 5 + np.cumsum(rng.normal(size=4000)) / 20
    reward[[1234, 3210]] = -40, 60
    run = build_run(tmp_path / "run", steps=2)
    records = [json.dumps({"step": step, "attempt": 1, "reward": value}) for step, value in enumerate(reward, 1)]
    (run.path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    address = write_report([run], run.path / "report.html").as_uri()
    with open_page(address, browser=browser) as visit:
        visit.page.evaluate("chartsDrawn")
        chart = visit.page.locator("#reward .chart").first
        for window in (None, 1, 9, 61):
            if window is not None:
                visit.page.locator(".smoothing input").fill(str(window // 2))
            chart.hover()
            with visit.page.expect_download() as download:
                chart.get_by_role("button", name="CSV").click()
            rows = download.value.path().read_text().splitlines()[1:]
            step, y, mean = np.array([[float(value) for value in row.split(",")[1:]] for row in rows]).T
            place = step.astype(int) - 1
            assert len(rows) <= MOST_DRAWN and {0, 1234, 3210, 3999} <= set(place)
            np.testing.assert_allclose(y, reward[place], rtol=1e-5)
            exact = (smooth(reward) if window is None else running_mean(reward, window))[place]
            # a window's ends fall between drawn values: within a part of 8, beside the two jumps of some 50
            slack = np.where(np.abs(place[:, None] - [1234, 3210]).min(1) <= (window or 0) // 2 + 8, 50 * 16, 16)
            slack = 1e-4 if window in (None, 1) else slack / window
            assert (np.abs(mean - exact) <= slack).all()
        assert visit.failures == []


def test_a_change_is_that_of_the_same_problems(run, page):
    """The first sentence has the mean of the differences by problem, and the interval of their t distribution."""
    first, last = run.evals()[0], run.evals()[-1]
    right = [{row["problem_id"]: row["verdict"] == "correct" for row in e.rows().to_pylist()} for e in (first, last)]
    difference = estimate([float(right[1][name]) - float(right[0][name]) for name in right[0]], bounds=(-1, 1))
    ends = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
    assert difference.low > 0 and f"rises by {100 * difference.mean:.1f} points (95 % interval {ends}; " in page.text
    tokens = [{row["problem_id"]: row["length"] for row in e.rows().to_pylist()} for e in (first, last)]
    longer = estimate([tokens[1][name] - tokens[0][name] for name in tokens[0]])
    assert f"({longer.mean:+.1f}, 95 % interval {longer.low:+.1f} to {longer.high:+.1f})." in page.text


def test_a_change_names_the_part_of_the_reward_that_judged(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0, 2))
    rows = run.evals()[0].rows().to_pylist()
    for step in (0, 2):
        run.write_eval("boxes", step, rows, {"rule": "reward.iou"})
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "boxes, step 2 against step 0: accuracy, judged by reward.iou, " in page.text
    assert "toy-test, step 2 against step 0: accuracy " in page.text


def test_changes_over_different_steps_are_told_apart(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0, 2))
    title = "Change of accuracy, step 2 against step 0"
    assert title in Page(write_report([run], tmp_path / "report.html")).charts
    first = run.evals()[0].rows().to_pylist()
    for step in (0, 1):
        run.write_eval("sooner", step, first, {})
    chart = Page(write_report([run], tmp_path / "report.html")).charts["Change of accuracy"]
    assert {"toy-test: step 2 against step 0", "sooner: step 1 against step 0"} <= texts(chart)


def test_a_hollow_dot_is_explained_where_all_differences_are_equal(tmp_path):
    """The interval of differences that are all the same does not exist; it does not hold 0."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0,))
    rows = run.evals()[0].rows().to_pylist()
    for step, tokens in ((0, 9), (2, 35)):
        run.write_eval("alike", step, [{**row, "length": tokens} for row in rows], {})
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "Responses have 35 tokens on average, against 9." in page.text
    assert "hollow dot: the interval holds 0, or there is none, where all differences are equal" in page.text


def texts(value: Any) -> set[str]:
    """Return all texts in a chart."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(texts, inner))


_RAGGED_ROWS = """
() => [...document.querySelectorAll('.grid:not(.fold .grid)')].flatMap(grid => {
  const outer = grid.getBoundingClientRect(), rows = {};
  for (const child of grid.children) {
    const box = child.getBoundingClientRect();
    (rows[Math.round(box.top)] ??= []).push(box);
  }
  return Object.values(rows)
    .filter(row => [row.at(-1).right - outer.right, ...row.map(box => box.bottom - row[0].bottom)]
      .some(gap => Math.abs(gap) > 1))
    .map(row => grid.closest('section').innerText.slice(0, 40));
})
"""


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 3])
def test_no_row_of_charts_is_half_empty(run, tmp_path, browser, runs):
    """`run` has no truncated response, so the length section has one chart and a sentence beside its wide one.

    The folds of "Every metric" are lists of small charts, whose last row may end early.
    """
    others = [build_run(tmp_path / f"run-{i}", steps=6, seed=i) for i in range(1, runs)]
    out = write_report([run, *others], tmp_path / "report.html")
    for width in (1280, 1920, 700):
        with open_page(out.as_uri(), width=width, browser=browser) as visit:
            assert visit.page.locator(".grid").count() >= 3
            assert visit.page.evaluate(_RAGGED_ROWS) == []


@pytest.mark.slow
def test_on_a_phone_nothing_is_cut_and_no_labels_collide(run, tmp_path, browser):
    other = build_run(tmp_path / "run", steps=30, seed=1)
    out = write_report([run, other], tmp_path / "report.html")
    with open_page(out.as_uri(), width=390, height=844, browser=browser) as visit:
        visit.page.wait_for_selector("#updates .chart svg")
        assert cut_on_a_phone(visit.page) == []


_COVERED = """
() => [...document.querySelectorAll('.chart')].filter(chart => {
    const boxes = (names) => [...chart.querySelectorAll(names)].map((box) => box.getBoundingClientRect());
    return boxes('.tools button').some((a) => boxes('svg text').some((b) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
}).map(chart => chart.getAttribute('aria-label'))
"""


@pytest.mark.slow
def test_on_a_phone_the_buttons_of_a_chart_cover_none_of_its_words(run, tmp_path, browser):
    out = write_report([run], tmp_path / "report.html")
    with open_page(out.as_uri(), width=390, height=844, touch=True, browser=browser) as visit:
        visit.page.wait_for_selector("#updates .chart svg")
        assert visit.page.locator(".tools button").count() > 5
        assert visit.page.evaluate(_COVERED) == []


@pytest.mark.slow
def test_the_page_says_how_to_open_its_runs_in_the_demo(tmp_path, browser):
    runs = [build_run(tmp_path / name, steps=1, num_problems=2) for name in ("run's own", "b")]
    out = write_report(runs, tmp_path / "report.html")
    with open_page(out.as_uri(), browser=browser) as visit:
        command = visit.page.inner_text(".hint code")
        assert shlex.split(command) == ["vlm-rl", "demo", *(str(run.path) for run in runs)]
        visit.page.click("[data-copy]")
        visit.page.get_by_role("button", name="copied").wait_for()
        assert visit.page.evaluate("getSelection().toString()") == command and visit.failures == []


def test_the_time_of_a_phase_is_its_mean_over_all_steps(tmp_path):
    run = build_run(tmp_path / "run", steps=0, eval_steps=())
    for step in range(1, 5):
        run.append_metrics(step, 1, {"step_time": 2.0, "timing/update": 2.0, "speed/update_tokens": 1000.0 * step})
    run.append_metrics(4, 1, {"timing/save": 6.0})  # one save in four steps: 1.5 s a step
    page = Page(write_report([run], tmp_path / "report.html"))
    table = page.source[page.source.index("<h2>Time") :]
    assert re.findall(r'<td>(\w+)</td><td class="number">([^<]+)<.*?width:([\d.]+)%', table, re.DOTALL) == [
        ("update", "2.0 s", "100.0"),
        ("save", "1.5 s", "75.0"),
    ]
    assert "2,500 in updates." in table


def test_hostile_text_is_shown_and_does_nothing(tmp_path, browser):
    run = build_run(tmp_path / "<b>run", steps=2, num_problems=2, response=HOSTILE, question=HOSTILE)
    run.write_rollouts(1, 1, [rollout_row(1, text=HOSTILE)])
    out = write_report([run], tmp_path / "report.html")
    page = Page(out)
    assert "form" not in page.tags and page.tags.count("input") == 1  # the slider
    assert page.tags.count("script") == len(page.charts) + 3
    assert all(address.startswith(("#", "data:image/")) for address in page.addresses)
    with watched(out.as_uri(), browser=browser, foreign="form:not(.vega-bindings), .answer img") as visit:
        assert "<script>window.pwned=1</script>" in visit.page.inner_text(".answer >> nth=0")
        assert visit.page.locator("section").count() == len(SECTIONS)


def test_what_was_not_logged_is_said_and_not_drawn(tmp_path):
    run = build_run(tmp_path / "run", steps=3, metrics=False, eval_steps=())
    page = Page(write_report([run], tmp_path / "report.html"))
    for name in ("reward", "rewards/format/mean", "entropy", "rollout/logprob_gap", "grad_norm", "steps/skipped"):
        assert f"<code>{name}</code>" in page.source
    # reward, 3 parts, gradient mass, clip, entropy, gap, gradient norm, refused steps, spikes, time
    assert page.text.count("not logged by this run") == 12
    # accuracy, mean length, its range and its split: they need the rollouts only
    assert len(page.charts) == 4
    assert "There are no two evaluations" in page.text and "No evaluation with rows is stored" in page.text
    other = build_run(tmp_path / "other", steps=3, metrics=False, eval_steps=())
    page = Page(write_report([run, other], tmp_path / "both.html"))
    assert page.text.count("not logged by these runs") == 12 and "this run" not in page.text


def test_functions_and_the_judge_have_their_curves_by_name(tmp_path):
    """A function that is a part of the reward, and a judge whose value is only logged."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=())
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {"rewards/short/mean": 0.25 + number, "rewards/short/std": 0.1, "length_pull/short": -1.0}
        line |= {"rewards/judge/mean": 0.75 + number, "rewards/judge/undecided_rate": 0.0}
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report([run], tmp_path / "report.html"))
    titles = re.findall(r"(?:Part|Value): \w+", page.text)
    parts = [f"Part: {name}" for name in ("accuracy", "format", "overlong", "short")]
    assert list(dict.fromkeys(titles)) == [*parts, "Value: judge"]
    assert {"Part: short", "Value: judge"} <= page.charts.keys()


def test_an_empty_run_gives_a_page_without_a_plot(tmp_path):
    run = build_run(tmp_path / "run", steps=0, eval_steps=())
    page = Page(write_report([run], tmp_path / "report.html"))
    assert page.charts == {} and "0 steps" in page.text


def test_a_run_in_its_first_step_is_no_evaluation(tmp_path):
    run = build_run(tmp_path / "run", steps=1, metrics=False, eval_steps=(0,))
    shutil.rmtree(run.path / "rollouts")
    evaluated = Page(write_report([run], tmp_path / "report.html")).text
    assert "this folder holds no training" in evaluated and "LUSPO: 0 steps" not in evaluated
    (run.path / "log.txt").touch()
    started = Page(write_report([run], tmp_path / "report.html")).text
    assert "this folder holds no training" not in started and "LUSPO: 0 steps" in started


def test_a_single_step_is_no_plural(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    text = Page(write_report([run], tmp_path / "report.html")).text
    assert "LUSPO: 1 step" in text and "training step, " in text
    assert "1 steps" not in text and "training steps" not in text and "first and last" not in text
    run = build_run(tmp_path / "longer", steps=2, eval_steps=())
    assert "first and last step" in Page(write_report([run], tmp_path / "report.html")).text


def test_an_evaluation_without_rows_has_no_score(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0, 1))
    before = Page(write_report([run], tmp_path / "report.html"))
    headline = re.findall("<h1>.*</h1>", before.source)
    run.write_eval("toy-test", 2, [], {})
    run.write_eval("empty", 2, [], {})
    page = Page(write_report([run], tmp_path / "report.html"))
    assert re.findall("<h1>.*</h1>", page.source) == headline and not re.search(r"\bnan\b", page.text)


def test_a_metric_that_is_always_zero_is_a_sentence(run, page):
    assert "Share cut at the token limit: 0 at every step." in page.text


def test_two_runs_share_a_page_and_contamination_is_stamped(run, tmp_path):
    other = build_run(tmp_path / "run", steps=6, seed=1, algorithm="ba")
    other.stamp_contaminated(["MathVision"])
    page = Page(write_report([run, other], tmp_path / "report.html"))
    assert "2 runs side by side: LUSPO, BA" in page.text
    assert len(page.ids) == len(set(page.ids))
    assert "CONTAMINATED" in page.text and "MathVision" in page.text


def test_mistakes_are_the_users(tmp_path, run):
    with pytest.raises(UserError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(UserError, match="no run directory"):
        write_report([RunDirectory(tmp_path / "none")], tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report"):
        write_report([run], tmp_path / "file" / "r.html")


# -- numbers ------------------------------------------------------------------------------------


def test_curves_count_by_hand(tmp_path):
    run = build_run(tmp_path / "run", steps=0, eval_steps=())
    lengths = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
    rows = [
        rollout_row(
            1, length=n, verdict="correct" if n <= 20 else "timeout", stop_reason="length" if n > 90 else "stop"
        )
        for n in lengths
    ]
    run.write_rollouts(1, 1, rows)
    run.write_rollouts(2, 1, [rollout_row(2, length=8, verdict="wrong")])
    run.write_rollouts(3, 1, [])
    r = RunCurves(run).rollouts
    # 11 evenly spaced values: p10 and p90 are the second and the tenth
    np.testing.assert_allclose(r.steps, [1, 2, 3])
    np.testing.assert_allclose(r.mean, [60, 8, np.nan])
    np.testing.assert_allclose(r.p10, [20, 8, np.nan])
    np.testing.assert_allclose(r.p90, [100, 8, np.nan])
    np.testing.assert_allclose(r.mean_correct, [15, np.nan, np.nan])
    np.testing.assert_allclose(r.mean_wrong, [70, 8, np.nan])  # 30 .. 110
    np.testing.assert_allclose(r.truncated, [2 / 11, 0, np.nan])
    np.testing.assert_allclose(r.accuracy, [2 / 11, 0, np.nan])


def test_metrics_as_curves(tmp_path):
    run = build_run(tmp_path / "run", steps=0, eval_steps=())
    run.append_metrics(1, 1, {"a": 1.0, "timing/x": 0.1})
    run.append_metrics(2, 1, {"b": 5.0, "a": float("nan")})
    curves = RunCurves(run)
    np.testing.assert_allclose(curves.metric("a"), [[1, 2], [1, np.nan]])
    np.testing.assert_allclose(curves.metric("b"), [[1, 2], [np.nan, 5]])
    assert curves.metric("c")[0].size == 0
    assert curves.last("a") == 1.0 and np.isnan(curves.last("c"))
    assert curves.metric_names("timing/") == ["timing/x"]


def test_a_score_is_counted_from_the_records(run):
    result = run.evals()[-1]
    other = {"accuracy": 0.987, "interval": [0.9, 1.0], "num_problems": 3}  # of different records
    score = score_of(replace(result, summary=other))
    correct = result.rows()["verdict"].to_numpy() == "correct"  # one response to a problem
    assert (score.accuracy, (score.low, score.high)) == (correct.mean(), score_interval(correct))
    assert score.mean_length == np.mean(result.rows()["length"].to_numpy())
    assert score.num_problems == 24 and score.truncated == 0.0


def test_a_score_is_over_clusters_where_the_file_has_them(run, tmp_path):
    result = run.evals()[-1]
    table = pq.read_table(result.path)
    correct = table["verdict"].to_numpy() == "correct"  # one response to each of 24 problems
    older = table.drop_columns("cluster")
    of_six = older.append_column("cluster", pa.array([f"seed {place // 6}" for place in range(24)]))
    for rows, scores in ((table, correct), (older, correct), (of_six, correct.reshape(4, 6).mean(axis=1))):
        pq.write_table(rows, tmp_path / "step-000001.parquet")
        score = score_of(replace(result, path=tmp_path / "step-000001.parquet"))
        assert (score.low, score.high) == score_interval(scores)


def test_a_change_is_over_clusters_where_a_file_has_them(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0, 2))
    path = run.evals()[-1].path
    rows = pq.read_table(path)
    older = rows.drop_columns("cluster")
    of_six = older.append_column("cluster", pa.array([f"seed {place // 6}" for place in range(24)]))
    for table, num_clusters in ((rows, 24), (older, 24), (of_six, 4)):
        pq.write_table(table, path)
        (change,) = changes_of([RunCurves(run)])
        assert (change.paired.n, change.paired.num_clusters) == (24, num_clusters)


def test_a_chart_needs_a_finite_value():
    steps = np.array([1.0, 2.0])
    assert lines([Series("a", steps, steps * np.nan)]) is None
    assert lines([]) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_each_step_of_a_short_run_is_named_once(count):
    """Vega also places a tick between two steps of a few, and a whole number of 1.5 would be a second 2."""
    steps = np.arange(1.0, count + 1)
    spec = lines([Series("a", steps, steps)])
    assert spec is not None
    drawn = svg(still(spec, width=400))
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", drawn.partition("role-axis-label")[2].partition("</g>")[0])
    assert labels == [f"{step:.0f}" for step in steps]


def test_long_names_lose_their_middle_and_not_their_end():
    """Runs are named by what they share first: cut at its end, every name would be the same."""
    names = [f"qwen2.5-vl-7b-geo3k-grpo-lr1e-6-kl0.001-n8-{seed} · step {step}" for seed in "ab" for step in (0, 200)]
    values = np.arange(30.0)
    charts = {
        "forest": forest([Interval(name, 1.0, 0.0, 2.0) for name in names], x_title=""),
        "ridges": ridges([Ridge(name, values, PALETTE[0]) for name in names]),
    }
    for kind, spec in charts.items():
        assert spec is not None
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg(still(spec, width=500)))
        shown = [text for text in texts if "step" in text]
        ends = [re.escape(name[-len("a · step 0") :]) for name in names]
        assert len(shown) == len(names), kind
        assert all(re.fullmatch(rf"qwen.*…?.*{end}", text) for text, end in zip(shown, ends, strict=True)), shown
    points = [Points(names[0], values, values, PALETTE[0])]
    plane = versus(points, x_title=names[0], y_title=names[1], shapes=["circle"])
    assert plane is not None
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg(still(plane, width=500)))
    assert any(text.endswith("step 0") for text in texts) and any(text.endswith("step 200") for text in texts)


# -- examples and controls ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a b</think><answer>4</answer>", ("a b", "<answer>4</answer>")),
        ("a b</think>4", ("a b", "4")),  # a prefilled <think>
        ("<think>never ends", ("never ends", "")),
        ("just 4", (None, "just 4")),
        ("<think>x</think>y</think>z", ("x</think>y", "z")),
        ("", (None, "")),
    ],
)
def test_a_response_splits_into_reasoning_and_answer(response, expected):
    assert split_response(response) == expected


def _example(name: str, before: bool, after: bool, growth: int = 1) -> ProblemExample:
    def sample(correct: bool, length: int) -> SampleAnswer:
        return SampleAnswer(None, "", None, "correct" if correct else "wrong", "", length, False, int(correct), 1)

    return ProblemExample(name, "", "", "", (), (sample(before, 10), sample(after, 10 + growth)))


def test_the_choice_shows_failures_too():
    gained = [_example(f"m{i}", False, True, growth=i) for i in range(9)]
    others = [_example("lost", True, False), _example("wrong", False, False), _example("right", True, True)]
    chosen = [example.problem_id for example in choose(gained + others, 6)]
    assert chosen == ["m8", "m7", "m6", "lost", "wrong", "right"]  # longest changes first
    assert [e.problem_id for e in choose(gained, 4)] == ["m8", "m7", "m6", "m5"]
    assert choose([], 6) == []


def test_side_by_side_joins_by_problem_and_counts_samples(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=(0,), num_problems=3)
    rows = run.evals()[0].rows().to_pylist()
    again = [r | {"sample_index": 1, "verdict": "correct"} for r in rows[:2]]
    run.write_eval("toy-test", 1, again + [r | {"verdict": "wrong"} for r in rows[:2]], {})
    examples = side_by_side(run.evals())
    assert [e.problem_id for e in examples] == [r["problem_id"] for r in rows[:2]]
    after = examples[0].samples[1]
    assert (after.verdict, after.num_correct, after.num_samples) == ("wrong", 1, 2)


def test_a_problem_without_images_is_told_from_one_whose_images_were_not_stored():
    example = _example("m", False, True)
    for images, is_missing in ((None, True), ((), False)):
        card = example_html(replace(example, images=images), ["before", "after"])
        assert ("no images stored" in card) == is_missing and "pictures" not in card


def test_a_template_makes_markup_inert_and_tricks_visible():
    template = environment("vlm_rl.report").from_string("{{ text }}")
    assert template.render(text='<a href="x">\'&') == "&lt;a href=&#34;x&#34;&gt;&#39;&amp;"
    assert template.render(text="a\u202eb\x00\n\tc") == "a\ufffdb\ufffd\n\tc"


def test_an_image_that_does_not_open_is_left_out():
    assert data_uri(b"<svg onload=alert(1)>") is None
    assert data_uri(b"") is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"blank_images": 0.1, "shuffled_images": 0.16, "best_constant": 0.12}, ["at most 16.0 %"]),
        ({"trained": 0.9, "blank_images": 0.16, "best_constant": 0.12}, ["its 90.0 % comes from the picture"]),
        ({"trained": 0.13, "blank_images": 0.1, "best_constant": 0.12}, ["shows no use of the picture"]),
        ({"trained": 0.13, "blank_images": 0.4, "best_constant": 0.12}, ["shows no use of the picture"]),
        ({"blank_images": 0.1, "shuffled_images": 0.18, "best_constant": 0.12}, ["does not come from the picture"]),
        ({"trained": 0.98, "forced_scan": 0.96}, ["did not teach it to see"]),
        ({"trained": 0.98, "forced_scan": 0.6}, ["learned on top"]),
        ({"trained": 0.98, "forced_scan": 0.6, "untrained": 0.1}, ["learned on top"]),
        ({"trained": 0.98, "forced_scan": 0.12, "untrained": 0.1}, ["more than these words"]),
        ({"trained": 0.3, "forced_scan": 0.6, "untrained": 0.3}, ["did not raise the accuracy"]),
        (
            {"trained": 0.1, "forced_scan": 0.6, "untrained": 0.3},
            ["lowered the accuracy: 30.0 % before, 10.0 % after"],
        ),
        ({"trained": 0.5, "forced_scan": 0.6, "untrained": 0.1}, ["reaches only 50.0 %"]),
        ({"blank_images": 0.1}, []),
        ({}, []),
    ],
)
def test_controls_say_what_they_allow(values, said):
    sentences = control_sentences(values)
    assert len(sentences) == len(said)
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True))


def test_controls_are_on_the_page(tmp_path):
    run = build_run(tmp_path / "run", steps=2)
    run.write_controls({"trained": 0.98, "blank_images": 0.125, "best_constant": 0.12, "forced_scan": 0.96})
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "12.5 %" in page.text and "comes from the picture" in page.text and "did not teach" in page.text


@pytest.mark.parametrize("value", [None, "0.98", True, -0.1, 1.1, float("nan"), [0.98]])
def test_a_control_that_is_no_accuracy_is_named(tmp_path, value):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    run.write_controls({"trained": value, "note": "of the authors"})
    with pytest.raises(UserError, match=rf"controls\.json: trained is {re.escape(repr(value))} .* in \[0, 1\]"):
        write_report([run], tmp_path / "report.html")


def points(chart: dict[str, Any]) -> dict[str, list[float]]:
    """Return the values of each series of a chart."""
    found: dict[str, list[float]] = {}
    for row in chart["datasets"]["rows"]:
        found.setdefault(row["series"], []).append(row["y"])
    return found


def test_hadw_shows_its_belief_and_its_weights(tmp_path):
    """A run without HA-DW has no such section, and no curves in it beside one that has."""
    plain = build_run(tmp_path / "plain", steps=2, eval_steps=())
    assert "Difficulty" not in Page(write_report([plain], tmp_path / "plain.html")).text
    tree = plain.config().model_dump(mode="json") | {"out": str(tmp_path / "weighted")}
    tree["algorithm"]["hadw"]["enabled"] = True
    weighted = RunDirectory(tmp_path / "weighted").create(parse_config(tree))
    weighted.append_metrics(1, 1, {"rewards/accuracy/mean": 0.25, "hadw/belief": 0.25})
    weights = {"hadw/weight_hard": 1.5, "hadw/weight_easy": 1.1}
    weighted.append_metrics(2, 1, {"rewards/accuracy/mean": 0.5, "hadw/belief": 0.3125, **weights})
    charts = Page(write_report([plain, weighted], tmp_path / "both.html")).charts
    belief, factors = (
        next(c for title, c in charts.items() if start in title) for start in ("Belief", "Mean weight")
    )
    assert points(belief) == {"weighted: belief": [0.25, 0.3125], "weighted: accuracy": [0.25, 0.5]}
    assert points(factors) == {"weighted: hard": [1.5], "weighted: easy": [1.1]}


def test_accuracy_by_difficulty_is_of_problems_sorted_at_first(tmp_path):
    """Two samples of each of four problems: right 0, 1, 2 and 2 times at first; the first evaluation is not drawn."""
    run = build_run(tmp_path / "run", steps=2, eval_steps=())
    row = build_run(tmp_path / "other", steps=1).evals()[0].rows().to_pylist()[0]
    for step, counts in ((0, "0122"), (1, "1121"), (2, "0220")):
        rows = [
            row | {"problem_id": f"p{p}", "sample_index": s, "verdict": "correct" if s < int(count) else "wrong"}
            for p, count in enumerate(counts)
            for s in range(2)
        ]
        run.write_eval("set", step, rows, {"accuracy": sum(map(int, counts)) / 8})
    first, second, _ = run.evals("set")
    found = by_difficulty(first, second)
    assert {kind: scores.accuracy for kind, scores in found.items()} == {
        "never": 0.5,
        "sometimes": 0.5,
        "always": 0.75,
    }
    (chart,) = (
        c for title, c in Page(write_report([run], tmp_path / "p.html")).charts.items() if "difficulty" in title
    )
    assert points(chart) == {
        "never right at first (1)": [0.5, 0.0],
        "sometimes right at first (1)": [0.5, 1.0],
        "always right at first (2)": [0.75, 0.5],
    }


def test_tokens_are_coloured_by_what_the_image_changes(tmp_path):
    """Shades are 1 - e^(-2 S) in ninths: of S = .5, 63 %, the sixth. Neighbours without one are one text."""
    run = build_run(tmp_path / "run", steps=2)
    values = {f"visual/dependence/{who}/tenth_{n}": n / 10 for who in ("correct", "wrong") for n in range(1, 11)}
    run.append_metrics(2, 1, values)
    row = {**run.rollouts(2).to_pylist()[0], "tokens": ["<b>", " a", " b"], "visual_dependence": [0.5, 0.0, 0.01]}
    run.write_rollouts(2, 1, [RolloutRow(**row)])
    page = write_report([run], tmp_path / "page.html").read_text()
    assert '<span class="s6" title="S 0.50">&lt;b&gt;</span> a b</div>' in page
    charts = Page(tmp_path / "page.html").charts
    assert points(charts["Mean S by tenth of the response"])["correct, last steps"][-1] == 1.0
    assert 'id="looking"' not in write_report([build_run(tmp_path / "no", steps=1)], tmp_path / "no.html").read_text()


def test_what_says_that_it_looks_is_compared_with_the_rest(tmp_path):
    """Of one response 2 of 4 tokens are in "Let me check.": .3 against .1; of the other, 1 of 2: .5 against .1."""
    run = build_run(tmp_path / "run", steps=1)
    row = run.rollouts(1).to_pylist()[0]
    looks = (
        (["It is 3.", " Let me", " check.", " Yes."], [0.0, 0.2, 0.4, 0.2]),
        ([" Wait,", "\n It is 3."], [0.5, 0.1]),
    )
    rows = [
        RolloutRow(**{**row, "prompt_id": f"p{n}", "tokens": tokens, "visual_dependence": s})
        for n, (tokens, s) in enumerate(looks)
    ]
    run.write_rollouts(1, 1, rows)
    page = write_report([run], tmp_path / "page.html").read_text()
    (line,) = re.findall(r"<tr>(?=<td[^>]*>looks again).*?</tr>", page)
    # The differences .2 and .4: mean .3, standard error .1, t_.975 with one degree of freedom 12.706.
    said = ["looks again", "2", "0.400", "0.100", "+0.300 (-0.971 to +1.571)"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", line) == said


def test_stability_names_drop_and_spikes(run, tmp_path):
    """Evaluations that end below the best, a norm of more than ten medians, and a loss that leaps."""
    rows = run.evals()[0].rows().to_pylist()[:20]
    run = build_run(tmp_path / "run", eval_steps=())
    for record in run.metrics():
        step = int(record["step"])
        values = {"grad_norm": 900.0 if step == 31 else 1.0 + step % 3, "loss": 5.0 if step == 33 else step % 5 / 10}
        run.append_metrics(step, 1, values)
    for step, right in ((10, 4), (20, 16), (30, 12)):
        verdicts = [row | {"verdict": "correct" if k < right else "wrong"} for k, row in enumerate(rows)]
        run.write_eval("toy-test", step, verdicts, {"accuracy": right / 20})
    curves = RunCurves(run)
    assert (curves.spikes.norm_steps, curves.spikes.loss_steps) == ([31], [33])
    text = write_report([run], tmp_path / "page.html").read_text()
    (section,) = re.findall(r'<section id="stability">.*?</section>', text, re.S)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section)
    # sqrt((.6^2 + .2^2) / 4) = .316
    assert cells == ["run", "toy-test", "3", "80.0", "60.0", "20.0", "31.6", "run", "1 (step 31)", "1 (step 33)"]


def figure_of(run: RunDirectory) -> np.ndarray:
    """Return the pixels of the README's figure, of shape (height, width, 3)."""
    image = Image.open(write_readme_figure(run, run.path / "figure.png")).convert("RGB")
    return np.asarray(image).astype(int)


def test_the_readme_figure_shows_something_everywhere_and_carries_the_stamp(tmp_path):
    run = build_run(tmp_path / "run", steps=2)
    pixels = figure_of(run)
    assert pixels.shape == (960, 2400, 3)
    thirds = [pixels[300:, 0:950], pixels[300:, 950:1500], pixels[:, 1500:]]
    assert all((part != 255).any(axis=2).mean() > 0.01 for part in thirds)
    assert (pixels[:15] == 255).all() and (pixels[:, -15:] == 255).all()  # nothing is cut at the edges
    run.stamp_contaminated(["MathVision"])
    stamped = figure_of(run)
    rows, columns = np.nonzero((pixels != stamped).any(axis=2))
    assert rows.min() > 100 and rows.max() < 160 and columns.min() < 200  # the line below the headline
    red = (stamped[..., 0] > 150) & (stamped[..., 1] < 120)
    assert red[100:160].sum() > 200


def test_the_readme_figure_counts_the_steps_trained(tmp_path, monkeypatch):
    run = build_run(tmp_path / "run", steps=4, eval_steps=(0, 4))
    run.append_metrics(5, 1, {"reward": 1.0})  # whose rollouts are not stored
    monkeypatch.setattr("vlm_rl.report.vega.png_of_svg", str.encode)
    assert "5 steps of reinforcement" in write_readme_figure(run, tmp_path / "figure.svg").read_text()


def test_the_readme_figure_needs_something_to_compare(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0,))
    with pytest.raises(UserError, match="two evaluations"):
        write_readme_figure(run, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


def test_accuracy_and_length_are_first_and_drawn_from_every_logged_step(tmp_path):
    """Responses of steps 1 and 3 are stored, metrics of all four; an accuracy part is worth 2 where it is right."""
    run = build_run(tmp_path / "run", steps=4, metrics=False, eval_steps=(0, 4))
    tree = run.config().model_dump(mode="json")
    tree["reward"] |= {"accuracy": 2.0}
    (run.path / "config.yaml").write_text(json.dumps(tree))
    for step in (2, 4):
        (run.path / f"rollouts/step-{step:06d}.parquet").unlink()
    for step in range(1, 5):
        logged = {"rewards/accuracy/mean": 0.2 * step, "completions/mean_length": 10.0 * step}
        logged |= {"length/p10": 5.0 * step, "length/p90": 20.0 * step}
        run.append_metrics(step, 1, logged)
    page = Page(write_report([run], tmp_path / "report.html"))
    assert page.text.index("Accuracy and length") < page.text.index("Mean reward of a response")
    accuracy, length = (page.charts[title] for title in ("Share of correct answers", "Length of a response, mean"))
    np.testing.assert_allclose(points(accuracy)["training responses"], [0.1, 0.2, 0.3, 0.4])
    assert points(length)["training responses"] == [10, 20, 30, 40]
    last = [row for row in length["datasets"]["rows"] if row["series"] == "toy-test"][-1]
    tokens = [row["length"] for row in run.evals()[-1].rows().to_pylist()]
    expected = estimate(tokens)
    assert last["y"] == pytest.approx(expected.mean, rel=1e-5)
    assert (last["low"], last["high"]) == pytest.approx((expected.low, expected.high), rel=1e-5)
    assert "95 % intervals" in page.text and "Change of length, step 4 against step 0" in page.charts
    spread = page.charts["Length of a response: mean, and p10 to p90"]["datasets"]["rows"]
    assert [(row["low"], row["high"]) for row in spread] == [(5 * step, 20 * step) for step in range(1, 5)]


def test_a_long_question_is_folded(tmp_path):
    run = build_run(tmp_path / "run", steps=1, num_problems=2, question="<image>\n" + "very long " * 80)
    source = write_report([run], tmp_path / "report.html").read_text()
    assert source.count("whole question") == 2
    short = build_run(tmp_path / "short", steps=1, num_problems=2)
    assert "whole question" not in write_report([short], tmp_path / "short.html").read_text()


@pytest.mark.parametrize(
    ("trained", "blank", "without", "said"),
    [
        (0.95, 0.10, 0.12, "its 95.0 % comes from looking closer"),
        (0.95, 0.10, 0.40, "part of its accuracy does not come from the tool"),
        (0.95, 0.40, 0.10, "part of its accuracy does not come from the tool"),
        (0.13, 0.10, 0.12, "no more than 5 points above the best constant guess"),
    ],
)
def test_the_controls_of_a_tool_are_said(trained: float, blank: float, without: float, said: str) -> None:
    values = {"trained": trained, "blank_crops": blank, "without_tool": without, "best_constant": 0.12}
    (sentence,) = control_sentences(values)
    assert said in sentence
    assert control_sentences(values | {"untrained": 0.1})[0] == sentence
