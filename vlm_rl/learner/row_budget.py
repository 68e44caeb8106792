"""How many tokens a packed row may have, and an update that is repeated in shorter rows after memory ran out.

Responses grow in training, so memory ends in step 600, not in step 1. On one rank the update is then repeated with
half the tokens a row. On several ranks the others are in the middle of it: the run ends, and a resume takes shorter
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vlm_rl.config import Config, SftConfig
from vlm_rl.devices import OutOfMemoryError, free_gpu_memory, is_out_of_memory
from vlm_rl.distributed import world_size
from vlm_rl.learner.learner import Learner

T = TypeVar("T")


class RowBudget:
    """The most tokens of a row: train.micro_batch_tokens, and half of it once memory has ended.

    budget = RowBudget(config, learner, note, keep)
    result = budget.run(lambda tokens: learner.update(pack(groups, tokens), loss))
    """

    def __init__(
        self, config: Config | SftConfig, learner: Learner, note: Callable[[str], None], keep: Callable[[int], None]
    ) -> None:
        """Begin with the configured tokens.

        Args:
            config: of the run.
            learner: makes the updates.
            note: prints a line.
            keep: makes shorter rows, with which an update has succeeded, the run's own: a resume begins with them.
        """
        self.tokens = config.train.micro_batch_tokens
        self._config, self._learner, self._note, self._keep = config, learner, note, keep

    def run(self, attempt: Callable[[int], T]) -> T:
        """Call `attempt` with the tokens of a row and return its result. If memory runs out, call it once more.

        A second call continues after the last optimizer step of the first: no step is taken twice. Raises
        OutOfMemoryError if memory runs out again, in the optimizer's step, or with rows that cannot be shorter.
        """
        try:
            return attempt(self.tokens)
        except RuntimeError as error:
            shorter = self._config.shorter_rows(self.tokens)
            if not is_out_of_memory(error):
                raise
            if world_size() > 1 or self._learner.is_stepping or shorter is None:
                raise OutOfMemoryError(str(error), row_tokens=self.tokens) from error
        # Outside of the handler: the error holds the frames, and they hold the activations.
        self._learner.discard_gradients()
        free_gpu_memory()
        self._note(
            f"out of memory in an update with rows of up to {self.tokens} tokens: repeating it with {shorter}, which "
            f"later updates use too, and a resume, unless train.micro_batch_tokens={self.tokens} is given to it"
        )
        self.tokens = shorter
        try:
            result = attempt(shorter)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(str(error), row_tokens=shorter) from error
        self._keep(shorter)
        return result
