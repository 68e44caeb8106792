"""The judge: what it is asked, how its score is read, what it is in the reward. Its faults: tests/chat_endpoint."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.chat_server import ChatServer, chat_server
from tests.helpers.images import plain_png
from vlm_rl.config import JudgeConfig, RewardConfig, parse_config
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.metrics import asking_metrics
from vlm_rl.rewards.judge import Judge, read_score
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Call, Grade, Problem, Prompt, Rollout

RIGHT = Grade("correct", "5", "number", "")
PROBLEM = Problem("p", "<image>\nHow {answer}?", (plain_png(28, 28),), "5", "integer")


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_asked(server: ChatServer) -> None:
    server.asked.clear()
    server.headers.clear()


def config_of(folder: Path, url: str, **changes: Any) -> JudgeConfig:
    (folder / "prompt.txt").write_text("Q: {question} A: {answer} E: {extracted} R: {response} {other}")
    section = {"model": "m", "prompt": str(folder / "prompt.txt"), "highest": 10.0, "retries": 0, **changes}
    return JudgeConfig(url=url, **section)


def judge_of(folder: Path, url: str, **changes: Any) -> Judge:
    return Judge(config_of(folder, url, **changes), cache=folder / "cache")


def calls_of(*texts: str) -> list[Call]:
    return [(PROBLEM, text, RIGHT, 3) for text in texts]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# -- reading a score ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parser", "text", "score"),
    [
        ("number", "Score: 7", 0.7),
        ("number", "2 mistakes, so 7.5 of ten: 7.5", 0.75),
        ("number", "7/10", 0.7),
        ("number", "**Score:** 10/10.", 1.0),
        ("number", "7/5", None),  # another scale
        ("number", "11", None),
        ("number", "-1", None),
        ("number", "<think>9 or 10</think>", None),
        ("number", "<think>9</think> 3", 0.3),
        ("number", "version2 or v1", None),
        ("number", "7 out of 10", 0.7),
        ("number", "Score: 7 of 10.", 0.7),
        ("number", "Score: **7** OUT OF **10**", 0.7),
        ("number", "I give it 7 out of a possible 10.", 0.7),
        ("number", "4 out of 5", None),
        ("number", "It makes 1 of 3 errors. Score: 6", 0.6),
        ("number", "1" * 5000, None),
        ("yes_no", "Yes. No, wait: YES!", 1.0),
        ("yes_no", "yes, or rather no", 0.0),
        ("yes_no", "yesterday, nobody", None),
        ("json", 'first {"score": 1} then ```{"why": "x", "score": 5 }```', 0.5),
        ("json", '{"score": "5"}', None),
        ("json", "5", None),
        ("json", '{"score": 50}', None),
    ],
)
def test_a_score_is_read_or_there_is_none(parser: Any, text: str, score: float | None) -> None:
    config = JudgeConfig(url="http://x/v1", model="m", prompt="p", parser=parser, highest=10.0)
    assert read_score(text, config) == score


@settings(max_examples=60)
@given(st.text(alphabet='0123456789-./ "score:{},yesno', max_size=200), st.sampled_from(["number", "yes_no", "json"]))
def test_any_reply_gives_a_value_from_0_to_1_or_none(text: str, parser: Any) -> None:
    config = JudgeConfig(url="http://x/v1", model="m", prompt="p", parser=parser, lowest=-3.0, highest=10.0)
    score = read_score(text, config)
    assert score is None or 0 <= score <= 1


# -- asking -------------------------------------------------------------------------------------------


def test_what_the_judge_is_asked(tmp_path: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge = judge_of(
        tmp_path, server.url("good"), images=True, api_key_env="JUDGE_KEY", max_tokens=9, temperature=0.5
    )
    (verdict,) = judge.verdicts(calls_of("so {question} \ud800"))
    assert verdict.outcome == 0.7
    (body,) = server.asked
    image, text = body["messages"][0]["content"]
    assert text["text"] == "Q: How {answer}? A: 5 E: 5 R: so {question} \ud800 {other}"  # replaced in one pass
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == PROBLEM.images[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.5)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


def test_all_that_decides_a_reply_is_in_its_name(tmp_path: Path, server: ChatServer) -> None:
    other_image = replace(PROBLEM, images=(plain_png(28, 28, "blue"),))
    variants: list[tuple[dict[str, Any], Call]] = [
        ({}, calls_of("a")[0]),
        ({}, calls_of("b")[0]),
        ({}, (replace(PROBLEM, answer="6"), "a", RIGHT, 3)),
        ({"model": "n"}, calls_of("a")[0]),
        ({"max_tokens": 7}, calls_of("a")[0]),
        ({"temperature": 1.0}, calls_of("a")[0]),
        ({"images": True}, calls_of("a")[0]),
        ({"images": True}, (other_image, "a", RIGHT, 3)),
    ]
    base = config_of(tmp_path, server.url("good"))
    for changes, call in variants:
        Judge(base.model_copy(update=changes), cache=tmp_path / "cache").verdicts([call])
    assert len(server.asked) == len(files_of(tmp_path / "cache")) == len(variants)
    Judge(base.model_copy(update={"parser": "yes_no", "weight": 3.0}), cache=tmp_path / "cache").verdicts(
        calls_of("a")
    )
    assert len(server.asked) == len(variants)


def test_a_reply_without_a_score_and_a_judge_that_fails_are_reasons(tmp_path: Path, server: ChatServer) -> None:
    """The reply is kept: asked again, the judge would be paid again."""
    for _ in range(2):
        (verdict,) = judge_of(tmp_path, server.url("no_score")).verdicts(calls_of("a"))
        assert verdict.outcome == "the judge's reply holds no score: 'I would say 11/10'"
    assert len(server.asked) == len(files_of(tmp_path / "cache")) == 1
    (verdict,) = judge_of(tmp_path, server.url("empty")).verdicts(calls_of("a"))
    assert verdict.outcome == (
        "the judge's reply holds no text; a reasoning model may need more reward.judge.max_tokens"
    )
    assert verdict.cost == {"requests": 1, "cached": 0, "prompt_tokens": 0, "completion_tokens": 4}
    (verdict,) = judge_of(tmp_path, server.url("hang"), timeout=0.3).verdicts(calls_of("a"))
    assert verdict.outcome == "the judge did not reply within 0.3 s"


def test_a_run_that_stops_does_not_wait(tmp_path: Path, server: ChatServer) -> None:
    stops = itertools.chain([False] * 3, itertools.repeat(True))
    judge = judge_of(tmp_path, server.url("hang"), timeout=10_000.0, concurrency=2)
    verdicts = judge.verdicts(calls_of("a", "b", "c"), is_stopped=lambda: next(stops))
    assert [verdict.outcome for verdict in verdicts] == [0, 0, 0]
    judge.abort()
    assert judge.verdicts(calls_of("a"))[0].outcome == 0


# -- in the reward, and in the configuration ---------------------------------------------------------


def test_the_judge_is_a_part_and_counts_what_it_costs(tmp_path: Path, server: ChatServer) -> None:
    section = config_of(tmp_path, server.url("good"), weight=2.0)
    config = RewardConfig(overlong_buffer=0, format=0.0, judge=section)
    empty = np.zeros(0, dtype=np.int32)
    rollout = Rollout("p", 0, empty, empty, r"\boxed{5}", "stop", 0)
    with Grader(workers=1) as grader:
        reward = RewardFunction(
            config, template=TEMPLATES["plain"], max_tokens=8, grader=grader, judge_cache=tmp_path / "cache"
        )
        rewards = reward.score([(PROBLEM, Prompt("p", "", "", empty, empty, (), {}), rollout)] * 2)
    assert rewards[0].parts == {"accuracy": 1, "format": 0, "overlong": 0, "judge": 1.4}
    assert rewards[0].grade.path == "text"  # accuracy stays the grader's
    assert asking_metrics(rewards) == {
        "rewards/judge/undecided_rate": 0.0,
        "judge/requests": 1.0,
        "judge/cached": 1.0,
        "judge/prompt_tokens": 11.0,
        "judge/completion_tokens": 5.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://x/v1"}, r"reward\.judge: url is not a plain http"),
        ({"url": "http://me:s3cret@x/v1"}, r"reward\.judge: url is not a plain http"),
        ({"api_key_env": "sk-s3cret"}, r"api_key_env must be the name of an environment variable"),
        ({"lowest": 10.0}, r"lowest is 10\.0 and highest 1\.0"),
        ({"parser": "regex"}, r"reward\.judge\.parser is 'regex'"),
        ({"modle": "x"}, r"reward\.judge\.modle: did you mean 'model'"),
    ],
)
def test_mistakes_are_refused_by_key_and_never_print_a_secret(changes: dict[str, Any], message: str) -> None:
    judge = {"url": "http://x/v1", "model": "m", "prompt": "p", **changes}
    with pytest.raises(UserError, match=message) as caught:
        parse_config({"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}, "reward": {"judge": judge}})
    assert "s3cret" not in str(caught.value)


def test_a_missing_prompt_or_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "http://x/v1")
    with pytest.raises(UserError, match=r"reward\.judge\.prompt: .*nothing\.txt cannot be read"):
        Judge(config.model_copy(update={"prompt": str(tmp_path / "nothing.txt")}), cache=tmp_path)
    (tmp_path / "prompt.txt").write_text("no place")
    with pytest.raises(UserError, match=r"reward\.judge\.prompt: .* does not hold \{response\}"):
        Judge(config, cache=tmp_path)
    config = config_of(tmp_path, "http://x/v1", api_key_env="JUDGE_KEY")
    for value, problem in ((None, "is not set"), ("two\nlines", "holds a space")):
        monkeypatch.setenv("JUDGE_KEY", value) if value else monkeypatch.delenv("JUDGE_KEY", raising=False)
        with pytest.raises(UserError, match=rf"reward\.judge\.api_key_env: .*JUDGE_KEY {problem}"):
            Judge(config, cache=tmp_path)
