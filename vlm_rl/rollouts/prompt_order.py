"""Take prompts in an order that a resumed run continues, and account for each of them in a ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(slots=True)
class PromptOrder:
    """The order in which prompts are taken: a permutation for each epoch, keyed by (seed, epoch), and a cursor.

    There is no other state, so a resumed run continues at the next prompt, on any number of ranks.
    """

    num_problems: int
    seed: int
    cursor: int = 0  # prompts taken since the beginning of the run

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices; at the end of an epoch none is left out or repeated."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, offset = divmod(self.cursor, self.num_problems)
            part = self._permutation(epoch)[offset : offset + count - len(indices)]
            indices += part.tolist()
            self.cursor += len(part)
        return indices

    def upcoming(self, count: int) -> list[int]:
        """Return the indices that the next `take` of so many returns, and take nothing."""
        return replace(self).take(count)

    def epochs(self, count: int) -> list[int]:
        """Return the epoch that each of the next `count` prompts belongs to."""
        return [place // self.num_problems for place in range(self.cursor, self.cursor + count)]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.num_problems)

    @property
    def epoch(self) -> float:
        """Return the passes over the problems so far."""
        return self.cursor / self.num_problems


@dataclass(slots=True)
class Ledger:
    """What became of every prompt: taken = trained + skipped (by reason) + those in progress.

    Checkpoints and metrics call the prompts that were taken "drawn".
    """

    taken: int = 0
    trained: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def check(self, *, in_progress: int = 0) -> None:
        """Raise if a prompt was lost or counted twice; `in_progress` of them continue in the next step."""
        total = self.trained + sum(self.skipped.values()) + in_progress
        if total != self.taken:
            raise RuntimeError(f"the prompt ledger does not close: {self.taken} drawn, {total} accounted for: {self}")

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return {"drawn": self.taken, "trained": self.trained, "skipped": dict(self.skipped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of a checkpoint."""
        self.taken, self.trained, self.skipped = state["drawn"], state["trained"], Counter(state["skipped"])

    def metrics(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value) of the metrics data/*."""
        yield "data/drawn", float(self.taken)
        yield "data/trained", float(self.trained)
        yield "data/skipped", float(sum(self.skipped.values()))
        for reason, count in self.skipped.items():
            yield f"data/skipped/{reason}", float(count)
