"""`vlm-rl eval compare A B ...`: what changed between evaluations of the same problems.

A, B, ... are results folders of `vlm-rl eval` (the newest step of each set), its record files (Parquet), or JSON
files of `vlm-rl score`. Everything is compared with A. With --by-pass-rate R the comparison is also split into hard,
medium and easy problems by the share of R's responses that are right, with --by FACET --data SET by what the prepared
set says of its problems.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vlm_rl.data.sets import load_set
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.paired import Paired, ProblemScore, by_category, pair, problem_scores
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import LATER_COLUMNS, READ_SCHEMA
from vlm_rl.run.run_files import read_records, write_atomically
from vlm_rl.stats import score_interval
from vlm_rl.untrusted.json_object import read_object

Scores = dict[str, ProblemScore]
_COLUMNS = ["problem_id", "verdict", "length", "category", "cluster"]
_SETTINGS = (
    *("rule", "accuracy_part", "template", "template_record", "images", "sampling", "dtype"),
    *("min_pixels", "max_pixels", "data_sha256", "grader_version"),
)
_ADVICE = "give the folder or the Parquet file of vlm-rl eval, or the file of vlm-rl score --json"
_MOST_LINES = 40  # categories that are printed
_HARD, _EASY = 1 / 3, 2 / 3  # ours: below and above these pass rates; between them is medium


@dataclass(frozen=True, slots=True)
class SetResult:
    """One evaluation of one set."""

    problems: Scores
    summary: Mapping[str, Any]  # the benchmark's own scores, and how they came about


@dataclass(frozen=True, slots=True)
class PassRates:
    """The result that says which problems are hard, on one set."""

    name: str
    problems: Scores
    is_compared: bool  # it is A or B as well


@dataclass(frozen=True, slots=True)
class Facet:
    """What a prepared set says of its problems."""

    name: str
    values: Mapping[str, Sequence[str]]  # by problem


def compare_evaluations(options: argparse.Namespace) -> dict[str, Any]:
    """Print the tables and return them as plain JSON. Raises UserError for results that do not fit each other."""
    if len(options.results) < 2:
        raise UserError("eval compare needs two results or more: vlm-rl eval compare A B")
    given = [*options.results, *filter(None, [options.by_pass_rate])]
    loaded = [read_results(path) for path in given]
    for path, sets in zip(given, loaded, strict=True):
        if empty := [name for name, result in sets.items() if not result.problems]:
            raise UserError(f"{path}: the result on {empty[0]} has no rows; evaluate or score again")
    names = [str(path) for path in options.results]
    if all(len(sets) == 1 for sets in loaded):  # single files: their names need not agree
        only = next(iter(loaded[0]))
        loaded = [{only: next(iter(sets.values()))} for sets in loaded]
    rated = loaded.pop() if options.by_pass_rate else None
    facets = _facets(options.by, options.data)
    if len(facets) == len(loaded[0]) == 1:  # of a single set too the names need not agree
        facets = dict(zip(loaded[0], facets.values(), strict=True))
    for option, split in (("--by-pass-rate", rated), ("--data", facets)):
        if split and not set(split) & set(loaded[0]):
            raise UserError(f"{option} has {sorted(split)}, and compared are {sorted(loaded[0])}; give one of these")
    tree: dict[str, Any] = {"baseline": names[0], "table": _table(loaded, names), "compared": []}
    print(_table_text(tree["table"]))
    for name, sets in zip(names[1:], loaded[1:], strict=True):
        shared = [benchmark for benchmark in loaded[0] if benchmark in sets]
        if not shared:
            raise UserError(
                f"{name} and {names[0]} have no set in common: {sorted(sets)} and {sorted(loaded[0])}; "
                "give results of one set"
            )
        for benchmark in shared:
            a, b = loaded[0][benchmark], sets[benchmark]
            rates = None
            if rated is not None and benchmark in rated:
                compared = (options.results[0].resolve(), Path(name).resolve())
                is_compared = options.by_pass_rate.resolve() in compared
                rates = PassRates(str(options.by_pass_rate), rated[benchmark].problems, is_compared)
            facet = Facet(options.by, facets[benchmark]) if benchmark in facets else None
            tree["compared"].append(_compared(a, b, rates, facet, names=(benchmark, names[0], name)))
    if options.json:
        text = json.dumps(tree, indent=1, ensure_ascii=False)
        write_atomically(options.json, lambda path: path.write_text(text, encoding="utf-8"))
    return tree


def _compared(
    a: SetResult, b: SetResult, rates: PassRates | None, facet: Facet | None, *, names: tuple[str, str, str]
) -> dict[str, Any]:
    """Print and return how two results on one set differ; `names`: of the set, of A and of B."""
    benchmark, name_a, name_b = names
    whole = pair(a.problems, b.problems)
    if whole is None:
        raise UserError(
            f"{name_b} and {name_a} have no problem of {benchmark} in common; give results of the same problems"
        )
    parts = by_category(a.problems, b.problems)
    own = pair(_headline_parts(a), _headline_parts(b))
    other = _other_settings(a.summary, b.summary)
    headline = {} if own is None else {a.summary["headline"]: own}
    rule = str(a.summary.get("rule", "")) if "rule" not in other else ""
    print(_paired_text(names, {"accuracy": whole, **headline}, parts, other=other, rule=rule))
    by_rate = {} if rates is None else _by_pass_rate(a.problems, b.problems, rates, benchmark=benchmark)
    by_facet = {} if facet is None else _by_facet(a.problems, b.problems, facet, benchmark=benchmark)
    return {
        "set": benchmark,
        "a": name_a,
        "b": name_b,
        **asdict(whole),
        **_changed(a.problems, b.problems),
        "headline": {name: asdict(change) for name, change in headline.items()},
        "other_settings": other,
        "by_category": {key: asdict(part) for key, part in parts.items()},
        "by_pass_rate": {key: asdict(part) for key, part in by_rate.items()},
        "by_facet": {key: asdict(part) for key, part in by_facet.items()},
    }


def _other_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, of those that both results state."""
    other = [key for key in _SETTINGS if key in a and key in b and a[key] != b[key]]
    # A result of `vlm-rl eval` without an environment does not name one; a scored file does not say how it was asked.
    if "sampling" in a and "sampling" in b and a.get("environment") != b.get("environment"):
        other.append("environment")
    return other


def _facets(facet: str | None, sets: Sequence[Path]) -> dict[str, dict[str, list[str]]]:
    """Return name of a prepared set -> problem -> its values of a facet. Raises UserError if none has any."""
    if (facet is None) != (not sets):
        raise UserError("--by FACET and --data SET go together: the prepared sets say what their problems are")
    if facet is None:
        return {}
    values: dict[str, dict[str, list[str]]] = {}
    for path in sets:
        problems = load_set(path)
        benchmark = benchmark_of(problems)
        known = {problem.id: benchmark.facet_values(problem) for problem in problems} if benchmark else {}
        having = {name: [*filter(None, of[facet])] for name, of in known.items() if any(of.get(facet, ()))}
        if benchmark is None or not having:
            there = sorted({key for of in known.values() for key in of if any(of[key])})
            raise UserError(f"{path}: its problems have no facet {facet!r}; they have: {', '.join(there) or 'none'}")
        own = {name.removeprefix(f"{benchmark.name}-"): value for name, value in having.items()}
        values[path.resolve().name] = having | own  # records without a summary keep the longer ids
    return values


def _by_facet(a: Scores, b: Scores, facet: Facet, *, benchmark: str) -> dict[str, Paired]:
    """Print and return the change on the problems of each value. Raises UserError if none has a value.

    A problem with several values (skills) counts in each.
    """
    having: dict[str, Scores] = defaultdict(dict)
    for name, score in a.items():
        for value in facet.values.get(name, ()):
            having[value][name] = replace(score, category=value)
    changes: dict[str, Paired] = {}
    for value in sorted(having):
        changes |= by_category(having[value], b)
    if not changes:
        raise UserError(f"--data has no problem of {benchmark} in common with what is compared; give the set of it")
    print("\n".join([f"  by {facet.name}", *(_part_line(key, change) for key, change in changes.items())]))
    return changes


def _by_pass_rate(a: Scores, b: Scores, rates: PassRates, *, benchmark: str) -> dict[str, Paired]:
    """Print and return the change on hard, medium and easy problems. Raises UserError if none has a pass rate."""
    known = {
        name: replace(score, category=_difficulty(rates.problems[name].score))
        for name, score in a.items()
        if name in rates.problems
    }
    changes = by_category(known, b)
    if not changes:
        raise UserError(
            f"{rates.name} has no problem of {benchmark} in common with what is compared; give results of the same "
            "problems to --by-pass-rate"
        )
    changes = {key: changes[key] for key in ("hard", "medium", "easy") if key in changes}
    lines = [f"  by the pass rate of {rates.name}: hard below 1/3, easy above 2/3"]
    lines += [_part_line(key, change) for key, change in changes.items()]
    if missing := sum(name in b and name not in known for name in a):
        lines.append(f"    not split: {missing} problem{'s' * (missing > 1)} without a pass rate")
    if rates.is_compared:
        lines.append(
            "    the split and the comparison share these responses: part of the change is regression to the mean; "
            "an evaluation with a different --seed would not have it"
        )
    print("\n".join(lines))
    return changes


def _difficulty(pass_rate: float) -> str:
    return "hard" if pass_rate < _HARD else "easy" if pass_rate > _EASY else "medium"


def _headline_parts(result: SetResult) -> Scores:
    """Return the scores that the headline number averages, if these are not one for each question (We-Math)."""
    parts = result.summary.get("headline_parts", {})
    return {name: ProblemScore(score, None, "") for name, score in parts.items()}


def read_results(path: Path) -> dict[str, SetResult]:
    """Return set -> its result. Raises UserError for what is not a result."""
    if path.is_dir():
        newest = {result.benchmark: result for result in sorted(RunDirectory(path).evals(), key=lambda r: r.step)}
        if not newest:
            raise UserError(f"{path}: no results in it; a results folder holds eval/SET/step-*.parquet")
        return {
            name: _of_records(result.rows(_COLUMNS), result.summary, result.path.with_suffix(".json"))
            for name, result in newest.items()
        }
    if not path.is_file():
        raise UserError(f"{path}: there is no such file or folder; check the path")
    try:
        if path.suffix == ".parquet":
            beside = path.with_suffix(".json")
            summary = read_object(beside.read_bytes()) if beside.is_file() else {}
            rows = read_records(path, _COLUMNS, READ_SCHEMA, later=LATER_COLUMNS, advice=_ADVICE)
            return {path.parent.name: _of_records(rows, summary, beside)}
        tree = read_object(path.read_bytes())
        return {tree["benchmark"]: SetResult(problem_scores(tree.pop("rows")), _checked(tree, path))}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise UserError(
            f"{path}: neither records of vlm-rl eval nor a JSON of vlm-rl score "
            f"({type(error).__name__}: {' '.join(str(error).split()):.120}): {_ADVICE}"
        ) from None


def _of_records(records: pa.Table, summary: Mapping[str, Any], where: Path) -> SetResult:
    """Read the records under the benchmark's own ids, which `vlm-rl score` uses."""
    prefix = f"{summary.get('benchmark', '')}-"
    scores = problem_scores(records.to_pylist())
    return SetResult({name.removeprefix(prefix): one for name, one in scores.items()}, _checked(summary, where))


def _checked(summary: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """Return a result's summary. Raises UserError if its headline or the parts of that are no scores."""
    headline, numbers = summary.get("headline", "accuracy"), []
    try:
        if headline != "accuracy" and (own := summary["scores"][headline])["n"]:
            numbers += [own["n"], own["score"], *own["interval"]]
        numbers += summary.get("headline_parts", {}).values()
    except (KeyError, TypeError, AttributeError):
        numbers.append(None)
    if not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"{where}: its headline {headline!r:.80} has no score; evaluate or score again")
    return summary


def _changed(a: Scores, b: Scores) -> dict[str, list[str]]:
    """Return the problems whose score changed, by direction."""
    return {
        "better_on": [name for name in a if name in b and b[name].score > a[name].score],
        "worse_on": [name for name in a if name in b and b[name].score < a[name].score],
    }


def _table(loaded: Sequence[Mapping[str, SetResult]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per result: its number on each benchmark, and their plain mean where it has them all."""
    benchmarks = list(dict.fromkeys(benchmark for sets in loaded for benchmark in sets))
    rows = []
    for name, sets in zip(names, loaded, strict=True):
        cells = {benchmark: _cell(sets[benchmark]) for benchmark in benchmarks if benchmark in sets}
        scores = [cell["score"] for cell in cells.values()]
        mean = sum(scores) / len(scores) if len(cells) == len(benchmarks) > 1 else None
        rows.append({"name": name, "cells": cells, "mean": mean})
    return rows


def _cell(result: SetResult) -> dict[str, Any]:
    """Return the number that the benchmark's papers print (its headline) and the accuracy."""
    scores = [problem.score for problem in result.problems.values()]
    clusters = [problem.cluster or name for name, problem in result.problems.items()]
    accuracy = {
        "score": sum(scores) / len(scores),
        "interval": list(score_interval(np.array(scores), clusters)),
        "n": len(scores),
    }
    headline = result.summary.get("headline", "accuracy")
    own = result.summary["scores"][headline] if headline != "accuracy" else accuracy
    if not own["n"]:  # no whole problem was answered
        headline, own = "accuracy", accuracy
    return {"headline": headline, **own, "accuracy": accuracy["score"]}


def _table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    benchmarks = list(dict.fromkeys(benchmark for row in rows for benchmark in row["cells"]))
    header = f"| result | {' | '.join(benchmarks)} | mean |"
    lines = [header, "|---" * (len(benchmarks) + 2) + "|"]
    for row in rows:
        cells = [_cell_text(row["cells"].get(benchmark)) for benchmark in benchmarks]
        mean = "-" if row["mean"] is None else f"{100 * row['mean']:.1f}"
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {mean} |")
    return "\n".join(lines)


def _cell_text(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    low, high = (100 * end for end in cell["interval"])
    name = "" if cell["headline"] == "accuracy" else f"{cell['headline']} "
    return f"{name}{100 * cell['score']:.1f} [{low:.1f}, {high:.1f}] (n {cell['n']})"


def _paired_text(
    names: tuple[str, str, str],
    scores: Mapping[str, Paired],
    parts: Mapping[str, Paired],
    *,
    other: Sequence[str],
    rule: str = "",
) -> str:
    """Return a comparison as text.

    Args:
        names: of the set, of A and of B.
        scores: the change of the accuracy, and of the benchmark's own number where that is a different one.
        parts: the change of the accuracy by category.
        other: settings that differ between A and B.
        rule: what decided in both; named where it is a part of the reward.
    """
    judged = f" (judged by {rule})" if rule.startswith("reward.") else ""
    whole = scores["accuracy"]
    over = f" over {whole.num_clusters} clusters" if whole.num_clusters < whole.n else ""
    lines = [
        f"\n{names[0]}{judged}: {names[2]} minus {names[1]}",
        *(f"  {name} {_line(paired)}" for name, paired in scores.items()),
        f"  better on {whole.won}, worse on {whole.lost} problems, exact sign test{over} p = {whole.p_value:.3g}",
        f"  {_length_line(whole)}",
    ]
    if other:
        lines.append(f"  not asked or judged alike: different {', '.join(other)}")
    if whole.only_a or whole.only_b:
        lines.append(f"  not compared: {whole.only_a} problems only in the first, {whole.only_b} only in the second")
    if len(parts) > _MOST_LINES:
        lines.append(f"  {len(parts)} categories: --json has them")
    elif len(parts) > 1:
        lines += [_part_line(category or "-", part) for category, part in parts.items()]
    return "\n".join(lines)


def _line(paired: Paired) -> str:
    low, high = (100 * end for end in paired.interval)
    return (
        f"{100 * paired.score_a:.1f} -> {100 * paired.score_b:.1f}: {100 * paired.difference:+.1f} points "
        f"[{low:+.1f}, {high:+.1f}], n {paired.n}, +{paired.won} -{paired.lost}"
    )


def _part_line(name: str, paired: Paired) -> str:
    return f"    {name}: {_line(paired)}, {_length_line(paired)}"


def _length_line(paired: Paired) -> str:
    if paired.length_a is None or paired.length_b is None:
        return "length unknown"
    means = f"length {paired.length_a:.1f} -> {paired.length_b:.1f} tokens"
    if paired.length_interval is None:
        return means
    low, high = paired.length_interval
    return f"{means}: {paired.length_b - paired.length_a:+.1f} [{low:+.1f}, {high:+.1f}]"
