"""One rank of test_sharding.py: a model loaded in shards, and a learner on a different number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.learner_worker import Case, banned_ids, five_groups, loss_function
from vlm_rl.config import LoraConfig, TrainConfig
from vlm_rl.distributed import all_gather, init_ranks, rank
from vlm_rl.learner.deepspeed import gathered
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.model_files.adapters import BaseModel

ZERO_3 = TrainConfig(zero_stage=3, lr=1e-3)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether names, dtypes and bits are the same."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def loads(folder: Path) -> dict[str, Any]:
    """Load a model whole and in shards: the share that a rank holds, and what is the same in both."""
    dtype = torch.bfloat16
    whole, sharded = load_model(folder, dtype=dtype), load_model(folder, dtype=dtype, shard_for=ZERO_3)
    parameters: list[Any] = list(sharded.parameters())
    share = sum(p.ds_tensor.numel() for p in parameters) / sum(p.numel() for p in whole.parameters())
    with gathered(parameters, zero_stage=3):
        weights = {name: parameter.detach().clone() for name, parameter in sharded.named_parameters()}
    return {
        "share": share,
        "same_weights": same(weights, dict(whole.named_parameters())),
        "same_buffers": same(dict(sharded.named_buffers()), dict(whole.named_buffers())),
        "same_files": saved(whole, dict(whole.named_parameters())) == saved(sharded, weights),
    }


def saved(model: Any, weights: dict[str, Tensor]) -> dict[str, bytes]:
    """Return the files of the model with these weights; the learner saves in the same way."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=weights)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def trains(folder: Path, dtype: torch.dtype, *, shard: bool, lora: LoraConfig | None) -> dict[str, Any]:
    """Check a model at start-up and take a step."""
    model = load_model(folder, dtype=dtype, shard_for=ZERO_3 if shard else None)
    bans, groups = banned_ids(model.config), five_groups(folder)
    check = SelfCheck(model, [groups[0].prompt, groups[2].prompt], banned_ids=bans, temperature=0.9)
    policy = Policy(model, banned_ids=bans, temperature=0.9)
    if lora is not None:
        policy.add_adapters(lora, base=BaseModel(str(folder), ""), seed=0)
    gap = check.compare(policy, path=folder)
    policy.enable_checkpointing()
    case = object.__new__(Case)
    case.policy, case.groups = policy, groups
    case.learner = Learner(policy, ZERO_3, total_optimizer_steps=1)
    result = case.learner.update(case.rows(budget=200), loss_function)
    weights = case.weights()
    case.learner.engine.destroy()
    return {
        "expected": check.expected,
        "noise": check.noise,
        "gap": gap,
        "loss": result.loss,
        "norm": result.grad_norm,
        "weights": weights,
    }


# -- a different number of ranks --------------------------------------------------------------------

# What a checkpoint is written and read with: two rates make two groups, and a short sub-group cuts ZeRO 3's groups.
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 1, bfloat16": {"stage": 1, "dtype": torch.bfloat16},
    "ZeRO 2": {"stage": 2},
    "ZeRO 2, bfloat16, adapters": {"stage": 2, "dtype": torch.bfloat16, "lora": LoraConfig(rank=3)},
    "ZeRO 3": {"stage": 3, "deepspeed": {"zero_optimization": {"sub_group_size": 50_000}}},
    "ZeRO 3, bfloat16, adapters": {"stage": 3, "dtype": torch.bfloat16, "lora": LoraConfig(rank=3)},
}


def own_state(case: Case) -> dict[str, Tensor]:
    """Return what this rank holds of the optimizer: masters and moments, as they lie in memory."""
    zero = case.learner.engine.optimizer
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    masters = next((getattr(zero, name) for name in names if hasattr(zero, name)), [])
    held = {f"master {n}": master.detach().clone() for n, master in enumerate(masters)}
    for n, state in enumerate(case.learner._optimizer.state.values()):
        held |= {f"{key} {n}": value.clone() for key, value in state.items()}
    return held


def weights_follow(case: Case) -> bool:
    """Return whether the weights of ZeRO 1 and 2 are this rank's masters, rounded."""
    zero = case.learner.engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        masters, weights = zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups
    elif hasattr(zero, "fp32_groups_flat_partition"):
        masters, weights = zero.fp32_groups_flat_partition, zero.bf16_partitioned_groups
    else:
        return True
    mine = [parts[rank()] for parts in weights]
    return all(torch.equal(master.to(weight.dtype), weight) for master, weight in zip(masters, mine, strict=True))


def visit(model: Path, folder: Path, number: int) -> dict[str, Any]:
    """Load what the visit before this one wrote, or take a step in the first visit, and write it again.

    Return what each rank then holds, by the names of WAYS: its state, the whole weights, and `weights_follow`.
    """
    results: dict[str, Any] = {}
    for name, settings in WAYS.items():
        case = Case(model, optimizer="adamw", lr_by_part={"tower": 1e-4}, **settings)
        if number:
            case.learner.load(folder / f"{name} {number - 1}")
        else:
            case.train(case.rows(budget=300, groups=case.groups[:2]), steps=1)
        results[name] = all_gather((own_state(case), case.weights(), weights_follow(case)))
        (folder / f"{name} {number}").mkdir(exist_ok=True)
        case.learner.save(folder / f"{name} {number}")
        case.learner.engine.destroy()
    return results


# Ways whose state goes from one ZeRO stage to the next and back to the first.
CHAINS: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
    "float32": ({}, (0, 2, 3, 1, 0)),
    "bfloat16": ({"dtype": torch.bfloat16}, (1, 3, 1)),
    "adapters": ({"dtype": torch.bfloat16, "lora": LoraConfig(rank=3)}, (2, 3, 2)),
}


def chain(model: Path, folder: Path, settings: Mapping[str, Any], stages: Sequence[int]) -> list[Any]:
    """Take a step in the first stage, and hand its state from stage to stage; return what each rank holds there.

    In the end two stages go on alike: a step is taken from the last state, and the same from what the one before had.
    """
    held: list[Any] = []
    for number, stage in enumerate((*stages, stages[-2])):
        case = Case(model, stage, optimizer="adamw", lr_by_part={"tower": 1e-4}, **settings)
        if number:
            case.learner.load(folder / str(min(number, len(stages)) - 1))
        else:
            case.train(case.rows(budget=300, groups=case.groups[:2]), steps=1)
        held.append((all_gather(own_state(case)), case.weights(), weights_follow(case)))
        if number < len(stages):
            (folder / str(number)).mkdir(exist_ok=True, parents=True)
            case.learner.save(folder / str(number))
        if number >= len(stages) - 1:
            case.train(case.rows(budget=200, groups=case.groups[1:3]), steps=1)
            held.append(case.weights())
        case.learner.engine.destroy()
    return held


def main(models: str, out: str, *what: str) -> int:
    """Write down what `loads` returns of each folder in `models`; with "trains", also what `trains` returns.

    With "visit" and a number, write down what `visit` returns instead, with "chains" what `chain` returns of each.
    """
    init_ranks()
    if "visit" in what:
        result: dict[str, Any] = visit(Path(models) / "qwen2_5_vl", Path(out).parent, int(what[1]))
    elif "chains" in what:
        model, folder = Path(models) / "qwen2_5_vl", Path(out).parent
        result = {name: chain(model, folder / name, *of_chain) for name, of_chain in CHAINS.items()}
    else:
        result = {model.name: loads(model) for model in sorted(Path(models).iterdir())}
    if "trains" in what:
        for name, dtype, lora in (
            ("all weights", torch.float32, None),
            ("adapters", torch.bfloat16, LoraConfig(rank=2, targets=["tower", "q_proj"])),
        ):
            args: Any = Path(models) / "qwen2_5_vl", dtype
            result[name] = [trains(*args, shard=shard, lora=lora) for shard in (False, True)]
    if rank() == 0:
        torch.save(result, out)
    return 0
