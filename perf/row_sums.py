"""What the host does for a row of an update: with DeepSpeed's sums over the rows, and with ours on one rank.

    OMP_NUM_THREADS=1 python perf/row_sums.py        # a minute on an idle core

A model with the layers of a Qwen2.5-VL-3B, 824 tensors, so narrow that there is little to compute; bfloat16, one
rank, no layer patched. All take turns. A row's milliseconds of the processor are a third of what an update of four
rows takes beyond one of a single row, as a median over the rounds. *Alone* is the row without DeepSpeed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from gpu_learner import CLIP, IMAGE, SIZES, make_config, make_groups
from transformers import Qwen2_5_VLForConditionalGeneration
from weighed_groups import pack

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import rope_positions
from vlm_rl.distributed import init_ranks
from vlm_rl.learner import learner as learner_module
from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy
from vlm_rl.losses import policy_loss

ROUNDS, ROWS, THEIRS = 25, 4, "ZeRO 2, DeepSpeed's"
loss_function = partial(policy_loss, **CLIP)


def make_policy() -> Policy:
    """Return the narrow model, with the same weights each time."""
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        make_config("narrow"),
        dtype=torch.bfloat16,
        attn_implementation={"text_config": attention.NAME, "vision_config": "sdpa"},
    )
    return Policy(model, banned_ids=(IMAGE,), temperature=1.0, layer_patches=False)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds of the processor that a call takes."""
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def main() -> None:
    init_ranks()
    torch.set_num_threads(1)
    make = partial(Learner, total_optimizer_steps=100)
    learners = {"ZeRO 2, ours": make(make_policy(), TrainConfig(zero_stage=2))}
    with patch.object(learner_module, "are_summed_here", return_value=False):
        learners[THEIRS] = make(make_policy(), TrainConfig(zero_stage=2))
    learners["ZeRO 1, DeepSpeed's"] = make(make_policy(), TrainConfig(zero_stage=1))
    alone = make_policy()
    shape = {"prompts": ROWS, "responses": 2, "tokens": 4, "side": 2, "text": 4}
    groups = make_groups(SIZES["narrow"]["vocabulary"], **shape, shortest=1.0)
    rows = [pack([Chunk(index, (0, 1))], groups, partial(rope_positions, alone.model)) for index in range(ROWS)]

    def row_alone() -> None:
        logp_K, entropy_K = alone(rows[0])
        loss_function(logp_K, entropy_K, rows[0].loss)[0].backward()

    def row_of(learner: Learner) -> float:
        many = milliseconds(lambda: learner.update(rows, loss_function))
        return (many - milliseconds(lambda: learner.update(rows[:1], loss_function))) / (ROWS - 1)

    measured: dict[str, list[float]] = {name: [] for name in ("alone", *learners)}
    for number in range(ROUNDS + 1):
        found = (milliseconds(row_alone), *map(row_of, learners.values()))
        for name, value in zip(measured, found, strict=True):
            measured[name] += [value] * (number > 0)  # the first warms up
    print("| | host, ms a row | of DeepSpeed's in ZeRO 2 |\n|---|---|---|")
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, median in medians.items():
        print(f"| {name} | {median:.0f} | {median / medians[THEIRS]:.2f} |")
    ours, theirs = (learners[name].policy.parameters() for name in ("ZeRO 2, ours", THEIRS))
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    print(f"the weights after {2 * (ROUNDS + 1)} updates in ZeRO 2 {'have the same bits' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
