"""Our losses against TRL's, on the same random log-probs: values, gradients and clip counts.

    uv pip install trl==1.16        # a development dependency of this file alone
    python perf/versus_trl_losses.py

TRL's own GRPOTrainer._compute_loss is called on a trainer object that holds its settings and nothing
else; where it would ask the model for log-probs it gets the ones that we sampled. Compared are the rules
whose formula in TRL is the paper's: grpo, dr_grpo, dapo, gspo, luspo, cispo, and the KL term (under
token means, which is where the two agree by definition). BA and HA-DW have no counterpart there.
Float64; one line per rule, and a non-zero exit if a value or a gradient differs by more than 1e-10.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_rl.algorithms import ALGORITHMS, Algorithm
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.types import LossInputs

TOLERANCE = 1e-10
GROUPS, RESPONSES, MAX_TOKENS = 3, 4, 20
KL_COEF = 0.1
# rule -> TRL's loss_type and importance_sampling_level
TRL_NAMES = {
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "gspo": ("grpo", "sequence"),
    "luspo": ("luspo", "sequence"),
    "cispo": ("cispo", "token"),
}


@dataclass(frozen=True)
class Batch:
    """A random mini-batch, responses padded to [N, MAX_TOKENS]."""

    lengths_N: Tensor
    mask_NT: Tensor
    logp_NT: Tensor
    old_NT: Tensor
    reference_NT: Tensor
    entropy_NT: Tensor
    advantages_N: Tensor


def random_batch(seed: int, *, spread: float) -> Batch:
    """Make random log-probs whose ratios to the old ones have about this spread: some clip and some do not."""
    rng = np.random.default_rng(seed)
    num = GROUPS * RESPONSES
    lengths = rng.integers(1, MAX_TOKENS + 1, size=num)
    shape = (num, MAX_TOKENS)
    logp = rng.normal(-1.5, 0.5, shape)
    parts = (
        lengths,
        np.arange(MAX_TOKENS) < lengths[:, None],
        logp,
        logp - rng.normal(0, spread, shape),
        logp + rng.normal(0, 0.2, shape),
        rng.uniform(0, 2, shape),
        rng.normal(size=num),
    )
    return Batch(*(torch.from_numpy(part) for part in parts))


def ours(rule: Algorithm, batch: Batch, kl_coef: float) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return our loss, its gradient [N, T], and the sums for the metrics."""
    logp_NT = batch.logp_NT.clone().requires_grad_()
    shape = (GROUPS, RESPONSES)
    weights_PG = token_weights(
        rule.aggregation,
        batch.lengths_N.numpy().reshape(shape),
        batch.advantages_N.numpy().reshape(shape),
        max_tokens=MAX_TOKENS,
    )
    inputs = LossInputs(
        old_logp_K=batch.old_NT[batch.mask_NT],
        sampler_logp_K=None,
        response_K=torch.arange(len(batch.lengths_N)).repeat_interleave(batch.lengths_N),
        lengths_n=batch.lengths_N,
        advantages_n=batch.advantages_N,
        weights_n=torch.from_numpy(weights_PG.ravel()),
        mean_weight=1 / batch.lengths_N.sum().double(),
        reference_logp_K=batch.reference_NT[batch.mask_NT] if kl_coef else None,
    )
    factors = {
        "ratio": rule.ratio,
        "surrogate": rule.surrogate,
        "clip_low": rule.clip_low,
        "clip_high": rule.clip_high,
    }
    loss, sums = policy_loss(
        logp_NT[batch.mask_NT], batch.entropy_NT[batch.mask_NT], inputs, **factors, cap=2.0, kl_coef=kl_coef
    )
    (gradient_NT,) = torch.autograd.grad(loss, logp_NT)
    return float(loss.detach()), gradient_NT, sums


def trls(name: str, rule: Algorithm, batch: Batch, kl_coef: float) -> tuple[float, Tensor, dict[str, float]]:
    """Return the same through TRL's function, and its metrics."""
    from accelerate import Accelerator
    from trl import GRPOTrainer

    loss_type, level = TRL_NAMES[name]
    logp_NT = batch.logp_NT.clone().requires_grad_()

    class Given(GRPOTrainer):
        def __init__(self) -> None:  # the parts that _compute_loss reads, and no model
            settings: dict[str, Any] = {
                "accelerator": Accelerator(cpu=True),
                "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
                "model": SimpleNamespace(training=True),
                "current_gradient_accumulation_steps": 1,
                "_metrics": defaultdict(lambda: defaultdict(list)),
                "loss_type": loss_type,
                "importance_sampling_level": level,
                "epsilon_low": rule.clip_low,
                # TRL's CISPO takes the bound itself, its clip the distance from 1
                "epsilon_high": 1 + rule.clip_high if loss_type == "cispo" else rule.clip_high,
                "max_completion_length": MAX_TOKENS,
                "beta": kl_coef,
                "top_entropy_quantile": 1.0,
                "off_policy_mask_threshold": None,
                "use_vllm": False,
                "aux_loss_enabled": False,
                "_entropy_bonus_enabled": False,
            }
            for key, value in settings.items():
                object.__setattr__(self, key, value)

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return logp_NT, batch.entropy_NT, None

    mask = batch.mask_NT.long()
    trainer = Given()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": batch.advantages_N,
            "old_per_token_logps": batch.old_NT,
            "ref_per_token_logps": batch.reference_NT,
            "num_items_in_batch": mask.sum(),
        },
    )
    (gradient_NT,) = torch.autograd.grad(loss, logp_NT)
    metrics = {key: values[0] for key, values in trainer._metrics["train"].items()}
    return float(loss.detach()), gradient_NT, metrics


def compare(name: str, *, seed: int, kl_coef: float = 0.0) -> tuple[float, float, float, float]:
    """Return our loss, its difference from TRL's, the gradients' difference over their norm, and the clip share."""
    rule = ALGORITHMS[name]
    batch = random_batch(seed, spread=0.3 if rule.ratio == "token" else 3e-3)
    value, gradient, sums = ours(rule, batch, kl_coef)
    other, other_gradient, _ = trls(name, rule, batch, kl_coef)
    gap = float((gradient - other_gradient).norm() / other_gradient.norm())
    clipped = float(sums["clipped_low"] + sums["clipped_high"]) / float(sums["tokens"])
    return value, abs(value - other) / max(abs(other), 1e-12), gap, clipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="random batches of each rule")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # TRL's, about versions of vLLM, which is not used here
    try:
        import trl
    except ImportError:
        print("this comparison needs trl: uv pip install trl==1.16", file=sys.stderr)
        return 2
    print(f"TRL {trl.__version__}, {options.seeds} random batches of {GROUPS} x {RESPONSES} responses each")
    print(f"{'rule':<14}{'value differs':>14}{'gradient differs':>18}{'clipped':>10}")
    worst = 0.0
    for name, kl_coef in [*((name, 0.0) for name in TRL_NAMES), ("dapo", KL_COEF)]:
        differences = np.array([compare(name, seed=seed, kl_coef=kl_coef) for seed in range(options.seeds)])
        _, value, gradient, clipped = differences.max(axis=0)
        label = f"{name} + KL" if kl_coef else name
        print(f"{label:<14}{value:>14.1e}{gradient:>18.1e}{clipped:>10.0%}")
        worst = max(worst, value, gradient)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
