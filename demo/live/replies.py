"""Say what the live panel asks, and what a column knows of the answer while it grows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from vlm_rl.report.html import split_response
from vlm_rl.templates import END_THINK, THINK, Template

Stop = Literal["", "stop", "length", "cancelled"]  # "" while it runs
IsCancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class LiveQuestion:
    """What every column is asked."""

    text: str
    image: bytes | None = None  # encoded; vlm_rl.data.images has accepted it


@dataclass(frozen=True, slots=True)
class AskSettings:
    """How every column samples its answer."""

    seed: int = 0
    temperature: float = 0.0  # 0 is greedy
    max_tokens: int = 512  # of the answer, reasoning and end token included


@dataclass(frozen=True, slots=True)
class Reply:
    """One column at one moment."""

    phase: Literal["waiting", "loading", "writing", "ended", "failed"] = "waiting"
    text: str = ""  # from its first word, the prompt's prefill included
    tokens: int = 0
    reasoning_tokens: int = 0  # of these
    counted_by: Literal["tokenizer", "server", "estimate"] = "tokenizer"
    is_split_exact: bool = True  # False: reasoning_tokens is the characters' share
    stop: Stop = ""
    note: str = ""  # why it failed, or what to know about it

    @property
    def is_over(self) -> bool:
        """Tell whether the reply has ended or failed."""
        return self.phase in ("ended", "failed")


Replies = Generator[Reply, None, None]


class Backend(Protocol):
    """A model that can be asked."""

    name: str  # as the page shows it
    template: Template  # where its answer is looked for

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        """Yield states of the answer, some ten a second, until it ends or is cancelled; closing the iterator ends it.

        Raises UserError, or whatever went wrong, for this column alone.
        """
        ...


def split_growing(text: str, *, is_over: bool) -> tuple[str | None, str]:
    """Return (reasoning, answer) as split_response does; a tag that has only begun to arrive is left out."""
    if not is_over:
        stripped = text.lstrip()
        if stripped and THINK.startswith(stripped):
            return "", ""
        length = next((n for n in range(len(END_THINK) - 1, 1, -1) if text.endswith(END_THINK[:n])), 0)
        text = text[: len(text) - length].rstrip("\ufffd")  # the first bytes of a character, too
    return split_response(text)


def count_reasoning(ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, prefill: str = "") -> int:
    """Count the tokens that belong to the reasoning, the end of its last closing tag included."""
    text = prefill + decode(ids)
    closings = text.count(END_THINK)
    if closings == 0:
        return len(ids) if text.lstrip().startswith(THINK) else 0
    low, high = 0, len(ids)  # the shortest prefix that holds them all
    while low < high:
        middle = (low + high) // 2
        if (prefill + decode(ids[:middle])).count(END_THINK) < closings:
            low = middle + 1
        else:
            high = middle
    return low
