"""The tables and the picture of docs/study.md, from the recorded results of its studies.

    python perf/study.py                            # the tables, from docs/study/*.json
    python perf/study.py --out docs/study.png --lengths docs/study_lengths.png --controls docs/study_controls.png
    python perf/study.py --results runs/study       # the same of a study of one's own (make study)

docs/study/NAME.json is the comparison.json that `vlm-rl study configs/studies/NAME.yaml` has written; those of the
long study's controls were made with the changes that docs/study.md names. docs/study/long.csv has the mean lengths of
its curves.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.report import vega
from vlm_rl.report.charts.frame import MUTED, PALETTE
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.charts.points import Interval, forest
from vlm_rl.stats import estimate

RECORDED = Path(__file__).resolve().parents[1] / "docs" / "study"
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
CONTROLS = ("coin", "short", "long-coin")  # whose picture is the change of length, not its distance to the baseline
AHEAD = {  # of the study of steps ahead: measure -> title
    "heldout_accuracy/heldout": "held-out accuracy, %",
    "train_accuracy": "training accuracy, %",
    "train_length": "training length",
    "rollout/logprob_gap": "gap, tokens of age 0",
    "ahead/age_mean": "mean age, steps",
}

Results = Mapping[str, Any]


def load(folder: Path) -> dict[str, Results]:
    """Return study name -> its comparison, of those that are there: NAME.json or NAME/comparison.json."""
    studies = {}
    for name in STUDIES:
        for path in (folder / f"{name}.json", folder / name / "comparison.json"):
            if path.is_file():
                studies[name] = _known(json.loads(path.read_text(encoding="utf-8")))
    return studies


def _known(tree: Any) -> Any:
    """Return the tree with NaN for null: a number that an unfinished study does not have yet."""
    if isinstance(tree, dict):
        return {key: _known(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_known(value) for value in tree]
    return math.nan if tree is None else tree


def tables(results: Results, titles: Mapping[str, str] = COLUMNS) -> str:
    """Return final values, then differences in length and accuracy to the baseline, as Markdown."""
    rules, final, apart = results["rules"], results["final"], results["difference_to_baseline"]
    measures = [measure for measure in COLUMNS if measure in final]
    head = ["rule", *(titles[measure] for measure in measures)]
    rows = [[f"`{rule}`", *(_final(final[measure][rule], measure) for measure in measures)] for rule in rules]
    parts = [_markdown(head, rows)]
    for measure in ("train_length", "heldout_accuracy/heldout"):
        if measure in apart:
            title = f"{COLUMNS[measure]}, minus `{results['baseline']}`"
            head = ["rule", title, "95 % interval", "detectable"]
            parts.append(_markdown(head, [[f"`{r}`", *_apart(apart[measure][r], measure)] for r in rules[1:]]))
    return "\n\n".join(parts)


def inside(results: Results) -> str:
    """Return how the quantities that explain length moved, means over the seeds: first tenth of the steps -> last."""
    ends: dict[str, dict[str, list[list[float]]]] = {}
    for run in results["runs"]:
        for name, pair in run["first_and_last"].items():
            ends.setdefault(run["rule"], {}).setdefault(name, []).append(pair)
    rows = [[f"`{rule}`", *(_moved(ends[rule].get(name, []), name) for name in INSIDE)] for rule in ends]
    return _markdown(["rule", *INSIDE.values()], rows)


def _moved(pairs: list[list[float]], name: str) -> str:
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not known:
        return ""
    first, last = (_scale(name) * sum(ends) / len(ends) for ends in zip(*known, strict=True))
    digits = 0 if _scale(name) > 1 else 2 if name == "length/group_cv" else 1
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _scale(measure: str) -> float:
    return 100.0 if "accuracy" in measure or "mass" in measure else 1.0


def _final(interval: Mapping[str, float], measure: str) -> str:
    mean, low, high = (_scale(measure) * interval[key] for key in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _apart(difference: Mapping[str, float], measure: str) -> list[str]:
    mean, low, high, detectable = (_scale(measure) * difference[key] for key in ("mean", "low", "high", "detectable"))
    settled = low > 0 or high < 0
    return [f"**{mean:+.1f}**" if settled else f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}", f"{detectable:.1f}"]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def steps_ahead(results: Results) -> str:
    """Return every rule's values at the end, then each number of steps ahead minus none, over all algorithms."""
    at_end: dict[str, dict[int, dict[str, float]]] = {}  # rule -> seed -> measure -> value
    for run in results["runs"]:
        known = {name: last for name, (_, last) in run["first_and_last"].items() if name in AHEAD}
        at_end.setdefault(run["rule"], {})[run["seed"]] = known | run["final"]
    rows = [
        [f"`{rule}`", *(_end([of[measure] for of in seeds.values() if measure in of], measure) for measure in AHEAD)]
        for rule, seeds in at_end.items()
    ]
    ages: dict[str, list[tuple[str, str]]] = {}  # steps ahead -> (rule, the same algorithm without)
    for rule in at_end:
        algorithm, _, steps = rule.partition("-")
        if steps:
            ages.setdefault(steps, []).append((rule, algorithm))
    apart = []
    for measure in ("heldout_accuracy/heldout", "train_accuracy", "train_length"):
        for steps, pairs in ages.items():
            by_seed = [
                statistics.fmean(at_end[rule][seed][measure] - at_end[plain][seed][measure] for rule, plain in pairs)
                for seed in results["seeds"]
            ]
            apart.append([AHEAD[measure], steps, *_apart(asdict(estimate(by_seed)), measure)])
    head = ["all algorithms, minus `ahead: 0`", "ahead", "difference", "95 % interval", "detectable"]
    return f"{_markdown(['rule', *AHEAD.values()], rows)}\n\n{_markdown(head, apart)}"


def _end(values: list[float], measure: str) -> str:
    if not values:
        return ""
    if measure == "rollout/logprob_gap":
        return f"{estimate(values).mean:.1e}"
    if measure == "ahead/age_mean":
        return f"{estimate(values).mean:.2f}"
    bounds = (0.0, 1.0) if "accuracy" in measure else (-math.inf, math.inf)
    return _final(asdict(estimate(values, bounds=bounds)), measure)


def draw(everything: Mapping[str, Results], names: Sequence[str], out: Path) -> None:
    """Draw length, one panel for each of these studies: differences to the baseline, or changes under a control."""
    panels = []
    for name in names:
        if name not in everything:
            continue
        results = everything[name]
        if name in CONTROLS:
            intervals = results["final"]["train_length_change"]
            title = "first to last tenth of the steps: change of length, tokens"
        else:
            intervals = results["difference_to_baseline"]["train_length"]
            title = f"length at the end, minus {results['baseline']}'s, tokens"
        rows = [Interval(rule, e["mean"], e["low"], e["high"], _color(e)) for rule, e in intervals.items()]
        chart = forest(rows, x_title=title)
        if chart is not None:
            panels.append(vega.still(chart, width=340, title=STUDIES[name]))
    out.write_bytes(vega.png(vega.joined(panels, columns=2)))


def draw_lengths(folder: Path, out: Path) -> None:
    """Draw how the mean length of a response moved in the long study, one panel per seed."""
    path = next(path for path in (folder / "long.csv", folder / "long" / "curves.csv") if path.is_file())
    lengths: dict[str, dict[str, list[float]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] == "completions/mean_length":
                lengths.setdefault(row["seed"], {}).setdefault(row["rule"], []).append(float(row["value"]))
    longest = max(max(curve) for of_seed in lengths.values() for curve in of_seed.values())
    panels = []
    for seed, curves in lengths.items():
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


def _color(interval: Mapping[str, float]) -> str:
    """Return blue where the interval excludes 0, else grey."""
    return PALETTE[0] if interval["low"] > 0 or interval["high"] < 0 else MUTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RECORDED)
    parser.add_argument("--out", type=Path, help="write the picture of the first four studies here")
    parser.add_argument("--lengths", type=Path, help="write the picture of the long study's lengths here")
    parser.add_argument("--controls", type=Path, help="write the picture of the long study and its controls here")
    options = parser.parse_args()
    everything = load(options.results)
    for name, results in everything.items():
        if name == "ahead":
            print(f"### {STUDIES[name]}\n\n{steps_ahead(results)}\n")
            continue
        titles = {
            key: title.replace("greedy", "sampled") if name in LONG else title for key, title in COLUMNS.items()
        }
        print(f"### {STUDIES[name]}\n\n{tables(results, titles)}\n\n{inside(results)}\n")
    if options.out:
        draw(everything, PICTURED, options.out)
    if options.lengths:
        draw_lengths(options.results, options.lengths)
    if options.controls:
        draw(everything, LONG, options.controls)


if __name__ == "__main__":
    main()
