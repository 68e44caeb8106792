"""Evaluation of sets with images, end to end: both engines, two ranks, and a kill in the middle."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.conftest import SHARED_DATA
from tests.helpers.benchmark_rows import write_annotations, write_images
from tests.helpers.toy_runs import ExitResult, Runner
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.evaluation.evaluate import Asking, Judging, evaluate
from vlm_rl.grading.grader import Grader
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Rollout

pytestmark = pytest.mark.slow

SETS = ("mathvision", "logicvista", "dynamath", "wemath")
ROWS, MAX_PIXELS = 4, 25_088
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, responses=1)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, responses=2)
TIE = 1e-3  # nats between the log-probabilities of two tokens that either engine may take


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    for name in SETS:
        raw = SHARED_DATA / name
        if not SHARED_DATA.is_dir():
            raw = out / "raw" / name
            write_annotations(name, raw)
            write_images(name, raw)
        prepare(name, raw, out / name, Options(max_pixels=MAX_PIXELS, limit=ROWS))
    return out


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights: its predictions are far from uniform and depend on the image."""
    out = tmp_path_factory.mktemp("models") / "sharp"
    shutil.copytree(tiny_model, out)
    policy = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if "embed_tokens" in name else 5.0)
    policy.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def builder(model: Path) -> PromptBuilder:
    return PromptBuilder(model, template=TEMPLATES["think_answer"], max_pixels=MAX_PIXELS)


@pytest.fixture(scope="module")
def samplers(model: Path, builder: PromptBuilder) -> Iterator[dict[str, Sampler]]:
    pytest.importorskip("vllm")
    running = {
        name: make_sampler(
            name,  # type: ignore[arg-type]
            EngineSettings(
                model_path=str(model), builder=builder, max_model_len=2048, batch_size=8, dtype=torch.float32
            ),
        )
        for name in ("transformers", "vllm")
    }
    yield running
    for sampler in running.values():
        sampler.close()


def everything(data: Path) -> list[Problem]:
    return [problem for name in SETS for problem in load_set(data / name)]


def test_each_engine_repeats_itself_and_greedy_agrees(data: Path, samplers: dict[str, Sampler], builder) -> None:
    problems = everything(data)
    assert len(problems) == len(SETS) * ROWS and all(problem.images for problem in problems)
    with Grader(workers=1) as grader:
        for sampler in samplers.values():
            for params in (GREEDY, SAMPLED):
                once, twice = (
                    evaluate(problems, Asking(builder, sampler, params, seed=3, step=0), Judging(grader))
                    for _ in range(2)
                )
                assert once.records == twice.records and once.summary == twice.summary
                assert len({record.response for record in once.records}) > 5  # not one answer for everything
    prompts = [builder.build(problem) for problem in problems]
    mine, theirs = (
        [group[0] for group in s.generate(SampleRequest(prompts, GREEDY, seed=3, step=0))] for s in samplers.values()
    )
    same = [a.ids.tolist() == b.ids.tolist() for a, b in zip(mine, theirs, strict=True)]
    assert sum(same) >= 0.9 * len(same)
    assert all(is_tie(a, b) for a, b, equal in zip(mine, theirs, same, strict=True) if not equal)


def is_tie(a: Rollout, b: Rollout) -> bool:
    """Where they part first, both engines' choices were as likely."""
    place = next(i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
    return abs(float(a.logprobs[place]) - float(b.logprobs[place])) < TIE


# -- the command -----------------------------------------------------------------------------------------


def start(runner: Runner, model: Path, data: Path, out: Path, **job: Any) -> ExitResult:
    words = ["eval", "--model", model, "--data", *(data / name for name in SETS), "--out", out, "--mode", "official"]
    words += ["--sampler", "transformers", "--samples", "2", "--max-tokens", "8", "--batch-size", "2"]
    return runner(*words, "--temperature", "1.0", **job)


def results(out: Path) -> dict[str, list[dict]]:
    return {result.benchmark: result.rows().to_pylist() for result in RunDirectory(out).evals()}


def test_a_kill_in_the_third_set_and_two_ranks_change_nothing(
    runner: Runner, model: Path, data: Path, tmp_path: Path
) -> None:
    out, journal = tmp_path / "killed", tmp_path / "killed" / "eval" / f".{SETS[2]}-000000-0.jsonl"
    fault = {"kill_after_answers": {"number": 2 * ROWS + 2}}
    killed = start(runner, model, data, out, faults=fault)
    assert killed.code == -signal.SIGKILL, killed.output[-3000:]
    assert {result.benchmark for result in RunDirectory(out).evals()} == set(SETS[:2])  # finished ones stay
    done = {path: path.stat().st_mtime_ns for name in SETS[:2] for path in (out / "eval" / name).iterdir()}
    lines = journal.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"reason": "', b'"reason": "MARK ', 1)  # would vanish if it were graded again
    journal.write_bytes(b"\n".join(lines))
    assert start(runner, model, data, out).code == 0
    found = results(out)
    assert not list((out / "eval").glob(".*"))
    assert done == {path: path.stat().st_mtime_ns for path in done}
    marked = [row for row in found[SETS[2]] if row["reason"].startswith("MARK ")]
    assert len(marked) == 1
    marked[0]["reason"] = marked[0]["reason"].removeprefix("MARK ")
    assert start(runner, model, data, tmp_path / "whole", ranks=2).code == 0
    assert results(tmp_path / "whole") == found and set(found) == set(SETS)
    (wemath,) = RunDirectory(out).evals("wemath")
    assert {"score_strict", "score_loose", "rates_strict", "S1"} <= set(wemath.summary["scores"])
    assert (wemath.summary["mode"], wemath.summary["rule"]) == ("official", "official")
