"""A paper's table: the published number, ours, n and the 95 % interval, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.papers.catalog import Paper, TableColumn
from vlm_rl.papers.steps import TableRow
from vlm_rl.run.directory import RunDirectory, write_atomically

NO_SOURCE = "no source"
NOT_MEASURED = "not measured"


def make_table(paper: Paper, rows: Sequence[TableRow], *, note: str = "") -> dict[str, Any]:
    """Return the table as plain JSON: per row and column the published number and ours, in percent.

    Args:
        paper: the paper.
        rows: where each row's evaluation is.
        note: what has to be known before any number of ours is read.
    """
    return {
        "paper": paper.title,
        "note": note,
        "arxiv": paper.arxiv,
        "published": paper.source,
        "differs": list(paper.differs),
        "columns": [column.title for column in paper.columns],
        "rows": [
            {"model": row.model, "rule": row.rule, "cells": [_cell(paper, row, column) for column in paper.columns]}
            for row in rows
        ],
    }


def _cell(paper: Paper, row: TableRow, column: TableColumn) -> dict[str, Any]:
    published = paper.published.get((row.model, row.rule), {}).get(column.benchmark)
    results = RunDirectory(row.results).evals(column.folder)
    return {"published": published, "ours": _ours(results[-1].summary, column) if results else None}


def _ours(summary: Mapping[str, Any], column: TableColumn) -> dict[str, Any]:
    """Return the number that papers print of a benchmark, with how it came about."""
    scored = _scored(summary, column)
    low, high = scored["interval"] or (None, None)
    return {
        "score": _percent(scored["score"]),
        "interval": [_percent(low), _percent(high)],
        "n": scored["n"],
        "k": summary["k"],
        "rule": summary["rule"],
        "step": summary["step"],
        "mean_length": summary["mean_length"],
        "truncated_share": summary["truncated_share"],
    }


def _scored(summary: Mapping[str, Any], column: TableColumn) -> Mapping[str, Any]:
    if column.facet is not None and (table := summary.get("by", {}).get(column.facet[0])):
        return table.get(column.facet[1]) or {"score": None, "n": 0, "interval": None}
    if "scores" in summary:
        return summary["scores"][summary["headline"]]
    return {"score": summary["accuracy"], "n": summary["num_problems"], "interval": summary["interval"]}


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 2)


def as_markdown(table: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    head = ["model", "rule", *table["columns"], "average"]
    lines = [f"# {table['paper']} (arXiv {table['arxiv']})", ""]
    lines += [f"**{table['note']}.**", ""] if table["note"] else []
    lines += [f"Published: {table['published']}.", ""]
    lines += [
        "A cell is published / ours, in percent, with our 95 % interval over the problems and their number. The "
        "averages are of the row's cells.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in table["rows"]:
        cells = [row["model"], row["rule"], *map(_shown, row["cells"]), _average(row["cells"])]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What differs from the paper:", "", *(f"- {item}" for item in table["differs"]), ""]
    return "\n".join(lines)


def _shown(cell: Mapping[str, Any]) -> str:
    published = NO_SOURCE if cell["published"] is None else f"{cell['published']:.1f}"
    ours = cell["ours"]
    if ours is None or ours["score"] is None:
        return f"{published} / {NOT_MEASURED}"
    low, high = ours["interval"]
    sampled = f", k {ours['k']}" if ours["k"] > 1 else ""
    return f"{published} / {ours['score']:.1f} [{low:.1f}, {high:.1f}] (n {ours['n']}{sampled})"


def _average(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the averages of a row over all columns, where every column has a number."""
    published = [cell["published"] for cell in cells]
    ours = [cell["ours"]["score"] if cell["ours"] else None for cell in cells]
    return f"{_mean(published) or NO_SOURCE} / {_mean(ours) or NOT_MEASURED}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known and len(known) == len(values) else ""


def write_table(table: Mapping[str, Any], out: Path) -> Path:
    """Write table.md and table.json into a folder and return the first."""
    out.mkdir(parents=True, exist_ok=True)
    tree = json.dumps(table, indent=1, allow_nan=False) + "\n"
    write_atomically(out / "table.json", lambda path: path.write_text(tree, encoding="utf-8"))
    text = as_markdown(table)
    write_atomically(out / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    return out / "table.md"
