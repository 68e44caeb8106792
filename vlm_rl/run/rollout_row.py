"""The row of one training response: the only place that names the columns of rollouts/step-*.parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa

from vlm_rl.run.run_files import for_readers
from vlm_rl.run.turn_record import turns_column
from vlm_rl.types import Group


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutRow:
    """One response of a training step; its fields are the columns, in their order."""

    step: int
    attempt: int
    prompt_id: str
    response_index: int
    text: str  # decoded response, without the prompt's prefill
    token_ids: Sequence[int] | np.ndarray
    logprobs: Sequence[float] | np.ndarray  # the sampler's
    reward: float
    reward_accuracy: float
    reward_format: float
    reward_overlong: float
    advantage: float
    verdict: str
    extracted: str | None
    path: str
    reason: str
    length: int  # generated tokens, the end-of-sequence token included
    stop_reason: str
    policy_version: int
    turns: str = ""  # of an episode (run.turn_record); "": there is no environment
    tokens: Sequence[str] | None = None  # the text of each token, if visual_dependence is stored
    visual_dependence: Sequence[float] | np.ndarray | None = None  # S_t of each token, of a few responses


_COLUMN_TYPES: dict[Any, pa.DataType] = {
    int: pa.int32(),
    float: pa.float64(),
    str: pa.string(),
    str | None: pa.string(),
    Sequence[int] | np.ndarray: pa.list_(pa.int32()),
    Sequence[float] | np.ndarray: pa.list_(pa.float32()),
    Sequence[float] | np.ndarray | None: pa.list_(pa.float32()),
    Sequence[str] | None: pa.list_(pa.string()),
}
_HINTS = get_type_hints(RolloutRow)

ROLLOUT_SCHEMA = pa.schema(
    [
        (field.name, pa.int64() if field.name == "policy_version" else _COLUMN_TYPES[_HINTS[field.name]])
        for field in fields(RolloutRow)
    ]
)
READ_ROLLOUT_SCHEMA = for_readers(ROLLOUT_SCHEMA, _HINTS, gaps=("turns",))
LATER_ROLLOUT_COLUMNS = ("turns", "tokens", "visual_dependence")


@dataclass(frozen=True, slots=True, eq=False)
class TokenLooks:
    """How much the image changes each token of one response."""

    tokens: Sequence[str]
    dependence: np.ndarray  # S_t, float64


def rollout_rows(
    groups: Sequence[Group],
    *,
    step: int,
    attempt: int,
    looks: Mapping[tuple[int, int], TokenLooks] = MappingProxyType({}),
) -> list[RolloutRow]:
    """Return a rollout batch as it is stored, in the order of the groups.

    `looks` are those of a few responses, by group and response.
    """
    return [
        RolloutRow(
            step=step,
            attempt=attempt,
            prompt_id=group.problem.id,
            response_index=rollout.index,
            text=rollout.text,
            token_ids=rollout.ids,
            logprobs=rollout.logprobs,
            reward=reward.total,
            reward_accuracy=float(reward.parts.get("accuracy", 0.0)),
            reward_format=float(reward.parts.get("format", 0.0)),
            reward_overlong=float(reward.parts.get("overlong", 0.0)),
            advantage=float(advantage),
            verdict=reward.grade.verdict,
            extracted=reward.grade.extracted,
            path=reward.grade.path,
            reason=reward.grade.reason,
            length=len(rollout.ids),
            stop_reason=rollout.stop_reason,
            policy_version=rollout.policy_version,
            turns=turns_column(rollout),
            tokens=None if (found := looks.get((place, rollout.index))) is None else found.tokens,
            visual_dependence=None if found is None else found.dependence,
        )
        for place, group in enumerate(groups)
        for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages_G, strict=True)
    ]
