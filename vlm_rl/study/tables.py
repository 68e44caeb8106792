"""The tables of a study's page: final values and paired differences, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.report.charts.points import Interval, forest
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.vega import embed
from vlm_rl.run.stability import FEWEST, GROWTH
from vlm_rl.stats import Estimate
from vlm_rl.study.results import (
    StudyResults,
    difference,
    final_estimate,
    final_values,
    is_share,
    measure_title,
    stability_estimate,
)
from vlm_rl.study.runs import Study

_PARTS = macros("vlm_rl.study", "parts.html")
_STUDY = macros("vlm_rl.study", "study.html")
_EMPTY = "–"


@dataclass(frozen=True, slots=True)
class RuleStyle:
    """How a rule looks everywhere on the page."""

    name: str
    color: str
    dashed: bool
    baseline: bool


def rule_styles(results: StudyResults) -> list[RuleStyle]:
    """Return the rules with their colours; where the palette ends it begins again with dashes."""
    return [
        RuleStyle(rule, PALETTE[i % len(PALETTE)], dashed=i >= len(PALETTE), baseline=rule == results.baseline)
        for i, rule in enumerate(results.rules)
    ]


def final_section(results: StudyResults, study: Study) -> PageSection:
    """Return the rules' final values, their means over the seeds first."""
    caption = (
        "Mean over the seeds with its 95 % t interval. Held-out values are of the last evaluation, training values "
        "means over the last tenth of the steps. "
    )
    if len(study.seeds) == 1:
        caption += "One seed has no interval. "
    if len(study.starts) < len(study.seeds):
        caption += "Seeds that share a warm start are not wholly independent. "
    measures = results.measures
    if not measures:
        return PageSection("Final values", caption, _nothing_yet())
    head = ["runs", *(f"{measure_title(m)}, {'%' if is_share(m) else 'tokens'}" for m in measures)]
    rows = [
        (
            style,
            [
                str(len(results.of(style.name))),
                *(_with_interval(final_estimate(results, style.name, m), m) for m in measures),
            ],
        )
        for style in rule_styles(results)
    ]
    seed_tables = [_seed_table(results, measure) for measure in measures]
    body = _STUDY.final_values(_STUDY.rule_table(head, rows), seed_tables)
    return PageSection("Final values", caption + _sampling_note(results), body)


def stability_section(results: StudyResults) -> PageSection:
    """Return the means over the seeds of how far runs fall below their best, waver, and jump."""
    caption = (
        "Mean over the seeds with its 95 % t interval. Drop: the best evaluation less the last. Deviation: the "
        "standard deviation between evaluations, from the differences of neighbours; of "
        f"{FEWEST} evaluations or more. Spikes: steps whose gradient norm is above {GROWTH:.0f} times the median of "
        f"the steps before, or whose loss is further from that median than {GROWTH:.0f} times the usual distance."
    )
    measures = results.stability_measures
    if not measures:
        return PageSection("Stability", caption, _nothing_yet())
    rows = [
        (style, [_steady(stability_estimate(results, style.name, measure), measure) for measure in measures])
        for style in rule_styles(results)
    ]
    return PageSection("Stability", caption, _STUDY.rule_table([_steady_title(m) for m in measures], rows))


def _steady_title(measure: str) -> str:
    kind, _, benchmark = measure.partition("/")
    if benchmark:
        return f"{'drop' if kind == 'drop' else 'deviation'} on {benchmark}, points"
    return "steps with a spike of the " + ("gradient norm" if kind == "norm_spikes" else "loss")


def _steady(estimate: Estimate, measure: str) -> str:
    """Return a mean with its interval: points of a share, else a number of steps."""
    if not estimate.num:
        return _EMPTY
    ends = (estimate.mean, estimate.low, estimate.high)
    mean, low, high = (f"{100 * end if '/' in measure else end:.1f}" for end in ends)
    return f"{mean} ({low} to {high})" if estimate.has_interval else mean


def _sampling_note(results: StudyResults) -> str:
    dynamic = [r for r in results.rules if any(run.algorithm.dynamic_sampling for run in results.of(r))]
    if not dynamic:
        return ""
    return (
        f"{', '.join(dynamic)} leaves out groups that are all right or all wrong and samples others. It sees more "
        "prompts in as many steps, and its training curves are of the groups that it kept."
    )


def _seed_table(results: StudyResults, measure: str) -> Markup:
    rows = []
    for style in rule_styles(results):
        values = final_values(results, style.name, measure)
        rows.append((style, [_show(values[seed], measure) if seed in values else _EMPTY for seed in results.seeds]))
    return _STUDY.rule_table([f"seed {seed}" for seed in results.seeds], rows, _heading(measure, "%"))


def difference_section(results: StudyResults) -> PageSection:
    """Return every rule's paired differences to the baseline, as charts and tables."""
    caption = (
        f"Each rule minus {results.baseline}, over runs of the same seed, with the 95 % t interval over the seeds; "
        "bold and filled where it excludes 0. The intervals are not widened for the number of rules. Detectable: the "
        "smallest true difference that so many seeds find four times out of five (two-sided, 5 %)."
    )
    others = [style for style in rule_styles(results) if not style.baseline]
    if not others:
        return PageSection("Paired differences", caption, _PARTS.missing("The study has no second rule to compare."))
    items = []
    for measure in results.measures:
        estimates = [(style, difference(results, style.name, results.baseline, measure)) for style in others]
        heading = _heading(measure, "points")
        head = ["seeds", "difference", "95 % interval", "detectable"]
        rows = [(style, _difference_cells(estimate, measure)) for style, estimate in estimates]
        intervals = [Interval(style.name, e.mean, e.low, e.high, style.color) for style, e in estimates]
        chart = forest(intervals, x_title=f"difference, {heading.rpartition(', ')[2]}", percent=is_share(measure))
        known = {style.name: estimate for style, estimate in estimates}
        sentence = _difference_sentence(known, results.baseline, measure, heading)
        items.append((heading, sentence, embed(chart, heading), _STUDY.rule_table(head, rows)))
    return PageSection("Paired differences", caption, _STUDY.differences(items) if items else _nothing_yet())


def _difference_sentence(estimates: Mapping[str, Estimate], baseline: str, measure: str, heading: str) -> str:
    """Return which rules differ from the baseline, by how much, which do not clearly differ, and which are open."""
    unit = heading.rpartition(", ")[2]
    clear = [
        f"{name} {_signed(e.mean, measure)} {unit} ({_signed(e.low, measure)} to {_signed(e.high, measure)})"
        for name, e in estimates.items()
        if e.excludes_zero
    ]
    rest = [name for name, e in estimates.items() if e.has_interval and not e.excludes_zero]
    short = [name for name, e in estimates.items() if not e.has_interval]
    parts = [f"Against {baseline}: {'; '.join(clear)}."] if clear else []
    if rest:
        names = f"No clear difference: {', '.join(rest)}."
        parts.append(names if clear else f"No rule clearly differs from {baseline}.")
    if short:
        parts.append(f"With fewer than two seeds nothing is settled: {', '.join(short)}.")
    return " ".join(parts)


def _difference_cells(estimate: Estimate, measure: str) -> Sequence[str | tuple[str, bool]]:
    if not estimate.num:
        return ["0", _EMPTY, _EMPTY, _EMPTY]
    mean = _signed(estimate.mean, measure)
    interval = detectable = "needs 2 seeds"
    if estimate.has_interval:
        interval = f"{_signed(estimate.low, measure)} to {_signed(estimate.high, measure)}"
        detectable = _show(estimate.detectable, measure)
    return [str(estimate.num), (mean, True) if estimate.excludes_zero else mean, interval, detectable]


def _with_interval(estimate: Estimate, measure: str) -> str:
    if not estimate.num:
        return _EMPTY
    mean = _show(estimate.mean, measure)
    if not estimate.has_interval:
        return mean
    return f"{mean} ({_show(estimate.low, measure)} to {_show(estimate.high, measure)})"


def _show(value: float, measure: str) -> str:
    return f"{100 * value if is_share(measure) else value:.1f}"


def _signed(value: float, measure: str) -> str:
    return f"{100 * value if is_share(measure) else value:+.1f}"


def _heading(measure: str, unit: str) -> str:
    """Return the measure with its unit: `unit` where it is a share, tokens otherwise."""
    title = measure_title(measure)
    return f"{title[0].upper()}{title[1:]}, {unit if is_share(measure) else 'tokens'}"


def _nothing_yet() -> Markup:
    return _PARTS.missing("No run is finished yet.")
