"""Show the live panel's columns while the answers grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.demo.ask_queue import AskState
from vlm_rl.demo.rendering import render
from vlm_rl.demo.replies import AskSettings, Reply, split_growing

_PHASES = {"waiting": "waiting", "loading": "loading", "writing": "writing …", "failed": "! failed"}
_STOPS = {"": "", "stop": "✓ finished", "length": "cut at the limit", "cancelled": "stopped by you"}
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

    @property
    def chip(self) -> str:
        return _STOPS[self.reply.stop] if self.reply.phase == "ended" else _PHASES[self.reply.phase]

    @property
    def chip_kind(self) -> str:
        if self.reply.phase == "ended":
            return {"stop": "correct", "length": "cut"}.get(self.reply.stop, "")
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


def columns_html(state: AskState, settings: AskSettings, *, colors: Mapping[str, str]) -> Markup:
    """Return all columns, their bars on one scale, and the line above them.

    `colors` holds a CSS colour for each model's name.
    """
    columns = [_Column(name, reply, colors[name]) for name, reply in zip(state.names, state.replies, strict=True)]
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
    drawn = "greedy (temperature 0)" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    return f"seed {settings.seed} · {drawn} · at most {settings.max_tokens:,} tokens"


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
    """Return what to do on an empty panel."""
    return render("live_note", text=text)


def gold_html(gold: str) -> Markup:
    """Return the right answer of a problem, which is not sent with the question."""
    return render("live_gold", gold=gold)
