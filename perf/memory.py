"""Compare the memory plan of --dry-run with the measured peak of two optimizer steps, a fresh process for each model.

    OMP_NUM_THREADS=1 python perf/memory.py                        # random models of 1 and 100 M parameters
    python perf/memory.py --tokens 8192                            # on a GPU, of 100 M and 1 B
    python perf/memory.py --model models/Qwen2.5-VL-3B-Instruct    # a model on this machine's GPU
    python perf/memory.py --stage 0 --tokens 4096 train.optimizer=sgd

On a CPU the peak is the resident memory at its highest (VmHWM) less what the process held before it loaded the model:
weights, gradients, optimizer, activations, and what the allocator and the libraries keep. On a GPU it is
torch.cuda.max_memory_allocated, less what was allocated before. A step has two full rows, so that the second meets
the gradients of the first. Each holds a prompt of half of its tokens, an image of at most a quarter included, and
eight responses.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HUNDRED: dict[str, Any] = {"hidden": 768, "layers": 12, "heads": 24, "kv_heads": 8, "mlp": 3072}
BILLION: dict[str, Any] = {"hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 4, "mlp": 8192}
RESPONSES = 8
MOST_VISUAL = 1280  # tokens of an image, above which the tiny model's processor shrinks it
PIXELS = 28  # of a visual token's side
SPECIAL = range(8)  # ids that no response holds; images are among them


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def image_side(tokens: int) -> int:
    """Return the visual tokens of an image's side, for a row of so many tokens."""
    return math.isqrt(min(tokens // 4, MOST_VISUAL))


def configuration(model: Path, tokens: int, stage: int, overrides: list[str]) -> Any:
    """Return the configuration of a run whose rows hold `tokens` tokens, and are planned to hold one image."""
    from vlm_rl.config import load_config

    pixels = (PIXELS * image_side(tokens)) ** 2
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run.yaml"
        length = tokens // (2 * RESPONSES)
        tree = {
            "out": "runs/memory",
            "model": {"path": str(model)},
            "data": {"train": ["x"], "max_prompt_tokens": tokens // 2 + 1, "min_pixels": 3136, "max_pixels": pixels},
            "rollout": {"max_tokens": length, "responses_per_prompt": RESPONSES, "prompts_per_step": 1},
            "reward": {"overlong_buffer": 0},
            "train": {"zero_stage": stage, "micro_batch_tokens": tokens, "mini_batch_prompts": 1},
        }
        path.write_text(json.dumps(tree))
        return load_config(path, overrides)


def train(model: Path, config: Any, *, steps: int) -> tuple[int, int]:
    """Take optimizer steps of two full rows each; return the number of parameters, and of tokens in a row."""
    from tests.helpers.groups import make_prompt, noise_image, pack, random_group
    from tests.helpers.learner_worker import loss_function
    from vlm_rl.data.prompts import rope_positions
    from vlm_rl.devices import default_device, model_dtype
    from vlm_rl.learner.learner import Learner
    from vlm_rl.learner.packing import Chunk
    from vlm_rl.learner.policy import Policy, load_model

    dtype, tokens = model_dtype(default_device(), config.model.dtype), config.train.micro_batch_tokens
    policy = Policy(
        load_model(model, dtype=dtype, shard_for=config.train),
        banned_ids=(),
        temperature=1.0,
        layer_patches=config.model.layer_patches,
    )
    policy.freeze(config.model.freeze)
    if config.model.gradient_checkpointing:
        policy.enable_checkpointing(offload=config.model.offload_activations)
    learner = Learner(policy, config.train, total_optimizer_steps=10)
    side = image_side(tokens)
    text = "How many red squares are there? " * (tokens // 10)
    prompt = make_prompt(model, text, [noise_image(PIXELS * side, PIXELS * side, seed=0)])
    prompt = replace(prompt, ids=prompt.ids[: tokens // 2])  # the image comes first
    length = (tokens - len(prompt.ids)) // RESPONSES
    group = random_group(prompt, [length] * RESPONSES, vocabulary=300, seed=0, banned=SPECIAL)
    row = pack([Chunk(0, tuple(range(RESPONSES)))], [group], lambda p: rope_positions(policy.model, p))
    for _ in range(steps):
        learner.update([row, row], loss_function)
    learner.engine.destroy()
    return sum(p.numel() for p in policy.parameters()), len(row.ids_T)


def measure(model: Path, small: Path, tokens: int, stage: int, overrides: list[str]) -> dict[str, Any]:
    """Return the plan of a model and its peak, in bytes. A small one is trained first, which loads every library."""
    import torch

    from vlm_rl.distributed import init_ranks
    from vlm_rl.planning.dry_run import dry_run

    config = configuration(model, tokens, stage, overrides)
    memory, device = dry_run(config, num_ranks=1).memory, init_ranks()
    train(small, configuration(small, 128, stage, overrides), steps=1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = resident("VmHWM")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    parameters, in_row = train(model, config, steps=2)
    peak = (torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")) - before
    return {
        "plan": memory.parts(),
        "planned": memory.update,
        "peak": peak,
        "parameters": parameters,
        "tokens": in_row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: two random ones)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--stage", type=int, default=2, help="train.zero_stage")
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.measure:
        model, small = options.measure
        print(json.dumps(measure(model, small, options.tokens, options.stage, overrides)))
        return
    import torch

    from vlm_rl.toy.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        tiny = build_tiny_model(Path(scratch) / "tiny")
        models = [options.model] if options.model else []
        if not models:
            middle = build_tiny_model(Path(scratch) / "100m", **HUNDRED)
            on_gpu = torch.cuda.is_available()
            models = [middle, build_tiny_model(Path(scratch) / "1b", **BILLION)] if on_gpu else [tiny, middle]
        for model in models:
            command = [sys.executable, __file__, "--measure", str(model), str(tiny), "--tokens", str(options.tokens)]
            command += ["--stage", str(options.stage), *overrides]
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
            environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once, not into holes
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{model.name}: the measurement ended with exit code {done.returncode}")
            show(model.name, json.loads(done.stdout.splitlines()[-1]))


def show(name: str, result: dict[str, Any]) -> None:
    """Print a model's plan beside its peak, in MB."""
    print(f"\n{name}: {result['parameters'] / 1e6:.1f} M parameters, a row of {result['tokens']:,} tokens\n")
    print("| part | MB |\n|---|---|")
    for part, size in result["plan"].items():
        print(f"| {part} | {size / 1e6:,.1f} |")
    print(f"| **planned** | {result['planned'] / 1e6:,.1f} |\n| **measured** | {result['peak'] / 1e6:,.1f} |")
    print(f"| planned / measured | {result['planned'] / result['peak']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
