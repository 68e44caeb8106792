"""docs/study.parquet, from which perf/study.py prints the tables of docs/study.md and docs/study/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from perf import study

DOCS = study.RECORDED.parent
PAGES = sorted((DOCS / "study").glob("*.md"))
NUMBER = re.compile(r"[+-]?[\d,]+(?:\.\d+)?")


def printed(results: Path) -> str:
    return study.page(study.studies(study.read(results)))


def tables_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, rows) of each Markdown table."""
    for part in page.split("\n\n"):
        lines = part.strip().splitlines()
        if len(lines) > 2 and set(lines[1]) <= set("|- "):
            yield lines[0], lines[2:]


def test_the_pages_of_the_study_show_what_is_recorded() -> None:
    rows: dict[str, set[str]] = {}
    for heading, shown in tables_of(printed(study.RECORDED)):
        rows.setdefault(heading, set()).update(shown)
    tables = [table for page in PAGES for table in tables_of(page.read_text(encoding="utf-8")) if table[0] in rows]
    assert len(tables) > 30
    for heading, shown in tables:
        assert set(shown) <= rows[heading], heading


def test_the_summary_shows_what_is_recorded() -> None:
    everything = study.studies(study.read(study.RECORDED))
    summary = next(tables_of((DOCS / "study.md").read_text(encoding="utf-8")))[1]
    cells = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in summary)}
    own = cells.pop("`grpo` itself, at the end")
    assert [*cells] == ["`gspo`", "`luspo`", "`ba`"]
    for column, name in enumerate(("short", "rules", "long")):
        rounding = 0.501 if name == "long" else 0.0501
        assert abs(everything[name].final("grpo", "train_length").mean - float(own[column])) <= rounding
        for rule, row in cells.items():
            gap = everything[name].difference(rule.strip("`"), "train_length")
            shown = [float(number.replace(",", "")) for number in NUMBER.findall(row[column])]
            recorded = (gap.mean, gap.low, gap.high)
            assert all(abs(a - b) <= rounding for a, b in zip(shown, recorded, strict=True)), (rule, name)
            assert row[column].startswith("**") == gap.excludes_zero


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
