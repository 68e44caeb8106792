"""A reply while it grows: what came before a fault is kept, and nothing is generated once nobody reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.helpers.chat_server import WORDS, ChatServer, chat_server
from tests.helpers.served import free_port
from vlm_rl.chat_endpoint.client import ChatEndpoint, Timeouts
from vlm_rl.chat_endpoint.stream import StreamedReply, stream

BODY = {"model": "m", "messages": [{"content": "2 + 2?"}]}
PATIENT = Timeouts(whole=60, connect=30, pause=30)
QUICK = Timeouts(whole=60, connect=30, pause=0.4)  # for a server that hangs: others may be slow where much runs


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def never() -> bool:
    return False


def endpoint_of(server: ChatServer, behaviour: str, *, timeouts: Timeouts = PATIENT) -> ChatEndpoint:
    return ChatEndpoint(server.url(behaviour), key="s3cret", timeouts=timeouts)


def last(server: ChatServer, behaviour: str, *, timeouts: Timeouts = PATIENT, model: str = "m") -> StreamedReply:
    endpoint = endpoint_of(server, behaviour, timeouts=timeouts)
    return [*stream(endpoint, BODY | {"model": model}, is_cancelled=never)][-1]


def test_a_reply_is_joined_from_its_pieces(server: ChatServer) -> None:
    reply = last(server, "good", model="")
    assert (reply.content, reply.reasoning, reply.end, reply.error) == ("".join(WORDS), "", "stop", None)
    assert (reply.num_pieces, reply.counts) == (len(WORDS), (9, None))
    asked = server.asked[-1]
    assert (asked["model"], asked["stream"], asked["stream_options"]) == ("only", True, {"include_usage": True})


def test_reasoning_of_its_own_field_and_the_servers_counts(server: ChatServer) -> None:
    reply = last(server, "apart")
    assert (reply.reasoning, reply.content, reply.end, reply.counts) == ("hm <b>", "four", "length", (12, 10))


def test_counts_that_cannot_be_are_not_believed(server: ChatServer) -> None:
    reply = last(server, "counts")
    assert (reply.content, reply.end, reply.counts) == ("<think>a", "stop", None)


def test_a_server_that_sends_the_key_back_shows_it_to_nobody(server: ChatServer) -> None:
    reply = last(server, "echo")  # which cuts the key in two
    assert reply.num_pieces == 2 and reply.content == "2 + 2? Bearer *** 3"


def test_one_of_two_models_is_not_chosen_by_chance(server: ChatServer) -> None:
    reply = last(server, "two", model="")
    assert str(reply.error) == "the server does not name one model (2 listed): say which with the model"


@pytest.mark.parametrize(
    ("behaviour", "text", "message"),
    [
        ("refuse", "", "the server answered 400: no <i>such</i> model"),
        ("broken", "", r"the server answered 500: out of memory for Bearer \*\*\*$"),
        ("endless_error", "", "the server answered 503: busy busy"),
        ("redirect", "", "the server answered 307: $"),
        ("hang", "wait", "the server did not send anything for 0.4 s"),
        ("headers", "", "the connection failed: "),
        ("silent", "", "the connection failed: "),
        ("cut", "half an", "the connection ended in the middle of the reply"),
        ("html", "", "the connection ended in the middle of the reply"),
        ("fault", "half", r"the server reports: engine died with Bearer \*\*\*$"),
        ("huge", "xxx", "the reply is longer than 200,000 characters"),
        ("line", "", "the reply is larger than 8 MiB, or has no line ends"),
        ("garbage", "", "the reply cannot be read: "),
        ("nested", "", "the reply cannot be read: ValueError"),
        ("shape", "", "the reply cannot be read: AttributeError"),
        ("gzip", "", "the server sent a compressed reply, which was not asked for"),
    ],
)
def test_a_fault_is_named_and_what_came_is_kept(server: ChatServer, behaviour: str, text: str, message: str) -> None:
    reply = last(server, behaviour, timeouts=QUICK if behaviour == "hang" else PATIENT)
    assert reply.end == "" and reply.content.startswith(text) and bool(reply.content) == bool(text)
    assert re.match(message, str(reply.error)) and "s3cret" not in str(reply.error)
    assert reply.error is not None and reply.error.is_refusal == (behaviour == "refuse")


def test_a_server_that_is_not_there() -> None:
    endpoint = ChatEndpoint(f"http://127.0.0.1:{free_port()}/v1", timeouts=PATIENT)
    (reply,) = stream(endpoint, BODY, is_cancelled=never)
    assert str(reply.error).startswith("the connection failed: ") and reply.error is not None and reply.error.may_pass


@pytest.mark.parametrize("how", ["cancelled", "left", "whole"])
def test_a_stream_is_broken_off(server: ChatServer, how: str) -> None:
    """The server sees the connection close: nothing is generated after it."""
    server.ended.clear()
    before, asked = server.broken.count("endless"), len(server.asked)
    timeouts = Timeouts(whole=1.0) if how == "whole" else PATIENT
    grown: list[int] = []
    reply = None
    replies = stream(
        endpoint_of(server, "endless", timeouts=timeouts),
        BODY,
        is_cancelled=lambda: how == "cancelled" and len(grown) > 1,
    )
    for reply in replies:
        grown.append(reply.num_pieces)
        if how == "left" and len(grown) == 2:
            replies.close()
    assert len(server.asked) == asked + 1
    while server.broken.count("endless") == before:  # an earlier reply may end late, and ended is set then too
        assert server.ended.wait(30)
        server.ended.clear()
    assert server.broken.count("endless") == before + 1
    assert 0 < grown[0] < grown[1]
    ends = {"cancelled": ("cancelled", ""), "left": ("", ""), "whole": ("", "the server has not finished within 1 s")}
    assert reply and (reply.end, str(reply.error or "")) == ends[how]


def test_a_stream_that_is_cancelled_while_the_server_is_silent_does_not_wait(server: ChatServer) -> None:
    looks = iter([False] * 3)
    (reply,) = stream(endpoint_of(server, "list_hang"), BODY | {"model": ""}, is_cancelled=lambda: next(looks, True))
    assert (reply.end, reply.error) == ("cancelled", None)
