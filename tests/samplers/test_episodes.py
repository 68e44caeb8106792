"""Responses of several turns by the engines of this process: exact ids, one expansion, each in its own time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.episodes import (
    RandomEpisode,
    RandomEpisodes,
    largest_gap,
    let_turns_end,
    open_reference,
    png,
    random_start,
)
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.turns import TurnWriter
from vlm_rl.samplers.base import InProcessSampler, SampleRequest, SamplingParams, TurnAnswer
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem, Prompt, Rollout

PARAMS = SamplingParams(temperature=1.0, max_tokens=60, responses=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", weight_std=0.09)


@pytest.fixture(scope="module")
def builder(model: Path) -> PromptBuilder:
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    let_turns_end(builder)
    return builder


@pytest.fixture(scope="module")
def prompts(builder: PromptBuilder) -> list[Prompt]:
    """Return three prompts; the environment shows something before the first turn of the second and the third."""
    rng, writer = np.random.default_rng(1), TurnWriter(builder)
    return [
        builder.build(
            Problem(f"p{i}", "<image>How many?", (png(rng, 60 + 20 * i, 70),), "3", "integer"),
            start=random_start(writer, rng, i) if i else None,
        )
        for i in range(3)
    ]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def sampler(request: pytest.FixtureRequest, model: Path, builder: PromptBuilder) -> Any:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    sampler = make_sampler(
        request.param,
        EngineSettings(
            model_path=str(model), builder=builder, max_model_len=1024, batch_size=16, dtype=torch.float32
        ),
    )
    yield sampler
    sampler.close()


def asked(prompts: list[Prompt], episodes: Any) -> SampleRequest:
    return SampleRequest(prompts, PARAMS, seed=1, step=0, episodes=episodes)


@pytest.fixture(scope="module")
def groups(sampler: InProcessSampler, builder: PromptBuilder, prompts: list[Prompt]) -> list[list[Rollout]]:
    return sampler.generate(asked(prompts, RandomEpisodes(TurnWriter(builder))))


def test_log_probs_are_those_of_the_unmodified_model(
    groups: list[list[Rollout]], model: Path, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Each episode alone through the plain model: an image that ids or features lack, or have twice, would show."""
    rollouts = [rollout for group in groups for rollout in group]
    assert sum(len(seen.images) for r in rollouts for _, seen in r.observed) > 20
    assert {len(rollout.turns) for rollout in rollouts} >= {4}
    for rollout in rollouts:
        assert sum(turn.num_tokens for turn in rollout.turns) == len(rollout.ids) <= PARAMS.max_tokens
        assert rollout.text == rollout.turns[-1].text
        assert [turn.observed is None for turn in rollout.turns] == [False] * (len(rollout.turns) - 1) + [True]
        before = len(prompts[int(rollout.problem_id[1:])].ids)
        for turn in rollout.turns:
            assert turn.num_before == before
            before += turn.num_tokens + (0 if turn.observed is None else len(turn.observed.ids))
    assert largest_gap(open_reference(model), builder, prompts, groups) < 2e-5


def test_later_turns_find_the_blocks_of_earlier_ones_in_the_engine_s_cache(
    sampler: InProcessSampler, groups: list[list[Rollout]]
) -> None:
    turns = [(before, turn) for group in groups for r in group for before, turn in pairwise(r.turns)]
    if sampler.name != "vllm":
        assert {turn.num_cached for _, turn in turns} == {0}, "the portable engine has no such cache"
        return
    block = 128  # vLLM's on a CPU
    for before, turn in turns:
        known = before.num_before + before.num_tokens - 1  # the last token's keys and values were not needed
        assert known // block * block <= turn.num_cached < turn.num_before
    assert sum(turn.num_cached for _, turn in turns) > 2000


def test_the_same_call_gives_the_same_bits(
    sampler: InProcessSampler, groups: list[list[Rollout]], builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    again = sampler.generate(asked(prompts, RandomEpisodes(TurnWriter(builder))))
    for ours, theirs in zip(groups, again, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


class Late(RandomEpisodes):
    """Answers the first prompt's first response only once every other response has ended."""

    def __init__(self, writer: TurnWriter) -> None:
        super().__init__(writer, is_quick=False)
        self.others_ended = threading.Event()

    def open(self, index: int, g: int, prompt: Prompt) -> RandomEpisode:
        episode = super().open(index, g, prompt)
        if (index, g) == (0, 0):
            answer = episode.answer

            def wait(text: str, ids: np.ndarray) -> Future[TurnAnswer]:
                late: Future[TurnAnswer] = Future()

                def run() -> None:
                    self.others_ended.wait(60)
                    late.set_result(answer(text, ids).result())

                threading.Thread(target=run, daemon=True).start()
                return late

            episode.answer = wait  # type: ignore[method-assign]
        return episode


def test_an_episode_that_waits_keeps_no_other_waiting(
    sampler: InProcessSampler, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    if sampler.name != "vllm":
        pytest.skip("the portable engine draws in rounds")
    late, ended = Late(TurnWriter(builder)), []

    def on_group(index: int, group: Any) -> None:
        ended.append(index)
        if {1, 2} <= {*ended}:
            late.others_ended.set()

    begun = time.monotonic()
    groups = sampler.generate(asked(prompts, late), on_group=on_group)
    assert ended[-1] == 0
    assert late.others_ended.is_set()
    assert time.monotonic() - begun < 50, "the others had to wait"
    assert all(len(group) == 4 for group in groups)


def test_the_turns_share_one_budget(sampler: InProcessSampler, builder: PromptBuilder, prompts: list[Prompt]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=9, responses=8)
    request = SampleRequest(prompts, params, seed=1, step=0, episodes=RandomEpisodes(TurnWriter(builder)))
    rollouts = [rollout for group in sampler.generate(request) for rollout in group]
    assert max(len(rollout.ids) for rollout in rollouts) == 9
    cut = [rollout for rollout in rollouts if rollout.turns[-1].ending == "length"]
    assert cut
    assert all(len(rollout.ids) == 9 for rollout in cut)
