"""A run that cannot learn says so, with a reason; one that learns slowly does not."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import sources
from vlm_rl.rollouts.no_signal import FIRST, NoSignal
from vlm_rl.types import Group, Reward

RIGHT, WRONG = Reward({"accuracy": 1.0}, sources.RIGHT), Reward({"accuracy": 0.0}, sources.WRONG)
DROPPED = replace(WRONG, dropped=True)
UNDECIDED = replace(WRONG, undecided={"mine": "it raised KeyError: 'x'", "judge": ""})
TWICE_UNDECIDED = replace(WRONG, undecided={"mine": "it hangs", "judge": "it is not there"})


def lines_of(rewards: list[list[Reward]], steps: int, *, learns_at: int = 0) -> list[tuple[int, str]]:
    """Return (step, line) of steps of these groups; in one of them an advantage is not 0."""
    watch, lines = NoSignal(), []
    for step in range(1, steps + 1):
        groups = [Group(sources.PROBLEMS[0], (), tuple(group), np.zeros(len(group))) for group in rewards]
        groups[0].advantages_G[0] = step == learns_at
        if line := watch.after_step(groups, [reward for group in rewards for reward in group]):
            lines.append((step, line))
    return lines


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([[RIGHT] * 4] * 2, "all responses of the last step were right; take harder problems"),
        ([[WRONG] * 4] * 2, "no response of the last step was right"),
        ([[RIGHT] * 4, [WRONG] * 4], "to each prompt of the last step got the same reward; raise rollout.responses"),
        ([[DROPPED] * 4] * 2, "all were dropped; see the reasons above"),
        ([[UNDECIDED] * 4] * 2, r"no reward of the last step was decided \(it raised KeyError: 'x'\)"),
        ([[UNDECIDED, WRONG]] * 2, "no response of the last step was right"),
        ([[TWICE_UNDECIDED, WRONG]] * 2, "no response of the last step was right"),
    ],
)
def test_steps_that_teach_nothing_are_said_with_a_reason(rewards: list[list[Reward]], reason: str) -> None:
    """After five in a row, then after ten, twenty and forty."""
    lines = lines_of(rewards, steps=45)
    assert [step for step, _ in lines] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert f"the last {FIRST} steps taught nothing" in lines[0][1]
    assert re.search(reason, lines[0][1])


def test_a_step_that_teaches_begins_the_count_anew() -> None:
    assert [step for step, _ in lines_of([[WRONG] * 4], steps=12, learns_at=4)] == [4 + FIRST]
