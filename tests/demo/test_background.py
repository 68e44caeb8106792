"""The demo beside a notebook: it answers in the background, and pages of this machine may frame it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from starlette.responses import HTMLResponse

import vlm_rl
from tests.helpers.browser import open_browser, open_page
from tests.helpers.example_run import build_run
from tests.helpers.served import Served
from vlm_rl.demo.background import DemoServer


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    run = build_run(tmp_path_factory.mktemp("background") / "run", steps=2, num_problems=4)
    server = vlm_rl.show_demo(run)
    yield server
    server.close()
    with pytest.raises(OSError):
        _status(server, {})


def _status(server: DemoServer, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2].strip("/")), timeout=30)
    connection.request("GET", "/", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize(
    ("mode", "destination", "status"),
    [
        ("navigate", "iframe", 200),
        ("navigate", "document", 200),
        ("navigate", "embed", 403),
        ("no-cors", "image", 403),
    ],
)
def test_a_page_of_another_site_opens_it_in_a_frame_or_by_a_link_alone(
    shown: DemoServer, mode: str, destination: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": destination}
    assert _status(shown, headers) == status


def test_a_taken_port_is_named(shown: DemoServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(vlm_rl.UserError, match=f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}"):
            vlm_rl.show_demo(Path(vlm_rl.__file__).parent / "demo/assets/recorded/luspo", port=taken.getsockname()[1])


@pytest.mark.slow
def test_a_notebook_on_this_machine_shows_it_and_a_foreign_page_does_not(shown: DemoServer) -> None:
    async def notebook(scope, receive, send) -> None:
        await HTMLResponse(f"<!doctype html><title>n</title>{shown._repr_html_()}")(scope, receive, send)

    server = Served(notebook)
    try:
        with open_browser() as browser, open_page("about:blank", browser=browser) as visit:
            page = visit.page
            for host, is_shown in (("localhost", True), ("notebook.example", False)):
                page.route("http://notebook.example:*/**", lambda route: route.fulfill(body=shown._repr_html_()))
                page.goto(f"http://{host}:{server.port}/")
                frame = page.frame_locator("iframe")
                if is_shown:
                    frame.locator("button[role=tab]").first.wait_for()
                else:
                    page.wait_for_timeout(2000)
                    assert frame.locator("button[role=tab]").count() == 0
    finally:
        server.stop()
