"""The portable engine on a pretended GPU draws what it draws on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.family_rows import WITH_EXPERTS
from tests.helpers.groups import noise_image
from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl.data.images import encode_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device
from vlm_rl.model_files.weights import sent_tensors
from vlm_rl.rollouts.groups import empty_group
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import IMAGE_MARKER, Problem, Rollout


def drawn(rollouts: list[Rollout]) -> list[Any]:
    """Return ids, experts and kept ids, which are the same on every device, then the log-probs."""
    same = [
        (r.ids.tolist(), None if r.experts is None else r.experts.tolist(), r.kept and r.kept.ids.tolist())
        for r in rollouts
    ]
    return [same, np.concatenate([r.logprobs for r in rollouts])]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", "qwen3_moe"])
def test_it_draws_what_it_draws_on_a_cpu(model_type: str, family_model: Callable[[str], Path]) -> None:
    """Prompts of two lengths, images of some, truncated by top_k; whole, continued, and token by token."""
    folder = family_model(model_type)
    builder = PromptBuilder(folder, template=TEMPLATES["plain"])
    picture = (encode_png(noise_image(84, 112, 1)),) if builder.is_vision else ()
    problems = [
        Problem("long", f"{IMAGE_MARKER * len(picture)}How many of these are there?", picture, "4", "integer"),
        Problem("short", "How many?", (), "4", "integer"),
    ]
    prompts = [builder.build(problem) for problem in problems]
    params = SamplingParams(temperature=0.7, max_tokens=7, responses=3, top_k=5)
    found = []
    for device in (nullcontext(), PretendedCuda()):
        with device:
            sampler = TransformersSampler(
                EngineSettings(
                    model_path=str(folder),
                    builder=builder,
                    max_model_len=200,
                    batch_size=6,
                    dtype=torch.float32,
                    returns_routing=model_type in WITH_EXPERTS,
                    returns_kept=True,
                )
            )
            assert {x.device for x in sampler._model.parameters()} == {default_device()}
            whole = sampler.generate(SampleRequest(prompts, params, seed=1, step=0))
            begun = [empty_group(problem, 0, responses=3).rollouts for problem in problems]
            request = SampleRequest(prompts, params, seed=1, step=0, begun=begun)
            continued = sampler.generate_until(request, enough=2, on_group=lambda *_: None)
            one = SampleRequest(prompts[:1], replace(params, responses=1), seed=1, step=0)
            streamed = list(sampler.stream(one))
            weights = [(name, tensor.clone()) for name, tensor in sent_tensors(sampler._model)]
            sampler.sleep()
            assert {x.device.type for x in sampler._model.parameters()} == {"cpu"}
            sampler.load_weights(weights, version=1)
            assert {x.device for x in sampler._model.parameters()} == {default_device()}
            sampler.close()
        assert [r.ids.tolist() for group in continued for r in group] == [r.ids.tolist() for g in whole for r in g]
        assert streamed == whole[0][0].ids.tolist()
        found.append(drawn([rollout for group in whole for rollout in group]))
    (same, logprobs), (same_on_gpu, logprobs_on_gpu) = found
    assert same_on_gpu == same
    np.testing.assert_allclose(logprobs_on_gpu, logprobs, atol=1e-5)
