"""Problems that an environment cannot begin: left out and counted, and the end of a run where there are only such."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.groups import bare_prompt
from tests.helpers.sources import PROBLEMS, no_phase, sampling_of
from vlm_rl.config import parse_config
from vlm_rl.data.prompts import PromptCache, StartError
from vlm_rl.errors import UserError
from vlm_rl.learner.loading import check_a_prompt_fits
from vlm_rl.types import EpisodeStart, Problem, Prompt

CONFIG = parse_config({"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}})


def build(problem: Problem) -> Prompt:
    """Return a prompt with a start; every third problem has none."""
    if int(problem.id) % 3 == 0:
        raise StartError(f"environment world: reset of problem {problem.id!r} failed: late")
    return replace(bare_prompt(problem.id), start=EpisodeStart(f"world {problem.id}", (), "digest"))


def build_none(problem: Problem) -> Prompt:
    raise StartError(f"environment world: reset of problem {problem.id!r} failed: late")


def test_a_problem_that_cannot_begin_is_left_out_and_counted() -> None:
    notes: list[str] = []
    sampling = replace(sampling_of(CONFIG), note=notes.append)
    groups = sampling.take(8, PromptCache(sampling.builder, build), no_phase)
    assert len(groups) == 8 and all(int(group.problem.id) % 3 for group in groups)
    assert [group.start and group.start.text for group in groups] == [f"world {g.problem.id}" for g in groups]
    assert sampling.ledger.skipped == {"reset": sampling.ledger.taken - 8}
    sampling.ledger.check(in_progress=8)
    assert all("prompts are left out: environment world: reset of problem" in note for note in notes)


def test_a_start_is_asked_for_once_in_a_step() -> None:
    asked: list[str] = []

    def counted(problem: Problem) -> Prompt:
        asked.append(problem.id)
        return build(problem)

    prompts = PromptCache(sampling_of(CONFIG).builder, counted)
    for problem in [*PROBLEMS[:2], *PROBLEMS[:2]]:
        if problem.id == "0":
            with pytest.raises(StartError):
                prompts[problem]
        else:
            assert prompts[problem] is prompts.with_start(problem, None)
    assert asked == ["0", "1"]


def test_a_run_without_a_start_ends() -> None:
    sampling = sampling_of(CONFIG)
    with pytest.raises(
        UserError, match="64 resets in a row failed; the last one: environment world: reset of problem"
    ):
        sampling.take(4, PromptCache(sampling.builder, build_none), no_phase)
    with pytest.raises(UserError, match="no prompt of d can begin: environment world: reset of problem '11' failed"):
        check_a_prompt_fits(build_none, PROBLEMS, CONFIG.data)
    with pytest.raises(UserError, match="64 resets in a row failed"):
        check_a_prompt_fits(build_none, PROBLEMS * 6, CONFIG.data)
    check_a_prompt_fits(build, PROBLEMS, CONFIG.data)
