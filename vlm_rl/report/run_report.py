"""One self-contained HTML page about one or several runs, without an outside request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.report import vega
from vlm_rl.report.changes import change_section
from vlm_rl.report.controls import controls_of, controls_section
from vlm_rl.report.examples import choose, example_html, side_by_side
from vlm_rl.report.html import PageSection, demo_command, macros, page, write_page
from vlm_rl.report.looking_section import looking_section
from vlm_rl.report.run_curves import RunCurves, Score, holds_training
from vlm_rl.report.sections import (
    count_of_steps,
    curve_label,
    difficulty_section,
    duration_text,
    every_metric_section,
    gradient_mass_section,
    interval_text,
    length_section,
    overview_section,
    percent_text,
    reward_section,
    time_section,
    updates_section,
)
from vlm_rl.report.stability_section import stability_section
from vlm_rl.run.best import paired_change
from vlm_rl.run.directory import RunDirectory, distinct_names
from vlm_rl.run.eval_result import EvalResult

_PARTS = macros("vlm_rl.report", "parts.html")
_REPORT = macros("vlm_rl.report", "report.html")
_NUM_EXAMPLES = 6


def write_report(runs: Sequence[RunDirectory], out: Path) -> Path:
    """Write the page about these runs (one, or several side by side) to `out` and return it.

    Raises UserError if there is no run, one is not a run directory, or `out` cannot be written.
    """
    if not runs:
        raise UserError("a report needs at least one run directory: vlm-rl report RUN")
    curves = [RunCurves(run.open(), name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    sections = [
        overview_section(curves),
        *([changed] if (changed := change_section(curves)) else []),
        reward_section(curves),
        length_section(curves),
        gradient_mass_section(curves),
        *([weighted] if (weighted := difficulty_section(curves)) else []),
        *([looking] if (looking := looking_section(curves)) else []),
        updates_section(curves),
        stability_section(curves),
        time_section(curves),
        _examples_section(curves),
        *([controls_section(curves)] if any(controls_of(run) for run in curves) else []),
        every_metric_section(curves),
        _configuration_section(curves),
    ]
    text = page(
        title=f"{' and '.join(run.name for run in curves)} · vlm-rl report",
        header=_header(curves),
        sections=sections,
        footer="Written by vlm-rl from the files of the run.",
        scripts=vega.page_scripts(),
    )
    return write_page(text, out)


# -- the top of the page ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page, before and after training; `before` is empty where there is only one."""

    before: str
    after: str
    note: str


def _header(runs: Sequence[RunCurves]) -> Markup:
    stamps = [(run.name, sets) for run in runs if (sets := run.run.contaminated())]
    command = demo_command([run.run.path for run in runs])
    if len(runs) > 1:
        names = ", ".join(run.config.algorithm.name.upper() for run in runs)
        return _REPORT.header(stamps, f"{len(runs)} runs side by side: {names}", "", [], _score_table(runs), command)
    return _REPORT.header(stamps, _headline(runs[0]), _lead(runs[0]), _tiles(runs[0]), _score_table(runs), command)


def _lead(run: RunCurves) -> str:
    config = run.config
    model = short_name(config.model.path)
    if run.evals and not holds_training(run.run):  # a folder of `vlm-rl eval`
        return f"{model} evaluated on {', '.join(run.evals)}; this folder holds no training"
    sets = ", ".join(Path(name).name for name in config.data.train)
    batch = f"{config.rollout.prompts_per_step} problems × {config.rollout.responses_per_prompt} responses a step"
    return (
        f"{model} trained on {sets} with {config.algorithm.name.upper()}, {batch}; run {run.name}, seed {config.seed}"
    )


def _headline(run: RunCurves) -> str:
    name = run.config.algorithm.name.upper()
    benchmark, scores = next(iter(_scores(run).items()), ("", []))
    if len(scores) == 1 and not holds_training(run.run):  # a folder of `vlm-rl eval`
        return f"{percent_text(scores[0].accuracy)} on {benchmark}"
    if len(scores) < 2:
        return f"{name}: {count_of_steps(run.num_steps)}"
    return f"{name}: {percent_text(scores[0].accuracy)} → {percent_text(scores[-1].accuracy)} on {benchmark}"


def _tiles(run: RunCurves) -> list[Tile]:
    tiles = []
    if scores := next(iter(_scores(run).values()), []):
        first, last = scores[0], scores[-1]
        before = percent_text(first.accuracy) if len(scores) > 1 else ""
        note = f"accuracy on {last.num_problems:,} problems{_intervals(first, last, interval_text)}"
        tiles.append(Tile(before, percent_text(last.accuracy), note))
        before = f"{first.mean_length:.0f}" if len(scores) > 1 else ""
        note = f"tokens in a response, on average{_intervals(first, last, _length_interval)}"
        tiles.append(Tile(before, f"{last.mean_length:.0f}", note))
    steps, reward = run.metric("reward")
    reward = reward[np.isfinite(reward)]
    if len(reward):
        width = max(1, len(reward) // 10)
        before, note = "", "training reward"
        if len(reward) > 1:
            before = f"{reward[:width].mean():.2f}"
            note += f", first and last {'step' if width == 1 else f'{width} steps'}"
        tiles.append(Tile(before, f"{reward[-width:].mean():.2f}", note))
    if len(steps):
        _, seconds = run.metric("step_time")
        known = np.isfinite(seconds).any()
        time = f"{duration_text(float(np.nansum(seconds)))} in all" if known else "time not logged"
        tiles.append(Tile("", f"{len(run.metrics)}", f"training step{'s' * (len(run.metrics) > 1)}, {time}"))
    return tiles


def _scores(run: RunCurves) -> dict[str, list[Score]]:
    """Return the scores of each benchmark; an evaluation without rows has none."""
    with_rows = {name: [score for score in scores if score.num_problems] for name, scores in run.scores.items()}
    return {name: scores for name, scores in with_rows.items() if scores}


def _intervals(before: Score, after: Score, text: Callable[[Score], str]) -> str:
    """Return the intervals of the two scores in words; empty if none is known."""
    if not text(after):
        return ""
    if before is after or not text(before):
        return f"; 95 % interval {text(after)}"
    return f"; 95 % intervals {text(before)} and {text(after)}"


def _length_interval(score: Score) -> str:
    return "" if math.isnan(score.length_low) else f"{score.length_low:,.0f}–{score.length_high:,.0f}"


def _score_table(runs: Sequence[RunCurves]) -> Markup | str:
    rows = [_score_row(run, benchmark, scores) for run in runs for benchmark, scores in _scores(run).items()]
    if not rows:
        return _PARTS.missing("No evaluation with rows is stored; `vlm-rl eval` or eval.every makes one.")
    if len(rows) == 1 and len(runs) == 1:
        return ""  # the tiles say it all
    head = ["run", "benchmark", "problems", "first", "last", "change, points", "tokens", "change, tokens"]
    note = _REPORT.table_note("In brackets 95 % intervals; those of changes are of the same problems.")
    return _PARTS.table(head, rows, numbers=2) + note


def _score_row(run: RunCurves, benchmark: str, scores: Sequence[Score]) -> list[str]:
    first, last = scores[0], scores[-1]
    before, points, longer, tokens = "", "", "", f"{last.mean_length:.0f}"
    if first is not last:
        before, tokens = _score_text(first), f"{first.mean_length:.0f} → {tokens}"
        results = {result.step: result for result in run.evals[benchmark]}
        paired = paired_change(results[first.step], results[last.step])
        if paired is not None:
            points = _change_text(100 * paired.difference, [100 * end for end in paired.interval])
            if paired.length_a is not None and paired.length_b is not None:
                longer = _change_text(paired.length_b - paired.length_a, paired.length_interval)
    return [run.name, benchmark, f"{last.num_problems:,}", before, _score_text(last), points, tokens, longer]


def _change_text(change: float, interval: Sequence[float] | None) -> str:
    """Return a change with one decimal and its interval."""
    known = interval is not None and math.isfinite(interval[0])
    return f"{change:+,.1f}" + (f" [{interval[0]:+,.1f}, {interval[1]:+,.1f}]" if known and interval else "")


def _score_text(score: Score) -> str:
    interval = interval_text(score)
    return f"step {score.step}: {percent_text(score.accuracy)}" + (f" ({interval})" if interval else "")


# -- examples, controls, configuration ----------------------------------------------------------


def _examples_section(runs: Sequence[RunCurves]) -> PageSection:
    caption = "Problems of an evaluation, before and after training: what became right, and what did not."
    compared = _compared(runs)
    if compared is None:
        nothing = "There are no two evaluations of one benchmark to compare."
        return PageSection("Examples", caption, _PARTS.missing(nothing))
    titles, results = compared
    examples = choose(side_by_side(results), _NUM_EXAMPLES)
    body = Markup("").join(example_html(example, titles) for example in examples)
    return PageSection("Examples", caption, body or _PARTS.missing("The evaluations have no problem in common."))


def _compared(runs: Sequence[RunCurves]) -> tuple[list[str], list[EvalResult]] | None:
    """Return the first run's first evaluation and every run's last, on the first benchmark that allows it."""
    for benchmark, results in runs[0].evals.items():
        chosen = [(runs[0], results[0])]
        chosen += [(run, run.evals[benchmark][-1]) for run in runs if run.evals.get(benchmark)]
        distinct = list({id(result): (run, result) for run, result in chosen}.values())
        if len(distinct) > 1:
            titles = [curve_label(runs, run, f"step {result.step}") for run, result in distinct]
            return titles, [result for _, result in distinct]
    return None


def _configuration_section(runs: Sequence[RunCurves]) -> PageSection:
    body = _REPORT.configurations([(run.name, run.run.config_text()) for run in runs])
    return PageSection("Configuration", "The resolved configuration, as stored with the run.", body)
