"""`vlm-rl eval compare A B ...`: what changed between evaluations of the same problems.

A, B, ... are results folders of `vlm-rl eval` (the newest step of each set), single records (a Parquet file) or
JSON files of `vlm-rl score`. Everything is compared with A.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError
from vlm_rl.pairs import Paired, ProblemScore, by_category, pair, problem_scores
from vlm_rl.runs import RunDirectory, write_atomically
from vlm_rl.statistics import score_interval

Scores = dict[str, ProblemScore]
_COLUMNS = ["problem_id", "verdict", "length", "category"]


def compare_evaluations(options: argparse.Namespace) -> dict[str, Any]:
    """Print the tables and return them as plain JSON. Raises UserError for results that do not fit each other."""
    if len(options.results) < 2:
        raise UserError("eval compare needs two results or more: vlm-rl eval compare A B")
    loaded = [read_results(path) for path in options.results]
    names = [str(path) for path in options.results]
    if all(len(sets) == 1 for sets in loaded):  # single files: their names need not agree
        only = next(iter(loaded[0]))
        loaded = [{only: next(iter(sets.values()))} for sets in loaded]
    tree: dict[str, Any] = {"baseline": names[0], "table": _table(loaded, names), "compared": []}
    print(_table_text(tree["table"], names))
    for name, sets in zip(names[1:], loaded[1:], strict=True):
        shared = [benchmark for benchmark in loaded[0] if benchmark in sets]
        if not shared:
            raise UserError(f"{name} and {names[0]} have no set in common: {sorted(sets)} and {sorted(loaded[0])}")
        for benchmark in shared:
            whole = pair(loaded[0][benchmark], sets[benchmark], seed=options.seed)
            if whole is None:
                raise UserError(f"{name} and {names[0]} have no problem of {benchmark} in common")
            parts = by_category(loaded[0][benchmark], sets[benchmark], seed=options.seed)
            print(_paired_text(benchmark, names[0], name, whole, parts))
            found = {"set": benchmark, "a": names[0], "b": name, **asdict(whole)}
            found |= _changed(loaded[0][benchmark], sets[benchmark])
            tree["compared"].append(found | {"by_category": {key: asdict(part) for key, part in parts.items()}})
    if options.json:
        text = json.dumps(tree, indent=1, ensure_ascii=False)
        write_atomically(options.json, lambda path: path.write_text(text, encoding="utf-8"))
    return tree


def read_results(path: Path) -> dict[str, Scores]:
    """Set -> its problems' scores. Raises UserError for what is no result."""
    if path.is_dir():
        newest = {result.benchmark: result for result in sorted(RunDirectory(path).evals(), key=lambda r: r.step)}
        if not newest:
            raise UserError(f"{path}: no results in it; a results folder holds eval/SET/step-*.parquet")
        return {name: problem_scores(result.rows(_COLUMNS).to_pylist()) for name, result in newest.items()}
    try:
        if path.suffix == ".parquet":
            return {path.parent.name: problem_scores(pq.read_table(path, columns=_COLUMNS).to_pylist())}
        tree = json.loads(path.read_text(encoding="utf-8"))
        return {tree["benchmark"]: problem_scores(tree["rows"])}
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(
            f"{path}: neither records of vlm-rl eval nor a JSON of vlm-rl score: {error!r:.160}"
        ) from None


def _changed(a: Scores, b: Scores) -> dict[str, list[str]]:
    """The problems whose score changed, by direction."""
    return {
        "better_on": [name for name in a if name in b and b[name].score > a[name].score],
        "worse_on": [name for name in a if name in b and b[name].score < a[name].score],
    }


def _table(loaded: Sequence[Mapping[str, Scores]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per result: a paper's row of benchmarks, and their plain mean where it has them all."""
    benchmarks = list(dict.fromkeys(benchmark for sets in loaded for benchmark in sets))
    rows = []
    for name, sets in zip(names, loaded, strict=True):
        cells = {benchmark: _cell(sets[benchmark]) for benchmark in benchmarks if benchmark in sets}
        scores = [cell["accuracy"] for cell in cells.values()]
        mean = sum(scores) / len(scores) if len(cells) == len(benchmarks) > 1 else None
        rows.append({"name": name, "cells": cells, "mean": mean})
    return rows


def _cell(problems: Scores) -> dict[str, Any]:
    scores = [problem.score for problem in problems.values()]
    low, high = score_interval(scores)  # type: ignore[arg-type]
    return {"accuracy": sum(scores) / len(scores), "interval": [low, high], "n": len(scores)}


def _table_text(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    benchmarks = list(dict.fromkeys(benchmark for row in rows for benchmark in row["cells"]))
    header = f"| result | {' | '.join(benchmarks)} | mean |"
    lines = [header, "|---" * (len(benchmarks) + 2) + "|"]
    for row, name in zip(rows, names, strict=True):
        cells = [row["cells"].get(benchmark) for benchmark in benchmarks]
        shown = [
            f"{100 * cell['accuracy']:.1f} [{100 * cell['interval'][0]:.1f}, {100 * cell['interval'][1]:.1f}] "
            f"(n {cell['n']})"
            if cell
            else "-"
            for cell in cells
        ]
        mean = "-" if row["mean"] is None else f"{100 * row['mean']:.1f}"
        lines.append(f"| {name} | {' | '.join(shown)} | {mean} |")
    return "\n".join(lines)


def _paired_text(benchmark: str, name_a: str, name_b: str, whole: Paired, parts: Mapping[str, Paired]) -> str:
    lines = [
        f"\n{benchmark}: {name_b} minus {name_a}",
        f"  {_line(whole)}",
        f"  better on {whole.won}, worse on {whole.lost} problems, exact sign test p = {whole.p_value:.3g}",
        f"  length {_length(whole.length_a)} -> {_length(whole.length_b)} tokens",
    ]
    if whole.only_a or whole.only_b:
        lines.append(f"  not compared: {whole.only_a} problems only in the first, {whole.only_b} only in the second")
    if len(parts) > 1:
        lines += [f"    {category or '-'}: {_line(part)}" for category, part in parts.items()]
    return "\n".join(lines)


def _line(paired: Paired) -> str:
    low, high = (100 * end for end in paired.interval)
    return (
        f"{100 * paired.score_a:.1f} -> {100 * paired.score_b:.1f}: {100 * paired.difference:+.1f} points "
        f"[{low:+.1f}, {high:+.1f}], n {paired.n}, +{paired.won} -{paired.lost}"
    )


def _length(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"
