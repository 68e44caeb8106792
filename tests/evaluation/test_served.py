"""`vlm-rl eval --endpoint`: a real server with the OpenAI protocol answers a set, and fails in the middle of one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.chat_server import ChatServer, chat_server
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.api import read_run
from vlm_rl.types import Problem


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 84), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four problems: how many pictures are there? Of the third the gold is wrong, and the fourth has none."""
    asked = [("<image>", 1, "1"), ("one <image> and <image>", 2, "2"), ("<image>", 1, "5"), ("none", 0, "0")]
    problems = [
        Problem(f"p{i}", f"{text} How many?", tuple(map(picture, range(count))), gold, "integer", source="toy")
        for i, (text, count, gold) in enumerate(asked)
    ]
    out = tmp_path_factory.mktemp("served") / "counts"
    return write_problems(problems, out, {"min_pixels": 3136, "max_pixels": 1_003_520})


def run(server: ChatServer, behaviour: str, data: Path, out: Path, *more: str) -> int:
    words = ["eval", "--endpoint", server.url(behaviour), "--data", str(data), "--out", str(out), *more]
    return cli.main(words)


def test_a_served_model_is_a_row_like_any_other(server: ChatServer, data: Path, tmp_path: Path) -> None:
    extra = '{"reasoning_effort": "high", "seed": null}'
    assert run(server, "box", data, tmp_path / "out", "--temperature", "0", "--endpoint-extra", extra) == 0
    (result,) = read_run(tmp_path / "out").evals()
    rows = result.rows(["problem_id", "response", "verdict", "length", "stop_reason", "image_sizes"]).to_pylist()
    assert [row["verdict"] for row in rows] == ["correct", "correct", "wrong", "no_answer"]
    assert rows[1]["response"] == "<think>I count</think><answer>\\boxed{2}</answer>"
    assert [row["length"] for row in rows] == [7, 7, 7, 9], "the server's count"
    assert [row["stop_reason"] for row in rows] == ["stop", "stop", "stop", "length"]
    assert rows[1]["image_sizes"] == ["56x84", "56x84"]
    assert result.summary["accuracy"] == 0.5
    assert (result.summary["model"], result.summary["sampler"]) == ("only", "endpoint")

    asked = next(body for body in server.asked if " and " in str(body["messages"][-1]))
    assert (asked["model"], asked["temperature"], asked["reasoning_effort"]) == ("only", 0, "high")
    assert "seed" not in asked
    kinds = [part["type"] for part in asked["messages"][-1]["content"]]
    assert kinds == ["text", "image_url", "text", "image_url", "text"]
    address = asked["messages"][-1]["content"][1]["image_url"]["url"]
    assert base64.b64decode(address.partition(",")[2]) == picture(0), "the stored image itself"
    assert asked["messages"][0]["role"] == "system", "the template's words"
    assert cli.main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.html")]) == 0


def test_several_responses_are_asked_for_with_seeds_of_their_own(
    server: ChatServer, data: Path, tmp_path: Path
) -> None:
    assert run(server, "box", data, tmp_path / "out", "--temperature", "1", "--samples", "3") == 0
    (result,) = read_run(tmp_path / "out").evals()
    assert result.summary["sampling"]["responses"] == 3
    assert len(server.asked) == len({body["seed"] for body in server.asked}) == 12


@pytest.mark.parametrize("key", ["x", "1", "EMPTY"])
def test_a_placeholder_for_a_key_changes_no_response(
    key: str, server: ChatServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that take any key are given one of these, and no word of theirs is masked for it."""
    monkeypatch.setenv("SERVED_KEY", key)
    assert run(server, "box", data, tmp_path / "out", "--temperature", "0", "--endpoint-key-env", "SERVED_KEY") == 0
    (result,) = read_run(tmp_path / "out").evals()
    responses = result.rows(["response"]).to_pylist()
    assert responses[0]["response"] == "<think>I count</think><answer>\\boxed{1}</answer>"


@pytest.mark.parametrize("seed", ["null", "5"])
def test_several_responses_are_asked_for_where_no_seed_tells_them_apart(
    seed: str, server: ChatServer, data: Path, tmp_path: Path
) -> None:
    how = ("--temperature", "1", "--samples", "3", "--endpoint-extra", f'{{"seed": {seed}}}')
    assert run(server, "box", data, tmp_path / "out", *how) == 0
    assert len(server.asked) == 12, "a reply is the reply to one response, not to all of a problem"
    assert {body.get("seed") for body in server.asked} == {{"null": None, "5": 5}[seed]}


def test_replies_of_a_batch_that_failed_are_not_paid_for_twice(
    server: ChatServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_rl.chat_endpoint.batch._LONGEST_PAUSE", 0.0)
    out = tmp_path / "out"
    assert run(server, "box_twice", data, out, "--temperature", "0") == 2, "all four were one batch"
    del server.asked[:]  # it works again
    assert run(server, "box_twice", data, out, "--temperature", "0") == 0
    assert len(server.asked) == 2, "two were kept"


def test_what_a_broken_endpoint_does_not_answer_is_not_wrong_and_the_rest_is_kept(
    server: ChatServer,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlm_rl.chat_endpoint.batch._LONGEST_PAUSE", 0.0)
    out = tmp_path / "out"
    words = ("--temperature", "0", "--batch-size", "2", "--endpoint-key-env", "SERVED_KEY")
    monkeypatch.setenv("SERVED_KEY", "s3cret")
    assert run(server, "box_twice", data, out, *words) == 2
    told = capsys.readouterr().err
    assert "problem 'p2': the endpoint answered 500" in told and "the same command continues" in told
    assert not read_run(out).evals()
    asked = len(server.asked)
    del server.asked[:]  # it works again
    assert run(server, "box_twice", data, out, *words) == 0
    assert len(server.asked) == 2 < asked, "two were kept"
    (result,) = read_run(out).evals()
    assert result.summary["accuracy"] == 0.5
    assert not any("s3cret" in path.read_text(errors="replace") for path in out.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "m"], "--model is for a model of files"),
        (["--environment", "zoom"], "--environment is for a model of files"),
        (["--endpoint-extra", "[1]"], "--endpoint-extra is [1]: it must hold a JSON object"),
        (["--endpoint-extra", "{"], "--endpoint-extra is {: "),
        (["--endpoint-extra", '{"a":' * 20_000], "nested too deeply"),
        (["--endpoint-model", "other"], "--endpoint-model is 'other'"),
        (["--endpoint-key-env", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["--endpoint-timeout", "0"], "--endpoint-timeout is 0; it must be above 0"),
        (["--endpoint-timeout", "nan"], "--endpoint-timeout is nan; it must be above 0"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_asked(
    words: list[str], told: str, server: ChatServer, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "box", data, tmp_path / "out", *words) == 2
    assert told in capsys.readouterr().err
    assert not server.asked and not (tmp_path / "out").exists()


def test_a_folder_names_the_model_whose_results_it_has(
    server: ChatServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation of the first model is given up: the page would show the second one's results under its name."""
    monkeypatch.setattr("vlm_rl.chat_endpoint.batch._LONGEST_PAUSE", 0.0)
    out = tmp_path / "out"
    assert run(server, "box_twice", data, out, "--temperature", "0", "--batch-size", "2") == 2
    assert read_run(out).config().model.path == "only" and not read_run(out).evals()
    assert run(server, "two", data, out, "--temperature", "0", "--endpoint-model", "b") == 0
    (result,) = read_run(out).evals()
    assert read_run(out).config().model.path == result.summary["model"] == "b"


def test_results_of_another_model_stay_alone(server: ChatServer, data: Path, tmp_path: Path) -> None:
    assert run(server, "box", data, tmp_path / "out", "--temperature", "0") == 0
    assert run(server, "two", data, tmp_path / "out", "--endpoint-model", "a") == 2
