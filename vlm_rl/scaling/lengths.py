"""The lengths of rollout batches, in tokens: made up like ViRL39K's, or sampled from the groups of a run.

Loads no torch, so that a run that cannot be used is named at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.config import Config
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory

MEAN, LONGEST = 1000, 4096  # tokens of the made-up responses; the mean scales with the longest


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """The tokens of each prompt [P] and of its responses [P][G]."""

    prompts: Sequence[int]
    responses: Sequence[Sequence[int]]

    def mini_batches(self, size: int) -> list[BatchLengths]:
        """Return parts of so many prompts; the last may be smaller."""
        starts = range(0, len(self.prompts), size)
        return [BatchLengths(self.prompts[i : i + size], self.responses[i : i + size]) for i in starts]


def made_up(
    rng: np.random.Generator,
    prompts: int,
    *,
    responses: int = 8,
    mean: float = MEAN,
    longest: int = LONGEST,
    longest_prompt: int | None = None,
    has_image: bool = True,
) -> BatchLengths:
    """Make up a batch with lengths like those of ViRL39K; none of it was measured.

    A prompt has an image of 256 to 1,280 tokens and 50 to 250 tokens of text. Responses are log-normal; how long a
    problem's responses are differs from problem to problem (standard deviation .4 of the logarithm, .5 within it).

    Args:
        rng: of the lengths.
        prompts: how many.
        responses: to each prompt.
        mean: tokens of a response, before they are cut off at `longest`.
        longest: most tokens of a response.
        longest_prompt: most tokens of a prompt, if there is a limit.
        has_image: whether prompts have images.
    """
    text = rng.integers(256, 1281, prompts) * has_image + rng.integers(50, 251, prompts)
    of_problem = rng.normal(0, 0.4, prompts)
    logs = of_problem[:, None] + rng.normal(0, 0.5, (prompts, responses))
    lengths = (mean * np.exp(logs - (0.4**2 + 0.5**2) / 2)).clip(min(20, longest), longest).astype(int)
    return BatchLengths(text.clip(1, longest_prompt).tolist(), lengths.tolist())


def check_measures(config: Config) -> None:
    """Raise UserError for a run whose timing/rollout is not the time that sampling took."""
    rollout = config.rollout
    for key, is_set in (("ahead", rollout.ahead > 0), ("carry_over", rollout.carry_over is not None)):
        if is_set:
            raise UserError(
                f"{config.out}: rollout.{key} is {getattr(rollout, key)}, so its timing/rollout is not the time that "
                "the responses of a step took: name a run without it"
            )
    if isinstance(rollout.servers, str):
        raise UserError(
            f"{config.out}: rollout.servers is the file {rollout.servers}, which does not say how many servers "
            "there were: list them in the run's config.yaml"
        )


def groups_of_run(run: RunDirectory, *, responses: int) -> np.ndarray:
    """Return the lengths [groups, G] of a run's last quarter of stored steps.

    Raises UserError if none are stored.
    """
    steps = run.rollout_steps()
    if not steps:
        raise UserError(f"{run.path} has no rollouts, so no lengths: name a run that has")
    groups = [lengths_of_step(run, step, responses=responses) for step in steps[-(len(steps) // 4 + 1) :]]
    return np.concatenate(groups)


def lengths_of_step(run: RunDirectory, step: int, *, responses: int) -> np.ndarray:
    """Return the lengths [groups, G] of the responses of one step. Raises UserError if groups are not whole."""
    lengths = run.rollouts(step, ["length"])["length"].to_numpy()
    if len(lengths) % responses:
        raise UserError(
            f"{run.path}: step {step} has {len(lengths)} responses, which are not groups of "
            f"rollout.responses_per_prompt = {responses}: name a different run"
        )
    return lengths.reshape(-1, responses)


def of_groups(rng: np.random.Generator, batch: BatchLengths, groups: np.ndarray, *, longest: int) -> BatchLengths:
    """Return the batch with responses as long as those of a run's groups, each sampled whole.

    Where the batch has more or fewer responses to a prompt than the run, they are sampled one by one from a group.

    Args:
        rng: chooses the groups.
        batch: whose prompts are kept.
        groups: [groups, G], tokens of the run's responses.
        longest: most tokens of a response; longer ones are cut.
    """
    size = len(batch.responses[0])
    chosen = groups[rng.integers(0, len(groups), len(batch.prompts))]
    if size != groups.shape[1]:
        chosen = np.stack([rng.choice(group, size) for group in chosen])
    return BatchLengths(batch.prompts, chosen.clip(1, longest).astype(int).tolist())
