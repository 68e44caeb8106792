"""The how-tos of CONTRIBUTING.md: their diffs apply to the project as it is, and what they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

USE = r"""
import numpy as np, torch, vlm_rl
from pathlib import Path

assert Path(vlm_rl.__file__).parents[1] == Path.cwd()

from vlm_rl.rewards.function_worker import load_reward_function
from vlm_rl.types import Grade, Problem

row = vlm_rl.ALGORITHMS["dr_gspo"]
advantages = vlm_rl.compute_advantages(row.advantage, np.array([[1.0, 0.0]]))
weights = vlm_rl.token_weights(row.aggregation, np.array([[1, 2]]), advantages, max_tokens=4)
inputs = vlm_rl.LossInputs(
    old_logp_K=None, sampler_logp_K=None, response_K=torch.tensor([0, 1, 1]), lengths_n=torch.tensor([1, 2]),
    advantages_n=torch.tensor(advantages.ravel()), weights_n=torch.tensor(weights.ravel()),
)
logp = torch.zeros(3, requires_grad=True)
loss, _ = vlm_rl.policy_loss(
    logp, torch.zeros(3), inputs, ratio=row.ratio, surrogate=row.surrogate, clip_low=row.clip_low,
    clip_high=row.clip_high, cap=2.0,
)
loss.backward()
# N = 2, L_max = 4: a token of the right answer weighs 1/8 x 0.5, one of the wrong answer 1/8 x -0.5
assert np.allclose(logp.grad, [-1 / 16, 1 / 16, 1 / 16])

reward = load_reward_function("my_rewards.short_and_right")
problem = Problem("p", "?", (), "1", "integer")
right, wrong = Grade("correct", "1", "number", ""), Grade("wrong", "2", "number", "")
assert [reward(problem, "", *case) for case in ((right, 200), (right, 201), (wrong, 9))] == [1, 0, 0]

from vlm_rl.config import RewardConfig
from vlm_rl.grading.grader import Grader
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Prompt, Rollout

none = np.zeros(0, dtype=np.int32)
rollout = Rollout("p", 0, none, none, "maybe, or maybe not", "stop", 0)
item = (problem, Prompt("p", "", "", none, none, (), {}), rollout)
with Grader(workers=1) as grader:
    for config, parts in ((RewardConfig(hedging=0.25), {"hedging": -0.5}), (RewardConfig(), {})):
        scored = RewardFunction(config, template=TEMPLATES["plain"], max_tokens=4096, grader=grader).score([item])
        assert scored[0].parts == {"accuracy": 0, "format": 0, "overlong": 0, **parts}

Path("gold.jsonl").write_text('{"id": "1", "problem": "?", "answer": "\\\\frac{1}{2}"}')
Path("mine.jsonl").write_text('{"id": "1", "response": "\\\\boxed{0.5}"}')
assert vlm_rl.score("hmmt25", "mine.jsonl", annotations="gold.jsonl")["scores"]["accuracy"]["score"] == 1
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with every diff of CONTRIBUTING.md applied."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("vlm_rl", "data_prep", "demo", "tests"):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "recorded")
        )
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(diffs) == 5
    for diff in diffs:
        run(["git", "apply", "-"], copy, diff)
    return copy


def run(command: Sequence[str], folder: Path, text: str = "") -> None:
    """Run a command in a folder. What Python finds besides the installed packages is this folder: no PYTHONPATH."""
    variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=variables, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_algorithm_the_reward_and_the_benchmark_work(changed: Path) -> None:
    run([sys.executable, "-c", USE], changed)  # -c and -m search the working directory, as the how-to says


@pytest.mark.slow
def test_the_projects_own_tests_hold_the_protocol_of_the_new_benchmark(changed: Path) -> None:
    run([sys.executable, "-m", "pytest", "-q", "tests/evaluation/test_protocols.py"], changed)


@pytest.mark.slow
def test_the_projects_own_tests_hold_the_new_algorithm_and_the_new_family(changed: Path) -> None:
    """The losses of the algorithm, and the log-probs of the model family."""
    words = ["dr_gspo or published or olmo2", "tests/test_losses.py", "tests/learner/test_families.py"]
    run([sys.executable, "-m", "pytest", "-q", "-k", *words], changed)
