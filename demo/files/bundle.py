"""Write a comparison as a folder of static files: `vlm-rl demo RUN... --bundle DIR`.

    index.html       the page: cards, table, charts
    assets/          style sheet, scripts, the formula renderer
    data/index.js    a row of numbers for each problem
    data/part-N.js   the HTML of some problems, by the templates of the demo
    images/          pictures, by checksum

A browser opens it from any web server and from disk. A page on disk can fetch nothing, so the data comes as scripts:
each calls one function with JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import CHANGES, SORTS, TABS, UrlState
from vlm_rl.demo.panels.lengths import lengths_html
from vlm_rl.demo.panels.overview import overview_html
from vlm_rl.demo.panels.page_parts import header_html
from vlm_rl.demo.panels.page_state import PageState, PageStates
from vlm_rl.demo.panels.problem import KEYS, columns_of, problem_card
from vlm_rl.demo.panels.reasoning import reasoning_html
from vlm_rl.demo.panels.summary_cards import count_html, summary_html
from vlm_rl.demo.panels.table import ROWS, heads_of, row_of
from vlm_rl.demo.web.rendering import render
from vlm_rl.demo.web.theme import asset, katex_files, stylesheet_of_bundle
from vlm_rl.errors import UserError
from vlm_rl.report import vega

_TABS = ("overview", "problems", "table", "lengths", "reasoning")
_PART_BYTES = 500_000  # of a file with problems: small enough to come at once, and few enough files
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self' data:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class BundleSize:
    """What was written."""

    problems: int
    files: int
    bytes: int

    def __str__(self) -> str:
        """Say it to a person."""
        return f"{self.problems:,} problems in {self.files:,} files, {self.bytes / 1e6:,.1f} MB"


def write_bundle(folders: Sequence[Path], out: Path, *, view: str = "") -> BundleSize:
    """Write the bundle of an address into `out`, which must not exist.

    Args:
        folders: as for the demo.
        view: the query of the demo's address: which checkpoints, and which problems by its filters. Without one,
            the demo's first view. Its tab and its problem are what the bundle opens with.

    Raises UserError if there is nothing to show, or if `out` exists or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose a different --bundle")
    state = PageStates(Library(folders)).of(UrlState.parse(view))
    if state.emptiness:
        raise UserError(state.emptiness)
    if state.notes:
        raise UserError(f"--view: {state.notes[0]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
            place = Path(work) / out.name
            _write(state, place)
            files = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
            place.rename(out)
    except OSError as error:
        raise UserError(
            f"cannot write the bundle to {out}: {error.strerror or error}; choose a different one"
        ) from None
    return BundleSize(len(state.order), len(files), sum(files))


def _write(state: PageState, out: Path) -> None:
    for name in ("assets", "data", "images"):
        (out / name).mkdir(parents=True)
    opening = {
        "tab": state.url.tab if state.url.tab in _TABS else _TABS[0],
        "at": state.problem_id,
        "sort": state.url.sort,
    }
    state = _in_order_of_the_set(state)
    part_of: list[int] = []
    for number, problems in enumerate(_parts(state, out / "images")):
        part_of += [number] * len(problems)
        _write_script(out / "data" / f"part-{number}.js", "bundlePart", number, problems)
    _write_script(out / "data" / "index.js", "bundleIndex", opening | _index(state, part_of))
    has_formulas = _write_katex(out / "assets")
    _write_text(out / "assets" / "page.css", stylesheet_of_bundle())
    _write_text(out / "assets" / "page.js", asset("reading.js") + asset("bundle.js"))
    for name, script in zip(("vega", "loader"), vega.scripts(), strict=True):
        _write_text(out / "assets" / f"{name}.js", f"(() => {{{script}\n}})();\n")  # modules do not load from disk
    page = render(
        "bundle",
        policy=_POLICY,
        title=" against ".join(state.labels),
        header=header_html(state.library),
        benchmark=state.url.benchmark,
        summary=summary_html(state, interactive=False),
        filters=count_html(state, interactive=False) if state.url.filtered else "",
        tabs={name: TABS[name] for name in _TABS},
        overview=overview_html(state, interactive=False, leads=True),
        lengths=lengths_html(state, interactive=False),
        reasoning=reasoning_html(state, interactive=False),
        orders=SORTS,
        changes=CHANGES,
        keys=KEYS,
        heads=heads_of(state),
        labels=list(zip(state.labels, state.colors, strict=True)),
        has_formulas=has_formulas,
    )
    _write_text(out / "index.html", page)


def _in_order_of_the_set(state: PageState) -> PageState:
    """Return the state with its problems as the page's script orders them where no order is chosen."""
    order = np.flatnonzero(state.keep_P)
    position = int(np.searchsorted(order, state.order[state.position]))
    return replace(state, url=replace(state.url, sort=""), order=order, position=position)


# -- problems ------------------------------------------------------------------------------------


def _parts(state: PageState, images: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the problems in their order, as many at a time as one file holds."""
    part: list[dict[str, Any]] = []
    size = 0
    for p in state.order.tolist():
        problem = _problem(state, p, images)
        part.append(problem)
        size += len(problem["card"]) + sum(len(sample["columns"]) for sample in problem["samples"])
        if size > _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _problem(state: PageState, p: int, images: Path) -> dict[str, Any]:
    """Return the HTML of a problem's card, and for each sample that of its columns and marks."""
    card = problem_card(state, p)
    card = replace(card, images=tuple(address and _write_image(address, images) for address in card.images))
    num_samples = max(len(checkpoint.responses.row_of[state.table.ids[p]]) for checkpoint in state.table.checkpoints)
    samples = []
    for sample in range(num_samples):
        columns = columns_of(replace(state, url=replace(state.url, sample=sample)), p)
        samples.append(
            {"columns": render("bundled_columns", columns=columns), "marks": render("marks", columns=columns)}
        )
    return {"card": render("bundled_card", problem=card), "samples": samples}


def _write_image(address: str, images: Path) -> str:
    """Write the picture of a data: address into a file, and return the file's address from the page."""
    kind, _, data = address.partition(";base64,")
    content = base64.b64decode(data)
    path = images / f"{hashlib.sha256(content).hexdigest()[:24]}.{kind.rpartition('/')[2]}"
    if not path.exists():
        path.write_bytes(content)
    return f"images/{path.name}"


def _index(state: PageState, part_of: Sequence[int]) -> dict[str, Any]:
    """Return the table's data for showing, sorting and filtering: a list per column, in the data set's order."""
    table, order = state.table, state.order.tolist()
    rows = [row_of(state, p) for p in order]
    return {
        "num_rows": ROWS,
        "keys": list(state.url.keys),
        "slots": state.colors,
        "part": list(part_of),
        "id": [row.problem_id for row in rows],
        "category": [row.category for row in rows],
        "difficulty": [row.difficulty for row in rows],
        "question": [row.question for row in rows],
        "rate": [None if math.isnan(table.base_rate_P[p]) else float(table.base_rate_P[p]) for p in order],
        "score": table.score_CP[:, order].round(6).tolist(),
        "length": table.length_CP[:, order].round(2).tolist(),
    }


# -- files ---------------------------------------------------------------------------------------


def _write_script(path: Path, function: str, *values: Any) -> None:
    texts = (json.dumps(value, separators=(",", ":"), allow_nan=False) for value in values)
    _write_text(path, f"{function}({', '.join(texts)});\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_katex(assets: Path) -> bool:
    """Copy the formula renderer that gradio ships; say whether there is one. Without it, formulas stay source."""
    gradio = find_spec("gradio")
    frontend = Path(str(gradio.origin)).parent / "templates" / "frontend" if gradio else assets
    files = katex_files(frontend)
    if files is None:
        return False
    script, style = ((frontend / name).read_text(encoding="utf-8") for name in files)
    script, num_exports = re.subn(r"export\s*\{\s*([\w$]+) as default\s*\};?\s*$", r"window.katex = \1;", script)
    if not num_exports:  # a module of a different form
        return False
    _write_text(assets / "katex.js", f"(() => {{{script}\n}})();\n")
    style = re.sub(r",\s*url\([^)]*\.(?:woff|ttf)\)\s*format\([^)]*\)", "", style)  # every browser reads woff2
    style = re.sub(r"\.gradio-container-[\w-]+ ", "", style)  # the rules hold within gradio's page alone
    _write_text(assets / "katex.css", style)
    for font in sorted(set(re.findall(r"KaTeX_[\w-]+\.woff2", style))):
        (assets / font).write_bytes((frontend / "assets" / font).read_bytes())
    return True
