"""Short training runs against recorded curves: loss, gradient norm and mean reward of every step.

The curves are in recorded_curves.json. After a change that is meant to alter them, record them again:

    OMP_NUM_THREADS=1 python -m tests.whole_runs.test_recorded_curves tests/whole_runs/recorded_curves.json

Another processor sums float32 in a different order. With SSE4.2 kernels in place of AVX-512 ones
(ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41) losses of 5e-4 to 1 move by at
most 2.7e-7, gradient norms of 1 to 30 by at most 5e-7 of themselves, and rewards not at all. The tolerance is twenty
times that. A reward moves only where rounding changes which token is drawn: with at most 896 tokens a run, and
probabilities that are off by 1e-6, about once in a thousand processors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy_runs import Runner, Toys, toy_set

RECORDED = Path(__file__).with_name("recorded_curves.json")
NAMES = ("loss", "grad_norm", "reward")
RULES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "luspo": {"name": "luspo"},
    "ba-hadw": {"name": "ba", "hadw": {"enabled": True}},
}
Curves = dict[str, list[float]]


def train_curves(toys: Toys, rule: str) -> Curves:
    """Train the untrained tiny model for four steps. The reward, a share of letters, gives every group a signal."""
    run = toys.train_run(
        f"curve-{rule}",
        model={"path": str(toys.random_model)},
        algorithm=RULES[rule],
        reward={"function": "tests.helpers.own_reward.letter_share", "allow_function": True},
    )
    return {name: [record[name] for record in run.metrics()] for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_short_training_repeats_its_recorded_curve(toys: Toys, rule: str) -> None:
    """Compare losses, gradient norms and rewards; the module's docstring derives the tolerance."""
    recorded = json.loads(RECORDED.read_text())[rule]
    curves = train_curves(toys, rule)
    for name in NAMES:
        assert curves[name] == pytest.approx(recorded[name], rel=1e-5, abs=5e-6), name


def record_curves(out: Path) -> None:
    """Train every rule from the untrained tiny model and write the curves."""
    from vlm_rl.toy.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as name, Runner(Path(name)) as runner:
        folder = Path(name)
        model = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
        train = toy_set(folder / "train", count=12, split="train")
        toys = Toys(folder, train, train, model, model, runner)
        curves = {rule: train_curves(toys, rule) for rule in RULES}
    out.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    record_curves(Path(sys.argv[1]))
