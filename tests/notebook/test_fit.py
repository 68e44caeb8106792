"""`vlm_rl.fit`: rows and functions become an ordinary run, and a mistake is said before anything is made."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import vlm_rl
from tests.helpers import own_reward
from tests.helpers.toy_runs import Runner
from vlm_rl.config import FunctionConfig, RewardConfig, parse_config
from vlm_rl.grading.grader import Grader
from vlm_rl.notebook.settings import flat_keys, resumed_configuration, reward_functions
from vlm_rl.rewards.cell_functions import CellFunction
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.types import Grade, Problem

PROBLEM = Problem("p", "How much?", (), "5", "integer")
RIGHT = Grade("correct", "5", "number", "")


def toy_rows(count: int) -> list[dict[str, Any]]:
    problems = SQUARES.make_problems(count, seed=0, split="train")
    return [{"question": p.question, "answer": p.count, "image": SQUARES.draw(p, seed=0)} for p in problems]


def short(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
    """Return minus the length, in hundreds of tokens."""
    return -num_tokens / 100


@pytest.mark.slow
def test_rows_and_a_function_train_plot_and_resume(tiny_model: Path, tmp_path: Path, runner: Runner) -> None:
    def brief(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        return short(problem, response, grade, num_tokens)

    seen: list[tuple[int, float]] = []
    out = tmp_path / "run"
    call: dict[str, Any] = {
        "model": tiny_model,
        "data": toy_rows(12),
        "eval_data": toy_rows(4),
        "reward": [brief],
        "algorithm": "grpo",
        "rollout": {"sampler": "transformers", "prompts_per_step": 4, "responses_per_prompt": 4, "max_tokens": 14},
        "reward__function_timeout": 30.0,
        "train__lr": 1e-3,
        "callbacks": [lambda step, metrics: seen.append((step, metrics["reward"]))],
        "out": out,
    }
    run = vlm_rl.fit(**call, steps=2)
    frame = run.metrics_frame()
    for step in (1, 2):  # what the function said of each response is in the reward, and in the metrics
        lengths = run.rollouts(step)["length"].to_pylist()
        assert frame.loc[step, "rewards/brief/mean"] == pytest.approx(-sum(lengths) / len(lengths) / 100)
    assert seen == [(step, frame.loc[step, "reward"]) for step in (1, 2)]
    assert [result.step for result in run.evals()] == [0, 1, 2]
    assert run.config().reward.functions["brief"] == FunctionConfig(path="cell:brief", on_failure="stop")
    with pytest.raises(vlm_rl.UserError, match="already holds a run: continue it with resume=True"):
        vlm_rl.fit(**call, steps=3)
    run = vlm_rl.fit(**call, steps=3, resume=True)
    assert [step for step, _ in seen] == [1, 2, 3]
    assert run.metrics_frame().loc[:2].equals(frame)
    assert run.plot("length")._repr_png_().startswith(b"\x89PNG") and run.plot("accuracy").axes
    assert vlm_rl.write_report(run, tmp_path / "report.html").stat().st_size > 10_000
    with pytest.raises(vlm_rl.UserError, match="functions brief of a cell, and reward gives short"):
        vlm_rl.fit(**{**call, "reward": {"short": lambda p, r, g, n: 0.0}}, steps=4, resume=True)
    refused = runner("train", out, "train.steps=4", "--resume")
    assert refused.code == 2
    assert "reward.functions.brief.path is 'cell:brief'" in refused.output and "vlm_rl.fit(" in refused.output
    results = vlm_rl.evaluate(out, run.config().data.eval, tmp_path / "eval", max_tokens=6, sampler="transformers")
    assert [(result.benchmark, result.step) for result in results.evals()] == [("held_out", 3)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train__lrr": 1e-5}, ["unknown key train.lrr", "did you mean 'lr'?"]),
        ({"rollout": {"max_token": 5}}, ["unknown key rollout.max_token", "max_tokens"]),
        ({"learning_rate": 1e-5}, ["learning_rate of TRL and ms-swift is train.lr here"]),
        ({"train": 5}, ["train is 5"]),
        ({"steps": "two"}, ["train.steps is 'two'"]),
        ({"data": None}, ["data is missing"]),
        ({"data": []}, ["an empty list", "'question'"]),
        ({"data": {"question": ["one"]}}, ["of type dict"]),
        ({"data": [{"question": "1+1?"}]}, ["no column looks like the answer", "columns={'question': COLUMN"]),
        ({"data": [{"answer": "2", "text": 3}]}, ["no column looks like the question"]),
        ({"data": [{"question": "a", "answer": 1}, {"question": ["b"], "answer": 1}]}, ["not all of one type"]),
        ({"columns": {"anser": "a"}}, ["columns names 'anser'", "did you mean 'answer'?"]),
        ({"reward": [0.5]}, ["reward reward_1 is of type float", "reward__format=0"]),
        ({"reward": [short, short]}, ["two functions called short"]),
    ],
)
def test_a_mistake_is_said_and_nothing_is_made(
    change: Mapping[str, Any], words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    call = {"model": tiny_model, "data": toy_rows(2), "out": tmp_path / "run", **change}
    with pytest.raises(vlm_rl.UserError) as error:
        vlm_rl.fit(**call)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


def test_keys_are_dotted_by_underscores_and_sections() -> None:
    assert flat_keys({"seed": 1, "train__lr": 2.0, "rollout": {"vllm": {"seed": 3}}, "log__tags": [Path("a")]}) == {
        "seed": 1,
        "train.lr": 2.0,
        "rollout.vllm.seed": 3,
        "log.tags": ["a"],
    }


def test_a_function_of_a_module_keeps_its_process_and_one_of_a_cell_stays_here() -> None:
    def inner(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        return 0.0

    named = reward_functions([own_reward.short_words, "tests.helpers.own_reward.digest", inner, lambda *_: 1.0])
    assert {name: path for name, (path, _) in named.items()} == {
        "short_words": "tests.helpers.own_reward.short_words",
        "digest": "tests.helpers.own_reward.digest",
        "inner": "cell:inner",
        "reward_4": "cell:reward_4",
    }
    assert [own for _, own in named.values()][:3] == [None, None, inner]


def test_a_resume_refuses_functions_that_its_run_does_not_have(tmp_path: Path) -> None:
    """Its reward is the run's: another function, of a module or of a cell, would not be called."""
    tree: dict[str, Any] = {"out": str(tmp_path), "model": {"path": "m"}, "data": {"train": ["s"]}}
    known = {"mine": {"path": "tests.helpers.own_reward.short_words"}, "inner": {"path": "cell:inner"}}
    tree["reward"] = {"allow_function": True, "functions": known}
    RunDirectory(tmp_path).create(parse_config(tree, where="test"))
    run = RunDirectory(tmp_path).open()
    given: dict[str, Any] = {"inner": lambda *_: 1.0}
    resumed_configuration(run, None, reward_functions(given), {})
    resumed_configuration(run, None, reward_functions(given | {"theirs": own_reward.short_words}), {})
    for other in ({"more": "tests.helpers.own_reward.digest"}, {"mine": own_reward.digest}):
        with pytest.raises(vlm_rl.UserError, match=r"no function tests\.helpers\.own_reward\.digest.*new run"):
            resumed_configuration(run, None, reward_functions(given | other), {})
    with pytest.raises(vlm_rl.UserError, match="functions inner of a cell, and reward gives none"):
        resumed_configuration(run, None, {}, {})


# -- functions of this process -----------------------------------------------------------------------


def outcomes(function: Callable[..., Any], *texts: str, **how: Any) -> list[Any]:
    cell = CellFunction(function, "reward.functions.mine.path", **{"timeout": 60.0, **how})
    return cell.outcomes([(PROBLEM, text, RIGHT, len(text)) for text in texts])


def test_every_contract_is_called_in_this_process() -> None:
    calls: list[str] = []

    async def slowly(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        calls.append(response)
        return num_tokens

    assert outcomes(lambda problem, response, grade, num_tokens: num_tokens, "a", "bb") == [1, 2]
    assert outcomes(lambda completions: [len(text) for text in completions], "a", "bb") == [1, 2]
    assert outcomes(slowly, "a", "bb") == [1, 2] and calls == ["a", "bb"]


def test_an_async_function_has_one_event_loop_for_all_batches() -> None:
    """A client or a lock that a cell keeps is bound to the loop that it was first used in."""
    lock = asyncio.Lock()

    async def mine(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        async with lock:
            await asyncio.sleep(0)
            return num_tokens

    async def of_group(problem: Problem, responses: list[str]) -> list[float]:
        return [await mine(problem, text, RIGHT, len(text)) for text in responses]

    async def stops(completions: list[str]) -> list[float]:
        raise SystemExit

    cell = CellFunction(mine, "reward.functions.mine.path", timeout=60.0)
    calls = [(PROBLEM, text, RIGHT, len(text)) for text in ("a", "bb")]
    assert [cell.outcomes(calls) for _ in range(2)] == [[1, 2], [1, 2]]
    assert "SystemExit" in outcomes(stops, "a", stops_run=False)[0]
    assert outcomes(of_group, "a", "bb") == [1, 2], "of another function of the same cell too"


def test_a_failure_cancels_the_async_calls_beside_it() -> None:
    ended: list[str] = []

    async def mine(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        try:
            await asyncio.sleep(0.0 if response == "bad" else 60.0)
        finally:
            ended.append(response)
        raise ValueError(response)

    with pytest.raises(vlm_rl.UserError, match="raised ValueError: bad"):
        outcomes(mine, "slow", "bad", timeout=120.0)
    assert ended == ["bad", "slow"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *_: "high", "returned 'high', no finite number"),
        (lambda *_: None, "returned None, no finite number"),
        (lambda *_: math.nan, "returned nan, no finite number"),
        (lambda *_: 1 / 0, "raised ZeroDivisionError"),
        (lambda completions: [1.0], "returned 1 values for 2 completions"),
    ],
)
def test_a_failure_names_key_problem_and_remedy(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(vlm_rl.UserError) as error:
        outcomes(function, "a", "b")
    said = str(error.value)
    assert "reward.functions.mine.path at problem 'p'" in said and words in said and "resume=True" in said
    assert words in outcomes(function, "a", "b", stops_run=False)[1]


def test_a_call_over_the_limit_ends_the_run_once_it_returns() -> None:
    def slow(problem: Problem, response: str, grade: Grade, num_tokens: int) -> float:
        time.sleep(0.05 if response == "slow" else 0.0)
        return 1.0

    with pytest.raises(vlm_rl.UserError, match=r"within reward\.function_timeout=0\.04 seconds"):
        outcomes(slow, "quick", "slow", timeout=0.04, stops_run=False)


def test_a_stop_does_not_begin_another_call() -> None:
    called: list[str] = []
    cell = CellFunction(lambda p, text, g, n: called.append(text) or 1.0, "key", timeout=60.0)
    calls = [(PROBLEM, text, RIGHT, 1) for text in "abc"]
    assert cell.outcomes(calls, is_stopped=lambda: len(called) == 2) == [1.0, 0.0, 0.0]
    assert called == ["a", "b"]


def test_only_the_process_that_has_the_function_opens_the_reward() -> None:
    config = RewardConfig(functions={"mine": FunctionConfig(path="cell:mine")}, allow_function=True)
    with Grader() as grader:
        how = {"template": TEMPLATES["plain"], "max_tokens": 8, "grader": grader}
        RewardFunction(config, **how, functions={"mine": short}).close()
        with pytest.raises(vlm_rl.UserError, match="no other process can find"):
            RewardFunction(config, **how)


def test_a_plot_names_what_a_run_has() -> None:
    recorded = RunDirectory(Path(vlm_rl.__file__).parent / "demo/assets/recorded/luspo")
    assert len(recorded.plot("length").axes[0].lines) == 3
    assert len(recorded.plot("grad_norm").axes[0].lines) == 1
    with pytest.raises(vlm_rl.UserError, match="no metric 'grad_nrm': did you mean 'grad_norm'"):
        recorded.plot("grad_nrm")
