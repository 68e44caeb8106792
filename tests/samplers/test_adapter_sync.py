"""vLLM takes an adapter for each version beside its base model: proof, log-probs, and a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.images import noise_png
from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Toys
from vlm_rl.config import LoraConfig, load_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.learner.lora import adapter_tensors, weight_sources
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.sync_probe import probe_gap
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import Fingerprint, StaleWeightsError, check_fresh, fingerprint
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt

LORA = LoraConfig(
    rank=4, alpha=6, sync="adapter", targets=["language_model", "tower", "merger"], rank_by_part={"tower": 3}
)
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, responses=3)


def adapted(folder: Path, lora: LoraConfig) -> tuple[Policy, Any, Prompt]:
    """Return a learner with adapters, an engine with the same base model, and a prompt with an image."""
    builder = PromptBuilder(folder, template=TEMPLATES["plain"], max_pixels=100_352)
    policy = Policy(load_model(folder, dtype=torch.float32), banned_ids=builder.banned_ids, temperature=1.0)
    policy.add_adapters(lora, base=BaseModel(str(folder), ""), seed=5)
    engine = make_sampler(
        "vllm",
        EngineSettings(
            model_path=str(folder),
            builder=builder,
            max_model_len=512,
            batch_size=4,
            dtype=torch.float32,
            adapter=lora,
        ),
    )
    images = (noise_png(100, 300, 1),) if builder.is_vision else ()
    return policy, engine, builder.build(Problem("p", "<image>" * len(images) + "How many?", images, "3", "integer"))


@pytest.fixture(scope="module")
def both(tiny_model: Path) -> Iterator[tuple[Policy, Any, Prompt]]:
    pytest.importorskip("vllm")
    made = adapted(tiny_model, LORA)
    yield made
    made[1].close()


@pytest.fixture
def policy(both: tuple[Policy, Any, Prompt]) -> Policy:
    return both[0]


@pytest.fixture
def sampler(both: tuple[Policy, Any, Prompt]) -> Any:
    return both[1]


@pytest.fixture
def prompt(both: tuple[Policy, Any, Prompt]) -> Prompt:
    return both[2]


def stream(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter.data * scaling) for name, parameter, scaling in adapter_tensors(policy.model))


def whole(policy: Policy) -> Fingerprint:
    base = ((name, source.parameters[0].data) for name, source in weight_sources(policy.model))
    return fingerprint(base) + fingerprint(stream(policy))


def draw(policy: Policy, seed: int) -> None:
    """Draw every B again."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def gap(policy: Policy, sampler: Any, prompt: Prompt) -> float:
    (rollouts,) = sampler.generate(SampleRequest([prompt], PARAMS, seed=1, step=0))

    @torch.no_grad()
    def log_probs(row: Any) -> Tensor:
        return policy(row)[0]

    return probe_gap(log_probs, policy.model, prompt, rollouts)


@pytest.mark.slow
def test_each_version_is_held_whole_and_computed_with(policy: Policy, sampler: Any, prompt: Prompt) -> None:
    """A new id each time, the last one gone; checksum and log-probs of base and adapter are the learner's."""
    for version in (1, 2):
        draw(policy, version)
        if version == 2:  # the engine still has the adapter of version 1
            with pytest.raises(StaleWeightsError):
                check_fresh(sampler, whole(policy))
            assert gap(policy, sampler, prompt) > 1e-3
        sampler.load_weights(stream(policy), version=version)
        check_fresh(sampler, whole(policy))
        assert sampler._llm.llm_engine.list_loras() == {version}
        assert gap(policy, sampler, prompt) < 1e-5


@pytest.mark.slow
def test_the_proof_sees_what_is_in_the_wrong_place(policy: Policy, sampler: Any) -> None:
    draw(policy, 3)
    sampler.load_weights(stream(policy), version=3)
    expected = whole(policy)
    check_fresh(sampler, expected)
    worker = sampler._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = [module for module in worker.get_model().modules() if hasattr(module, "lora_a_stacked")]
    fused = [layer for layer in layers if len(layer.lora_a_stacked) == 2]  # gate and up

    def swap(a: Tensor, b: Tensor) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    def swap_parts() -> None:
        swap(*fused[0].lora_b_stacked)

    def swap_layers() -> None:
        swap(fused[0].lora_a_stacked[0], fused[1].lora_a_stacked[0])

    def nudge_padding() -> None:  # beyond the adapter's rank
        fused[0].lora_a_stacked[0][0, 0, 4:] += 0.5

    def change_base() -> None:
        first, second = (layer.base_layer for layer in fused[:2])  # whose weights are packed away behind a function
        first.cpu_linear, second.cpu_linear = second.cpu_linear, first.cpu_linear

    for change in (swap_parts, swap_layers, change_base):
        change()
        with pytest.raises(StaleWeightsError):
            check_fresh(sampler, expected)
        change()
        check_fresh(sampler, expected)
    nudge_padding()
    with pytest.raises(StaleWeightsError):
        check_fresh(sampler, expected)


TEXT_ALONE = LoraConfig(rank=4, alpha=6, sync="adapter")
ADAPTED = {
    **dict.fromkeys(("idefics3", "llava", "qwen2_vl", "qwen3_vl", "smolvlm"), LORA),
    **dict.fromkeys(("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"), TEXT_ALONE),
    **dict.fromkeys(("glm4v", "internvl", "mistral3"), TEXT_ALONE),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(ADAPTED, days=5))
def test_every_family_takes_adapters(model_type: str, family_model: Callable[[str], Path]) -> None:
    """In the tower with a rank of its own: features of the same image change with the version."""
    pytest.importorskip("vllm")
    policy, sampler, prompt = adapted(family_model(model_type), ADAPTED[model_type])
    for version in (1, 2):
        draw(policy, version)
        sampler.load_weights(stream(policy), version=version)
        check_fresh(sampler, whole(policy))
        assert gap(policy, sampler, prompt) < 1e-5
    sampler.close()


REFUSED = {
    "internvl": r"targets names merger and tower, where vLLM [\d.]+ applies no adapters in models of type internvl",
    "qwen3_vl_moe": r"with adapters vLLM computes experts by Triton",
    "mistral3": r"targets names merger and tower, where vLLM [\d.]+ applies no adapters in models of type mistral3",
    "llava_onevision": r"does not support LoRA yet",
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(REFUSED, days=4))
def test_models_that_take_no_such_adapters_are_refused(model_type: str, family_model: Callable[[str], Path]) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match=REFUSED[model_type] + r".*set model\.lora\.sync=merged"):
        adapted(family_model(model_type), LORA)


@pytest.mark.turn(0, days=4)
@pytest.mark.slow
def test_layers_that_take_no_adapter_are_named_by_the_first_sync(family_model: Callable[[str], Path]) -> None:
    pytest.importorskip("vllm")
    policy, sampler, _ = adapted(family_model("glm4v"), LORA)
    with pytest.raises(
        UserError, match=r"layers that model\.lora\.targets names: .*visual.*set model\.lora\.sync=merged"
    ):
        sampler.load_weights(stream(policy), version=1)
    sampler.close()


@pytest.mark.slow
def test_a_run_trains_through_adapters(toys: Toys) -> None:
    """Every sync passes its proof and its probe, and the log-probs of every batch are the learner's.

    The language model has a rank of its own, so that alpha over it is not what products are multiplied by, and the
    tower has adapters too.
    """
    pytest.importorskip("vllm")
    lora = {"rank": 4, "alpha": 8, "rank_by_part": {"language_model": 3}, "sync": "adapter"}
    lora["targets"] = ["language_model", "tower"]
    changes = {"rollout": {"sampler": "vllm"}, "train": {"lr": 1e-2, "steps": 2}}
    run = toys.train_run("sync-adapter", model={"lora": lora}, **changes)
    assert all(record["rollout/logprob_gap"] < 1e-5 for record in run.metrics())


def test_what_takes_no_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("out: run\nmodel: {path: m, lora: {sync: adapter}}\ndata: {train: [d]}\n")
    assert load_config(file).model.lora == LoraConfig(sync="adapter")
    for sampler in ("transformers", "server"):
        with pytest.raises(UserError, match=rf"rollout\.sampler is {sampler}, which takes merged weights alone"):
            load_config(file, [f"rollout.sampler={sampler}", "rollout.servers=['http://127.0.0.1:8000']"])
