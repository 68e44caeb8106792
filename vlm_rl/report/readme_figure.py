"""The README's picture of a run: accuracy and length over training, and one problem before and after."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from vlm_rl.data.images import decode_image
from vlm_rl.errors import UserError
from vlm_rl.report.examples import Example, Sample, choose, side_by_side
from vlm_rl.report.html import VERDICT_MARKS
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.run.directory import RunDirectory, write_atomically
from vlm_rl.stats import smooth

INK, MUTED, GRID = "#1d2430", "#647083", "#e3e7ed"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # for measuring; the page's own font, narrower, is what shows
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "axes.ymargin": 0.08,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}

# the light theme of vlm_rl/assets/cards.css
_COLORS = {
    "ink": "#1d2430", "muted": "#647083", "grid": "#e3e7ed", "sunken": "#f3f4f7", "blue": "#3a6fb7",
    "orange": "#d1782b", "good": "#2b8a63", "bad": "#c2504d", "good_soft": "#e4f4ec", "bad_soft": "#fbe9e8",
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    **STYLE,
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": _COLORS["ink"],
    "axes.edgecolor": _COLORS["grid"],
    "axes.labelcolor": _COLORS["muted"],
    "grid.color": _COLORS["grid"],
    "xtick.color": _COLORS["muted"],
    "ytick.color": _COLORS["muted"],
    "figure.facecolor": "white",
    "legend.frameon": True,
    "legend.facecolor": "white",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
}
_MONO = {"family": "DejaVu Sans Mono", "size": 8.2}


def write_hero(run: RunDirectory, out: Path) -> Path:
    """Write the picture (PNG, 2400 x 960 pixels) of a run with two evaluations of a benchmark.

    Raises UserError where the run has no rollouts or nothing to compare.
    """
    curves = RunCurves(run.open())
    compared = next((results for results in curves.evals.values() if len(results) > 1), None)
    if compared is None or not len(curves.rollouts.steps):
        raise UserError(f"{run.path} needs rollouts and two evaluations of one benchmark for its picture")
    examples = choose(side_by_side([compared[0], compared[-1]]), 6)
    if not examples:
        raise UserError(f"{run.path}: the evaluations of {compared[0].benchmark} share no problem")
    titles = (f"step {compared[0].step}", f"step {compared[-1].step}")
    with mpl.rc_context(_STYLE):
        figure = _draw(curves, compared[0].benchmark, examples[0], titles)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    write_atomically(out, lambda place: place.write_bytes(buffer.getvalue()))
    return out


def _draw(curves: RunCurves, benchmark: str, example: Example, titles: tuple[str, str]) -> Figure:
    figure = Figure(figsize=(12, 4.8))
    scores = curves.scores[benchmark]
    before, after = scores[0].accuracy, scores[-1].accuracy
    headline = plain(f"{curves.config.algorithm.name.upper()}: {before:.0%} → {after:.0%} on {benchmark}")
    figure.text(0.03, 0.925, headline, size=16, weight="bold", va="center")
    model = Path(curves.config.model.path).name
    note = f"{model}, {len(curves.rollouts.steps)} steps of reinforcement learning with verifiable rewards"
    color = _COLORS["muted"]
    if sets := curves.run.contaminated():  # a picture travels without its page: the stamp goes with it
        note, color = f"CONTAMINATED: trained on rows of {', '.join(sets)}", _COLORS["bad"]
    figure.text(0.03, 0.86, plain(note), size=10, color=color, va="center")
    _accuracy(figure.add_axes((0.065, 0.13, 0.235, 0.61)), curves, benchmark)
    _length(figure.add_axes((0.365, 0.13, 0.235, 0.61)), curves)
    _problem(figure, example, titles)
    return figure


def _accuracy(axes: Axes, curves: RunCurves, benchmark: str) -> None:
    rollouts, scores = curves.rollouts, curves.scores[benchmark]
    _title(axes, "Accuracy")
    _curve(axes, rollouts.steps, rollouts.accuracy, _COLORS["blue"], "sampled in training")
    x, y = [score.step for score in scores], [score.accuracy for score in scores]
    ends = np.array([[s.accuracy - s.low, s.high - s.accuracy] for s in scores]).T
    if np.isfinite(ends).all():
        axes.errorbar(x, y, ends.clip(min=0), fmt="none", ecolor=_COLORS["orange"], elinewidth=1.3, capsize=3)
    axes.plot(x, y, "o", color=_COLORS["orange"], ms=6, label=plain(benchmark), zorder=4)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="lower right", fontsize=8.5)


def _length(axes: Axes, curves: RunCurves) -> None:
    r = curves.rollouts
    _title(axes, "Response length, tokens")
    axes.fill_between(r.steps, r.p10, r.p90, color=_COLORS["blue"], alpha=0.13, lw=0, label="p10 to p90")
    _curve(axes, r.steps, r.mean_correct, _COLORS["good"], "correct")
    _curve(axes, r.steps, r.mean_wrong, _COLORS["bad"], "not correct")
    _curve(axes, r.steps, r.mean, _COLORS["blue"], "all")
    axes.set_ylim(bottom=0, top=1.32 * float(np.nanmax(r.p90)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.legend(loc="upper left", ncols=2, fontsize=8.5)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", size=11, weight="bold", pad=10)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _curve(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(y) >= 12:
        axes.plot(x, y, color=color, lw=0.8, alpha=0.3)
        y = smooth(y)
    axes.plot(x, y, color=color, lw=2, label=label)


def _problem(figure: Figure, example: Example, titles: tuple[str, str]) -> None:
    """The right third: the image with its question, and the two answers under each other."""
    left, picture_width = 0.645, 0.1
    if example.images:
        image = decode_image(example.images[0], where="an evaluation record")
        image.thumbnail((480, 480), Image.Resampling.LANCZOS)
        axes = figure.add_axes((left, 0.69, picture_width, 0.25))
        axes.imshow(np.asarray(image))
        axes.set_anchor("NW")
        axes.axis("off")
    start = left + picture_width + 0.012 if example.images else left
    question = " ".join(example.question.replace("<image>", " ").split())
    figure.text(start, 0.93, _wrapped(question, 32, 6), size=10, va="top", linespacing=1.35)
    figure.text(start, 0.70, plain(f"right answer: {example.gold}"), size=9, color=_COLORS["muted"])
    for bottom, sample, title in zip((0.37, 0.05), (example.samples[0], example.samples[-1]), titles, strict=True):
        _answer(figure, (left, bottom, 0.335, 0.27), sample, title)


def _answer(figure: Figure, box: tuple[float, float, float, float], sample: Sample, title: str) -> None:
    axes = figure.add_axes(box)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.axis("off")
    color, soft = (_COLORS[name + end] for name in ["good" if sample.correct else "bad"] for end in ("", "_soft"))
    shape = FancyBboxPatch((0.012, 0.02), 0.976, 0.96, boxstyle="round,pad=0,rounding_size=0.03", mutation_aspect=2.6)
    shape.set(facecolor=soft, edgecolor=color, linewidth=0.9)
    axes.add_patch(shape)
    axes.text(0.04, 0.84, plain(title), weight="bold", va="center", size=9.5)
    mark = VERDICT_MARKS.get(sample.verdict, sample.verdict)
    axes.text(0.96, 0.84, f"{sample.length} tokens   {mark}", color=color, ha="right", va="center", size=9.5)
    reasoning = _wrapped(sample.reasoning or "no reasoning", 52, 4)
    text = f"{reasoning}\n{_wrapped(sample.answer, 52, 1)}" if sample.answer else reasoning
    axes.text(0.04, 0.68, text, va="top", linespacing=1.45, **_MONO)


def _wrapped(text: str, width: int, lines: int) -> str:
    """The text in at most `lines` lines, an ellipsis where it goes on."""
    return plain("\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …")))


def plain(text: str) -> str:
    """Text that Matplotlib shows as it is: no mathematics between dollars, no label hidden by an underscore."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text
