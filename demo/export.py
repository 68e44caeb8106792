"""What can be taken away from a view: its rows as a table, and one page that needs nothing else."""

from __future__ import annotations

import io
import re

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from vlm_rl.demo.arrow import compute
from vlm_rl.demo.length_charts import CLICK_HINT, lengths_html
from vlm_rl.demo.page_state import Scene
from vlm_rl.demo.panels import header_html
from vlm_rl.demo.pictures import images_of
from vlm_rl.demo.problem import columns_html, columns_of, problem_html
from vlm_rl.demo.summary import count_html, summary_html
from vlm_rl.demo.theme import stylesheet_of_page
from vlm_rl.errors import UserError
from vlm_rl.report.html import escape

MAX_EXAMPLES = 20  # problems on the page
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STORED = ["sample_index", "verdict", "length", "stop_reason", "extracted", "gold", "path", "reason", "question"]
# A text cell that a spreadsheet would run as a formula; plain numbers such as -3 are not touched.
_FORMULA = r"^([=+@\t\r]|-[^0-9.]|[-+][0-9.]*[^0-9.eE])"
MEDIA_TYPES = {
    "samples.csv": "text/csv; charset=utf-8",
    "samples.parquet": "application/vnd.apache.parquet",
    "page.html": "text/html; charset=utf-8",
}


def export(scene: Scene, name: str) -> bytes:
    """One of MEDIA_TYPES of this view. Raises UserError for another name, and where nothing was evaluated."""
    if not scene.table.checkpoints:
        raise UserError(scene.emptiness)
    if name == "samples.csv":
        return csv_bytes(samples(scene))
    if name == "samples.parquet":
        sink = io.BytesIO()
        pq.write_table(samples(scene), sink, compression="zstd")
        return sink.getvalue()
    if name == "page.html":
        return page(scene).encode()
    raise UserError(f"nothing called {name!r:.40} can be exported; there are {', '.join(MEDIA_TYPES)}")


def samples(scene: Scene) -> pa.Table:
    """One row per response to the kept problems: the view's order, the checkpoints side by side, then the samples.

    length_change and score_change are the problem's mean over samples minus the baseline's; base_rate is the
    pass rate before training; reasoning_tokens is null where the model's tokenizer is not at hand.
    """
    return (
        pa.concat_tables([_samples(scene, index) for index in range(len(scene.labels))])
        .sort_by([("place", "ascending"), ("column", "ascending"), ("sample_index", "ascending")])
        .drop_columns(["place", "column"])
    )


def _samples(scene: Scene, index: int) -> pa.Table:
    table, checkpoint = scene.table, scene.table.checkpoints[index]
    responses = checkpoint.responses
    place = {int(table.row_CP[index][p]): (order, int(p)) for order, p in enumerate(scene.order.tolist())}
    rows = [row for row, own in enumerate(responses.problem_R.tolist()) if own in place]
    spots = [place[int(responses.problem_R[row])] for row in rows]
    stored = responses.rows([*_STORED, "response"]).take(pa.array(rows, pa.int64()))
    counter = checkpoint.counter
    split = None if counter is None else responses.split_R(counter, checkpoint.prefill).reasoning_R[rows]
    own = [p for _, p in spots]
    columns = {
        "place": pa.array([order for order, _ in spots], pa.int64()),
        "column": pa.array([index] * len(rows), pa.int64()),
        "benchmark": pa.array([scene.view.benchmark] * len(rows), pa.string()),
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
    """CSV with a header; texts that a spreadsheet would run as a formula get an apostrophe in front."""
    safe = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            risky = compute.fill_null(compute.match_substring_regex(column, _FORMULA), False)
            column = compute.if_else(risky, compute.binary_join_element_wise("'", column, ""), column)
        safe[name] = column
    sink = io.BytesIO()
    pyarrow.csv.write_csv(pa.table(safe), sink)
    return sink.getvalue()


def page(scene: Scene) -> str:
    """One HTML file: no script, no outside request. Formulas stand in it as their source."""
    shown = list(scene.order[:MAX_EXAMPLES])
    if len(scene.order) and scene.order[scene.position] not in shown:
        shown = [scene.order[scene.position], *shown[:-1]]
    examples = "".join(_example(scene, int(p)) for p in shown)
    more = (
        f"<p class='quiet'>{len(shown):,} of {len(scene.order):,} problems.</p>"
        if len(shown) < len(scene.order)
        else ""
    )
    body = (
        f"{header_html(scene.library)}<p class='quiet'>{escape(scene.view.benchmark)}</p>{count_html(scene)}"
        f"{summary_html(scene)}<h2>Lengths</h2>{lengths_html(scene)}<h2>Problems</h2>{more}{examples}"
    )
    body = body.replace(CLICK_HINT, "")
    body = re.sub(r"<button .*?</button>", "", body)
    body = re.sub(r" (?:data-go|data-step|tabindex|role)='[^']*'", "", body).replace(
        "<svg class", "<svg role='img' class"
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(' against '.join(scene.labels))} · vlm-rl</title>"
        f"<style>{stylesheet_of_page()}</style></head><body class='alone'><main>{body}</main></body></html>"
    )


def _example(scene: Scene, p: int) -> str:
    table = scene.table
    name = table.ids[p]
    base = table.checkpoints[0]
    record = base.responses.records(name)[0]
    images = images_of(record, scene.view.benchmark, base.sets)
    rate, difficulty = float(table.base_rate_P[p]), str(table.difficulty_P[p])
    columns = columns_of(table, scene.slots, name, scene.view.sample)
    head = problem_html(record, images, base_rate=rate, base_when=table.base_when, difficulty=difficulty)
    return f"<section class='example-page'>{head}{columns_html(columns, scene.view)}</section>"
