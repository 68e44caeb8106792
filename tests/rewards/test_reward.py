"""The reward: its formulas against hand arithmetic, its registry, and the scoring of groups beside the engine."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.chat_server import chat_server
from tests.helpers.own_reward import digest
from tests.helpers.prepared_sets import write_problems
from tests.helpers.processes import children_of
from tests.helpers.toy_runs import toy_problem
from vlm_rl.config import FunctionConfig, IouConfig, JudgeConfig, RewardConfig, parse_config
from vlm_rl.data.sets import load_set
from vlm_rl.errors import UserError
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.grading.grader import Grader
from vlm_rl.rewards.formulas import formula, overlong_penalty, repeated_share
from vlm_rl.rewards.functions import UserFunction
from vlm_rl.rewards.reward import PARTS, RewardFunction, Scoring, ScoringItem
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Grade, Observation, Problem, Prompt, Reward, Rollout, Turn

PROBLEM = Problem("p", "How much?", (), "5", "integer")
OWN = "tests.helpers.own_reward"
PERFECT = r"<think>a</think><answer>\boxed{5}</answer>"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1, timeout=5.0) as grader:
        yield grader


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (1, 0.0),
        (3583, 0.0),
        (3584, 0.0),  # 4096 - 512
        (3585, -0.3 / 512),
        (3840, -0.15),  # half of the buffer
        (4096, -0.3),
    ],
)
def test_overlong_of_the_vision_setting(length: int, penalty: float) -> None:
    got = overlong_penalty(length, max_tokens=4096, buffer=512, factor=0.3)
    assert got == pytest.approx(penalty, abs=1e-15)


def test_overlong_of_the_text_setting_and_off() -> None:
    # buffer 4096 of 32768: 30720 lies in the middle of it; DAPO's factor is 1
    assert overlong_penalty(30_720, max_tokens=32_768, buffer=4096, factor=1.0) == -0.5
    assert overlong_penalty(4096, max_tokens=4096, buffer=0, factor=0.3) == 0.0
    assert overlong_penalty(4096, max_tokens=4096, buffer=4096, factor=0.3) == -0.3


def prompt(prefill: str = "") -> Prompt:
    empty = np.zeros(0, dtype=np.int32)
    return Prompt("p", f"chat{prefill}", prefill, empty, empty, (), {})


def rollout(text: str, length: int = 3) -> Rollout:
    ids, logprobs = np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.float32)
    return Rollout("p", 0, ids, logprobs, text, "stop", 0)


@pytest.mark.parametrize(
    ("text", "prefill", "length", "parts"),
    [
        (PERFECT, "", 3584, {"accuracy": 1.0, "format": 0.5, "overlong": 0.0}),
        (PERFECT, "", 3840, {"accuracy": 1.0, "format": 0.5, "overlong": -0.15}),
        (PERFECT.replace("5", "6"), "", 4096, {"accuracy": 0.0, "format": 0.5, "overlong": -0.3}),
        (r"\boxed{5}", "", 10, {"accuracy": 1.0, "format": 0.0, "overlong": 0.0}),
        (r"<think>\boxed{5}", "", 10, {"accuracy": 0.0, "format": 0.0, "overlong": 0.0}),
        # the chat template opened the block: graded together with the prefill
        (PERFECT.removeprefix("<think>"), "<think>", 10, {"accuracy": 1.0, "format": 0.5, "overlong": 0.0}),
        (PERFECT.removeprefix("<think>"), "", 10, {"accuracy": 1.0, "format": 0.0, "overlong": 0.0}),
    ],
)
def test_parts(grader: Grader, text: str, prefill: str, length: int, parts: dict[str, float]) -> None:
    function = RewardFunction(RewardConfig(), template=TEMPLATES["think_answer"], max_tokens=4096, grader=grader)
    (reward,) = function.score([(PROBLEM, prompt(prefill), rollout(text, length))])
    assert dict(reward.parts) == pytest.approx(parts)
    assert reward.total == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.has_program])
def test_a_perfect_response_scores_full_marks(grader: Grader, name: str) -> None:
    template = TEMPLATES[name]
    function = RewardFunction(RewardConfig(), template=template, max_tokens=64, grader=grader)
    text = template.wrap("a", "5")
    (reward,) = function.score([(PROBLEM, prompt(), rollout(text))])
    # buffer 512 above max_tokens 64 would punish everything: only the first two parts are looked at
    assert reward.parts["accuracy"] == 1.0
    assert reward.parts["format"] == (0.0 if name == "plain" else 0.5)


def test_a_program_is_rewarded_for_its_tests_and_its_form(grader: Grader) -> None:
    tests = CodeTests(inputs=["1 2", "3 4"], outputs=["3", "7"])
    problem = replace(PROBLEM, answer_type="code", meta={"tests": tests.packed()})
    template = TEMPLATES["think_code"]
    function = RewardFunction(RewardConfig(overlong_buffer=0), template=template, max_tokens=64, grader=grader)
    function.check_golds([problem])
    right = template.wrap("a", "print(sum(map(int, input().split())))")
    texts = [right, right.replace("sum", "max"), right.removeprefix("<think>a</think>"), "<think>a</think> no", right]
    rewards = function.score([(problem, prompt(), rollout(text)) for text in texts])
    assert [(reward.parts["accuracy"], reward.parts["format"]) for reward in rewards] == [
        *((1.0, 0.5), (0.0, 0.5), (1.0, 0.0), (0.0, 0.0), (1.0, 0.5))
    ]
    reasons = ["passes all 2 tests", "test 1 of 2: printed 2 in place of 3"]
    assert [reward.grade.reason for reward in rewards[:2]] == reasons
    assert rewards[3].grade.verdict == "no_answer"


def test_weights_of_the_config_scale_the_parts_and_order_is_kept(grader: Grader) -> None:
    config = RewardConfig(accuracy=2.0, format=0.25, overlong_buffer=4, overlong_factor=1.0)
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    texts = [PERFECT, "nothing", PERFECT]
    items = [(PROBLEM, prompt(), rollout(text, n)) for text, n in zip(texts, (4, 6, 8), strict=True)]
    # overlong: ((8-4) - n) / 4 * 1 -> 0, -0.5, -1
    assert [reward.total for reward in function.score(items)] == [2.25, -0.5, 1.25]
    assert function.score([]) == []


def test_the_coin_is_fair_and_knows_nothing_of_the_response(grader: Grader) -> None:
    config = RewardConfig(accuracy=0.0, format=0.0, overlong_buffer=0, coin=2.0)
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    plain = rollout("nothing", 2)
    thrown = [replace(plain, index=i % 8, problem_id=f"p{i // 8 % 50}", policy_version=i // 400) for i in range(4000)]
    told = [replace(one, text=PERFECT, ids=np.ones(7, np.int32)) for one in thrown]  # all right, and longer
    here, there = (function.score([(PROBLEM, prompt(), one) for one in ones]) for ones in (thrown, told))
    assert [reward.total for reward in here] == [reward.total for reward in there]
    heads = np.array([reward.parts["coin"] for reward in here]) / 2.0
    # 4,000 tosses of a fair coin: standard deviation of the mean 0.0079; five of them
    assert abs(heads.mean() - 0.5) < 0.04
    for key in ("problem_id", "index", "policy_version"):  # no key has a side of its own
        means = [heads[[getattr(o, key) == v for o in thrown]].mean() for v in {getattr(o, key) for o in thrown}]
        assert min(means) > 0.1 and max(means) < 0.9
    usual = RewardFunction(RewardConfig(), template=TEMPLATES["think_answer"], max_tokens=4096, grader=grader)
    assert "coin" not in usual.score([(PROBLEM, prompt(), plain)])[0].parts


# -- the registry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_no_function_of_a_user_can_be_called_as_a_part_is(name: str) -> None:
    reward = {"functions": {name: {"path": "m.f"}}, "allow_function": True}
    with pytest.raises(UserError, match=f"functions.{name}: a function's name"):
        parse_config({"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}, "reward": reward})


def test_a_new_part_is_a_line_of_the_registry(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the grade that a part in the role accuracy gave, and is added behind the parts before it."""
    wrong = formula(lambda response, setup: not response.grade.correct, lambda config: -config.coin)
    monkeypatch.setitem(PARTS, "wrong", wrong)
    config = RewardConfig(overlong_buffer=0, coin=2.0, iou=IouConfig(role="accuracy", coordinates="thousandths"))
    function = RewardFunction(config, template=TEMPLATES["plain"], max_tokens=8, grader=grader)
    boxed = replace(PROBLEM, meta={"box": [0.0, 0.0, 0.5, 0.5]})
    here, there = function.score([(boxed, prompt(), rollout(text)) for text in ("[0, 0, 500, 500]", r"\boxed{5}")])
    assert [*here.parts] == ["accuracy", "format", "overlong", "coin", "wrong"]
    assert (here.parts["accuracy"], here.parts["wrong"]) == (1, 0)
    assert (there.parts["accuracy"], there.parts["wrong"]) == (0, -2)
    without = RewardFunction(RewardConfig(), template=TEMPLATES["plain"], max_tokens=8, grader=grader)
    assert [*without.score([(boxed, prompt(), rollout("x"))])[0].parts] == ["accuracy", "format", "overlong"]


def test_parts_that_are_open_are_closed_where_a_later_one_cannot_be_used(grader: Grader, tmp_path: Path) -> None:
    before = children_of(os.getpid())
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", prompt=str(tmp_path / "none.txt"))
    config = RewardConfig(function=f"{OWN}.short_words", allow_function=True, judge=judge)
    with pytest.raises(UserError, match=r"reward\.judge\.prompt: .* cannot be read"):
        RewardFunction(config, template=TEMPLATES["plain"], max_tokens=8, grader=grader)
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize("how", ["stopped", "aborted"])
def test_a_run_that_stops_waits_for_no_part(grader: Grader, tmp_path: Path, how: str) -> None:
    """A function and a judge that hang would give a reason, after three and five seconds."""
    (tmp_path / "prompt.txt").write_text("{response}")
    stopped = threading.Event()
    with chat_server() as server:
        config = RewardConfig(
            functions={"deaf": FunctionConfig(path=f"{OWN}.hangs_deaf")},
            function_timeout=3.0,
            allow_function=True,
            judge=JudgeConfig(url=server.url("hang"), model="m", prompt=str(tmp_path / "prompt.txt"), retries=0),
        )
        setting: dict[str, Any] = {"template": TEMPLATES["plain"], "max_tokens": 8, "grader": grader}
        function = RewardFunction(config, **setting, is_stopped=stopped.is_set, judge_cache=tmp_path)
        stop = threading.Timer(0.5, stopped.set if how == "stopped" else function.abort)
        stop.start()
        (reward,) = function.score([(PROBLEM, prompt(), rollout(PERFECT))])
        stop.join()
        function.close()
    assert reward.undecided == {"deaf": "", "judge": ""} and reward.parts["deaf"] == reward.parts["judge"] == 0


# -- parts that are off by default --------------------------------------------------------------------


def test_the_repeated_share_counts_windows() -> None:
    ids = np.array([1, 2, 1, 2, 1, 2], dtype=np.int32)
    # bigrams: 12 21 12 21 12; three of five repeat
    assert repeated_share(ids, ngram=2) == pytest.approx(3 / 5)
    assert repeated_share(ids, ngram=3) == pytest.approx(2 / 4)  # 121 212 121 212
    assert repeated_share(np.arange(100, dtype=np.int32), ngram=3) == 0
    assert repeated_share(ids, ngram=6) == repeated_share(ids, ngram=50) == 0  # one window, or none


def test_the_further_parts_by_hand(grader: Grader) -> None:
    config = RewardConfig(
        overlong_buffer=0,
        repetition=0.5,
        repetition_ngram=2,
        brevity=0.2,
        function="tests.helpers.own_reward.short_words",
        function_weight=-3.0,
        allow_function=True,
    )
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    # four equal tokens: 2 of 3 bigrams repeat; brevity 0.2 * (1 - 4/8); the text is longer than 10 * 4
    right, wrong = function.score([(PROBLEM, prompt(), rollout(t, 4)) for t in (PERFECT, "no")])
    assert right.parts == pytest.approx(
        {"accuracy": 1, "format": 0.5, "overlong": 0, "repetition": -1 / 3, "brevity": 0.1, "function": 0}
    )
    assert wrong.parts == pytest.approx(
        {"accuracy": 0, "format": 0, "overlong": 0, "repetition": -1 / 3, "brevity": 0, "function": -3}
    )
    function.close()


@pytest.mark.parametrize(
    "path",
    ["tests.helpers.own_reward.nothing", "no_such_module.f", "name", "tests.helpers.own_reward.not_a_function", "."],
)
def test_a_function_that_is_not_there_is_refused_by_name(path: str) -> None:
    with pytest.raises(UserError, match=f"reward.function is '{re.escape(path)}'"):
        UserFunction(path, timeout=60)


def test_a_function_needs_the_flag() -> None:
    with pytest.raises(UserError, match=r"reward: function is 'tests\.\S+', .* reward\.allow_function=true"):
        parse_config(
            {
                "out": "x",
                "model": {"path": "x"},
                "data": {"train": ["x"]},
                "reward": {"function": "tests.helpers.own_reward.f"},
            }
        )


CALL = (PROBLEM, "a response", Grade("correct", "5", "number", ""), 3)
FAULTS = {
    "returns_text": "returned '0.5', no finite number",
    "returns_none": "returned None, no finite number",
    "returns_nan": "returned nan, no finite number",
    "returns_inf": "returned -inf, no finite number",
    "returns_complex": "returned (1+2j), no finite number",
    "returns_unprintable": "returned <Unprintable instance at",
    "raises": "raised ValueError: no judge there (own_reward.py line ",
    "exits": "raised SystemExit: 7 (own_reward.py line ",
    "exits_at_once": "ended its process with exit code 7",
    "leaves_a_child": "ended its process with exit code 7",
    "is_killed": "was killed by signal 9",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_function_that_goes_wrong_is_named_with_the_problem(name: str) -> None:
    process = UserFunction(f"{OWN}.{name}", timeout=60)
    with pytest.raises(UserError) as raised:
        process.outcomes([CALL])
    assert str(raised.value).startswith(f"reward.function {OWN}.{name} at problem 'p' {FAULTS[name]}")
    assert str(raised.value).endswith("fix the function, then resume")
    process.close()


def test_a_function_that_hangs_is_stopped_by_its_limit_and_by_the_run() -> None:
    limited = UserFunction(f"{OWN}.hangs_deaf", timeout=0.3)
    with pytest.raises(UserError, match=r"did not return within reward.function_timeout=0\.3 seconds"):
        limited.outcomes([CALL])
    stopped = UserFunction(f"{OWN}.hangs_deaf", timeout=10_000)
    asked = chain([False] * 3, repeat(True))
    assert stopped.outcomes([CALL, CALL], is_stopped=lambda: next(asked)) == [0, 0]
    for process in (limited, stopped):
        process.close()
        assert children_of(os.getpid()).count(process.pid) == 0


def test_a_function_that_forks_answers_once() -> None:
    process = UserFunction(f"{OWN}.forks", timeout=60)
    assert process.outcomes([CALL, CALL]) == [0.5, 0.5]
    process.close()


def test_a_function_gets_the_problem_with_its_images(tmp_path: Path) -> None:
    bytes_of = [toy_problem(index, "train", 2).images[0] for index in range(2)]
    problem = replace(toy_problem(0, "train", 2), images=(*bytes_of, b""), choices=("1", "2"), meta={"unit": "cm"})
    stored = load_set(write_problems([toy_problem(1, "train", 2)], tmp_path / "set"))[0]
    process = UserFunction(f"{OWN}.digest", timeout=60)
    calls = [(problem, "\ud800", CALL[2], 3), (stored, "x" * 100_000, CALL[2], 4), (problem, "", CALL[2], 0)]
    assert process.outcomes(calls) == [digest(*call) for call in calls]
    process.close()


@pytest.mark.parametrize("undecided", ["zero", "drop"])
def test_an_answer_that_could_not_be_judged(grader: Grader, undecided: str) -> None:
    config = RewardConfig(undecided=undecided)  # type: ignore[arg-type]
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=4096, grader=grader)
    texts = [PERFECT, PERFECT.replace("5", "9^{9^{9^9}}"), PERFECT.replace("5", "6"), "nothing"]
    rewards = function.score([(PROBLEM, prompt(), rollout(text)) for text in texts])
    assert [reward.grade.verdict for reward in rewards] == ["correct", "error", "wrong", "no_answer"]
    assert [reward.dropped for reward in rewards] == [False, undecided == "drop", False, False]
    assert rewards[1].parts["accuracy"] == 0


def test_groups_scored_beside_the_engine_get_the_same_rewards(
    grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first group is held up the others gather, and go into one call together."""
    function = RewardFunction(RewardConfig(), template=TEMPLATES["think_answer"], max_tokens=4096, grader=grader)
    texts = [PERFECT, PERFECT.replace("5", "6"), "nothing", PERFECT.replace("5", "4+1")]
    groups = [[(PROBLEM, prompt(), rollout(text, n + 1)) for n in range(2)] for text in texts]
    calls: list[int] = []
    others = threading.Event()

    def held_up(items: Sequence[ScoringItem], **how: Any) -> list[Reward]:
        if not calls:
            others.wait(60)
        calls.append(len(items))
        return score(items, **how)

    score = function.score
    monkeypatch.setattr(function, "score", held_up)
    with Scoring(function) as scoring:
        for index in (2, 0, 3, 1):
            scoring.add(index, groups[index])
        others.set()
        rewards = scoring.rewards()
    assert sum(calls) == 8 and len([size for size in calls if size]) == 2
    assert [rewards[index] for index in range(4)] == [tuple(score(group)) for group in groups]


def test_a_mistake_in_a_reward_function_comes_out_of_the_thread(grader: Grader) -> None:
    config = RewardConfig(function=f"{OWN}.returns_inf", allow_function=True)
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    with Scoring(function) as scoring, pytest.raises(UserError, match="'p' returned -inf"):
        scoring.add(0, [(PROBLEM, prompt(), rollout(PERFECT))])
        scoring.rewards()
    function.close()


LOOK = '<think> look</think><tool_call>{"name": "zoom"}</tool_call>'


@pytest.mark.parametrize(
    ("said", "error", "last", "parts"),
    [
        (LOOK, "", PERFECT, {"accuracy": 1.0, "format": 0.5, "tool_use": 0.25}),
        (LOOK, "no JSON", PERFECT, {"accuracy": 1.0, "format": 0.0, "tool_use": 0.0}),  # the call failed
        (LOOK.replace("<think> look</think>", ""), "", PERFECT, {"accuracy": 1.0, "format": 0.0, "tool_use": 0.25}),
        (LOOK, "", PERFECT.replace("5", "6"), {"accuracy": 0.0, "format": 0.5, "tool_use": 0.0}),
        (PERFECT.replace("5", "4"), "", PERFECT, {"accuracy": 1.0, "format": 0.5, "tool_use": 0.25}),  # a second try
        (LOOK + "<answer>", "", PERFECT, {"accuracy": 1.0, "format": 0.0, "tool_use": 0.25}),
        (PERFECT, "", LOOK, {"accuracy": 0.0, "format": 0.0, "tool_use": 0.0}),  # the last turn is what counts
    ],
)
def test_an_episode_is_graded_by_its_last_turn_and_formed_in_every_turn(
    grader: Grader, said: str, error: str, last: str, parts: dict[str, float]
) -> None:
    config = RewardConfig(tool_use=0.25, overlong_buffer=0)
    function = RewardFunction(config, template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    shown = Observation("It is 5.", error=error, tool="zoom")
    episode = replace(rollout(last), turns=(Turn(2, said, shown), Turn(1, last, ending="done")))
    (reward,) = function.score([(PROBLEM, prompt(), episode)])
    assert {name: reward.parts[name] for name in parts} == pytest.approx(parts)


def test_what_a_tool_says_is_no_answer(grader: Grader) -> None:
    function = RewardFunction(RewardConfig(), template=TEMPLATES["think_answer"], max_tokens=8, grader=grader)
    shown = Observation(PERFECT, tool="zoom")
    episode = replace(rollout("it says so"), turns=(Turn(2, LOOK, shown), Turn(1, "it says so", ending="done")))
    (reward,) = function.score([(PROBLEM, prompt(), episode)])
    assert not reward.grade.correct
