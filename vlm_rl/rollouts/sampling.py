"""The parts of every source: take problems in order, build their prompts, sample and grade this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.config import Config
from vlm_rl.data.prompts import PromptBuilder, PromptCache, StartError, refuse_failing_resets
from vlm_rl.distributed import gather_shares, share
from vlm_rl.environments.host import EpisodeHost
from vlm_rl.rewards.reward import RewardFunction, Scoring
from vlm_rl.rollouts.groups import GroupInProgress, empty_group
from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder
from vlm_rl.samplers.base import OnGroup, SampleRequest, SamplingParams
from vlm_rl.samplers.remote.servers import all_served
from vlm_rl.samplers.watch import SamplingWatch
from vlm_rl.types import EpisodeStart, Group, Problem, Rollout

StepPhase = Callable[[str], AbstractContextManager[None]]  # shows that a phase begins, and adds up its seconds
Generate = Callable[[SampleRequest, OnGroup], list[list[Rollout]]]


@dataclass(frozen=True, slots=True, eq=False)
class Graded:
    """Groups with their rewards, of all ranks, in the order in which their problems were taken."""

    groups: Sequence[Group]  # with advantages of 0
    prompts: PromptCache  # those that this rank has built for the step so far
    prompt_lengths: Mapping[str, int]  # tokens by problem id
    unfit: Mapping[int, str] = field(default_factory=dict)  # why the source rules a group out, by its place
    waiting: int = 0  # groups that are taken for later steps


@dataclass(frozen=True, slots=True, eq=False)
class SourceState:
    """What a resume needs of a source.

    All ranks call `files` together. It gathers what goes into files, and returns the function with which rank 0
    writes them into the folder of a checkpoint.
    """

    info: Mapping[str, Any]  # JSON, for the manifest of a checkpoint
    files: Callable[[], Callable[[Path], None]] = lambda: lambda folder: None


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """What all ranks need to know of a prompt that one of them has built."""

    length: int  # tokens
    start: EpisodeStart | None = None
    fault: str = ""  # why the environment could not begin it


def _measured(problem: Problem, prompts: PromptCache) -> _Measured:
    try:
        prompt = prompts[problem]
    except StartError as error:
        return _Measured(0, fault=str(error))
    return _Measured(len(prompt.ids), prompt.start)


@dataclass(frozen=True, slots=True, eq=False)
class GroupSampling:
    """The parts of a run that give a step its groups. Every rank calls each method with the same problems."""

    config: Config
    params: SamplingParams
    problems: Sequence[Problem]
    builder: PromptBuilder
    reward: RewardFunction
    order: PromptOrder
    ledger: Ledger
    host: EpisodeHost | None = None  # if responses are episodes
    show: Callable[[str], None] | None = None  # shows the progress of a step's sampling
    note: Callable[[str], None] | None = None  # prints a line

    def new_prompts(self) -> PromptCache:
        """Return a cache for the prompts of a step."""
        build = None if self.host is None else partial(self.host.build, seed=self.config.seed)
        return PromptCache(self.builder, build)

    def take(self, count: int, prompts: PromptCache, phase: StepPhase) -> list[GroupInProgress]:
        """Take the next problems in order and return an empty group for each.

        Problems whose prompts exceed data.max_prompt_tokens, and those for which the reset of the environment fails,
        are left out and counted.

        Args:
            count: how many groups to return.
            prompts: keeps the prompts that this rank builds.
            phase: times the building.

        Raises UserError if reset after reset fails.
        """
        fitting: list[GroupInProgress] = []
        failed: list[str] = []
        while len(fitting) < count:
            epochs = self.order.epochs(count - len(fitting))
            taken = [self.problems[index] for index in self.order.take(count - len(fitting))]
            with phase("rollout"):
                found = gather_shares([_measured(problem, prompts) for problem in share(taken)])
            failures = [one.fault for one in found if one.fault]
            fits = [not one.fault and one.length <= self.config.data.max_prompt_tokens for one in found]
            self.ledger.taken += len(taken)
            for reason, number in (("reset", len(failures)), ("too_long", fits.count(False) - len(failures))):
                if number:
                    self.ledger.skipped[reason] += number
            groups = (
                empty_group(problem, one.length, responses=self.params.responses, epoch=epoch, start=one.start)
                for problem, one, epoch in zip(taken, found, epochs, strict=True)
            )
            fitting += compress(groups, fits)
            failed += failures
            if failures and self.note is not None:
                self.note(f"{len(failures)} of {len(taken)} prompts are left out: {failures[0]}")
            if not fitting:
                refuse_failing_resets(failed)
        return fitting

    def building(self, prompts: PromptCache, count: int) -> AbstractContextManager[None]:
        """Build this rank's part of the next `count` prompts in a thread, for the length of a `with` block.

        Most image work releases the GIL.
        """
        return prompts.building([self.problems[index] for index in share(self.order.upcoming(count))])

    def request(self, groups: Sequence[GroupInProgress], prompts: PromptCache, *, step: int) -> SampleRequest:
        """Return the request for this rank's share of the groups, with their responses so far."""
        mine = share(groups)
        problems = [group.problem for group in mine]
        return SampleRequest(
            [group.asked(prompts) for group in mine],
            self.params,
            seed=self.config.seed,
            step=step,
            begun=[group.rollouts for group in mine],
            episodes=self.host and self.host.episodes(problems, seed=self.config.seed, step=step),
            together=True,
            watch=SamplingWatch(len(mine) * self.params.responses, show=self.show),
        )

    def grade(
        self,
        groups: Sequence[GroupInProgress],
        prompts: PromptCache,
        sample: Generate,
        *,
        step: int,
        phase: StepPhase,
    ) -> tuple[Graded, tuple[GroupInProgress, ...]]:
        """Let each rank sample and grade its share. Return the graded groups, and the others in their current state.

        Args:
            groups: the same on every rank.
            prompts: has or builds the prompts of this rank's share.
            sample: returns the responses to a request, and reports each group to grade as soon as it is complete.
            step: the rollout step.
            phase: times the sampling, and the wait for grades.

        Raises ServersGoneError on every rank where one has lost all its rollout servers.
        """
        mine = share(groups)
        with Scoring(self.reward) as scoring:
            with phase("rollout"):
                request = self.request(groups, prompts, step=step)

                def score(index: int, rollouts: Sequence[Rollout]) -> None:
                    prompt = request.prompts[index]
                    scoring.add(index, [(mine[index].problem, prompt, rollout) for rollout in rollouts])

                with all_served():
                    sampled = sample(request, score)
            with phase("reward"):  # only the wait for unfinished grading
                rewards = scoring.rewards()
                all_sampled = gather_shares(
                    [(tuple(rollouts), rewards.get(index)) for index, rollouts in enumerate(sampled)]
                )
        graded: list[Group] = []
        others: list[GroupInProgress] = []
        for group, (rollouts, of_group) in zip(groups, all_sampled, strict=True):
            if of_group is None:
                others.append(replace(group, rollouts=rollouts))
            else:
                graded.append(Group(group.problem, rollouts, of_group, np.zeros(len(rollouts))))
        lengths = {group.problem.id: group.prompt_tokens for group in groups}
        return Graded(graded, prompts, lengths, waiting=len(others)), tuple(others)
