"""Every page with axe, for a desk and a phone, in light and in dark: the demo, its bundle, reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.browser import axe_faults, open_browser, open_page
from tests.helpers.chat_server import chat_server
from tests.helpers.example_run import build_run
from tests.helpers.example_study import lively, lively_evals, study_tree, write_run, write_study
from tests.helpers.rotation import todays
from tests.helpers.served import Served
from vlm_rl.cli import main
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.demo.files.bundle import write_bundle
from vlm_rl.demo.live.endpoints import Endpoint
from vlm_rl.demo.live.panel import LiveOptions
from vlm_rl.demo.numbers.url_state import TABS
from vlm_rl.demo.server import make_server
from vlm_rl.demo.web.access import Access
from vlm_rl.report.run_report import write_report
from vlm_rl.run.directory import RunDirectory
from vlm_rl.study.runs import load_study
from vlm_rl.toy.counting_squares import SQUARES

pytestmark = pytest.mark.slow

VIEW = "base=run@0&others=run@8&others=other@8&at=toy-test-0001"
READY = {  # tab -> what is there once it is drawn
    "overview": "#overview svg", "problems": "#problem .ckpt", "table": "#table tbody tr", "lengths": "#lengths svg",
    "reasoning": "#reasoning svg", "training": "#training svg", "live": "#live-ask", "export": "#export ul",
}  # fmt: skip
FADED = "() => Promise.allSettled(document.getAnimations().map(animation => animation.finished))"
CUT_OFF = """() => [...document.querySelectorAll('figure.chart-card')].flatMap(figure => {
  const frame = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('svg text')].filter(text => {
    const place = text.getBoundingClientRect();
    return place.width && (place.left < frame.left - 1 || place.right > frame.right + 1);
  }).map(text => text.textContent);
})"""
COLUMNS = "() => [...document.querySelectorAll('.ckpt')].map(column => column.getBoundingClientRect().top)"
ROWS = "() => [...document.querySelectorAll('#table tbody tr')].map(row => row.offsetHeight)"
UNFOLDED = "() => document.querySelectorAll('details').forEach(box => { box.open = true; })"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two runs whose problems are of three categories, one of them small."""
    root = tmp_path_factory.mktemp("accessible")
    for seed, name in enumerate(("run", "other")):
        run = build_run(root / name, steps=8, seed=seed, num_problems=16)
        for result in run.evals():
            rows = [row | {"category": f"kind {min(n // 7, 2)}"} for n, row in enumerate(result.rows().to_pylist())]
            run.write_eval("toy-test", result.step, rows, result.summary)
    return [root / "run", root / "other"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(runs) -> Iterator[Served]:
    with chat_server() as models:
        server = Served(make_server(runs, live=LiveOptions([Endpoint("far", models.url("good"), "m")])))
        yield server
        server.stop()


@pytest.mark.parametrize("width", todays([1440, 390], days=2))
def test_every_tab_of_the_demo(served, browser, width):
    with open_page(f"{served.url}?{VIEW}", browser=browser, width=width) as visit:
        page = visit.page
        page.wait_for_selector(READY["overview"])
        if width == 390:
            page.click(".top .unfold")
        page.click("#filters button")
        faults = {}
        for tab in TABS:
            page.evaluate(
                "query => { history.pushState(null, '', query); dispatchEvent(new PopStateEvent('popstate')); }",
                f"?{VIEW}&tab={tab}",
            )
            page.wait_for_selector(READY[tab])
            page.evaluate(UNFOLDED)
            faults[tab] = axe_faults(page)
            if width == 1440 and tab in ("overview", "problems", "lengths", "live"):  # which have all kinds of parts
                page.click("[data-theme]")
                page.evaluate(FADED)
                faults[f"{tab}, dark"] = axe_faults(page, "color-contrast")
                page.click("[data-theme]")
                page.evaluate(FADED)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            assert page.evaluate(CUT_OFF) == [], tab
            if tab == "table" and width == 390:
                assert max(page.evaluate(ROWS)) < 40  # one line each
            if tab == "problems":  # columns side by side where there is room, below each other on a phone
                assert (len({*page.evaluate(COLUMNS)}) == 1) == (width == 1440)
        assert {place: found for place, found in faults.items() if found} == {} and visit.failures == []


@pytest.mark.turn(0, days=2)
def test_every_tab_of_the_bundle(runs, browser, tmp_path):
    write_bundle(runs, tmp_path / "site", view=VIEW.partition("&at")[0])
    with open_page((tmp_path / "site/index.html").as_uri(), browser=browser, width=390) as visit:
        page = visit.page
        faults = {}
        for tab in ("overview", "problems", "table", "lengths", "reasoning"):
            page.evaluate("place => { location.hash = place; }", f"tab={tab}&at=toy-test-0001")
            page.wait_for_selector(f"[data-panel={tab}] :is(.ckpt, tbody tr, .chart svg)")
            page.evaluate(UNFOLDED)
            page.evaluate("document.body.classList.add('unfolded')")
            for scheme in ("light", "dark"):
                page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
                faults[f"{tab}, {scheme}"] = axe_faults(page, *(["color-contrast"] if scheme == "dark" else []))
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
        assert {place: found for place, found in faults.items() if found} == {} and visit.failures == []


@pytest.fixture(scope="module")
def pages(served, runs, tmp_path_factory) -> dict[str, str]:
    """Return the addresses of the other pages: of runs, a study, a prepared set, and a view of the demo."""
    folder = tmp_path_factory.mktemp("pages")
    study = load_study(write_study(folder / "study.yaml", study_tree()))
    for entry in study.runs(folder / "study"):
        write_run(entry, lively, evals=lively_evals(entry))
    assert main(["study", str(folder / "study.yaml"), "--out", str(folder / "study"), "--report-only"]) == 0
    raw = SQUARES.write(folder / "raw", seed=0, train=24, heldout=8, warm=8, mixture=8)
    prepare("virl39k", raw / "train", folder / "set")
    exported = folder / "exported.html"
    exported.write_bytes(httpx.get(f"{served.url}export/page.html?{VIEW}").content)
    files = {
        "report": write_report([RunDirectory(path) for path in runs], folder / "report.html"),
        "study": folder / "study" / "comparison.html",
        "prepared set": folder / "set" / "report.html",
        "exported": exported,
    }
    return {name: path.as_uri() for name, path in files.items()}


@pytest.mark.parametrize("name", todays(["report", "study", "prepared set", "exported"], days=2))
def test_a_page_in_a_file(pages, browser, name):
    with open_page(pages[name], browser=browser, width=1440) as visit:
        visit.page.evaluate("window.chartsDrawn")
        visit.page.evaluate(UNFOLDED)
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        visit.page.set_viewport_size({"width": 390, "height": 800})
        visit.page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")  # charts follow the window
        faults = axe_faults(visit.page)
        visit.page.emulate_media(color_scheme="dark")
        visit.page.evaluate(FADED)
        assert faults + axe_faults(visit.page, "color-contrast") == [] and visit.failures == []


def test_the_login(runs, browser):
    server = Served(make_server(runs, access=Access(token="a-token-of-this-test", open_wider=True)))
    try:
        for width, scheme in ((1440, "dark"), (390, "light")):
            with open_page(server.url, browser=browser, width=width, scheme=scheme) as visit:
                visit.page.get_by_label("The token").fill("wrong")
                visit.page.keyboard.press("Enter")
                visit.page.get_by_text("That is not the token.").wait_for()
                assert axe_faults(visit.page) == []
                assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        server.stop()
