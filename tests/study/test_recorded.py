"""docs/study.parquet, from which perf/study.py prints the tables of docs/study.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from perf import study

PAGE = study.RECORDED.with_name("study.md")


def printed(results: Path) -> str:
    return study.page(study.studies(study.read(results)))


def tables_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, rows) of each Markdown table."""
    for part in page.split("\n\n"):
        lines = part.strip().splitlines()
        if len(lines) > 2 and set(lines[1]) <= set("|- "):
            yield lines[0], lines[2:]


def test_the_page_of_the_study_shows_what_is_recorded() -> None:
    rows: dict[str, set[str]] = {}
    for heading, shown in tables_of(printed(study.RECORDED)):
        rows.setdefault(heading, set()).update(shown)
    tables = [table for table in tables_of(PAGE.read_text(encoding="utf-8")) if table[0] in rows]
    assert len(tables) > 30
    for heading, shown in tables:
        assert set(shown) <= rows[heading], heading


def test_results_of_a_study_are_recorded_as_they_are(tmp_path: Path) -> None:
    known = pq.read_table(study.RECORDED, filters=[("study", "=", "long")])
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    curves = ["rule,seed,step,metric,value"]
    for row in known.to_pylist():
        key, metric, value = tuple(row[name] for name in ("rule", "seed", "start")), row["metric"], row["value"]
        run = runs.setdefault(key, {"final": {}, "first_and_last": {}})
        if row["when"] == "end":
            run["final"][metric] = value
        elif row["when"] == "step":
            curves.append(f"{row['rule']},{row['seed']},{row['step']},{metric},{value}")
        else:
            run["first_and_last"].setdefault(metric, []).append(value)
    tree = [{"rule": rule, "seed": seed, "start": start, **run} for (rule, seed, start), run in runs.items()]
    (folder := tmp_path / "long").mkdir()
    (folder / "comparison.json").write_text(json.dumps({"runs": tree}))
    (folder / "curves.csv").write_text("\n".join(curves))
    study.record(study.read(tmp_path), mine := tmp_path / "mine.parquet")
    assert pq.read_table(mine).equals(known)
    assert printed(tmp_path) == printed(mine) and printed(mine) in printed(study.RECORDED)
