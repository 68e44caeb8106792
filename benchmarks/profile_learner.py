"""What an optimizer step of ours consists of: the share of each kind of operation, by torch's profiler.

    OMP_NUM_THREADS=1 python benchmarks/profile_learner.py "100m 1000 8 300"      # model prompt G tokens

The points are versus_trl.py's. Needs none of TRL.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from floor import matrix_rate
from torch.profiler import ProfilerActivity, profile
from versus_trl import Point, build_models, our_step

KINDS = {
    "matrix products": ("mm", "addmm", "bmm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "optimizer": ("_fused_adamw_",),
}


def kind_of(operation: str) -> str:
    name = operation.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names), "all else, element by element")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", nargs="?", default="100m 1000 8 300")
    model, *numbers = parser.parse_args().point.split()
    point = Point(model, *map(int, numbers))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        build_models(Path(name), {point.model})
        step = our_step(point, Path(name))
        step()
        begun = time.process_time()
        step()
        seconds = time.process_time() - begun
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
    spent: Counter[str] = Counter()
    for one in profiled.key_averages():
        spent[kind_of(one.key)] += one.self_cpu_time_total
    print(f"{point}: {seconds:.1f} CPU s a step; matrix products do {matrix_rate() / 1e9:.0f} G operations a second")
    for kind, time_spent in spent.most_common():
        print(f"{kind:<30}{100 * time_spent / spent.total():>6.1f} %")


if __name__ == "__main__":
    main()
