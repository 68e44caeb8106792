"""The panels of the page, each as HTML of a scene."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from vlm_rl.demo.length_charts import lengths_html
from vlm_rl.demo.library import Library
from vlm_rl.demo.page_state import Scene
from vlm_rl.demo.pictures import images_of
from vlm_rl.demo.problem import columns_html, columns_of, problem_html, strip_html
from vlm_rl.demo.url_state import PARTS, SORTS, UNFILTERED
from vlm_rl.report.html import escape

EXPORTS = {
    "samples.csv": (
        "Table, CSV",
        "every response of the problems that pass the filters, with its length and verdict",
    ),
    "samples.parquet": ("Table, Parquet", "the same, exact, for pandas or DuckDB"),
    "page.html": (
        "Page, HTML",
        "the cards, the charts and up to twenty problems in one file that needs nothing else",
    ),
}


def header_html(library: Library) -> str:
    """The title, the runs, and what must be known about them."""
    marks = "".join(
        f"<p class='banner'><b>CONTAMINATED</b> {escape(run.name)} was trained on rows of "
        f"{escape(', '.join(run.contaminated))}: its scores there say nothing about unseen problems.</p>"
        for run in library.runs.values()
        if run.contaminated
    )
    marks += "".join(f"<p class='banner soft'>{escape(fault)}</p>" for fault in library.faults)
    names = [run.title for run in library.runs.values()]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        "<div class='top'><div><h1>How checkpoints reason, and how long</h1>"
        f"<p class='quiet'>{escape(shown)}</p></div>"
        "<button class='theme' data-theme title='light or dark' aria-label='light or dark'>◐</button></div>"
        f"{marks}"
    )


def problem_panel(scene: Scene) -> str:
    """The problem shown, its columns, and the way to the next one."""
    if scene.emptiness:
        return _empty(scene)
    base = scene.table.checkpoints[0]
    index = int(scene.order[scene.position])
    name = scene.table.ids[index]
    record = base.responses.records(name)[0]
    problem = problem_html(
        record,
        images_of(record, scene.view.benchmark, base.sets),
        base_rate=float(scene.table.base_rate_P[index]),
        base_when=scene.table.base_when,
        difficulty=str(scene.table.difficulty_P[index]),
    )
    columns = columns_of(scene.table, scene.slots, name, scene.view.sample)
    return f"{_walk(scene)}{problem}{columns_html(columns, scene.view)}"


def _walk(scene: Scene) -> str:
    """Previous and next around the strip of problems; both wrap around."""
    count = len(scene.order)

    def button(shift: int, text: str, name: str) -> str:
        other = scene.table.ids[scene.order[(scene.position + shift) % count]]
        go = escape(urlencode({"at": other}))
        title = f"{name} problem; the arrow keys do it too"
        return f"<button data-go='{go}' data-step='{name}' title='{title}'>{text}</button>"

    chosen = select_html("sort", "order", SORTS, scene.view.sort)
    fold = ("show the reasoning", "fold=") if scene.view.fold else ("fold the reasoning", "fold=1")
    return (
        f"<div class='walk'>{button(-1, '← previous', 'previous')}"
        f"<p class='where'>problem <b>{scene.position + 1:,}</b> of {count:,}</p>{button(1, 'next →', 'next')}"
        f"{chosen}<button class='fold' data-go='{fold[1]}'>{fold[0]}</button></div>"
        f"{strip_html(scene.table, scene.order, scene.position)}"
    )


def select_html(name: str, label: str, options: Mapping[str, str], value: str) -> str:
    """A list to choose one value of the view from."""
    inner = "".join(
        f"<option value='{escape(key)}'{' selected' if key == value else ''}>{escape(text)}</option>"
        for key, text in options.items()
    )
    return f"<label class='select'>{escape(label)} <select data-name='{name}'>{inner}</select></label>"


def lengths_panel(scene: Scene) -> str:
    """The charts of lengths, and of which tokens they speak."""
    if scene.emptiness:
        return _empty(scene)
    return (
        f"<div class='walk'>{select_html('part', 'tokens of the', PARTS, scene.view.part)}</div>{lengths_html(scene)}"
    )


def _empty(scene: Scene) -> str:
    back = f" <button data-go='{UNFILTERED}'>take all filters back</button>" if scene.table.num_problems else ""
    other = "" if scene.table.checkpoints else " <button data-go='tab=training'>see the training</button>"
    return f"<p class='missing'>{escape(scene.emptiness)}{back}{other}</p>"


def notes_html(scene: Scene) -> str:
    """What the address named in vain."""
    return "".join(f"<p class='banner soft'>{escape(note)}</p>" for note in scene.notes)


def take_html(scene: Scene) -> str:
    """Links to the exports of this view, and the link to the view itself."""
    if not scene.table.checkpoints:
        return _empty(scene)
    query = escape(scene.view.query())
    rows = "".join(
        f"<li><a class='button' href='export/{name}?{query}' download='{name}'>{title}</a><span>{text}</span></li>"
        for name, (title, text) in EXPORTS.items()
    )
    return (
        "<div class='card take'><h3>This view</h3>"
        f"<p class='quiet'>{len(scene.order):,} problems, {len(scene.labels)} checkpoints: "
        f"{escape(', '.join(scene.labels))}</p><ul>{rows}"
        "<li><span class='plain'>Charts, PNG</span><span>every chart has a PNG button in its corner</span></li>"
        f"</ul><h3>A link to it</h3><p class='link'><input readonly value='?{query}' aria-label='link'>"
        "<button data-copy>copy</button></p>"
        "<p class='quiet'>The address holds everything that is chosen: whoever opens it on a demo of the same runs "
        "sees the same.</p></div>"
    )


def failure_html(message: str) -> str:
    """What stands in a panel's place when its data cannot be read."""
    return f"<p class='missing bad'>{escape(message)}</p>"
