"""QLoRA: what is refused, what the plan counts, and, where bitsandbytes is installed, the numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.groups import make_prompt, noise_image, pack, padded_logps, random_group
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.config import LoraConfig, load_config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.errors import UserError
from vlm_rl.learner import lora
from vlm_rl.learner.lora import weight_sources
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.quantization import quantized_loading
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.types import Problem

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CARD_48 = CONFIGS / "virl39k_luspo_7b_lora_48gb.yaml"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["train", "sft"])
def test_without_a_gpu_it_is_refused_before_the_data_is_read(
    command: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The set's only row is a benchmark's, which both commands refuse: neither gets to it."""
    problem = Problem("p", "How many?", (), "3", "integer", meta={"test_only": True})
    data = write_problems([problem], tmp_path / "set")
    file = tmp_path / "run.yaml"
    model = f"model: {{path: {tiny_model}, lora: {{load_in_4bit: true}}}}"
    file.write_text(f"out: {tmp_path / 'run'}\n{model}\ndata: {{train: [{data}]}}\n")
    assert cli.main([command, str(file)]) == 2
    assert "model.lora.load_in_4bit is true, and there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_4_bits_do_not_go_with_is_refused() -> None:
    for override, message in (
        ("train.zero_stage=3", "load_in_4bit is true, and train.zero_stage is 3"),
        ("model.lora.sync=adapter", "sync is adapter, and load_in_4bit is true"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(CARD_48, ["model.lora.load_in_4bit=true", override])


def test_the_plan_counts_4_bits() -> None:
    """The 7B language model's linear layers: 28 of width 3,584, keys and values 512 wide, an MLP of 18,944."""
    whole, packed = (
        dry_run(load_config(CARD_48, [f"model.lora.load_in_4bit={word}"]), num_ranks=1) for word in ("false", "true")
    )
    linear = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    per_weight = 4 + 8 / 64 + 32 / (64 * 256)
    assert whole.memory.weights - packed.memory.weights == pytest.approx(linear * (16 - per_weight) / 8, rel=1e-9)
    assert whole.memory.gradients == packed.memory.gradients
    assert whole.memory.engine_weights == packed.memory.engine_weights  # the engine gets the merged model


def test_a_packed_base_gives_the_log_probs_and_gradients_of_its_merged_weights(tiny_model: Path) -> None:
    """What is streamed to the engine is the model that the learner computes with."""
    pytest.importorskip("bitsandbytes")
    config = LoraConfig(rank=4, alpha=6, load_in_4bit=True)
    model: Any = load_model(tiny_model, dtype=torch.float32, in_4bit=True)
    policy = Policy(model, banned_ids=(), temperature=1.0)
    policy.add_adapters(config, base=BaseModel(str(tiny_model), ""), seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    packed = [name for name, p in model.named_parameters() if p.dtype == torch.uint8]
    assert len(packed) == 3 * 7 and all(".language_model." in name for name in packed)
    reference: Any = load_model(tiny_model, dtype=torch.float32)
    whole = {name: source.weight().clone() for name, source in weight_sources(model)}
    assert {name: tuple(p.shape) for name, p in reference.named_parameters()} == {
        name: tuple(weight.shape) for name, weight in whole.items()
    }
    reference.load_state_dict(whole, strict=False)
    reference.set_attn_implementation({"text_config": "sdpa"})
    vocabulary = reference.config.text_config.vocab_size
    prompt = make_prompt(tiny_model, "How many?", [noise_image(84, 84, 1)])
    groups = [random_group(prompt, [7, 3], vocabulary=vocabulary, seed=0)]
    row = pack([Chunk(0, (0, 1))], groups, lambda each: rope_positions(policy.model, each))
    logp_K, _ = policy(row)
    expected = torch.cat([x for rows in padded_logps(reference, groups) for x in rows])
    torch.testing.assert_close(logp_K, expected, atol=2e-5, rtol=0)
    logp_K.sum().backward()
    expected.sum().backward()
    full = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            gradient = full[f"{name}.weight"]
            torch.testing.assert_close(a.grad, 1.5 * b.T @ gradient, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(b.grad, 1.5 * gradient @ a.T, rtol=1e-3, atol=1e-4)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * 7 and all(".lora_" in name for name in trained)
    assert "bitsandbytes" in sys.modules


def test_a_packed_base_is_on_its_ranks_card_and_computed_in_the_dtype_of_the_run(tiny_model: Path) -> None:
    """DeepSpeed's engine wants one dtype of all that is trained."""
    pytest.importorskip("bitsandbytes")
    card = torch.device("cuda", 1)
    loading = quantized_loading(["lm_head"], torch.bfloat16, card)
    assert loading["device_map"] == {"": card} and loading["quantization_config"].bnb_4bit_use_double_quant
    model: Any = load_model(tiny_model, dtype=torch.bfloat16, in_4bit=True)
    lora.add_adapters(model, LoraConfig(rank=4, load_in_4bit=True), seed=5)
    packed = [layer for layer in model.modules() if hasattr(layer, "compute_dtype")]
    assert len(packed) == 3 * 7 and {layer.compute_dtype for layer in packed} == {torch.bfloat16}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 3 * 7 and {parameter.dtype for parameter in trained} == {torch.bfloat16}
