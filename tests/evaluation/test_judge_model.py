"""A judge model in the place of the authors': what it is asked, what its replies mean, what a summary says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmark_rows import write_annotations
from tests.helpers.chat_server import REPLY, ChatServer, chat_server
from tests.helpers.served import free_port
from vlm_rl.cli import main
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Judgement, Response, UnreadableReplyError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations
from vlm_rl.types import IMAGE_MARKER, Problem

JUDGED = ("mathvista", "mathverse", "logicvista")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def problem_of(**changes: Any) -> Problem:
    return replace(Problem("x-1", f"{IMAGE_MARKER}Which one?", (), "B", "choice", choices=("red", "blue")), **changes)


def talk(benchmark: Benchmark, problem: Problem, text: str, *replies: str) -> tuple[list[str], Judgement]:
    """Return the requests of a dialogue with these replies, all of which are asked for, and its verdict."""
    assert benchmark.rule.judge is not None
    dialogue, asked, left = benchmark.rule.judge.dialogue(problem, Response("1", text)), [], list(replies)
    try:
        asked.append(next(dialogue))
        while True:
            asked.append(dialogue.send(left.pop(0)))
    except StopIteration as end:
        assert not left
        return asked, end.value


def test_mathvista_asks_for_what_its_script_cannot_take() -> None:
    """An option, a whole number and an empty response need no model; a sentence does, after the question."""
    benchmark = BENCHMARKS["mathvista"]
    choice = problem_of(meta={"gold": "blue"})
    number = problem_of(answer="7", answer_type="integer", choices=())
    for problem, text, verdict in ((choice, "blue", "correct"), (number, "7", "correct"), (number, "", "wrong")):
        asked, judgement = talk(benchmark, problem, text)
        assert not asked and judgement.verdict == verdict
    [asked], judgement = talk(benchmark, choice, "I like the sea.", " (B) \n")
    assert judgement.verdict == "correct" and judgement.extracted == "(B)"
    before, _, after = asked.partition("Extracted answer: B\n\nHint: Please answer the question and provide the ")
    assert before.startswith("Please read the following example.")
    assert after == (
        "correct option letter, e.g., A, B, C, D, at the end.\n"
        "Question: Which one?\n\nI like the sea.\n\nExtracted answer: "
    )
    [asked], judgement = talk(benchmark, number, "seven", "7.0")
    assert judgement.verdict == "correct" and "requiring an integer answer" in asked.rpartition("Hint:")[2]


def test_mathverse_asks_twice() -> None:
    benchmark = BENCHMARKS["mathverse"]
    problem = problem_of(answer="12", answer_type="integer", choices=())
    (extract, compare), judgement = talk(benchmark, problem, "{x} is {gt}", "Extracted Answer: {gt}", "Judgement: 1")
    assert extract.endswith("\n7.\n\nModel response: '{x} is {gt}'\nExtracted Answer: ")
    assert compare.endswith("\n\n[Question]: Which one?\n[Standard Answer]: 12\n[Model_answer] : {gt}\nJudgement:")
    assert r"\frac{x^2}{81} + \frac{y^2}{9} = 1 B. Can not determine." in compare  # not {{81}}
    assert (judgement.verdict, judgement.extracted) == ("correct", "{gt}")
    assert talk(benchmark, problem, "no", "null", "0")[1].verdict == "wrong"
    hidden = problem_of(meta={"question_for_eval": "How long is AB?"}, answer_type="float", choices=())
    assert "[Question]: How long is AB?\n" in talk(benchmark, hidden, "no", "null", "0")[0][1]
    with pytest.raises(UnreadableReplyError, match="neither 0 nor 1"):
        talk(benchmark, problem, "no", "null", "maybe")


def test_logicvista_asks_for_letters() -> None:
    benchmark = BENCHMARKS["logicvista"]
    problem = problem_of(answer="A, C", choices=())
    for text in ("", "F", "?"):  # the authors' script gives these up
        assert talk(benchmark, problem, text)[1].verdict == "wrong"
    reply = 'Sure:\n```json\n{"choices": ["C", "a"]}\n```'
    [asked], judgement = talk(benchmark, problem, "USER: x ASSISTANT: {question} and C", reply)
    assert 'following question: "Which one?"\n' in asked and '\nThe answer is "{question} and C"\n' in asked
    assert asked.rstrip(" ").endswith("```\n            Helpful Answer:\n")
    assert judgement.verdict == "correct" and judgement.extracted == "a, c"
    assert talk(benchmark, problem, "both", '{"choices": ["ZZZZZ"]}')[1].verdict == "wrong"
    for reply in ("A and C", '{"choices": "A"}', '{"choices": [1]}', "{" * 5000):
        with pytest.raises(UnreadableReplyError):
            talk(benchmark, problem, "both", reply)


def answered(folder: Path, name: str, text: str) -> list[Any]:
    """Write annotations of a benchmark and a file that answers all of them alike; return the words of the command."""
    annotations = write_annotations(name, folder / name)
    benchmark = BENCHMARKS[name]
    problems = read_annotations(benchmark, annotations)
    responses = folder / f"{name}.json"
    rows = [{benchmark.rows.response_ids[0]: benchmark.own_id(p), "response": text} for p in problems]
    if benchmark.rows.response_ids[0] == "_key":
        responses.write_text(json.dumps({row.pop("_key"): row for row in rows}))
    else:
        responses.write_text(json.dumps(rows))
    files = ["--annotations", *annotations, "--responses", responses, "--json", folder / "score.json"]
    return ["score", "--benchmark", name, *files]


def score(words: list[Any], *more: str) -> dict[str, Any]:
    assert main([*map(str, words), *more]) == 0
    return json.loads(Path(words[-1]).read_text())


@pytest.mark.parametrize("name", JUDGED)
def test_a_score_names_its_judge_and_asks_once(
    tmp_path: Path, server: ChatServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reply, a sentence, is an extraction for one, neither 0 nor 1 for another, and no JSON for the third."""
    words = answered(tmp_path, name, "It is a sentence.")
    judge = ["--mode", "official", "--judge", server.url("good"), "--judge-model", "only"]
    first = score(words, *judge)
    asked = len(server.asked)
    assert first["rule"] == "official, judge only" and "emulation" not in first
    assert first["judge"]["requests"] == asked > 0 and first["judge"]["authors_model"].startswith("gpt-")
    body = server.asked[0]
    published = BENCHMARKS[name].rule.judge
    assert published is not None and body["model"] == "only"
    assert (body["temperature"], body["max_tokens"]) == (published.temperature, published.max_tokens)
    if name == "mathvista":
        assert {row["extracted"] for row in first["rows"]} == {REPLY} and first["errors"] == 0
    else:
        assert first["errors"] == first["num_responses"]
        assert all("the judge's reply" in row["reason"] for row in first["rows"])
    assert "judge only (the authors asked gpt-" in capsys.readouterr().out
    second = score(words, *judge)
    assert len(server.asked) == asked and second["judge"]["requests"] == 0 < second["judge"]["cached"]
    assert second["scores"] == first["scores"] and second["rows"] == first["rows"]
    without = score(words, "--mode", "official")
    assert without["rule"] == "emulated" and without["emulation"] and "judge" not in without
    assert BENCHMARKS[name].rule.emulation in capsys.readouterr().out


def test_a_judge_that_fails_is_counted(tmp_path: Path, server: ChatServer) -> None:
    """No verdict is made up: each of these responses is an error, with the server's words."""
    words = answered(tmp_path, "logicvista", "It is a sentence.")
    found = score(words, "--mode", "official", "--judge", server.url("refuse"), "--judge-model", "only")
    assert found["errors"] == found["num_responses"] and found["scores"]["accuracy"]["score"] == 0
    assert all(row["reason"].startswith("no reply of the judge: ") for row in found["rows"])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(words: list[Any], *more: str) -> str:
        assert main([*map(str, words), *more]) == 2
        return capsys.readouterr().err

    return run


def test_what_is_no_judge(tmp_path: Path, server: ChatServer, refused: Callable[..., str]) -> None:
    official = ("--mode", "official", "--judge")
    words = answered(tmp_path, "logicvista", "B")
    assert "--mode official" in refused(words, "--judge", server.url("good"))
    assert "plain http(s) address" in refused(words, *official, "http://me:key@x/v1")
    nowhere = f"http://127.0.0.1:{free_port()}/v1"
    message = refused(words, *official, nowhere)
    assert nowhere in message and "no server answers" in message
    assert "--judge-model is missing; " in refused(words, *official, server.url("none"))  # which lists no models
    assert "/two/v1 serves a, b" in refused(words, *official, server.url("two"))
    assert "--judge-model is 'c'; " in refused(words, *official, server.url("two"), "--judge-model", "c")
    key = refused(words, *official, server.url("good"), "--judge-key-env", "NO_SUCH_KEY")
    assert "--judge-key-env" in key and "NO_SUCH_KEY" in key
    assert "asks no model" in refused(answered(tmp_path, "mathvision", "B"), *official, server.url("good"))
    assert "aime24" in refused(answered(tmp_path, "aime24", "B"), *official, server.url("good"))
    assert not server.asked
