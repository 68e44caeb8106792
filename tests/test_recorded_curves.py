"""Short training runs against recorded curves: loss, gradient norm and mean reward of every step.

The curves are in recorded_curves.json. After a change that is meant to alter them, record them again:

    OMP_NUM_THREADS=1 python -m tests.test_recorded_curves tests/recorded_curves.json
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
    """Train the untrained tiny model for four steps of two mini-batches; its own reward gives every group a signal."""
    run = toys.train_run(
        f"curve-{rule}",
        model={"path": str(toys.random_model)},
        algorithm=RULES[rule],
        reward={"function": "tests.helpers.own_reward.letter_share", "allow_function": True},
    )
    return {name: [record[name] for record in run.metrics()] for name in NAMES}


@pytest.mark.parametrize("rule", RULES)
def test_a_short_training_repeats_its_recorded_curve(toys: Toys, rule: str) -> None:
    recorded = json.loads(RECORDED.read_text())[rule]
    curves = train_curves(toys, rule)
    for name in NAMES:
        assert curves[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5), name


def record(out: Path) -> None:
    from vlm_rl.data_prep.toy import tokenizer_texts
    from vlm_rl.toy.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as name, Runner(Path(name)) as runner:
        folder = Path(name)
        model = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=tokenizer_texts())
        train = toy_set(folder / "train", count=12, split="train")
        toys = Toys(folder, train, train, model, model, runner)
        curves = {rule: train_curves(toys, rule) for rule in RULES}
    out.write_text(json.dumps(curves) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
