"""Count how many of a response's tokens are reasoning, by the model's own tokenizer.

The total is what the sampler counted and is stored with the record. The reasoning, its closing tag
included, is counted again with the tokenizer of the checkpoint; the answer is the rest, the
end-of-sequence token included, so that both always add up to the total.

A run may come from anyone, and its tokenizer may take all memory or never end (a normalizer that replaces each letter
by a hundred, six times). So a process with limits counts. A tokenizer that went past one counts no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError
from vlm_rl.templates import END_THINK, THINK


@dataclass(frozen=True, eq=False)
class Split:
    """Tokens of each response; reasoning + answer is its stored length."""

    reasoning_R: np.ndarray
    answer_R: np.ndarray


_BATCH = 1 << 20  # characters that one call counts: seconds of a core
_worker = LimitedWorker("vlm_rl.demo.numbers.token_worker.count", cpu_seconds=30.0, memory=2 << 30)


class TokenCounter:
    """Counts with one tokenizer file."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises FaultError or LimitError if it is no tokenizer that can be used, and OSError."""
        self.name = str(path)
        self._changed = path.stat().st_mtime_ns
        self._is_usable = True
        self._count([""])

    def split(self, responses: Sequence[str], length_R: np.ndarray, *, prefill: str = "") -> Split | None:
        """Return the responses' tokens by part, or None if the tokenizer takes too much or fails.

        `prefill` is text at their beginning that was not generated.
        """
        heads = [_reasoning(text or "", prefill) for text in responses]
        try:
            counted = [number for batch in _batches(heads) for number in self._count(batch)]
        except (FaultError, LimitError):
            self._is_usable = False
            return None
        total = np.asarray(length_R, dtype=np.int64)
        is_open = np.array([bool(head) and END_THINK not in head for head in heads], dtype=bool)
        reasoning = np.where(is_open, total, np.minimum(np.array(counted, dtype=np.int64), total))
        return Split(reasoning, total - reasoning)

    def _count(self, texts: Sequence[str]) -> list[int]:
        if not self._is_usable:
            raise LimitError("took too much before")
        return _worker.call(self.name, self._changed, texts)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    yield batch


def _reasoning(response: str, prefill: str) -> str:
    """Return the generated text up to the last closing tag; all of a block that is never closed; else nothing."""
    generated = response.removeprefix(prefill)
    before, closed, _ = generated.rpartition(END_THINK)
    if closed:
        return before + closed
    return generated if response.lstrip().startswith(THINK) else ""


@lru_cache(maxsize=8)
def _open_counter(path: Path) -> TokenCounter | None:
    try:
        return TokenCounter(path)
    except (FaultError, LimitError, OSError):
        return None


def tokenizer_file(run: Path, step: int, model: str) -> Path | None:
    """Find the tokenizer of a run's checkpoint; None if there is none.

    It is looked for in the checkpoint, in the run's other checkpoints, in the model that training started from, and
    in the run's folder itself.
    """
    checkpoints = run / "checkpoints"
    others = sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else []
    for folder in (checkpoints / f"step-{step:06d}", *others, Path(model), run):
        with suppress(OSError, ValueError):  # of a name that is too long
            if (folder / "tokenizer.json").is_file():
                return (folder / "tokenizer.json").resolve()
    return None


def find_counter(run: Path, step: int, model: str) -> TokenCounter | None:
    """Return a counter with that tokenizer; None if there is none, or it cannot be read."""
    path = tokenizer_file(run, step, model)
    return None if path is None else _open_counter(path)
