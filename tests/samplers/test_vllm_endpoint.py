"""vLLM's own OpenAI-compatible server: what asks it in the demo and in the reward gets what it says."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.benchmark_rows import write_annotations
from tests.helpers.example_run import square_image
from tests.helpers.toy_runs import toy_problem
from tests.helpers.vllm_server import vllm_server
from vlm_rl.chat_endpoint.cache import ReplyCache, key_of
from vlm_rl.cli import main
from vlm_rl.config import JudgeConfig
from vlm_rl.demo.live.backends import AskableCheckpoint, CheckpointBackend, ModelCache, load_checkpoint
from vlm_rl.demo.live.endpoints import Endpoint, EndpointBackend
from vlm_rl.demo.live.replies import AskSettings, LiveQuestion
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations
from vlm_rl.rewards.judge import Judge, read_score
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Call, Grade

pytestmark = [
    pytest.mark.slow,
    pytest.mark.turn(0, days=2),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def vllm_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Yield the address, up to /v1, of a server of the tiny model, which it calls `tiny`."""
    with vllm_server(tiny_model, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


def test_a_live_question_is_answered_as_the_checkpoint_does(tiny_model: Path, vllm_url: str) -> None:
    """Greedy: the same prompt, pixels and settings give the same text, and the same count."""
    checkpoint = AskableCheckpoint("tiny", tiny_model, "tiny@0", TEMPLATES["think_answer"], 3136, 100_352)
    cache = ModelCache(partial(load_checkpoint, engine="transformers", max_tokens=64), max_loaded=1)
    backends = (
        CheckpointBackend(checkpoint, cache),
        EndpointBackend(Endpoint("far", vllm_url, ""), system=TEMPLATES["think_answer"].system),
    )
    question = LiveQuestion("Count the red squares.", square_image(["red", "blue", "green"] * 3))
    greedy = AskSettings(seed=3, temperature=0.0, max_tokens=24)
    ours, theirs = ([*backend.ask(question, greedy, is_cancelled=lambda: False)][-1] for backend in backends)
    assert theirs.phase == "ended" and theirs.note == "", theirs
    assert (theirs.text, theirs.tokens, theirs.stop) == (ours.text, ours.tokens, ours.stop)
    assert theirs.counted_by == "server"
    cache.close()


def test_a_model_is_a_judge(tmp_path: Path, vllm_url: str) -> None:
    """Images and all are taken, tokens are counted as the server counts them, and a score is that of the text."""
    (tmp_path / "prompt.txt").write_text("Q: {question} A: {answer} E: {extracted} R: {response}")
    config = JudgeConfig(
        url=vllm_url,
        model="tiny",
        prompt=str(tmp_path / "prompt.txt"),
        images=True,
        temperature=1.0,
        max_tokens=14,
        lowest=-1e9,
        highest=1e9,
        retries=0,
    )
    right = Grade("correct", "5", "number", "")
    calls: list[Call] = [(toy_problem(index, "train", 6), "so 5", right, 3) for index in range(6)]
    judge = Judge(config, cache=tmp_path / "cache")
    verdicts = judge.verdicts(calls)
    for call, verdict in zip(calls, verdicts, strict=True):
        body = judge._body(call)
        usage = httpx.post(f"{vllm_url}/chat/completions", json=body, timeout=60, trust_env=False).json()["usage"]
        assert verdict.cost["prompt_tokens"] == usage["prompt_tokens"] > 9  # an image of 84 x 84 pixels has 9
        assert 0 < verdict.cost["completion_tokens"] <= 14 and verdict.cost["requests"] == 1
        reply = ReplyCache(tmp_path / "cache").get(key_of(vllm_url, body))
        if reply is None:
            assert str(verdict.outcome).startswith("the judge's reply holds no text")
        elif (score := read_score(reply.text, config)) is None:
            assert str(verdict.outcome).startswith("the judge's reply holds no score")
        else:
            assert verdict.outcome == score
    replies = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert replies
    assert sum(verdict.cost["cached"] for verdict in judge.verdicts(calls)) == len(replies)


def test_a_model_takes_the_place_of_the_authors_judge(
    tmp_path: Path, vllm_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vlm-rl score --judge`: the extractions are what the server says to the authors' words, and are kept.

    At temperature 0 the tiny model says nothing but control tokens, so it is asked at 1.
    """
    benchmark, cache = BENCHMARKS["mathvista"], tmp_path / "kept"
    assert benchmark.rule.judge is not None
    judge = replace(benchmark.rule.judge, temperature=1.0, max_tokens=14)
    lively = replace(benchmark, rule=replace(benchmark.rule, judge=judge))
    monkeypatch.setitem(BENCHMARKS, "mathvista", lively)
    annotations = write_annotations("mathvista", tmp_path / "annotations")
    problems = read_annotations(benchmark, annotations)
    responses = {benchmark.own_id(problem): {"response": f"I count {problem.id}"} for problem in problems}
    (tmp_path / "responses.json").write_text(json.dumps(responses))
    files = ["--annotations", *annotations, "--responses", tmp_path / "responses.json"]
    words = ["score", "--benchmark", "mathvista", "--mode", "official", *files, "--json", tmp_path / "score.json"]
    words += ["--judge", vllm_url, "--judge-cache", cache]  # the one model that it serves

    def score() -> dict:
        assert main([*map(str, words)]) == 0
        return json.loads((tmp_path / "score.json").read_text())

    first = score()
    kept = [json.loads(path.read_text())["text"] for path in cache.rglob("*.json")]
    assert first["rule"] == "official, judge tiny"
    assert first["judge"]["requests"] == len(problems) and first["judge"]["prompt_tokens"] > 256 * len(problems)
    said = [row["extracted"] for row in first["rows"] if row["verdict"] != "error"]
    assert said and sorted(said) == sorted(text.strip() for text in kept)
    assert all("holds no text" in row["reason"] for row in first["rows"] if row["verdict"] == "error")
    second = score()
    assert (second["judge"]["cached"], second["judge"]["requests"]) == (len(kept), len(problems) - len(kept))
    for before, after in zip(first["rows"], second["rows"], strict=True):
        assert before == after or before["verdict"] == "error"
