"""The gradient of a run's next mini-batch, in several ways: is it right on this machine, and the same again?

    python perf/run_gradient.py runs/quickstart/config.yaml model.path=runs/quickstart/checkpoints/step-000020

The mini-batch is sampled by transformers, and graded. The policy then computes its gradient from the same rows. The
reference is float32. In bfloat16 it is computed twice, the second time with NaN in half of the card's free memory, so
that a kernel which reads what nobody has written shows. *Dense*, on a GPU, is bfloat16 without flash attention. The
tables have norms, and distances from the reference over its norm: of the whole gradient, then of the parameters that
are furthest off.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from vlm_rl.config import Config, load_config
from vlm_rl.devices import has_gpu
from vlm_rl.learner.attention import shared_prefix
from vlm_rl.learner.learner import LossFunction
from vlm_rl.learner.loading import policy_of
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import load_model
from vlm_rl.rollouts.collect import collect
from vlm_rl.session.mini_batches import pack
from vlm_rl.session.recorder import Timings
from vlm_rl.session.run import Run
from vlm_rl.session.session import Session
from vlm_rl.session.token_credit import weigh
from vlm_rl.train import loss_of, split

Gradient = dict[str, Tensor]  # by parameter, float32, on the CPU


def sample(config: Config) -> tuple[list[PackedRow], LossFunction, tuple[int, ...], torch.device]:
    """Sample and grade a batch; return the rows of its first mini-batch, the loss, the banned ids and the device."""
    with Run(config, resume=False) as run, Session(config, run) as session:
        session.sync_weights()
        timings = Timings(session.recorder.phase)
        batch = collect(
            session.collecting, step=0, belief=session.belief, phase=timings.phase, history=session.history
        )
        parts = split(batch.groups, config.train.mini_batch_prompts)
        rows = pack(session, batch, parts, [weigh(session, part) for part in parts], config.train.micro_batch_tokens)
        return rows[0], loss_of(session), tuple(session.builder.banned_ids), session.learner.device


def gradient(
    config: Config,
    rows: list[PackedRow],
    loss: LossFunction,
    banned_ids: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    poison: bool = False,
) -> Gradient:
    """Return the gradient of a mini-batch, row by row, each parameter's summed in float32."""
    model = load_model(config.model.path, dtype=dtype, device=device, rows=config.model.rows)
    policy = policy_of(model, config.model, banned_ids=banned_ids, temperature=config.rollout.temperature)
    total: Gradient = {}
    for row in rows:
        if poison and has_gpu():
            torch.cuda.empty_cache()
            numbers = torch.cuda.mem_get_info()[0] // 2 // torch.bfloat16.itemsize  # half of the free memory
            torch.full((numbers,), torch.nan, dtype=torch.bfloat16, device=device)  # freed at once, kept for reuse
        row = row.to(device)
        logp_K, entropy_K = policy(row)
        loss(logp_K, entropy_K, row.loss)[0].backward()
        for name, parameter in policy.model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad.float().cpu()
        policy.zero_grad()
    return total


def norm(gradient: Gradient) -> float:
    return float(torch.linalg.vector_norm(torch.stack([part.double().norm() for part in gradient.values()])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"out={folder}/run", "rollout.sampler=transformers", "eval.every=0"]
        config = load_config(options.config, [*options.overrides, *fixed])
        compute = partial(gradient, config, *sample(config))
    without_flash = mock.patch.object(shared_prefix, "takes_flash", lambda *_: False)
    ways = [
        ("float32", torch.float32, nullcontext(), False),
        ("bfloat16", torch.bfloat16, nullcontext(), False),
        ("bfloat16, memory full of NaN", torch.bfloat16, nullcontext(), True),
        *[("bfloat16, dense", torch.bfloat16, without_flash, False)] * has_gpu(),
    ]
    print("\n| way | norm | distance from float32 |\n|---|---|---|")
    wanted: Gradient = {}
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    for way, dtype, context, poison in ways:
        with context:
            found = compute(dtype, poison=poison)
        wanted = wanted or found
        gaps = {name: found[name] - part for name, part in wanted.items()}
        print(f"| {way} | {norm(found):.4g} | {norm(gaps) / norm(wanted):.2e} |", flush=True)
        for name, gap in gaps.items():
            worst[name][way] = float(gap.norm()) / norm(wanted)
    print(f"\n| parameter | {' | '.join(way for way, *_ in ways[1:])} |\n|{'---|' * len(ways)}")
    for name, of_way in sorted(worst.items(), key=lambda item: -max(item[1].values()))[:8]:
        print(f"| {name} | {' | '.join(f'{of_way[way]:.2e}' for way, *_ in ways[1:])} |")


if __name__ == "__main__":
    main()
