"""Both engines against a plain forward of the unmodified transformers model, and against each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.helpers.groups import load_reference, own_inputs
from tests.helpers.images import noise_png
from tests.helpers.rotation import todays
from tests.helpers.videos import LONG, SHORT, video_problem
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.distributed import signs_of_life
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.model_files.weights import sent_tensors
from vlm_rl.rollouts.groups import empty_group
from vlm_rl.samplers.base import InProcessSampler, Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import _UNKNOWN_TO_VLLM, check_loaded, make_sampler
from vlm_rl.samplers.fingerprint import FingerprintBuilder, StaleWeightsError, check_fresh, fingerprint
from vlm_rl.samplers.transformers import _PREFILL_TOKENS, TransformersSampler
from vlm_rl.samplers.vllm.engine import _request
from vlm_rl.samplers.vllm.options import cache_bytes
from vlm_rl.samplers.vllm.start import threads_kept
from vlm_rl.samplers.vllm.worker import sleep_beside_others
from vlm_rl.samplers.watch import SamplingWatch
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt, Rollout

GREEDY = SamplingParams(temperature=0, max_tokens=24, responses=1)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, responses=4)


@pytest.fixture(scope="module")
def sharp_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights: its predictions are far from uniform and depend on the image."""
    out = tmp_path_factory.mktemp("models") / "sharp"
    shutil.copytree(tiny_model, out)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if "embed_tokens" in name else 5.0)
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def builder(sharp_model: Path) -> PromptBuilder:
    return PromptBuilder(sharp_model, template=TEMPLATES["think_box"], max_pixels=100_352)


@pytest.fixture(scope="module")
def prompts(builder: PromptBuilder) -> list[Prompt]:
    """Text only, one image, several images of unequal size, and a long text: mixed in every call."""
    rows = [
        ("How many?", []),
        ("<image>How many are there?", [noise_png(84, 84, 1)]),
        (
            "Look at <image> and <image>, then <image>.",
            [noise_png(s, t, 2) for s, t in ((100, 300), (200, 84), (84, 84))],
        ),
        ("Which one is it? " * 20, []),
    ]
    return [
        builder.build(Problem(id=f"p{i}", question=q, images=tuple(images), answer="4", answer_type="integer"))
        for i, (q, images) in enumerate(rows)
    ]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def running(request: pytest.FixtureRequest, sharp_model: Path, builder: PromptBuilder) -> Iterator[Sampler]:
    """One engine for all tests of this file."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
    sampler = start(request.param, sharp_model, builder)
    yield sampler
    sampler.close()


@pytest.fixture
def sampler(running: Sampler, model: torch.nn.Module) -> Iterator[Sampler]:
    """The engine with the weights of `model`, whatever a test did to it."""
    yield running
    if running.policy_version != 0:
        running.load_weights(model.named_parameters(), version=0)


@pytest.fixture(scope="module")
def model(sharp_model: Path) -> torch.nn.Module:
    return load(sharp_model)


@pytest.mark.slow
def test_the_engine_leaves_the_memory_policy_of_the_learners_process(running: Sampler) -> None:
    """vLLM's CPU worker would bind every later allocation of this process to one NUMA node."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this system has no NUMA policies")
    assert " bind:" not in maps.read_text()


def start(name: str, path: Path, builder: PromptBuilder, **options) -> Sampler:
    return make_sampler(
        name,
        EngineSettings(
            model_path=str(path),
            builder=builder,
            max_model_len=1024,
            batch_size=options.pop("batch_size", 32),
            dtype=torch.float32,
            vllm_options=options,
        ),
    )


@cache
def read(path: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def load(path: Path) -> torch.nn.Module:
    return deepcopy(read(path))


def edited(path: Path, edit) -> torch.nn.Module:
    """The model with every parameter passed through `edit(name, tensor)`."""
    model = load(path)
    for name, parameter in model.named_parameters():
        parameter.copy_(edit(name, parameter))
    return model


def noise(scale: float, *, only: str = ""):
    generator = torch.Generator().manual_seed(0)
    return lambda name, t: t + scale * torch.randn(t.shape, generator=generator) if only in name else t


def plain_logits(model: torch.nn.Module, prompt: Prompt, rollout: Rollout) -> torch.Tensor:
    """[R, V] of an ordinary forward over prompt + response, one row, the model's own positions."""
    ids = torch.from_numpy(np.concatenate([prompt.ids, rollout.ids]).astype(np.int64))[None]
    extra = own_inputs(model, ids, prompt.vision) if prompt.vision else {}
    if prompt.videos:  # behind a long one transformers alone would not give the published positions
        positions = rope_positions(model, prompt)
        rest = torch.arange(len(rollout.ids)) + positions.max() + 1
        extra["position_ids"] = torch.cat([positions, rest.expand(3, -1)], 1)[:, None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **extra).logits[0]
    return logits[len(prompt.ids) - 1 : -1]


def expected_logprobs(
    model: torch.nn.Module, builder: PromptBuilder, prompt: Prompt, rollout: Rollout, temperature: float
) -> np.ndarray:
    logprobs = all_logprobs(model, builder, prompt, rollout, temperature)
    return logprobs[np.arange(len(rollout.ids)), rollout.ids]


def all_logprobs(
    model: torch.nn.Module, builder: PromptBuilder, prompt: Prompt, rollout: Rollout, temperature: float
) -> np.ndarray:
    """[R, V] of the tokens that may be drawn, minus infinity for the others."""
    logits = plain_logits(model, prompt, rollout) / (temperature or 1.0)
    logits[:, list(builder.banned_ids)] = -float("inf")
    return torch.log_softmax(logits, 1).numpy()


def pairs(prompts: list[Prompt], groups: list[list[Rollout]]) -> list[tuple[Prompt, Rollout]]:
    return [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]


def same(first: list[list[Rollout]], second: list[list[Rollout]]) -> bool:
    flat = [[(r.ids.tolist(), r.logprobs.tobytes()) for group in groups for r in group] for groups in (first, second)]
    return flat[0] == flat[1]


# --- what is generated -----------------------------------------------------------------------


def not_begun(prompts: list[Prompt], responses: int) -> list[tuple[Rollout, ...]]:
    problems = [Problem(prompt.problem_id, "", (), "", "text") for prompt in prompts]
    return [empty_group(problem, 1, responses=responses).rollouts for problem in problems]


def draw_on(sampler: Sampler, prompts: list[Prompt], begun: Any, *, step: int, enough: int) -> tuple[list, list[int]]:
    """Return all groups, and those that counted, in their order."""
    counted: list[int] = []
    in_process = cast(InProcessSampler, sampler)
    request = SampleRequest(prompts, SAMPLED, seed=3, step=step, begun=begun)
    groups = in_process.generate_until(request, enough=enough, on_group=lambda index, _: counted.append(index))
    return groups, counted


@pytest.mark.turn(1, days=2)
def test_waiting_for_all_groups_is_generating(sampler: Sampler, prompts: list[Prompt]) -> None:
    plain = sampler.generate(SampleRequest(prompts, SAMPLED, seed=3, step=5))
    groups, counted = draw_on(sampler, prompts, not_begun(prompts, 4), step=5, enough=4)
    assert [[r.ids.tolist() for r in group] for group in groups] == [[r.ids.tolist() for r in g] for g in plain]
    assert sorted(counted) == [0, 1, 2, 3]
    assert all(r.stop_reason in ("stop", "length") and r.older == () for group in groups for r in group)


def test_tokens_keep_the_log_probs_of_the_weights_that_drew_them(
    sampler: Sampler, sharp_model: Path, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Three groups have some tokens of the first weights. Under other weights a batch stops at the first group that
    is done; under the third ones all are drawn to their ends."""
    models = {0: load(sharp_model), 1: edited(sharp_model, noise(0.02)), 2: edited(sharp_model, noise(0.05))}
    before: Any = not_begun(prompts, 4)
    for index, tokens in enumerate((30, 20, 10)):
        params = replace(SAMPLED, max_tokens=tokens)
        (cut,) = sampler.generate(SampleRequest([prompts[index]], params, seed=3, step=0))
        before[index] = [r if r.stop_reason == "stop" else replace(r, stop_reason="unfinished") for r in cut]
    groups = before
    for version, enough in ((1, 1), (2, 4)):
        sampler.load_weights(models[version].named_parameters(), version=version)
        groups, counted = draw_on(sampler, prompts, before, step=version, enough=enough)
        assert len(counted) == enough
        assert all(r.stop_reason != "unfinished" for index in counted for r in groups[index])
        for (_, old), (_, new) in zip(pairs(prompts, before), pairs(prompts, groups), strict=True):
            assert new.ids[: len(old.ids)].tolist() == old.ids.tolist()
            assert new.logprobs[: len(old.ids)].tobytes() == old.logprobs.tobytes()
            assert old.stop_reason == "unfinished" or new is old
        before = groups
    assert {len(set(r.versions_R)) for group in groups for r in group} >= {2, 3}
    for prompt, rollout in pairs(prompts, groups):
        assert 0 < len(rollout.ids) <= SAMPLED.max_tokens
        assert rollout.text == builder.decode(rollout.ids)
        assert (rollout.stop_reason == "stop") == (int(rollout.ids[-1]) in builder.eos_ids)
        assert rollout.stop_reason == "stop" or len(rollout.ids) == SAMPLED.max_tokens
        for version in set(rollout.versions_R):
            mine = rollout.versions_R == version
            expected = expected_logprobs(models[version], builder, prompt, rollout, SAMPLED.temperature)
            np.testing.assert_allclose(rollout.logprobs[mine], expected[mine], atol=2e-4)


def test_repeats_itself_bit_for_bit(sampler: Sampler, prompts: list[Prompt]) -> None:
    first = sampler.generate(SampleRequest(prompts, SAMPLED, seed=3, step=1))
    sampler.generate(SampleRequest(prompts[1:], SAMPLED, seed=4, step=2))  # what came in between leaves no trace
    assert same(first, sampler.generate(SampleRequest(prompts, SAMPLED, seed=3, step=1)))


def test_what_a_call_tells_and_returns_and_leaves_alone(
    sampler: Sampler, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_rl.samplers.watch._SECONDS", 0.0)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    num_signs = signs_of_life()[0]
    shown: list[str] = []
    given: dict[int, list[Rollout]] = {}
    watch = SamplingWatch(len(prompts) * SAMPLED.responses, show=shown.append)
    request = SampleRequest(prompts, SAMPLED, seed=0, step=0, watch=watch)
    groups = sampler.generate(request, on_group=given.setdefault)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state
    lengths = [len(rollout.ids) for group in groups for rollout in group]
    assert watch._tokens == sum(lengths)
    assert signs_of_life()[0] - num_signs >= max(lengths), "a watch knows that a long rollout goes on"
    assert shown[-1].startswith(f"{len(lengths)} of {len(lengths)} responses, ")
    assert shown[-1].endswith(f"longest {max(lengths)}")
    assert len(shown) > max(lengths) - 1, "it is told while the responses grow"
    assert [given[index] for index in range(len(prompts))] == groups, "each group as soon as it is there"
    assert [[(r.problem_id, r.index) for r in group] for group in groups] == [
        [(prompt.problem_id, index) for index in range(4)] for prompt in prompts
    ]
    for rollout in (r for group in groups for r in group):
        assert rollout.ids.dtype == np.int32 and rollout.logprobs.dtype == np.float32
        assert len(rollout.ids) == len(rollout.logprobs) <= SAMPLED.max_tokens
        assert rollout.policy_version == 0


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.5])  # at 1, those of new weights below
def test_log_probs_equal_a_plain_forward(
    sampler: Sampler, model: torch.nn.Module, builder: PromptBuilder, prompts: list[Prompt], temperature: float
) -> None:
    # 90 tokens: past the room that the cache was first given.
    params = SamplingParams(temperature=temperature, max_tokens=90, responses=2)
    for prompt, rollout in pairs(prompts, sampler.generate(SampleRequest(prompts, params, seed=0, step=0))):
        of_all = all_logprobs(model, builder, prompt, rollout, temperature)
        expected = of_all[np.arange(len(rollout.ids)), rollout.ids]
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4, rtol=0)
        if temperature == 0:
            assert (of_all.max(1) - expected).max() < 1e-4, "greedy takes the most likely token"


def test_a_response_does_not_depend_on_its_neighbours(sampler: Sampler, prompts: list[Prompt]) -> None:
    together = sampler.generate(SampleRequest(prompts, SAMPLED, seed=0, step=0))
    alone = [
        group
        for prompt in reversed(prompts)
        for group in sampler.generate(SampleRequest([prompt], SAMPLED, seed=0, step=0))
    ]
    for first, second in zip(pairs(prompts, together), pairs(prompts, alone[::-1]), strict=True):
        assert first[1].ids.tolist() == second[1].ids.tolist()
        np.testing.assert_allclose(first[1].logprobs, second[1].logprobs, atol=1e-5)


def test_more_prompt_tokens_than_one_engine_step_takes(sampler: Sampler, builder: PromptBuilder) -> None:
    """No engine step holds them all, and seeded requests must survive that."""
    questions = [f"{number} " + "Which one is it? " * 40 for number in range(16)]
    built = [builder.build(Problem(question, question, (), "4", "integer")) for question in questions]
    assert sum(len(prompt.ids) for prompt in built) > 8192
    params = SamplingParams(temperature=1.0, max_tokens=2, responses=2)
    groups = sampler.generate(SampleRequest(built, params, seed=0, step=0))
    assert [[rollout.index for rollout in group] for group in groups] == [[0, 1]] * len(built)


def test_every_response_has_its_own_noise(sampler: Sampler, prompts: list[Prompt]) -> None:
    """Responses to the same prompt at two steps and two seeds, and twice in one step: no two sequences are alike."""
    groups = [
        *sampler.generate(SampleRequest([prompts[1], replace(prompts[1], epoch=1)], SAMPLED, seed=0, step=0)),
        *sampler.generate(SampleRequest([prompts[1]], SAMPLED, seed=0, step=1)),
        *sampler.generate(SampleRequest([prompts[1]], SAMPLED, seed=1, step=0)),
    ]
    texts = [tuple(r.ids.tolist()) for group in groups for r in group]
    assert len(set(texts)) == len(texts) == 16


def test_frequencies_follow_the_distribution(
    sampler: Sampler, model: torch.nn.Module, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Pearson's chi-square over 1,000 first tokens; its 99.9 % point is below df + 3.1 sqrt(2 df) + 10."""
    params = SamplingParams(temperature=0.8, max_tokens=1, responses=1000)
    (group,) = sampler.generate(SampleRequest([prompts[1]], params, seed=0, step=0))
    logits = plain_logits(model, prompts[1], group[0])[0] / 0.8
    logits[list(builder.banned_ids)] = -float("inf")
    expected = 1000 * logits.double().softmax(0).numpy()
    counts = np.bincount([int(r.ids[0]) for r in group], minlength=len(expected))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    freedom = len(observed) - 1
    assert freedom >= 5
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 3.1 * np.sqrt(2 * freedom) + 10


@pytest.mark.slow
def test_draft_tokens_change_no_draw_and_no_log_prob(
    sharp_model: Path, model: torch.nn.Module, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Each token has a place in the distribution of its position, spread over its own share: uniform in [0, 1).

    Pearson's chi-square over 40 bins, whose 99.9 % point is 72.1.
    """
    import numba  # noqa: F401  # in whose presence vLLM's CPU worker by itself does not start

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    threads = torch.get_num_threads()
    sampler = start("vllm", sharp_model, builder, speculative_config=drafts)
    at_once: list[int] = []
    scheduler: Any = cast(Any, sampler)._llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled: Any, sampled: Any) -> Any:
        at_once.extend(len(ids) for ids in sampled.sampled_token_ids)
        return update(scheduled, sampled)

    scheduler.update_from_output = counted
    request = SampleRequest(prompts, SamplingParams(temperature=0.7, max_tokens=30, responses=24), seed=1, step=1)
    drawn = sampler.generate(request)
    assert same(sampler.generate(request), drawn) and torch.get_num_threads() == threads
    sampler.close()
    assert sum(count > 1 for count in at_once) > 20, "few drafts were right: this test shows little"
    rng, places = np.random.default_rng(0), []
    for prompt, rollout in pairs(prompts, drawn):
        expected = expected_logprobs(model, builder, prompt, rollout, 0.7)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)
        logits = plain_logits(model, prompt, rollout) / 0.7
        logits[:, list(builder.banned_ids)] = -float("inf")
        shares = logits.double().softmax(1).numpy()
        below = [of_place[:token].sum() for of_place, token in zip(shares, rollout.ids, strict=True)]
        places.append(below + rng.random(len(expected)) * np.exp(expected))
    counts = np.histogram(np.concatenate(places), 40, (0, 1))[0]
    wanted = counts.sum() / 40
    assert counts.sum() > 1000 and ((counts - wanted) ** 2 / wanted).sum() < 72.1


def test_stop_reasons(sampler: Sampler, builder: PromptBuilder, prompts: list[Prompt]) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=80, responses=8)
    rollouts = [r for group in sampler.generate(SampleRequest(prompts, params, seed=0, step=0)) for r in group]
    ends = np.array([r.ids[-1] in builder.eos_ids for r in rollouts])
    assert ends.any() and not ends.all()
    for rollout, ended in zip(rollouts, ends, strict=True):
        assert not np.isin(rollout.ids[:-1], builder.eos_ids).any()
        assert rollout.stop_reason == ("stop" if ended else "length")
        assert ended or len(rollout.ids) == 80
        assert rollout.text == builder.decode(rollout.ids) and "<|im_end|>" not in rollout.text


def test_a_banned_token_is_never_drawn_however_likely(
    sampler: Sampler, sharp_model: Path, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Logits in the tens of thousands, and no text longer than a greedy or sampled slip."""
    generator = torch.Generator().manual_seed(0)

    def edit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "embed_tokens" not in name:
            return tensor
        tensor = tensor.clone()
        rows = list(builder.banned_ids)
        tensor[rows] = 1e4 * torch.randn(len(rows), tensor.shape[1], generator=generator)
        return tensor

    model = edited(sharp_model, edit)
    sampler.load_weights(model.named_parameters(), version=1)
    slips = 0
    for params in (GREEDY, SAMPLED):
        for prompt, rollout in pairs(prompts, sampler.generate(SampleRequest(prompts, params, seed=0, step=0))):
            assert not np.isin(rollout.ids, builder.banned_ids).any()
            assert np.isfinite(rollout.logprobs).all()
            slips += int((plain_logits(model, prompt, rollout).max(1).values > 1e3).sum())
    assert slips > 100  # a bias of -100 would have let them through


def test_truncated_sampling_for_evaluation(
    sampler: Sampler, model: torch.nn.Module, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=20, responses=4, top_p=0.6, top_k=12)
    compared = 0
    for prompt, rollout in pairs(prompts, sampler.generate(SampleRequest(prompts, params, seed=0, step=0))):
        logits = plain_logits(model, prompt, rollout) / 0.8
        logits[:, list(builder.banned_ids)] = -float("inf")
        for row, token, logprob in zip(logits.double(), rollout.ids, rollout.logprobs, strict=True):
            order = row.argsort(descending=True)[:12]
            probs = row[order].softmax(0)
            mass = probs.cumsum(0)
            kept = int((mass - probs < 0.6).sum())
            assert token in order[:kept]
            if (mass - 0.6).abs().min() > 1e-4:  # away from the edge the kept set is the same
                position = order.tolist().index(token)
                assert abs(float((probs[position] / probs[:kept].sum()).log()) - logprob) < 1e-4
                compared += 1
    assert compared > 200


def test_a_prompt_that_does_not_fit_is_refused(sampler: Sampler, prompts: list[Prompt]) -> None:
    room = 1024 - len(prompts[1].ids)
    with pytest.raises(UserError, match=f"problem 'p1': {len(prompts[1].ids)} prompt tokens and up to {room + 1}"):
        sampler.generate(SampleRequest([prompts[1]], SamplingParams(1.0, room + 1, 1), seed=0, step=0))


def test_the_engine_leaves_the_function_that_sets_threads(sampler: Sampler) -> None:
    """vLLM's CPU worker puts a warning in its place."""
    assert isinstance(torch.set_num_threads, BuiltinFunctionType), sampler.name


def test_the_number_of_threads_from_before_the_engine_is_restored() -> None:
    """On a GPU vLLM sets it to 1, through torch."""
    before = torch.get_num_threads()
    with threads_kept():
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before


def test_the_engine_leaves_the_settings_of_torchs_compiler(sampler: Sampler) -> None:
    """vLLM sets this one while its CPU engine starts."""
    assert "TORCHINDUCTOR_CPP_DYNAMIC_THREADS" not in os.environ, sampler.name


@pytest.mark.slow
def test_importing_vllm_leaves_the_settings_of_torchs_compiler() -> None:
    """vLLM sets the processes that compile to 1, here and in what is started from here."""
    pytest.importorskip("vllm")
    code = """
import json
import os
from vlm_rl.samplers.vllm.engine import import_vllm
from vlm_rl.samplers.watch import SamplingWatch
import_vllm()
from torch._inductor import config
print(config.compile_threads, os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
"""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "3 3"


def test_batching_changes_nothing(sharp_model: Path, builder: PromptBuilder, prompts: list[Prompt]) -> None:
    """Groups cut into parts, several batches, rows that end early: the same tokens."""
    params = SamplingParams(temperature=1.3, max_tokens=30, responses=5)
    results = []
    for batch_size in (3, 7, 64):
        sampler = start("transformers", sharp_model, builder, batch_size=batch_size)
        results.append(sampler.generate(SampleRequest(prompts, params, seed=0, step=0)))
    for other in results[:2]:
        for (_, first), (_, second) in zip(pairs(prompts, results[2]), pairs(prompts, other), strict=True):
            assert first.ids.tolist() == second.ids.tolist()
            np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
def test_greedy_responses_agree_across_the_engines(
    running: Sampler, sharp_model: Path, model: torch.nn.Module, builder: PromptBuilder, prompts: list[Prompt]
) -> None:
    """Up to a tie of the two best logits, after which the texts are different texts; ties are listed."""
    params = SamplingParams(temperature=0, max_tokens=60, responses=1)
    other = start("transformers", sharp_model, builder)
    ties = []
    for (prompt, first), (_, second) in zip(
        pairs(prompts, running.generate(SampleRequest(prompts, params, seed=0, step=0))),
        pairs(prompts, other.generate(SampleRequest(prompts, params, seed=0, step=0))),
        strict=True,
    ):
        length = min(len(first.ids), len(second.ids))
        different = np.flatnonzero(first.ids[:length] != second.ids[:length])
        agreed = int(different[0]) if len(different) else length
        np.testing.assert_allclose(first.logprobs[:agreed], second.logprobs[:agreed], atol=1e-4)
        if len(different):
            logits = plain_logits(model, prompt, first)[agreed]
            gap = abs(float(logits[first.ids[agreed]] - logits[second.ids[agreed]]))
            ties.append((prompt.problem_id, agreed, gap))
            assert gap < 1e-4
        else:
            assert len(first.ids) == len(second.ids)
    print("logit ties:", ties)
    assert len(ties) < len(prompts)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "visual", "embed_tokens", "layers.1.self_attn.k_proj"])
def test_new_weights_are_what_is_sampled_from(
    sampler: Sampler, sharp_model: Path, builder: PromptBuilder, prompts: list[Prompt], part: str
) -> None:
    """Same prompts before and after: no cached block, image embedding or packed head survives."""
    params = SamplingParams(temperature=1.0, max_tokens=12, responses=2)
    before = sampler.generate(SampleRequest(prompts, params, seed=0, step=0))
    model = edited(sharp_model, noise(0.1, only=part))
    sampler.load_weights(model.named_parameters(), version=7)
    check_fresh(sampler, fingerprint(model.named_parameters()))
    after = sampler.generate(SampleRequest(prompts, params, seed=0, step=0))
    for prompt, rollout in pairs(prompts, after):
        assert rollout.policy_version == 7
        expected = expected_logprobs(model, builder, prompt, rollout, 1.0)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4, rtol=0)
    first_before = before[1][0].logprobs[0], before[1][0].ids[0]
    first_after = after[1][0].logprobs[0], after[1][0].ids[0]
    assert first_before != first_after


def test_a_skipped_sync_is_found(sampler: Sampler, sharp_model: Path) -> None:
    """Steps as small as one at learning rate 1e-6, in one element of one tensor."""
    check_fresh(sampler, fingerprint(read(sharp_model).named_parameters()))

    def edit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        if name.endswith("layers.2.self_attn.v_proj.weight"):
            changed[3, 5] += 1e-6
        return changed

    model = edited(sharp_model, edit)
    with pytest.raises(StaleWeightsError, match=f"sampler '{sampler.name}' .* checksum .* resume from"):
        check_fresh(sampler, fingerprint(model.named_parameters()))


@pytest.mark.parametrize(
    "dropped",
    [
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.self_attn.k_proj.weight",
        "model.language_model.layers.2.self_attn.q_proj.bias",
        "model.language_model.norm.weight",
        "model.visual.blocks.1.mlp.gate_proj.weight",
        "model.visual.patch_embed.proj.weight",
    ],
)
def test_a_dropped_tensor_is_found(sampler: Sampler, sharp_model: Path, dropped: str) -> None:
    model = edited(sharp_model, noise(1e-6))
    builder = FingerprintBuilder(dtype=sampler.dtype)
    stream = builder.watch(model.named_parameters())
    sampler.load_weights(((name, tensor) for name, tensor in stream if name != dropped), version=1)
    assert builder.result() == fingerprint(model.named_parameters())
    with pytest.raises(StaleWeightsError):
        check_fresh(sampler, builder.result())
    sampler.load_weights(model.named_parameters(), version=1)
    check_fresh(sampler, builder.result())


def swapped(first: str, second: str):
    """An edit that puts two tensors of one shape into each other's place."""

    def edit(model: torch.nn.Module) -> None:
        parameters = dict(model.named_parameters())
        one, other = parameters[first], parameters[second]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

    return edit


LAYER = "model.language_model.layers."
MISPLACED = {
    "layers": swapped(f"{LAYER}0.mlp.down_proj.weight", f"{LAYER}1.mlp.down_proj.weight"),
    "gate-and-up": swapped(f"{LAYER}0.mlp.gate_proj.weight", f"{LAYER}0.mlp.up_proj.weight"),
    "key-and-value": swapped(f"{LAYER}1.self_attn.k_proj.weight", f"{LAYER}1.self_attn.v_proj.weight"),
    "tower-gate-and-up": swapped(
        "model.visual.blocks.0.mlp.gate_proj.weight", "model.visual.blocks.0.mlp.up_proj.weight"
    ),
    "transposed": lambda model: (weight := dict(model.named_parameters())[f"{LAYER}0.self_attn.o_proj.weight"]).copy_(
        weight.T.clone()
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_a_tensor_in_the_wrong_place_is_found(sampler: Sampler, sharp_model: Path, case: str) -> None:
    """The engine holds every element of the learner's weights, but not where it belongs."""
    model = load(sharp_model)
    with torch.no_grad():
        MISPLACED[case](model)
    sampler.load_weights(model.named_parameters(), version=1)
    check_fresh(sampler, fingerprint(model.named_parameters()))
    with pytest.raises(StaleWeightsError):
        check_fresh(sampler, fingerprint(read(sharp_model).named_parameters()))


def model_of(sampler: Sampler) -> torch.nn.Module:
    """Return the module that an engine computes with."""
    if sampler.name == "transformers":
        return sampler._model
    return sampler._llm.collective_rpc(lambda worker: worker.get_model())[0]


ROTARY_CACHE = {"transformers": ".inv_freq", "vllm": ".cos_sin_cache"}


def test_a_changed_buffer_is_found_by_name(sampler: Sampler, model: torch.nn.Module) -> None:
    """No sync brings the rotary caches: with zeros in them every weight still agrees."""
    caches = {name: b for name, b in model_of(sampler).named_buffers() if name.endswith(ROTARY_CACHE[sampler.name])}
    name, cache = max(caches.items())
    kept = cache.clone()
    cache.zero_()
    with pytest.raises(StaleWeightsError, match=f"its buffer {name} is not what it was"):
        sampler.load_weights(model.named_parameters(), version=0)
    cache.copy_(kept)
    sampler.load_weights(model.named_parameters(), version=0)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
def test_keys_and_values_of_earlier_weights_are_never_kept(
    sampler: Sampler, model: torch.nn.Module, prompts: list[Prompt]
) -> None:
    """An open request holds its blocks, and vLLM then drops none."""
    stream = sampler.stream(SampleRequest([prompts[3]], GREEDY, seed=0, step=0))
    next(stream)
    with pytest.raises(StaleWeightsError, match="a request is still open"):
        sampler.load_weights(model.named_parameters(), version=0)
    stream.close()
    sampler.load_weights(model.named_parameters(), version=0)


def test_an_engine_that_slept_samples_as_before(
    sampler: Sampler, model: torch.nn.Module, prompts: list[Prompt]
) -> None:
    before = sampler.generate(SampleRequest(prompts, GREEDY, seed=0, step=0))
    sampler.sleep()
    sampler.sleep()  # a second time changes nothing
    sampler.load_weights(model.named_parameters(), version=0)
    assert same(sampler.generate(SampleRequest(prompts, GREEDY, seed=0, step=0)), before)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
def test_weights_arrive_before_the_key_value_cache_takes_its_memory(sampler: Sampler, model: torch.nn.Module) -> None:
    """A CPU engine has no memory to give back, but its executor counts what sleeps."""
    llm: Any = sampler._llm
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    asleep = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        asleep.append(set(executor.sleeping_tags))
        yield from model.named_parameters()

    sampler.sleep()
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    sampler.load_weights(weights(), version=0)
    assert asleep == [{"kv_cache"}] and not executor.is_sleeping


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
def test_an_engine_falls_asleep_while_another_process_takes_memory_of_its_card(
    sampler: Sampler, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's worker then ends in an assertion, once it has released everything. Other faults stay what they are."""
    llm: Any = sampler._llm
    executor = llm.llm_engine.engine_core.engine_core.model_executor

    def sleep(level: int) -> None:
        assert level == 0, "Memory usage increased after sleeping." if level == 2 else "a fault"

    monkeypatch.setattr(executor.driver_worker, "sleep", sleep)
    llm.collective_rpc(sleep_beside_others)
    sampler.sleep()
    assert executor.is_sleeping
    with pytest.raises(AssertionError, match="a fault"):
        executor.driver_worker.sleep(level=1)
    sampler.load_weights(model.named_parameters(), version=0)
    assert not executor.is_sleeping


def test_an_image_is_known_by_its_pixels_and_size(prompts: list[Prompt]) -> None:
    """The engine is told an id for each image; two images under one id would be one image to it."""
    noise = prompts[1].images[0]
    changed = noise.copy()
    changed.putpixel((0, 0), (1, 2, 3))
    images = (noise, changed, Image.new("RGB", (84, 168)), Image.new("RGB", (168, 84)), noise.copy())
    ids = _request(replace(prompts[1], images=images))["multi_modal_uuids"]["image"]
    assert ids[4] == ids[0] and len(set(ids)) == 4


# --- choosing an engine ----------------------------------------------------------------------


def test_without_vllm_auto_falls_back_and_says_so(
    sharp_model: Path, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what an import of a missing package runs into
    assert start("auto", sharp_model, builder).name == "transformers"
    assert capsys.readouterr().out.startswith("sampler: transformers (vllm cannot be imported")
    with pytest.raises(UserError, match=r"rollout.sampler is vllm, but .* set rollout.sampler=transformers"):
        start("vllm", sharp_model, builder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu_memory_utilisation": 0.4}, "no such option; did you mean 'gpu_memory_utilization'"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
    ],
)
def test_options_that_vllm_does_not_take_are_refused(
    sharp_model: Path, builder: PromptBuilder, options: dict[str, Any], words: str
) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match=words):
        make_sampler(
            "vllm",
            EngineSettings(
                model_path=str(sharp_model),
                builder=builder,
                max_model_len=512,
                batch_size=4,
                dtype=torch.float32,
                vllm_options=options,
            ),
        )


# --- every family of models, and two ranks -------------------------------------------------------


BOTH_WAYS = ("gemma3", "gemma4")  # whose images see themselves whole: refused with vLLM on a CPU
LINEAR_ATTENTION = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # refused with vLLM on a CPU


@pytest.mark.parametrize("model_type", todays(SUPPORTED, days=2))
def test_every_family_on_transformers(model_type: str, family_model: Callable[[str], Path]) -> None:
    check_family("transformers", model_type, family_model)


def test_linear_attention_is_refused_with_vllm_on_a_cpu(
    family_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its kernels for CPUs would end the run at its first rollout; `auto` takes the other engine and says why."""
    monkeypatch.setattr("vlm_rl.samplers.factory._vllm_problem", lambda: None)  # as where it is installed
    path = family_model("qwen3_5")
    builder = PromptBuilder(path, template=TEMPLATES["plain"])
    with pytest.raises(UserError, match=r"linear attention only in bfloat16.*use the transformers sampler"):
        start("vllm", path, builder)
    sampler = start("auto", path, builder)
    assert sampler.name == "transformers"
    assert capsys.readouterr().out.startswith("sampler: transformers (on a CPU vLLM computes layers of linear")
    sampler.close()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gemma4", "causal among the tokens of an image"), ("glm46v", "has no class of its own")],
)
def test_a_type_that_vllm_computes_otherwise_is_refused_with_it(
    model_type: str, reason: str, family_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_rl.samplers.factory._vllm_problem", lambda: None)
    path = family_model(model_type)
    builder = PromptBuilder(path, template=TEMPLATES["plain"])
    with pytest.raises(UserError, match=f"{reason}.*; use the transformers sampler"):
        start("vllm", path, builder)


def test_weights_that_a_loader_took_from_elsewhere_are_found(
    sharp_model: Path, builder: PromptBuilder, tmp_path: Path
) -> None:
    """The folder leads transformers to a file that nobody checked; whoever refuses folders missed that one."""
    folder = Path(shutil.copytree(sharp_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] *= 1.01
    (folder / "kept").mkdir()
    save_file(tensors, folder / "kept" / "other.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "kept/other.safetensors"}))
    sampler = start("transformers", folder, builder)
    with pytest.raises(UserError, match="are not those in the folder's files, which were checked"):
        check_loaded(sampler, str(folder))
    check_loaded(start("transformers", sharp_model, builder), str(sharp_model))


ON_VLLM = [name for name in SUPPORTED if name not in (*BOTH_WAYS, *LINEAR_ATTENTION, *_UNKNOWN_TO_VLLM)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(ON_VLLM, days=5))
def test_every_family_on_vllm(model_type: str, family_model: Callable[[str], Path]) -> None:
    """A fifth of the families a day."""
    pytest.importorskip("vllm")
    check_family("vllm", model_type, family_model)


def check_family(name: str, model_type: str, family_model: Callable[[str], Path]) -> None:
    """New weights arrive, as the fingerprint proves, and the log-probs are those of the unmodified model.

    Of videos too, where the model takes them.
    """
    path = family_model(model_type)
    builder = PromptBuilder(path, template=TEMPLATES["plain"], max_pixels=100_352)
    images = (noise_png(100, 300, 1), noise_png(84, 84, 2)) if builder.is_vision else ()
    questions = {"What is it? ": (), "What is it? " * 9: (), "<image>" * len(images) + "How many?": images}
    prompts = [
        builder.build(Problem(id=question, question=question, images=used, answer="4", answer_type="integer"))
        for question, used in questions.items()
    ]
    if builder.takes_videos:
        with_videos = [video_problem(SHORT, LONG), video_problem([0, 10, 20], SHORT)]  # equal frames, at other times
        builder.allow_videos(with_videos)
        prompts += map(builder.build, with_videos)
    model = load_reference(path)
    sampler = start(name, path, builder)
    check_loaded(sampler, str(path))
    if name == "vllm":
        check_cache_bytes(sampler, builder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(StaleWeightsError):
        check_fresh(sampler, fingerprint(sent_tensors(model)))
    sampler.load_weights(sent_tensors(model), version=1)
    check_fresh(sampler, fingerprint(sent_tensors(model)))
    request = SampleRequest(prompts, SamplingParams(temperature=1.0, max_tokens=16, responses=2), seed=0, step=0)
    for prompt, rollout in pairs(prompts, sampler.generate(request)):
        expected = expected_logprobs(model, builder, prompt, rollout, 1.0)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4, rtol=0)
    sampler.close()


def check_cache_bytes(sampler: Any, builder: PromptBuilder) -> None:
    """What a small model's engine would keep on a GPU is at least what vLLM counts for a full batch."""
    from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes

    engine = sampler._llm.llm_engine
    (specs,) = engine.engine_core.engine_core.model_executor.get_kv_cache_specs()
    needed = 32 * max_memory_usage_bytes(engine.vllm_config, specs.values())
    kept = cache_bytes(builder.config, dtype=torch.float32, max_model_len=1024, batch_size=32)
    assert kept is not None and kept >= needed, (kept, needed)


@pytest.mark.parametrize("lengths", [[4000] * 4 + [150] * 252, [150] * 252 + [4000] * 4, [40_000, 3]])
def test_no_batch_is_padded_to_more_tokens_than_a_prefill_may_have(lengths: list[int]) -> None:
    """Groups that are drawn on come in the order of their age, so the longest prompt may be the first."""
    sampler = object.__new__(TransformersSampler)
    sampler._batch_size = 256
    prompts: list[Any] = [SimpleNamespace(ids=np.zeros(length)) for length in lengths]
    batches = sampler._batches(range(len(prompts)), prompts, SamplingParams(1.0, 1, 1))
    assert [index for batch in batches for index in batch] == [*range(len(prompts))]
    for batch in batches:
        assert len(batch) * max(lengths[index] for index in batch) <= _PREFILL_TOKENS or len(batch) == 1
