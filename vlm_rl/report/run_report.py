"""One self-contained HTML page about one or several runs, without an outside request.

`controls.json` of a run, where there is one, holds accuracies in [0, 1] under these keys, each optional: trained (the
trained policy on the real images), blank_images, shuffled_images, best_constant (the best constant guess), untrained
(before training, free) and forced_scan (before training, the first words of a careful trace forced).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.report import vega
from vlm_rl.report.changes import change_section
from vlm_rl.report.examples import choose, example_html, side_by_side
from vlm_rl.report.html import PageSection, demo_command, macros, page, write_page
from vlm_rl.report.run_curves import RunCurves, Score, holds_training
from vlm_rl.report.sections import (
    accuracy_section,
    count_of_steps,
    curve_label,
    difficulty_section,
    duration_text,
    every_metric_section,
    gradient_mass_section,
    interval_text,
    length_section,
    percent_text,
    reward_section,
    time_section,
    updates_section,
)
from vlm_rl.run.directory import RunDirectory, distinct_names
from vlm_rl.run.eval_result import EvalResult

_PARTS = macros("vlm_rl.report", "parts.html")
_REPORT = macros("vlm_rl.report", "report.html")
_NUM_EXAMPLES = 6

_CONTROLS = {
    "trained": "trained policy, the problem's own images",
    "blank_images": "trained policy, blank images",
    "shuffled_images": "trained policy, a different problem's images",
    "best_constant": "best constant guess",
    "untrained": "before training",
    "forced_scan": "before training, first words of the careful trace forced",
}


def write_report(runs: Sequence[RunDirectory], out: Path) -> Path:
    """Write the page about these runs (one, or several side by side) to `out` and return it.

    Raises UserError if there is no run, one is not a run directory, or `out` cannot be written.
    """
    if not runs:
        raise UserError("a report needs at least one run directory: vlm-rl report RUN")
    curves = [RunCurves(run.open(), name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    sections = [
        *([changed] if (changed := change_section(curves)) else []),
        reward_section(curves),
        accuracy_section(curves),
        length_section(curves),
        gradient_mass_section(curves),
        *([weighted] if (weighted := difficulty_section(curves)) else []),
        updates_section(curves),
        time_section(curves),
        _examples_section(curves),
        *([_controls_section(curves)] if any(_controls(run) for run in curves) else []),
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
        note = f"accuracy on {last.num_problems:,} problems{_intervals(first, last)}"
        tiles.append(Tile(before, percent_text(last.accuracy), note))
        before = f"{first.mean_length:.0f}" if len(scores) > 1 else ""
        tiles.append(Tile(before, f"{last.mean_length:.0f}", "tokens in a response, on average"))
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


def _intervals(before: Score, after: Score) -> str:
    if math.isnan(after.low):
        return ""
    if before is after or math.isnan(before.low):
        return f"; 95 % interval {interval_text(after)}"
    return f"; 95 % intervals {interval_text(before)} and {interval_text(after)}"


def _score_table(runs: Sequence[RunCurves]) -> Markup | str:
    rows = [_score_row(run.name, benchmark, scores) for run in runs for benchmark, scores in _scores(run).items()]
    if not rows:
        return _PARTS.missing("No evaluation with rows is stored; `vlm-rl eval` or eval.every makes one.")
    if len(rows) == 1 and len(runs) == 1:
        return ""  # the tiles say it all
    head = ["run", "benchmark", "problems", "first", "last", "change", "tokens"]
    return _PARTS.table(head, rows, numbers=2)


def _score_row(name: str, benchmark: str, scores: Sequence[Score]) -> list[str]:
    first, last = scores[0], scores[-1]
    before, change, tokens = "", "", f"{last.mean_length:.0f}"
    if first is not last:
        before = _score_text(first)
        change = f"{100 * (last.accuracy - first.accuracy):+.1f} points"
        tokens = f"{first.mean_length:.0f} → {tokens}"
    return [name, benchmark, f"{last.num_problems:,}", before, _score_text(last), change, tokens]


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


def _controls_section(runs: Sequence[RunCurves]) -> PageSection:
    cards = []
    for run in runs:
        if values := _controls(run):
            rows = [
                (text, percent_text(values[key]), values[key]) for key, text in _CONTROLS.items() if key in values
            ]
            heading = run.name if len(runs) > 1 else ""
            cards.append(_PARTS.bars(rows, heading, sentences=control_sentences(values)))
    caption = "What the accuracy would be without looking, and without training."
    return PageSection("Controls", caption, Markup("").join(cards))


def _controls(run: RunCurves) -> dict[str, float]:
    """Return the controls that the page knows. Raises UserError for one that is no accuracy."""
    values = {key: value for key, value in run.run.controls().items() if key in _CONTROLS}
    for key, value in values.items():
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise UserError(
                f"{run.run.path / 'controls.json'}: {key} is {value!r} and not a number in [0, 1]; "
                "correct it, or remove the file"
            )
    return values


def control_sentences(values: Mapping[str, float]) -> list[str]:
    """Return the sentences that the controls allow; none about a control that was not measured."""
    sentences = []
    blind = [values[key] for key in ("blank_images", "shuffled_images") if key in values]
    if blind and "best_constant" in values:
        best, guess = max(blind), values["best_constant"]
        if best <= guess + 0.05:
            sentences.append(
                f"Without the right image the trained policy scores at most {percent_text(best)}, no more than 5 "
                f"points above the best constant guess ({percent_text(guess)}): its accuracy comes from the picture."
            )
        else:
            sentences.append(
                f"Without the right image the trained policy still scores {percent_text(best)}, more than 5 points "
                f"above the best constant guess ({percent_text(guess)}): part of its accuracy does not come from the "
                "picture."
            )
    if "forced_scan" in values and "trained" in values:
        forced, trained = values["forced_scan"], values["trained"]
        already = f"Forcing the first words of the careful trace before training already gives {percent_text(forced)}"
        if forced >= trained - 0.05:
            sentences.append(
                f"{already}, against {percent_text(trained)} after it. So training moved probability from guessing "
                "to a way of working that the model had; it did not teach it to see."
            )
        else:
            sentences.append(
                f"{already}; training reaches {percent_text(trained)}. The first part is probability moved from "
                "guessing to a way of working that the model had; the rest was learned on top."
            )
    return sentences


def _configuration_section(runs: Sequence[RunCurves]) -> PageSection:
    body = _REPORT.configurations([(run.name, run.run.config_text()) for run in runs])
    return PageSection("Configuration", "The resolved configuration, as stored with the run.", body)
