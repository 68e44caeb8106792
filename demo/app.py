"""The demo's page: one problem, several checkpoints side by side, and their lengths as one chart.

Model text reaches the page escaped only (vlm_rl.cards), images as data: addresses, so that the
server hands out no file at all. demo/server.py is the web side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import plotly.graph_objects as go

from demo.library import KINDS, Library
from vlm_rl.cards import Example, escape, example_html

_COLORS = ("#5a8fd8", "#dd8b45", "#3fae9f", "#cf6a8e", "#9682d4", "#98a34c")  # on light and on dark
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")  # equal curves show through each other


def build_app(runs: Sequence[Path]) -> gr.Blocks:
    """The page about these runs. Raises UserError where there is nothing to show."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio asks each time before it would phone home
    library = Library(runs)
    benchmarks = list(library.checkpoints)
    first = benchmarks[0]
    with gr.Blocks(title="vlm-rl demo", analytics_enabled=False) as app:
        gr.HTML(_header(library))
        with gr.Row():
            benchmark = gr.Dropdown(benchmarks, value=first, label="Benchmark", scale=1, min_width=180)
            chosen = gr.Dropdown(
                library.labels(first),
                value=library.first_choice(first),
                multiselect=True,
                label="Checkpoints, side by side",
                scale=3,
            )
            kind = gr.Dropdown(list(KINDS), value="all", label="Problems", scale=1, min_width=180)
        with gr.Row(elem_classes="walk"):
            previous = gr.Button("← previous", scale=0, min_width=130)
            where = gr.HTML(elem_classes="where")
            following = gr.Button("next →", scale=0, min_width=130)
        position = gr.State(0)
        problem = gr.HTML(elem_id="problem")
        lengths = gr.Plot(label="Length of the responses", elem_id="lengths", show_label=False)

        def show(benchmark: str, chosen: list[str], kind: str, position: int) -> tuple[Any, ...]:
            return _view(library, benchmark, chosen, kind, position)

        def restart(benchmark: str, chosen: list[str], kind: str) -> tuple[Any, ...]:
            return show(benchmark, chosen, kind, 0)

        def back(benchmark: str, chosen: list[str], kind: str, position: int) -> tuple[Any, ...]:
            return show(benchmark, chosen, kind, position - 1)

        def on(benchmark: str, chosen: list[str], kind: str, position: int) -> tuple[Any, ...]:
            return show(benchmark, chosen, kind, position + 1)

        def other(benchmark: str) -> Any:
            return gr.Dropdown(library.labels(benchmark), value=library.first_choice(benchmark))

        inputs, outputs = [benchmark, chosen, kind, position], [problem, where, lengths, position]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        app.load(show, inputs, outputs, **quiet)
        benchmark.change(other, benchmark, chosen, **quiet)  # which then changes `chosen`
        for part in (chosen, kind):
            part.change(restart, [benchmark, chosen, kind], outputs, **quiet)
        previous.click(back, inputs, outputs, **quiet)
        following.click(on, inputs, outputs, **quiet)
    return app


def _view(library: Library, benchmark: str, chosen: Sequence[str], kind: str, position: int) -> tuple[Any, ...]:
    """(problem, where, chart, position) for these settings; the position wraps around."""
    labels = [label for label in library.labels(benchmark) if label in chosen]  # in the order of training
    if not labels:
        return _note("Choose two or more checkpoints above."), "", None, 0
    examples = library.examples(benchmark, labels, kind)
    if not examples:
        return _note(f"No problem of this kind: {kind}."), "", length_chart(library, benchmark, labels, None), 0
    position %= len(examples)
    example = examples[position]
    where = f"<p>problem <b>{position + 1}</b> of {len(examples)}</p>"
    return example_html(example, labels), where, length_chart(library, benchmark, labels, example), position


def length_chart(library: Library, benchmark: str, labels: Sequence[str], example: Example | None) -> go.Figure:
    """The share of responses up to each length, one curve per checkpoint; dots mark the problem shown."""
    figure = go.Figure()
    found = [library.lengths(benchmark, label) for label in labels]
    end = 1.08 * max((lengths[-1] for lengths in found if len(lengths)), default=1)
    for index, (label, lengths) in enumerate(zip(labels, found, strict=True)):
        if not len(lengths):
            continue
        color = _COLORS[index % len(_COLORS)]
        share = np.arange(1, len(lengths) + 1) / len(lengths)
        middle = f"all {lengths[0]}" if lengths[0] == lengths[-1] else f"median {np.median(lengths):.0f}"
        figure.add_scatter(
            x=[0, *lengths, end],  # from border to border: one length for all is a step, not a line at the edge
            y=[0, *share, 1],
            mode="lines",
            line={"shape": "hv", "width": 2.5, "color": color, "dash": _DASHES[index % len(_DASHES)]},
            name=f"{escape(label)}, {middle}",
            hovertemplate="%{y:.0%} have at most %{x} tokens<extra></extra>",
        )
        if example is not None:
            length = example.samples[index].length
            figure.add_scatter(
                x=[length],
                y=[np.searchsorted(lengths, length, side="right") / len(lengths)],
                mode="markers",
                marker={"size": 11, "color": color, "line": {"width": 2, "color": "white"}},
                showlegend=False,
                hovertemplate=f"this problem: {length} tokens<extra></extra>",
            )
    axis = {"gridcolor": "rgba(128,138,155,.22)", "zeroline": False, "linecolor": "rgba(128,138,155,.4)"}
    figure.update_layout(
        title={"text": "Length of the responses: share with at most so many tokens", "x": 0.01, "font": {"size": 15}},
        xaxis={"title": "tokens", "range": [0, end], **axis},
        yaxis={"tickformat": ".0%", "range": [-0.02, 1.03], **axis},
        font={"color": "#808a9b", "family": "system-ui, sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": -0.24, "x": 0},
        margin={"l": 56, "r": 16, "t": 48, "b": 40},
        height=380,
    )
    return figure


def _header(library: Library) -> str:
    marks = "".join(
        f"<p class='banner'><b>CONTAMINATED</b> {escape(name)} was trained on rows of {escape(', '.join(sets))}.</p>"
        for name, run in library.runs
        if (sets := run.contaminated())
    )
    names = ", ".join(escape(f"{name} ({run.config().algorithm.name.upper()})") for name, run in library.runs)
    return f"<div class='top'><h1>How the reasoning changed</h1><p class='quiet'>{names}</p>{marks}</div>"


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>"
