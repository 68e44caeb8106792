"""Show the live panel's columns while the answers grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.demo.live.ask_queue import AskState
from vlm_rl.demo.live.replies import AskSettings, Reply, split_growing
from vlm_rl.demo.web.rendering import render
from vlm_rl.types import Grade

_PHASES = {"waiting": "waiting", "loading": "loading", "writing": "writing …", "failed": "! failed"}
_STOPS = {"": "", "stop": "finished", "length": "cut at the limit", "cancelled": "stopped by you"}
_VERDICTS = {"correct": "✓ correct", "wrong": "✗ wrong", "no_answer": "✗ no answer"}
_COUNTERS = {
    "tokenizer": "",
    "server": ", counted by the server",
    "estimate": ", estimated from the pieces that came",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """One model's card."""

    name: str
    reply: Reply
    color: str  # a CSS colour
    grade: Grade | None  # None while it runs, and where no gold is known

    @property
    def chip(self) -> str:
        if self.grade is not None:
            return _VERDICTS.get(self.grade.verdict, "? not judged")
        return _STOPS[self.reply.stop] if self.reply.phase == "ended" else _PHASES[self.reply.phase]

    @property
    def chip_kind(self) -> str:
        if self.grade is not None:
            return {"correct": "correct", "wrong": "wrong", "no_answer": "wrong"}.get(self.grade.verdict, "")
        if self.reply.phase == "ended":
            return {"length": "cut"}.get(self.reply.stop, "")
        return "wrong" if self.reply.phase == "failed" else ""

    @property
    def has_text(self) -> bool:
        """Say whether there is anything beside the note: a model that failed at once has nothing."""
        return self.reply.phase != "failed" or bool(self.reply.text)

    @property
    def counter(self) -> str:
        return _COUNTERS[self.reply.counted_by]

    @property
    def about(self) -> str:
        return "≈ " if self.reply.counted_by == "estimate" else ""

    @property
    def about_parts(self) -> str:
        return "" if self.reply.is_split_exact else "≈ "

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Return (part, tokens) of the reasoning and of the answer."""
        reasoning = min(self.reply.reasoning_tokens, self.reply.tokens)
        return [("reasoning", reasoning), ("answer", self.reply.tokens - reasoning)]

    @property
    def reasoning(self) -> str | None:
        return split_growing(self.reply.text, is_over=self.reply.is_over)[0]

    @property
    def answer(self) -> str:
        return split_growing(self.reply.text, is_over=self.reply.is_over)[1]


def columns_html(
    state: AskState, settings: AskSettings, *, colors: Mapping[str, str], grades: Mapping[str, Grade]
) -> Markup:
    """Return all columns, their bars on one scale, and the line above them.

    Args:
        state: what each model has answered so far.
        settings: what all have in common.
        colors: a CSS colour for each model's name.
        grades: by name, of the answers that could be graded.
    """
    columns = [
        _Column(name, reply, colors[name], grades.get(name))
        for name, reply in zip(state.names, state.replies, strict=True)
    ]
    longest = max(1, *(reply.tokens for reply in state.replies))
    return render(
        "live_columns",
        columns=columns,
        longest=longest,
        status=_status(state),
        settings=settings_text(settings),
    )


def settings_text(settings: AskSettings) -> str:
    """Say in words what all columns have in common."""
    sampling = "greedy (temperature 0)" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    return f"seed {settings.seed} · {sampling} · at most {settings.max_tokens:,} tokens"


def _status(state: AskState) -> str:
    if state.ahead:
        return f"waiting in line: {state.ahead} {'page' if state.ahead == 1 else 'pages'} before you"
    if state.is_over:
        return "done"
    return f"{sum(reply.is_over for reply in state.replies)} of {len(state.replies)} done"


def live_error_html(text: str) -> Markup:
    """Return why nothing is asked."""
    return render("live_error", text=text)


def live_note_html(text: str) -> Markup:
    """Return the advice on an empty panel."""
    return render("live_note", text=text)


def gold_html(gold: str) -> Markup:
    """Return the right answer of a problem, which is not sent with the question."""
    return render("live_gold", gold=gold)
