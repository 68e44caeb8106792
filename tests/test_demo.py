"""The demo in a real browser: what it shows, what it refuses, and that it asks nobody else."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

import uvicorn
from browser import open_page
from example_run import build_run
from test_report import HOSTILE

from demo.app import length_chart
from demo.library import Library, kind_of
from demo.server import host_allowed, launch, make_server
from vlm_rl.errors import UserError


class Served:
    """The demo on a free port, in a thread of this process."""

    def __init__(self, runs: list[Path]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server = uvicorn.Server(
            uvicorn.Config(make_server(runs), host="127.0.0.1", port=self.port, log_level="error")
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}

    def stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(timeout=30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("demo")
    clean = build_run(root / "luspo", steps=40)
    stamped = build_run(root / "ba", steps=10, seed=1, algorithm="ba")
    stamped.stamp_contaminated(["MathVision"])
    return [clean.path, stamped.path]


@pytest.fixture(scope="module")
def served(runs) -> Iterator[Served]:
    server = Served(runs)
    yield server
    server.stop()


def test_the_page_compares_checkpoints_and_asks_nobody_else(served):
    with open_page(served.url) as visit:
        page = visit.page
        page.wait_for_selector("#problem .sample >> nth=1")
        page.wait_for_selector("#lengths .js-plotly-plot .legendtext >> nth=1")
        titles = page.locator("#problem .title").all_inner_texts()
        assert titles == ["luspo · step 0", "ba · step 10"]
        assert page.locator("#problem .chip.wrong, #problem .chip.correct").count() == 2
        assert all("tokens" in text for text in page.locator("#problem .head").all_inner_texts())
        assert page.evaluate("[...document.querySelectorAll('#problem img')].every(i => i.naturalWidth > 0)")
        assert "CONTAMINATED" in page.inner_text(".top")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert visit.requests and all(request.startswith(served.url) for request in visit.requests)
        assert visit.failures == []


def test_next_and_previous_walk_through_the_problems(served):
    with open_page(served.url) as visit:
        page = visit.page
        page.wait_for_selector(".where b:text-is('1')")
        first = page.inner_text("#problem .id")
        page.click("button:has-text('next')")
        page.wait_for_selector(".where b:text-is('2')")
        assert page.inner_text("#problem .id") != first
        for place in ("1", "24"):  # back to the first, and around to the last
            page.click("button:has-text('previous')")
            page.wait_for_selector(f".where b:text-is('{place}')")
        assert page.inner_text("#problem .id").startswith("toy-test-0023")
        assert visit.failures == []


def test_a_third_checkpoint_joins(served):
    with open_page(served.url) as visit:
        page = visit.page
        page.wait_for_selector("#problem .sample >> nth=1")
        page.get_by_label("Checkpoints, side by side").click()
        page.get_by_role("option", name="luspo · step 20").click()
        page.wait_for_selector("#problem .sample >> nth=2")
        assert page.locator("#problem .title").all_inner_texts()[1] == "luspo · step 20"  # in training order
        page.wait_for_selector("#lengths .legendtext >> nth=2")


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    run = build_run(tmp_path / "run", steps=2, num_problems=2, response=HOSTILE, question=HOSTILE)
    server = Served([run.path])
    try:
        with open_page(server.url) as visit:
            visit.page.wait_for_selector("#lengths .legendtext >> nth=1")
            assert "<script>window.pwned=1</script>" in visit.page.inner_text("#problem .answer >> nth=0")
            assert "${window.pwned=1} {{constructor}}" in visit.page.inner_text("#problem .answer >> nth=0")
            assert visit.page.locator("#problem form, #problem input, #problem script").count() == 0
            assert visit.page.evaluate("window.pwned") is None
            assert all(request.startswith(server.url) for request in visit.requests)
            assert visit.failures == []
    finally:
        server.stop()


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
        ("evil.example@127.0.0.1", True, True),  # its host is 127.0.0.1
        ("", False, False),
        ("[", False, False),
    ],
)
def test_hosts(host, near, wide):
    assert host_allowed(host, open_wider=False) is near
    assert host_allowed(host, open_wider=True) is wide


def test_mistakes_are_the_users(tmp_path, runs):
    bare = build_run(tmp_path / "bare", steps=1, eval_steps=())
    with pytest.raises(UserError, match="nothing to show"):
        Library([bare.path])
    with pytest.raises(UserError, match="no run directory"):
        Library([tmp_path / "none"])
    with pytest.raises(UserError, match="--open-wider"):
        launch(runs, host="0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another --port"):
            launch(runs, port=taken.getsockname()[1])


def test_the_library_sorts_problems_by_how_they_changed(runs):
    library = Library(runs[:1])
    labels = library.labels("toy-test")
    assert labels == ["step 0", "step 20", "step 40"] and library.first_choice("toy-test") == ["step 0", "step 40"]
    every = library.examples("toy-test", ["step 0", "step 40"])
    mended = library.examples("toy-test", ["step 0", "step 40"], "became right")
    assert 0 < len(mended) < len(every) == 24
    assert all(not e.samples[0].correct and e.samples[1].correct for e in mended)
    assert all(kind_of(e) != "became right" for e in every if e not in mended)


def test_the_chart_is_the_share_of_responses_up_to_each_length(runs):
    library = Library(runs[:1])
    example = library.examples("toy-test", ["step 40"])[0]
    figure = length_chart(library, "toy-test", ["step 40"], example)
    curve, dot = figure.data
    lengths = library.lengths("toy-test", "step 40")
    for x, y in zip(curve.x[1:-1], curve.y[1:-1], strict=True):
        assert np.sum(lengths < x) / 24 < y <= np.sum(lengths <= x) / 24
    ends = (curve.x[0], curve.y[0]), (curve.x[-1], curve.y[-1])
    assert ends == ((0, 0), (figure.layout.xaxis.range[1], 1)) and curve.x[-1] > lengths[-1]  # border to border
    assert dot.x[0] == example.samples[0].length and dot.y[0] == np.mean(lengths <= dot.x[0])


def test_lengths_that_are_all_equal_are_a_step_inside_the_chart(tmp_path):
    run = build_run(tmp_path / "run", steps=2, eval_steps=(0,))
    rows = run.evals()[0].rows().to_pylist()
    for step in (1, 2):
        run.write_eval("flat", step, [{**row, "length": 41} for row in rows], {"accuracy": 1.0})
    run.write_eval("flat", 3, [], {"accuracy": None})
    figure = length_chart(Library([run.path]), "flat", ["step 1", "step 2", "step 3"], None)
    one, other = figure.data  # nothing to draw of an evaluation without responses
    end = figure.layout.xaxis.range[1]
    assert end > 41 * 1.05 and list(one.x) == [0, *[41] * 24, end] and one.y[0] == 0 and one.y[-1] == 1
    assert one.name == "step 1, all 41" and one.line.dash != other.line.dash  # the one below shows through
