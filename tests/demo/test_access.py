"""Who may ask: the token where others can reach the demo, and the address of a proxy before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.helpers.browser import open_browser, open_page
from tests.helpers.example_run import build_run
from tests.helpers.served import Served, free_port
from vlm_rl.demo.server import launch, make_server
from vlm_rl.demo.web.access import Access, read_token
from vlm_rl.errors import UserError

TOKEN = "a-token-of-this-test"
PUBLIC = "https://example.org/demo"
ROUTES = [
    "/", "/config", "/theme.css", "/manifest.json", "/favicon.ico", "/charts/vega.js", "/export/samples.csv",
    "/gradio_api/info", "/gradio_api/app_id", "/gradio_api/startup-events", "/gradio_api/heartbeat/s",
    "/gradio_api/queue/data?session_hash=s", "/live/picture/example-0000", "/static/js/x.js", "/none",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return build_run(tmp_path_factory.mktemp("access") / "run", steps=2, num_problems=4).path


@pytest.fixture(scope="module")
def access() -> Access:
    return Access(token=TOKEN, open_wider=True)


@pytest.fixture(scope="module")
def served(run, access) -> Iterator[Served]:
    """Yield a demo that asks for the token."""
    server = Served(make_server([run], access=access))
    yield server
    server.stop()


@pytest.fixture
def client(served, access) -> Iterator[httpx.Client]:
    access._wrong.clear()  # of the tests before
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        yield client


def log_in(client: httpx.Client, token: str = TOKEN, **options) -> httpx.Response:
    return client.post("/login?tab=lengths", data={"token": token}, **options)


def test_every_route_is_behind_the_token(client):
    for path in ROUTES:
        answer = client.get(path)
        assert answer.status_code == 401 and len(answer.content) < 2000
    for path in ("/gradio_api/queue/join", "/gradio_api/cancel", "/live/picture", "/none"):
        assert client.post(path, content=b"x").status_code == 401
    for cookie in ("", TOKEN, "x" * 43):
        name = "vlm-rl-demo-" + re.sub(r"\W", "-", urlsplit(str(client.base_url)).netloc)
        assert client.get("/", headers={"Cookie": f"{name}={cookie}"}).status_code == 401
    for header in (f"Bearer {TOKEN}x", "Bearer", f"Basic {TOKEN}", "Bearer \xff".encode("latin-1")):
        assert client.get("/", headers={"Authorization": header}).status_code == 401


def test_logging_in_leads_to_the_view_that_was_asked_for(client):
    answer = log_in(client)
    assert answer.status_code == 303 and answer.headers["location"] == "./?tab=lengths"
    flags = answer.headers["set-cookie"].lower()
    assert "httponly" in flags and "samesite=strict" in flags and "path=/;" in flags and "secure" not in flags
    assert TOKEN not in flags
    assert client.get("/").status_code == 200 and client.get("/export/samples.csv").status_code == 200
    client.cookies.clear()
    assert client.get("/").status_code == 401
    assert client.get("/config", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_program_sends_the_token(client):
    from gradio_client import Client

    program = Client(str(client.base_url), headers={"Authorization": f"Bearer {TOKEN}"}, verbose=False)
    assert program.predict("", api_name="/summary")["query"]


def test_wrong_tokens_are_bounded_and_lock_nobody_out(client):
    log_in(client)
    with httpx.Client(base_url=client.base_url, trust_env=False) as stranger:
        assert [log_in(stranger, f"{TOKEN}{index}").status_code for index in range(10)] == [401] * 10
        assert log_in(stranger, "one more").status_code == 429
        assert stranger.get("/", headers={"Authorization": "Bearer one more"}).status_code == 429
        assert stranger.get("/config", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert log_in(stranger).status_code == 303
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("body", [b"", b"token", b"token=%ff&token=x", b"\xff", b"a=1&" * 2000, b"x" * 70_000])
def test_odd_forms_are_refused_without_a_line_in_the_log(client, capfd, body):
    assert client.post("/login?%22%3e%3cscript%3e", content=body).status_code in (401, 413)
    assert capfd.readouterr().err == ""


def test_the_login_page_shows_a_query_as_text_and_runs_no_script(client):
    answer = client.get('/?%22%3e%3cscript%3e=1&a="><script>')
    assert (
        "<script>" not in answer.text and "default-src 'none'; style-src" in answer.headers["content-security-policy"]
    )


def test_a_foreign_page_cannot_log_a_visitor_in(client):
    for origin in ("http://evil.example", "null", "https://evil.example"):
        assert log_in(client, headers={"Origin": origin}).status_code == 403
    assert log_in(client, headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_elsewhere_makes_the_server_do_nothing(client, site):
    """Its images, scripts and frames ask without an Origin; a link that somebody follows is another thing."""
    log_in(client)
    path = "/export/samples.csv"
    for mode, dest in (("no-cors", "image"), ("no-cors", "script"), ("navigate", "iframe"), ("cors", "empty")):
        given = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        assert client.get(path, headers=given).status_code == 403, (mode, dest)
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get(path, headers=link).status_code == 200
    assert client.post("/login", headers=link, content=f"token={TOKEN}").status_code == 403
    for own in ("same-origin", "none"):
        assert client.get(path, headers={**link, "Sec-Fetch-Site": own}).status_code == 200


class Proxy:
    """A reverse proxy in miniature: it offers an application below /demo, under its own or the upstream's name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.elsewhere: set[str] = set()  # what was asked for outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and not path.startswith("/demo/"):
            self.elsewhere.add(path)
            await PlainTextResponse("not here", 404)(scope, receive, send)
        else:
            await self._app({**scope, "path": path.removeprefix("/demo")}, receive, send)


def test_behind_a_proxy_the_cookie_is_secure_and_stays_below_its_path(run):
    server = Served(make_server([run], access=Access(token=TOKEN, public_url=PUBLIC + "/")))
    try:
        for host in ("example.org", f"127.0.0.1:{server.port}"):  # a proxy may pass its own name or the upstream's
            headers = {"Host": host, "Origin": "https://example.org"}
            answer = httpx.post(server.url + "login", data={"token": TOKEN}, headers=headers, trust_env=False)
            assert answer.status_code == 303
            assert answer.headers["set-cookie"].lower().endswith("; httponly; path=/demo; samesite=strict; secure")
        headers = {"Host": "example.org", "Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(server.url + "config", headers=headers, trust_env=False).json()["root"] == PUBLIC
        assert server.ask("GET", "/", {"Host": "example.com"})[0] == 403
        assert server.ask("GET", "/", {"Host": "example.org", "Origin": "https://example.com"})[0] == 403
    finally:
        server.stop()


@pytest.mark.slow
def test_a_person_logs_in_and_uses_the_page_below_a_path(run):
    port = free_port()
    public = f"http://127.0.0.1:{port}/demo"
    proxy = Proxy(make_server([run], access=Access(token=TOKEN, public_url=public)))
    server = Served(proxy, port=port)
    try:
        with open_browser() as browser, open_page("about:blank", browser=browser) as visit:
            page = visit.page
            page.goto(f"{public}/?tab=training")
            page.get_by_label("The token").fill("wrong")
            page.click("button")
            page.wait_for_selector("[role=alert]")
            visit.failures.clear()  # both pages had status 401
            page.get_by_label("The token").fill(TOKEN)
            page.click("button")
            page.wait_for_selector("#training .chart svg")
            assert page.url.startswith(f"{public}/?")
            page.click("button[role=tab]:has-text('Problems')")
            page.wait_for_selector("#problem .answer .katex")
            page.click("button[role=tab]:has-text('Export')")
            with page.expect_download() as download:
                page.click("#export a[download='samples.csv']")
            assert Path(download.value.path()).stat().st_size > 100
            assert page.evaluate("document.cookie") == ""
            assert proxy.elsewhere <= {"/manifest.json", "/favicon.ico"}  # browsers look there for gradio's page
            assert len(visit.failures) <= len(proxy.elsewhere)
            assert all(url.startswith(public) for url in visit.requests[1:])
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff" * 20, "cannot be read"),
        (b"", "16 to 1000"),
        (b"short\n", "16 to 1000"),
        (b"two words of it all", "16 to 1000"),
    ],
)
def test_a_token_file_that_is_unfit_says_so(tmp_path, content, said):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(UserError, match=rf"--token-file .*token .*{said}"):
        launch([], token_file=tmp_path / "token")


def test_a_token_file_may_end_with_a_line_break(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN


@pytest.mark.parametrize(
    "url", ["example.org", "ftp://example.org", "https://", "https://[", "https://a/b?c", "/demo"]
)
def test_a_public_url_that_is_none_says_so(url):
    with pytest.raises(UserError, match="--public-url"):
        launch([], public_url=url)


@pytest.mark.parametrize("options", [{"open_wider": True}, {"public_url": PUBLIC}])
def test_nothing_that_others_reach_goes_without_a_token(options):
    with pytest.raises(UserError, match="needs a token"):
        Access(**options)
