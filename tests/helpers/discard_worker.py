"""A learner whose update fails in a pass or in a reduction of gradients, and that forgets its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.helpers.learner_worker import Case, loss_function
from vlm_rl.config import LoraConfig
from vlm_rl.distributed import init_ranks

OFFLOAD = {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}
SMALL_BUCKETS = {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 2000}}}  # most parameters are larger
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # what fails, of the second row or for the second time; the learner
    "ZeRO 0": ("backward", {"stage": 0}),
    "ZeRO 1, bfloat16": ("backward", {"stage": 1, "dtype": torch.bfloat16}),
    "ZeRO 2, checkpointing": ("backward", {"stage": 2, "checkpointing": True}),
    "ZeRO 2, bfloat16": ("forward", {"stage": 2, "dtype": torch.bfloat16}),
    "ZeRO 2, offload": ("forward", {"stage": 2, **OFFLOAD}),
    "ZeRO 2, small buckets": ("reduction", {"stage": 2, **SMALL_BUCKETS}),
    "ZeRO 3, checkpointing": ("backward", {"stage": 3, "checkpointing": True}),
    "ZeRO 3, bfloat16, adapters": ("forward", {"stage": 3, "dtype": torch.bfloat16, "lora": LoraConfig(rank=3)}),
}


def weights_after(model: Path, settings: dict[str, Any], failure: str | None) -> dict[str, Tensor]:
    """Return the weights after three updates, the second of which fails once before."""
    case = Case(model, optimizer="adamw", lr_by_part={"tower": 1e-4}, **settings)
    rows, others = case.rows(budget=120, groups=case.groups[:4]), case.rows(budget=120, groups=case.groups[1:])
    case.learner.update(rows, loss_function)
    if failure is not None:
        with failing(case, failure):
            try:
                case.learner.update(rows, loss_function)
                raise AssertionError("memory did not end")
            except torch.OutOfMemoryError:
                pass
        case.learner.discard_gradients()
    case.learner.update(others, loss_function)
    case.learner.update(rows, loss_function)
    weights = case.weights()
    case.learner.engine.destroy()
    return weights


@contextmanager
def failing(case: Case, failure: str) -> Iterator[None]:
    """Let memory end when the first layer's pass, or the reduction of a bucket, begins for the second time."""
    calls = count(1)

    def fail(*_: object) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("injected")

    if failure == "reduction":
        zero = case.learner.engine.optimizer
        average = zero.average_tensor

        def average_tensor(*args: Any) -> None:
            fail()
            average(*args)

        with patch.object(zero, "average_tensor", average_tensor):
            yield
        return
    layer = case.policy.model.model.language_model.layers[0].mlp
    hook = layer.register_forward_pre_hook if failure == "forward" else layer.register_full_backward_pre_hook
    handle = hook(fail)
    yield
    handle.remove()


def main(model: str, out: str) -> int:
    """Write down whether the weights are those of a learner whose updates did not fail, by the names of WAYS."""
    init_ranks()
    result = {}
    for name, (failure, settings) in WAYS.items():
        expected = weights_after(Path(model), settings, None)
        weights = weights_after(Path(model), settings, failure)
        result[name] = all(torch.equal(tensor, expected[key]) for key, tensor in weights.items())
    torch.save(result, out)
    return 0
