"""One server: its list of models, its key, its certificate; test_batch and test_stream have the faults of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chat_server import REPLY, ChatServer, chat_server, self_signed
from tests.helpers.served import free_port
from vlm_rl.chat_endpoint.client import ChatEndpoint, Completion, EndpointError, Timeouts, check_address, read_key
from vlm_rl.errors import UserError


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def endpoint_of(url: str, *, seconds: float = 30.0, key: str = "s3cret") -> ChatEndpoint:
    return ChatEndpoint(url, key=key, timeouts=Timeouts(seconds))


def complete(endpoint: ChatEndpoint) -> Completion:
    async def ask() -> Completion:
        async with endpoint.connected() as http:
            return await endpoint.complete(http, {"messages": [{"content": "2 + 2?"}]})

    return asyncio.run(ask())


def models(endpoint: ChatEndpoint) -> list[str]:
    async def ask() -> list[str]:
        async with endpoint.connected() as http:
            return await endpoint.models(http)

    return asyncio.run(ask())


# -- the list of models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "names"),
    [
        ("good", ["only"]),
        ("two", ["a", "b"]),
        ("none", []),
        ("echo", ["***"]),
        *((f"list_{fault}", []) for fault in ("broken", "refuse", "redirect", "html", "garbage", "nested", "gzip")),
        ("list_endless", []),  # read up to the limit
    ],
)
def test_a_server_names_its_models_or_none(server: ChatServer, behaviour: str, names: list[str]) -> None:
    assert models(endpoint_of(server.url(behaviour))) == names


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("list_hang", "the server did not reply within 0.3 s"),
        ("list_drip", "the server did not reply within 0.3 s"),
        ("list_silent", "the connection failed: "),
        ("list_headers", "the connection failed: "),
        ("list_cut", "the connection failed: "),
    ],
)
def test_a_server_that_gives_no_reply_has_no_list(server: ChatServer, behaviour: str, reason: str) -> None:
    with pytest.raises(EndpointError, match=f"^{reason}"):
        models(endpoint_of(server.url(behaviour), seconds=0.3 if "within" in reason else 30.0))


# -- the key ------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_no_message_holds_a_part_of_it(server: ChatServer) -> None:
    """A message is cut after 300 characters: here in the middle of the key, which is masked before that."""
    with pytest.raises(EndpointError, match="answered 500") as caught:
        complete(endpoint_of(server.url("cut_key")))
    assert server.headers[-1]["Authorization"] == "Bearer s3cret"
    assert str(caught.value).endswith("x Bearer **…")
    assert complete(endpoint_of(server.url("echo"))).text == "2 + 2? Bearer *** 3"
    complete(endpoint_of(server.url("good"), key=""))
    assert "Authorization" not in server.headers[-1]


def test_a_key_is_read_by_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-s3cret")
    assert read_key("JUDGE_KEY", setting="--key") == "sk-s3cret" and read_key("", setting="--key") == ""
    monkeypatch.setenv("judge.key", "sk-s3cret")
    assert read_key("judge.key", setting="--key") == "sk-s3cret"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JUDGE_KEY", None, "--key: the environment variable JUDGE_KEY is not set: set it to the key"),
        ("JUDGE_KEY", "", "--key: the environment variable JUDGE_KEY is not set: set it to the key"),
        ("JUDGE_KEY", "s3cret\nX: y", "--key: the environment variable JUDGE_KEY holds a space, a line end"),
        ("JUDGE_KEY", "s3crét", "--key: the environment variable JUDGE_KEY holds a space, a line end or a letter"),
        ("sk-s3cret", None, "--key must be the name of an environment variable, such as JUDGE_API_KEY"),
        ("sk_s3cret", None, "--key must be the name of an environment variable, such as JUDGE_API_KEY"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_and_never_printed(
    variable: str, value: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value) if value is not None else monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError) as caught:
        read_key(variable, setting="--key")
    assert str(caught.value).startswith(message) and "s3cr" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x/v1", "http://me:s3cret@x/v1", "http://x/v1?key=s3cret", "s3cret"])
def test_an_address_with_more_than_a_place_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match=r"^--judge is not a plain http.* see --judge-key-env$") as caught:
        check_address(url, setting="--judge", key_setting="--judge-key-env")
    assert "s3cret" not in str(caught.value)
    check_address("https://[::1]:8000/v1", setting="--judge", key_setting="--judge-key-env")


# -- the way there ------------------------------------------------------------------------------------


def test_a_redirect_is_not_followed_and_no_proxy_is_used(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either would get the key."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    before = len(server.asked)
    with pytest.raises(EndpointError, match="answered 307"):
        complete(endpoint_of(server.url("redirect")))
    assert len(server.asked) == before + 1
    assert complete(endpoint_of(server.url("good"))) == Completion(REPLY, 11, 5, finish="stop")


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody signed is trusted only where SSL_CERT_FILE holds it."""
    context, certificate = self_signed(tmp_path)
    with chat_server(context) as server:
        for scheme in ("https", "HTTPS"):
            with pytest.raises(EndpointError, match=r"the connection failed: .*CERTIFICATE_VERIFY_FAILED"):
                complete(endpoint_of(server.url("good").replace("https", scheme)))
        assert not server.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert complete(endpoint_of(server.url("good"))).text == REPLY
