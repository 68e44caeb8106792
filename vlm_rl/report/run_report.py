"""One self-contained HTML page about one or several runs: no script, no outside request.

`controls.json` of a run, where there is one, holds accuracies in [0, 1] under these keys, each
optional: trained (the trained policy on the real images), blank_images, shuffled_images,
best_constant (the best constant guess), untrained (before training, free) and forced_scan (before
training, the first words of a careful trace forced).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vlm_rl.errors import UserError
from vlm_rl.report.examples import choose, example_html, side_by_side
from vlm_rl.report.figures import missing
from vlm_rl.report.html import Section, escape, page_html
from vlm_rl.report.readme_figure import write_hero
from vlm_rl.report.run_curves import RunCurves, Score
from vlm_rl.report.sections import (
    accuracy_section,
    duration,
    gradient_mass_section,
    interval,
    label,
    length_section,
    percent,
    reward_section,
    time_section,
    updates_section,
)
from vlm_rl.report.vega import scripts
from vlm_rl.run.directory import EvalResult, RunDirectory, distinct_names, write_atomically

__all__ = ["control_sentences", "write_hero", "write_report"]

_NUM_EXAMPLES = 6

_CONTROLS = {
    "trained": "trained policy, the problem's own images",
    "blank_images": "trained policy, blank images",
    "shuffled_images": "trained policy, another problem's images",
    "best_constant": "best constant guess",
    "untrained": "before training",
    "forced_scan": "before training, first words of the careful trace forced",
}


def write_report(runs: Sequence[RunDirectory], out: Path) -> Path:
    """Write the page about these runs (one, or several side by side) to `out` and return it.

    Raises UserError if there is no run, one is not a run directory, or `out` cannot be written.
    """
    if not runs:
        raise UserError("a report needs at least one run directory")
    curves = [RunCurves(run.open(), name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    sections = [
        reward_section(curves),
        accuracy_section(curves),
        length_section(curves),
        gradient_mass_section(curves),
        updates_section(curves),
        time_section(curves),
        _examples(curves),
        *([_controls(curves)] if any(one.run.controls() for one in curves) else []),
        _configuration(curves),
    ]
    page = _page(curves, sections)
    try:
        write_atomically(out, lambda place: place.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror or error}") from None
    return out


def _page(curves: Sequence[RunCurves], sections: Sequence[Section]) -> str:
    names = " and ".join(one.name for one in curves)
    return page_html(
        title=f"{names} · vlm-rl report",
        header=f"{_banner(curves)}{_headline(curves)}",
        sections=sections,
        footer="Written by vlm-rl from the files of the run.",
        scripts=scripts(),
    )


# -- the top of the page ------------------------------------------------------------------------


def _banner(curves: Sequence[RunCurves]) -> str:
    return "".join(
        f"<p class='banner'><b>CONTAMINATED</b> — {escape(one.name)} was trained on rows of a benchmark "
        f"({escape(', '.join(sets))}). Its scores there say nothing about unseen problems.</p>"
        for one in curves
        if (sets := one.run.contaminated())
    )


def _headline(curves: Sequence[RunCurves]) -> str:
    first = curves[0]
    if len(curves) > 1:
        names = ", ".join(one.config.algorithm.name.upper() for one in curves)
        return f"<h1>{len(curves)} runs side by side: {escape(names)}</h1>{_score_table(curves)}"
    config = first.config
    model = Path(config.model.path).name
    sets = ", ".join(Path(name).name for name in config.data.train)
    batch = f"{config.rollout.prompts_per_step} problems × {config.rollout.responses_per_prompt} responses a step"
    how = f"{model} trained on {sets} with {config.algorithm.name.upper()}"
    lead = f"{how}, {batch}; run {first.name}, seed {config.seed}"
    if not first.metrics and first.evals:  # a folder of `vlm-rl eval`
        lead = f"{model} evaluated on {', '.join(first.evals)}; this folder holds no training"
    return (
        f"<h1>{escape(_one_line(first))}</h1><p class='lead'>{escape(lead)}</p>{_tiles(first)}{_score_table(curves)}"
    )


def _one_line(one: RunCurves) -> str:
    name = one.config.algorithm.name.upper()
    found = next(iter(one.scores.items()), None)
    if found is not None and not one.metrics and len(found[1]) == 1:  # a folder of `vlm-rl eval`
        return f"{percent(found[1][0].accuracy)} on {found[0]}"
    if found is None or len(found[1]) < 2:
        return f"{name}: {max(len(one.metrics), len(one.rollouts.steps))} steps"
    benchmark, scores = found
    before, after = scores[0], scores[-1]
    return f"{name}: {percent(before.accuracy)} → {percent(after.accuracy)} on {benchmark}"


def _tiles(one: RunCurves) -> str:
    tiles = []
    scores = next(iter(one.scores.values()), [])
    if scores:
        before, after = scores[0], scores[-1]
        note = f"accuracy on {after.num_problems:,} problems{_intervals(before, after)}"
        tiles.append(_tile(percent(before.accuracy), percent(after.accuracy), note, single=before is after))
        first, last = (f"{s.mean_length:.0f}" for s in (before, after))
        tiles.append(_tile(first, last, "tokens in a response, on average", single=before is after))
    x, reward = one.metric("reward")
    if np.isfinite(reward).any():
        finite = reward[np.isfinite(reward)]
        width = max(1, len(finite) // 10)
        first, last = f"{finite[:width].mean():.2f}", f"{finite[-width:].mean():.2f}"
        tiles.append(_tile(first, last, f"training reward, first and last {width} steps", single=len(finite) < 2))
    if len(x):
        _, seconds = one.metric("step_time")
        time = f"{duration(float(np.nansum(seconds)))} in all" if np.isfinite(seconds).any() else "time not logged"
        tiles.append(_tile("", f"{len(one.metrics)}", f"training steps, {time}", single=True))
    return f"<div class='tiles'>{''.join(tiles)}</div>" if tiles else ""


def _intervals(before: Score, after: Score) -> str:
    if math.isnan(after.low):
        return ""
    if before is after or math.isnan(before.low):
        return f"; 95 % interval {interval(after)}"
    return f"; 95 % intervals {interval(before)} and {interval(after)}"


def _tile(before: str, after: str, note: str, *, single: bool) -> str:
    start = "" if single else f"<span class='from'>{escape(before)} → </span>"
    return f"<div class='card tile'><div class='value'>{start}{escape(after)}</div><p>{escape(note)}</p></div>"


def _score_table(curves: Sequence[RunCurves]) -> str:
    rows = [
        (one.name, benchmark, scores[0], scores[-1]) for one in curves for benchmark, scores in one.scores.items()
    ]
    if not rows:
        return missing("No evaluation is stored with this run; `vlm-rl eval` or eval.every makes one.")
    if len(rows) == 1:
        return ""  # the tiles say it all
    head = "<tr><th>run</th><th>benchmark</th><th class='number'>problems</th><th class='number'>first</th>"
    head += "<th class='number'>last</th><th class='number'>change</th><th class='number'>tokens</th></tr>"
    return f"<div class='scroll'><table>{head}{''.join(_score_row(*row) for row in rows)}</table></div>"


def _score_row(name: str, benchmark: str, first: Score, last: Score) -> str:
    change = "" if first is last else f"{100 * (last.accuracy - first.accuracy):+.1f} points"
    cells = [
        f"step {s.step}: {percent(s.accuracy)}{interval(s, ' (', ')')}" if s is last or first is not last else ""
        for s in (first, last)
    ]
    tokens = f"{last.mean_length:.0f}" if first is last else f"{first.mean_length:.0f} → {last.mean_length:.0f}"
    numbers = [f"{last.num_problems:,}", cells[0] if first is not last else "", cells[1], change, tokens]
    return (
        f"<tr><td>{escape(name)}</td><td>{escape(benchmark)}</td>"
        + "".join(f"<td class='number'>{escape(text)}</td>" for text in numbers)
        + "</tr>"
    )


# -- examples, controls, configuration ----------------------------------------------------------


def _examples(curves: Sequence[RunCurves]) -> Section:
    caption = "Problems of an evaluation, before and after training: what became right, and what did not."
    compared = _compared(curves)
    if compared is None:
        return Section("Examples", caption, missing("There are no two evaluations of one benchmark to compare."))
    titles, results = compared
    examples = choose(side_by_side(results), _NUM_EXAMPLES)
    body = "".join(example_html(example, titles) for example in examples)
    return Section("Examples", caption, body or missing("The evaluations have no problem in common."))


def _compared(curves: Sequence[RunCurves]) -> tuple[list[str], list[EvalResult]] | None:
    """The first run's first evaluation and every run's last, on the first benchmark that allows it."""
    for benchmark, results in curves[0].evals.items():
        chosen = [(curves[0], results[0])]
        chosen += [(one, one.evals[benchmark][-1]) for one in curves if one.evals.get(benchmark)]
        distinct = list({id(result): (one, result) for one, result in chosen}.values())
        if len(distinct) > 1:
            titles = [label(curves, one, f"step {result.step}") for one, result in distinct]
            return titles, [result for _, result in distinct]
    return None


def _controls(curves: Sequence[RunCurves]) -> Section:
    parts = []
    for one in curves:
        values = one.run.controls()
        if not values:
            continue
        rows = "".join(
            f"<tr><td>{text}</td><td class='number'>{percent(values[key])}</td>"
            f"<td class='bar'><i style='width:{100 * values[key]:.1f}%'></i></td></tr>"
            for key, text in _CONTROLS.items()
            if key in values
        )
        head = f"<h3>{escape(one.name)}</h3>" if len(curves) > 1 else ""
        sentences = "".join(f"<p>{text}</p>" for text in control_sentences(values))
        parts.append(f"<div class='card bars'>{head}<table>{rows}</table>{sentences}</div>")
    return Section("Controls", "What the accuracy would be without looking, and without training.", "".join(parts))


def control_sentences(values: Mapping[str, float]) -> list[str]:
    """What the controls allow to say, in plain words; nothing about a control that was not measured."""
    sentences = []
    blind = [values[key] for key in ("blank_images", "shuffled_images") if key in values]
    if blind and "best_constant" in values:
        best, guess = max(blind), values["best_constant"]
        if best <= guess + 0.05:
            sentences.append(
                f"Without the right image the trained policy scores at most {percent(best)}, no more than 5 points "
                f"above the best constant guess ({percent(guess)}): its accuracy comes from the picture."
            )
        else:
            sentences.append(
                f"Without the right image the trained policy still scores {percent(best)}, more than 5 points above "
                f"the best constant guess ({percent(guess)}): part of its accuracy does not come from the picture."
            )
    if "forced_scan" in values and "trained" in values:
        forced, trained = values["forced_scan"], values["trained"]
        already = f"Forcing the first words of the careful trace before training already gives {percent(forced)}"
        if forced >= trained - 0.05:
            sentences.append(
                f"{already}, against {percent(trained)} after it. So training moved probability from guessing to a "
                "way of working that the model had; it did not teach it to see."
            )
        else:
            sentences.append(
                f"{already}; training reaches {percent(trained)}. The first part is probability moved from guessing "
                "to a way of working that the model had; the rest was learned on top."
            )
    return sentences


def _configuration(curves: Sequence[RunCurves]) -> Section:
    body = "".join(
        f"<details><summary>config.yaml of {escape(one.name)}</summary>"
        f"<pre>{escape(one.run.config_text())}</pre></details>"
        for one in curves
    )
    return Section("Configuration", "The resolved configuration, as stored with the run.", body)
