"""What an engine is given for each turn of an episode, by an engine that always draws the same ids."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.episodes import RandomEpisode, RandomEpisodes, png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.turns import TurnWriter
from vlm_rl.samplers.base import SampleRequest, SamplingParams, TurnAnswer
from vlm_rl.samplers.episodes import EpisodeBatch, TurnToSample
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Observation, Problem, Prompt, Rollout


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])


def play(
    builder: PromptBuilder, *, max_tokens: int = 60
) -> tuple[list[TurnToSample], list[list[np.ndarray]], Rollout]:
    """Draw one episode. Return each turn as the engine got it, what was drawn before it, and the rollout."""
    picture = png(np.random.default_rng(1), 84, 56)
    problem = Problem("p", "<image>How many?", (picture,), "3", "integer")
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, responses=1)
    episodes = RandomEpisodes(TurnWriter(builder))
    request = SampleRequest([builder.build(problem)], params, seed=0, step=0, episodes=episodes)
    batch = EpisodeBatch(request, builder, version=2)
    # A word letter by letter, which no tokenizer makes of its text.
    letters = [builder.tokenizer.convert_tokens_to_ids(letter) for letter in "squares"]
    seen: list[TurnToSample] = []
    prompts = []
    drawn: list[np.ndarray] = []
    before: list[list[np.ndarray]] = []
    while turns := batch.ready(wait=True):
        (turn,) = turns
        seen.append(turn)
        prompts.append(turn.prompt)
        before.append([*drawn])
        ids = np.array([*letters, builder.eos_ids[0]][-turn.max_tokens :], np.int32)
        drawn.append(ids)
        batch.sampled(turn, ids, np.zeros(len(ids)))
    # One object stands for all turns of an episode: its prompts are what differs.
    shown = [TurnToSample(t.index, t.g, t.episode, p, t.max_tokens) for t, p in zip(seen, prompts, strict=True)]
    return shown, before, batch.groups[0][0]


def test_the_engine_gets_the_very_ids_that_it_drew(builder: PromptBuilder) -> None:
    turns, before, rollout = play(builder)
    assert len(turns) == 4
    for turn, drawn in zip(turns, before, strict=True):
        whole = turn.prompt.sampler_ids.tolist()
        for ids in drawn:
            text = builder.tokenizer.decode(ids.tolist())
            assert builder.tokenizer.encode(text, add_special_tokens=False) != ids.tolist()
            place = next(i for i in range(len(whole)) if whole[i : i + len(ids)] == ids.tolist())
            whole = whole[place + len(ids) :]
    np.testing.assert_array_equal(rollout.ids, np.tile(before[1][0], 4))


def test_each_image_is_one_placeholder_for_the_engine_and_expanded_once_for_the_learner(
    builder: PromptBuilder,
) -> None:
    turns, _, _ = play(builder)
    assert len(turns[-1].prompt.images) > 2
    for turn in turns:
        prompt = turn.prompt
        assert (prompt.sampler_ids == builder.image_token_id).sum() == len(prompt.images)
        assert len(prompt.vision["image_grid_thw"]) == 1, "what is observed is large, and most engines make their own"
        merged = sum(image.width * image.height // 28**2 for image in prompt.images)
        assert (prompt.ids == builder.image_token_id).sum() == merged


def test_the_last_turn_gets_what_is_left(builder: PromptBuilder) -> None:
    turns, _, rollout = play(builder, max_tokens=20)
    assert len(rollout.ids) == 20
    assert [turn.num_tokens for turn in rollout.turns] == [8, 8, 4]
    assert len(turns) == 3


def test_a_fault_of_the_answering_is_raised_and_not_waited_for(builder: PromptBuilder) -> None:
    episodes = RandomEpisodes(TurnWriter(builder), is_quick=False)

    class Faulty(RandomEpisode):
        def answer(self, text: str, ids: np.ndarray) -> Future[TurnAnswer]:
            failed: Future[TurnAnswer] = Future()
            failed.set_exception(RuntimeError("a fault of ours"))
            return failed

    episodes.open = lambda index, g, prompt: Faulty(episodes, g)  # type: ignore[method-assign]
    prompt = builder.build(Problem("p", "How many?", (), "3", "integer"))
    params = SamplingParams(temperature=1.0, max_tokens=9, responses=1)
    batch = EpisodeBatch(SampleRequest([prompt], params, seed=0, step=0, episodes=episodes), builder, version=0)
    (turn,) = batch.ready(wait=True)
    batch.sampled(turn, np.array([builder.eos_ids[0]]), np.zeros(1))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        batch.ready(wait=True)


class Pending(RandomEpisodes):
    """Answers when the test says so."""

    def __init__(self, writer: TurnWriter) -> None:
        super().__init__(writer)
        self.asked: list[tuple[int, Future[TurnAnswer]]] = []

    def open(self, index: int, g: int, prompt: Prompt) -> RandomEpisode:
        episode = super().open(index, g, prompt)

        def wait(text: str, ids: np.ndarray) -> Future[TurnAnswer]:
            self.asked.append((g, Future()))
            return self.asked[-1][1]

        episode.answer = wait  # type: ignore[method-assign]
        return episode


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_an_engine_takes_up_quick_answers_in_the_order_and_at_the_step_in_which_they_are_due(
    builder: PromptBuilder, order: tuple[int, ...]
) -> None:
    """Whichever is there first: three turns end in the first, second and second step, with a lag of three."""
    episodes = Pending(TurnWriter(builder))
    prompt = builder.build(Problem("p", "How many?", (), "3", "integer"))
    params = SamplingParams(temperature=1.0, max_tokens=9, responses=4)
    request = SampleRequest([prompt], params, seed=0, step=0, episodes=episodes)
    batch = EpisodeBatch(request, builder, version=0, lag=3)
    end, no_logprob = np.array([builder.eos_ids[0]]), np.zeros(1)
    first, second, third, busy = batch.ready(wait=False)
    batch.sampled(first, end, no_logprob)
    assert batch.ready(wait=False) == []
    batch.sampled(second, end, no_logprob)
    batch.sampled(third, end, no_logprob)
    for place in order:
        g, future = episodes.asked[place]
        observation = Observation(f"to {g}")
        future.set_result((observation, episodes.writer.write(observation, after=end), ()))
    assert batch.ready(wait=False) == []
    assert [turn.g for turn in batch.ready(wait=False)] == [0]
    assert [turn.g for turn in batch.ready(wait=False)] == [1, 2]
    # An engine that has nothing else to do goes to the step in which the next one is due.
    batch.sampled(busy, end, no_logprob)
    episodes.asked[-1][1].set_result("done")
    assert batch.ready(wait=True) == []
    assert [*batch._groups[0]] == [3]


def test_an_engine_waits_for_a_quick_answer_that_is_late(builder: PromptBuilder) -> None:
    episodes = Pending(TurnWriter(builder))
    prompt = builder.build(Problem("p", "How many?", (), "3", "integer"))
    params = SamplingParams(temperature=1.0, max_tokens=9, responses=2)
    request = SampleRequest([prompt], params, seed=0, step=0, episodes=episodes)
    batch = EpisodeBatch(request, builder, version=0, lag=1)
    first, _ = batch.ready(wait=False)
    batch.sampled(first, np.array([builder.eos_ids[0]]), np.zeros(1))
    late = threading.Timer(0.2, lambda: episodes.asked[0][1].set_result("done"))
    late.start()
    batch.ready(wait=False)
    assert [*batch._groups[0]] == [0], "it was taken up in its step"
