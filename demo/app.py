"""The demo's page in gradio: controls, panels, and one value that flows between them, the view's query.

The hidden component `bridge` holds the query. Every event starts from it and ends by writing it: a
control changes its own key, a click on a mark hands over a patch (demo/assets/demo.js), and the script
copies it into the address. The server keeps nothing about a visitor.

Model text reaches the page escaped only, images as data: addresses; demo/server.py is the web side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from gradio.events import api

from vlm_rl.demo.page_state import Scene, Scenes
from vlm_rl.demo.panels import failure_html, header_html, lengths_panel, notes_html, problem_panel, take_html
from vlm_rl.demo.summary import count_html, summary_html
from vlm_rl.demo.table import DIFFICULTIES
from vlm_rl.demo.theme import katex_files, script
from vlm_rl.demo.training import shown_runs, training_html
from vlm_rl.demo.url_state import CHANGES, FLAGS, MAX_OTHERS, TABS, UNFILTERED, View
from vlm_rl.errors import UserError

_REFRESH_SECONDS = 5.0
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# what a control sets in the view, in the order in which they stand on the page
_KEYS = (
    "benchmark", "base", "others", "change", "verdict", "flags", "category", "difficulty", "low", "high", "text",
    "focus", "runs",
)  # fmt: skip
_TEXTS = ("low", "high", "text")
_UNREADABLE = (UserError, OSError, ValueError, KeyError)  # what files can do while they are shown


@dataclass(frozen=True)
class Parts:
    """The components that events read and write."""

    bridge: gr.HTML
    tabs: gr.Tabs
    controls: dict[str, Any]
    panels: dict[str, gr.HTML]

    @property
    def values(self) -> list[Any]:
        return [self.controls[key] for key in _KEYS]

    @property
    def shown(self) -> list[Any]:
        return [self.bridge, *self.panels.values()]

    @property
    def everything(self) -> list[Any]:
        return [*self.shown, self.tabs, *self.values]


def build_page(scenes: Scenes, *, live: Callable[[gr.HTML], None]) -> gr.Blocks:
    """The page about these runs.

    `live` draws the panel that asks checkpoints: it is called inside that panel's gr.Tab with the bridge, makes
    its own components and events there, and nothing else on the page knows of it.
    """
    first = scenes.of(View())
    with gr.Blocks(title="vlm-rl demo", analytics_enabled=False) as app:
        gr.HTML(header_html(scenes.library))
        bridge = gr.HTML("", html_template=_katex_place(), js_on_load=script(), elem_id="bridge")
        parts = Parts(bridge, *_body(first, bridge, live))
        _wire(app, scenes, parts)
    return app


def _katex_place() -> str:
    """Where the script finds the formula renderer; without one, formulas stay as their source."""
    found = katex_files(Path(gr.__file__).parent / "templates" / "frontend")
    return "<i></i>" if found is None else f"<i data-katex='{found[0]}' data-katex-style='{found[1]}'></i>"


def _body(
    scene: Scene, bridge: gr.HTML, live: Callable[[gr.HTML], None]
) -> tuple[gr.Tabs, dict[str, Any], dict[str, gr.HTML]]:
    controls: dict[str, Any] = {}
    panels: dict[str, gr.HTML] = {}
    choices = _choices(scene)
    view = scene.view

    def dropdown(key: str, label: str, **options: Any) -> None:
        options = {"value": _value(view, key), "choices": choices[key], "label": label, "min_width": 150} | options
        controls[key] = gr.Dropdown(interactive=True, elem_id=f"control-{key}", **options)

    with gr.Row(elem_classes="choose"):
        dropdown("benchmark", "Problems of", scale=1)
        dropdown("base", "Baseline", scale=2)
        dropdown("others", "Beside it, up to five", multiselect=True, max_choices=MAX_OTHERS, scale=4)
    panels["notes"] = gr.HTML()
    panels["summary"] = gr.HTML(elem_id="summary")
    with gr.Accordion("Filters", open=False, elem_id="filters"), gr.Row(elem_classes="filters"):
        dropdown("change", "Against the baseline")
        dropdown("verdict", "Verdict")
        dropdown("flags", "Marked as", multiselect=True)
        dropdown("category", "Category", multiselect=True)
        dropdown("difficulty", "Difficulty", multiselect=True)
        controls["low"] = gr.Textbox(label="Tokens, from", min_width=90, max_length=9, elem_id="control-low")
        controls["high"] = gr.Textbox(label="Tokens, to", min_width=90, max_length=9, elem_id="control-high")
        controls["text"] = gr.Textbox(
            label="Text contains, then Enter", min_width=150, max_length=200, elem_id="control-text"
        )
        dropdown("focus", "Looked for in")
        clear = gr.Button("Clear filters", min_width=110, elem_id="clear")
    panels["count"] = gr.HTML(elem_id="count")
    with gr.Tabs(selected=view.tab, elem_id="panels") as tabs:
        with gr.Tab(TABS["problems"], id="problems"):
            panels["problems"] = gr.HTML(elem_id="problem")
        with gr.Tab(TABS["lengths"], id="lengths"):
            panels["lengths"] = gr.HTML(elem_id="lengths")
        with gr.Tab(TABS["training"], id="training"):
            dropdown("runs", "Runs; without a choice, those of the checkpoints above", multiselect=True)
            panels["training"] = gr.HTML(elem_id="training")
        with gr.Tab(TABS["live"], id="live"):
            live(bridge)
        with gr.Tab(TABS["take"], id="take"):
            panels["take"] = gr.HTML(elem_id="take")
    controls["clear"] = clear
    return tabs, controls, panels


# -- what the controls offer ---------------------------------------------------------------------


def _choices(scene: Scene) -> dict[str, list[tuple[str, str]]]:
    """(label, value) pairs of every control that has some."""
    library, view = scene.library, scene.view
    labels = [(label, key) for key, label in library.labels(view.benchmark).items()] if view.benchmark else []
    known = [(name, str(key)) for key, (_, name) in DIFFICULTIES.items() if key in set(scene.table.difficulty_P)]
    return {
        "benchmark": [(name, name) for name in library.benchmarks],
        "base": labels,
        "others": [pair for pair in labels if pair[1] != view.base],
        "change": _named(CHANGES),
        "verdict": [("any", ""), ("right", "correct"), ("not right", "wrong")],
        "flags": _named(FLAGS),
        "category": [(name or "none", name) for name in sorted({str(one) for one in scene.table.category_P})],
        "difficulty": known,
        "focus": [("any of them", ""), *[(one.label, one.key) for one in scene.table.checkpoints]],
        "runs": [(run.title, run.name) for run in library.runs.values()],
    }


def _named(names: dict[str, str]) -> list[tuple[str, str]]:
    return [(text, key) for key, text in names.items()]


def _value(view: View, key: str) -> Any:
    value = getattr(view, key)
    if isinstance(value, tuple):
        return list(value)
    if key in ("benchmark", "base"):
        return value or None  # there is none without an evaluation
    return "" if value is None else str(value)


# -- events --------------------------------------------------------------------------------------


def _wire(app: gr.Blocks, scenes: Scenes, parts: Parts) -> None:
    def arrive(address: str) -> list[Any]:
        return _everything(scenes, View.parse(address), parts)

    def clicked(query: str, event: gr.EventData) -> list[Any]:
        patch = event._data.get("patch") if isinstance(event._data, dict) else ""
        return _everything(scenes, View.parse(query).patched(patch if isinstance(patch, str) else ""), parts)

    def cleared(query: str) -> list[Any]:
        return _everything(scenes, View.parse(query).patched(UNFILTERED), parts)

    def set_key(key: str) -> Callable[[str, Any], list[Any]]:
        def change(query: str, value: Any) -> list[Any]:
            before = View.parse(query)
            view = _with(before, key, value)
            if view == before or not query:  # nothing changed, or the address was not read yet
                everything = key in ("benchmark", "base", "others")
                return [gr.skip() for _ in (parts.everything if everything else parts.shown)]
            return (
                _everything(scenes, view, parts)
                if key in ("benchmark", "base", "others")
                else _panels(scenes, view, parts)
            )

        return change

    app.load(arrive, parts.bridge, parts.everything, js="() => [location.search]", **_QUIET)
    parts.bridge.go(clicked, parts.bridge, parts.everything, trigger_mode="multiple", **_QUIET)
    parts.controls["clear"].click(cleared, parts.bridge, parts.everything, **_QUIET)
    for key in _KEYS:
        outputs = parts.everything if key in ("benchmark", "base", "others") else parts.shown
        control = parts.controls[key]
        # a text box hands over what stood in it before the last letter, so it waits for Enter or for the way out
        triggers = [control.submit, control.blur] if key in _TEXTS else [control.input]
        gr.on(triggers, set_key(key), [parts.bridge, control], outputs, trigger_mode="always_last", **_QUIET)
    for tab in parts.tabs.children:
        if isinstance(tab, gr.Tab):
            tab.select(_opener(scenes, str(tab.id), parts), parts.bridge, parts.shown, **_QUIET)
    timer = gr.Timer(_REFRESH_SECONDS, active=any(run.alive() for run in scenes.library.runs.values()))
    timer.tick(_refresher(scenes), parts.bridge, parts.panels["training"], **_QUIET)
    api(_summary_of(scenes), api_name="summary", api_description="The numbers of a view, by its query")


def _opener(scenes: Scenes, tab: str, parts: Parts) -> Callable[[str], list[Any]]:
    def opened(query: str) -> list[Any]:
        if not query:  # gradio opens the first tab by itself, before the address was read
            return [gr.skip() for _ in parts.shown]
        return _panels(scenes, View.parse(query).patched(f"tab={tab}"), parts)

    return opened


def _refresher(scenes: Scenes) -> Callable[[str], Any]:
    """Draws the curves again when one of the shown runs has logged more."""
    seen: dict[str, tuple[int, ...]] = {}  # query -> the runs' stamps when they were drawn

    def refresh(query: str) -> Any:
        if View.parse(query).tab != "training":
            return gr.skip()
        try:
            scene = scenes.of(View.parse(query))
            stamps = tuple(run.stamp() for run in shown_runs(scenes.library, scene.view))
        except _UNREADABLE:  # the panel itself says so
            return gr.skip()
        if seen.get(query) == stamps:
            return gr.skip()
        if len(seen) > 100:
            seen.clear()
        seen[query] = stamps
        return training_html(scenes.library, scene.view, scene.run_slots())

    return refresh


def _with(view: View, key: str, value: Any) -> View:
    """The view after a control was set by hand; another benchmark or baseline brings its own problems."""
    if key in ("low", "high"):
        return view.patched(urlencode({key: value or ""}))
    if isinstance(getattr(view, key), tuple):
        changed = replace(view, **{key: tuple(str(one)[:200] for one in value or ())})
    else:
        changed = replace(view, **{key: str(value or "")[:200]})
    if key == "benchmark":
        return View(benchmark=changed.benchmark, tab=view.tab)
    if key == "base":  # the two change places where the new baseline stood beside the old one
        others = tuple(view.base if one == changed.base else one for one in view.others)
        return replace(changed, others=tuple(one for one in others if one and one != changed.base))
    return changed


def _everything(scenes: Scenes, view: View, parts: Parts) -> list[Any]:
    """Panels, and every control at the view's state."""
    try:
        scene = scenes.of(view)
        panels = _panels_of(scene, parts)
    except _UNREADABLE as error:
        return [*_failed(view, parts, error), gr.skip(), *[gr.skip() for _ in _KEYS]]
    choices = _choices(scene)
    controls = []
    for key in _KEYS:
        value = _value(scene.view, key)
        controls.append(gr.update(value=value, choices=choices[key]) if key in choices else gr.update(value=value))
    return [*panels, gr.update(selected=scene.view.tab), *controls]


def _panels(scenes: Scenes, view: View, parts: Parts) -> list[Any]:
    try:
        return _panels_of(scenes.of(view), parts)
    except _UNREADABLE as error:
        return _failed(view, parts, error)


def _panels_of(scene: Scene, parts: Parts) -> list[Any]:
    """The query, and the panels that can be seen: of the tabs only the open one is drawn."""
    tab = scene.view.tab
    drawn = {"notes": notes_html(scene), "summary": summary_html(scene), "count": count_html(scene)}
    if tab == "lengths":
        drawn["lengths"] = lengths_panel(scene)
    elif tab == "training":
        drawn["training"] = training_html(scene.library, scene.view, scene.run_slots())
    elif tab == "take":
        drawn["take"] = take_html(scene)
    elif tab == "problems":
        drawn["problems"] = problem_panel(scene)
    return [scene.view.query(), *[drawn.get(name, gr.skip()) for name in parts.panels]]


def _failed(view: View, parts: Parts, error: Exception) -> list[Any]:
    """The message where the open panel would be."""
    message = str(error)
    if not isinstance(error, UserError):  # the files were as expected when the demo started
        message = f"The files of a run changed or went away ({message[:160]}). Start the demo again."
    drawn = {view.tab: failure_html(message), "notes": failure_html(message), "summary": "", "count": ""}
    return [view.query(), *[drawn.get(name, gr.skip()) for name in parts.panels]]


def _summary_of(scenes: Scenes) -> Callable[[str], dict[str, Any]]:
    def summary(query: str) -> dict[str, Any]:
        try:
            scene = scenes.of(View.parse(query))
        except UserError as error:
            raise gr.Error(str(error)) from None
        return {
            "query": scene.view.query(),
            "problems": [scene.table.ids[p] for p in scene.order.tolist()],
            "checkpoints": [
                {
                    "key": one.key,
                    "accuracy": found.accuracy,
                    "median": found.median,
                    "p90": found.p90,
                    "cut": found.cut,
                    "token_change": found.tokens.mean,
                    "score_change": found.score.mean,
                }
                for one, found in zip(scene.table.checkpoints, scene.summaries, strict=True)
            ],
        }

    return summary
