"""The batch of a step: what is dropped, what HA-DW believes, and the ledger, on rounds made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.graded_groups import RIGHT, WRONG, make_group
from tests.helpers.sources import no_phase
from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.batch_advantages import RewardHistory
from vlm_rl.config import AlgorithmConfig, parse_config
from vlm_rl.hadw import Belief
from vlm_rl.rollouts.collect import (
    Collecting,
    RolloutBatch,
    TooManyUndecidedError,
    belief_after,
    check_undecided,
    collect,
    with_advantages,
)
from vlm_rl.rollouts.prompt_order import Ledger
from vlm_rl.rollouts.sampling import Graded
from vlm_rl.types import Grade, Group, Reward

ROUNDS = [[[RIGHT] * 4, [RIGHT, WRONG, WRONG, WRONG]], [[WRONG] * 4]]  # of dynamic sampling, of groups, of rewards


class Rounds:
    """Stands for a source: gives these groups, round by round."""

    def __init__(self, rounds: Sequence[Sequence[Group]], stale: Sequence[int] = ()) -> None:
        self.rounds, self.asked = list(rounds), list[int]()
        self.unfit = dict.fromkeys(stale, "stale")  # in the first round

    def next(self, step: int, count: int, phase: Any) -> Graded:
        self.asked.append(count)
        unfit, self.unfit = self.unfit, dict[int, str]()
        return Graded(self.rounds.pop(0), prompts=None, prompt_lengths={}, unfit=unfit)  # type: ignore[arg-type]

    def arrange(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        return list(groups), {}


def groups_of(rounds: Sequence[Sequence[Any]]) -> list[list[Group]]:
    return [[make_group([4] * 4, rewards, [0.0] * 4) for rewards in graded] for graded in rounds]


def collected(source: Any, ledger: Ledger, *, name: str = "dapo", wanted: int = 2) -> RolloutBatch:
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}, "train": {"mini_batch_prompts": 1}}
    algorithm = {"name": name, "max_sampling_rounds": 2}
    config = parse_config({**tree, "algorithm": algorithm, "rollout": {"prompts_per_step": wanted}})
    run = Collecting(config, ALGORITHMS[name], source, ledger, note=lambda _: None)
    return collect(run, step=0, belief=Belief(), phase=no_phase, history=RewardHistory())


def test_the_belief_counts_what_dynamic_sampling_drops() -> None:
    """4 of 4 right (dropped), 1 of 4 (kept), then 0 of 4 in the second round (dropped): 5 of 12."""
    source, ledger = Rounds(groups_of(ROUNDS)), Ledger(taken=3)
    batch = collected(source, ledger)
    assert batch.belief.ability == pytest.approx(5 / 12)
    assert [group.rewards for group in batch.groups] == [groups_of(ROUNDS)[0][1].rewards]
    assert ledger.skipped == {"all_right": 1, "all_wrong": 1} and source.asked == [2, 2]


MIXED = [RIGHT, WRONG, WRONG, WRONG]
NO = Grade("wrong", "1", "text", "not the same")


def test_dynamic_sampling_asks_for_whole_batches_until_the_step_is_full() -> None:
    """One group of two is kept, then one of two again, and the third round would not be asked for; 2 rounds here."""
    source, ledger = Rounds(groups_of([[[RIGHT] * 4, MIXED], [[WRONG] * 4, MIXED], [MIXED]])), Ledger(taken=4)
    assert len(collected(source, ledger).groups) == 2
    assert source.asked == [2, 2] and ledger.trained == 2


def test_what_is_beyond_a_full_step_is_counted() -> None:
    source, ledger = Rounds(groups_of([[[RIGHT] * 4, MIXED], [MIXED, MIXED]])), Ledger(taken=4)
    assert len(collected(source, ledger).groups) == 2
    assert ledger.skipped == {"all_right": 1, "surplus": 1} and ledger.trained == 2


@pytest.mark.parametrize(
    ("most", "undecided", "stops"),
    [(0.5, 4, False), (0.5, 5, True), (0.0, 1, True), (0.0, 0, False), (1.0, 8, False)],
)
def test_more_undecided_rewards_than_allowed_stop_a_step(most: float, undecided: int, stops: bool) -> None:
    rewards = [
        Reward({"accuracy": 0.0, "judge": 0.0}, NO, undecided={"judge": "late" if n < undecided else ""})
        for n in range(8)
    ]
    if stops:
        with pytest.raises(
            TooManyUndecidedError, match=rf"{undecided} of 8 .*reward\.max_undecided={most:g}: judge: late"
        ):
            check_undecided(rewards, most=most)
    else:
        check_undecided(rewards, most=most)


def test_what_is_only_logged_stops_no_step_and_the_grader_does() -> None:
    logged = [Reward({"accuracy": 0.0}, NO, undecided={"judge": "late"})]
    check_undecided(logged, most=0.0)
    late = [Reward({"accuracy": 0.0}, Grade("timeout", "1", "math_verify", "it took too long"))]
    with pytest.raises(TooManyUndecidedError, match="math_verify: it took too long"):
        check_undecided(late, most=0.0)


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_groups_that_are_too_old_are_replaced_once(name: str) -> None:
    """Also by an algorithm that samples one round, and also where the replacement teaches nothing."""
    mixed = [RIGHT, WRONG, WRONG, WRONG]
    source, ledger = Rounds(groups_of([[mixed, mixed], [[WRONG] * 4]]), stale=[1]), Ledger(taken=3)
    batch = collected(source, ledger, name=name)
    assert source.asked == [2, 2 if name == "dapo" else 1] and ledger.skipped["stale"] == 1
    assert len(batch.groups) == (1 if name == "dapo" else 2)


@pytest.mark.parametrize("drawn", [2, 4])
def test_a_prompt_that_was_lost_ends_the_step(drawn: int) -> None:
    """Three groups come back: one too many, or one too few."""
    with pytest.raises(RuntimeError, match=rf"does not close: {drawn} drawn, 3 accounted for"):
        collected(Rounds(groups_of(ROUNDS)), Ledger(taken=drawn))


def hadw_options(**hadw: Any) -> AlgorithmConfig:
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}}
    return parse_config({**tree, "algorithm": {"name": "grpo", "hadw": {"enabled": True, **hadw}}}).algorithm


BEFORE = Belief(ability=0.5, num_steps=1)


def weighed(groups: list[Group], options: AlgorithmConfig, after: Belief) -> tuple[list[Group], dict[str, float]]:
    return with_advantages(
        groups, options, baseline=ALGORITHMS["grpo"].advantage, beliefs=(BEFORE, after), history=RewardHistory()
    )


def test_a_step_without_groups_has_no_hadw_metrics() -> None:
    """HA-DW's metrics are those of the step: none where dynamic sampling keeps nothing."""
    options = hadw_options()
    group = make_group([4, 4, 4, 4], [RIGHT, WRONG, WRONG, WRONG], [0, 0, 0, 0])  # hard: .25 is below .5
    (scaled,), metrics = weighed([group], options, BEFORE)
    assert metrics.keys() == {"hadw/weight_hard", "hadw/weight_easy"} and scaled.advantages_G[0] > 0
    assert weighed([], options, BEFORE) == ([], {})


def test_the_published_code_of_hadw_takes_total_rewards_and_the_present_batch() -> None:
    """Rewards 1.5, 0, 0, 0 and a dropped one: mean .375, against a belief of .5 and of .375 with this batch.

    The paper's rule sees the pass rate .25 and the belief before: 1.3 exp(.25). The code: 1.5 exp(0).
    """
    options = hadw_options(variant="published_code", window=1)
    group = make_group([4] * 5, [RIGHT, WRONG, WRONG, WRONG, RIGHT], [0.0] * 5)
    rewards = (*group.rewards[:4], replace(group.rewards[4], dropped=True))
    group = replace(group, rewards=rewards)
    after = belief_after(BEFORE, rewards, options.hadw)
    assert after.ability == pytest.approx(0.375)
    (plain,) = compute_advantages("group_norm", np.array([[1.5, 0, 0, 0]]))
    (scaled,), _ = weighed([group], options, after)
    assert scaled.advantages_G == pytest.approx([*(1.5 * plain), 0])
    options = hadw_options()
    (scaled,), _ = weighed([group], options, belief_after(BEFORE, rewards, options.hadw))
    gap = np.array([1, -1, -1, -1]) * 0.25
    assert scaled.advantages_G == pytest.approx([*(1.3 * plain * np.exp(gap)), 0])
