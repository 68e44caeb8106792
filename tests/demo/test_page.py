"""The demo in a real browser, as a person uses it: what it shows, what it refuses, and that it asks nobody else."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

import httpx
from PIL import Image

from tests.helpers.browser import Visit, open_browser, open_page
from tests.helpers.chat_server import chat_server
from tests.helpers.demo_events import event_of, run_event
from tests.helpers.example_run import build_run
from tests.helpers.served import Served
from vlm_rl.demo.live.endpoints import Endpoint
from vlm_rl.demo.live.panel import LiveOptions
from vlm_rl.demo.server import launch, make_server
from vlm_rl.demo.web.access import Access
from vlm_rl.errors import UserError

TEXT = "#control-text input, #control-text textarea"
CLICK_NEXT = """() => {
  const next = document.querySelector('[data-step=next]');
  next.click();
  return new URLSearchParams(next.dataset.go).get('at');
}"""
Open = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two runs that differ, one of them contaminated, and one that cannot be read."""
    root = tmp_path_factory.mktemp("demo")
    clean = build_run(root / "luspo", steps=40)
    stamped = build_run(root / "ba", steps=10, seed=1, algorithm="ba")
    stamped.stamp_contaminated(["MathVision"])
    broken = build_run(root / "broken", steps=1)
    (broken.path / "config.yaml").write_text("algorithm: [")
    return [clean.path, stamped.path, broken.path]


@pytest.fixture(scope="module")
def served(runs) -> Iterator[Served]:
    server = Served(make_server(runs))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def visit(served) -> Iterator[Open]:
    """Return a function that opens an address of the demo and waits until it shows something."""
    with open_browser() as browser:

        @contextmanager
        def open_demo(
            query: str = "", *, url: str = served.url, ready: str = "#summary .sum", **options
        ) -> Iterator[Visit]:
            with open_page(url + query, browser=browser, **options) as opened:
                opened.page.wait_for_selector(ready)
                yield opened
                assert all(request.startswith((url, "blob:" + url)) for request in opened.requests)
                assert opened.failures == []

        yield open_demo


def titles(page) -> list[str]:
    return page.locator("#problem .ckpt h2").all_inner_texts()


def wait_for_position(page, position: int, count: int = 24) -> None:
    page.wait_for_function(
        "([at, of]) => document.querySelector('.where')?.innerText === `problem ${at} of ${of}`",
        arg=[position, count],
    )


def test_the_page_says_who_reasons_longer_compares_checkpoints_and_asks_nobody_else(visit):
    with visit() as opened:
        page = opened.page
        page.wait_for_selector("#overview .chart svg >> nth=2")
        lead = page.inner_text("#overview .lead")
        assert "reasons longer than" in lead and "points" in lead and "Tokens per right answer" in lead
        assert page.locator("#overview .lead").bounding_box()["y"] < 400
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("button[role=tab]:has-text('Problems')")
        page.wait_for_selector("#problem .ckpt >> nth=1")
        assert titles(page) == ["luspo · step 0", "luspo · step 40", "ba · step 10"]
        assert page.locator("#problem .verdicts .kind").all_inner_texts() == ["baseline"]
        assert page.locator("#problem .verdicts .change").count() == 2  # not against itself
        assert page.evaluate("[...document.querySelectorAll('#problem img')].every(i => i.naturalWidth > 0)")
        banners = page.locator(".banner").all_inner_texts()
        assert any("CONTAMINATED ba" in text for text in banners)
        assert any("broken was left out" in text for text in banners)
        assert "more often right" in page.inner_text("#summary .sum >> nth=1")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.wait_for_selector("#problem .answer .katex")  # the box is drawn, not printed
        assert len(opened.requests) > 5 and "base=luspo%400" in page.url


@pytest.mark.slow
def test_a_click_on_a_bar_leads_to_its_problems_and_the_link_reproduces_the_view(served, visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        page.click("button[role=tab]:has-text('Lengths')")
        page.wait_for_selector("#lengths .chart svg")
        assert page.locator("#lengths figure").count() == 7  # six charts and the map of the one run
        page.locator("#lengths figure:has-text('How many tokens') .mark-rect path").first.click()
        page.wait_for_selector("#problem .ckpt >> nth=1")
        page.wait_for_function("location.search.includes('low=')")
        link, shown = page.url, (page.inner_text("#count .count"), page.inner_text("#problem .id"), titles(page))
        assert "of 24 problems pass the filters" in shown[0]
    with visit(link.removeprefix(served.url)) as opened:
        page = opened.page
        page.wait_for_selector("#problem .ckpt >> nth=1")
        assert (page.inner_text("#count .count"), page.inner_text("#problem .id"), titles(page)) == shown


@pytest.mark.slow
def test_next_and_previous_by_button_and_key(visit):
    with visit("?tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        first = page.inner_text("#problem .id")
        page.click("button:has-text('next')")
        wait_for_position(page, 2)
        assert page.inner_text("#problem .id") != first
        page.keyboard.press("ArrowLeft")
        wait_for_position(page, 1)
        page.keyboard.press("ArrowLeft")  # context to the last
        wait_for_position(page, 24)
        page.click("#problem .strip-box summary")
        page.locator("#problem .strip i").nth(4).click()
        wait_for_position(page, 5)
        page.get_by_label("Compare with").focus()
        page.keyboard.press("ArrowRight")  # moves in the text, not through the problems
        page.wait_for_timeout(300)
        wait_for_position(page, 5)


@pytest.mark.slow
def test_fifty_clicks_leave_a_page_that_works(visit):
    with visit("?tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        asked = [page.evaluate(CLICK_NEXT) for _ in range(50)][-1]
        # clicks are answered in their order, each with the problem after the one that was shown then
        page.wait_for_function("at => document.querySelector('.bar .at').innerText === at", arg=asked)
        page.click("#problem .strip-box summary")
        page.locator("#problem .strip i").nth(2).click()
        wait_for_position(page, 3)


@pytest.mark.slow
def test_a_box_stays_unfolded_when_the_page_is_arranged_right_after_the_click(visit):
    with visit("?tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        is_open = "() => document.querySelector('.strip-box').open"
        for expected in (True, False):  # `resize` arranges at once, before the browser tells of the unfolded box
            page.evaluate("document.querySelector('.strip-box summary').click(); dispatchEvent(new Event('resize'))")
            page.evaluate("new Promise(requestAnimationFrame)")
            assert page.evaluate(is_open) is expected


@pytest.mark.slow
def test_changes_made_before_the_answer_are_all_kept(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        page.evaluate("""() => {
            document.querySelector('[data-step=next]').click();
            document.querySelector('#problem [data-go^="fold="]').click();
            const change = (key, value) => new CustomEvent('view-control', { detail: { key, value } });
            document.dispatchEvent(change('change', 'right'));
            document.dispatchEvent(change('change', 'right'));  // as gradio's lists tell of one choice
            document.dispatchEvent(change('sort', 'longest'));
        }""")
        page.wait_for_function("location.search.includes('sort=longest')")
        assert all(part in page.url for part in ("&at=toy-test-0001", "&fold=1", "&change=right"))
        page.wait_for_function("document.querySelector('#count .count').innerText.includes('became right')")
        page.go_back()
        page.wait_for_function("!location.search.includes('sort=longest')")


@pytest.mark.slow
def test_of_many_tabs_opened_at_once_the_last_is_shown(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        tabs = ["Table", "Problems", "Lengths", "Problems", "Export", "Table"]
        page.evaluate(
            "tabs => { const all = [...document.querySelectorAll('button[role=tab]')];"
            " for (const tab of tabs) all.find(button => button.innerText === tab).click(); }",
            tabs,
        )
        page.wait_for_function("location.search.includes('tab=table')")
        page.wait_for_selector("#table .problems tbody tr")
        page.wait_for_timeout(500)
        assert page.locator("button[role=tab][aria-selected=true]").all_inner_texts() == ["Table"]
        assert "tab=table" in page.url


@pytest.mark.slow
def test_an_answer_that_was_overtaken_is_not_what_the_page_ends_with(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        wait_for_position(page, 1)
        held: list[Callable[[], None]] = []
        page.route("**/queue/join*", lambda route: held.append(route.continue_), times=1)
        page.click("button:has-text('next')")  # its request comes after that of the next click
        page.keyboard.press("ArrowLeft")
        wait_for_position(page, 24)
        with page.expect_request(lambda request: '"number":3' in (request.post_data or "")):
            held[0]()  # its answer is older than what is drawn, which the page asks for once more
        wait_for_position(page, 24)
        page.keyboard.press("ArrowRight")  # from 24, and not from the answer that was overtaken
        wait_for_position(page, 1)


@pytest.mark.slow
def test_a_further_checkpoint_joins_in_its_own_colour(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        page.wait_for_selector("#problem .ckpt >> nth=1")
        before = page.locator("#problem .ckpt").nth(1).get_attribute("class")
        page.get_by_label("Compare with").click()
        page.get_by_role("option", name="luspo · step 20").click()
        page.wait_for_selector("#problem .ckpt >> nth=2")
        assert titles(page) == ["luspo · step 0", "luspo · step 40", "luspo · step 20"]
        classes = [page.locator("#problem .ckpt").nth(i).get_attribute("class") for i in range(3)]
        assert classes[1] == before and len(set(classes)) == 3
        assert page.locator("#summary .sum").count() == 3 and "others=luspo%4020" in page.url
        page.get_by_label("Baseline").click()
        page.locator("#control-base").get_by_role("option", name="luspo · step 40").click()
        page.wait_for_function("document.querySelector('#problem h2').innerText === 'luspo · step 40'")
        assert titles(page) == ["luspo · step 40", "luspo · step 0", "luspo · step 20"]  # the two changed positions


@pytest.mark.slow
def test_filters_by_hand_and_back(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=problems") as opened:
        page = opened.page
        page.wait_for_selector("#problem .ckpt >> nth=1")
        page.click("#filters button")
        page.get_by_label("Change from the baseline").click()
        page.get_by_role("option", name="became right").click()
        page.wait_for_function("document.querySelector('#count .count').innerText.includes('pass the filters')")
        assert page.locator("#problem .verdicts .chip:has-text('became right')").count() == 1
        page.fill(TEXT, "a text that is nowhere")
        page.press(TEXT, "Enter")
        page.wait_for_selector("#problem .missing")
        page.click("#problem .missing button")  # the empty state says what to do, and does it
        page.wait_for_function("document.querySelector('#count .count').innerText.startsWith('24 problems')")
        assert page.input_value(TEXT) == ""


@pytest.mark.slow
def test_points_lead_to_their_problem(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=lengths") as opened:
        page = opened.page
        page.wait_for_selector("#lengths .chart svg")
        point = (
            page.locator("#lengths figure:has-text('Change per problem') .chart")
            .first.locator(".mark-symbol path")
            .last
        )
        point.hover()
        name = page.inner_text(".chart-tip").partition("\n")[0]
        point.click()
        page.wait_for_selector(f"#problem .id:has-text('{name}')")
        page.click("button[role=tab]:has-text('Lengths')")
        page.locator("#lengths figure:has-text('Does length pay') .mark-symbol path").first.click()
        page.wait_for_function("location.search.includes('difficulty=')")


@pytest.mark.slow
def test_a_legend_entry_hides_its_curve(visit):
    with visit("?base=luspo@0&others=luspo@40&tab=lengths") as opened:
        page = opened.page
        figure = page.locator("#lengths figure:has-text('with at most so many tokens')")
        figure.locator(".chart svg").wait_for()
        curves = figure.locator(".mark-line path")
        count = curves.count()  # each curve with the dot of the problem shown
        figure.get_by_role("button", name="luspo · step 40").click()
        page.wait_for_function(
            "([figure, count]) => figure.querySelectorAll('.mark-line path').length === count / 2",
            arg=[figure.element_handle(), count],
        )


@pytest.mark.slow
def test_training_shows_curves_and_the_rollouts_of_a_step(visit):
    with visit("?base=luspo@0&others=luspo@40&others=ba@10&tab=training") as opened:
        page = opened.page
        page.wait_for_selector("#training .chart svg")
        assert page.locator("#training .key > span").count() == 2
        strokes = (
            page.locator("#training figure")
            .first.locator(".mark-line path")
            .evaluate_all("paths => paths.map(path => path.getAttribute('stroke'))")
        )
        assert len(set(strokes)) == 2  # both runs, in two colours
        assert (
            "step 40" in page.inner_text("#training h2") and page.locator("#training .rollouts article").count() == 8
        )
        page.click("#training button:has-text('← step')")
        page.wait_for_selector("#training h2:has-text('step 39')")
        page.locator("#training .prompt").nth(3).click()
        page.wait_for_selector("#training .quiet:has-text('toy-39-3')")
        page.get_by_label("Runs").click()
        page.get_by_role("option", name="ba (BA)").click()
        page.wait_for_selector("#training h2:has-text('Rollouts of ba')")


@pytest.mark.slow
def test_the_live_panel_asks_about_the_problem_shown_and_stays_open(runs, visit):
    with chat_server() as models:
        server = Served(make_server(runs, live=LiveOptions([Endpoint("far", models.url("good"), "m")])))
        try:
            with visit("?base=luspo@0&others=luspo@40&at=toy-test-0003&tab=problems", url=server.url) as opened:
                page = opened.page
                page.wait_for_selector("#problem .ckpt")
                page.click("button[role=tab]:has-text('Live')")
                page.wait_for_function("location.search.includes('tab=live')")
                page.get_by_label("Start from").click()
                page.get_by_role("option", name="the problem shown in Problems").click()
                page.wait_for_selector("#live-picture img:not([hidden])")
                assert page.get_by_label("Question").input_value() == "Count the red squares."
                page.click("#live-ask")
                page.wait_for_selector(".live-error:has-text('no weights on this machine')")
                page.get_by_label("Models to ask").click()
                page.get_by_role("option", name="far").click()
                page.keyboard.press("Escape")
                page.click("#live-ask")
                page.wait_for_selector(".live-card.ended .answer .katex")  # the box is drawn here, too
                page.get_by_label("Compare with").click()
                page.get_by_role("option", name="luspo · step 20").click()
                page.wait_for_selector("#summary .sum >> nth=2")
                assert page.locator("#live-ask").is_visible()  # another control does not leave the panel
            with visit("?tab=live", url=server.url) as opened:
                opened.page.wait_for_selector("#live-ask")
        finally:
            server.stop()


@pytest.mark.slow
def test_a_run_without_an_evaluation_opens_on_its_training(tmp_path, visit):
    server = Served(make_server([build_run(tmp_path / "run", steps=4, eval_steps=()).path]))
    try:
        with visit(
            "?tab=problems", url=server.url, ready="#problem .missing:has-text('no evaluation yet')"
        ) as opened:
            opened.page.click("#problem .missing button")
            opened.page.wait_for_selector("#training .chart svg")
            assert "step 4" in opened.page.inner_text("#training h2")
            opened.page.click("button[role=tab]:has-text('Export')")
            opened.page.wait_for_selector("#export .missing")
    finally:
        server.stop()


@pytest.mark.slow
def test_what_can_be_exported(visit, served):
    with visit("?base=luspo@0&others=luspo@40&change=right&tab=export") as opened:
        page = opened.page
        for name in ("samples.csv", "samples.parquet", "page.html"):
            with page.expect_download() as download:
                page.click(f"#export a[download='{name}']")
            content = Path(download.value.path()).read_bytes()
            assert len(content) > 1000 and download.value.suggested_filename == name
            if name == "page.html":
                (Path(download.value.path()).with_suffix(".html")).write_bytes(content)
                with visit_file(page, Path(download.value.path()).with_suffix(".html")) as alone:
                    assert alone.requests == [alone.page.url] and alone.failures == []
                    alone.page.wait_for_selector("figure >> nth=5 >> svg")
                    assert alone.page.locator("button:not(.legend button, .tools button)").count() == 0
                    assert alone.page.locator(".ckpt").count() >= 4
        page.click("button[role=tab]:has-text('Lengths')")
        chart = page.locator("#lengths figure .chart:has(svg)").first
        chart.hover()
        with page.expect_download() as download:
            chart.get_by_role("button", name="PNG").click()
        picture = Image.open(io.BytesIO(Path(download.value.path()).read_bytes()))
        assert picture.format == "PNG" and picture.width > 800 and len(set(picture.convert("RGB").getdata())) > 20


@contextmanager
def visit_file(page, path: Path) -> Iterator[Visit]:
    other = page.context.browser.new_context().new_page()
    opened = Visit(other)
    other.goto(path.as_uri())
    yield opened
    other.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_by_the_system_and_by_hand(visit, scheme):
    def luminance(page) -> float:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color.removeprefix("rgb(").rstrip(")").split(",")[:3])) / 3

    with visit("?tab=problems", scheme=scheme) as opened:
        page = opened.page
        page.wait_for_selector("#problem .ckpt")
        assert (luminance(page) < 60) == (scheme == "dark")
        ink = page.evaluate("getComputedStyle(document.querySelector('#problem h2')).color")
        page.click("[data-theme]")
        assert (luminance(page) < 60) == (scheme == "light")
        assert page.evaluate("getComputedStyle(document.querySelector('#problem h2')).color") != ink


# the words of charts that are beyond the frame of their chart
@pytest.mark.slow
def test_an_evaluation_that_cannot_be_read_says_what_to_do(tmp_path, visit):
    run = build_run(tmp_path / "run", steps=2, num_problems=3)
    run.write_eval("toy-test", 1, run.evals()[1].rows().to_pylist(), {"accuracy": 0.0})  # it is not shown at first
    server = Served(make_server([run.path]))
    try:
        with visit("?base=run@0&others=run@2&tab=problems", url=server.url) as opened:
            page = opened.page
            page.wait_for_selector("#problem .ckpt >> nth=1")
            (tmp_path / "run/eval/toy-test/step-000001.parquet").write_bytes(b"PAR1")
            page.get_by_label("Compare with").click()
            page.get_by_role("option", name="step 1", exact=True).click()
            page.wait_for_selector("#problem .missing.bad:has-text('evaluate again')")
            link = page.url.removeprefix(server.url)
        said = "#problem .missing.bad:has-text('step-000001.parquet cannot be read')"
        with visit(link, url=server.url, ready=said):
            pass  # the link that asks for it says so too
        with visit("?base=run@0&others=run@2&tab=problems", url=server.url) as opened:
            opened.page.wait_for_selector("#problem .ckpt >> nth=1")  # and the others are as they were
    finally:
        server.stop()


def test_the_numbers_are_there_for_programs(served):
    from gradio_client import Client

    client = Client(served.url, verbose=False)
    answer = client.predict("base=luspo@0&others=luspo@40&change=right", api_name="/summary")
    everything = client.predict("base=luspo@0&others=luspo@40", api_name="/summary")
    assert 0 < len(answer["problems"]) < len(everything["problems"]) == 24
    assert [numbers["key"] for numbers in everything["checkpoints"]] == ["luspo@0", "luspo@40"]
    assert everything["checkpoints"][1]["token_change"] > 5


def test_each_page_is_sent_the_curves_once(served):
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        tick = {"fn_index": event_of(client, "tick"), "data": ["tab=training"]}
        first, other, again = (
            run_event(client, tick, session=page)["output"]["data"][0] for page in ("one", "other", "one")
        )
    assert "Reward of a response" in first and other == first
    assert again == {"__type__": "update", "props": {"__type__": "update"}}  # nothing: no run has logged more


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 200),
        ("GET", "/", {"Host": "evil.example"}, 403),
        ("GET", "/", {"Host": "localhost.evil.example"}, 403),
        ("GET", "/", {"Host": "localhost"}, 200),
        ("POST", "/gradio_api/queue/join", {"Origin": "http://evil.example"}, 403),
        ("POST", "/gradio_api/queue/join", {"Origin": "null"}, 403),
        ("GET", "/gradio_api/file=/etc/passwd", {}, 404),
        ("GET", "/gradio_api/file/etc/passwd", {}, 404),
        ("GET", "/gradio_api/proxy=http://evil.example/", {}, 404),
        ("GET", "/static/../../../../etc/passwd", {}, 404),
        ("GET", "/assets/%2e%2e/%2e%2e/etc/passwd", {}, 404),
        ("GET", "/export/samples.csv", {}, 200),
        ("GET", "/export/samples.csv", {"Host": "evil.example"}, 403),
        ("GET", "/export/../config.yaml", {}, 404),
        ("GET", "/export/config.yaml", {}, 404),
        ("POST", "/gradio_api/upload", {}, 404),
        ("POST", "/gradio_api/process_recording", {}, 404),
        ("GET", "/monitoring", {}, 404),
        ("DELETE", "/", {}, 404),
    ],
)
def test_the_guard(served, method, path, headers, status):
    answer, sent = served.ask(method, path, headers)
    assert answer == status
    assert "default-src 'none'" in sent["content-security-policy"]
    assert "frame-ancestors 'none'" in sent["content-security-policy"]


def test_large_bodies_are_refused_before_they_are_read(served):
    assert served.ask("POST", "/gradio_api/queue/join", {"Content-Length": str(10**8)})[0] == 413
    assert served.ask("POST", "/gradio_api/queue/join", {"Transfer-Encoding": "chunked"}, b"0\r\n\r\n")[0] == 413


@pytest.mark.parametrize(
    ("host", "near", "wide"),
    [
        ("127.0.0.1:7860", True, True),
        ("[::1]:7860", True, True),
        ("LOCALHOST", True, True),
        ("10.0.0.7:7860", False, True),
        (socket.gethostname(), False, True),
        ("evil.example", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("127.0.0.1:7860.evil.example", False, False),
        ("evil.example@127.0.0.1", True, True),  # its host is 127.0.0.1
        ("", False, False),
        ("[", False, False),
    ],
)
def test_hosts(host, near, wide):
    assert Access().host_allowed(host) is near
    assert Access(token="t", open_wider=True).host_allowed(host) is wide


def test_mistakes_are_the_users(runs):
    with pytest.raises(UserError, match="--open-wider"):
        launch(runs, host="0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose a different --port"):
            launch(runs, port=taken.getsockname()[1])


@pytest.mark.slow
def test_a_box_over_the_points_filters_and_an_expression_is_counted(visit):
    with visit("?base=luspo@0&others=luspo@40") as opened:
        page = opened.page
        chart = page.locator("#overview figure:has-text('Length by problem') .chart")
        chart.locator(".mark-symbol path").first.wait_for()
        boxes = [mark.bounding_box() for mark in chart.locator(".mark-symbol path").all()]
        left, top = min(box["x"] for box in boxes) - 6, min(box["y"] for box in boxes) - 6
        right = max(box["x"] + box["width"] for box in boxes) + 6
        middle = sorted(box["y"] for box in boxes)[len(boxes) // 2] + 1
        page.mouse.move(left, top)
        page.mouse.down()
        page.mouse.move(right, middle, steps=5)
        page.mouse.up()
        page.wait_for_function("location.search.includes('box=')")
        page.wait_for_function("document.querySelector('#count .count').innerText.includes('pass the filters')")
        kept = int(page.inner_text("#count .count b"))
        assert 0 < kept < 24
        page.click("#count button")
        page.wait_for_function("document.querySelector('#count .count').innerText.startsWith('24 problems')")
        page.fill("#overview .pattern input", r"(?i)\bcheck\b")
        page.keyboard.press("Enter")
        page.wait_for_selector("#overview .asking tbody tr >> nth=1")
        assert "pattern=" in page.url and "baseline" in page.inner_text("#overview .asking tbody")
        chart.locator(".mark-symbol path").last.click()
        page.wait_for_selector("#problem .ckpt >> nth=1")


@pytest.mark.slow
def test_the_page_says_that_it_is_loading(served, visit):
    with visit("?base=luspo@0&others=luspo@40") as opened:
        page = opened.page
        page.wait_for_selector("#overview .lead")
        assert page.locator("#loading").evaluate("box => getComputedStyle(box).opacity") == "0"
        page.route("**/queue/data*", lambda route: None)  # the answer does not come
        page.click("button[role=tab]:has-text('Table')")
        page.wait_for_function("getComputedStyle(document.querySelector('#loading')).opacity === '1'")
        assert "loading" in page.inner_text("#loading") and "loading" in page.inner_text("#table")
