"""One real vLLM server of a tiny model: weights, seeds, versions, the schedule. test_servers.py has what fails."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from copy import copy
from dataclasses import asdict, replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.helpers.episodes import RandomEpisodes, largest_gap, let_turns_end, png
from tests.helpers.rollout_servers import Fleet, begin_batch, learner_logps, same
from tests.helpers.videos import LONG, SHORT, video_problem
from vlm_rl.data.turns import TurnWriter
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.fingerprint import FingerprintBuilder, StaleWeightsError, check_fresh
from vlm_rl.samplers.remote import push as server_push
from vlm_rl.samplers.remote.client import ServerError, ask, connected
from vlm_rl.samplers.remote.push import GlooLink, NcclLink
from vlm_rl.types import Problem, Rollout

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(temperature=1.0, max_tokens=14, responses=4)


@pytest.fixture(scope="module")
def fleet(fleet: Fleet) -> Fleet:
    """The first of the servers alone; it draws four responses at once, and four more for a probe."""
    return replace(fleet, servers=fleet.servers[:1])


def assert_of_the_learner(fleet: Fleet, groups: list[list[Rollout]]) -> None:
    """Check that the learner gives the first prompts' tokens the log-probs that they came with."""
    for prompt, group in zip(fleet.prompts, groups, strict=False):
        drawn = np.concatenate([rollout.logprobs for rollout in group])
        np.testing.assert_allclose(drawn, learner_logps(fleet, prompt, group), atol=1e-4)


def test_a_server_draws_what_the_seeds_say_from_the_weights_that_it_got(fleet: Fleet) -> None:
    """Eight groups over places for one: each arrives once, and the learner gives its tokens the same log-probs."""
    sampler = fleet.sampler()
    fleet.sync(sampler, 1)
    seen: list[int] = []
    first = sampler.generate(
        SampleRequest(fleet.prompts, PARAMS, seed=1, step=2), on_group=lambda index, _: seen.append(index)
    )
    assert sorted(seen) == list(range(8))
    assert all(rollout.policy_version == 1 and not rollout.older for group in first for rollout in group)
    assert_of_the_learner(fleet, first[:2])
    assert same(sampler.generate(SampleRequest(fleet.prompts, PARAMS, seed=1, step=2)), first)
    assert not same(sampler.generate(SampleRequest(fleet.prompts, PARAMS, seed=2, step=2)), first)
    fleet.sync(sampler, 2)
    second = sampler.generate(SampleRequest(fleet.prompts, PARAMS, seed=1, step=2))
    assert not same(second, first) and {rollout.policy_version for group in second for rollout in group} == {2}


def test_videos_are_read_as_the_learner_reads_them(fleet: Fleet) -> None:
    """Two of a prompt, with an image before each, of equal frames at other times; a third is more than it takes."""
    builder = copy(fleet.builder)
    problems = [video_problem(SHORT, LONG), video_problem([0, 10, 20], SHORT)]
    builder.allow_videos(problems)
    fleet = replace(fleet, builder=builder, prompts=[builder.build(problem) for problem in problems])
    assert max(len(prompt.ids) for prompt in fleet.prompts) <= 160  # what the servers take of a prompt
    sampler = fleet.sampler()
    fleet.sync(sampler, 1)
    groups = sampler.generate(SampleRequest(fleet.prompts, PARAMS, seed=1, step=2))
    assert not same(groups[:1], groups[1:])
    assert_of_the_learner(fleet, groups)
    builder.allow_videos([video_problem(SHORT, LONG, SHORT)])
    assert not sampler.fleet.look_around()
    assert "takes 2 videos of a prompt, and this run has prompts with 3: start it with" in fleet.notes[-1]


def test_a_response_that_weights_overtake_continues_under_the_new_ones(fleet: Fleet) -> None:
    """Batches are begun and weights pushed until a response has tokens of both; none is lost or drawn again."""
    sampler = fleet.sampler()
    fleet.sync(sampler, 3)
    mixed: list[Rollout] = []
    for step in range(4, 44):  # on a busy machine weights may come late, and a batch may then be done before them
        begin_batch(sampler, fleet, step, SamplingParams(temperature=1.0, max_tokens=90, responses=2))
        fleet.sync(sampler, step)
        rollouts = [rollout for group in sampler.take(step, lambda *_: None) for rollout in group]
        assert len(rollouts) == 16 and {*rollouts[-1].versions_R} <= {step - 1, step} and not fleet.notes
        mixed = [rollout for rollout in rollouts if rollout.older]
        if mixed:
            break
    assert all([*dict.fromkeys(rollout.versions_R)] == [step - 1, step] for rollout in mixed) and mixed
    sampler.close()


def test_episodes_are_of_the_learner_and_repeat_themselves(fleet: Fleet) -> None:
    """Two turns with pictures between them: the unmodified model gives the sampled tokens the same log-probs."""
    builder = copy(fleet.builder)
    let_turns_end(builder)
    fleet = replace(fleet, builder=builder)
    sampler = fleet.sampler()
    fleet.sync(sampler, 3)
    writer = TurnWriter(builder, max_pixels=84 * 84)

    def draw() -> list[list[Rollout]]:
        episodes = RandomEpisodes(writer, max_turns=2, is_quick=False)
        return sampler.generate(SampleRequest(fleet.prompts[:3], PARAMS, seed=1, step=2, episodes=episodes))

    groups = draw()
    rollouts = [rollout for group in groups for rollout in group]
    assert sum(len(seen.images) for rollout in rollouts for _, seen in rollout.observed) > 3
    assert largest_gap(fleet.model, builder, fleet.prompts[:3], groups) < 1e-4
    assert same(draw(), groups)

    picture = png(np.random.default_rng(0), 56, 56)
    long = builder.build(Problem("long", "<image>" + "How many? " * 18, (picture,), "3", "integer"))
    for _ in range(2):
        (responses,) = sampler.generate(SampleRequest([long], PARAMS, seed=1, step=2))
    assert {rollout.num_cached for rollout in responses} == {128}, "a block of vLLM's on a CPU"


def test_what_a_learner_no_longer_waits_for_harms_no_later_request(fleet: Fleet) -> None:
    """Requests are given up while their images are prepared; the same images are then asked for again, two at once.

    vLLM's generate() loses prepared images that way, and later requests with them are answered with 500.
    """
    rng = np.random.default_rng(0)
    prompt = fleet.prompts[0]
    size = prompt.images[0].size

    def body() -> dict[str, Any]:
        image = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        params = asdict(SamplingParams(temperature=1.0, max_tokens=2, responses=4))
        return {
            "ids": [int(token) for token in prompt.ids],
            "images": [{"size": size, "data": base64.b64encode(image.tobytes()).decode()}],
            "videos": [],
            "params": params,
            "seeds": [1, 2, 3, 4],
            "eos_ids": [],
            "banned_ids": [],
        }

    async def give_up_and_ask_again() -> list[int]:
        codes = []
        async with connected(fleet.servers[0].url, fleet.token.read_text().strip()) as client:
            for _ in range(30):
                asked = body()
                given_up = asyncio.ensure_future(client.post("/vlm_rl/generate", json=asked))
                await asyncio.sleep(rng.uniform(0, 0.03))
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                replies = [client.post("/vlm_rl/generate", json=asked) for _ in range(2)]
                codes += [reply.status_code for reply in await asyncio.gather(*replies)]
        return codes

    assert asyncio.run(give_up_and_ask_again()) == [200] * 60


def test_stale_weights_are_refused(fleet: Fleet) -> None:
    """By their checksum, where the server lacks an update; by the label of its tokens, where it has a stranger's."""
    sampler = fleet.sampler(timeout=1.0)
    fleet.sync(sampler, 20)
    with torch.no_grad():
        next(fleet.model.parameters()).view(-1)[0] += 1
    fingerprint = FingerprintBuilder(dtype=sampler.dtype)
    for named in fleet.model.named_parameters():
        fingerprint.add(*named)
    with pytest.raises(StaleWeightsError, match="does not hold the learner's weights"):
        check_fresh(sampler, fingerprint.result())
    (server,) = fleet.servers
    headers = {"Authorization": f"Bearer {fleet.token.read_text().strip()}"}
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "old"}, headers=headers).raise_for_status()
    groups = sampler.generate(SampleRequest(fleet.prompts[:2], PARAMS, seed=1, step=2))
    assert "the weights old" in fleet.notes[0] or "'weight_version': 'old'" in fleet.notes[0], fleet.notes
    assert_of_the_learner(fleet, groups)  # the server had got its weights again


def test_a_server_that_a_push_left_paused_gets_no_work(fleet: Fleet) -> None:
    """It holds the weights, as its label says, and would let requests wait for ever."""
    sampler = fleet.sampler()
    fleet.sync(sampler, 30)

    async def post(path: str) -> None:
        async with connected(fleet.servers[0].url, sampler.fleet.token) as client:
            await ask(client, path, seconds=10)

    asyncio.run(post("/pause?mode=keep&clear_cache=false"))
    try:
        assert not sampler.fleet.look_around(holding=sampler.fleet.label)
        assert any("its last push did not end" in note for note in fleet.notes), fleet.notes
        assert sampler.fleet.look_around(), "a push ends the pause"
    finally:
        asyncio.run(post("/resume"))
    assert sampler.fleet.look_around(holding=sampler.fleet.label)


def test_a_request_of_wrong_types_ends_no_engine(fleet: Fleet) -> None:
    """vLLM's engine reads requests in a thread, which ends at one that it cannot read."""
    sampler = fleet.sampler()
    fleet.sync(sampler, 31)
    body: dict[str, Any] = {
        "ids": fleet.prompts[0].ids.tolist()[:5],
        "images": [],
        "videos": [],
        "params": asdict(SamplingParams(temperature=1.0, max_tokens=3, responses=1)),
        "seeds": [1],
        "eos_ids": [0],
        "banned_ids": [],
        "responses": [[1, 2]],
        "top_k": 1,
    }

    async def answers(path: str, **changes: Any) -> Any:
        async with connected(fleet.servers[0].url, sampler.fleet.token) as client:
            return await ask(client, f"/vlm_rl/{path}", body | changes, seconds=30)

    for path, changes in (
        ("generate", {"seeds": ["x"]}),
        ("generate", {"seeds": [1.5]}),
        ("generate", {"ids": [1.5]}),
        ("generate", {"params": body["params"] | {"max_tokens": 2.5}}),
        ("generate", {"images": [{"size": [3], "data": ""}]}),
        ("score", {"responses": [[1.5]]}),
        ("score", {"top_k": 1.5}),
    ):
        with pytest.raises(ServerError, match="HTTP 400"):
            asyncio.run(answers(path, **changes))
    assert len(asyncio.run(answers("generate"))["responses"]) == 1
    assert len(asyncio.run(answers("score"))["scores"]) == 1


class HangingGroup:
    """Stands in for NCCL, which needs GPUs: weights go over gloo, until it hangs as NCCL does; an abort ends that."""

    hangs_at = 20

    def __init__(self, address: str, *, workers: int, seconds: float) -> None:
        self._gloo = GlooLink(address, seconds, workers=workers)
        self.init_info, self.join = self._gloo.init_info(), self._gloo.join
        self._sent, self._aborted = 0, threading.Event()

    def send(self, tensor: torch.Tensor) -> None:
        self._sent += 1
        if self._sent == self.hangs_at or self._aborted.is_set():
            self._aborted.wait()
            raise RuntimeError("aborted")
        self._gloo.send(tensor)

    def abort(self) -> None:
        self._aborted.set()


def test_a_push_over_a_link_that_hangs_ends_in_its_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops out; then it gets all weights over a new link."""
    nccl = pytest.importorskip("vlm_rl.samplers.vllm.nccl")
    monkeypatch.setattr(nccl, "NcclGroup", HangingGroup)
    monkeypatch.setitem(server_push._LINKS, "gloo", NcclLink)
    sampler = fleet.sampler(silence=5.0)  # enough for the requests before the link, on a busy machine too
    begun = time.monotonic()
    sampler.load_weights(fleet.model.named_parameters(), version=21)
    assert time.monotonic() - begun < 30 and not sampler.fleet.rooms and not sampler._links
    assert any("NCCL: silent for 5 s" in note or "/update_weights: silent" in note for note in fleet.notes), (
        fleet.notes
    )
    monkeypatch.setattr(HangingGroup, "hangs_at", 0)
    fleet.sync(sampler, 22)
    assert len(sampler.fleet.rooms) == 1 and len(sampler._links) == 1
    sampler.close()
    assert not sampler._links
