"""The panel of lengths: its charts, from the numbers of demo/numbers/lengths.py.

A mark that can be clicked carries a patch of the address, which leads to the problems behind it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup

from vlm_rl.demo.numbers.lengths import (
    DifficultyPoint,
    LengthCurve,
    ProblemChange,
    bin_edges,
    by_difficulty,
    ecdf,
    histogram,
    length_bands,
    length_curve,
    mass_over_training,
    problem_changes,
)
from vlm_rl.demo.numbers.problem_table import DIFFICULTIES
from vlm_rl.demo.numbers.url_state import PARTS
from vlm_rl.demo.panels.categories import category_map
from vlm_rl.demo.panels.chart_cards import ChartCard, chart_card, color
from vlm_rl.demo.panels.page_state import UNREADABLE, PageState
from vlm_rl.demo.panels.problem import empty_panel
from vlm_rl.demo.web.rendering import number, render, share_text
from vlm_rl.report.charts.lines import FEW, Series, lines
from vlm_rl.report.charts.points import Interval, Points, forest, scatter
from vlm_rl.report.charts.shares import Bars, heatmap
from vlm_rl.report.charts.shares import histogram as histogram_chart

_NO_TOKENIZER = (
    "Reasoning and answer apart need the model's tokenizer, and one of these runs has no tokenizer.json in its "
    f"checkpoints. Choose “{PARTS['']}”."
)
_EPISODES = (
    "Some of these responses were sampled in several turns, each with its own reasoning, so they have no one split. "
    f"Choose “{PARTS['']}”."
)
_TO_PROBLEMS = {"tab": "problems", "at": ""}
_CLICK_HINT = "Click a mark to see its problems."
_MAX_POINTS = 1200  # problems drawn as points, over all checkpoints
_TENTHS = ("shortest", *map(str, range(2, 10)), "longest")


def lengths_panel(state: PageState) -> Markup:
    """Return the charts of lengths, below a list that chooses whose tokens they count."""
    if state.emptiness:
        return empty_panel(state)
    return render("lengths_panel", parts=PARTS, part=state.url.part, charts=lengths_html(state))


def lengths_html(state: PageState, *, interactive: bool = True) -> Markup:
    """Return all charts of the panel for the problems that pass the filters."""
    lengths = part_lengths(state)
    if lengths is None:
        return render("message", text=_EPISODES if state.has_episodes else _NO_TOKENIZER, is_error=False)
    if state.emptiness:
        return render("message", text=state.emptiness, is_error=False)
    cards = [
        *_ecdf_card(state, lengths),
        *_histogram_card(state, lengths),
        *_change_card(state),
        *_difficulty_card(state),
        *_length_by_difficulty_card(state),
        *_training_card(state),
    ]
    categories = category_map(state, interactive=interactive)
    return render("lengths", figures=cards, categories=categories, maps=_mass_cards(state), interactive=interactive)


def part_lengths(state: PageState) -> list[np.ndarray] | None:
    """Return the lengths of each checkpoint's responses to the kept problems; None if they cannot be split."""
    lengths = []
    for index, checkpoint in enumerate(state.table.checkpoints):
        inside = state.table.inside(index, state.keep_P)
        responses = checkpoint.responses
        if not state.url.part:
            lengths.append(responses.length_R[inside])
            continue
        counter = checkpoint.counter
        split = None if counter is None else responses.split_R(counter, checkpoint.prefill)
        if split is None:
            return None
        lengths.append((split.reasoning_R if state.url.part == "reasoning" else split.answer_R)[inside])
    return lengths


def _tokens_title(state: PageState) -> str:
    return f"tokens, {PARTS[state.url.part]}" if state.url.part else "tokens"


# -- distributions -------------------------------------------------------------------------------


def _ecdf_card(state: PageState, lengths: Sequence[np.ndarray]) -> list[ChartCard]:
    """Return a staircase for each checkpoint, with a dot at the length of the problem that is shown."""
    curves, dots = [], []
    edges = bin_edges(lengths)
    for index, length_R in enumerate(lengths):
        if len(length_R):
            x, y = ecdf(length_R)  # from the left border, where the share is 0, to the right one
            x, y = np.r_[min(edges[0], x[0] - 1), x, edges[-1]], np.r_[0.0, y, 1.0]
            curves.append(Series(state.labels[index], x, y, color=color(state.colors[index])))
            dots.append(_shown_problem(state, index, length_R))
    shown = curves if state.url.part else curves + dots
    spec = lines(shown, x_title=_tokens_title(state), percent=True, from_zero=True, stairs=True)
    if spec is not None and not state.url.part:
        del spec["usermeta"]["legend"][len(curves) :]  # a dot shares the entry of its curve
    title = "Share of responses with at most so many tokens"
    return chart_card(title, spec, caption=_cut_text(state))


def _shown_problem(state: PageState, index: int, length_R: np.ndarray) -> Series:
    length = state.table.length_CP[index, state.order[state.position]]
    share = float((length_R <= length).mean())
    slot = state.colors[index]
    return Series(state.labels[index], np.array([length]), np.array([share]), color=color(slot), points=True)


def _cut_text(state: PageState) -> str:
    """Say which share of the responses was cut, since their lengths are too short."""
    cut = [
        f"{label} {share_text(summary.cut)}"
        for label, summary in zip(state.labels, state.summaries, strict=True)
        if summary.cut > 0
    ]
    said = f"Cut at the token limit, so longer than shown: {', '.join(cut)}." if cut else "No response was cut."
    return said if state.url.part else f"{said} Dots: the problem shown."


def _histogram_card(state: PageState, lengths: Sequence[np.ndarray]) -> list[ChartCard]:
    """Return overlaid bars on common bins; each leads to the problems with such lengths."""
    edges = bin_edges(lengths)
    bars = [
        Bars(
            label=state.labels[index],
            shares=histogram(length_R, edges),
            color=color(state.colors[index]),
            click=None if state.url.part else _bin_patches(edges, state.url.keys[index]),
        )
        for index, length_R in enumerate(lengths)
    ]
    spec = histogram_chart(edges, bars, x_title=_tokens_title(state))
    hint = "" if state.url.part else _CLICK_HINT
    return chart_card("How many tokens a response has", spec, hint=hint)


def _bin_patches(edges: np.ndarray, focus: str) -> list[str]:
    return [
        urlencode({"low": low, "high": high - 1, "focus": focus, **_TO_PROBLEMS})
        for low, high in pairwise(edges.tolist())
    ]


# -- changes, difficulty ---------------------------------------------------------------------------


def _change_card(state: PageState) -> list[ChartCard]:
    """Return a row of points for each checkpoint beside the baseline, and below them the mean changes."""
    others = range(1, len(state.table.checkpoints))
    limit = _MAX_POINTS // max(1, len(others))
    groups = [
        _change_points(state, index, problem_changes(state.table, index, state.keep_P, limit=limit))
        for index in others
    ]
    points = scatter(
        groups,
        x_title="change in tokens, per problem",
        y_ticks=False,
        zero_line=True,
        height=60 + 44 * len(groups),
    )
    intervals = []
    for index in others:
        change = state.summaries[index].tokens
        label, slot = state.labels[index], state.colors[index]
        intervals.append(Interval(label, change.mean, change.low, change.high, color=color(slot)))
    means = forest(intervals, x_title="mean change, 95 % interval")
    caption = (
        f"{points_text(len(state.order), limit)}: large and filled where its verdict became right, large and hollow "
        "where it became wrong, small elsewhere."
    )
    return chart_card(
        "Change per problem against the baseline",
        points,
        means,
        caption=caption,
        hint="Click a point to see its problem.",
    )


def points_text(num_problems: int, limit: int) -> str:
    """Say which problems have a point: all, or an even selection where they would hide each other."""
    if num_problems <= limit:
        return "One point per problem"
    return (
        f"{limit:,} of {num_problems:,} problems are drawn for each checkpoint, evenly chosen by their change, with "
        "both ends; the means are over all. A point is"
    )


def _change_points(state: PageState, index: int, changes: Sequence[ProblemChange]) -> Points:
    """Return one checkpoint's row of points, spread in height so that equal changes can be told apart."""
    ordered = sorted(changes, key=lambda change: abs(change.moved))  # those that moved are drawn in front
    jitter = [zlib.crc32(change.problem_id.encode()) % 1000 / 1000 - 0.5 for change in ordered]
    return Points(
        label=state.labels[index],
        x=np.array([change.change for change in ordered]),
        y=np.array([0.7 * height - index for height in jitter]),
        color=color(state.colors[index]),
        sizes=[44 if change.moved else 22 for change in ordered],
        hollow=[change.moved < 0 for change in ordered],
        tips=[_change_tip(change) for change in ordered],
        click=[urlencode({"tab": "problems", "at": change.problem_id}) for change in ordered],
    )


def _change_tip(change: ProblemChange) -> str:
    became = {1: ", became right", -1: ", became wrong", 0: ""}[change.moved]
    return f"{change.problem_id}\n{number(change.before)} → {number(change.after)} tokens{became}"


def _difficulty_card(state: PageState) -> list[ChartCard]:
    """Return accuracy over mean length: a point per difficulty class and checkpoint, joined by checkpoint."""
    groups = []
    for index, (label, slot) in enumerate(zip(state.labels, state.colors, strict=True)):
        points = by_difficulty(state.table, index, state.keep_P)
        groups.append(
            Points(
                label=label,
                x=np.array([point.length for point in points]),
                y=np.array([point.accuracy for point in points]),
                color=color(slot),
                sizes=[60 + 45 * list(DIFFICULTIES).index(point.difficulty) for point in points],
                tips=[_difficulty_tip(state, label, point) for point in points],
                click=[urlencode({"difficulty": point.difficulty, **_TO_PROBLEMS}) for point in points],
            )
        )
    spec = scatter(groups, x_title="mean tokens", y_title="accuracy", percent=True, joined=True)
    when = state.table.base_when
    return chart_card(
        f"Does length pay? By difficulty {when}",
        spec,
        caption=f"Each point: the problems of one pass rate {when}, from hardest (small) to easiest (large).",
        hint=_CLICK_HINT,
    )


def _difficulty_tip(state: PageState, label: str, point: DifficultyPoint) -> str:
    return (
        f"{label}\n{DIFFICULTIES[point.difficulty][1]} {state.table.base_when}, {point.num_problems:,} problems\n"
        f"{point.length:.0f} tokens, {share_text(point.accuracy)} right, {share_text(point.cut)} cut"
    )


def _length_by_difficulty_card(state: PageState) -> list[ChartCard]:
    """Return the length of the responses over the pass rate of their problems, with the middle half as bars."""
    series = []
    for index, (label, slot) in enumerate(zip(state.labels, state.colors, strict=True)):
        bands = length_bands(state.table, index, state.keep_P)
        if len(bands) > 1:
            rate, spreads = np.array([100 * band.rate for band in bands]), [band.lengths for band in bands]
            series.append(
                Series(
                    label,
                    rate,
                    np.array([spread.median for spread in spreads]),
                    color=color(slot),
                    low=np.array([spread.p25 for spread in spreads]),
                    high=np.array([spread.p75 for spread in spreads]),
                    click=[urlencode({"difficulty": band.difficulty, **_TO_PROBLEMS}) for band in bands],
                )
            )
    when = state.table.base_when
    return chart_card(
        f"Length by difficulty {when}",
        lines(series, x_title=f"pass rate {when}, %", y_title="tokens", from_zero=True),
        caption=f"Pass rate: the share of correct samples {when}, mean of each class. Dots: median length. Bars: the "
        "middle half. The classes come from the verdicts of those samples, so their own lengths lean towards what "
        "was right or wrong.",
        hint=_CLICK_HINT,
    )


# -- over training -------------------------------------------------------------------------------


def _training_card(state: PageState) -> list[ChartCard]:
    """Return the median with the middle half as a band, and p90 dashed, of the checkpoints' runs."""
    curves: list[LengthCurve] = []
    evaluated: list[str] = []  # runs without rollouts
    series: list[Series] = []
    left_out = ""
    for title, slot, names in state.run_groups():
        try:
            curve = length_curve([state.library.runs[name] for name in names], state.url.benchmark)
        except UNREADABLE as error:
            left_out += f" {title} was left out: {str(error)[:200]}"
            continue
        if curve is None or len(curve.steps) < 2:
            continue
        curves.append(curve)
        evaluated += [] if curve.sampled else [title]
        series += [
            Series(title, curve.steps, curve.median, color=color(slot), low=curve.p25, high=curve.p75),
            Series(f"{title}, p90", curve.steps, curve.p90, color=color(slot), dashed=True),
        ]
    if not curves:
        return []
    what = "stored evaluations" if len(evaluated) == len(curves) else "training responses"
    others = f"; of {', '.join(evaluated)}, the stored evaluations" if 0 < len(evaluated) < len(curves) else ""
    smooth = ", as a running mean" if any(curve.smoothed for curve in curves) else ""
    half = "Band" if max(len(curve.steps) for curve in curves) >= FEW else "Bars"
    cut = max(float(curve.cut.max()) for curve in curves)
    cut_text = f"At most {share_text(cut)} of a step were cut." if cut else "None was cut."
    lines_text = f"Line: median. {half}: the middle half. Dashed: p90."
    caption = f"Of all {what} of a step{smooth}{others}. {lines_text} {cut_text}{left_out}"
    spec = lines(series, y_title="tokens", from_zero=True)
    return chart_card("Length over training", spec, caption=caption)


def _mass_cards(state: PageState) -> list[ChartCard]:
    """Return a map per run: the gradient's share of each tenth of the responses, by length, over training."""
    cards: list[ChartCard] = []
    for name, _, names in state.run_groups():
        runs = [state.library.runs[run] for run in names]
        mass = mass_over_training([run.curves() for run in runs])
        if mass is None:
            continue
        title = f"{runs[0].algorithm} · {name}" if len(state.library.runs) > 1 else runs[0].algorithm
        steps = [int(step) for step in mass[0]]
        spec = heatmap(mass[1][::-1], columns=steps, rows=_TENTHS[::-1], titles=("step", "tenth by length"))
        cards += chart_card(title, spec)
    return cards
