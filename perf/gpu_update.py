"""The update of a run, by DeepSpeed's engine as in training, in several ways: seconds, MFU, memory, longest kernels.

    python perf/gpu_update.py --size 3b                              # every way on one card, 20 s each
    python perf/gpu_update.py --size 3b --ways default liger --profile runs/profile
    OMP_NUM_THREADS=1 python perf/gpu_update.py --device cpu --size tiny     # does the script run?

A Qwen2.5-VL of the published sizes with random weights in bfloat16, ZeRO 2 on one rank with AdamW, and rows as a
rollout gives them: a prompt with an image, and its group's responses. The engine for rollouts is not there. Each way
has a process of its own; they import side by side, and then take turns, so that nothing else runs on the card.

*Update* is Learner.update over all rows with its optimizer step, *forward* their old log-probs. *Kernels* are the
seconds of the update in which the card computes, by torch's profiler: it waits for the host in the rest. MFU is the
update's useful arithmetic over the rate of one large matrix product, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "default": {"gradient_checkpointing": True},
    "kept": {"gradient_checkpointing": False},
    "mlp": {"gradient_checkpointing": "mlp"},
    "lean": {"gradient_checkpointing": True, "layer_patches": True},
    "liger": {"gradient_checkpointing": True, "layer_patches": "liger"},
    "fused head": {"gradient_checkpointing": True, "fused_head": True},
    "liger, fused head": {"gradient_checkpointing": True, "layer_patches": "liger", "fused_head": True},
    "liger, fused head, kept": {"gradient_checkpointing": False, "layer_patches": "liger", "fused_head": True},
}
COLUMNS = ("update", "kernels", "forward", "MFU", "peak GiB")


def seconds_of(call: Callable[[], object], wait: Callable[[], None], rounds: int) -> float:
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(way: str, options: argparse.Namespace) -> None:
    """Measure one way, and print its figures as JSON."""
    import torch
    from gpu_learner import (
        CLIP,
        IMAGE,
        SIZES,
        make_config,
        make_groups,
        matrix_rate,
        profiled,
        synchronize,
        useful_operations,
    )
    from transformers import Qwen2_5_VLForConditionalGeneration
    from weighed_groups import pack

    from vlm_rl.config import TrainConfig
    from vlm_rl.data.prompts import rope_positions
    from vlm_rl.devices import default_device
    from vlm_rl.distributed import init_ranks
    from vlm_rl.learner.attention import shared_prefix as attention
    from vlm_rl.learner.learner import Learner
    from vlm_rl.learner.packing import Chunk
    from vlm_rl.learner.policy import Policy
    from vlm_rl.losses import policy_loss

    setting, on_card = dict(WAYS[way]), options.device == "cuda"
    if not sys.stdin.readline():  # this way's turn; nothing comes where the script was killed
        return
    init_ranks()
    device = default_device() if on_card else torch.device("cpu")
    dtype = torch.bfloat16 if on_card else torch.float32
    wait = partial(synchronize, device)
    rate = matrix_rate(device, dtype)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            make_config(options.size),
            dtype=dtype,
            attn_implementation={"text_config": attention.NAME, "vision_config": "sdpa"},
        )
    checkpointing = setting.pop("gradient_checkpointing")
    policy = Policy(model, banned_ids=(IMAGE,), temperature=1.0, **setting).to(device)
    if checkpointing:
        policy.enable_checkpointing(zero_stage=options.zero_stage, only_mlps=checkpointing == "mlp")
    learner = Learner(policy, TrainConfig(lr=1e-6, zero_stage=options.zero_stage), total_optimizer_steps=100)
    shape = {"prompts": options.prompts, "responses": options.responses, "tokens": options.tokens}
    vocabulary = SIZES[options.size]["vocabulary"]
    groups = make_groups(vocabulary, **shape, side=options.side, text=options.text, shortest=1.0)
    positions = partial(rope_positions, policy.model)
    rows = [pack([Chunk(index, tuple(range(options.responses)))], groups, positions) for index in range(len(groups))]
    update = partial(learner.update, rows, partial(policy_loss, **CLIP))
    update()
    learner.log_probs(rows[0])
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(update, wait, options.rounds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_card else float("nan")
    forward = seconds_of(lambda: [learner.log_probs(row) for row in rows], wait, options.rounds)
    kernels = profiled(update, device, options.profile and options.profile / f"{way.replace(' ', '-')}.txt")
    mfu = useful_operations(policy, groups) / seconds / rate
    print(json.dumps(dict(zip(COLUMNS, (seconds, kernels, forward, mfu, peak), strict=True))), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["tiny", "3b", "7b"], default="3b")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--prompts", type=int, default=4, help="rows of an update")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--side", type=int, default=28, help="visual tokens of an image's side")
    parser.add_argument("--text", type=int, default=84, help="tokens of text of a prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="a folder for the longest kernels of each way")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        measure(options.way, options)
        return 0
    if options.size == "tiny":
        options.prompts, options.responses, options.tokens, options.side, options.text = 2, 2, 12, 2, 8
    given = {key: value for key, value in vars(options).items() if key not in ("ways", "way") and value is not None}
    shape = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    rows = f"{options.prompts} rows of {options.responses} x {options.tokens} tokens"
    print(f"{options.size}: {rows}, ZeRO {options.zero_stage}")
    print(f"| way | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    command = [sys.executable, __file__, *shape]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {way: subprocess.Popen([*command, "--way", way], **pipes) for way in options.ways}
    failed = False
    for way, process in running.items():
        said, errors = process.communicate("go\n")  # returns when the process has ended, and its memory is free
        found = [json.loads(line) for line in said.splitlines() if line.startswith('{"update"')]
        failed |= not found
        reason = ([line for line in errors.splitlines() if "Error" in line] or ["no message"])[-1]
        cells = [f"{found[0][key]:.3f}" for key in COLUMNS] if found else [f"failed: {reason:.80}", *[""] * 4]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
