"""The panel of reasoning: what is said after the right answer, which moves are made, which phrases are said."""

from __future__ import annotations

from urllib.parse import urlencode

from markupsafe import Markup

from vlm_rl.demo.numbers.lengths import spread
from vlm_rl.demo.numbers.phrases import phrase_uses
from vlm_rl.demo.numbers.reasoning import MIN_PROBLEMS, ReasoningSummary, measured_problems, reasoning_summaries
from vlm_rl.demo.panels.chart_cards import ChartCard, chart_card, color
from vlm_rl.demo.panels.page_state import PageState
from vlm_rl.demo.panels.problem import empty_panel
from vlm_rl.demo.web.rendering import render
from vlm_rl.report.charts.points import Interval, forest
from vlm_rl.report.charts.ridges import FEW
from vlm_rl.report.charts.shares import Quantiles, quantile_bars

_TO_PROBLEMS = {"tab": "problems", "at": ""}


def reasoning_panel(state: PageState) -> Markup:
    """Return the charts and the table of reasoning."""
    if state.emptiness:
        return empty_panel(state)
    return reasoning_html(state)


def reasoning_html(state: PageState, *, interactive: bool = True) -> Markup:
    """Return all cards of the panel for the problems that pass the filters."""
    if state.emptiness:
        return render("message", text=state.emptiness, is_error=False)
    problems = measured_problems(state.table, state.keep_P)
    summaries = reasoning_summaries(state.table, problems)
    num_kept = len(state.order)
    part = f"Measured on {len(problems):,} of {num_kept:,} problems, chosen by checksum. "
    note = f"{part if len(problems) < num_kept else ''}{state.last_turn_note}"
    cards = [*_moves_card(state, summaries, note), *_share_card(state, summaries, note), *_phrase_card(state)]
    return render("figures_panel", figures=cards, interactive=interactive)


def _share_card(state: PageState, summaries: list[ReasoningSummary], note: str) -> list[ChartCard]:
    """Return the distribution of the overthinking share, a row for each checkpoint."""
    title = "Said after the right answer was first stated"
    if not any(summary.shares.any() for summary in summaries) and any(len(summary.shares) for summary in summaries):
        return [ChartCard(title, (), f"{note}Nothing, in any correct response whose reasoning states the answer.")]
    rows = []
    for index, summary in enumerate(summaries):
        known = spread(100 * summary.shares)
        label = state.labels[index]
        rows.append(
            Quantiles(
                label, known.p10, known.p25, known.median, known.p75, known.p90,
                color=color(state.colors[index]),
                tip=f"{label}: {known.num:,} correct responses\n"
                f"median {known.median:.0f} %, p10 {known.p10:.0f} %, p90 {known.p90:.0f} %",
                click=urlencode({"verdict": "correct", "focus": state.url.keys[index], **_TO_PROBLEMS}),
                points=(100 * summary.shares).tolist() if known.num < FEW else (),
            )
        )  # fmt: skip
    return chart_card(
        title,
        quantile_bars(rows, x_title="% of the reasoning"),
        caption=f"{note}Of the correct responses whose reasoning states the answer. Line: p10 to p90. Box: the "
        f"middle half. Dot: median. Fewer than {FEW} responses are points.",
        hint="Click a mark to see the problems.",
    )


def _moves_card(state: PageState, summaries: list[ReasoningSummary], note: str) -> list[ChartCard]:
    rows = [
        {"label": label, "slot": slot, "summary": summary}
        for label, slot, summary in zip(state.labels, state.colors, summaries, strict=True)
    ]
    table = render("reasoning_table", rows=rows)
    caption = (
        f"{note}Means over problems; in brackets the 95 % interval over problems, from {MIN_PROBLEMS} problems on. "
        "After the answer: the share of the reasoning that follows "
        "the first statement of the right answer, of the correct responses that state it. Left: wrong responses that "
        "had stated it. Reflections and backtracks: per response. A small number may be met by chance, which counts "
        "as stated."
    )
    return [ChartCard("What the reasoning does", (table,), caption)]


def _phrase_card(state: PageState) -> list[ChartCard]:
    """Return the phrases whose use differs most from the baseline's, a row for each checkpoint beside it."""
    uses = [use for of_phrase in phrase_uses(state.table, state.keep_P) for use in of_phrase]
    alone = len(state.table.checkpoints) == 2
    intervals = [
        Interval(
            f"“{use.phrase}”" if alone else f"“{use.phrase}” · {state.labels[use.checkpoint]}",
            use.change.mean,
            use.change.low,
            use.change.high,
            color=color(state.colors[use.checkpoint]),
            tip=f"in {use.count:,} of {use.num:,} responses",
            click=urlencode({"text": use.phrase, "focus": state.url.keys[use.checkpoint], **_TO_PROBLEMS}),
        )
        for use in uses
    ]
    return chart_card(
        "Phrases of reasoning, against the baseline",
        forest(intervals, x_title="change, points", percent=True),
        caption=f"{state.last_turn_note}Change of the share of responses that say it, paired by problem, with the "
        "95 % interval; filled where it excludes 0. The list is fixed.",
        hint="Click a dot to see the responses.",
    )
