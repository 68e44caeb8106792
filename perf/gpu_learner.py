"""The learner's step on one GPU: seconds, useful tokens a second, MFU and peak memory, shared against padded rows.

    python perf/gpu_learner.py --size 3b --check       # minutes; exit code 1 where a gradient is off
    python perf/gpu_learner.py --size 3b --checkpointing
    python perf/gpu_learner.py --size 7b --prompts 2 --tokens 2000 --checkpointing --optimizer none   # on 80 GB
    python perf/gpu_learner.py --size 3b --check --flash-impl fa3        # another kernel behind flash attention
    OMP_NUM_THREADS=1 python perf/gpu_learner.py --device cpu --size tiny       # does the script run?

A Qwen2.5-VL of the published sizes with random weights, bfloat16 with float32 master weights and AdamW
moments, on groups like ViRL39K's: one image of about 1,000 tokens, 150 tokens of text, responses of a
quarter of --tokens to all of it. It needs torch, transformers, pydantic, omegaconf and this repository's vlm_rl: no
processor, no tokenizer, no DeepSpeed, no vLLM.

`--check` compares two layers at full width with padded rows through transformers' own attention in float32, at spread
lengths and several prompts a row. In float32 the gradients must agree to 1e-4 of their norm. In bfloat16 ours may err
1.5 times as much as padded rows in bfloat16 do. It names the attention kernels that ran, of text and vision tower.
FlexAttention is compared too, and is not part of the verdict.

Then ways take turns on the same weights: `auto`, `patched` and `unpatched`, our rows with that model.layer_patches;
`flex`, our rows as in `auto` with FlexAttention in place of our attention; `padded`, one row per response through
transformers' own attention and layers with our log-probs in chunks; and `trl`, the same rows through the output head
of TRL 1.16's trainer, where it is installed. MFU is the step's arithmetic, counted once without padding and without
recomputation, over the matrix-product rate measured in the same run.

The planned peak is the dry run's count for a row of that many tokens with one image, with this script's optimizer in
place of ZeRO's. Padded rows and TRL's have none. `--optimizer none` drops the gradients after each step and keeps no
state, so that 7B fits on a card of 80 GB.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from flex_rows import NAME as FLEX
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from weighed_groups import WeighedGroup, pack

from vlm_rl.config import LayerPatches, parse_config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.doctor.attention import AttentionKernels
from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.learner.attention.patches import is_patched
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.model_files.model_folder import check_transformers
from vlm_rl.planning.memory import ModelSizes, memory_of_rank
from vlm_rl.types import Prompt, Rollout

CLIP = {"ratio": "sequence", "surrogate": "clip", "clip_low": 2e-3, "clip_high": 2.5e-3, "cap": 2.0}  # LUSPO's
PATCHES: dict[str, LayerPatches] = {
    "auto": "auto",
    "patched": True,
    "unpatched": False,
    "flex": "auto",
    "padded": False,
    "trl": False,
}
FLOAT32_LIMIT, BFLOAT16_FACTOR = 1e-4, 1.5  # share of the gradient's norm; times the error of padded rows
PADDED_LIMIT = 0.1  # of padded rows themselves in bfloat16: what errs more proves nothing
IMAGE, START, END = 8, 6, 7  # ids; all others from 16 on are text
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "mlp": 128,
        "vocabulary": 512,
        "vision": (32, 2, 2, 64),
    },
    "narrow": {  # the layers of a 3B, with little to compute: perf/row_sums.py
        "hidden": 64,
        "layers": 36,
        "heads": 4,
        "kv_heads": 2,
        "mlp": 128,
        "vocabulary": 512,
        "vision": (32, 32, 2, 64),
    },
    "3b": {"hidden": 2048, "layers": 36, "heads": 16, "kv_heads": 2, "mlp": 11008, "vocabulary": 151936},
    "7b": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "mlp": 18944, "vocabulary": 152064},
}


@dataclass(frozen=True)
class Result:
    """One way of computing the step."""

    seconds: float  # median
    peak: float  # GiB


def make_config(size: str, *, layers: int | None = None) -> Qwen2_5_VLConfig:
    """Return the published shape; with ``layers``, that many layers of text and of vision."""
    s = SIZES[size]
    width, depth, heads, mlp = s.get("vision", (1280, 32, 16, 3420))
    depth = layers or depth
    frequencies = s["hidden"] // s["heads"] // 2  # of a head, dealt out to time, height and width as 2 : 3 : 3
    time_part, height = frequencies // 4, (frequencies - frequencies // 4) // 2
    text = {
        "vocab_size": s["vocabulary"],
        "hidden_size": s["hidden"],
        "intermediate_size": s["mlp"],
        "num_hidden_layers": layers or s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": size != "7b",
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [time_part, height, frequencies - time_part - height],
        },
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    full = [index for index in range(depth) if index % 8 == 7] or [depth - 1]
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_heads": heads,
        "out_hidden_size": s["hidden"],
        "fullatt_block_indexes": full,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=size != "7b",
    )


def make_policy(config: Qwen2_5_VLConfig, device: torch.device, dtype: torch.dtype, *, way: str) -> Policy:
    """Return a policy of the same random weights each time."""
    torch.manual_seed(0)
    text = {"padded": "sdpa", "trl": "sdpa", "flex": FLEX}.get(way, attention.NAME)
    implementation = {"text_config": text, "vision_config": "sdpa"}
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation=implementation
        )
        return Policy(model, banned_ids=(IMAGE,), temperature=1.0, layer_patches=PATCHES[way])  # the ids are a tensor


def make_groups(
    vocabulary: int, *, prompts: int, responses: int, tokens: int, side: int, text: int, shortest: float = 1 / 4
) -> list[WeighedGroup]:
    """Return groups whose responses have ``shortest`` of ``tokens`` to all of them."""
    rng = np.random.default_rng(0)
    make_ids = partial(rng.integers, 16, vocabulary, dtype=np.int32)
    lengths = np.linspace(shortest * tokens, tokens, responses).round().astype(int)
    groups = []
    for index in range(prompts):
        picture = np.array([START, *[IMAGE] * side**2, END], dtype=np.int32)
        ids = np.concatenate([picture, make_ids(text)])
        pixels = torch.from_numpy(rng.normal(size=(4 * side**2, 1176)).astype(np.float32))
        vision = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]])}
        prompt = Prompt(str(index), "", "", ids, ids, (), vision)
        rollouts = [
            Rollout(str(index), i, make_ids(n), np.zeros(n, np.float32), "", "stop", 0) for i, n in enumerate(lengths)
        ]
        advantages = rng.normal(size=responses)
        weights = token_weights("length_weighted", lengths[None], advantages[None], max_tokens=tokens)[0] / prompts
        groups.append(WeighedGroup(prompt, rollouts, advantages, weights))
    return groups


# --- the ways -----------------------------------------------------------------------------------


def shared_backward(
    policy: Policy, groups: list[WeighedGroup], device: torch.device, *, groups_a_row: int = 1
) -> Tensor:
    """Compute the step's gradients through our rows and return the log-probs; under no_grad, these alone."""
    chunks = [Chunk(index, tuple(range(len(group.rollouts)))) for index, group in enumerate(groups)]
    logps = []
    for first in range(0, len(chunks), groups_a_row):
        row_chunks = chunks[first : first + groups_a_row]
        row = pack(row_chunks, groups, partial(rope_positions, policy.model)).to(device)
        logp_K, entropy_K = policy(row)
        if torch.is_grad_enabled():
            policy_loss(logp_K, entropy_K, row.loss, **CLIP)[0].backward()
        logps.append(logp_K.detach())
    return torch.cat(logps)


def padded_batches(
    policy: Policy, groups: list[WeighedGroup], device: torch.device, *, rows: int
) -> Iterator[tuple[dict[str, Tensor], Tensor, PackedRow]]:
    """Yield the model's inputs of ``rows`` padded rows at a time, where their targets are, and our row of the same.

    Each row has a copy of prompt and image.
    """
    for index, group in enumerate(groups):
        prompt = torch.from_numpy(group.prompt.ids).long()
        for first in range(0, len(group.rollouts), rows):
            part = range(first, min(first + rows, len(group.rollouts)))
            packed = pack([Chunk(index, tuple(part))], groups, partial(rope_positions, policy.model)).to(device)
            sequences = [torch.cat([prompt, torch.from_numpy(group.rollouts[i].ids).long()]) for i in part]
            ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(s) for s in sequences])[:, None]
            is_target = mask.clone()
            is_target[:, : len(prompt)] = False
            inner: Any = policy.model.model
            inner.row_has_images, inner.rope_deltas = True, None
            inputs = {"input_ids": ids, "attention_mask": mask.long(), "mm_token_type_ids": (ids == IMAGE).int()}
            inputs |= {key: value.repeat(len(part), 1) for key, value in group.prompt.vision.items()}
            yield {key: value.to(device) for key, value in inputs.items()}, is_target.to(device), packed


def padded_backward(policy: Policy, groups: list[WeighedGroup], device: torch.device, *, rows: int) -> Tensor:
    """Do the same through one padded row per response, ``rows`` at a time, with our chunked log-probs."""
    logps = []
    for inputs, is_target, packed in padded_batches(policy, groups, device, rows=rows):
        inner: Any = policy.model.model
        hidden = inner(**inputs, use_cache=False).last_hidden_state
        logp_K, entropy_K = policy.head(hidden[:, :-1][is_target[:, 1:]], packed.target_K)
        policy_loss(logp_K, entropy_K, packed.loss, **CLIP)[0].backward()
        logps.append(logp_K.detach())
    return torch.cat(logps)


def trl_backward(policy: Policy, groups: list[WeighedGroup], device: torch.device, *, rows: int) -> Tensor:
    """Do the same with the output head that TRL's trainer gives the model (add_fused_lm_head was called)."""
    logps = []
    for inputs, is_target, packed in padded_batches(policy, groups, device, rows=rows):
        labels = inputs["input_ids"].masked_fill(~is_target, -100)
        model: Any = policy.model
        outputs = model(**inputs, labels=labels, fused_lm_head=True)
        logp_K, entropy_K = outputs.log_probs[is_target[:, 1:]], outputs.entropy[is_target[:, 1:]]
        policy_loss(logp_K, entropy_K, packed.loss, **CLIP)[0].backward()
        logps.append(logp_K.detach())
    return torch.cat(logps)


class NoOptimizer:
    """Drops the gradients, and keeps no state."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class MasterAdamW:
    """AdamW in float32 over bfloat16 weights, one parameter at a time, so that one float32 gradient exists."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        masters = [(p, torch.nn.Parameter(p.detach().float().clone())) for p in parameters]
        self.parts = [(p, master, torch.optim.AdamW([master], lr=1e-6, fused=True)) for p, master in masters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master, optimizer in self.parts:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
                optimizer.step()
                parameter.copy_(master)
                master.grad = None


OPTIMIZERS = {"adamw": MasterAdamW, "none": NoOptimizer}

# --- measuring ---------------------------------------------------------------------------------------


def trl_head() -> Callable[..., None] | None:
    """Return TRL's function that gives a model its chunked output head, or None if TRL is not installed."""
    try:
        return importlib.import_module("trl.trainer.utils").add_fused_lm_head
    except ImportError:
        return None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of one large matrix product, the best of ten."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        begun = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def useful_operations(policy: Policy, groups: list[WeighedGroup]) -> float:
    """Return the operations of forward and backward of the step: prompts and images once, no padding, nothing twice.

    Six operations for each weight and token; twelve for each pair of tokens and unit of attention width.
    """
    text, vision = policy.model.config.text_config, policy.model.config.vision_config
    inner: Any = policy.model.model
    text_weights = sum(p.numel() for p in inner.language_model.layers.parameters())
    vision_weights = sum(p.numel() for p in inner.visual.parameters())
    full = len(vision.fullatt_block_indexes)
    total = 0.0
    for group in groups:
        prompt, responses = len(group.prompt.ids), [len(rollout.ids) for rollout in group.rollouts]
        pairs = prompt**2 / 2 + sum(prompt * n + n**2 / 2 for n in responses)
        total += 6 * text_weights * (prompt + sum(responses)) + 12 * text.num_hidden_layers * text.hidden_size * pairs
        total += 6 * text.vocab_size * text.hidden_size * sum(responses)
        patches = len(group.prompt.vision["pixel_values"])
        window = (vision.window_size // vision.patch_size) ** 2
        vision_pairs = full * patches**2 + (vision.depth - full) * patches * min(window, patches)
        total += 6 * vision_weights * patches + 12 * vision.hidden_size * vision_pairs
    return total


def measure(
    backward: Callable[[], Tensor], optimizer: MasterAdamW | NoOptimizer, device: torch.device, *, rounds: int
) -> Result:
    """Measure the steps after one that compiles and warms up."""
    seconds = []
    for index in range(rounds + 1):
        synchronize(device)
        if index == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        backward()
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return Result(statistics.median(seconds[1:]), peak)


def gradient(policy: Policy) -> Tensor:
    """Return the gradients of all parameters in one row, empty where there are none, and clear them."""
    parts = [p.grad.float().flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.zero_grad()
    return torch.cat(parts or [torch.empty(0)])


def is_correct(size: str, device: torch.device, *, tokens: int, side: int) -> bool:
    """Compare our rows with padded ones in two layers at full width, in float32 and bfloat16, and print the gaps."""
    config = make_config(size, layers=2)
    groups = make_groups(SIZES[size]["vocabulary"], prompts=3, responses=4, tokens=tokens, side=side, text=30)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # transformers embeds patches by a convolution

    def gradients(way: str, dtype: torch.dtype, **options: int) -> tuple[Tensor, Tensor]:
        policy = make_policy(config, device, torch.float32, way=way)
        for parameter in policy.parameters():  # made in float32: other dtypes may give other numbers
            parameter.data = parameter.data.to(dtype)
        backward = padded_backward if way == "padded" else shared_backward
        with torch.set_grad_enabled(has_backward(way, device)):
            return backward(policy, groups, device, **options).float(), gradient(policy)

    wanted_logp, wanted = gradients("padded", torch.float32, rows=4)
    print("\ntwo layers, against padded rows in float32\n")
    print("| way | dtype | log-probs, largest gap | gradients, share of the norm | kernels |\n|---|---|---|---|---|")
    correct = True
    for dtype in (torch.float32, torch.bfloat16):
        limit, name = FLOAT32_LIMIT if dtype == torch.float32 else PADDED_LIMIT, str(dtype).removeprefix("torch.")
        for way in ("padded", "auto", "patched", "unpatched"):
            options = {"rows": 2} if way == "padded" else {"groups_a_row": 2}
            with AttentionKernels() as kernels:
                logp, grad = gradients(way, dtype, **options)
            gap = float((grad - wanted).norm() / wanted.norm())
            correct &= gap <= limit
            print(
                f"| {way} | {name} | {(logp - wanted_logp).abs().max():.1e} "
                f"| {gap:.1e}{'' if gap <= limit else f', ABOVE {limit:.1e}'} | {', '.join(sorted(kernels.names))} |",
                flush=True,
            )
            if way == "padded" and dtype == torch.bfloat16:
                limit = BFLOAT16_FACTOR * gap
        try:
            logp, grad = gradients("flex", dtype, groups_a_row=2)
        except Exception as error:  # whatever its compiler leads to: our rows are what is checked
            print(f"| flex | {name} | failed: {reason(error)} | | |", flush=True)
            continue
        gap = f"{float((grad - wanted).norm() / wanted.norm()):.1e}" if len(grad) else "no backward on a CPU"
        print(f"| flex | {name} | {(logp - wanted_logp).abs().max():.1e} | {gap} | FlexAttention |", flush=True)
    return correct


def has_backward(way: str, device: torch.device) -> bool:
    """Return whether gradients can be had: FlexAttention has none on a CPU."""
    return way != "flex" or device.type == "cuda"


def reason(error: Exception) -> str:
    """Return the error's kind and the first line of its message."""
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]:.80}"


def planned_peak(policy: Policy, groups: list[WeighedGroup], way: str, options: argparse.Namespace) -> float:
    """Return the GiB that the dry run counts for the largest row, with this script's optimizer in place of ZeRO's."""
    prompt = max(len(group.prompt.ids) for group in groups)
    responses = max(sum(len(rollout.ids) for rollout in group.rollouts) for group in groups)
    vision: Any = policy.model.config.vision_config
    tree = {
        "out": "runs/none",
        "model": {
            "path": "none",
            "gradient_checkpointing": options.checkpointing,
            "offload_activations": options.offload,
        },
        "data": {
            "train": ["none"],
            "max_prompt_tokens": prompt + responses,  # of the whole row, which so has one image
            "max_pixels": max(len(group.prompt.vision["pixel_values"]) for group in groups) * vision.patch_size**2,
        },
        "rollout": {"max_tokens": 1},
        "reward": {"overlong_buffer": 0},
        "train": {"zero_stage": 0, "micro_batch_tokens": prompt + responses},
    }
    on_gpu = options.device == "cuda"
    patched = is_patched(PATCHES[way], on_gpu=on_gpu)
    sizes, dtype = ModelSizes(policy.model), policy.model.dtype
    memory = memory_of_rank(parse_config(tree), sizes, dtype, 1, patched=patched, on_gpu=on_gpu)
    masters = 4 * sizes.total
    state = memory.optimizer + masters if options.optimizer == "adamw" else 0
    return (memory.weights + memory.gradients + memory.activations + memory.head + state) / 2**30


def print_speed(options: argparse.Namespace, device: torch.device) -> None:
    """Print a line for each way; one that fails or does not fit keeps no other from running."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = {"prompts": options.prompts, "responses": options.responses, "tokens": options.tokens}
    groups = make_groups(SIZES[options.size]["vocabulary"], **shape, side=options.side, text=options.text)
    rate = matrix_rate(device, dtype)
    useful = sum(len(g.prompt.ids) + sum(len(r.ids) for r in g.rollouts) for g in groups)
    print(
        f"\n{options.size}: {shape}, prompt {len(groups[0].prompt.ids)} tokens, checkpointing {options.checkpointing}"
        + f"{', offloaded' * options.offload}, optimizer {options.optimizer}"
    )
    print(f"matrix products: {rate / 1e12:.3g} Tops/s; useful tokens of a step: {useful}")
    print("| way | s a step | useful tokens/s | MFU | peak GiB | planned |\n|---|---|---|---|---|---|")
    for way in options.ways:
        try:
            print_way(way, groups, options, device, dtype, rate=rate, useful=useful)
        except torch.OutOfMemoryError:
            print(f"| {way} | out of memory | | | |  |", flush=True)
        except Exception as error:  # whatever a missing compiler or kernel leads to: the other ways still run
            print(f"| {way} | failed: {reason(error)} | | | |  |", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def print_way(
    way: str,
    groups: list[WeighedGroup],
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rate: float,
    useful: int,
) -> None:
    """Measure one way and print its line; then profile a step, if it is the first and its profile is asked for.

    Args:
        way: one of PATCHES.
        groups: of the step.
        options: the command line's.
        device: where to compute.
        dtype: of weights and activations.
        rate: operations a second of a matrix product.
        useful: tokens of the step.
    """
    if not has_backward(way, device):
        print(f"| {way} | no backward on a CPU | | | |  |", flush=True)
        return
    policy = make_policy(make_config(options.size), device, dtype, way=way)
    if options.checkpointing:
        policy.enable_checkpointing(offload=options.offload)
    if way == "trl":
        if (add_fused_lm_head := trl_head()) is None:
            print(f"| {way} | not installed | | | |  |", flush=True)
            return
        add_fused_lm_head(policy.model, outputs=("log_probs", "entropy"))
    padded = {"padded": padded_backward, "trl": trl_backward}
    backward = partial(padded[way], rows=options.padded_rows) if way in padded else shared_backward
    optimizer = OPTIMIZERS[options.optimizer](list(policy.model.parameters()))
    result = measure(partial(backward, policy, groups, device), optimizer, device, rounds=options.rounds)
    mfu = useful_operations(policy, groups) / result.seconds / rate
    plan = "none" if way in padded else f"{planned_peak(policy, groups, way, options):.3g}"
    print(
        f"| {way} | {result.seconds:.3f} | {useful / result.seconds:.0f} | {mfu:.1%} | {result.peak:.1f} | {plan} |",
        flush=True,
    )
    if options.profile is not None and way == options.ways[0]:
        profiled(partial(backward, policy, groups, device), device, options.profile)


def profiled(call: Callable[[], object], device: torch.device, file: Path | None) -> float:
    """Return the seconds of a call in which a card computes; write its longest kernels and host calls to the file."""
    on_card = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_card]) as seen:
        call()
        synchronize(device)
    averages = seen.key_averages()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        orders = [*["self_device_time_total"] * on_card, "self_cpu_time_total"]
        tables = [averages.table(sort_by=order, row_limit=40, max_name_column_width=90) for order in orders]
        file.write_text("\n\n".join(tables), encoding="utf-8")
    return sum(event.self_device_time_total for event in averages if event.device_type.name == "CUDA") / 1e6


def activate_flash(name: str) -> str:
    """Let torch put another implementation behind flash attention's operators; return why it does not, or nothing."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        return "this torch knows no other"
    try:
        activate(name.upper())
    except Exception as error:  # unknown to this torch, its library is missing, or it does not take the card
        return reason(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="compare gradients, measure nothing")
    only.add_argument("--speed", action="store_true", help="measure, compare nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="3b")
    parser.add_argument("--prompts", type=int, default=4, help="groups of an optimizer step")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="tokens of the longest response (1000; tiny: 60)")
    parser.add_argument("--side", type=int, help="visual tokens of an image's side (32; tiny: 8)")
    parser.add_argument("--text", type=int, default=150, help="text tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--padded-rows", type=int, default=2, help="rows of a padded micro-batch")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true", help="keep in host memory what checkpointing keeps")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument(
        "--flash-impl", choices=["fa3", "fa4"], help="behind torch's flash attention (torch's own: 2)"
    )
    parser.add_argument("--profile", type=Path, help="write the longest kernels of the first way's step to this file")
    parser.add_argument("--ways", nargs="+", choices=list(PATCHES), default=list(PATCHES))
    options = parser.parse_args()
    options.tokens = options.tokens or (60 if options.size == "tiny" else 1000)
    options.side = options.side or (8 if options.size == "tiny" else 32)
    check_transformers()
    # Beyond the limit FlexAttention would go on uncompiled, with all scores of a row in float32.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}")
    if options.flash_impl:
        why = activate_flash(options.flash_impl)
        print(f"flash attention by {options.flash_impl}: {f'not offered ({why})' if why else 'activated'}")
        if why:
            return 0
    correct = options.speed or is_correct(options.size, device, tokens=options.tokens, side=options.side // 2)
    if not options.check:
        print_speed(options, device)
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
