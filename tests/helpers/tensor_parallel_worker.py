"""One rank of test_tensor_parallel.py: an engine on both ranks, and one on each rank to compare it with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.groups import load_reference
from tests.helpers.images import noise_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, init_ranks, rank, share, world_size
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import StaleWeightsError, check_fresh, fingerprint
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, responses=3)
LAYER = "layers.1."
# What the second rank gets in place of a tensor, by the end of its name.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    f"{LAYER}self_attn.k_proj.weight": lambda tensor: tensor / 1.1,  # an earlier version; both ranks hold all of it
    f"{LAYER}self_attn.q_proj.weight": lambda tensor: torch.cat(tensor.chunk(2)[::-1]),  # the other rank's shard
    f"{LAYER}self_attn.o_proj.weight": lambda tensor: tensor.roll(1, 1),  # shifted; divided by columns
    f"{LAYER}mlp.experts.gate_up_proj": lambda tensor: torch.cat(tensor.chunk(2, 1)[::-1], 1),
    f"{LAYER}mlp.experts.down_proj": lambda tensor: tensor.roll(1, 2),
    f"{LAYER}input_layernorm.weight": lambda tensor: tensor + 1,  # both ranks hold all of it
    "embed_tokens.weight": lambda tensor: tensor.roll(1, 0),
}


def main(_: str, out: str, model: str) -> int:
    """Write what `checks` returns, as JSON."""
    init_ranks()
    results = checks(Path(model))
    if rank() == 0:
        Path(out).write_text(json.dumps(results))
    return 0


def checks(path: Path) -> dict[str, Any]:
    """Compare an engine on both ranks with one on each rank, and give it wrong tensors."""
    builder = PromptBuilder(path, template=TEMPLATES["plain"], max_pixels=100_352)
    model = load_reference(path).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(1.1)
    images = (noise_png(100, 300, 1), noise_png(84, 84, 2)) if builder.is_vision else ()
    questions = {"What is it? ": (), "What is it? " * 9: (), "<image>" * len(images) + "How many?": images}
    prompts = share(
        [
            builder.build(Problem(id=question, question=question, images=shown, answer="4", answer_type="integer"))
            for question, shown in questions.items()
        ]
    )
    drawn, result = [], dict[str, Any]()
    for tensor_parallel in (1, world_size()):
        sampler = make_sampler(
            "vllm",
            EngineSettings(
                model_path=str(path),
                builder=builder,
                max_model_len=512,
                batch_size=32,
                dtype=torch.float32,
                tensor_parallel=tensor_parallel,
            ),
        )
        load(sampler, model)
        done: list[int] = []
        on_group = partial(lambda done, index, _: done.append(index), done)
        groups = sampler.generate(SampleRequest(prompts, SAMPLED, seed=0, step=0), on_group=on_group)
        assert sorted(done) == list(range(len(prompts)))
        assert sampler.generate(SampleRequest([], SAMPLED, seed=0, step=0)) == []
        drawn.append([rollout for group in groups for rollout in group])
        if tensor_parallel > 1:
            result["refusals"] = refusals(sampler, model)
        sampler.close()
    pairs = list(zip(*drawn, strict=True))
    same = all(one.problem_id == two.problem_id and one.ids.tolist() == two.ids.tolist() for one, two in pairs)
    result["same tokens"] = all_gather(same)
    result["gap"] = max(all_gather(max(float(abs(one.logprobs - two.logprobs).max()) for one, two in pairs)))
    return result


def load(sampler: Any, model: nn.Module, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> None:
    """Give the engine the model's weights, changed on the second rank alone, and prove that they are the model's."""
    tensors = ((name, tensor if rank() == 0 else change(name, tensor)) for name, tensor in model.named_parameters())
    sampler.load_weights(tensors, version=1)
    check_fresh(sampler, fingerprint(model.named_parameters()))


def refusals(sampler: Any, model: nn.Module) -> dict[str, list[str]]:
    """Return what each rank says where the second holds a wrong tensor, or a wrong buffer."""

    def refusal(change: Callable[[str, Tensor], Tensor]) -> str:
        try:
            load(sampler, model, change)
        except StaleWeightsError as error:
            return str(error)
        return ""

    said = {
        end: all_gather(refusal(lambda name, tensor: wrong(tensor) if name.endswith(end) else tensor))  # noqa: B023
        for end, wrong in WRONG.items()
    }
    buffers = dict(sampler._llm.collective_rpc(lambda worker: worker.get_model())[0].named_buffers())
    cache = next(buffer for name, buffer in buffers.items() if name.endswith("cos_sin_cache"))
    kept = cache.clone()
    cache.mul_(1 - rank())
    said["buffer"] = all_gather(refusal(lambda _, tensor: tensor))
    cache.copy_(kept)
    load(sampler, model)  # and it is whole again
    return said
