"""Build the demo's page in gradio: controls, panels, and the value that flows between them, the address's query.

The hidden component `bridge` holds the query. Every event starts from it and ends by writing it: a control changes
its own key, a click on a mark hands over a patch (demo/assets/demo.js), and the script copies the query into the
address. About a visitor the server keeps only which curves the page was last sent.

The panels' HTML comes from templates that escape every value (demo/web/rendering.py); demo/server.py is the web side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from gradio.events import api

from vlm_rl.demo.numbers.problem_table import DIFFICULTIES
from vlm_rl.demo.numbers.url_state import (
    CHANGES,
    FLAGS,
    MAX_OTHERS,
    MAX_TEXT,
    NO_CATEGORY,
    TABS,
    UNFILTERED,
    VERDICTS,
    UrlState,
)
from vlm_rl.demo.panels.lengths import lengths_panel
from vlm_rl.demo.panels.overview import overview_panel
from vlm_rl.demo.panels.page_parts import error_html, export_panel, header_html, notes_html
from vlm_rl.demo.panels.page_state import UNREADABLE, PageState, PageStates
from vlm_rl.demo.panels.problem import problem_panel
from vlm_rl.demo.panels.reasoning import reasoning_panel
from vlm_rl.demo.panels.summary_cards import count_html, summary_html
from vlm_rl.demo.panels.table import table_panel
from vlm_rl.demo.panels.training import shown_runs, training_panel
from vlm_rl.demo.web.rendering import render
from vlm_rl.demo.web.theme import asset, katex_files
from vlm_rl.errors import UserError

_REFRESH_SECONDS = 5.0
_MAX_PAGES = 400  # remembered; then all are forgotten, and the open ones are sent their curves once more
# gradio would raise, with a traceback in the log, for a choice that is not offered now: the address may name any
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "preprocess": False}
_LOUD = _QUIET | {"show_progress": "minimal"}  # shown by the style of the component `loading`, see gradio.css
# the key that each control sets, in their order on the page
_KEYS = (
    "benchmark", "base", "others", "change", "verdict", "flags", "category", "difficulty", "low", "high", "text",
    "focus", "runs",
)  # fmt: skip
_TEXTS = ("low", "high", "text")
_LOADING = render("loading")
_WHOLE_PAGE = ("benchmark", "base", "others")  # they bring other problems, so every control may change


@dataclass(frozen=True)
class Components:
    """The components that events read and write."""

    bridge: gr.HTML
    loading: gr.HTML  # marked by gradio while an event that draws panels is under way
    tabs: gr.Tabs
    controls: dict[str, Any]
    panels: dict[str, gr.HTML]

    @property
    def values(self) -> list[Any]:
        """Return the controls whose values are the page's state, in the order of their keys."""
        return [self.controls[key] for key in _KEYS]

    @property
    def shown(self) -> list[Any]:
        """Return the parts that an update draws again."""
        return [self.bridge, *self.panels.values()]

    @property
    def everything(self) -> list[Any]:
        """Return all parts: those that are drawn, the tabs and the controls."""
        return [*self.shown, self.tabs, *self.values]


def build_page(states: PageStates, *, live: Callable[[gr.HTML], None]) -> gr.Blocks:
    """Return the page about these runs.

    `live` draws the panel that asks checkpoints: it is called inside that panel's gr.Tab with the bridge and makes
    its own components and events there.
    """
    first = states.of(UrlState())
    with gr.Blocks(title="vlm-rl demo", analytics_enabled=False) as app:
        _html("header", header_html(states.library))
        script = asset("reading.js") + asset("demo.js")
        bridge = gr.HTML("", html_template=_katex_place(), js_on_load=script, elem_id="bridge")
        components = Components(bridge, _html("loading", render("loading")), *_body(first, bridge, live))
        _wire(app, states, components)
    return app


def _html(name: str, value: str = "") -> gr.HTML:
    """Return a place for HTML of our templates, in the demo's style and not in gradio's."""
    return gr.HTML(value, elem_id=name, apply_default_css=False)


def _katex_place() -> str:
    """Return where the script finds the formula renderer; without one, formulas stay as their source."""
    return render("katex", files=katex_files(Path(gr.__file__).parent / "templates" / "frontend"))


def _body(
    state: PageState, bridge: gr.HTML, live: Callable[[gr.HTML], None]
) -> tuple[gr.Tabs, dict[str, Any], dict[str, gr.HTML]]:
    controls: dict[str, Any] = {}
    panels: dict[str, gr.HTML] = {}
    choices = _choices(state)
    url = state.url

    def dropdown(key: str, label: str, **options: Any) -> None:
        options = {"value": _value(url, key), "choices": choices[key], "label": label, "min_width": 150} | options
        controls[key] = gr.Dropdown(interactive=True, elem_id=f"control-{key}", **options)

    with gr.Row(elem_classes="choose"):
        dropdown("benchmark", "Benchmark", scale=2)
        dropdown("base", "Baseline", scale=2)
        dropdown("others", "Compare with", multiselect=True, max_choices=MAX_OTHERS, scale=7)
    panels["notes"] = _html("notes")
    panels["summary"] = _html("summary")
    with gr.Row(elem_classes="narrow"):
        controls["text"] = gr.Textbox(
            label="Search problems and responses",
            placeholder="Search ids, questions, responses: /",
            show_label=False,
            container=False,
            min_width=220,
            max_length=200,
            elem_id="control-text",
        )
        with gr.Accordion("Filters", open=False, elem_id="filters"), gr.Row(elem_classes="filters"):
            dropdown("change", "Change from the baseline")
            dropdown("verdict", "Verdict")
            dropdown("flags", "Flags", multiselect=True)
            dropdown("category", "Category", multiselect=True)
            dropdown("difficulty", "Difficulty", multiselect=True)
            controls["low"] = gr.Textbox(label="Tokens from", min_width=90, max_length=9, elem_id="control-low")
            controls["high"] = gr.Textbox(label="Tokens to", min_width=90, max_length=9, elem_id="control-high")
            dropdown("focus", "Search in")
            clear = gr.Button("Clear filters", min_width=110, elem_id="clear")
        panels["count"] = _html("count")
    with gr.Tabs(selected=url.tab, elem_id="panels") as tabs:
        with gr.Tab(TABS["overview"], id="overview"):
            panels["overview"] = _html("overview", _LOADING)
        with gr.Tab(TABS["problems"], id="problems"):
            panels["problems"] = _html("problem", _LOADING)
        with gr.Tab(TABS["table"], id="table"):
            panels["table"] = _html("table", _LOADING)
        with gr.Tab(TABS["lengths"], id="lengths"):
            panels["lengths"] = _html("lengths", _LOADING)
        with gr.Tab(TABS["reasoning"], id="reasoning"):
            panels["reasoning"] = _html("reasoning", _LOADING)
        with gr.Tab(TABS["training"], id="training"):
            with gr.Row(elem_classes="beside"):
                dropdown("runs", "Runs (default: those of the checkpoints above)", multiselect=True)
            panels["training"] = _html("training", _LOADING)
        with gr.Tab(TABS["live"], id="live"):
            live(bridge)
        with gr.Tab(TABS["export"], id="export"):
            panels["export"] = _html("export", _LOADING)
    controls["clear"] = clear
    return tabs, controls, panels


# -- what the controls offer ---------------------------------------------------------------------


def _choices(state: PageState) -> dict[str, list[tuple[str, str]]]:
    """Return the (label, value) choices of every control that has some."""
    library, url = state.library, state.url
    labels = [(label, key) for key, label in library.labels(url.benchmark).items()] if url.benchmark else []
    known = [(name, str(key)) for key, (_, name) in DIFFICULTIES.items() if key in set(state.table.difficulty_P)]
    return {
        "benchmark": [(name, name) for name in library.benchmarks],
        "base": labels,
        "others": [(label, key) for label, key in labels if key != url.base],
        "change": _named(CHANGES),
        "verdict": _named(VERDICTS),
        "flags": _named(FLAGS),
        "category": [(name, name) for name in sorted({str(name) or NO_CATEGORY for name in state.table.category_P})],
        "difficulty": known,
        "focus": [("any checkpoint", ""), *[(shown.label, shown.key) for shown in state.table.checkpoints]],
        "runs": [(run.title, run.name) for run in library.runs.values()],
    }


def _named(names: dict[str, str]) -> list[tuple[str, str]]:
    return [(text, key) for key, text in names.items()]


def _value(url: UrlState, key: str) -> Any:
    value = getattr(url, key)
    if isinstance(value, tuple):
        return list(value)
    if key in ("benchmark", "base"):
        return value or None  # there is none without an evaluation
    return "" if value is None else str(value)


# -- events --------------------------------------------------------------------------------------


def _wire(app: gr.Blocks, states: PageStates, components: Components) -> None:
    def arrive(address: str) -> list[Any]:
        return _everything(states, UrlState.parse(address or states.first_view), components)

    def clicked(query: str, event: gr.EventData) -> list[Any]:
        patch = _patch_of(event)
        # a patch with a question mark is a whole address, to which the browser's Back led
        url = UrlState.parse(patch) if patch.startswith("?") else UrlState.parse(query).patched(patch)
        return _everything(states, url, components)

    def cleared(query: str) -> list[Any]:
        return _everything(states, UrlState.parse(query).patched(UNFILTERED), components)

    def set_key(key: str) -> Callable[[str, Any], list[Any]]:
        def change(query: str, value: Any) -> list[Any]:
            before = UrlState.parse(query)
            url = _with(before, key, value)
            is_whole = key in _WHOLE_PAGE
            if url == before or not query:  # nothing changed, or the address was not read yet
                return [gr.skip() for _ in (components.everything if is_whole else components.shown)]
            return (_everything if is_whole else _panels)(states, url, components)

        return change

    shown: dict[str, Any] = _LOUD | {"show_progress_on": components.loading}
    app.load(arrive, components.bridge, components.everything, js="() => [location.search]", **shown)
    components.bridge.go(clicked, components.bridge, components.everything, trigger_mode="multiple", **shown)
    components.controls["clear"].click(cleared, components.bridge, components.everything, **shown)
    for key in _KEYS:
        outputs = components.everything if key in _WHOLE_PAGE else components.shown
        control = components.controls[key]
        # while somebody types, a text box hands over its text without the last letter: wait for Enter or a blur
        triggers = [control.submit, control.blur] if key in _TEXTS else [control.input]
        gr.on(triggers, set_key(key), [components.bridge, control], outputs, trigger_mode="always_last", **shown)
    for tab in components.tabs.children:
        if isinstance(tab, gr.Tab):
            tab.select(_opener(states, str(tab.id), components), components.bridge, components.shown, **shown)
    timer = gr.Timer(_REFRESH_SECONDS, active=any(run.is_alive() for run in states.library.runs.values()))
    timer.tick(_refresher(states), components.bridge, components.panels["training"], **_QUIET)
    api(_summary_of(states), api_name="summary", api_description="The numbers of a view, by its query")


def _patch_of(event: gr.EventData) -> str:
    """Read the values from the page's script."""
    patch = event._data.get("patch") if isinstance(event._data, dict) else ""
    return patch if isinstance(patch, str) else ""


def _opener(states: PageStates, tab: str, components: Components) -> Callable[[str], list[Any]]:
    def opened(query: str) -> list[Any]:
        url = UrlState.parse(query)
        # gradio opens the first tab by itself, before the address was read, and tells of a tab that we have opened
        if not query or url.tab == tab:
            return [gr.skip() for _ in components.shown]
        return _panels(states, url.patched(f"tab={tab}"), components)

    return opened


def _refresher(states: PageStates) -> Callable[[str, gr.Request], Any]:
    """Return an event that draws the curves again when one of the shown runs has logged more."""
    drawn: dict[str | None, tuple[str, tuple[int, ...]]] = {}  # page -> what it was last sent: query, runs' stamps

    def refresh(query: str, request: gr.Request) -> Any:
        if UrlState.parse(query).tab != "training":
            return gr.skip()
        try:
            state = states.of(UrlState.parse(query))
            stamps = tuple(run.stamp() for run in shown_runs(states.library, state.url))
        except UNREADABLE:  # the panel itself says so
            return gr.skip()
        if drawn.get(request.session_hash) == (query, stamps):
            return gr.skip()
        if len(drawn) >= _MAX_PAGES:
            drawn.clear()
        drawn[request.session_hash] = query, stamps
        return training_panel(states.library, state.url, state.run_slots())

    return refresh


def _with(url: UrlState, key: str, value: Any) -> UrlState:
    """Return the state after a control was set by hand; a new benchmark or baseline brings its own problems."""
    if key in ("low", "high"):
        return url.patched(urlencode({key: value or ""}))
    if isinstance(getattr(url, key), tuple):
        changed = replace(url, **{key: tuple(str(item)[:MAX_TEXT] for item in value or ())})
    else:
        changed = replace(url, **{key: str(value or "")[:MAX_TEXT]})
    if key == "benchmark":
        return UrlState(benchmark=changed.benchmark, tab=url.tab)
    if key == "base":  # a new baseline that was shown beside the old one changes places with it
        others = tuple(url.base if other == changed.base else other for other in url.others)
        return replace(changed, others=tuple(other for other in others if other and other != changed.base))
    return changed


def _everything(states: PageStates, url: UrlState, components: Components) -> list[Any]:
    """Return the panels, and every control as the address says."""
    try:
        state = states.of(url)
        panels = _panels_of(state, components)
    except UNREADABLE as error:
        return [*_failed(url, components, error), gr.update(selected=url.tab), *[gr.skip() for _ in _KEYS]]
    choices = _choices(state)
    controls = []
    for key in _KEYS:
        value = _value(state.url, key)
        controls.append(gr.update(value=value, choices=choices[key]) if key in choices else gr.update(value=value))
    return [*panels, gr.update(selected=state.url.tab), *controls]


def _panels(states: PageStates, url: UrlState, components: Components) -> list[Any]:
    try:
        return _panels_of(states.of(url), components)
    except UNREADABLE as error:
        return _failed(url, components, error)


def _panels_of(state: PageState, components: Components) -> list[Any]:
    """Return the query, and the panels that can be seen: of the tabs only the open one is drawn."""
    tab = state.url.tab
    drawn = {"notes": notes_html(state), "summary": summary_html(state), "count": count_html(state)}
    if tab == "overview":
        drawn["overview"] = overview_panel(state)
    elif tab == "lengths":
        drawn["lengths"] = lengths_panel(state)
    elif tab == "reasoning":
        drawn["reasoning"] = reasoning_panel(state)
    elif tab == "training":
        drawn["training"] = training_panel(state.library, state.url, state.run_slots())
    elif tab == "export":
        drawn["export"] = export_panel(state)
    elif tab == "table":
        drawn["table"] = table_panel(state)
    elif tab == "problems":
        drawn["problems"] = problem_panel(state)
    return [state.url.query(), *[drawn.get(name, gr.skip()) for name in components.panels]]


def _failed(url: UrlState, components: Components, error: Exception) -> list[Any]:
    """Return the message where the open panel would be."""
    message = str(error)
    if not isinstance(error, UserError):  # the files were as expected when the demo started
        message = f"The files of a run were changed or removed ({message[:160]}). Start the demo again."
    drawn = {url.tab: error_html(message), "notes": error_html(message), "summary": "", "count": ""}
    return [url.query(), *[drawn.get(name, gr.skip()) for name in components.panels]]


def _summary_of(states: PageStates) -> Callable[[str], dict[str, Any]]:
    def summary(query: str) -> dict[str, Any]:
        try:
            state = states.of(UrlState.parse(query))
        except UNREADABLE as error:
            raise gr.Error(str(error), print_exception=False) from None
        return {
            "query": state.url.query(),
            "problems": [state.table.ids[p] for p in state.order.tolist()],
            "checkpoints": [
                {
                    "key": checkpoint.key,
                    "accuracy": numbers.accuracy,
                    "median": numbers.median,
                    "p90": numbers.p90,
                    "cut": numbers.cut,
                    "token_change": numbers.tokens.mean,
                    "score_change": numbers.score.mean,
                }
                for checkpoint, numbers in zip(state.table.checkpoints, state.summaries, strict=True)
            ],
        }

    return summary
