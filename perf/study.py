"""Print the tables and draw the pictures of docs/study.md and docs/study/ from the recorded results.

    python perf/study.py                            # the tables, from docs/study.parquet
    python perf/study.py --out docs/study.png --lengths docs/study_lengths.png --controls docs/study_controls.png
    python perf/study.py --results runs/study       # the same for studies of your own (make study)
    python perf/study.py --results runs/study --record my.parquet       # and their results as one such file

A folder of results holds NAME/comparison.json and NAME/curves.csv, as `vlm-rl study configs/studies/NAME.yaml` writes
them. The long study's controls were made with the changes that docs/study/long.md names. docs/study/method.md
says what the columns of a recorded file are.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.report import vega
from vlm_rl.report.charts.frame import MUTED, PALETTE
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.charts.points import Interval, forest
from vlm_rl.stats import Estimate, estimate
from vlm_rl.study.results import is_share

RECORDED = Path(__file__).resolve().parents[1] / "docs" / "study.parquet"
STUDIES = {
    "rules": "The rules",
    "fixed_norm": "Every gradient rescaled to one norm",
    "coin": "Control: the reward is a coin",
    "short": "Control: only the format is rewarded",
    "ba": "Aggregation alone, at equal clips",
    "hadw": "HA-DW's ablations",
    "long": "A long horizon",
    "long-norm": "A long horizon, every gradient rescaled to one norm",
    "long-clips": "A long horizon, equal clips",
    "long-coin": "A long horizon, control: the reward is a coin",
    "ahead": "Steps ahead",
    "credit": "Credit and the rows of 2026",
}
PICTURED = ("rules", "fixed_norm", "coin", "short")
LONG = ("long", "long-norm", "long-clips", "long-coin")
COLUMNS = {  # measure -> title, as a share or in tokens
    "heldout_accuracy/heldout": "held-out accuracy, %",
    "heldout_length/heldout": "held-out length, greedy",
    "train_accuracy": "training accuracy, %",
    "train_length": "training length",
    "train_length_change": "change of training length",
}
INSIDE = {  # curve -> title, first -> last tenth of the steps
    "heldout_accuracy/heldout": "held-out accuracy, %",
    "length/group_cv": "variation of length in a group",
    "length/sign_gap": "length, A > 0 minus A < 0",
    "gradient_mass/positive/shortest": "mass, A > 0, shortest, %",
    "gradient_mass/positive/longest": "mass, A > 0, longest, %",
    "gradient_mass/negative/shortest": "mass, A < 0, shortest, %",
    "gradient_mass/negative/longest": "mass, A < 0, longest, %",
}
LENGTH = "completions/mean_length"  # the metric whose steps are recorded, of the long study
CONTROLS = ("coin", "short", "long-coin")  # whose picture is the change of length, not its distance to the baseline
AHEAD = {  # of the study of steps ahead: measure -> title
    "heldout_accuracy/heldout": "held-out accuracy, %",
    "train_accuracy": "training accuracy, %",
    "train_length": "training length",
    "rollout/logprob_gap": "gap, tokens of age 0",
    "ahead/age_mean": "mean age, steps",
}

CREDIT = {  # of the study of credit: measure -> title
    "heldout_accuracy/heldout": "held-out accuracy, %",
    "train_accuracy": "training accuracy, %",
    "train_length": "training length",
}
LOOKING = {  # metric -> title; all but the first of the runs with a credit alone
    "grad_norm": "gradient norm",
    "visual/dependence": "mean S",
    "visual/dependence/correct": "of right responses",
    "visual/dependence/wrong": "of wrong ones",
}

SCHEMA = pa.schema(
    [
        ("study", pa.string()), ("rule", pa.string()), ("seed", pa.int16()), ("start", pa.string()),
        ("metric", pa.string()), ("when", pa.string()), ("step", pa.int32()), ("value", pa.float64()),
    ]
)  # fmt: skip


@dataclass
class Run:
    """The numbers of one run; NaN where it has none."""

    rule: str
    seed: int
    final: dict[str, float] = field(default_factory=dict)  # measure -> value at the end
    first: dict[str, float] = field(default_factory=dict)  # metric -> mean over the first tenth of the steps
    last: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)  # metric -> value of each step


@dataclass
class Study:
    """The runs of one study, in the order of its plan: the first one is of the baseline."""

    runs: list[Run]

    @property
    def rules(self) -> list[str]:
        """Return the rules' names, the baseline first."""
        return list(dict.fromkeys(run.rule for run in self.runs))

    def ends(self, rule: str, measure: str) -> dict[int, float]:
        """Return seed -> value at the end, of the rule's runs that have one."""
        return {run.seed: run.final[measure] for run in self.runs if run.rule == rule and measure in run.final}

    def final(self, rule: str, measure: str) -> Estimate:
        """Return the rule's mean at the end over its seeds, with its interval."""
        bounds = (0.0, 1.0) if is_share(measure) else (-math.inf, math.inf)
        return estimate(list(self.ends(rule, measure).values()), bounds=bounds)

    def difference(self, rule: str, measure: str, *, baseline: str | None = None) -> Estimate:
        """Return the mean of rule minus baseline at the end over the seeds that both have, with its interval."""
        ours, theirs = self.ends(rule, measure), self.ends(baseline or self.rules[0], measure)
        bounds = (-1.0, 1.0) if is_share(measure) else (-math.inf, math.inf)
        return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs], bounds=bounds)


def read(results: Path) -> pa.Table:
    """Return the rows of a recorded file, or of a folder of results."""
    return pq.read_table(results) if results.is_file() else rows_of(results)


def record(table: pa.Table, out: Path) -> None:
    """Write the rows as one recorded file."""
    pq.write_table(table, out, compression="zstd", compression_level=19)


def rows_of(folder: Path) -> pa.Table:
    """Build the content of a recorded file from the results of the STUDIES in the folder."""
    rows: list[dict[str, Any]] = []
    for name in STUDIES:
        path = folder / name / "comparison.json"
        if not path.is_file():
            continue
        curves = _lengths_by_run(path.with_name("curves.csv")) if name == "long" else {}
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            key = {"study": name, **{column: run[column] for column in ("rule", "seed", "start")}}
            rows += [{**key, "metric": each, "when": "end", "value": value} for each, value in run["final"].items()]
            for each, pair in run["first_and_last"].items():
                rows += [
                    {**key, "metric": each, "when": when, "value": value}
                    for when, value in zip(("first", "last"), pair, strict=True)
                ]
            for step, value in curves.get((run["rule"], run["seed"]), ()):
                rows.append({**key, "metric": LENGTH, "when": "step", "step": step, "value": value})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _lengths_by_run(path: Path) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Return (rule, seed) -> (step, mean length of a response), of a study's curves."""
    lengths: dict[tuple[str, int], list[tuple[int, float]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] == LENGTH:
                run = lengths.setdefault((row["rule"], int(row["seed"])), [])
                run.append((int(row["step"]), float(row["value"])))
    return lengths


def studies(table: pa.Table) -> dict[str, Study]:
    """Return study name -> its runs."""
    runs: dict[str, dict[tuple[str, int], Run]] = {}
    for row in table.to_pylist():
        run = runs.setdefault(row["study"], {}).setdefault((row["rule"], row["seed"]), Run(row["rule"], row["seed"]))
        metric, value = row["metric"], math.nan if row["value"] is None else row["value"]
        if row["when"] == "step":
            run.curves.setdefault(metric, []).append(value)
        else:
            {"end": run.final, "first": run.first, "last": run.last}[row["when"]][metric] = value
    return {name: Study(list(runs[name].values())) for name in STUDIES if name in runs}


def page(everything: Mapping[str, Study]) -> str:
    """Return the tables of these studies as Markdown, each study under a heading."""
    parts = []
    for name, study in everything.items():
        titles = {
            key: title.replace("greedy", "sampled") if name in LONG else title for key, title in COLUMNS.items()
        }
        own = {"ahead": steps_ahead, "credit": credit}.get(name)
        found = f"{tables(study, titles)}\n\n{inside(study)}" if own is None else own(study)
        parts.append(f"### {STUDIES[name]}\n\n{found}\n")
    return "\n".join(parts)


def tables(study: Study, titles: Mapping[str, str]) -> str:
    """Return final values, then differences in length and accuracy to the baseline, as Markdown."""
    rules = study.rules
    measures = [measure for measure in COLUMNS if any(measure in run.final for run in study.runs)]
    head = ["rule", *(titles[measure] for measure in measures)]
    rows = [[f"`{rule}`", *(_final(study.final(rule, measure), measure) for measure in measures)] for rule in rules]
    parts = [_markdown(head, rows)]
    for measure in ("train_length", "heldout_accuracy/heldout"):
        if measure in measures:
            head = ["rule", f"{COLUMNS[measure]}, minus `{rules[0]}`", "95 % interval", "detectable"]
            differences = [[f"`{rule}`", *_apart(study.difference(rule, measure), measure)] for rule in rules[1:]]
            parts.append(_markdown(head, differences))
    return "\n\n".join(parts)


def inside(study: Study) -> str:
    """Return how the quantities that explain length moved, means over the seeds: first tenth of the steps -> last."""
    rows = []
    for rule in study.rules:
        runs = [run for run in study.runs if run.rule == rule]
        pairs = {name: [(run.first[name], run.last[name]) for run in runs if name in run.first] for name in INSIDE}
        rows.append([f"`{rule}`", *(_moved(pairs[name], name) for name in INSIDE)])
    return _markdown(["rule", *INSIDE.values()], rows)


def _moved(pairs: Sequence[tuple[float, float]], name: str) -> str:
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not known:
        return ""
    first, last = (_scale(name) * sum(ends) / len(ends) for ends in zip(*known, strict=True))
    digits = 0 if _scale(name) > 1 else 2 if name == "length/group_cv" else 1
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _scale(measure: str) -> float:
    return 100.0 if "accuracy" in measure or "mass" in measure else 1.0


def _final(estimate: Estimate, measure: str) -> str:
    mean, low, high = (_scale(measure) * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _apart(gap: Estimate, measure: str) -> list[str]:
    mean, low, high, detectable = (_scale(measure) * value for value in (gap.mean, gap.low, gap.high, gap.detectable))
    return [
        f"**{mean:+.1f}**" if gap.excludes_zero else f"{mean:+.1f}",
        f"{low:+.1f} to {high:+.1f}",
        f"{detectable:.1f}",
    ]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def steps_ahead(study: Study) -> str:
    """Return every rule's values at the end, then each number of steps ahead minus none, over all algorithms."""
    rows = []
    for rule in study.rules:
        runs = [run.last | run.final for run in study.runs if run.rule == rule]
        rows.append([f"`{rule}`", *(_end([run[name] for run in runs if name in run], name) for name in AHEAD)])
    ages: dict[str, list[tuple[str, str]]] = {}  # steps ahead -> (rule, the same algorithm without)
    for rule in study.rules:
        algorithm, _, steps = rule.partition("-")
        if steps:
            ages.setdefault(steps, []).append((rule, algorithm))
    apart = []
    for measure in ("heldout_accuracy/heldout", "train_accuracy", "train_length"):
        ends = {rule: study.ends(rule, measure) for rule in study.rules}
        for steps, pairs in ages.items():
            by_seed = [
                statistics.fmean(ends[rule][seed] - ends[plain][seed] for rule, plain in pairs)
                for seed in ends[study.rules[0]]
            ]
            apart.append([AHEAD[measure], steps, *_apart(estimate(by_seed), measure)])
    head = ["all algorithms, minus `ahead: 0`", "ahead", "difference", "95 % interval", "detectable"]
    return f"{_markdown(['rule', *AHEAD.values()], rows)}\n\n{_markdown(head, apart)}"


def credit(study: Study) -> str:
    """Return every rule's values at the end, what was to be judged, then gradient norms and mean S."""
    final = [
        [f"`{rule}`", *(_final(study.final(rule, measure), measure) for measure in CREDIT)] for rule in study.rules
    ]
    pairs = [*((rule, study.rules[0]) for rule in study.rules[1:]), ("luspo+top_visual", "luspo")]
    apart = [
        [title, f"`{rule}`, minus `{base}`", *_apart(study.difference(rule, measure, baseline=base), measure)]
        for measure, title in CREDIT.items()
        for rule, base in pairs
    ]
    looking = [
        [f"`{rule}`", *(_mean_ends([run for run in study.runs if run.rule == rule], metric) for metric in LOOKING)]
        for rule in study.rules
    ]
    return "\n\n".join(
        [
            _markdown(["rule", *CREDIT.values()], final),
            _markdown(["measure", "rule", "difference", "95 % interval", "detectable"], apart),
            _markdown(["rule, first → last tenth of the steps", *LOOKING.values()], looking),
        ]
    )


def _mean_ends(runs: Sequence[Run], metric: str) -> str:
    if not all(metric in run.first for run in runs):
        return ""
    first, last = (statistics.fmean(getattr(run, when)[metric] for run in runs) for when in ("first", "last"))
    return f"{first:.2f} → {last:.2f}"


def _end(values: list[float], measure: str) -> str:
    if not values:
        return ""
    if measure == "rollout/logprob_gap":
        return f"{estimate(values).mean:.1e}"
    if measure == "ahead/age_mean":
        return f"{estimate(values).mean:.2f}"
    bounds = (0.0, 1.0) if is_share(measure) else (-math.inf, math.inf)
    return _final(estimate(values, bounds=bounds), measure)


def draw(everything: Mapping[str, Study], names: Sequence[str], out: Path) -> None:
    """Draw length, one panel for each of these studies: differences to the baseline, or changes under a control."""
    panels = []
    for name in names:
        if name not in everything:
            continue
        study = everything[name]
        if name in CONTROLS:
            intervals = {rule: study.final(rule, "train_length_change") for rule in study.rules}
            title = "first to last tenth of the steps: change of length, tokens"
        else:
            intervals = {rule: study.difference(rule, "train_length") for rule in study.rules[1:]}
            title = f"length at the end, minus {study.rules[0]}'s, tokens"
        rows = [Interval(rule, e.mean, e.low, e.high, _color(e)) for rule, e in intervals.items()]
        chart = forest(rows, x_title=title)
        if chart is not None:
            panels.append(vega.still(chart, width=340, title=STUDIES[name]))
    out.write_bytes(vega.png(vega.joined(panels, columns=2)))


def draw_lengths(study: Study, out: Path) -> None:
    """Draw how the mean length of a response moved in the long study, one panel per seed."""
    longest = max(max(run.curves[LENGTH]) for run in study.runs)
    panels = []
    for seed in dict.fromkeys(run.seed for run in study.runs):
        curves = {run.rule: run.curves[LENGTH] for run in study.runs if run.seed == seed}
        series = [
            Series(rule, np.arange(1.0, len(curve) + 1), np.array(curve), PALETTE[index])
            for index, (rule, curve) in enumerate(curves.items())
        ]
        chart = lines(series, y_title="mean length, tokens")
        assert chart is not None
        for layer in chart["layer"]:
            layer["encoding"]["y"]["scale"] = {"domain": [0, longest], "nice": True}  # one axis for all panels
        panels.append(vega.still(chart, width=270, title=f"seed {seed}"))
    out.write_bytes(vega.png(vega.joined(panels, columns=3)))


def _color(interval: Estimate) -> str:
    """Return blue where the interval excludes 0, else grey."""
    return PALETTE[0] if interval.excludes_zero else MUTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RECORDED, help="a recorded file, or a folder of results")
    parser.add_argument("--record", type=Path, help="write the results as one recorded file here")
    parser.add_argument("--out", type=Path, help="write the picture of the first four studies here")
    parser.add_argument("--lengths", type=Path, help="write the picture of the long study's lengths here")
    parser.add_argument("--controls", type=Path, help="write the picture of the long study and its controls here")
    options = parser.parse_args()
    table = read(options.results)
    everything = studies(table)
    print(page(everything))
    if options.record:
        record(table, options.record)
    if options.out:
        draw(everything, PICTURED, options.out)
    if options.lengths:
        draw_lengths(everything["long"], options.lengths)
    if options.controls:
        draw(everything, LONG, options.controls)


if __name__ == "__main__":
    main()
