"""The cards above the panels: which checkpoint reasons longer, and whether that paid."""

from __future__ import annotations

from urllib.parse import urlencode

from vlm_rl.demo.lengths import Summary, duels
from vlm_rl.demo.page_state import Scene
from vlm_rl.demo.svg import number, percent
from vlm_rl.demo.table import DIFFICULTIES
from vlm_rl.demo.url_state import CHANGES, FLAGS, UNFILTERED
from vlm_rl.report.html import escape
from vlm_rl.stats import Estimate

_MAX_DUELS = 3


def summary_html(scene: Scene) -> str:
    """One card per checkpoint, in its colour, for the problems that pass the filters."""
    cards = [
        _card(scene, index, one, label)
        for index, (one, label) in enumerate(zip(scene.summaries, scene.labels, strict=True))
    ]
    return f"<div class='summary n{len(cards)}'>{''.join(cards)}</div>{_duels(scene)}"


def _duels(scene: Scene) -> str:
    """The checkpoints beside the baseline against each other, a line each."""
    rows = []
    for one in duels(scene.table, scene.keep_P)[:_MAX_DUELS] if len(scene.order) else []:
        this, that = (
            f"<b class='k{scene.colors[i]}'><i class='swatch'></i>{escape(scene.labels[i])}</b>"
            for i in (one.index, one.against)
        )
        go = urlencode({"base": scene.view.keys[one.against], "others": scene.view.keys[one.index]})
        numbers = " · ".join(_changes(one.tokens, one.score))
        rows.append(
            f"<p>{this} against {that}: <strong>{escape(judgement(one.tokens, one.score))}</strong> "
            f"<span class='quiet'>{numbers}</span> <button data-go='{escape(go)}'>only these two</button></p>"
        )
    caution = "<p class='quiet'>Intervals are over problems, for these very runs: other seeds may differ.</p>"
    return f"<div class='duels'>{''.join(rows)}{caution}</div>" if rows else ""


def _card(scene: Scene, index: int, one: Summary, label: str) -> str:
    slot = scene.colors[index]
    head = f"<header><i class='swatch'></i><h3>{escape(label)}</h3></header>"
    if not one.num_problems:
        return f"<article class='card sum k{slot}'>{head}<p class='quiet'>nothing to count</p></article>"
    low, high = one.interval
    accuracy = (
        f"<b>{100 * one.accuracy:.1f} %</b> right <span class='quiet'>[{100 * low:.0f}, {100 * high:.0f}]</span>"
    )
    cut = f" · <em>{percent(one.cut)} cut</em>" if one.cut else ""
    lengths = f"<b>{number(round(one.median))}</b> tokens, median <span class='quiet'>p90 {one.p90:,.0f}{cut}</span>"
    verdict = "<p class='said quiet'>baseline</p>" if not index else f"<p class='said'>{_said(one)}</p>"
    change = "".join(f"<p class='quiet'>{line}</p>" for line in _changes(one.tokens, one.score)) if index else ""
    change += f"<p class='quiet'>{_moved(scene, index, one)}</p>" if index else ""
    return (
        f"<article class='card sum k{slot}'>{head}<p class='big'>{accuracy}</p><p class='big'>{lengths}</p>"
        f"{verdict}{change}</article>"
    )


def _said(one: Summary) -> str:
    return f"<b>{escape(judgement(one.tokens, one.score))}</b>"


def judgement(tokens: Estimate, score: Estimate) -> str:
    """In words what the two paired changes say; an interval that holds 0 says nothing."""
    if not tokens.has_interval:
        return "too few problems to say"
    if not tokens.excludes_zero and abs(tokens.mean) > 0:
        length = "length: no clear change"
    else:
        length = "longer" if tokens.mean > 0 else "shorter" if tokens.mean < 0 else "same length"
    if not score.excludes_zero:
        return f"{length}, accuracy: no clear change"
    paid = "more often right" if score.mean > 0 else "less often right"
    return f"{length}, {paid}"


def _moved(scene: Scene, index: int, one: Summary) -> str:
    """How many problems became better and worse; each number leads to them."""

    def mark(count: int, text: str, change: str) -> str:
        patch = {"change": change, "focus": scene.view.keys[index], "tab": "problems", "at": ""}
        go = f" data-go='{escape(urlencode(patch))}' tabindex='0' role='button'" if count else ""
        return f"<span{go}>{text} {count:,}</span>"

    return f"{mark(one.won, 'better on', 'right')}, {mark(one.lost, 'worse on', 'wrong')} problems"


def _changes(tokens: Estimate, score: Estimate) -> tuple[str, str]:
    return (
        f"{_signed(tokens.mean)} tokens{_interval(tokens, 1)}",
        f"{_signed(100 * score.mean)} points{_interval(score, 100)}",
    )


def _interval(one: Estimate, scale: float) -> str:
    return f" [{_signed(scale * one.low)}, {_signed(scale * one.high)}]" if one.has_interval else ""


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def count_html(scene: Scene) -> str:
    """How many problems are shown of how many, and how to get the others back."""
    if not scene.table.checkpoints:
        return ""
    kept, all_ = len(scene.order), scene.table.num_problems
    noun = "problem" if all_ == 1 else "problems"
    if not scene.view.filtered:
        return f"<p class='count'><b>{all_:,}</b> {noun} that all of them answered</p>"
    chosen = scene.view.change or scene.view.verdict
    caution = "; chosen by their verdicts, so the changes above describe them and prove nothing" if chosen else ""
    words = escape(", ".join(filter_words(scene)))
    back = f" <button data-go='{UNFILTERED}'>take all filters back</button>" if kept else ""  # else the panel has one
    return f"<p class='count'><b>{kept:,}</b> of {all_:,} {noun} pass the filters: {words}{caution}{back}</p>"


def filter_words(scene: Scene) -> list[str]:
    """The filters that are set, as the controls call them."""
    view = scene.view
    labels = {one.key: one.label for one in scene.table.checkpoints}
    return [
        *([CHANGES[view.change]] if view.change else []),
        *([{"correct": "right", "wrong": "not right"}[view.verdict]] if view.verdict else []),
        *(FLAGS[name] for name in view.flags),
        *(name or "no category" for name in view.category),
        *(DIFFICULTIES[name][1] for name in view.difficulty if name in DIFFICULTIES),
        *([] if view.low is None else [f"at least {view.low:,} tokens"]),
        *([] if view.high is None else [f"at most {view.high:,} tokens"]),
        *([f"“{view.text}”"] if view.text else []),
        *([f"looked for in {labels[view.focus]}"] if view.focus else []),
    ]
