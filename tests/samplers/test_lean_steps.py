"""What our sampler spares vLLM's decode steps, against an engine that does all of it: the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.helpers.images import noise_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.rollouts.groups import empty_group
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.vllm.engine import VllmSampler, _request
from vlm_rl.samplers.vllm.lean_steps import ResponseLog, SeedsAhead
from vlm_rl.samplers.vllm.options import sampling_options
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt, Rollout

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
TOKENS = 150  # more than the seeds that are drawn at a time, twice
FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 32}  # responses are preempted
Drawn = tuple[list[int], list[float]]


class Plain(VllmSampler):
    """vLLM as it is: a bias for each request, lists of log-probs, ranks, a generator's call for each token."""

    preempted = 0

    def _lean_steps(self) -> Any:
        scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def responses(self, request: SampleRequest) -> list[list[Drawn]]:
        self._reset_caches()
        vllm, params, builder = self._vllm, request.params, self._builder
        eos, banned = list(builder.eos_ids), list(builder.banned_ids)
        asked = [
            (_request(prompt), sampling_options(vllm, params, seed=seed, eos_ids=eos, banned_ids=banned))
            for index, prompt in enumerate(request.prompts)
            for seed in request.seeds(index)
        ]
        done = self._llm.generate(*map(list, zip(*asked, strict=True)), use_tqdm=False)
        flat: list[Any] = [one.outputs[0] for one in done]
        drawn = [(list(one.token_ids), list(one.logprobs.logprobs)) for one in flat]
        size = request.params.responses
        return [drawn[first : first + size] for first in range(0, len(drawn), size)]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights and a banned token that is likely: the end of a response is not."""
    out = tmp_path_factory.mktemp("models") / "sharp"
    shutil.copytree(tiny_model, out)
    builder = PromptBuilder(out, template=TEMPLATES["think_box"], max_pixels=100_352)
    weights: Any = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in weights.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
        head = weights.get_output_embeddings().weight
        head[list(builder.banned_ids)] *= 3
        head[list(builder.eos_ids)] *= 0.1
    weights.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def builder(model: Path) -> PromptBuilder:
    return PromptBuilder(model, template=TEMPLATES["think_box"], max_pixels=100_352)


@pytest.fixture(scope="module")
def prompts(builder: PromptBuilder) -> list[Prompt]:
    rows = [("How many?", ()), ("<image>How many are there?", (noise_png(84, 84, 1),)), ("Which one? " * 20, ())]
    return [
        builder.build(Problem(id=f"p{i}", question=q, images=images, answer="4", answer_type="integer"))
        for i, (q, images) in enumerate(rows)
    ]


def started(kind: type[VllmSampler], model: Path, builder: PromptBuilder) -> Any:
    return kind(
        EngineSettings(
            model_path=str(model),
            builder=builder,
            max_model_len=512,
            batch_size=8,
            dtype=torch.float32,
            vllm_options=FEW_BLOCKS,
        )
    )


def asked(prompts: list[Prompt], *, temperature: float = 1.0, responses: int = 4, **params: Any) -> SampleRequest:
    how = SamplingParams(temperature=temperature, max_tokens=TOKENS, responses=responses, **params)
    begun = [
        empty_group(Problem(prompt.problem_id, "", (), "", "text"), 1, responses=responses).rollouts
        for prompt in prompts
    ]
    return SampleRequest(prompts=prompts, params=how, seed=3, step=7, begun=begun)


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "responses": 2, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.0, "responses": 1},
]


@pytest.fixture(scope="module")
def expected(model: Path, builder: PromptBuilder, prompts: list[Prompt]) -> Iterator[list[list[list[Drawn]]]]:
    """What vLLM itself gives in each of CASES."""
    plain = started(Plain, model, builder)
    drawn = [plain.responses(asked(prompts, **case)) for case in CASES]
    assert plain.preempted > 0, "this engine has room for every response: nothing is preempted"
    plain.close()
    yield drawn


@pytest.fixture(scope="module")
def sampler(model: Path, builder: PromptBuilder, expected: Any) -> Iterator[VllmSampler]:
    sampler = started(VllmSampler, model, builder)
    yield sampler
    sampler.close()


def bits(groups: list[list[Rollout]]) -> list[list[Drawn]]:
    return [[(rollout.ids.tolist(), rollout.logprobs.tolist()) for rollout in group] for group in groups]


def rounded(groups: list[list[Drawn]]) -> list[list[Drawn]]:
    """The log-probs as a rollout holds them, in float32."""
    return [[(ids, np.array(logprobs, dtype=np.float32).tolist()) for ids, logprobs in group] for group in groups]


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_tokens_and_log_probs_are_vllms_own(
    sampler: VllmSampler, prompts: list[Prompt], expected: list[list[list[Drawn]]], number: int
) -> None:
    assert bits(sampler.generate(asked(prompts, **CASES[number]))) == rounded(expected[number])
    lengths = {len(ids) for group in expected[0] for ids, _ in group}
    assert len(lengths) > 2, "no response ends before the others: no place in the batch changes hands"


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_responses_that_are_cut_are_the_beginnings_of_vllms_own(
    sampler: VllmSampler, prompts: list[Prompt], expected: list[list[list[Drawn]]]
) -> None:
    groups = sampler.generate_until(asked(prompts), enough=1, on_group=lambda index, rollouts: None)
    unfinished = [rollout for group in groups for rollout in group if rollout.stop_reason == "unfinished"]
    assert any(len(rollout.ids) for rollout in unfinished), "nothing was cut"
    for group, of_prompt in zip(bits(groups), rounded(expected[0]), strict=True):
        for (ids, logprobs), (all_ids, all_logprobs) in zip(group, of_prompt, strict=True):
            assert ids == all_ids[: len(ids)] and logprobs == all_logprobs[: len(ids)]


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_a_response_brings_what_truncation_left_of_each_token(sampler: VllmSampler, prompts: list[Prompt]) -> None:
    """A GPU's model runner tells it with each step's tokens. Here a token comes with one to three ids from it on."""
    from vllm.v1.outputs import SamplingMaskLists

    log, scheduler = sampler._log, sampler._llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    update = log._update

    def left(token: int) -> list[int]:
        return list(range(token, token + 1 + token % 3))

    def told(scheduled: Any, sampled: Any) -> Any:
        by_row = [left(token) for (token,) in sampled.sampled_token_ids]
        offsets = np.cumsum([0, *map(len, by_row)])
        return update(scheduled, replace(sampled, sampling_masks=SamplingMaskLists(np.concatenate(by_row), offsets)))

    log._update, scheduler.return_sampling_mask = told, True
    try:
        groups = sampler.generate(asked(prompts))
    finally:
        log._update, scheduler.return_sampling_mask = update, False
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.kept is not None
        assert rollout.kept.ids.tolist() == [other for token in rollout.ids for other in left(int(token))]
        assert rollout.kept.counts.tolist() == [len(left(int(token))) for token in rollout.ids]


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_nothing_is_kept_of_a_call_that_ended_early(sampler: VllmSampler, prompts: list[Prompt]) -> None:
    def stop(index: int, rollouts: list[Rollout]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.generate(asked(prompts), on_group=stop)
    assert not sampler._log._kept
    streamed = list(sampler.stream(asked(prompts[:1], responses=1)))
    assert streamed == bits(sampler.generate(asked(prompts[:1], responses=1)))[0][0][0]


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_where_no_block_is_looked_for_vllm_would_find_none_and_change_nothing(
    sampler: VllmSampler, prompts: list[Prompt]
) -> None:
    manager: Any = sampler._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    ours, own = manager.allocate_slots, type(manager).allocate_slots.__get__(manager)
    pool, kind = manager.block_pool, manager.coordinator.single_type_managers[0]
    counts = {"spared": 0, "asked": 0}

    def state() -> Any:
        return pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block), dict(kind.num_cached_block)

    def compared(request: Any, *args: Any, **kwargs: Any) -> Any:
        before = state()
        found = ours(request, *args, **kwargs)
        is_spared = found is manager.empty_kv_cache_blocks and state() == before
        if is_spared:
            assert own(request, *args, **kwargs) is manager.empty_kv_cache_blocks
            assert state() == before, (request.num_computed_tokens, request.num_tokens)
        counts["spared" if is_spared else "asked"] += 1
        return found

    manager.allocate_slots = compared
    try:
        sampler.generate(asked(prompts))
    finally:
        manager.allocate_slots = ours
    assert counts["spared"] > 5 * counts["asked"] > 0


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_a_model_with_windows_keeps_vllms_search_for_blocks(sampler: VllmSampler) -> None:
    from vlm_rl.samplers.vllm.lean_steps import spare_full_blocks

    kind = SimpleNamespace(block_size=32)
    manager = SimpleNamespace(allocate_slots=print, coordinator=SimpleNamespace(single_type_managers=[kind]))
    spare_full_blocks(manager)
    assert manager.allocate_slots is print


def test_a_token_that_the_scheduler_drops_has_no_log_prob() -> None:
    """With scheduling ahead of the results, as on a GPU, and with several tokens a step."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    given: list[EngineCoreOutput] = []
    scheduler = SimpleNamespace(update_from_output=lambda *_: {0: EngineCoreOutputs(outputs=list(given))})
    log = ResponseLog(scheduler)
    log.keep("a")
    log.keep("b")

    def step(logprobs: list[float], *outputs: EngineCoreOutput, firsts: list[int] | None = None) -> list[str]:
        given[:] = outputs
        column = np.array(logprobs, dtype=np.float32)[:, None]
        rows = LogprobsLists(np.zeros_like(column, dtype=np.int32), column, np.zeros(len(column)), firsts)
        sampled = ModelRunnerOutput(["b", "a", "c"], {"b": 0, "a": 1, "c": 2}, logprobs=rows)
        return [output.request_id for output in scheduler.update_from_output(None, sampled)[0].outputs]

    first = EngineCoreOutput("a", [5], prefill_stats=PrefillStats(num_prompt_tokens=40, num_cached_tokens=32))
    assert step([-1, -2, -3], first, EngineCoreOutput("b", [6]), EngineCoreOutput("c", [9])) == ["c"]
    assert step([-4, -5, -6], EngineCoreOutput("a", [7])) == [], "b's token was dropped"
    ended = EngineCoreOutput("b", [8, 9], finish_reason=FinishReason.STOP)
    assert step([-7, -8, -9, -10], ended, firsts=[0, 2, 3]) == ["b"], "its end is vLLM's to see"
    ids, logprobs, more = log.take("a")
    assert (ids.tolist(), logprobs.tolist(), more) == ([5, 7], [-2, -5], {"num_cached": 32, "kept": None})
    ids, logprobs, more = log.take("b")
    assert (ids.tolist(), logprobs.tolist(), more) == ([6, 8, 9], [-1, -7, -8], {"num_cached": 0, "kept": None})


def test_seeds_drawn_ahead_are_those_drawn_one_by_one() -> None:
    """As vLLM draws them: for a row at a time, while rows change their places and responses come and go."""
    one_by_one = {name: torch.Generator().manual_seed(2**62 + name) for name in range(5)}
    ahead = {name: torch.Generator().manual_seed(2**62 + name) for name in range(5)}
    seeds = SeedsAhead()
    for step in range(200):
        rows = [0, 1, 2] if step < 70 else [4, 1, 0] if step < 140 else [3, 0]
        drawn = [torch.randint(0, 2**31, (1,), generator=one_by_one[name]).item() for name in rows]
        assert seeds.next({row: ahead[name] for row, name in enumerate(rows)}).tolist() == drawn
