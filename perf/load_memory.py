"""Print what a rank holds while it loads a model and starts ZeRO 3: loaded whole on every rank, and in shards.

    OMP_NUM_THREADS=1 python perf/load_memory.py             # a random model of 100 M parameters on 2 ranks

Counted is anonymous memory (RssAnon), at its peak and once the engine has started, above what the process held
before. Pages of the weights' files are not counted: all ranks share them, and the kernel drops them at will.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {"hidden": 768, "layers": 12, "heads": 24, "kv_heads": 8, "mlp": 3072}


def held() -> float:
    """Return this process's anonymous memory in MB."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1e3


def measure(folder: str, how: str) -> None:
    """Load the model on this rank, and print the peak and the growth at the end."""
    from vlm_rl.config import TrainConfig
    from vlm_rl.distributed import all_gather, init_ranks, rank
    from vlm_rl.learner.deepspeed import import_deepspeed, start_engine
    from vlm_rl.learner.policy import load_model

    init_ranks()
    import_deepspeed()
    before, peak, is_done = held(), [0.0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            peak[0] = max(peak[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, dtype=torch.float32, shard_for=TrainConfig(zero_stage=3) if how == "shards" else None)
    engine = start_engine(model, TrainConfig(zero_stage=3))  # shards what is not sharded yet
    gc.collect()
    is_done.set()
    watcher.join()
    assert engine.module is model
    grown = all_gather((peak[0] - before, held() - before))
    if rank() == 0:
        columns = " | ".join(f"{peak:,.0f} / {after:,.0f}" for peak, after in grown)
        print(f"| {how} | {columns} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    from vlm_rl.toy.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = build_tiny_model(Path(scratch) / "model", **SIZES)
        size = (folder / "model.safetensors").stat().st_size / 1e6
        print(f"weights {size:,.0f} MB; MB of each rank, peak / once the engine has started\n")
        print("| load | " + " | ".join(f"rank {n}" for n in range(options.ranks)) + " |")
        print("|---|" + "---|" * options.ranks, flush=True)
        for how in ("whole", "shards"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
            command += [str(options.ranks), __file__, "--measure", str(folder), how]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
            environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once, not into holes
            subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
