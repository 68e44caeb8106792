"""The live panel's columns as HTML. Model text goes through cards.escape, as everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_rl.demo.ask_queue import View
from vlm_rl.demo.mathtext import math_html, value_html
from vlm_rl.demo.replies import Reply, Settings, split_growing
from vlm_rl.report.html import escape

_PHASES = {"waiting": "waiting", "loading": "loading", "writing": "writing …", "failed": "! failed"}
_STOPS = {"": "", "stop": "✓ finished", "length": "cut at the limit", "cancelled": "stopped by you"}
_COUNTERS = {
    "tokenizer": "",
    "server": ", the server says",
    "estimate": ", estimated: one a piece",
}


def view_html(view: View, settings: Settings, *, colors: Mapping[str, str]) -> str:
    """All columns and the line above them."""
    longest = max(1, *(reply.tokens for reply in view.replies))
    columns = "".join(
        column_html(name, reply, longest=longest, color=colors[name])
        for name, reply in zip(view.names, view.replies, strict=True)
    )
    return f"{_status(view, settings)}<div class='columns n{len(view.replies)} live-columns'>{columns}</div>"


def column_html(name: str, reply: Reply, *, longest: int, color: str) -> str:
    """One model's card; `longest` is the most tokens of any column, for the bars' common scale."""
    note = f"<p class='live-note {reply.phase}'>{escape(reply.note)}</p>" if reply.note else ""
    has_nothing = reply.phase == "failed" and not reply.text
    return (
        f"<article class='card sample live-card {reply.phase}' style='--accent:{escape(color)}'>"
        f"<div><div class='head'><span class='title'>{escape(name)}</span>{_chip(reply)}</div>"
        f"{'' if has_nothing else _counts(reply, longest=longest)}{note}</div>"
        f"{'' if has_nothing else _texts(reply)}</article>"
    )


def _texts(reply: Reply) -> str:
    """Reasoning and answer; while they grow their ends stay in sight."""
    reasoning, answer = split_growing(reply.text, is_over=reply.is_over)
    if reasoning is None and (answer or reply.is_over):
        thought = "<p class='quiet'>no reasoning block</p>"
    else:
        thought = _text("reasoning", math_html(reasoning or "") or "&nbsp;", is_over=reply.is_over)
    empty = "<span class='quiet'>nothing after the reasoning</span>" if reply.is_over else "&nbsp;"
    said = _text("answer", math_html(answer) or empty, is_over=reply.is_over)
    return f"<div><p class='label'>reasoning</p>{thought}</div><div><p class='label'>answer</p>{said}</div>"


def _text(kind: str, body: str, *, is_over: bool) -> str:
    tail = "" if is_over else " tail"
    return f"<div class='text {kind}{tail}' tabindex='0'><div>{body}</div></div>"


def settings_text(settings: Settings) -> str:
    """What all columns have in common, in words."""
    drawn = "greedy (temperature 0)" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    return f"seed {settings.seed} · {drawn} · at most {settings.max_tokens:,} tokens"


def error_html(text: str) -> str:
    """Why nothing is asked."""
    return f"<p class='live-error' role='alert'>{escape(text)}</p>"


def note_html(text: str) -> str:
    """What to do on an empty panel."""
    return f"<p class='note'>{escape(text)}</p>"


def gold_html(gold: str) -> str:
    """The right answer of an example, not sent with the question."""
    return f"<p class='note'>right answer: <b>{value_html(gold)}</b></p>"


def _status(view: View, settings: Settings) -> str:
    done = sum(reply.is_over for reply in view.replies)
    if view.ahead:
        state = f"waiting in line: {view.ahead} {'page' if view.ahead == 1 else 'pages'} before you"
    elif view.is_over:
        state = "done"
    else:
        state = f"{done} of {len(view.replies)} done"
    return f"<p class='live-status' role='status'><b>{state}</b> · the same for all: {settings_text(settings)}</p>"


def _chip(reply: Reply) -> str:
    if reply.phase == "ended":
        kind = {"stop": "correct", "length": "cut"}.get(reply.stop, "")
        return f"<span class='chip {kind}'>{_STOPS[reply.stop]}</span>"
    return f"<span class='chip {'wrong' if reply.phase == 'failed' else ''}'>{_PHASES[reply.phase]}</span>"


def _counts(reply: Reply, *, longest: int) -> str:
    """Tokens of both parts, and a bar on the scale of all columns."""
    thought = min(reply.reasoning_tokens, reply.tokens)
    parts = (("reasoning", thought), ("answer", reply.tokens - thought))
    about, split = ("≈ " if exact else "" for exact in (reply.counted_by == "estimate", not reply.is_split_exact))
    words = " · ".join(f"{kind} {split}{count:,}" for kind, count in parts)
    bars = "".join(f"<i class='{kind}' style='width:{100 * count / longest:.2f}%'></i>" for kind, count in parts)
    return (
        f"<p class='live-counts'><b>{about}{reply.tokens:,}</b> token{'' if reply.tokens == 1 else 's'}"
        f"<span class='quiet'>{_COUNTERS[reply.counted_by]}</span></p>"
        f"<p class='quiet'>{words}</p><div class='live-bar'>{bars}</div>"
    )
