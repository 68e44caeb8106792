"""The dry run: published parameter counts, ZeRO's arithmetic, and what a layer really keeps."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from tests.helpers.cards import have_cards
from tests.helpers.families import build_family
from tests.helpers.groups import make_prompt, pack, random_group
from tests.helpers.recipes import PAPER_RECIPES, RECIPES
from vlm_rl import cli
from vlm_rl.config import Config, RolloutConfig, load_config, load_sft_config, parse_config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.model_files.model_folder import SHIPPED
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, fits, gib
from vlm_rl.planning.memory import cache_bytes, linear_bytes_per_token, side_by_side, stack_bytes_per_token
from vlm_rl.planning.page import print_dry_run
from vlm_rl.session.recomputation import settled

PAPERS = [pytest.param(path, marks=pytest.mark.slow) for path in PAPER_RECIPES]
LUSPO_7B = next(path for path in RECIPES if path.stem == "virl39k_luspo_7b")
SFT_7B = LUSPO_7B.parent / "sft" / "cold_start_7b.yaml"

# As the published checkpoints' safetensors headers count them.
PUBLISHED = {
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "gemma-3-1b-it": 999_885_952,
}


# The tower of Qwen3-VL's larger models and of Qwen3.5: 27 layers of width 1,152, with the merger into `width`, and in
# Qwen3-VL three more.
def qwen3_tower(width: int, *, more: int) -> int:
    """Count patches, positions, layers and mergers, each with the biases of its matrices and its norms."""
    hidden, mlp, merged = 1152, 4304, 4 * 1152
    layer = 4 * (hidden**2 + hidden) + 2 * hidden * mlp + hidden + mlp + 4 * hidden
    mergers = (1 + more) * (merged**2 + merged + merged * width + width) + 2 * hidden + more * 2 * merged
    return 3 * 2 * 16**2 * hidden + hidden + 2304 * hidden + 27 * layer + mergers


def qwen3_5_9b() -> int:
    """Count 24 layers of linear attention and 8 that attend in full, with an MLP and two norms each.

    Linear attention: queries and keys of 16 heads of 128, values and a gate of 32; for each of these a decay, a step,
    and the inputs of both; a convolution of 4, and a norm. Full: 16 heads of 256 with a gate, 4 of keys and
    values, and two norms.
    """
    hidden, mlp = 4096, 12288
    convolved = (16 + 16 + 32) * 128
    linear = hidden * (convolved + 32 * 128 + 2 * 32) + 4 * convolved + 2 * 32 + 128 + 32 * 128 * hidden
    full = hidden * (2 * 16 + 2 * 4) * 256 + 16 * 256 * hidden + 2 * 256
    return 2 * 248_320 * hidden + 24 * linear + 8 * full + 32 * (3 * hidden * mlp + 2 * hidden) + hidden


# Its parts: Qwen2.5-7B with 390 rows less in each of its two embeddings, a tower of 24 layers, and a projector.
_LAYER = 4 * (1024**2 + 1024) + 2 * 4096 * 1024 + 4096 + 1024 + 2 * (2 * 1024 + 1024)  # norms, and a scale for each
_TOWER = 3 * 14**2 * 1024 + 1024 + 1024 + (1 + 32**2) * 1024 + 24 * _LAYER  # patches, class token, positions
_PROJECTOR = 2 * 4096 + 4096 * 3584 + 3584 + 3584**2 + 3584


def num_parameters(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, *, tied: bool, normed: bool
) -> int:
    """Count a decoder with heads of 128, without biases; `normed` has a norm over queries and one over keys."""
    attention = 2 * hidden * heads * 128 + 2 * hidden * kv_heads * 128 + (2 * 128 if normed else 0)
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return embeddings + layers * (attention + 3 * hidden * mlp + 2 * hidden) + hidden


PARAMETERS = {
    **PUBLISHED,
    "Qwen2.5-Math-7B": PUBLISHED["Qwen2.5-7B"],  # the same shapes, a shorter context
    "Qwen2.5-7B-Instruct": PUBLISHED["Qwen2.5-7B"],  # the same shapes
    "Qwen3-1.7B": num_parameters(2048, 28, 16, 8, 6144, 151_936, tied=True, normed=True),
    "Qwen3-4B-Base": num_parameters(2560, 36, 32, 8, 9728, 151_936, tied=True, normed=True),
    "Qwen3-8B-Base": num_parameters(4096, 36, 32, 8, 12288, 151_936, tied=False, normed=True),
    "Llama-3.2-3B-Instruct": num_parameters(3072, 28, 24, 8, 8192, 128_256, tied=True, normed=False),
    "Qwen3-VL-32B-Instruct": num_parameters(5120, 64, 64, 8, 25600, 151_936, tied=False, normed=True)
    + qwen3_tower(5120, more=3),
    "Qwen3.5-9B": qwen3_5_9b() + qwen3_tower(4096, more=0),
    "InternVL3-8B-hf": PUBLISHED["Qwen2.5-7B"] - 2 * 390 * 3584 + _TOWER + _PROJECTOR,
}

# rank -> parameters of adapters on every linear layer of the 7B language model: 28 layers of width 3,584, keys and
# values 512 wide, an MLP of 18,944
SEVEN_B_ADAPTERS = {
    rank: 28 * rank * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)) for rank in (8, 16, 32)
}


@cache
def dry_of(path: Path, *overrides: str, ranks: int = 8) -> DryRun:
    """Return the plan of a recipe; several tests look at the same."""
    return dry_run(load_config(path, overrides), num_ranks=ranks)


def ranks_of(path: Path) -> int:
    """Return the ranks of the hardware that a recipe's head names."""
    return next((ranks for size, ranks in {"72b": 32, "30b": 16}.items() if size in path.stem), 8)


@pytest.mark.parametrize("path", [*RECIPES, *PAPERS], ids=lambda path: path.stem)
def test_every_shipped_recipe_has_a_dry_run(path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path)
    on_tiny = not (SHIPPED / f"{Path(config.model.path).name}.json").exists()
    dry = dry_of(path, *([f"model.path={tiny_model}"] if on_tiny else []), ranks=ranks_of(path))
    print_dry_run(dry, shows_deepspeed=True)
    shown = capsys.readouterr().out
    block = json.loads(shown[shown.index("DeepSpeed block:") + len("DeepSpeed block:") :])
    assert block == dry.deepspeed and block["zero_optimization"]["stage"] == config.train.zero_stage
    for word in ("weights", "gradients", "optimizer", "activations", "engine weights", "key-value cache"):
        assert word in shown
    assert f"{dry.max_response_tokens_per_step:,}" in shown
    assert f"{dry.updates_per_step * dry.config.train.steps:,} in all" in shown
    assert f"each, every {config.checkpoint.every} steps, at most" in shown and f" free in {config.out}" in shown
    assert on_tiny == (path.stem in ("toy", "smoke")), "a recipe's model has no shipped configuration"


@pytest.mark.parametrize("path", [*RECIPES, *PAPERS], ids=lambda path: path.stem)
def test_every_recipe_for_cards_of_80_gb_fits_on_them(path: Path, tiny_model: Path) -> None:
    if path.stem in ("toy", "smoke") or "lora" in path.stem:
        return
    dry = dry_of(path, ranks=ranks_of(path))
    card = (40 if path.stem.endswith("3b") else 80) * 1e9
    engine = dry.config.rollout.vllm.get("gpu_memory_utilization", 0.45) * card
    assert dry.memory.update < 0.9 * card
    assert dry.memory.kept + engine < 0.95 * card
    longest = dry.config.data.max_prompt_tokens + dry.config.rollout.max_tokens
    assert dry.memory.engine_weights + 2 * longest * dry.kv_bytes_per_token < engine


@pytest.mark.parametrize("gigabytes", [24, 48])
def test_the_recipe_for_one_card_fits_on_it(gigabytes: int) -> None:
    """A 7B model with adapters: the update beside a sleeping engine, and the rollout beside the learner."""
    (path,) = (path for path in RECIPES if path.stem.endswith(f"lora_{gigabytes}gb"))
    dry, card = dry_of(path, ranks=1), gigabytes * 1e9
    assert dry.num_trainable == SEVEN_B_ADAPTERS[dry.config.model.lora.rank]
    engine = dry.config.rollout.vllm["gpu_memory_utilization"] * card
    assert dry.memory.update < 0.9 * card
    assert dry.memory.kept + engine < 0.95 * card
    longest = dry.config.data.max_prompt_tokens + dry.config.rollout.max_tokens
    assert dry.memory.engine_weights + 2**30 + 8 * longest * dry.kv_bytes_per_token < engine


def test_every_shipped_configuration_is_counted() -> None:
    assert {file.stem for file in SHIPPED.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    short = ("data.max_prompt_tokens=1024", "rollout.max_tokens=1024")  # fits every model's context
    assert dry_of(LUSPO_7B, f"model.path=models/{name}", *short).num_parameters == PARAMETERS[name]


def test_the_local_folder_wins_over_the_shipped_copy(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "Qwen2.5-VL-7B-Instruct"
    folder.mkdir()
    shutil.copy(tiny_model / "config.json", folder)
    dry = dry_of(LUSPO_7B, f"model.path={folder}", "data.max_prompt_tokens=2048")
    assert dry.num_parameters < 2e6 and dry.model_source == str(folder / "config.json")


# -- ZeRO's arithmetic -------------------------------------------------------------------------------


def test_bytes_of_every_stage_by_hand() -> None:
    # n parameters in bfloat16 with Adam: 2 n weights, 2 n gradients, 12 n optimizer (float32 master, two
    # moments); stage 1 divides the optimizer by the ranks, 2 the gradients too, 3 the weights too. Beside
    # the gradients that a rank holds are their sums in float32, 4 bytes each.
    n, ranks = PUBLISHED["Qwen2.5-VL-7B-Instruct"], 8
    assert n % ranks == 0
    by_stage = {stage: dry_of(LUSPO_7B, f"train.zero_stage={stage}").memory for stage in (1, 2, 3)}
    part = n // ranks
    assert [m.weights for m in by_stage.values()] == [2 * n, 2 * n, 2 * part]
    assert [m.gradients for m in by_stage.values()] == [6 * n, 6 * part, 6 * part]
    assert [m.optimizer for m in by_stage.values()] == [12 * part] * 3
    assert all(m.engine_weights == 2 * n for m in by_stage.values())


@pytest.mark.parametrize(
    ("change", "is_alone"),
    [
        ("train.micro_batch_tokens=16384", True),
        ("train.zero_stage=1", False),
        ("train.zero_stage=3", False),
        ("model.dtype=float32", False),
        ("train.deepspeed.zero_optimization.offload_optimizer.device=cpu", False),
        ("train.deepspeed.data_types.grad_accum_dtype=bf16", False),
    ],
)
def test_one_rank_that_sums_its_rows_has_no_bucket_and_one_gradient_at_a_time(change: str, is_alone: bool) -> None:
    """Beside the sums in float32: that of the largest tensor, embeddings of 152,064 ids x 3,584."""
    n = PUBLISHED["Qwen2.5-VL-7B-Instruct"]
    whole = dry_of(LUSPO_7B, change, ranks=1).memory
    assert ((whole.gradients, whole.buckets) == (4 * n + 2 * 152_064 * 3584, 0)) is is_alone
    adapters = dry_of(LUSPO_7B, change, "model.lora.rank=8", ranks=1)
    of_adapters = adapters.memory.gradients, adapters.memory.buckets
    assert (of_adapters == (4 * adapters.num_trainable, 0)) is is_alone


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_page_says_which_gradients_are_counted(on_gpu: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the buckets of float32 gradients count nothing beside the activations, but they are there."""
    dry = dry_run(load_config(LUSPO_7B), num_ranks=1, on_gpu=on_gpu)
    print_dry_run(dry)
    assert dry.memory.buckets == 0
    assert ("sums over the rows in float32" in capsys.readouterr().out) is on_gpu


def test_head_buckets_and_images_by_hand() -> None:
    # Qwen2.5-VL-7B: 152,064 ids x 3,584. The head's weight gradient is summed in float32; beside it is a product in
    # bfloat16, or at the end a copy. Chunks of logits in two float32 copies, of as many whole tokens as 1 GiB holds;
    # of a fused head the bfloat16 logits themselves. A bucket of 5e8 elements.
    logits, matrix = 2 * 4 * 882 * 152_064, 152_064 * 3584
    assert 0 <= 2**30 - logits < 2 * 4 * 152_064
    memory = dry_of(LUSPO_7B).memory
    assert (memory.head, memory.buckets) == (logits + (4 + 2) * matrix, 2 * 5 * 10**8)
    assert memory.update == sum(memory.parts().values())
    assert dry_of(LUSPO_7B, "model.lora.rank=8").memory.head == logits
    assert dry_of(LUSPO_7B, "model.fused_head=true", "model.lora.rank=8").memory.head == 2 * 3530 * 152_064
    assert dry_of(LUSPO_7B, "train.zero_stage=1").memory.buckets == 4 * 5 * 10**8
    smaller = "train.deepspeed.zero_optimization.reduce_bucket_size=1000000"
    assert dry_of(LUSPO_7B, smaller).memory.buckets == 2 * 10**6
    assert dry_of(LUSPO_7B, smaller.replace("1000000", "auto")).memory.buckets == memory.buckets
    # A row of 16,384 tokens holds 4 prompts of at most 4,096, each with an image; one of 8,192 holds 2.
    assert "a row of 16,384 tokens with 4 images" in shown(LUSPO_7B)
    without = "model.freeze=[tower]"
    in_tower = [
        dry_of(LUSPO_7B, row).memory.activations - dry_of(LUSPO_7B, row, without).memory.activations
        for row in ("train.micro_batch_tokens=16384", "train.micro_batch_tokens=8192")
    ]
    assert in_tower[0] == 2 * in_tower[1] > 0


def test_pixels_are_on_the_device_even_where_the_tower_is_frozen() -> None:
    few, many = (dry_of(LUSPO_7B, "model.freeze=[tower,merger]", f"data.max_pixels={n * 28**2}") for n in (1, 10))
    # 4 images in a row; 36 more patches each of 2 frames x 3 channels x 14 x 14 numbers, 2 bytes a number.
    assert many.memory.activations - few.memory.activations == 4 * 36 * 1176 * 2


def test_a_merger_keeps_its_tensors_even_where_the_tower_is_frozen() -> None:
    """Five of a patch's 1,280 numbers, of 2 bytes each: with weights that are trained, or with adapters."""
    pixels = f"data.max_pixels={10 * 28**2}"
    kept = 4 * 40 * 5 * 1280 * 2
    trained, frozen = (dry_of(LUSPO_7B, f"model.freeze={parts}", pixels) for parts in ("[tower]", "[tower,merger]"))
    assert trained.memory.activations - frozen.memory.activations == kept
    text = "model.lora={rank: 8, targets: [language_model]}"
    adapted, alone = (dry_of(LUSPO_7B, text.replace("]", more), pixels) for more in (", merger]", "]"))
    assert adapted.memory.activations - alone.memory.activations == kept


def test_host_memory_by_hand() -> None:
    n, ranks, largest = PUBLISHED["Qwen2.5-VL-7B-Instruct"], 8, 152_064 * 3584
    whole, shards = (dry_of(LUSPO_7B, f"train.zero_stage={stage}").memory for stage in (2, 3))
    assert (whole.loading, shards.loading) == (2 * n, 2 * (n // ranks + largest))
    assert whole.checkpoint_copies == 0
    # rank 0's model folder and DeepSpeed's model state; masters and moments of all ranks together
    copied = dry_of(LUSPO_7B, "checkpoint.async_save=true").memory.checkpoint_copies
    assert copied == 2 * 2 * n + 12 * n
    # in ZeRO 3 the masters are DeepSpeed's only copy
    assert dry_of(LUSPO_7B, "checkpoint.async_save=true", "train.zero_stage=3").memory.checkpoint_copies == 14 * n
    words = ["checkpoint.async_save=true", "model.freeze=[tower]", "model.dtype=bfloat16"]
    card, host = (dry_run(load_config(LUSPO_7B, words), num_ranks=ranks, on_gpu=on_gpu) for on_gpu in (True, False))
    frozen = 2 * (card.num_parameters - card.num_trainable)  # which DeepSpeed copies from a card
    assert card.memory.checkpoint_copies - host.memory.checkpoint_copies == frozen > 0
    assert card.disk_room.size - host.disk_room.size == frozen
    kept = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"
    part = n // ranks  # 12 bytes for masters and moments; 4 for float32 gradients, or 8 where ZeRO 3 sums them too
    for stage, host, gradients in ((2, 16, 6), (3, 20, 0)):
        memory = dry_of(LUSPO_7B, kept, f"train.zero_stage={stage}").memory
        assert (memory.host, memory.gradients, memory.optimizer) == (host * part, gradients * part, 0)
    shards = "train.deepspeed.zero_optimization.offload_param.device=cpu"
    assert dry_of(LUSPO_7B, "train.zero_stage=3", shards).memory.host == 2 * n // ranks
    adapter = dry_of(LUSPO_7B, "model.lora={rank: 8, sync: adapter}", "rollout.sampler=vllm").memory
    assert adapter.host == adapter.engine_weights == 2 * n
    # The 7B's matrices by hand: 28 layers of 3,584 with 4 heads of keys and values of 128, and MLPs of 18,944.
    rows, columns = (3584, 512, 512, 3584, 18944, 18944, 3584), (3584, 3584, 3584, 3584, 3584, 3584, 18944)
    saved = 28 * sum(row * column - 4 * row for row, column in zip(rows, columns, strict=True))
    halved = dry_of(LUSPO_7B, "rollout={quantization: fp8, sampler: vllm, max_gap: 0.3}", "model.dtype=bfloat16")
    assert halved.memory.engine_weights == 2 * n - saved
    words = ["host: loading", "host: optimizer", "host: checkpoint"]
    page = shown(LUSPO_7B, "checkpoint.async_save=true", "rollout.offload_optimizer=true")
    assert [word in page for word in words] == [True] * 3
    assert [word in shown(LUSPO_7B) for word in words] == [True, False, False]


def test_frozen_models_by_hand() -> None:
    """The KL term's reference is as large as the policy; one of 32B waits on the host, is divided, or stays."""
    n, larger = PUBLISHED["Qwen2.5-VL-7B-Instruct"], PUBLISHED["Qwen2.5-VL-32B-Instruct"]
    taught, kl = "algorithm.distillation.teacher=Qwen/Qwen2.5-VL-32B-Instruct", "algorithm.kl_coef=0.1"
    alone, moved = dry_of(LUSPO_7B).memory, dry_of(LUSPO_7B, taught, kl).memory
    assert (moved.frozen, moved.scoring, moved.host_frozen) == (0, 2 * larger, 2 * (n + larger))
    assert moved.update == alone.update and moved.kept == alone.kept and moved.host == 2 * (n + larger)
    assert moved.scored == moved.weights + moved.optimizer + moved.head + 2 * larger
    staying = dry_of(LUSPO_7B, taught, "algorithm.distillation.offload=false").memory
    assert (staying.frozen, staying.scoring, staying.host_frozen) == (2 * larger, 0, 0)
    assert staying.update - alone.update == staying.rollout - alone.rollout == 2 * larger
    shards = dry_of(LUSPO_7B, taught, kl, "train.zero_stage=3").memory
    assert (shards.frozen, shards.scoring, shards.host_frozen) == ((n + larger) // 4, 0, 0)
    own = f"algorithm.distillation.teacher={load_config(LUSPO_7B).model.path}"
    assert dry_of(LUSPO_7B, own, "model.lora.rank=8").memory.scoring == 0
    assert dry_of(LUSPO_7B, own).memory.scoring == 2 * n
    ids = dry_of(LUSPO_7B, taught, "algorithm.distillation.top_k=64").memory.head - moved.head
    assert ids == 24 * 64 * load_config(LUSPO_7B).train.micro_batch_tokens
    page = shown(LUSPO_7B, taught, kl, card=Card.of(80))
    assert f"scoring phase {moved.scored / 2**30:.2f} the KL term's reference and a teacher of 33.45 B" in page
    assert "reference and teacher need" in page and "train.zero_stage=3" in page.partition("what would")[2]
    with pytest.raises(UserError, match=r"^algorithm\.distillation\.teacher: no model folder at nowhere"):
        dry_of(LUSPO_7B, "algorithm.distillation.teacher=nowhere")


def test_what_other_choices_would_hold_is_shown() -> None:
    """ZeRO 1 holds all N gradients and their float32 sums; the engine takes its share of a card of 74.5 GiB."""
    n, weights, optimizer = PUBLISHED["Qwen2.5-VL-7B-Instruct"], 15.45, 11.58
    assert f"train.zero_stage=1 sums once a step, and holds {6 * n / 2**30:.2f} GiB" in shown(LUSPO_7B)
    assert "train.zero_stage=1" not in shown(LUSPO_7B, "train.zero_stage=1")
    card = Card.of(80)
    page = shown(LUSPO_7B, "rollout.vllm.gpu_memory_utilization=0.4", card=card)
    share = 0.4 * card.total / 2**30
    assert f"engine's share {share:.2f}" in page
    assert f"with that share {weights + optimizer + share:.1f}" in page
    moved = shown(LUSPO_7B, "rollout.offload_optimizer=true", "rollout.vllm.gpu_memory_utilization=0.7", card=card)
    assert f"with that share {weights + 0.7 * card.total / 2**30:.1f}" in moved


def test_an_option_that_deepspeed_does_not_know_is_refused_before_the_weights_are_loaded() -> None:
    with pytest.raises(UserError) as refused:
        dry_of(LUSPO_7B, "train.deepspeed.zero_optimization={reduce_buckets_size: 1, overlap_comm: often}")
    lines = str(refused.value).splitlines()
    assert len(lines) == 2 and all(line.startswith("train.deepspeed.zero_optimization: ") for line in lines)
    assert any("reduce_buckets_size: did you mean 'reduce_bucket_size'" in line for line in lines)
    assert any("overlap_comm is 'often'" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ("{wall_clock_breakdwon: true}", ["train.deepspeed: unknown key wall_clock_breakdwon: did you mean 'wall_"]),
        ("{zzz: 1, yyy: 2}", ["unknown key zzz: DeepSpeed would ignore it", "unknown key yyy"]),
        ("{comms_logger: {enabled: perhaps}}", ["enabled is 'perhaps'"]),
        ("{comms_logger: {enabledd: true}}", ["train.deepspeed (CommsLoggerConfig): enabledd is True: Extra"]),
        ("{data_types: 3}", ["train.deepspeed: DeepSpeed refuses it: "]),
    ],
    ids=["misspelt", "two", "a value", "misspelt inside", "a form"],
)
def test_any_key_that_deepspeed_does_not_read_is_refused(options: str, messages: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        dry_of(LUSPO_7B, f"train.deepspeed={options}")
    for message, line in zip(messages, str(refused.value).splitlines(), strict=True):
        assert message in line


def test_keys_that_deepspeed_reads_pass() -> None:
    dry_of(LUSPO_7B, "train.deepspeed={wall_clock_breakdown: true, comms_logger: {enabled: true}, aio: {}}")


def shown(path: Path, *overrides: str, card: Card | None = None) -> str:
    """Return what --dry-run prints, with every run of spaces as one."""
    with redirect_stdout(io.StringIO()) as page:
        print_dry_run(dry_of(path, *overrides), card=card)
    return " ".join(page.getvalue().replace("│", " ").split())


def with_free_disk(monkeypatch: pytest.MonkeyPatch, gigabytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=gigabytes * 10**9))


def test_the_verdict_and_the_hours_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hours grow with the steps; where nothing is assumed about a machine, nothing is said."""
    with_free_disk(monkeypatch, 10_000)
    arguments = ["train", str(LUSPO_7B), "--dry-run", "--ranks", "8", "--gpu-memory", "80"]

    def printed(*overrides: str) -> list[str]:
        assert cli.main([*arguments, *overrides]) == 0
        return capsys.readouterr().out.splitlines()

    hours = []
    for steps in (600, 6000):
        verdict, duration, model, *rest = printed(f"train.steps={steps}")
        assert verdict.startswith("fits on a card with 80 GB") and model.startswith("model ")
        assert f" h for {steps:,} steps on 8 cards" in duration and "factor of 2" in duration
        assert "DeepSpeed block" not in "".join(rest)
        hours.append(float(duration.split()[1].replace(",", "")))
    assert hours[1] == pytest.approx(10 * hours[0], rel=0.06)  # they are printed to a tenth of an hour
    assert not any("give or take" in line for line in printed("rollout.carry_over=0.75"))


def test_the_first_line_is_about_the_disk_where_checkpoints_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = dry_of(LUSPO_7B).disk_room
    for free, begin in ((room.most, "fits on a card"), (room.most - 1, "warning: "), (1, "does not fit on the disk")):
        with_free_disk(monkeypatch, free * room.size // 10**9 + 1)
        assert cli.main(["train", str(LUSPO_7B), "--dry-run", "--ranks", "8", "--gpu-memory", "80"]) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert first.startswith(begin)
        assert first.endswith(" at most, fit on the disk") == (begin == "fits on a card")
        assert [line for line in rest if line.startswith("checkpoints: ")] and rest[-1].startswith("DeepSpeed")


def test_frozen_vision_and_sgd_need_less() -> None:
    dry, frozen = dry_of(LUSPO_7B), dry_of(LUSPO_7B, "model.freeze=[tower,merger]")
    # 676,550,144 parameters: 32 blocks and the merger of the published vision tower. The merger: a norm of 1,280,
    # 5,120 x 5,120 + 5,120 and 5,120 x 3,584 + 3,584.
    merger = 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584
    assert dry.sizes.by_part["merger"] == merger
    assert dry.sizes.by_part["tower"] == 676_550_144 - merger
    assert sum(dry.sizes.by_part.values()) == dry.num_parameters
    assert dry.memory.optimizer - frozen.memory.optimizer == 12 * 676_550_144 // 8
    merger_alone = dry_of(LUSPO_7B, "model.freeze=[tower,language_model]")
    assert merger_alone.num_trainable == merger and merger_alone.memory.optimizer == 12 * merger // 8
    assert dry_of(LUSPO_7B, "train.optimizer=sgd").memory.optimizer * 3 == dry.memory.optimizer


def test_adapters_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # bfloat16: 2 bytes for every parameter, the adapters' included; of the adapters alone 12 for the optimizer and 4
    # for the sums of the gradients; the engine has the merged model.
    n, lora = PUBLISHED["Qwen2.5-VL-7B-Instruct"], SEVEN_B_ADAPTERS[8]
    dry = dry_of(LUSPO_7B, "model.lora.rank=8", "train.zero_stage=2", ranks=1)
    assert (dry.num_parameters, dry.num_trainable) == (n + lora, lora)
    memory = dry.memory
    assert (memory.weights, memory.engine_weights) == (2 * (n + lora), 2 * n)
    assert (memory.optimizer, memory.gradients) == (12 * lora, 4 * lora)
    assert memory.activations < dry_of(LUSPO_7B, ranks=1).memory.activations  # none kept in the tower
    print_dry_run(dry)
    assert "LoRA: 20.19 M parameters trained, rank 8 on 196 linear layers" in capsys.readouterr().out
    some = dry_of(LUSPO_7B, "model.lora.targets=[q_proj,v_proj]", ranks=1)
    assert some.num_trainable == 28 * 16 * ((3584 + 3584) + (3584 + 512))
    with pytest.raises(UserError, match=r"model\.lora\.targets: 'w1' names no linear layer"):
        dry_of(LUSPO_7B, "model.lora.targets=[w1]")


def test_offloaded_weights_are_on_the_card_a_few_at_a_time() -> None:
    offload = ["train.zero_stage=3", "train.deepspeed.zero_optimization.offload_param.device=cpu"]
    assert dry_of(LUSPO_7B, *offload, ranks=1).memory.weights == 2 * 10**9
    fewer = "train.deepspeed.zero_optimization.stage3_max_live_parameters=600000000"
    assert dry_of(LUSPO_7B, *offload, fewer, ranks=1).memory.weights == 2 * 6 * 10**8
    assert dry_of(LUSPO_7B, *offload, fewer.replace("600000000", "auto"), ranks=1).memory.weights == 2 * 10**9
    part = -(-PUBLISHED["Qwen2.5-VL-7B-Instruct"] // 32)
    assert dry_of(LUSPO_7B, *offload, ranks=32).memory.weights == 2 * part


def test_tokens_and_steps_by_hand() -> None:
    dry = dry_of(LUSPO_7B)
    assert dry.max_response_tokens_per_step == 1024 * 4096
    assert (dry.updates_per_step, dry.updates_per_step * dry.config.train.steps) == (8, 8 * 303)
    # 2 (keys, values) x 28 layers x 4 heads x 128 x 2 bytes; 16 prompts x 8 on a rank, each of 8,192 tokens
    assert dry.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert side_by_side(dry.config, 8) == 128
    assert dry.memory.kv_cache == 128 * 8192 * dry.kv_bytes_per_token
    assert dry_of(LUSPO_7B, "train.mini_batch_prompts=100").updates_per_step == 2


def test_torchruns_number_of_ranks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(LUSPO_7B)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert dry_run(config).num_ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    dry = dry_run(config)
    assert dry.num_ranks == 4 and dry.memory == dry.by_ranks()[4].memory
    assert asdict(dry.by_ranks()[8].memory) == asdict(dry_of(LUSPO_7B).memory)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_family_has_a_dry_run(model_type: str, family_model: Callable[[str], Path]) -> None:
    folder = family_model(model_type)
    model = load_model(folder, dtype=torch.float32)
    config = config_of(model={"path": str(folder)}, data={"train": ["x"], "max_prompt_tokens": 512})
    dry = dry_run(config.model_copy(update={"rollout": RolloutConfig(max_tokens=512)}), num_ranks=2)
    assert dry.num_parameters == sum(p.numel() for p in model.parameters())
    assert {*dry.sizes.by_part} == {*SUPPORTED[model_type].parts} and all(dry.sizes.by_part.values())
    model.set_attn_implementation("eager")  # which every family has
    for tokens in (1, 30):
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64), past_key_values=cache)
        kept = sum(tensor.nbytes for layer in cache.layers for tensor in _tensors_of(layer))
        assert cache_bytes(model.config, tokens, torch.float32) == kept
    constant = cache_bytes(model.config, 0, torch.float32)
    assert dry.kv_bytes_per_token == cache_bytes(model.config, 1, torch.float32) - constant
    copies = config.rollout.responses_per_prompt if SUPPORTED[model_type].padded else 1
    assert dry.max_prompt_tokens_per_step == config.rollout.prompts_per_step * 512 * copies


def _tensors_of(layer: Any) -> list[Any]:
    """Return what a layer of a cache keeps; transformers keeps one token less of a window than it attends to."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        missing = layer.get_seq_length() >= layer.sliding_window
        return [
            torch.nn.functional.pad(kept, (0, 0, 0, missing))
            for kept in (layer.keys, layer.values)
            if kept is not None
        ]
    if isinstance(layer, LinearAttentionLayer):
        return [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [layer.keys, layer.values]


# -- activations -------------------------------------------------------------------------------------


def kept_bytes(policy: Policy, row, layers: torch.nn.ModuleList) -> int:
    """Bytes of the distinct tensors that the decoder layers' forward pass saved for the backward one."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    inside = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = [layers[0].register_forward_pre_hook(lambda *_: inside.append(1))]
    hooks.append(layers[-1].register_forward_hook(lambda *_: inside.clear()))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = policy.hidden_states(row)
    for hook in hooks:
        hook.remove()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patched", [True, False])
def test_the_activation_estimate_is_what_the_layers_keep(
    tiny_model: Path, tmp_path: Path, model_type: str, dtype: torch.dtype, patched: bool
) -> None:
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = heads if model_type == "qwen2_5_vl" else {"hidden_size": 96}  # Qwen3's heads are 128 wide all together
    folder = build_family(model_type, tmp_path, tokenizer_of=tiny_model, intermediate_size=768, **sizes)
    model = load_model(folder, dtype=dtype)
    policy = Policy(model, banned_ids=(), temperature=1.0, layer_patches=patched)
    prompt = make_prompt(tiny_model, "How many red squares are there? " * 4)
    group = random_group(prompt, [120] * 8, vocabulary=300, seed=0)
    row = pack([Chunk(0, tuple(range(8)))], [group], lambda p: rope_positions(policy.model, p))
    text = policy.model.config.get_text_config()
    head = 32
    estimate = len(row.ids_T) * stack_bytes_per_token(
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        query=head * text.num_attention_heads,
        kv=head * text.num_key_value_heads,
        mlp=text.intermediate_size,
        layers=text.num_hidden_layers,
        dtype=dtype,
        patched=patched,
        checkpointed=False,
        has_head_norms=model_type == "qwen3_vl",
    )
    measured = kept_bytes(policy, row, policy.model.model.language_model.layers)
    assert 0.97 < estimate / measured < 1.03, (estimate, measured)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others() -> None:
    stack = partial(
        stack_bytes_per_token,
        hidden=3584,
        heads=28,
        query=3584,
        kv=512,
        mlp=18944,
        layers=28,
        dtype=torch.bfloat16,
        patched=False,
    )
    whole = stack(checkpointed=False)
    assert stack(checkpointed=True) == whole // 28 + 28 * 3584 * 2
    assert stack(checkpointed=True, offloaded=True) == whole // 28


@pytest.mark.parametrize(("dtype", "linear"), [(torch.float32, 7104), (torch.bfloat16, 4400)])
def test_layers_of_linear_attention_are_counted_as_what_they_keep(dtype: torch.dtype, linear: int) -> None:
    """By hand: 4 heads of keys 8 wide, 8 of values 16 wide, so keys are 32 wide, or 64 for each head of values.

    Convolution 2 * 32 + 128 = 192; rule 64 + 64 + 128 and 8 heads * (64 + 1), together 776; gated norm 5 * 128 = 640
    in float32, and 8 * 128 = 1024 in bfloat16; projection 128; 8 heads * 5 float32 are 160 bytes. So 1736 * 4 + 160,
    and 2120 * 2 + 160.
    """
    sizes = {"linear_num_key_heads": 4, "linear_key_head_dim": 8}
    sizes |= {"linear_num_value_heads": 8, "linear_value_head_dim": 16}
    text = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=4, **sizes)
    assert text.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert linear_bytes_per_token(text, dtype) == linear
    assert linear_bytes_per_token(AutoConfig.for_model("qwen3"), dtype) == 0
    stack = partial(
        stack_bytes_per_token, hidden=64, heads=2, query=64, kv=32, mlp=96, layers=4, dtype=dtype, patched=True
    )
    attention = (2 * 64 + 2 * 32) * dtype.itemsize + 4 * 2  # query and output, keys and values, a log-sum-exp a head
    mixed, full = (partial(stack, linear_layers=n, linear=linear) for n in (3, 0))
    for way in (False, "mlp"):
        assert mixed(checkpointed=way) - full(checkpointed=way) == 3 * (linear - attention)
    one = mixed(checkpointed=True) - 4 * 64 * dtype.itemsize  # a layer at a time is whole, the largest at most
    assert one == (2 * 2 * 64 + 3 * 96) * dtype.itemsize + linear > full(checkpointed=True) - 4 * 64 * dtype.itemsize


def test_a_plan_counts_linear_layers_in_place_of_those_that_attend(
    family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The plans of two folders that differ in the kinds of their layers alone, in float32."""
    folder = shutil.copytree(family_model("qwen3_next"), tmp_path / "next")
    raw = json.loads((folder / "config.json").read_text())
    linear_layers = raw["layer_types"].count("linear_attention")
    kept = []
    for kinds in (raw["layer_types"], ["full_attention"] * raw["num_hidden_layers"]):
        (folder / "config.json").write_text(json.dumps({**raw, "layer_types": kinds}))
        model = {"path": str(folder), "gradient_checkpointing": False, "layer_patches": False}
        config = config_of(model=model, data={"train": ["x"], "max_prompt_tokens": 512})
        dry = dry_run(config.model_copy(update={"rollout": RolloutConfig(max_tokens=512)}), num_ranks=1)
        kept.append(dry.memory.activations)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    normed = raw["head_dim"] * (heads + kv_heads)  # queries and keys; as many for values and output
    attention = 4 * (2 * normed + 2 * normed) + 4 * heads + 4 * (heads + kv_heads)
    text = AutoConfig.for_model(**raw)
    tokens = max(dry.config.train.micro_batch_tokens, 1024)
    assert linear_layers and kept[0] - kept[1] == tokens * linear_layers * (
        linear_bytes_per_token(text, torch.float32) - attention
    )


@pytest.mark.parametrize("patched", [True, False])
def test_recomputed_mlps_keep_their_inputs(tiny_model: Path, tmp_path: Path, patched: bool) -> None:
    """By the measure of the estimate above; one MLP is whole in the backward pass only, and is left out here."""
    folder = build_family("qwen3_vl", tmp_path, tokenizer_of=tiny_model, intermediate_size=768, hidden_size=96)
    policy = Policy(load_model(folder, dtype=torch.bfloat16), banned_ids=(), temperature=1.0, layer_patches=patched)
    policy.enable_checkpointing(only_mlps=True)
    prompt = make_prompt(tiny_model, "How many red squares are there? " * 4)
    row = pack(
        [Chunk(0, tuple(range(8)))],
        [random_group(prompt, [120] * 8, vocabulary=300, seed=0)],
        lambda p: rope_positions(policy.model, p),
    )
    text = policy.model.config.get_text_config()
    stack = partial(
        stack_bytes_per_token,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        query=32 * text.num_attention_heads,
        kv=32 * text.num_key_value_heads,
        mlp=text.intermediate_size,
        layers=text.num_hidden_layers,
        dtype=torch.bfloat16,
        patched=patched,
        has_head_norms=True,
    )
    one_mlp = (3 if patched else 4) * text.intermediate_size * 2
    estimate = len(row.ids_T) * (stack(checkpointed="mlp") - one_mlp)
    measured = kept_bytes(policy, row, policy.model.model.language_model.layers)
    assert 0.97 < estimate / measured < 1.03, (estimate, measured)
    assert stack(checkpointed=True) < stack(checkpointed="mlp") < stack(checkpointed=False)


def test_auto_recomputes_no_more_than_the_card_asks_for() -> None:
    plans = {
        way: dry_run(load_sft_config(SFT_7B, [f"model.gradient_checkpointing={way}"]), num_ranks=8)
        for way in ("false", "mlp", "true", "auto")
    }
    least = {way: fits(dry, Card.of(10_000)).dry.memory.update for way, dry in plans.items()}
    assert least["true"] < least["mlp"] < least["false"] == least["auto"]
    kept = {}
    for way in ("false", "mlp", "true"):
        card = Card.of(1.001 * fits(plans[way], Card.of(10_000)).smallest_card / 1e9)
        fit = fits(plans["auto"], card)
        kept[way] = fit.dry.config.model.gradient_checkpointing
        assert fit.dry.asked.model.gradient_checkpointing == "auto"
    assert kept == {"false": False, "mlp": "mlp", "true": True}
    assert fits(plans["auto"], Card.of(10)).dry.config.model.gradient_checkpointing is True
    assert plans["auto"].memory == plans["true"].memory  # of an unknown card


def test_fine_tuning_with_held_out_responses_is_planned_as_without(tmp_path: Path) -> None:
    """A training run must say eval.every where data.eval names sets; a fine-tuning has a default for it."""
    plain, measured = (
        dry_run(load_sft_config(SFT_7B, [f"out={tmp_path}", f"data.eval={sets}"]), num_ranks=8, on_gpu=True)
        for sets in ("[]", "[data/held-out]")
    )
    assert measured.memory == plain.memory and measured.disk_room == plain.disk_room


def test_weights_that_are_here_are_planned_for_this_machine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model={"path": str(tiny_model)})
    assert not dry_run(config).is_on_gpu
    have_cards(monkeypatch, 1, 10**12)
    assert dry_run(config).is_on_gpu


def test_the_run_keeps_what_the_plan_says(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    config = config_of(model={"path": str(tiny_model), "gradient_checkpointing": "auto"})
    monkeypatch.setattr(Card, "here", lambda ranks: Card(1e12, 1e12, is_gpu=False))
    assert settled(config).model.gradient_checkpointing is False
    assert "auto: without gradient checkpointing, planned" in capsys.readouterr().out
    monkeypatch.setattr(Card, "here", lambda ranks: Card(1e6, 1e6, is_gpu=False))
    assert settled(config).model.gradient_checkpointing is True
    assert config.model.gradient_checkpointing == "auto"
    capsys.readouterr()
    have_cards(monkeypatch, 1, 10**12)
    monkeypatch.setattr(Card, "here", lambda ranks: Card.of(1000))
    kept = settled(config)
    planned = gib(dry_run(kept, num_ranks=1, on_gpu=True).memory.update)
    assert planned != gib(dry_run(kept, num_ranks=1, on_gpu=False).memory.update)
    assert f"planned {planned} in the update on a card" in " ".join(capsys.readouterr().out.split())


def test_the_estimate_follows_the_switch_of_the_patches() -> None:
    """A shipped configuration is planned for a GPU, where auto leaves transformers' own layers."""
    on, off, auto = (dry_of(LUSPO_7B, f"model.layer_patches={setting}") for setting in ("true", "false", "auto"))
    assert (on.is_patched, off.is_patched, auto.is_patched) == (True, False, False)
    assert on.memory.activations < off.memory.activations == auto.memory.activations


# -- refusals ----------------------------------------------------------------------------------------


def config_of(**sections) -> Config:
    tree = {"out": "x", "model": {"path": "models/Qwen2.5-7B"}, "data": {"train": ["x"]}}
    return parse_config({**tree, **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"path": "models/Qwen9-1B"}}, ["models/Qwen9-1B", "Qwen2.5-VL-7B-Instruct"]),
        ({"algorithm": {"name": "lupso"}}, ["lupso", "luspo"]),
        ({"data": {"train": ["x"], "max_prompt_tokens": 131072}}, ["135168", "131072"]),
        ({"eval": {"every": 1, "max_tokens": 131072}}, ["135168", "131072", "eval.max_tokens"]),
        ({"train": {"zero_stage": 0}}, ["train.zero_stage", "bfloat16"]),
        ({"rollout": {"replay_routing": True}}, ["rollout.replay_routing", "qwen2"]),
    ],
)
def test_what_training_would_refuse_the_dry_run_refuses(sections: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        dry_run(config_of(**sections))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "unheard-of"}', '{"auto_map": {}}', '{"model_type": 3}'])
def test_a_broken_local_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.path"):
        dry_run(config_of(model={"path": str(tmp_path)}))


def test_ranks_must_be_positive() -> None:
    with pytest.raises(UserError, match="--ranks"):
        dry_run(config_of(), num_ranks=0)


def test_the_shipped_copies_open_as_transformers_configurations() -> None:
    for file in SHIPPED.glob("*.json"):
        config = AutoConfig.for_model(**json.loads(file.read_text()))
        assert config.get_text_config().max_position_embeddings >= 4_096
