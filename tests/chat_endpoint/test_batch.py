"""Many requests to one endpoint: sent once, tried again, kept on the disk and counted, whatever the server does."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_server import REPLY, ChatServer, chat_server
from tests.helpers.served import free_port
from vlm_rl.chat_endpoint.batch import BatchClient, BatchReply
from vlm_rl.chat_endpoint.cache import ReplyCache, key_of
from vlm_rl.chat_endpoint.client import ChatEndpoint, Completion, Timeouts


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_asked(server: ChatServer) -> None:
    server.asked.clear()
    server.headers.clear()


def client_of(folder: Path, url: str, *, timeout: float = 30.0, retries: int = 0, **options: Any) -> BatchClient:
    endpoint = ChatEndpoint(url, key="s3cret", called="the judge", timeouts=Timeouts(timeout))
    return BatchClient(endpoint, cache=folder / "cache", retries=retries, **options)


def body_of(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"content": text}]}


def ask(client: BatchClient, *texts: str) -> list[BatchReply]:
    return client.ask(texts, body_of=body_of)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_equal_requests_are_sent_once_and_replies_are_kept(tmp_path: Path, server: ChatServer) -> None:
    replies = ask(client_of(tmp_path, server.url("slow"), concurrency=3), "a", "b", "a", "c", "d", "a")
    assert [reply.text for reply in replies] == [REPLY] * 6
    assert len(server.asked) == 4 and server.most <= 3
    total = {key: sum(reply.cost[key] for reply in replies) for key in replies[0].cost}
    assert total == {"requests": 4, "cached": 2, "prompt_tokens": 44, "completion_tokens": 20}
    (again,) = ask(client_of(tmp_path, server.url("slow")), "b")  # another process, another day
    assert again.cost == {"requests": 0, "cached": 1, "prompt_tokens": 0, "completion_tokens": 0}
    assert len(server.asked) == 4 and len(files_of(tmp_path / "cache")) == 4
    ask(client_of(tmp_path, server.url("good")), "b")  # another server
    assert len(server.asked) == 5


def test_half_of_a_surrogate_pair_is_sent(tmp_path: Path, server: ChatServer) -> None:
    assert ask(client_of(tmp_path, server.url("good")), "so \ud800")[0].text == REPLY
    assert server.asked == [body_of("so \ud800")]


def test_a_busy_server_is_asked_again(tmp_path: Path, server: ChatServer) -> None:
    (reply,) = ask(client_of(tmp_path, server.url("busy_once"), retries=1), "a")
    assert reply.text == REPLY and reply.cost["requests"] == 2


@pytest.mark.parametrize(
    ("behaviour", "tries"),
    [("broken", 3), ("endless_error", 3), ("silent", 3), ("refuse", 1), ("html", 1), ("gzip", 1)],
)
def test_only_a_failure_that_may_pass_is_tried_again(
    tmp_path: Path, server: ChatServer, behaviour: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_rl.chat_endpoint.batch._LONGEST_PAUSE", 0.01)
    (reply,) = ask(client_of(tmp_path, server.url(behaviour), retries=2), "a")
    assert reply.text is None and reply.cost["requests"] == len(server.asked) == tries


FAULTS = {
    "broken": "the judge answered 500: out of memory for Bearer ***",
    "endless_error": "the judge answered 503: busy busy",
    "refuse": "the judge answered 400: no <i>such</i> model",
    "redirect": "the judge answered 307: ",
    "hang": "the judge did not reply within 0.3 s",
    "drip": "the judge did not reply within 0.3 s",
    "endless": "the judge's reply is larger than 1024 KiB",
    "headers": "the connection failed: ",
    "html": "the judge sent text/html, not application/json",
    "garbage": "the judge's reply is not a chat completion",
    "nested": "the judge's reply is not a chat completion",
    "shape": "the judge's reply is not a chat completion",
    "empty": "the judge's reply holds no text; a reasoning model may need more tokens",
    "gzip": "the judge sent a compressed reply, which was not asked for",
    "cut": "the connection failed: ",
    "silent": "the connection failed: ",
}


@pytest.mark.parametrize("behaviour", FAULTS)
def test_each_fault_is_named_and_kept_from_the_cache(tmp_path: Path, server: ChatServer, behaviour: str) -> None:
    timeout = 0.3 if behaviour in ("hang", "drip") else 30.0
    client = client_of(tmp_path, server.url(behaviour), timeout=timeout, tokens_setting="tokens")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (reply,) = ask(client, "a")
    assert reply.text is None and reply.failure.startswith(FAULTS[behaviour]) and "s3cret" not in reply.failure
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB
    assert files_of(tmp_path) == []
    assert reply.cost["completion_tokens"] == (4 if behaviour == "empty" else 0)  # paid for
    assert reply.cost["prompt_tokens"] == 0  # -3 is not a count


def test_counts_that_cannot_be_are_not_believed(tmp_path: Path, server: ChatServer) -> None:
    (reply,) = ask(client_of(tmp_path, server.url("counts")), "a")
    assert reply.text == "7" and reply.cost == {
        "requests": 1,
        "cached": 0,
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }


def test_no_server_at_all_is_given_up_after_as_many_failures_as_requests_run(tmp_path: Path) -> None:
    client = client_of(tmp_path, f"http://127.0.0.1:{free_port()}/v1", concurrency=4)
    failures = [reply.failure for reply in ask(client, *map(str, range(50)))]
    asked = [failure for failure in failures if failure.startswith("the connection failed: ")]
    assert 4 <= len(asked) <= 7  # those under way when the fourth failed
    given_up = {failure.partition(": ")[0] for failure in failures} - {"the connection failed"}
    assert given_up == {"the judge was not asked"}


def test_a_run_that_stops_does_not_wait(tmp_path: Path, server: ChatServer) -> None:
    stops = itertools.chain([False] * 3, itertools.repeat(True))
    client = client_of(tmp_path, server.url("hang"), timeout=10_000.0, concurrency=2)
    replies = client.ask("abc", body_of=body_of, is_stopped=lambda: next(stops))
    client.abort()
    assert [(reply.text, reply.failure) for reply in [*replies, *ask(client, "a")]] == [(None, "")] * 4


def test_the_key_is_in_no_file(tmp_path: Path, server: ChatServer) -> None:
    """Not even where the server sends it back."""
    (reply,) = ask(client_of(tmp_path, server.url("echo")), "a")
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert reply.text == "a Bearer *** 3" and "s3cret" not in file.read_text()


# -- the cache ----------------------------------------------------------------------------------------


def test_a_cache_of_an_older_version_is_read(tmp_path: Path, server: ChatServer) -> None:
    """Its names and its form stay: the digest is of this JSON with the address as it is given."""
    url = "http://127.0.0.1:1/v1/"
    text = '["http://127.0.0.1:1/v1/", {"messages": [{"content": "a"}], "model": "m"}]'
    name = hashlib.sha256(text.encode()).hexdigest()
    file = tmp_path / "cache" / name[:2] / f"{name}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"key": name, "text": "kept"}))
    (reply,) = ask(client_of(tmp_path, url), "a")
    assert reply.text == "kept" and reply.cost["requests"] == 0


def _write(folder: Path, key: str, text: str, is_over: Any) -> None:
    while not is_over.is_set():
        ReplyCache(folder).put(key, Completion(text, 3, 4))


def test_a_pipe_in_the_place_of_a_reply_is_never_opened(tmp_path: Path) -> None:
    cache, whole = ReplyCache(tmp_path), Completion("yes")
    cache.put("ab", whole)
    assert cache.get("ab") == whole
    (tmp_path / "ab" / "ab.json").unlink()
    os.mkfifo(tmp_path / "ab" / "ab.json")
    assert cache.get("ab") is None


def test_two_writers_leave_a_whole_reply(tmp_path: Path) -> None:
    """A reader beside them sees a whole reply at any time."""
    key, texts = key_of("u", {}), ("a" * 50_000, "b" * 50_000)
    ReplyCache(tmp_path).put(key, Completion(texts[0], 3, 4))
    context = multiprocessing.get_context("fork")
    is_over = context.Event()
    writers = [context.Process(target=_write, args=(tmp_path, key, text, is_over)) for text in texts]
    for writer in writers:
        writer.start()
    replies = {Completion(text, 3, 4) for text in texts}
    seen, num_reads = set(), 0
    while seen < replies or num_reads < 200:
        seen.add(ReplyCache(tmp_path).get(key))
        num_reads += 1
    is_over.set()
    for writer in writers:
        writer.join()
    assert seen == replies
    assert files_of(tmp_path) == [f"{key}.json"]


@pytest.mark.parametrize("damage", [b"", b'{"key": ', b"[]", b'{"key": "x", "text": "y"}', b"\xff", b"[" * 100_000])
def test_a_damaged_reply_is_asked_for_again(tmp_path: Path, damage: bytes) -> None:
    cache, key = ReplyCache(tmp_path), key_of("u", {})
    whole = Completion("text", 3, 4, "thought", "length")
    cache.put(key, whole)
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(damage)
    assert cache.get(key) is None
    cache.put(key, whole)
    assert cache.get(key) == whole
