"""What an optimizer step of ours consists of, and what it keeps for the backward pass.

    OMP_NUM_THREADS=1 python perf/profile_learner.py "100m 1000 8 300"      # model prompt G tokens
    OMP_NUM_THREADS=1 python perf/profile_learner.py "tiny 1000 8 300" --kept

The points are versus_trl.py's; TRL is not needed. The shares of each kind of operation are torch's profiler's.
With --kept it gives instead the size of the tensors that autograd saves in a forward pass, weights apart, in
float32 and bfloat16, with model.layer_patches on and off.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from floor import matrix_rate
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from versus_trl import Point, build_models, groups_of, our_step
from weighed_groups import pack

from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.row_plan import plan_rows

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


def kept(point: Point, folder: Path, dtype: torch.dtype, *, patched: bool) -> float:
    """Return the MiB that autograd saves in the forward pass of one row, weights apart."""
    model = load_model(folder / point.model, dtype=dtype)
    policy = Policy(model, banned_ids=(), temperature=1.0, layer_patches=patched)
    ((chunks,),) = plan_rows([point.prompt], [point.shape.lengths], budget=2**20)
    row = pack(chunks, groups_of(point, folder), partial(rope_positions, model))
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(row)  # alive to the end: nothing saved is freed and its address used again
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    del outputs
    return sum(storages[pointer] for pointer in storages.keys() - weights) / 2**20


def print_shares(point: Point, folder: Path) -> None:
    step = our_step(point, folder)
    step()
    begun = time.process_time()
    step()
    seconds = time.process_time() - begun
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    spent: Counter[str] = Counter()
    for average in profiled.key_averages():
        spent[kind_of(average.key)] += average.self_cpu_time_total
    print(f"{point}: {seconds:.1f} CPU s a step; matrix products do {matrix_rate() / 1e9:.0f} G operations a second")
    for kind, time_spent in spent.most_common():
        print(f"{kind:<30}{100 * time_spent / spent.total():>6.1f} %")


def print_kept(point: Point, folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (kept(point, folder, dtype, patched=patched) for patched in (True, False))
        print(f"kept for the backward pass in {dtype}: {ours:.0f} MiB, with transformers' own layers {theirs:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", nargs="?", default="100m 1000 8 300")
    parser.add_argument(
        "--kept", action="store_true", help="print the tensors kept for the backward pass, not the time"
    )
    options = parser.parse_args()
    point = Point.parse(options.point)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        build_models(Path(name), {point.model})
        (print_kept if options.kept else print_shares)(point, Path(name))


if __name__ == "__main__":
    main()
