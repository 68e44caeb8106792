"""The panel of the first look: who reasons longer, and does it pay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup

from vlm_rl.demo.numbers.cut_accuracy import (
    GainOfLength,
    cut_limits,
    cut_responses,
    gain_of_length,
)
from vlm_rl.demo.numbers.lengths import quantile
from vlm_rl.demo.numbers.pairs import Comparison, compare, comparisons, telling_problems
from vlm_rl.demo.numbers.patterns import count_pattern
from vlm_rl.demo.numbers.problem_table import pair_of
from vlm_rl.demo.numbers.reasoning import measured_problems
from vlm_rl.demo.panels.chart_cards import ChartCard, chart_card, color
from vlm_rl.demo.panels.page_state import UNREADABLE, PageState
from vlm_rl.demo.panels.problem import ProblemCard, empty_panel, problem_card
from vlm_rl.demo.web.rendering import number, render, share_text, signed
from vlm_rl.report.charts.frame import BAD, GOOD, MUTED
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.charts.points import Points
from vlm_rl.report.charts.ridges import FEW, Ridge, ridges
from vlm_rl.report.charts.versus import versus
from vlm_rl.stats import Estimate

_TO_PROBLEMS = {"tab": "problems", "at": ""}
_MAX_OTHER_LINES = 7  # comparisons below the first one
_MAX_POINTS = 1200
_EFFORT = 0.3  # of what the panel of reasoning measures: the first screen is drawn in about a second
# what became of a problem: its change, the legend's words, colour and shape
_GROUPS = ((0, "same", MUTED, "circle"), (-1, "lost", BAD, "triangle-down"), (1, "won", GOOD, "triangle-up"))


@dataclass(frozen=True, slots=True)
class _Answer:
    """One comparison as a sentence."""

    this: tuple[int, str]  # (slot, label)
    that: tuple[int, str]
    comparison: Comparison
    length: str  # "reasons longer"
    score: str  # "is more often right"
    verdict: str  # does it pay
    patch: Mapping[str, str]  # shows this pair


@dataclass(frozen=True, slots=True)
class _Telling:
    """A problem that shows what length did."""

    title: str
    problem_id: str
    card: ProblemCard
    sides: tuple[tuple[int, str, str, float], ...]  # slot, label, sign and share of right answers, mean tokens


def overview_panel(state: PageState) -> Markup:
    """Return the sentence, the charts and the problems."""
    if state.emptiness:
        return empty_panel(state)
    return overview_html(state)


def overview_html(state: PageState, *, interactive: bool = True, leads: bool | None = None) -> Markup:
    """Return the panel for the problems that pass the filters.

    Args:
        state: the page.
        interactive: with controls and what can be clicked.
        leads: single problems can be opened; None for as `interactive` says.
    """
    if state.emptiness:
        return render("message", text=state.emptiness, is_error=False)
    pair = pair_of(state.table, state.url)
    problems = measured_problems(state.table, state.keep_P, effort=_EFFORT)
    answers = _answers(state, pair)
    return render(
        "overview",
        answers=answers,
        alone=None if answers else {"label": state.labels[0], "slot": state.colors[0], "summary": state.summaries[0]},
        best=_best_lines(state),
        figures=[
            *(_versus_card(state, pair, interactive=interactive) if pair else []),
            *_ridge_card(state),
            *_cut_card(state, problems, pair),
        ],
        pattern=state.url.pattern,
        counted=_pattern_rows(state),
        telling=_telling(state, pair),
        interactive=interactive,
        leads=interactive if leads is None else leads,
    )


# -- the sentences ---------------------------------------------------------------------------------


def _answers(state: PageState, pair: int) -> list[_Answer]:
    """Return the chosen pair's sentence, and those of the other pairs."""
    if not pair:
        return []
    others = [one for one in comparisons(state.table, state.keep_P) if (one.index, one.against) != (pair, 0)]
    return [_answer(state, one) for one in (compare(state.table, state.keep_P, pair, 0), *others[:_MAX_OTHER_LINES])]


def _answer(state: PageState, comparison: Comparison) -> _Answer:
    keys = state.url.keys
    if comparison.against:
        patch = {"base": keys[comparison.against], "others": keys[comparison.index], "pair": ""}
    else:
        patch = {"pair": keys[comparison.index]}
    return _Answer(
        this=(state.colors[comparison.index], state.labels[comparison.index]),
        that=(state.colors[comparison.against], state.labels[comparison.against]),
        comparison=comparison,
        length=length_words(comparison.tokens),
        score=score_words(comparison.score),
        verdict=pay_words(comparison.tokens, comparison.score),
        patch=patch,
    )


def length_words(tokens: Estimate) -> str:
    """Say in words how the length changed; an interval that holds 0 shows no change."""
    if not tokens.mean:
        return "reasons exactly as long"
    if not tokens.excludes_zero:
        return "reasons about as long"
    return "reasons longer" if tokens.mean > 0 else "reasons shorter"


def score_words(score: Estimate) -> str:
    """Say in words how the score changed."""
    if not score.excludes_zero:
        return "is not clearly more or less often right"
    return "is more often right" if score.mean > 0 else "is less often right"


def pay_words(tokens: Estimate, score: Estimate) -> str:
    """Say whether the change in length paid; empty if there are too few problems to say."""
    if not tokens.has_interval or not score.has_interval:
        return "Too few problems to say more."
    if not tokens.excludes_zero:
        return ""
    is_longer = tokens.mean > 0
    if not score.excludes_zero:
        return "The extra length shows no gain." if is_longer else "Shorter, without a clear loss."
    if score.mean > 0:
        return "The extra length pays." if is_longer else "Shorter, and better."
    return "The extra length does not pay." if is_longer else "The shorter reasoning costs right answers."


def _best_lines(state: PageState) -> list[str]:
    """Return a sentence for each run shown whose last evaluation is not its best."""
    lines = []
    for name in dict.fromkeys(run for checkpoint in state.table.checkpoints for run in checkpoint.runs):
        with suppress(*UNREADABLE, TypeError):  # an evaluation that is not shown may be damaged, or a stranger's
            if sentence := state.library.runs[name].best(state.url.benchmark):
                lines.append(f"{name}, {sentence}.")
    return lines


# -- charts ------------------------------------------------------------------------------------------


def _versus_card(state: PageState, pair: int, *, interactive: bool) -> list[ChartCard]:
    """Return the length of each problem at the pair over that at the baseline."""
    table = state.table
    kept = np.flatnonzero(state.keep_P)
    if len(kept) > _MAX_POINTS:
        kept = kept[np.linspace(0, len(kept) - 1, _MAX_POINTS).round().astype(int)]
    moved = np.sign(table.score_CP[pair] - table.score_CP[0]).astype(int)
    all_moved = moved[state.keep_P]
    groups = []
    for change, word, colour, _ in _GROUPS:
        members = kept[moved[kept] == change]
        groups.append(
            Points(
                label=f"{word} {int((all_moved == change).sum()):,}",
                x=table.length_CP[0, members],
                y=table.length_CP[pair, members],
                color=colour,
                sizes=[70.0 if change else 44.0] * len(members),
                tips=[_versus_tip(state, pair, p, word) for p in members.tolist()],
                click=[urlencode({"tab": "problems", "at": table.ids[p]}) for p in members.tolist()],
            )
        )
    brush = urlencode({"pair": state.url.keys[pair], "at": "", "box": ""}) if interactive else None
    spec = versus(
        groups,
        x_title=f"tokens, {state.labels[0]}",
        y_title=f"tokens, {state.labels[pair]}",
        shapes=[shape for *_, shape in _GROUPS],
        brush=brush,
    )
    drawn = "" if len(kept) == len(state.order) else f"{len(kept):,} of {len(state.order):,} problems are drawn. "
    return chart_card(
        "Length by problem",
        spec,
        caption=f"{drawn}Above the diagonal, {state.labels[pair]} takes more tokens. Won: right more often than "
        f"{state.labels[0]}.",
        hint="Draw a box to keep its problems; click a point to read one.",
    )


def _versus_tip(state: PageState, pair: int, p: int, word: str) -> str:
    before, after = state.table.length_CP[0, p], state.table.length_CP[pair, p]
    return f"{state.table.ids[p]}: {word}\n{number(before)} → {number(after)} tokens"


def _ridge_card(state: PageState) -> list[ChartCard]:
    """Return two ridges for each checkpoint: the lengths of right answers, and of all others."""
    rows = []
    for index, label in enumerate(state.labels):
        responses = state.table.checkpoints[index].responses
        inside = state.table.inside(index, state.keep_P)
        for is_right in (True, False):
            values = responses.length_R[inside & (responses.correct_R == is_right)]
            word = "right" if is_right else "wrong"
            patch = {"verdict": "correct" if is_right else "wrong", "focus": state.url.keys[index], **_TO_PROBLEMS}
            rows.append(
                Ridge(
                    f"{label}, {word}: {len(values):,}",
                    values,
                    color=color(state.colors[index]),
                    hollow=not is_right,
                    tip=f"{label}, {word}: {len(values):,} responses\nmean {number(_mean(values))}, median "
                    f"{number(quantile(values, 0.5))} tokens",
                    click=urlencode(patch),
                )
            )
    return chart_card(
        "Length of right and of wrong responses",
        ridges(rows),
        caption=f"Filled: right. Hollow: wrong or no answer. Each has its own height; the line is the median. Fewer "
        f"than {FEW} responses, or equally long ones, are points.",
        hint="Click one to see its problems.",
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _cut_card(state: PageState, problems: np.ndarray, pair: int) -> list[ChartCard]:
    """Return the accuracy of each checkpoint if its responses were cut at T tokens."""
    cut_C = [cut_responses(state.table, index, problems) for index in range(len(state.labels))]
    limits = cut_limits([cut.length_R for cut in cut_C])
    series = [
        Series(
            label,
            limits,
            np.array([float(cut.score_P(limit).mean()) for limit in limits]),
            color=color(slot),
        )
        for label, slot, cut in zip(state.labels, state.colors, cut_C, strict=True)
    ]
    part = (
        ""
        if len(problems) == len(state.order)
        else f"Measured on {len(problems):,} of {len(state.order):,} problems. "
    )
    gain = gain_of_length(state.table, problems, pair, 0) if pair else None
    return chart_card(
        "Accuracy if all were cut at T tokens",
        lines(series, x_title="T, tokens", percent=True, from_zero=True, stairs=True),
        caption=f"{_gain_text(state, gain)}{part}{state.last_turn_note}A response that is cut counts as right once "
        "it has stated the right answer; a whole one has its verdict.",
    )


def _gain_text(state: PageState, gain: GainOfLength | None) -> str:
    if gain is None:
        return ""
    longer, shorter = state.labels[gain.longer], state.labels[gain.shorter]
    change = gain.gain
    interval = f" [{signed(100 * change.low)}, {signed(100 * change.high)}]" if change.has_interval else ""
    return (
        f"Cut at {number(round(gain.limit))} tokens, the mean length of {shorter}, {longer} would be right on "
        f"{share_text(gain.cut[0])} and {shorter} on {share_text(gain.cut[1])}; whole, on "
        f"{share_text(gain.whole[0])} and {share_text(gain.whole[1])}. What {longer} writes beyond brings it "
        f"{signed(100 * change.mean)} points{interval}. "
    )


# -- the visitor's expression, and single problems ------------------------------------------------------


def _pattern_rows(state: PageState) -> dict[str, object] | None:
    """Return the template's values for the visitor's expression; None without one."""
    if not state.url.pattern:
        return None
    counted = count_pattern(state.table, state.keep_P, state.url.pattern)
    rows = [
        {"label": label, "slot": slot, "use": use}
        for label, slot, use in zip(state.labels, state.colors, counted.uses, strict=False)
    ]
    part = "" if counted.num_problems >= len(state.order) else f"Counted on {counted.num_problems:,} of them. "
    return {"rows": rows, "fault": counted.fault, "part": f"{part}{state.last_turn_note}"}


def _telling(state: PageState, pair: int) -> list[_Telling]:
    if not pair:
        return []
    table = state.table
    found = []
    for p in telling_problems(table, state.keep_P, pair, 0):
        sides = tuple(
            (
                state.colors[index],
                state.labels[index],
                _right_words(float(table.score_CP[index, p])),
                float(table.length_CP[index, p]),
            )
            for index in (0, pair)
        )
        found.append(_Telling(_telling_title(state, pair, p), table.ids[p], problem_card(state, p), sides))
    return found


def _right_words(score: float) -> str:
    if score in (0, 1):
        return "✓ right" if score else "✗ wrong"
    return f"{share_text(score)} right"


def _telling_title(state: PageState, pair: int, p: int) -> str:
    before, after = state.table.length_CP[[0, pair], p]
    score_before, score_after = state.table.score_CP[[0, pair], p]
    length = "Longer" if after > before else "Shorter" if after < before else "As long"
    if score_after != score_before:
        became = "right" if score_after > score_before else "wrong"
        whole = {score_before, score_after} == {0, 1}
        return f"{length}, and became {became}" if whole else f"{length}, and more often {became}"
    return f"{length}, and {'right' if score_after >= 0.5 else 'wrong'} in both"
