"""Every string that a run, a study or a prepared set can bring is shown on its page and runs nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.example_run import build_run
from tests.helpers.example_study import lively, lively_evals, study_tree, write_run, write_study
from tests.helpers.hostile import MARKUP, attack, attempt, hostile_run, watched
from tests.helpers.images import noise_png
from tests.helpers.prepared_sets import write_problems
from tests.helpers.rotation import todays
from vlm_rl.data_prep.report import write_report as write_set_report
from vlm_rl.report.run_report import write_report
from vlm_rl.study.run import run_study
from vlm_rl.study.runs import load_study
from vlm_rl.types import Problem

# What only a run's own text could have put on the page: charts bring a form, smoothing a slider.
FOREIGN_ELEMENTS = "img[onerror], form:not(.vega-bindings), input:not([type=range]), body script[src]"


def shown_text(browser: Any, page_file: Path, num_charts: int) -> str:
    """Open a page, see that nothing of it attacks, and return everything it shows, charts and tooltips included."""
    with watched(page_file.as_uri(), browser=browser, foreign=FOREIGN_ELEMENTS) as visit:
        if num_charts:
            visit.page.evaluate("chartsDrawn")
            assert visit.page.locator(".chart svg").count() >= num_charts
        visit.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        plot = visit.page.locator(".chart:has(.legend) svg").first
        tips = []
        if num_charts:
            for _ in range(2):  # a curve goes and comes back
                visit.page.locator(".legend button").first.click()
            plot.hover()
            visit.page.wait_for_selector(".chart-tip", timeout=10_000)
            tips.append(visit.page.inner_text(".chart-tip"))
        return visit.page.evaluate("document.title") + visit.page.inner_text("body") + "".join(tips)


def test_what_acts_on_a_page_is_seen(tmp_path: Path, browser: Any) -> None:
    """The check of all hostile pages, on one that does what these must not."""
    nobody = "http://127.0.0.1:9/"  # of this machine, where nobody listens
    form = '<form action="http://evil.example"></form>'
    scripts = ("window.pwned=1", "alert(1)", "throw Error('x')", f"fetch('{nobody}').catch(() => 0)")
    content = form + "".join(f"<script>{script}</script>" for script in scripts)
    (page := tmp_path / "page.html").write_text(f"<!doctype html><title>x</title><body>{content}", encoding="utf-8")
    with pytest.raises(AssertionError) as caught, watched(page.as_uri(), browser=browser, foreign=FOREIGN_ELEMENTS):
        pass
    found = caught.value.args[0]
    thrown = [failure for failure in found.pop("failures") if failure == "x"]
    assert thrown and found == {"dialogs": ["1"], "scripts": ["pwned"], "elements": [form], "requests": [nobody]}


@pytest.mark.slow
@pytest.mark.parametrize("markup", todays(MARKUP, days=2))
def test_markup_that_would_get_past_the_templates_does_nothing(markup: str, tmp_path: Path, browser: Any) -> None:
    """It acts where the browser is told to ignore the page's policy."""
    page = write_report([build_run(tmp_path / "run", steps=2)], tmp_path / "report.html")
    tried = partial(attempt, page.as_uri(), markup, browser=browser)
    assert (tried(), tried(without_policy=True)) == ("refused", MARKUP[markup])


@pytest.mark.slow
def test_a_report_of_hostile_runs(tmp_path: Path, browser: Any) -> None:
    runs = [hostile_run(tmp_path / attack(f"run{i}"), steps=(0, 4), seed=i) for i in range(2)]
    single = shown_text(browser, write_report(runs[:1], tmp_path / "one.html"), 5)
    fields = "model benchmark contaminated problem question gold response reasoning extracted reason category"
    missing = [field for field in fields.split() if attack(field) not in single]
    assert missing == []
    both = shown_text(browser, write_report(runs, tmp_path / "two.html"), 5)
    assert all(attack(f"run{i}") in both for i in range(2))


@pytest.mark.slow
def test_a_study_of_hostile_runs(tmp_path: Path, browser: Any) -> None:
    tree = study_tree(starts={"a": attack("start")}, seeds=[0, 1])
    tree["base"]["data"]["train"] = [attack("train-set")]
    path, out = write_study(tmp_path / "study.yaml", tree), tmp_path / attack("study")
    for entry in load_study(path).runs(out):
        run = write_run(entry, lively, evals=lively_evals(entry))
        (run.path / "eval" / "toy-test").rename(run.path / "eval" / attack("benchmark"))
        run.stamp_contaminated([attack("contaminated")])
    tree["base"]["eval"]["every"] = 0  # the set's own name is no longer looked for
    assert run_study(write_study(path, tree), out, report_only=True) == 0
    text = shown_text(browser, out / "comparison.html", 5)
    assert [name for name in ("start", "train-set", "benchmark", "contaminated") if attack(name) not in text] == []


def test_a_hostile_prepared_set(tmp_path: Path, browser: Any) -> None:
    fields: dict[str, Any] = {name: attack(name) for name in ("id", "question", "answer", "source", "category")}
    problem = Problem(**fields, images=(noise_png(40, 40),), answer_type="text", choices=(attack("choice"),))
    facts = {
        "source": attack("set"),
        "rows_in": 2,
        "dropped": {attack("drop-reason"): 1},
        "notes": {attack("note"): 1},
        "counted_with": {"tokenizer": attack("tokenizer")},
        "options": {attack("option"): attack("value")},
        "files": [{"name": attack("file"), "bytes": 3, "sha256": attack("sha")}],
        "hub": attack("hub"),
    }
    folder = write_problems([problem], tmp_path / "set", facts)
    dropped = {"reason": attack("drop-reason"), "where": attack("where"), "detail": attack("detail")}
    (folder / "dropped.jsonl").write_text(json.dumps(dropped) + "\n")
    text = shown_text(browser, write_set_report(folder), 0)
    names = "id question answer source set drop-reason note tokenizer option file sha hub where detail"
    assert [name for name in names.split() if attack(name) not in text] == []
    assert json.dumps(attack("value")) in text
