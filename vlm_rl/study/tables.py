"""The tables of a study's page: final values and paired differences, each with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_rl.report.charts import PALETTE
from vlm_rl.report.html import Section, escape
from vlm_rl.report.sections import missing
from vlm_rl.stats import Estimate
from vlm_rl.study.plan import Study
from vlm_rl.study.results import Comparison, difference, final_estimate, final_values, is_share, measure_title

_EMPTY = "–"


def look(comparison: Comparison, rule: str) -> tuple[str, bool]:
    """(place in the palette, dashed): one look per rule on the whole page."""
    place = comparison.rules.index(rule)
    return PALETTE[place % len(PALETTE)], place >= len(PALETTE)


def swatch(comparison: Comparison, rule: str) -> str:
    color, dashed = look(comparison, rule)
    kind = "swatch dashed" if dashed else "swatch"
    return f"<i class='{kind}' style='border-color:var(--c{PALETTE.index(color)})'></i>"


def final_section(comparison: Comparison, study: Study) -> Section:
    caption = (
        "Mean over the seeds with its 95 % t interval. Held-out values are of the last evaluation, training values "
        "means over the last tenth of the steps. "
    )
    if len(study.seeds) == 1:
        caption += "One seed has no interval. "
    if len(study.starts) < len(study.seeds):
        caption += "Seeds that share a warm start are not wholly independent. "
    measures = comparison.measures
    head = [cell("th", "rule"), cell("th", "runs", number=True)]
    head += [cell("th", f"{measure_title(m)}, {'%' if is_share(m) else 'tokens'}", number=True) for m in measures]
    rows = [table_row(head)] + [
        table_row(
            [
                _rule_cell(comparison, rule),
                cell("td", str(len(comparison.of(rule))), number=True),
                *(cell("td", _with_interval(final_estimate(comparison, rule, m), m), number=True) for m in measures),
            ]
        )
        for rule in comparison.rules
    ]
    each = "".join(_seed_table(comparison, measure) for measure in measures)
    body = f"{table(rows)}<details><summary>Each seed</summary>{each}</details>" if measures else _nothing_yet()
    return Section("Final values", caption + _sampling_note(comparison), body)


def _sampling_note(comparison: Comparison) -> str:
    redrawn = [r for r in comparison.rules if any(run.algorithm.dynamic_sampling for run in comparison.of(r))]
    if not redrawn:
        return ""
    return (
        f"{escape(', '.join(redrawn))} leaves out groups that are all right or all wrong and draws others: it sees "
        "more prompts in as many steps, and its training curves are of the groups that it kept."
    )


def _seed_table(comparison: Comparison, measure: str) -> str:
    rows = [table_row([cell("th", "rule"), *(cell("th", f"seed {s}", number=True) for s in comparison.seeds)])]
    for rule in comparison.rules:
        values = final_values(comparison, rule, measure)
        cells = [_show(values[s], measure) if s in values else _EMPTY for s in comparison.seeds]
        rows.append(table_row([_rule_cell(comparison, rule), *(cell("td", text, number=True) for text in cells)]))
    return f"<h3>{_heading(measure, '%')}</h3>{table(rows)}"


def difference_section(comparison: Comparison) -> Section:
    caption = (
        f"Each rule minus {escape(comparison.baseline)}, run by run of the same seed, with the 95 % t interval over "
        "the seeds; bold where it excludes 0. The intervals are not widened for the number of rules. Detectable: the "
        "smallest true difference that so many seeds find four times out of five (two-sided, 5 %)."
    )
    others = comparison.rules[1:]
    if not others:
        return Section("Paired differences", caption, missing("The study has no second rule to compare."))
    parts = []
    for measure in comparison.measures:
        found = [(rule, difference(comparison, rule, comparison.baseline, measure)) for rule in others]
        titles = ("seeds", "difference", "95 % interval", "detectable")
        rows = [table_row([cell("th", "rule"), *(cell("th", title, number=True) for title in titles)])]
        rows += [table_row([_rule_cell(comparison, rule), *_difference_cells(one, measure)]) for rule, one in found]
        parts.append(f"<div><h3>{_heading(measure, 'points')}</h3>{table(rows)}</div>")
    body = f"<div class='grid'>{''.join(parts)}</div>" if parts else _nothing_yet()
    return Section("Paired differences", caption, body)


def _difference_cells(one: Estimate, measure: str) -> list[str]:
    if not one.num:
        return [cell("td", text, number=True) for text in ("0", _EMPTY, _EMPTY, _EMPTY)]
    mean = escape(_signed(one.mean, measure))
    mean = f"<td class='number'>{f'<b>{mean}</b>' if one.excludes_zero else mean}</td>"
    interval = detectable = "needs 2 seeds"
    if one.has_interval:
        interval = f"{_signed(one.low, measure)} to {_signed(one.high, measure)}"
        detectable = _signed(one.detectable, measure).removeprefix("+")
    return [
        cell("td", str(one.num), number=True),
        mean,
        *(cell("td", t, number=True) for t in (interval, detectable)),
    ]


def _with_interval(one: Estimate, measure: str) -> str:
    if not one.num:
        return _EMPTY
    mean = _show(one.mean, measure)
    return f"{mean} ({_show(one.low, measure)} to {_show(one.high, measure)})" if one.has_interval else mean


def _show(value: float, measure: str) -> str:
    return f"{100 * value if is_share(measure) else value:.1f}"


def _signed(value: float, measure: str) -> str:
    return f"{100 * value if is_share(measure) else value:+.1f}"


def _heading(measure: str, unit: str) -> str:
    """The measure with its unit: `unit` where it is a share, tokens else."""
    title = measure_title(measure)
    return escape(f"{title[0].upper()}{title[1:]}, {unit if is_share(measure) else 'tokens'}")


def _rule_cell(comparison: Comparison, rule: str) -> str:
    name = f"{escape(rule)}{' (baseline)' if rule == comparison.baseline else ''}"
    return f"<td class='rule'>{swatch(comparison, rule)}{name}</td>"


def cell(tag: str, text: str, *, number: bool = False) -> str:
    return f"<{tag}{' class=number' if number else ''}>{escape(text)}</{tag}>"


def table_row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def table(rows: Sequence[str]) -> str:
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _nothing_yet() -> str:
    return missing("No run is finished yet.")
