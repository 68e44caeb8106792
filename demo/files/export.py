"""Make the files of what the page shows: its rows as a table, and one page that needs nothing else."""

from __future__ import annotations

import io
import re

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from markupsafe import Markup

from vlm_rl.demo.panels.lengths import lengths_html
from vlm_rl.demo.panels.overview import overview_html
from vlm_rl.demo.panels.page_parts import header_html
from vlm_rl.demo.panels.page_state import PageState
from vlm_rl.demo.panels.problem import columns_of, problem_card
from vlm_rl.demo.panels.reasoning import reasoning_html
from vlm_rl.demo.panels.summary_cards import count_html, summary_html
from vlm_rl.demo.web.rendering import render
from vlm_rl.demo.web.theme import stylesheet_of_page
from vlm_rl.errors import UserError
from vlm_rl.report import vega
from vlm_rl.report.html import content_policy

MAX_EXAMPLES = 20  # problems on the page
_STORED = ["sample_index", "verdict", "length", "stop_reason", "extracted", "gold", "path", "reason", "question"]
# a text cell that a spreadsheet would run as a formula; plain numbers such as -3 are not touched
_FORMULA = re.compile(r"[=+@\t\r]|-[^0-9.]|[-+][0-9.]*[^0-9.eE]")
MEDIA_TYPES = {
    "samples.csv": "text/csv; charset=utf-8",
    "samples.parquet": "application/vnd.apache.parquet",
    "page.html": "text/html; charset=utf-8",
}


def export(state: PageState, name: str) -> bytes:
    """Return a file of MEDIA_TYPES. Raises UserError for any other name, and if nothing was evaluated."""
    if not state.table.checkpoints:
        raise UserError(state.emptiness)
    if name == "samples.csv":
        return csv_bytes(samples(state))
    if name == "samples.parquet":
        sink = io.BytesIO()
        pq.write_table(samples(state), sink, compression="zstd")
        return sink.getvalue()
    if name == "page.html":
        return page_of(state).encode()
    raise UserError(f"nothing called {name!r:.40} can be exported; there are {', '.join(MEDIA_TYPES)}")


def samples(state: PageState) -> pa.Table:
    """Return one row per response to the kept problems: in the page's order, by checkpoint, then by sample.

    length_change and score_change are the problem's mean over samples minus the baseline's; base_rate is the
    pass rate before training; reasoning_tokens is null where the model's tokenizer is not at hand, and where the
    checkpoint's responses were sampled in several turns.
    """
    return (
        pa.concat_tables([_samples(state, index) for index in range(len(state.labels))])
        .sort_by([("place", "ascending"), ("column", "ascending"), ("sample_index", "ascending")])
        .drop_columns(["place", "column"])
    )


def _samples(state: PageState, index: int) -> pa.Table:
    table, checkpoint = state.table, state.table.checkpoints[index]
    responses = checkpoint.responses
    place = {int(table.row_CP[index][p]): (order, int(p)) for order, p in enumerate(state.order.tolist())}
    rows = [row for row, problem in enumerate(responses.problem_R.tolist()) if problem in place]
    spots = [place[int(responses.problem_R[row])] for row in rows]
    stored = responses.rows([*_STORED, "response"]).take(pa.array(rows, pa.int64()))
    counter = checkpoint.counter
    whole = None if counter is None else responses.split_R(counter, checkpoint.prefill)
    split = None if whole is None else whole.reasoning_R[rows]
    own = [p for _, p in spots]
    columns = {
        "place": pa.array([order for order, _ in spots], pa.int64()),
        "column": pa.array([index] * len(rows), pa.int64()),
        "benchmark": pa.array([state.url.benchmark] * len(rows), pa.string()),
        "problem_id": pa.array([table.ids[p] for p in own], pa.string()),
        "category": pa.array([str(table.category_P[p]) for p in own], pa.string()),
        "base_rate": pa.array(table.base_rate_P[own], pa.float64(), from_pandas=True),
        "checkpoint": pa.array([checkpoint.key] * len(rows), pa.string()),
        "length_change": pa.array((table.length_CP[index] - table.length_CP[0])[own], pa.float64()),
        "score_change": pa.array((table.score_CP[index] - table.score_CP[0])[own], pa.float64()),
        "reasoning_tokens": pa.nulls(len(rows), pa.int64()) if split is None else pa.array(split, pa.int64()),
    }
    return pa.table({**columns, **{name: stored[name] for name in stored.column_names}})


def csv_bytes(table: pa.Table) -> bytes:
    """Return CSV with a header; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    columns = {
        name: _inert(table[name]) if pa.types.is_string(table[name].type) else table[name]
        for name in table.column_names
    }
    sink = io.BytesIO()
    pyarrow.csv.write_csv(pa.table(columns), sink)
    return sink.getvalue()


def _inert(column: pa.ChunkedArray) -> pa.Array:
    texts = [f"'{text}" if text and _FORMULA.match(text) else text for text in column.to_pylist()]
    return pa.array(texts, pa.string())


def page_of(state: PageState) -> str:
    """Return one HTML file that asks nobody anything; formulas stay as their source.

    It shows up to MAX_EXAMPLES problems, the one at hand among them. Its scripts draw the charts, and its content
    policy allows these scripts alone.
    """
    shown = state.order[:MAX_EXAMPLES].tolist()
    if len(state.order) and state.order[state.position] not in shown:
        shown = [int(state.order[state.position]), *shown[:-1]]
    scripts = vega.scripts()
    return render(
        "exported_page",
        policy=content_policy(scripts),
        labels=state.labels,
        styles=Markup(stylesheet_of_page()),
        header=header_html(state.library, interactive=False),
        benchmark=state.url.benchmark,
        count=count_html(state, interactive=False),
        summary=summary_html(state, interactive=False),
        overview=overview_html(state, interactive=False),
        lengths=lengths_html(state, interactive=False),
        reasoning=reasoning_html(state, interactive=False),
        examples=[{"problem": problem_card(state, p), "columns": columns_of(state, p)} for p in shown],
        num_problems=len(state.order),
        is_folded=bool(state.url.fold),
        scripts=[Markup(script) for script in scripts],
    )
