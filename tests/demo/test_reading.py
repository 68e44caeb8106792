"""Reading in a real browser: the first screen, keys, marks, Back, the theme, and the bundle opened from disk."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.browser import Visit, open_browser, open_page
from tests.helpers.example_run import build_run
from tests.helpers.hostile import MARKUP, attack, attempt, hostile_run, watched
from tests.helpers.served import Served
from vlm_rl.demo.files.bundle import write_bundle
from vlm_rl.demo.files.export import page_of
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.page_state import PageStates
from vlm_rl.demo.panels.training import training_panel
from vlm_rl.demo.server import make_server
from vlm_rl.errors import UserError

STEPS = (0, 20, 40)
SIX = (
    "base=grpo@0&"
    + "&".join(f"others={run}@{step}" for run in ("grpo", "luspo") for step in STEPS)[13:]
    + "&tab=problems"
)
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
ROUND = r"""Look at the **three rows** of the grid once more, slowly.

1. Row a has $r_1 = 2$ red squares.
2. Row b has one, and row c has none.

Wait, 2*1 + 1 = 3, so the count of this round is three.

"""
# the columns whose first ten lines of reasoning are not wholly on the first screen
CUT_OFF = """[...document.querySelectorAll('.ckpt .rendered.reasoning')].filter(box => {
  const top = box.getBoundingClientRect().top, line = parseFloat(getComputedStyle(box).lineHeight);
  return !(top > 0 && line > 10 && top + 10 * line <= innerHeight);
}).length"""
MARKS = "[...(CSS.highlights.get('{}') ?? [])].map(range => range.toString())"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two runs whose responses grow with the step, the second run's twice as fast."""
    root = tmp_path_factory.mktemp("reading")
    for speed, name in enumerate(("grpo", "luspo"), 1):
        run = build_run(root / name, steps=40, algorithm=name, eval_steps=STEPS)
        for result in run.evals():
            rows = result.rows().to_pylist()
            for place, row in enumerate(rows):
                words = ROUND * (1 + speed * result.step // 10) + f"so problem {place} is done at {result.step}"
                row["response"] = rf"<think>{words}</think>\boxed{{{row['extracted']}}}"
                row["length"] = len(words) // 4
                row["category"] = f"kind {place % 3}"
            run.write_eval("toy-test", result.step, rows, {"template": "think_box"})
    return [root / "grpo", root / "luspo"]


@pytest.fixture(scope="module")
def served(runs) -> Iterator[Served]:
    server = Served(make_server(runs))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bundle(runs, tmp_path_factory) -> Path:
    """Return the folder of the bundle, as the command writes it."""
    out = tmp_path_factory.mktemp("bundle") / "site"
    command = [sys.executable, "-m", "vlm_rl", "demo", *map(str, runs), "--bundle", str(out), "--view", SIX]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{out / 'index.html'}: 24 problems in ") and done.stdout.endswith(" MB\n")
    return out


@contextmanager
def visit(browser: Any, url: str, viewport: dict[str, int], **options: Any) -> Iterator[Visit]:
    """Open an address in a fresh profile; at the end nothing on it may have failed or asked a different host."""
    context = browser.new_context(viewport=viewport, **options)
    visited = Visit(context.new_page())
    visited.page.set_default_timeout(60_000)
    visited.page.goto(url)
    visited.page.wait_for_selector(".ckpt, .problems tbody tr")
    yield visited
    assert visited.failures == []
    assert all(
        request.startswith((url.partition("?")[0].partition("index.html")[0], "blob:"))
        for request in visited.requests
    )
    context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def wait_for_place(page: Any, place: int) -> None:
    page.wait_for_function("n => document.querySelector('.where b').innerText === String(n)", arg=place)


# -- one problem in one file -----------------------------------------------------------------------

# neighbours in a column of which the upper one reaches into the lower one
_COVERED = """[...document.querySelectorAll('.ckpt')].flatMap(column => {
  const boxes = [...column.querySelectorAll('.tokens, .part, .grading')].map(box => box.getBoundingClientRect());
  return boxes.slice(1).filter((box, i) => box.top < boxes[i].bottom - 1);
}).length"""
# whether the last letter of a text's first line of letters is to the left of its first one
_TO_THE_LEFT = """box => {
  const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode().data.trim().length < 2);
  const text = texts.currentNode.data, at = (place) => {
    range.setStart(texts.currentNode, place); range.setEnd(texts.currentNode, place + 1);
    return range.getBoundingClientRect().left;
  };
  return at(text.trimEnd().length - 1) < at(text.search(/\\S/));
}"""


@contextmanager
def page_of_one_problem(browser: Any, folder: Path, **changes: Any) -> Iterator[Any]:
    """Open the exported page of two checkpoints' responses to a problem; `changes` are those of the second."""
    run = build_run(folder / "run", steps=1, eval_steps=(0, 1), num_problems=1)
    rows = run.evals()[1].rows().to_pylist()
    run.write_eval("toy-test", 1, [row | changes for row in rows], {"template": "think_answer"})
    page = folder / "page.html"
    page.write_text(page_of(PageStates(Library([run.path])).of(UrlState.parse("base=run@1&others=run@0"))))
    with open_page(page.as_uri(), browser=browser) as opened:
        opened.page.wait_for_selector(".ckpt")
        yield opened.page


@pytest.mark.slow
def test_the_turns_of_an_episode_cover_nothing(browser, tmp_path):
    turns = [{"text": f"look {place}", "tokens": 9} for place in range(3)]
    with page_of_one_problem(browser, tmp_path, turns=json.dumps(turns)) as page:
        assert page.locator(".turn").count() == 2
        assert page.evaluate(_COVERED) == 0
        tops = page.evaluate("[...document.querySelectorAll('.grading')].map(box => box.getBoundingClientRect().top)")
        assert tops[0] == tops[1]  # the parts of both columns are in line


@pytest.mark.slow
def test_text_from_right_to_left_begins_at_the_right(browser, tmp_path):
    """The stop at its end is at the left."""
    angle = "הזווית גדולה?"
    response = f"<think>{angle}</think>{angle}"
    with page_of_one_problem(browser, tmp_path, question=angle, response=response, gold=angle) as page:
        for place in (".question", ".rendered.reasoning p", ".rendered.answer p", ".asks-short"):
            assert page.locator(place).first.evaluate(_TO_THE_LEFT), place
        assert not page.locator(".ckpt").nth(1).locator(".rendered").first.evaluate(_TO_THE_LEFT)


@pytest.mark.slow
def test_a_long_name_fits_on_a_phone(browser, tmp_path):
    """Every part that names a run breaks its name; tables scroll by themselves."""
    runs = [build_run(tmp_path / (letter * 90), steps=8, eval_steps=(0, 8), num_problems=4) for letter in "ab"]
    library = Library([run.path for run in runs])
    state = PageStates(library).of(UrlState())
    page = tmp_path / "page.html"
    page.write_text(page_of(state).replace("</main>", f"{training_panel(library, state.url, {})}</main>"))
    with open_page(page.as_uri(), browser=browser, width=390, height=844, touch=True) as opened:
        opened.page.wait_for_selector(".ckpt")
        wide = """[...document.querySelectorAll('body *')].filter(box => box.offsetParent
          && !box.closest('.table-box, svg') && box.getBoundingClientRect().right > innerWidth + 1)
          .map(box => box.outerHTML.slice(0, 80))"""
        assert opened.page.evaluate(wide) == []


# -- the page under gradio -----------------------------------------------------------------------


@pytest.mark.slow
def test_six_checkpoints_and_a_picture_fit_on_the_first_screen(browser, served):
    with visit(browser, f"{served.url}?{SIX}", DESKTOP) as opened:
        page = opened.page
        page.wait_for_selector(".ckpt .katex")
        assert page.locator(".ckpt").count() == 6 and page.evaluate(CUT_OFF) == 0
        for part in (".question", ".problem img", *(f".verdicts li >> nth={place}" for place in range(6))):
            box = page.locator(part).first.bounding_box()
            assert box and box["y"] > 0 and box["y"] + box["height"] < 900, part
        assert page.locator(".verdicts .chip").first.inner_text()[0] in "✓✗"  # a sign, beside the colour
        page.evaluate("scrollTo(0, 900)")
        page.wait_for_function("() => scrollY > 400")
        bar, verdicts = (page.locator(part).bounding_box() for part in (".bar", ".verdicts"))
        assert bar["y"] == 0 and abs(verdicts["y"] - bar["height"]) < 2  # both stay in view


@pytest.mark.slow
def test_a_question_of_a_thousand_words_leaves_room_for_the_answers(browser, tmp_path):
    """Four lines of it are shown until a click."""
    question = "Who won? " + " ".join(f"Voter {number} says yes." for number in range(364))
    server = Served(make_server([build_run(tmp_path / "votes", question=question, num_problems=4).path]))
    try:
        with visit(browser, f"{server.url}?tab=problems", DESKTOP) as opened:
            page = opened.page
            question, words = page.locator(".question"), page.locator(".question .clamped")
            assert words.bounding_box()["height"] < 100 < len(words.inner_text().split())
            for column in page.locator(".ckpt .rendered.reasoning").all():
                assert column.bounding_box()["y"] < 700
            question.locator(".more").click()
            page.wait_for_function("() => document.querySelector('.question .clamped').offsetHeight > 400")
            assert not question.locator(".more").is_visible()
    finally:
        server.stop()


@pytest.mark.slow
def test_a_phone_shows_the_verdicts_first_and_leads_to_each_reasoning(browser, served):
    with visit(browser, f"{served.url}?{SIX}", PHONE, color_scheme="dark") as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        parts = [".question", ".verdicts", ".ckpt .rendered.reasoning"]
        tops = [page.locator(part).first.bounding_box()["y"] for part in parts]
        assert tops == sorted(tops) and tops[-1] < 844 and not page.locator(".choose").is_visible()
        assert page.locator(".unfold").count() == 1
        page.click(".unfold")  # the controls are folded until then
        assert page.locator(".choose").bounding_box()["y"] < page.locator(".question").first.bounding_box()["y"]
        page.click(".verdicts button:has-text('luspo · step 40')")
        page.wait_for_function("() => document.querySelectorAll('.ckpt')[5].getBoundingClientRect().top < 300")
        assert page.locator(".bar").bounding_box()["y"] == 0


@pytest.mark.slow
def test_search_marks_its_hits_and_back_leads_back(browser, served):
    with visit(browser, f"{served.url}?{SIX}", DESKTOP) as opened:
        page = opened.page
        wait_for_place(page, 1)
        page.keyboard.press("ArrowRight")
        wait_for_place(page, 2)
        page.keyboard.press("/")
        page.keyboard.type("Problem 7 is")
        page.keyboard.press("Enter")
        page.wait_for_selector(".bar .at:text-is('toy-test-0007')")
        page.wait_for_function(f"() => {MARKS.format('hit')}.length === 6")
        assert set(page.evaluate(MARKS.format("hit"))) == {"problem 7 is"}
        page.go_back()
        wait_for_place(page, 2)
        assert "text=" not in page.url and page.input_value("#control-text input, #control-text textarea") == ""
        page.go_back()
        wait_for_place(page, 1)
        page.go_forward()
        wait_for_place(page, 2)


@pytest.mark.slow
def test_the_table_orders_the_problems_by_keyboard(browser, served):
    with visit(browser, f"{served.url}?{SIX}", DESKTOP) as opened:
        page = opened.page
        page.keyboard.press("t")
        page.wait_for_selector(".problems tbody tr")
        assert page.locator(".problems tbody tr").count() == 24
        page.locator(".problems thead button:has-text('problem')").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("th[aria-sort=ascending]")
        page.keyboard.press("Enter")
        page.wait_for_selector("th[aria-sort=descending]")
        page.locator(".problems tbody button").nth(1).press("Enter")
        page.wait_for_selector(".bar .at:text-is('toy-test-0022')")
        page.keyboard.press("ArrowRight")  # the same order
        page.wait_for_selector(".bar .at:text-is('toy-test-0021')")


@pytest.mark.slow
def test_switches_and_the_theme_are_kept(browser, served):
    address = f"{served.url}?base=grpo@0&others=grpo@40&at=toy-test-0003&tab=problems"
    with visit(browser, address, DESKTOP, permissions=["clipboard-read", "clipboard-write"]) as opened:
        page = opened.page
        page.keyboard.press("d")
        page.wait_for_function(f"() => {MARKS.format('difference')}.length > 0")
        marks = " ".join(page.evaluate(MARKS.format("difference")))
        assert marks.count("once more") == 4 and "at 40" not in marks and "40" in marks and "problem 3" not in marks
        page.keyboard.press("m")
        source = page.locator(".ckpt").first.locator("pre.reasoning")
        source.wait_for()
        assert source.inner_text().startswith("Look at the **three rows**")
        page.click(".ckpt >> nth=0 >> [aria-label='copy the reasoning of grpo · step 0']")
        assert page.evaluate("navigator.clipboard.readText()") == source.inner_text()
        page.keyboard.press("m")
        page.keyboard.press("s")
        page.evaluate("document.querySelectorAll('.rendered.reasoning')[1].scrollTop = 1e6")
        share = (
            "box => box.scrollHeight > box.clientHeight ? box.scrollTop / (box.scrollHeight - box.clientHeight) : 1"
        )
        page.wait_for_function(f"() => (({share})(document.querySelectorAll('.rendered.reasoning')[0])) > 0.98")
        page.click("[data-theme]")
        again = Visit(page.context.new_page())  # a reload would abort what Gradio may be asking for
        again.page.goto(page.url)
        again.page.wait_for_selector(".ckpt")
        again.page.wait_for_selector("body.dark")
        pressed = again.page.locator("[data-switch][aria-pressed=true]").all_inner_texts()
        assert pressed == ["Differences", "Scroll together"] and again.failures == []


# -- the bundle ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_bundle_opens_from_disk(browser, bundle):
    with visit(browser, (bundle / "index.html").as_uri(), DESKTOP) as opened:
        page = opened.page
        page.wait_for_selector(".ckpt .katex")
        assert page.evaluate("getComputedStyle(document.querySelector('.ckpt .katex')).fontFamily").startswith(
            "KaTeX"
        )
        assert page.locator(".ckpt").count() == 6 and page.evaluate(CUT_OFF) == 0
        assert page.evaluate("document.querySelector('.problem img').naturalWidth") == 84
        page.keyboard.press("ArrowLeft")
        wait_for_place(page, 24)
        page.keyboard.press("/")
        page.keyboard.type("Problem 7 is")
        page.wait_for_selector("[data-count]:text-is('1 of 24 problems')")
        page.wait_for_function(f"() => {MARKS.format('hit')}.length === 6")
        page.go_back()
        wait_for_place(page, 24)
        page.click("[data-tab=table]")
        page.click(".problems thead button:has-text('problem')")
        page.click(".problems thead button:has-text('problem')")
        page.wait_for_selector("th[aria-sort=descending]")
        assert page.locator(".problems tbody th").first.inner_text() == "toy-test-0023"
        page.select_option("select[data-name=change]", "right")
        page.wait_for_function("() => document.querySelectorAll('.problems tbody tr').length < 24")
        changed = page.locator(".problems tbody tr").count()
        assert changed and page.locator(".problems tbody tr").first.locator("td.right").count() >= 1
        page.click("[data-tab=lengths]")
        page.wait_for_selector("[data-panel=lengths] .chart svg")
        page.click("[data-tab=problems]")
        wait_for_place(page, 1)


@pytest.mark.slow
def test_the_bundle_of_a_view_says_its_filters_keeps_its_order_and_searches_as_the_demo(browser, runs, tmp_path):
    query = "base=grpo@0&others=grpo@40&change=changed&sort=-id&tab=problems"
    demo = PageStates(Library(runs))
    state = demo.of(UrlState.parse(query))
    ids = [state.table.ids[p] for p in state.order]
    assert len(ids) > 1 and ids == sorted(ids, reverse=True)
    write_bundle(runs, tmp_path / "site", view=query)
    with visit(browser, (tmp_path / "site" / "index.html").as_uri(), DESKTOP) as opened:
        page = opened.page
        shown = "document.querySelector('.bar .at').innerText"
        assert f"{len(ids)} of 24 problems pass the filters: verdict changed; chosen by" in page.inner_text("main")
        assert page.evaluate(shown) == ids[0]
        page.click("[data-step=next]")
        page.wait_for_function(f"() => {shown} === '{ids[1]}'")
        page.click("[data-tab=table]")
        page.wait_for_selector("th[aria-sort=descending]")
        page.click(".problems thead button:has-text('problem')")  # upwards
        page.wait_for_selector("th[aria-sort=ascending]")
        page.select_option("select[data-name=sort]", "")
        page.wait_for_function("() => !document.querySelector('th[aria-sort]')")
        assert page.locator(".problems tbody th").all_inner_texts() == sorted(ids)
        for text in ("right answer", "never solved", "by rule", "red squares", ids[-1], "round is three"):
            page.fill("[data-find]", text)
            found = len(demo.of(UrlState.parse(query).patched(urlencode({"text": text}))).order)
            count = f"{found} of {len(ids)} problems" if found < len(ids) else f"{found} problems"
            page.wait_for_selector(f"[data-count]:text-is('{count}')", timeout=5000)


@pytest.mark.slow
def test_the_bundle_opens_from_a_web_server_on_a_phone(browser, bundle):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(bundle))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with visit(browser, f"http://127.0.0.1:{server.server_port}/index.html#at=toy-test-0004", PHONE) as opened:
            wait_for_place(opened.page, 5)
            assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert not opened.page.locator(".find").is_visible()
            opened.page.click(".unfold")
            assert opened.page.locator(".find").bounding_box()["y"] < 300
        server.shutdown()


@pytest.mark.slow
def test_no_string_of_a_run_acts_in_the_bundle(browser, tmp_path):
    run = hostile_run(tmp_path / "runs" / attack("alone"), steps=(2, 4))
    write_bundle([run.path], tmp_path / "site", view="tab=problems")
    address = (tmp_path / "site" / "index.html").as_uri()
    foreign = "[onerror], [onload], img[src='x'], a[href^='javascript'], form[action]"
    with watched(address, browser=browser, foreign=foreign, **DESKTOP) as opened:
        page = opened.page
        page.wait_for_selector(".ckpt")
        text = page.inner_text("body")
        page.click("[data-tab=table]")
        page.wait_for_selector(".problems tbody tr")
        text += page.inner_text("body")
        page.fill("[data-find]", attack("reasoning"))
        page.wait_for_selector("[data-count]:text-is('3 problems')")
    for field in ("alone", "problem", "question", "gold", "reasoning", "response", "extracted", "reason", "category"):
        assert attack(field) in text, field


@pytest.mark.slow
def test_markup_that_would_get_past_the_bundle_does_nothing(bundle, browser):
    tried = partial(attempt, (bundle / "index.html").as_uri(), browser=browser, ready=".ckpt")
    assert {markup: tried(markup) for markup in MARKUP} == dict.fromkeys(MARKUP, "refused")


def test_a_bundle_overwrites_nothing_and_names_what_is_missing(runs, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        write_bundle(runs, tmp_path)
    with pytest.raises(UserError, match="there is no checkpoint grpo@7"):
        write_bundle(runs, tmp_path / "site", view="base=grpo@7")
    with pytest.raises(UserError, match="No problem passes the filters"):
        write_bundle(runs, tmp_path / "site", view="low=99999")
    assert not list(tmp_path.iterdir())
