"""Where the seconds of a sync go: the weights into vLLM, and the checksums of both sides.

    OMP_NUM_THREADS=1 python perf/sync.py                          # a random model of 100 M parameters
    python perf/sync.py --model models/Qwen2.5-VL-3B-Instruct      # on a GPU

The learner's side is the transformers model alone, on the same device. Medians of rounds; on a GPU the engine sleeps
before each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from memory import HUNDRED
from transformers import AutoModelForImageTextToText

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device, has_gpu
from vlm_rl.samplers.base import Sampler
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import Fingerprint, FingerprintBuilder, check_fresh
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.tiny_model import build_tiny_model


def finish() -> float:
    """Return the time once the device has done what it was given; on a CPU, which may be shared, this process's."""
    if not has_gpu():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(sampler: Sampler, model: torch.nn.Module, *, rounds: int) -> dict[str, float]:
    """Return median seconds by part."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, is_watched in (("weights alone", False), ("weights, with the learner's checksum", True)):
            sampler.sleep()
            sent = FingerprintBuilder(dtype=sampler.dtype, quantization=sampler.quantization)
            weights = model.named_parameters()
            begun = finish()
            sampler.load_weights(sent.watch(weights) if is_watched else weights, version=1)
            expected: Fingerprint = sent.result()
            seconds[name].append(finish() - begun)
        begun = finish()
        check_fresh(sampler, expected)
        seconds["the engine's checksum"].append(finish() - begun)
    return {name: statistics.median(of_part) for name, of_part in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder (default: a random model)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or build_tiny_model(Path(folder, "model"), **HUNDRED)
        model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
        model = model.to(default_device()).requires_grad_(False)
        builder = PromptBuilder(path, template=TEMPLATES["think_box"], max_pixels=100_352)
        sampler = make_sampler(
            "vllm",
            EngineSettings(model_path=str(path), builder=builder, max_model_len=512, batch_size=8, dtype=dtype),
        )
        measured = measure(sampler, model, rounds=options.rounds)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e6
    print(f"\n{size:,.0f} MB of weights\n\n| part | seconds |\n|---|---|")
    for name, value in measured.items():
        print(f"| {name} | {value:.2f} |")


if __name__ == "__main__":
    main()
