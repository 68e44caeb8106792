"""Reward functions of the user's own: how each is called, and what becomes of a batch in which some calls fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from vlm_rl.config import FunctionConfig, RewardConfig, parse_config
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.metrics import asking_metrics, batch_metrics, undecided_notes
from vlm_rl.rewards.accuracy import regraded
from vlm_rl.rewards.function_worker import FunctionCaller
from vlm_rl.rewards.functions import UserFunction
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Call, Grade, Group, Problem, Prompt, Rollout

OWN = "tests.helpers.own_reward"
RIGHT = Grade("correct", "5", "number", "")
PROBLEM = Problem("p", "How much?", (), "5", "integer", source="set", meta={"unit": "cm"})


def calls_of(*texts: str) -> list[Call]:
    return [(PROBLEM, text, RIGHT, 3) for text in texts]


# -- how a function is called: in this process, without one of its own ---------------------------------


def replies(function: Callable[..., Any], *texts: str, timeout: float = 60.0) -> list[Any]:
    """Return the value or the fault of each response."""
    caller, got = FunctionCaller(function, timeout=timeout), {}
    with asyncio.Runner() as runner:
        caller.answer(calls_of(*texts), lambda reply: got.update({reply["index"]: reply}), runner)
    assert sorted(got) == list(range(len(texts)))
    return [got[index].get("value", got[index].get("fault")) for index in sorted(got)]


def test_four_parameters_of_any_name_are_one_response() -> None:
    assert replies(lambda a, b, c, d: (a is PROBLEM) + c.correct + len(b) + d, "x", "yy") == [6, 7]


def test_completions_is_a_batch_as_trl_calls_it() -> None:
    def trl(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> Any:
        assert prompts == ["How much?"] * 2 and answer == ["5"] * 2
        assert columns["problems"] == [PROBLEM] * 2 and columns["grades"] == [RIGHT] * 2
        assert columns["lengths"] == [3, 3] and columns["meta"] == [{"unit": "cm"}] * 2
        return np.array([float(len(text)) for text in completions])

    assert replies(trl, "x", "yy") == [1, 2]
    assert replies(lambda completions: [len(completions)] * len(completions), *"abc") == [3, 3, 3]


def test_solution_str_is_one_response_as_verl_calls_it() -> None:
    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert (data_source, ground_truth, extra_info) == ("set", "5", {"unit": "cm"})
        return {"score": len(solution_str), "acc": 1}

    assert replies(verl, "x", "yy") == [1, 2]


def test_async_functions_run_together() -> None:
    """Each response waits for the last one to arrive: one after another they would never end."""
    arrived: list[str] = []
    last = asyncio.Event()

    async def meets(problem: Problem, response: str, grade: Grade, length: int) -> float:
        arrived.append(response)
        if len(arrived) == 3:
            last.set()
        await last.wait()
        return float(response)

    async def batch(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(text) for text in completions]

    assert replies(meets, "1", "2", "3") == [1, 2, 3]
    assert replies(batch, "1", "2") == [1, 2]


def test_what_an_async_function_does_wrong_costs_its_own_response() -> None:
    async def wrong(problem: Problem, response: str, grade: Grade, length: int) -> Any:
        if response == "exit":
            raise SystemExit(3)
        if response == "hang":
            await asyncio.sleep(1000)
        return "text" if response == "text" else 1

    right, exited, hung, text = replies(wrong, "good", "exit", "hang", "text", timeout=0.05)
    assert right == 1 and exited.startswith("raised SystemExit: 3 (test_functions.py line ")
    assert hung == "did not return within reward.function_timeout=0.05 seconds"
    assert text == "returned 'text', no finite number"


def test_what_a_batch_does_wrong_costs_what_it_says() -> None:
    assert replies(lambda completions: [1, None, float("nan")], *"abc") == [
        1, "returned None, no finite number", "returned nan, no finite number",
    ]  # fmt: skip
    assert replies(lambda completions: [1], *"ab") == ["returned 1 values for 2 completions"] * 2
    (fault, same) = replies(lambda completions: 1 / 0, *"ab")
    assert fault == same and fault.startswith("raised ZeroDivisionError: division by zero (test_functions.py")
    assert replies(lambda completions: 7, *"a")[0].startswith("raised TypeError")


def test_a_parameter_that_nothing_fills_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="it asks for 'solution', and can be given prompts, completions, id, "):
        FunctionCaller(lambda completions, solution: [], timeout=1)
    assert replies(lambda completions, solution=None: [0], "a") == [0]


# -- calls that cost the process ---------------------------------------------------------------------


def test_a_call_that_ends_the_process_costs_itself_alone() -> None:
    function = UserFunction(f"{OWN}.does_as_told", timeout=60, stops_run=False)
    outcomes = function.outcomes(calls_of("a", "raise", "bb", "exit", "ccc", "none"))
    assert outcomes[0::2] == [1, 2, 3]
    assert outcomes[1].startswith("raised ValueError: as told (own_reward.py line ")  # type: ignore[union-attr]
    assert outcomes[3] == "ended its process with exit code 7"
    assert outcomes[5] == "returned None, no finite number"
    function.close()


def test_a_function_that_always_hangs_is_given_up_after_three_limits() -> None:
    function = UserFunction(f"{OWN}.does_as_told", timeout=0.2, stops_run=False)
    outcomes = function.outcomes(calls_of(*["hang"] * 50))
    assert outcomes[:3] == ["did not return within reward.function_timeout=0.2 seconds"] * 3
    assert outcomes[3:] == ["was not called: 3 calls before it cost the process"] * 47
    function.close()


def test_a_batch_that_ends_its_process_has_no_values_and_the_next_one_has() -> None:
    function = UserFunction(f"{OWN}.letters", timeout=60, stops_run=False)
    assert function.outcomes(calls_of("a", "exit", "bb"))[1:] == ["ended its process with exit code 7"] * 2
    assert function.outcomes(calls_of("a", "bb")) == [1, 2]
    function.close()


def test_aborting_wakes_a_thread_that_waits() -> None:
    function = UserFunction(f"{OWN}.hangs_deaf", timeout=10_000, stops_run=False)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(function.outcomes(calls_of("a", "b"))))
    thread.start()
    function.abort()
    thread.join(60)
    assert got == [0, 0]
    function.close()


# -- what becomes of the values -----------------------------------------------------------------------


def rollouts(*texts: str) -> list[tuple[Problem, Prompt, Rollout]]:
    empty = np.zeros(0, dtype=np.int32)
    prompt = Prompt("p", "chat", "", empty, empty, (), {})
    ids, logprobs = np.zeros(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    return [(PROBLEM, prompt, Rollout("p", i, ids, logprobs, text, "stop", 0)) for i, text in enumerate(texts)]


def scorer(grader: Grader, **config: Any) -> RewardFunction:
    functions = {name: FunctionConfig(**section) for name, section in config.pop("functions").items()}
    config = {"overlong_buffer": 0, "format": 0.0, "allow_function": True, "functions": functions, **config}
    return RewardFunction(RewardConfig(**config), template=TEMPLATES["plain"], max_tokens=8, grader=grader)


@pytest.fixture(scope="module")
def grader() -> Any:
    with Grader(workers=1) as grader:
        yield grader


def test_each_role_does_what_its_name_says(grader: Grader) -> None:
    """The grader is given \\boxed{5} and \\boxed{6}; the gold is 5, which both texts hold."""
    told = {"path": f"{OWN}.does_as_told"}
    reward = scorer(
        grader,
        functions={
            "told": {**told, "weight": 0.5},
            "seen": {**told, "role": "logged"},
            "holds": {"path": f"{OWN}.answers_in_completions", "role": "accuracy"},
        },
        function=f"{OWN}.short_words",
        function_weight=-2.0,
    )
    texts = [r"\boxed{6} 5", r"\boxed{5}", "none", r"\boxed{6}"]
    first, second, third, fourth = got = reward.score(rollouts(*texts))
    reward.close()
    # 11 letters, 9 letters, no number, 9 letters; each text is shorter than 10 letters a token: 1 * -2
    assert first.parts == {"accuracy": 1, "format": 0, "overlong": 0, "function": -2, "told": 5.5}
    assert second.parts == {"accuracy": 1, "format": 0, "overlong": 0, "function": -2, "told": 4.5}
    assert third.parts == {"accuracy": 0, "format": 0, "overlong": 0, "function": -2, "told": 0}
    assert (first.total, second.total, third.total, fourth.total) == (4.5, 3.5, -2, 2.5)
    assert (first.grade.verdict, first.grade.path, first.grade.extracted) == ("correct", "holds", "6")
    assert fourth.grade.reason == "holds gives 0; right from 0.5 on"
    assert [reward.logged["seen"] for reward in (first, second)] == [11, 9]
    assert third.undecided == {
        "told": "returned None, no finite number",
        "seen": third.undecided["told"],
        "holds": "",
    }
    metrics = batch_metrics([Group(PROBLEM, tuple(item[2] for item in rollouts(*texts)), tuple(got), np.zeros(4))])
    assert metrics["rewards/told/mean"] == (5.5 + 4.5 + 0 + 4.5) / 4
    assert metrics["rewards/seen/mean"] == pytest.approx((11 + 9 + 9) / 3) and metrics["rewards/holds/mean"] == 0.5
    assert asking_metrics(got) == {
        "rewards/told/undecided_rate": 0.25, "rewards/seen/undecided_rate": 0.25, "rewards/holds/undecided_rate": 0,
    }  # fmt: skip
    assert undecided_notes([(PROBLEM, got)])[0] == (
        "reward told: 1 of 4 undecided; problem 'p' returned None, no finite number"
    )


def test_a_value_is_right_from_one_half_on() -> None:
    grades = [regraded(RIGHT, "iou", value) for value in (0.4999, 0.5, 1.0, "late", None)]
    assert [grade.verdict for grade in grades] == ["wrong", "correct", "correct", "error", "correct"]
    assert (grades[3].path, grades[3].reason) == ("iou", "late") and grades[4] is RIGHT


def test_a_failure_follows_the_undecided_policy(grader: Grader) -> None:
    for undecided, role in product(("zero", "drop"), ("part", "accuracy", "logged")):
        reward = scorer(
            grader, functions={"told": {"path": f"{OWN}.does_as_told", "role": role}}, undecided=undecided
        )
        good, bad = reward.score(rollouts("x", "raise"))
        reward.close()
        assert not good.dropped and bad.dropped == (undecided == "drop" and role != "logged"), (undecided, role)
        assert bad.total == 0 and bad.undecided["told"].startswith("raised ValueError: as told")
        assert (bad.grade.verdict == "error") == (role == "accuracy")


def test_a_function_may_stop_the_run_instead(grader: Grader) -> None:
    section = {"path": f"{OWN}.does_as_told", "on_failure": "stop"}
    reward = scorer(grader, functions={"told": section, "slow": {"path": f"{OWN}.hangs"}})
    with pytest.raises(
        UserError, match=r"reward\.functions\.told\.path .*does_as_told at problem 'p' raised ValueEr"
    ):
        reward.score(rollouts("raise"))
    reward.close()


@pytest.mark.parametrize(
    ("path", "step"),
    [("no_such.f", r"python -m vlm_rl.*in the folder of no_such, or .*PYTHONPATH"), (f"{OWN}.no_such", "importable")],
)
def test_a_function_that_is_not_found_says_where_it_is_looked_for(grader: Grader, path: str, step: str) -> None:
    with pytest.raises(UserError, match=rf"reward\.functions\.told\.path is '{path}': .*{step}"):
        scorer(grader, functions={"told": {"path": path}})


# -- the configuration --------------------------------------------------------------------------------

TREE = {"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"functions": {"a": {"path": "m.f"}}}, r"reward: functions\.a\.path is 'm\.f'.*allow_function=true"),
        ({"functions": {"iou": {"path": "m.f"}}}, r"functions\.iou: a function's name .* neither a key of reward"),
        ({"functions": {"A b": {"path": "m.f"}}}, r"functions\.A b: a function's name"),
        (
            {"functions": {"a": {"path": "m.f", "wieght": 1.0}}},
            r"reward\.functions\.a\.wieght: did you mean 'weight'",
        ),
        ({"functions": {"weight": {"paht": "m.f"}}}, r"reward\.functions\.weight\.paht: did you mean 'path'"),
        ({"functions": {"a": {}}}, r"reward\.functions\.a\.path is missing"),
        (
            {"functions": {"a": {"path": "m.f", "role": "accuracy", "weight": 2.0}}},
            r"weight is 2\.0 in the role accuracy.*leave it out",
        ),
        (
            {"functions": {"a": {"path": "m.f", "role": "accuracy"}}, "iou": {"role": "accuracy"}},
            "a and iou have the role accuracy, which only one part can have",
        ),
    ],
)
def test_mistakes_are_refused_by_key(reward: dict[str, Any], message: str) -> None:
    allowed = {} if "allow_function" in message else {"allow_function": True}
    with pytest.raises(UserError, match=message):
        parse_config({**TREE, "reward": {**reward, **allowed}})
