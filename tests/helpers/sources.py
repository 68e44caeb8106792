"""What a rollout source needs, without a model: problems, prompts of a few tokens, and rewards by a rule."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from tests.helpers.groups import bare_prompt
from vlm_rl.config import Config
from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder
from vlm_rl.rollouts.sampling import GroupSampling
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.types import Grade, Problem, Reward

PROBLEMS = [Problem(str(index), "", (), "", "text") for index in range(12)]
WRONG, RIGHT = (Grade(verdict, None, "test", "") for verdict in ("wrong", "correct"))


def no_phase(name: str) -> AbstractContextManager[None]:
    """Time nothing."""
    return nullcontext()


def sampling_of(config: Config, *, responses: int = 2) -> GroupSampling:
    """Return the parts of a source. Response 1 is right and 0 is wrong; to every third problem both are wrong."""
    reward: Any = SimpleNamespace(
        score=lambda items, **_: [
            Reward({"accuracy": 1.0}, [WRONG, RIGHT][rollout.index if int(problem.id) % 3 else 0])
            for problem, _, rollout in items
        ],
        abort=lambda: None,
    )
    builder: Any = SimpleNamespace(build=lambda problem, start=None: bare_prompt(problem.id))
    params, order = SamplingParams(1.0, 99, responses), PromptOrder(len(PROBLEMS), 0)
    return GroupSampling(config, params, PROBLEMS, builder, reward, order, Ledger())
