"""A reward model that classifies, on a real server that speaks as vLLM's does; and what it answers instead."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.helpers.chat_server import ChatServer, chat_server
from vlm_rl.config import RewardModelConfig
from vlm_rl.rewards.reward_model import RewardModel
from vlm_rl.types import Call, Grade, Problem

GRADE = Grade("wrong", None, "test", "")
PICTURE = b"\x89PNG and so on"
PROBLEM = Problem("p", "<image>How many <image>?", (PICTURE, PICTURE), "3", "integer")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def model_of(server: ChatServer, folder: Path, behaviour: str = "probs", **settings: Any) -> RewardModel:
    url = server.url(behaviour).removesuffix("/v1")
    return RewardModel(RewardModelConfig(url=url, model="m", retries=0, **settings), cache=folder / "cache")


def calls(*responses: str) -> list[Call]:
    return [(PROBLEM, response, GRADE, 3) for response in responses]


def test_the_value_is_the_probability_of_the_label(server: ChatServer, tmp_path: Path) -> None:
    model = model_of(server, tmp_path, label=1, images=True)
    assert [verdict.outcome for verdict in model.verdicts(calls("good", "bad", "good"))] == [0.75, 0.0, 0.75]
    assert len(server.asked) == 2, "equal chats are asked about once"
    user, assistant = server.asked[0]["messages"]
    kinds = [part["type"] for part in user["content"]]
    assert kinds == ["image_url", "text", "image_url", "text"]
    assert assistant == {"role": "assistant", "content": server.asked[0]["messages"][1]["content"]}
    assert server.asked[0]["model"] == "m"
    again = model_of(server, tmp_path, label=0, images=True)
    assert [verdict.outcome for verdict in again.verdicts(calls("good"))] == [0.25]
    assert len(server.asked) == 2, "the reply is kept with all labels"


def test_an_image_behind_a_video_is_not_one_of_its_frames(server: ChatServer, tmp_path: Path) -> None:
    frames, image = (b"\x89PNG a", b"\x89PNG b"), b"\x89PNG c"
    problem = Problem("p", "<video> and <image>", (*frames, image), "3", "integer", meta={"videos": [[0.0, 1.0]]})
    model_of(server, tmp_path, images=True).verdicts([(problem, "good", GRADE, 3)])
    content = server.asked[0]["messages"][0]["content"]
    shown = [
        base64.b64decode(p["image_url"]["url"].partition(",")[2]) if "image_url" in p else p["text"] for p in content
    ]
    assert shown == [*frames, " and ", image]


def test_without_images_the_question_is_text(server: ChatServer, tmp_path: Path) -> None:
    model_of(server, tmp_path).verdicts(calls("good"))
    assert server.asked[0]["messages"][0]["content"] == "How many ?"


@pytest.mark.parametrize(
    ("behaviour", "settings", "told"),
    [
        ("probs", {"label": 2}, "has 2 labels, and reward.reward_model.label is 2"),
        ("no_probs", {}, "reply holds no probabilities"),
        ("broken", {}, "the reward model answered 500"),
        ("good", {}, "reply holds no probabilities"),
    ],
)
def test_a_reply_without_a_value_is_a_reason(
    behaviour: str, settings: dict[str, Any], told: str, server: ChatServer, tmp_path: Path
) -> None:
    (verdict,) = model_of(server, tmp_path, behaviour, **settings).verdicts(calls("good"))
    assert told in str(verdict.outcome)


def test_an_address_with_v1_is_refused() -> None:
    with pytest.raises(ValidationError, match="leave /v1 out"):
        RewardModelConfig(url="http://127.0.0.1:8001/v1", model="m")
