"""The README's picture of a run: accuracy and length over training, and one problem before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.report import vega
from vlm_rl.report.charts.frame import BAD, GOOD, PALETTE
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.examples import ProblemExample, SampleAnswer, choose, side_by_side
from vlm_rl.report.html import data_uri, environment
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.report.sections import count_of_steps
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.run_files import write_atomically

_COLORS = ("ink", "muted", "good", "bad", "good_soft", "bad_soft")
_CHART = {"width": 296, "height": 290}  # pixels of a chart's axes


def write_readme_figure(run: RunDirectory, out: Path) -> Path:
    """Write the picture (PNG, 2400 x 960 pixels) of a run with two evaluations of a benchmark, and return `out`.

    Raises UserError if the run has no rollouts or nothing to compare.
    """
    curves = RunCurves(run.open())
    compared = next((results for results in curves.evals.values() if len(results) > 1), None)
    if compared is None or not len(curves.rollouts.steps):
        raise UserError(
            f"{run.path} needs rollouts and two evaluations of one benchmark for its picture; leave out --figure"
        )
    examples = choose(side_by_side([compared[0], compared[-1]]), 6)
    if not examples:
        raise UserError(
            f"{run.path}: the evaluations of {compared[0].benchmark} share no problem; leave out --figure"
        )
    titles = (f"step {compared[0].step}", f"step {compared[-1].step}")
    picture = vega.png_of_svg(_drawing(curves, compared[0].benchmark, examples[0], titles))
    write_atomically(out, lambda place: place.write_bytes(picture))
    return out


def _drawing(curves: RunCurves, benchmark: str, example: ProblemExample, titles: tuple[str, str]) -> str:
    """Return the picture as SVG."""
    first, last = (curves.scores[benchmark][place].accuracy for place in (0, -1))
    model = short_name(curves.config.model.path)
    note = f"{model}, {count_of_steps(curves.num_steps)} of reinforcement learning with verifiable rewards"
    if sets := curves.run.contaminated():  # a picture travels without its page: the stamp goes with it
        note = f"CONTAMINATED: trained on rows of {', '.join(sets)}"
    charts = vega.joined([_accuracy(curves, benchmark), _length(curves)], columns=2)
    colors = {name: vega.light_colors()[f"var(--{name.replace('_', '-')})"] for name in _COLORS}
    return (
        environment("vlm_rl.report")
        .get_template("readme_figure.svg")
        .render(
            headline=f"{curves.config.algorithm.name.upper()}: {first:.0%} → {last:.0%} on {benchmark}",
            note=note,
            stamped=bool(sets),
            charts=Markup(vega.svg(charts)),
            picture=data_uri(example.images[0]) if example.images else None,
            question=_wrapped(" ".join(example.question.replace("<image>", " ").split()), 36, 5),
            gold=f"right answer: {example.gold}",
            answers=[_answer(example.samples[place], titles[place]) for place in (0, -1)],
            color=colors,
        )
    )


def _accuracy(curves: RunCurves, benchmark: str) -> vega.Spec:
    rollouts = curves.rollouts
    columns = [[s.step, s.accuracy, s.low, s.high] for s in curves.scores[benchmark]]
    x, y, low, high = np.array(columns, dtype=np.float64).T
    sampled = Series("sampled in training", rollouts.steps, rollouts.accuracy, PALETTE[0], smooth=True)
    held_out = Series(benchmark, x, y, PALETTE[1], low=low, high=high, points=True)
    return _still([sampled, held_out], "Accuracy", percent=True)


def _length(curves: RunCurves) -> vega.Spec:
    r = curves.rollouts
    series = [
        Series("correct", r.steps, r.mean_correct, GOOD, smooth=True),
        Series("not correct", r.steps, r.mean_wrong, BAD, smooth=True),
        Series("all, p10 to p90", r.steps, r.mean, PALETTE[0], low=r.p10, high=r.p90, smooth=True),
    ]
    return _still(series, "Response length, tokens", from_zero=True)


def _still(series: list[Series], title: str, **options: Any) -> vega.Spec:
    spec = lines(series, height=_CHART["height"], **options)
    assert spec is not None, "a run with rollouts has an accuracy and a length"
    return vega.still(spec, width=_CHART["width"], title=title)


def _answer(sample: SampleAnswer, title: str) -> dict[str, Any]:
    """Lay out an answer's card: reasoning in four lines at most, the answer in one."""
    answer = _wrapped(sample.answer, 52, 1) if sample.answer else []
    return {
        "correct": sample.correct,
        "title": title,
        "verdict": f"{sample.length} tokens, {sample.verdict.replace('_', ' ')}",
        "lines": [*_wrapped(sample.reasoning or "no reasoning", 52, 4), *answer],
    }


def _wrapped(text: str, width: int, num_lines: int) -> list[str]:
    """Return the text in at most `num_lines` lines, with an ellipsis where it is cut."""
    return textwrap.wrap(text, width, max_lines=num_lines, placeholder=" …")
