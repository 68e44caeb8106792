"""Tokens that the engine guesses from those before them: draws and log-probs are the policy's all the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.helpers.groups import own_inputs
from tests.helpers.images import noise_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.vllm.engine import VllmSampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

pytestmark = pytest.mark.slow
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PARAMS = SamplingParams(temperature=0.7, max_tokens=30, responses=40)
BINS, HIGHEST = 40, 72.1  # chi-square's 99.9 % point with 39 degrees of freedom


@pytest.fixture(scope="module")
def sharp_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is far from uniform, so that it repeats itself and many guesses are right."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if "embed_tokens" in name else 5.0)
    out = shutil.copytree(tiny_model, tmp_path_factory.mktemp("sharp") / "model")
    model.save_pretrained(out)
    return out


def test_draws_and_log_probs_are_the_policy_s(sharp_model: Path) -> None:
    """Each token has a place in the distribution of its position, spread over its own share: uniform in [0, 1)."""
    import numba  # noqa: F401  # in whose presence vLLM's CPU worker by itself does not start

    builder = PromptBuilder(sharp_model, template=TEMPLATES["think_box"], max_pixels=100_352)
    asked = [("one two three " * 8, ()), ("<image>How many are there? How many?", (noise_png(84, 84, 1),))]
    prompts = [
        builder.build(Problem(f"p{i}", text, images, "4", "integer")) for i, (text, images) in enumerate(asked)
    ]
    sampler = VllmSampler(
        model_path=str(sharp_model),
        builder=builder,
        max_model_len=512,
        batch_size=64,
        dtype=torch.float32,
        options={"speculative_config": GUESSES},
    )
    at_once: list[int] = []
    scheduler: Any = sampler._llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled: Any, sampled: Any) -> Any:
        at_once.extend(len(ids) for ids in sampled.sampled_token_ids)
        return update(scheduled, sampled)

    scheduler.update_from_output = counted
    request = SampleRequest(prompts, PARAMS, seed=1, step=1)
    first, second = sampler.generate(request), sampler.generate(request)
    sampler.close()
    assert sum(count > 1 for count in at_once) > 50, "few guesses were right: this test shows little"
    assert [[r.ids.tolist() for r in group] for group in first] == [[r.ids.tolist() for r in g] for g in second]

    model = AutoModelForImageTextToText.from_pretrained(sharp_model, dtype=torch.float32).eval()
    rng, places = np.random.default_rng(0), []
    for prompt, group in zip(prompts, first, strict=True):
        for rollout in group:
            ids = torch.from_numpy(np.concatenate([prompt.ids, rollout.ids]).astype(np.int64))[None]
            extra = own_inputs(model, ids, prompt.vision) if prompt.vision else {}
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, **extra).logits[0, len(prompt.ids) - 1 : -1] / 0.7
            logits[:, list(builder.banned_ids)] = -torch.inf
            shares = torch.softmax(logits.double(), -1).numpy()
            own = shares[np.arange(len(rollout.ids)), rollout.ids]
            np.testing.assert_allclose(rollout.logprobs, np.log(own), atol=1e-4)
            below = [of_place[:token].sum() for of_place, token in zip(shares, rollout.ids, strict=True)]
            places.append(below + rng.random(len(own)) * own)
    counts = np.histogram(np.concatenate(places), BINS, (0, 1))[0]
    expected = counts.sum() / BINS
    assert counts.sum() > 1000 and ((counts - expected) ** 2 / expected).sum() < HIGHEST
