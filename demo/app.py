"""Build the demo's page in gradio: controls, panels, and the value that flows between them, the address's query.

The hidden component `bridge` holds the query, with the number of the request that it answers. Whatever changes the
view, a control, a tab or a mark, is a patch of the query, which the page's script (demo/assets/demo.js) hands to the
one event `go`. The answer writes the bridge, from which the script copies the query into the address. About a visitor
the server keeps only which curves the page was last sent.

The panels' HTML comes from templates that escape every value (demo/web/rendering.py); demo/server.py is the web side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.events import api

from vlm_rl.demo.numbers.problem_table import DIFFICULTIES
from vlm_rl.demo.numbers.url_state import (
    CHANGES,
    FLAGS,
    MAX_OTHERS,
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
from vlm_rl.demo.web.view_changes import ViewChanges
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
    def everything(self) -> list[Any]:
        """Return all that an answer writes: the bridge, the panels, the tabs and the controls."""
        return [self.bridge, *self.panels.values(), self.tabs, *self.values]


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


def _tell(key: str, value: str = "value") -> str:
    """Return what gradio runs in the page, with a control's value: it tells the page's script of a change."""
    detail = f"{{ detail: {{ key: '{key}', value: {value} }} }}"
    return f"(value) => {{ document.dispatchEvent(new CustomEvent('view-control', {detail})); }}"


def _wire(app: gr.Blocks, states: PageStates, components: Components) -> None:
    def arrive(address: str) -> list[Any]:
        return _answer(states, UrlState.parse(address or states.first_view), components, number=0)

    def changed(event: gr.EventData) -> list[Any]:
        asked = ViewChanges.model_validate(event._data or {})
        answer = _answer(states, asked.url(), components, number=asked.number)
        if asked.controls_hold:  # somebody may be typing in one, or have opened the next tab
            answer[-1 - len(_KEYS) :] = [gr.skip() for _ in ("tab", *_KEYS)]
        return answer

    shown: dict[str, Any] = _LOUD | {"show_progress_on": components.loading}
    app.load(arrive, components.bridge, components.everything, js="() => [location.search]", **shown)
    components.bridge.go(changed, None, components.everything, trigger_mode="multiple", **shown)
    for key in _KEYS:
        control = components.controls[key]
        # while somebody types, a text box hands over its text without the last letter: wait for Enter or a blur
        triggers = [control.submit, control.blur] if key in _TEXTS else [control.input]
        gr.on(triggers, None, control, js=_tell(key), **_QUIET)
    components.controls["clear"].click(None, js=_tell("clear", f"'{UNFILTERED}'"), **_QUIET)
    for tab in components.tabs.children:
        if isinstance(tab, gr.Tab):
            tab.select(None, js=_tell("tab", f"'{tab.id}'"), **_QUIET)
    timer = gr.Timer(_REFRESH_SECONDS, active=any(run.is_alive() for run in states.library.runs.values()))
    timer.tick(_refresher(states), components.bridge, components.panels["training"], **_QUIET)
    api(_summary_of(states), api_name="summary", api_description="The numbers of a view, by its query")


def _refresher(states: PageStates) -> Callable[[str, gr.Request], Any]:
    """Return an event that draws the curves again when one of the shown runs has logged more."""
    # page -> what it was last sent: view, runs' stamps
    drawn: dict[str | None, tuple[UrlState, tuple[int, ...]]] = {}

    def refresh(query: str, request: gr.Request) -> Any:
        url = UrlState.parse(query)
        if url.tab != "training":
            return gr.skip()
        try:
            state = states.of(url)
            stamps = tuple(run.stamp() for run in shown_runs(states.library, state.url))
        except UNREADABLE:  # the panel itself says so
            return gr.skip()
        if drawn.get(request.session_hash) == (url, stamps):
            return gr.skip()
        if len(drawn) >= _MAX_PAGES:
            drawn.clear()
        drawn[request.session_hash] = url, stamps
        return training_panel(states.library, state.url, state.run_slots())

    return refresh


def _answer(states: PageStates, url: UrlState, components: Components, *, number: int) -> list[Any]:
    """Return the values of `everything`: the query and `number`, the panels, the tab, and every control."""
    try:
        state = states.of(url)
        panels = _panels_of(state, components)
    except UNREADABLE as error:
        controls = [gr.skip() for _ in _KEYS]
        return [_answered(url, number), *_failed(url, components, error), gr.update(selected=url.tab), *controls]
    choices = _choices(state)
    controls = []
    for key in _KEYS:
        value = _value(state.url, key)
        controls.append(gr.update(value=value, choices=choices[key]) if key in choices else gr.update(value=value))
    return [_answered(state.url, number), *panels, gr.update(selected=state.url.tab), *controls]


def _answered(url: UrlState, number: int) -> str:
    """Return the bridge's value: a query whose first key, the number of the request, is no key of a view."""
    return f"answer={number}&{url.query()}"


def _panels_of(state: PageState, components: Components) -> list[Any]:
    """Return the panels that can be seen: of the tabs only the open one is drawn."""
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
    return [drawn.get(name, gr.skip()) for name in components.panels]


def _failed(url: UrlState, components: Components, error: Exception) -> list[Any]:
    """Return the message where the open panel would be."""
    message = str(error)
    if not isinstance(error, UserError):  # the files were as expected when the demo started
        message = f"The files of a run were changed or removed ({message[:160]}). Start the demo again."
    drawn = {url.tab: error_html(message), "notes": error_html(message), "summary": "", "count": ""}
    return [drawn.get(name, gr.skip()) for name in components.panels]


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
