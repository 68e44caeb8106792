"""vLLM takes an adapter for each version beside its base model: proof, log-probs, and a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.toy_runs import Toys
from vlm_rl.config import LoraConfig, load_config
from vlm_rl.data.images import encode_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.learner.lora import adapter_tensors, weight_sources
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.sync_probe import probe_gap
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import Fingerprint, StaleWeightsError, check_fresh, fingerprint
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.types import Problem, Prompt

LORA = LoraConfig(rank=4, alpha=6, sync="adapter")
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, responses=3)


@pytest.fixture(scope="module")
def policy(tiny_model: Path, builder: PromptBuilder) -> Policy:
    ids = builder.banned_ids
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=ids, temperature=1.0)
    policy.add_adapters(LORA, base=BaseModel(str(tiny_model), ""), seed=5)
    return policy


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])


@pytest.fixture(scope="module")
def prompt(builder: PromptBuilder) -> Prompt:
    toy = SQUARES.make_problems(1, seed=0, split="train")[0]
    return builder.build(Problem("p", toy.question, (encode_png(SQUARES.draw(toy, seed=0)),), "3", "integer"))


@pytest.fixture(scope="module")
def sampler(tiny_model: Path, builder: PromptBuilder) -> Iterator[Any]:
    pytest.importorskip("vllm")
    engine = make_sampler(
        "vllm", model_path=str(tiny_model), builder=builder, max_model_len=256, batch_size=4, dtype=torch.float32,
        adapter=LORA,
    )  # fmt: skip
    yield engine
    engine.close()


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


@pytest.mark.slow
def test_a_run_trains_through_adapters(toys: Toys) -> None:
    """Every sync passes its proof and its probe, and the log-probs of every batch are the learner's.

    The language model has a rank of its own, so that alpha over it is not what products are multiplied by.
    """
    pytest.importorskip("vllm")
    lora = {"rank": 4, "alpha": 8, "rank_by_part": {"language_model": 3}, "sync": "adapter"}
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
    with pytest.raises(UserError, match="sync is adapter, and targets names tower, where vLLM applies no adapters"):
        load_config(file, ["model.lora.targets=[q_proj, tower]"])
