"""The order in which prompts are drawn, and the ledger that accounts for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class PromptOrder:
    """The order in which prompts are drawn: a permutation per epoch, keyed by (seed, epoch), and a cursor.

    There is no other state, so a resume continues at the very next prompt, on any number of ranks.
    """

    num_problems: int
    seed: int
    cursor: int = 0  # prompts drawn since the beginning of the run

    def draw(self, count: int) -> list[int]:
        """The next ``count`` indices; an epoch's end is crossed without a gap or a repeat."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, offset = divmod(self.cursor, self.num_problems)
            part = self._permutation(epoch)[offset : offset + count - len(indices)]
            indices += part.tolist()
            self.cursor += len(part)
        return indices

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.num_problems)

    @property
    def epoch(self) -> float:
        return self.cursor / self.num_problems


@dataclass(slots=True)
class Ledger:
    """Where every prompt drawn went: in = trained + skipped (by reason) + failed."""

    drawn: int = 0
    trained: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: int = 0

    def check(self) -> None:
        """Raise if a prompt was lost or counted twice."""
        total = self.trained + sum(self.skipped.values()) + self.failed
        if total != self.drawn:
            raise RuntimeError(f"the prompt ledger does not close: {self.drawn} drawn, {total} accounted for: {self}")

    def state(self) -> dict[str, Any]:
        return {
            "drawn": self.drawn,
            "trained": self.trained,
            "skipped": dict(self.skipped),
            "failed": self.failed,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Ledger:
        return cls(state["drawn"], state["trained"], Counter(state["skipped"]), state["failed"])

    def metrics(self) -> Iterator[tuple[str, float]]:
        yield "data/drawn", float(self.drawn)
        yield "data/trained", float(self.trained)
        yield "data/skipped", float(sum(self.skipped.values()))
        for reason, count in self.skipped.items():
            yield f"data/skipped/{reason}", float(count)
