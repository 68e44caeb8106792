"""The parts of the page around its panels: the header, notes about the address, and the Export panel."""

from __future__ import annotations

from markupsafe import Markup

from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.panels.page_state import PageState
from vlm_rl.demo.panels.problem import empty_panel
from vlm_rl.demo.web.rendering import render

_FILES = {
    "samples.csv": (
        "Table, CSV",
        "every response to the problems that pass the filters, with its length and verdict",
    ),
    "samples.parquet": ("Table, Parquet", "the same, exact, for pandas or DuckDB"),
    "page.html": (
        "Page, HTML",
        "the cards, the charts and up to twenty problems in one file that needs nothing else",
    ),
}


def header_html(library: Library, *, interactive: bool = True) -> Markup:
    """Return the title, the runs, and the warnings about them."""
    return render(
        "header",
        titles=[run.title for run in library.runs.values()],
        contaminated={run.name: run.contaminated for run in library.runs.values() if run.contaminated},
        faults=library.faults,
        interactive=interactive,
    )


def notes_html(state: PageState) -> Markup:
    """Return a line for each thing that the address names and that does not exist."""
    return render("notes", notes=state.notes)


def export_panel(state: PageState) -> Markup:
    """Return links to the files of what is shown, and the link to the page as it is."""
    if not state.table.checkpoints:
        return empty_panel(state)
    return render("export_panel", count=len(state.order), labels=state.labels, files=_FILES, query=state.url.query())


def error_html(message: str) -> Markup:
    """Return a panel's text where its data cannot be read."""
    return render("message", text=message, is_error=True)
