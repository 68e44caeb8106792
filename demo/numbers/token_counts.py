"""Count how many of a response's tokens are reasoning, by the model's own tokenizer.

The total is what the sampler counted and is stored with the record. The reasoning, its closing tag
included, is counted again with the tokenizer of the checkpoint; the answer is the rest, the
end-of-sequence token included, so that both always add up to the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from vlm_rl.templates import END_THINK, THINK


@dataclass(frozen=True, eq=False)
class Split:
    """Tokens of each response; reasoning + answer is its stored length."""

    reasoning_R: np.ndarray
    answer_R: np.ndarray


class TokenCounter:
    """Counts with one tokenizer file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._tokenizer = Tokenizer.from_file(str(path))

    def split(self, responses: Sequence[str], length_R: np.ndarray, *, prefill: str = "") -> Split:
        """Return the responses' tokens by part; `prefill` is text at their beginning that was not generated."""
        heads = [_reasoning(text or "", prefill) for text in responses]
        counted = [
            len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(heads, add_special_tokens=False)
        ]
        total = np.asarray(length_R, dtype=np.int64)
        is_open = np.array([bool(head) and END_THINK not in head for head in heads], dtype=bool)
        reasoning = np.where(is_open, total, np.minimum(np.array(counted, dtype=np.int64), total))
        return Split(reasoning, total - reasoning)


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
    except Exception:  # the library raises bare Exception for a file it cannot read
        return None


def tokenizer_file(run: Path, step: int, model: str) -> Path | None:
    """Find the tokenizer of a run's checkpoint; None where there is none.

    It is looked for in the checkpoint, in the run's other checkpoints, in the model that training started from, and
    in the run's folder itself.
    """
    checkpoints = run / "checkpoints"
    others = sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else []
    for folder in (checkpoints / f"step-{step:06d}", *others, Path(model), run):
        if (folder / "tokenizer.json").is_file():
            return (folder / "tokenizer.json").resolve()
    return None


def find_counter(run: Path, step: int, model: str) -> TokenCounter | None:
    """Return a counter with that tokenizer; None where there is none, or it cannot be read."""
    path = tokenizer_file(run, step, model)
    return None if path is None else _open_counter(path)
