"""Compare what two commits compute: a move of code must change no number.

    python perf/same_results.py 404d0e5                      # against the working tree's HEAD; minutes
    python perf/same_results.py 404d0e5 HEAD --only grader scores

Each commit is checked out into a folder of its own. Both are asked the same questions at the same time, by commands
and functions that both have:

    grader       verdict, extracted answer and path of every case of the corpus (`vlm-rl grade --file`)
    scores       every benchmark's scores and verdicts, official and strict, for made-up answers to the sample
                 annotations in --samples (`vlm-rl score`)
    steps        loss and gradient norm of one optimizer step at some points of versus_trl.py
    runs         runs, checkpoints, sets and evaluations that the first commit wrote, opened by both (same_runs.py)
    quickstart   every metric of the quickstart's training and every evaluation, seed 0

The table gives the number of values, the largest relative difference, and how many values, such as those of new keys,
the other commit has alone. Any difference makes the exit code 1.

What it says of the move of all modules into rooms (404d0e5 to 39bcfdb): grader 3,621 of 3,621 values equal, steps 40
of 40. Up to e747c46~1: scores 27,761 of 27,761, quickstart 2,655 of 2,655. e747c46 sums the parts of attention in a
different order; the last hidden states then differ by 1e-6, and the later steps of a training with them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from same_runs import TIMES, Results, flat, probe_runs, python

ROOT = Path(__file__).resolve().parents[1]
POINTS = ("tiny 340 8 100", "tiny 1000 4 300")
RULES = ("grpo", "gspo", "luspo", "ba", "dapo")
UNCOMPARED = ("version", "interval", "/low", "/high", "/ci")  # how sure a score is depends on the interval policy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("other", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES))
    parser.add_argument("--samples", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = [checkout(commit, folder / f"{side}") for side, commit in enumerate((options.base, options.other))]
        work = folder / "work"
        work.mkdir()
        (work / "corpus.jsonl").write_bytes(corpus(trees[0]).read_bytes())
        different = 0
        try:
            head = (
                f"{options.base} against {options.other}",
                "values",
                "different",
                "largest relative difference",
                "new",
            )
            print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
            for probe in options.only:
                # The commits side by side, except where they share a folder and run commands side by side themselves.
                with ThreadPoolExecutor(1 if probe == "runs" else len(trees)) as pool:
                    results = list(pool.map(partial(PROBES[probe], work=work, samples=options.samples), trees))
                changed = list(differences(*results))
                different += len(changed)
                largest = max((size for _, size in changed), default=0.0)
                new = len(results[1].keys() - results[0].keys())
                print(f"| {probe} | {len(results[0])} | {len(changed)} | {largest:.2g} | {new} |", flush=True)
                for key, _ in changed[:5]:
                    left, right = (f"{result.get(key)!r:.2000}" for result in results)
                    print(f"    {key}: {left} -> {right}", file=sys.stderr)
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    return int(different > 0)


def checkout(commit: str, tree: Path) -> Path:
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
    return tree


def corpus(tree: Path) -> Path:
    return next(tree.glob("tests/**/grading_cases.jsonl"))


def run(tree: Path, *command: str) -> str:
    """Run Python with the tree's code and return its output. Raises SystemExit where the command fails."""
    done = python(tree, *command, folder=tree)
    if done.returncode:
        raise SystemExit(f"{tree.name}: {' '.join(command)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def differences(base: Results, other: Results) -> Iterator[tuple[str, float]]:
    """Yield (name, relative difference) of the first commit's values that are not equal.

    It is infinite where one is not a number or is missing.
    """
    for key in base:
        left, right = base.get(key), other.get(key)
        if left == right or (left != left and right != right):  # NaN on both sides is equal too
            continue
        if isinstance(left, int | float) and isinstance(right, int | float):
            yield key, abs(left - right) / max(abs(left), abs(right))
        else:
            yield key, math.inf


# --- the probes -------------------------------------------------------------------------------------


def probe_grader(tree: Path, work: Path, samples: Path) -> Results:
    out = work / f"graded-{tree.name}.jsonl"
    run(tree, "-m", "vlm_rl.cli", "grade", "--file", str(work / "corpus.jsonl"), "--out", str(out))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {f"{index}/{key}": row[key] for index, row in enumerate(rows) for key in ("verdict", "extracted", "path")}


def probe_scores(tree: Path, work: Path, samples: Path) -> Results:
    if not samples.is_dir():
        raise SystemExit(f"{samples} is not there: name a folder of sample annotations with --samples")
    results: Results = {}
    for name, (files, answer_rows) in BENCHMARKS.items():
        annotations = sorted(str(path) for path in samples.glob(files))
        responses = work / f"{name}-{tree.name}.json"
        responses.write_text(json.dumps(answer_rows(annotations)), encoding="utf-8")
        for mode in ("official", "strict"):
            out = work / f"{name}-{mode}-{tree.name}.json"
            where = ["--annotations", *annotations, "--responses", str(responses), "--json", str(out)]
            run(tree, "-m", "vlm_rl.cli", "score", "--benchmark", name, "--mode", mode, *where)
            scored = json.loads(out.read_text(encoding="utf-8"))
            for row in scored.get("rows", ()):
                row.pop("reason", None)
            for key, value in flat(scored):
                if not key.startswith("/responses") and not any(word in key for word in UNCOMPARED):
                    results[f"{name}/{mode}{key}"] = value
    return results


def probe_steps(tree: Path, work: Path, samples: Path) -> Results:
    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from versus_trl import Point, build_models, our_step\n"
        "folder = Path(sys.argv[2]); build_models(folder, {'tiny'})\n"
        "for text in json.loads(sys.argv[3]):\n"
        "    model, *numbers, rule = text.split()\n"
        "    step = our_step(Point(model, *map(int, numbers), rule=rule), folder)\n"
        "    print(json.dumps([text, *((r := step()).loss, r.grad_norm), *((r := step()).loss, r.grad_norm)]))\n"
    )
    scripts = next(path.parent for path in tree.glob("*/versus_trl.py"))
    models = work / f"models-{tree.name}"
    models.mkdir()
    points = [f"{point} {rule}" for point in POINTS for rule in RULES]
    printed = run(tree, "-c", code, str(scripts), str(models), json.dumps(points))
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    return {f"{row[0]}/{index}": value for row in rows for index, value in enumerate(row[1:])}


def probe_quickstart(tree: Path, work: Path, samples: Path) -> Results:
    out = work / f"quickstart-{tree.name}"
    run(tree, "-m", "vlm_rl.cli", "quickstart", "--seed", "0", "--out", str(out))
    results: Results = {}
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        results |= {f"{row['step']}/{k}": v for k, v in row.items() if not k.startswith(TIMES)}
    for path in sorted(out.glob("eval/*/*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        for key in ("accuracy", "mean_length", "n"):
            results[f"{path.relative_to(out)}/{key}"] = summary.get(key)
    return results


PROBES: dict[str, Callable[..., Results]] = {
    "grader": probe_grader,
    "scores": probe_scores,
    "steps": probe_steps,
    "runs": probe_runs,
    "quickstart": probe_quickstart,
}


# --- made-up answers to the samples' questions --------------------------------------------------------


def phrased(index: int, gold: Any, other: Any) -> str:
    """Return one of six responses by its index: right or wrong, boxed, in words or bare."""
    forms = (
        f"<think>so</think> \\boxed{{{gold}}}",
        f"The answer is {gold}.",
        f"Answer: {gold}",
        f"<think>no</think> \\boxed{{{other}}}",
        f"It must be {other}",
        json.dumps({"solution": "s", "short answer": gold}),
    )
    return forms[index % len(forms)]


def load(paths: list[str]) -> list[Any]:
    """Return the rows of JSON and JSON Lines files; objects by id become rows with that `id`."""
    rows: list[Any] = []
    for name in paths:
        text = Path(name).read_text(encoding="utf-8")
        if name.endswith(".jsonl"):
            rows += [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            tree = json.loads(text)
            rows += tree if isinstance(tree, list) else [{"id": key, **row} for key, row in tree.items()]
    return rows


def answers(id_key: str, gold_key: str, response_key: str = "response") -> Callable[[list[str]], list[Any]]:
    def make(paths: list[str]) -> list[Any]:
        rows = load(paths)
        golds = [row.get(gold_key) for row in rows]
        golds = [gold[0] if isinstance(gold, list) else gold for gold in golds]
        return [
            {id_key: row.get(id_key, index), response_key: phrased(index, golds[index], golds[index - 1])}
            for index, row in enumerate(rows)
        ]

    return make


def by_trial(paths: list[str]) -> list[Any]:
    return [
        {"id": row["id"], "trial": trial, "response": phrased(index + trial, row["answer"], "7")}
        for trial, path in enumerate(sorted(paths, key=lambda p: int(Path(p).parent.name.removeprefix("trial"))), 1)
        for index, row in enumerate(load([path]))
    ]


def by_step(paths: list[str]) -> list[Any]:
    rows = load(paths)
    return [
        {"ID": row["ID"], "key": row["key"], "response": phrased(index, row["answer"], "B")}
        for index, row in enumerate(rows)
    ]


BENCHMARKS: dict[str, tuple[str, Callable[[list[str]], list[Any]]]] = {
    "mathvision": ("mathvision/testmini.jsonl", answers("id", "answer")),
    "mathvista": ("mathvista/*.json", lambda paths: answers("pid", "answer")([*paths])),
    "logicvista": ("logicvista/dataset_90.json", answers("id", "answer")),
    "mathverse": ("mathverse/*.json", answers("sample_index", "answer")),
    "wemath": ("wemath/testmini.json", by_step),
    "dynamath": ("dynamath/trial*/dataset.json", by_trial),
    "aime24": ("text_math/aime24.jsonl", answers("id", "answer")),
    "amc23": ("text_math/amc23.jsonl", answers("id", "answer")),
    "olympiadbench": ("text_math/olympiadbench_100.jsonl", answers("id", "final_answer")),
}


if __name__ == "__main__":
    sys.exit(main())
