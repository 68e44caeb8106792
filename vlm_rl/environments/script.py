"""Episodes whose turns are written beforehand: traces of a tool's use for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.environments.host import EpisodeHost
from vlm_rl.types import Problem, Prompt, Rollout, Turn


def play(
    host: EpisodeHost, builder: PromptBuilder, problem: Problem, prompt: Prompt, texts: Sequence[str]
) -> Rollout:
    """Return the episode in which the policy writes these turns, and the environment answers all but the last.

    Args:
        host: of the environment.
        builder: the prompt builder of the model.
        problem: of the episode.
        prompt: of the problem, as the host builds it.
        texts: the turns, the template's prefill included.

    Raises ValueError if the environment ends the episode before the last turn.
    """
    episode = host.episodes([problem], seed=0, step=0).open(0, 0, prompt)
    turns: list[Turn] = []
    parts: list[np.ndarray] = []
    for number, text in enumerate(texts):
        ids = builder.encode_response(text)
        parts.append(ids)
        turn = Turn(len(ids), builder.decode(ids))
        if number + 1 < len(texts):
            answer = episode.answer(turn.text, ids).result()
            if isinstance(answer, str):
                raise ValueError(f"problem {problem.id!r}: the environment ends the episode at turn {number + 1}")
            observation, observed, _ = answer
            turn = replace(turn, observation=observation, observed=observed)
        turns.append(turn)
    turns[-1] = replace(turns[-1], ending="done")
    ids = np.concatenate(parts)
    logprobs = np.zeros(len(ids), np.float32)
    return Rollout(problem.id, 0, ids, logprobs, turns[-1].text, "stop", 0, turns=tuple(turns), start=prompt.start)
