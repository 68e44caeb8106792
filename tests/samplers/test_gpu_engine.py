"""What an engine of vLLM is told on a GPU, by a stand-in that remembers it: vLLM's own needs a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl.config import ENGINE_SHARE, LoraConfig, parse_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.vllm import engine
from vlm_rl.samplers.vllm import options as options_module
from vlm_rl.samplers.vllm.engine import VllmSampler
from vlm_rl.samplers.vllm.worker import wraps_experts
from vlm_rl.session.parts import load_sampler
from vlm_rl.templates import TEMPLATES

ADAPTER = LoraConfig(rank=4, sync="adapter")


class Engine(MagicMock):
    """Stands in for vllm.LLM, with a model whose experts are wrapped for adapters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.calls = options, list[str]()
        self.collective_rpc = self._called

    def _called(self, call: str | Callable[..., Any], **_: Any) -> list[Any]:
        self.calls.append(call if isinstance(call, str) else call.__name__)
        return [call is wraps_experts or {}]

    def _get_child_mock(self, **options: Any) -> MagicMock:
        return MagicMock(**options)


@pytest.fixture
def settings(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSettings]:
    """The settings of a run on a pretended GPU."""
    vllm = pytest.importorskip("vllm")
    builder = PromptBuilder(tiny_model, template=TEMPLATES["plain"])
    stand_in = SimpleNamespace(LLM=Engine, EngineArgs=vllm.EngineArgs)
    monkeypatch.setattr(engine, "import_vllm", lambda: stand_in)
    monkeypatch.setattr(engine, "spare_full_blocks", lambda _: None)
    with PretendedCuda():
        yield EngineSettings(
            model_path=str(tiny_model),
            builder=builder,
            max_model_len=256,
            batch_size=32,
            dtype=torch.bfloat16,
            seed=7,
        )


def test_the_engine_beside_a_learner_sleeps_in_its_part_of_the_card(
    settings: EngineSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    llm: Any = VllmSampler(replace(settings, vllm_options={"enforce_eager": False}))._llm
    expected = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": ENGINE_SHARE,
        "enforce_eager": False,
        "dtype": "bfloat16",
        "seed": 7,
        "max_num_seqs": 32,
        "max_model_len": 256,
        "tensor_parallel_size": 1,
    }
    assert {name: llm.options[name] for name in expected} == expected
    assert not {"enable_chunked_prefill", "return_sampling_mask", "enable_return_routed_experts"} & llm.options.keys()
    assert llm.calls == ["ban", "sleep_beside_others", "worker_buffers"], "nothing that is of the CPU's build"
    assert "vLLM compiles this model" in capsys.readouterr().out


def test_it_is_asked_for_what_the_learner_replays(settings: EngineSettings) -> None:
    llm: Any = VllmSampler(replace(settings, returns_kept=True, returns_routing=True))._llm
    assert llm.options["return_sampling_mask"] and llm.options["enable_return_routed_experts"]


@pytest.mark.parametrize(("adapter", "level"), [(None, 2), (ADAPTER, 1)], ids=["weights", "adapter"])
def test_what_no_sync_brings_back_is_kept_asleep(
    settings: EngineSettings, adapter: LoraConfig | None, level: int
) -> None:
    """A sync of adapters brings no weights: dropped at level 2 they would be gone. Triton computes their experts."""
    sampler = VllmSampler(replace(settings, adapter=adapter))
    llm: Any = sampler._llm
    sampler.sleep()
    llm.sleep.assert_called_once_with(level=level)
    llm.calls.clear()
    llm.llm_engine.list_loras.return_value = {1}
    layer = "model.layers.0.self_attn.q_proj"
    sampler.load_weights([(f"{layer}.lora_A.weight" if adapter else "a", torch.ones(4, 2))], version=1)
    assert [call.kwargs["tags"] for call in llm.wake_up.call_args_list] == [["weights"], ["kv_cache"]]
    loaded = [] if adapter else ["reload_weights", "repack_heads"]
    assert llm.calls == [*loaded, "worker_buffers"], "experts of a card's build are updated in place"


def test_batch_invariance_beside_a_learner_is_refused_before_hopper(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "gpu_capability", lambda: (8, 9))
    tree = {"out": str(tmp_path), "model": {"path": settings.model_path}, "data": {"train": ["x"]}}
    config = parse_config({**tree, "rollout": {"sampler": "vllm", "batch_invariant": True}})
    learner: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(UserError, match=r"compute capability 8\.9: before 9\.0 vLLM puts its own matrix products"):
        load_sampler(
            config,
            Path(settings.model_path),
            builder=settings.builder,
            learner=learner,
            is_stopped=lambda: False,
            note=lambda _: None,
        )
