"""Reward functions that see all responses to a prompt: which they are given, what a failure costs, and the vote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from vlm_rl.config import FunctionConfig, RewardConfig
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.rewards.function_worker import FunctionCaller
from vlm_rl.rewards.functions import UserFunction
from vlm_rl.rewards.reward import RewardFunction, Scoring, ScoringItem
from vlm_rl.rewards.votes import majority_vote
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Call, Grade, Problem, Prompt, Rollout

RANKS = "tests.helpers.own_reward.ranks"
RIGHT = Grade("correct", "5", "number", "")
FIRST = Problem("a", "How much?", (), "5", "integer")
SECOND = Problem("b", "How many?", (), "5", "integer")


def calls_of(*groups: tuple[Problem, list[str]]) -> tuple[list[Call], list[int]]:
    """Return the calls and the number of each one's group."""
    calls = [(problem, text, RIGHT, len(text)) for problem, texts in groups for text in texts]
    return calls, [number for number, (_, texts) in enumerate(groups) for _ in texts]


def replies(function: Callable[..., Any], *groups: tuple[Problem, list[str]]) -> list[Any]:
    caller, got = FunctionCaller(function, timeout=60), {}
    calls, numbers = calls_of(*groups)
    with asyncio.Runner() as runner:
        caller.answer(calls, lambda reply: got.update({reply["index"]: reply}), runner, groups=numbers)
    assert sorted(got) == list(range(len(calls)))
    return [got[index].get("value", got[index].get("fault")) for index in sorted(got)]


def test_a_function_is_called_once_for_each_group_with_all_of_it() -> None:
    """A prompt that is in the batch twice, such as at the end of an epoch, is two groups."""
    seen: list[Any] = []

    def whole(problem: Problem, responses: list[str], grades: list[Grade], lengths: list[int]) -> Any:
        seen.append((problem.id, responses, lengths))
        assert grades == [RIGHT] * len(responses)
        return np.array(lengths) - max(lengths)

    values = replies(whole, (FIRST, ["x", "yyy"]), (SECOND, ["zz"]), (FIRST, ["yy", "x", ""]))
    assert values == [-2, 0, 0, 0, -1, -2]
    assert seen == [("a", ["x", "yyy"], [1, 3]), ("b", ["zz"], [2]), ("a", ["yy", "x", ""], [2, 1, 0])]
    assert replies(lambda responses: [len(responses)] * len(responses), (FIRST, ["x", "y"])) == [2, 2]


def test_a_failure_costs_its_group() -> None:
    def fails(responses: list[str], lengths: list[int]) -> Any:
        if "raise" in responses:
            raise ValueError("as told")
        return lengths[1:] if "few" in responses else [None if text == "none" else 1 for text in responses]

    groups = [["x", "raise"], ["x", "y"], ["few", "y"], ["none", "y"]]
    first, same, *rest = replies(fails, *((FIRST, texts) for texts in groups))
    assert first == same and first.startswith("raised ValueError: as told (test_group_functions.py line ")
    few = "returned 1 values for 2 responses"
    assert rest == [1, 1, few, few, "returned None, no finite number", 1]
    with pytest.raises(UserError, match="it asks for 'gold', and can be given problem, responses, grades, lengths"):
        FunctionCaller(lambda responses, gold: [], timeout=1)


def test_async_functions_are_called_for_all_groups_at_once() -> None:
    """Each waits for the last group to arrive: one after another they would never end."""
    arrived: list[str] = []
    last = asyncio.Event()

    async def meets(problem: Problem, responses: list[str]) -> list[int]:
        arrived.append(problem.id)
        if len(arrived) == 2:
            last.set()
        await last.wait()
        return [len(text) for text in responses]

    assert replies(meets, (FIRST, ["x", "yyy"]), (SECOND, ["zz"])) == [1, 3, 2]


def test_a_group_that_ends_the_process_costs_itself_alone() -> None:
    function = UserFunction(RANKS, timeout=60, stops_run=False)
    assert function.takes_groups
    calls, groups = calls_of((FIRST, ["x", "yy"]), (FIRST, ["x", "exit", "y"]), (SECOND, ["raise"]), (SECOND, ["x"]))
    outcomes = function.outcomes(calls, groups=groups)
    assert outcomes[:2] == [0, 1] and outcomes[6] == 0
    assert outcomes[2:5] == ["ended its process with exit code 7"] * 3
    assert isinstance(outcomes[5], str) and outcomes[5].startswith("raised ValueError: as told")
    function.close()


# -- in a step --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as grader:
        yield grader


def scorer(grader: Grader, path: str, **section: Any) -> RewardFunction:
    functions = {"own": FunctionConfig(path=path, **section)}
    config = RewardConfig(accuracy=0.0, format=0.0, overlong_buffer=0, allow_function=True, functions=functions)
    return RewardFunction(config, template=TEMPLATES["plain"], max_tokens=8, grader=grader)


def items(problem: Problem, *texts: str) -> list[ScoringItem]:
    empty = np.zeros(0, dtype=np.int32)
    prompt = Prompt(problem.id, "chat", "", empty, empty, (), {})
    ids, logprobs = np.zeros(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    return [(problem, prompt, Rollout(problem.id, i, ids, logprobs, text, "stop", 0)) for i, text in enumerate(texts)]


def test_groups_that_are_scored_together_stay_apart(grader: Grader) -> None:
    """Groups arrive while others are scored, and go into one call; a rank in a group of two is 0 or 1."""
    reward = scorer(grader, RANKS)
    with Scoring(reward) as scoring:
        for number in range(12):
            scoring.add(number, items(FIRST if number % 3 else SECOND, "x" * (number + 2), "x" * (number + 1)))
        got = scoring.rewards()
    assert [[one.total for one in got[number]] for number in range(12)] == [[1, 0]] * 12
    reward.close()


def test_the_majority_is_paid_whatever_the_gold_says(grader: Grader) -> None:
    """Two of five say one half, in two spellings; one says nothing, and so has no vote."""
    reward = scorer(grader, "vlm_rl.rewards.votes.majority_vote")
    problem = Problem("c", "How much?", (), "3", "expression")
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{3}", "I do not", r"\boxed{0.5}", r"\boxed{7}"]
    got = reward.score(items(problem, *texts))
    assert [one.total for one in got] == [1, 0, 0, 1, 0]
    assert [one.grade.correct for one in got] == [False, True, False, False, False]
    reward.close()


@pytest.mark.parametrize(
    ("answers", "paid"),
    [
        (["3", "5", "3", "5"], [0, 0, 0, 0]),  # no majority: the order decides nothing
        (["3", "5", "4", "5"], [0, 1, 0, 1]),
        ([None, None, "5"], [0, 0, 1]),
        ([None, None], [0, 0]),
        (["5.0", "5", " 5 "], [1, 1, 1]),
    ],
)
def test_votes_by_hand(answers: list[str | None], paid: list[float]) -> None:
    grades = [Grade("wrong" if answer else "no_answer", answer, "", "") for answer in answers]
    assert majority_vote(FIRST, [""] * len(answers), grades) == paid
    assert majority_vote(FIRST, [""] * len(answers), grades[::-1]) == paid[::-1]


def test_a_group_decides_nothing_of_an_evaluation(grader: Grader) -> None:
    with pytest.raises(UserError, match=r"reward\.functions\.own\.role is accuracy, and tests.* takes all responses"):
        scorer(grader, RANKS, role="accuracy")
