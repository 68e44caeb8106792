"""A paper's table: the published number, ours, n and the 95 % interval, and what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.papers.catalog import BASE, Paper, TableColumn
from vlm_rl.papers.steps import TableRow
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.stability import GROWTH, spikes_of, steadiness

NO_SOURCE = "no source"
NOT_MEASURED = "not measured"
OTHER_SETS = "of other sets"


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
        "has_own_average": paper.has_own_average,
        "lengths_of": next((column.title for column in paper.columns if column.benchmark == paper.lengths_of), ""),
        "rows": [_row(paper, row) for row in rows],
    }


def _row(paper: Paper, row: TableRow) -> dict[str, Any]:
    """Return a row's cells with their means.

    The published mean is the printed one, else that of the published cells. Ours is of the columns that have a
    published cell in this row, else of all: means of different sets do not compare.
    """
    cells = [_cell(paper, row, column) for column in paper.columns]
    ours = [cell["ours"] or {} for cell in cells]
    with_length = [
        result
        for result, column in zip(ours, paper.columns, strict=True)
        if (column.benchmark == paper.lengths_of if paper.lengths_of else column.facet is None)
    ]
    key = (row.model, row.rule)
    compared = [cell for cell in cells if cell["published"] is not None] or cells
    mean = _mean([cell["published"] for cell in compared])
    return {
        "model": row.model,
        "rule": row.rule,
        "cells": cells,
        "average": {
            "published": paper.averages.get(key, mean),
            "ours": _mean([(cell["ours"] or {}).get("score") for cell in compared])
            if paper.has_own_average
            else None,
            "columns": len(compared),
        },
        "mean_length": {
            "published": paper.lengths.get(key),
            "ours": _mean([result.get("mean_length") for result in with_length]),
        },
        "stability": _stability(row),
    }


def _stability(row: TableRow) -> dict[str, Any] | None:
    """Return how steady our training run was, on the first set that it evaluates; None if nothing is known."""
    run = RunDirectory(row.folder)
    if row.rule == BASE or not (records := run.metrics()):
        return None
    evaluated = Path(row.config.data.eval[0]).name if row.config.data.eval else ""
    moved = steadiness([result.accuracy for result in run.evals(evaluated)]) if evaluated else None
    spikes = spikes_of(records)
    return {
        "set": evaluated,
        "num_evaluations": 0 if moved is None else moved.num_evaluations,
        "best": None if moved is None else _percent(moved.best),
        "drop": None if moved is None else _percent(moved.drop),
        "between_std": None if moved is None or math.isnan(moved.between_std) else _percent(moved.between_std),
        "steps": int(records[-1]["step"]),
        "norm_spikes": len(spikes.norm_steps),
        "loss_spikes": len(spikes.loss_steps),
    }


def _cell(paper: Paper, row: TableRow, column: TableColumn) -> dict[str, Any]:
    published = paper.published.get((row.model, row.rule), {}).get(column.benchmark)
    results = RunDirectory(row.results).evals(column.folder)
    return {"published": published, "ours": _ours(results[-1].summary, column) if results else None}


def _ours(summary: Mapping[str, Any], column: TableColumn) -> dict[str, Any]:
    """Return the number that papers print of a benchmark, with how it came about."""
    part = _part(summary, column)
    scored, of_all = (_whole(summary), summary) if part is None else (part, {})  # no lengths of a part are known
    low, high = scored["interval"] or (None, None)
    return {
        "score": _percent(scored["score"]),
        "interval": [_percent(low), _percent(high)],
        "n": scored["n"],
        "k": summary["k"],
        "rule": summary["rule"],
        "step": summary["step"],
        "mean_length": of_all.get("mean_length"),
        "truncated_share": of_all.get("truncated_share"),
    }


def _part(summary: Mapping[str, Any], column: TableColumn) -> Mapping[str, Any] | None:
    """Return the score of the part of the set that papers print; None if they print the whole set."""
    if column.facet is None or "by" not in summary:
        return None
    facet, value = column.facet
    return summary["by"].get(facet, {}).get(value, {"score": None, "n": 0, "interval": None})


def _whole(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    if "scores" in summary:
        return summary["scores"][summary["headline"]]
    return {"score": summary["accuracy"], "n": summary["num_problems"], "interval": summary["interval"]}


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 2)


def as_markdown(table: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    of = table["lengths_of"]
    head = ["model", "rule", *table["columns"], "average", "mean length" + (f", {of}" if of else "")]
    lines = [f"# {table['paper']} (arXiv {table['arxiv']})", ""]
    lines += [f"**{table['note']}.**", ""] if table["note"] else []
    lines += [f"Published: {table['published']}.", ""]
    lines += [
        "A cell is published / ours, in percent, with our 95 % interval over the problems, their number, and the "
        "mean length of our responses in tokens where all of a set's problems count. An average is over the columns "
        "that have a published number in its row, over all where none has one; our mean length is of "
        f"{f'{of} alone' if of else 'those with a length'}.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in table["rows"]:
        average = _pair(row["average"], ".1f", missing=NOT_MEASURED if table["has_own_average"] else OTHER_SETS)
        if row["average"]["columns"] < len(row["cells"]):
            average += f" (of {row['average']['columns']})"
        means = [average, _pair(row["mean_length"], ",.0f")]
        lines.append(f"| {' | '.join([row['model'], row['rule'], *map(_shown, row['cells']), *means])} |")
    lines += _stability_lines(table["rows"])
    lines += ["", "What differs from the paper:", "", *(f"- {item}" for item in table["differs"]), ""]
    return "\n".join(lines)


def _stability_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of our runs' stability; nothing if none has trained."""
    known = [(row, row["stability"]) for row in rows if row["stability"] is not None]
    if not known:
        return []
    lines = [
        "",
        "How steady our runs were: best evaluation during training, how far the last is below it, the standard "
        "deviation between evaluations (of the differences of neighbours), in points, and the steps whose gradient "
        f"norm is above {GROWTH:.0f} times the median of the steps before, or whose loss is further from that median "
        f"than {GROWTH:.0f} times the usual distance.",
        "",
        "| model | rule | set | evaluations | best | drop | deviation | steps | norm spikes | loss spikes |",
        f"|{'---|' * 10}",
    ]
    for row, of_run in known:
        points = ["–" if of_run[key] is None else f"{of_run[key]:.1f}" for key in ("best", "drop", "between_std")]
        counts = [str(of_run[key]) for key in ("steps", "norm_spikes", "loss_spikes")]
        cells = [row["model"], row["rule"], of_run["set"] or "–", str(of_run["num_evaluations"]), *points, *counts]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(cell: Mapping[str, Any]) -> str:
    published = NO_SOURCE if cell["published"] is None else f"{cell['published']:.1f}"
    ours = cell["ours"]
    if ours is None or ours["score"] is None:
        return f"{published} / {NOT_MEASURED}"
    low, high = ours["interval"]
    sampled = f", k {ours['k']}" if ours["k"] > 1 else ""
    length = "" if ours["mean_length"] is None else f", {ours['mean_length']:,.0f} tokens"
    facts = f"n {ours['n']}{sampled}{length}"
    return f"{published} / {ours['score']:.1f} [{low:.1f}, {high:.1f}] ({facts})"


def _pair(numbers: Mapping[str, Any], form: str, *, missing: str = NOT_MEASURED) -> str:
    """Return a published number and ours as text; `missing` if there is none of ours."""
    published, ours = (numbers[key] for key in ("published", "ours"))
    shown = NO_SOURCE if published is None else format(published, form)
    return f"{shown} / {missing if ours is None else format(ours, form)}"


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def write_table(table: Mapping[str, Any], out: Path) -> Path:
    """Write table.md and table.json into a folder and return the first."""
    out.mkdir(parents=True, exist_ok=True)
    tree = json.dumps(table, indent=1, allow_nan=False) + "\n"
    write_atomically(out / "table.json", lambda path: path.write_text(tree, encoding="utf-8"))
    text = as_markdown(table)
    write_atomically(out / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    return out / "table.md"
