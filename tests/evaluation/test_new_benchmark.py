"""A benchmark is added by one file and its line in the registry: then it is prepared, evaluated and scored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PARITY = '''"""Parity: is a number odd or even?"""

from dataclasses import replace

from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    Judgement,
    PublishedPrompt,
    PublishedRule,
)
from vlm_rl.evaluation.benchmarks.protocols import TEXT, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import gold_text, id_text, problem_of, text


def read_row(row):
    gold = gold_text(row, "parity")
    meta = {"digits": row.get("digits")}
    return problem_of(
        "parity", id_text(row, "n"), text(row, "ask"), gold=gold, answer=gold.lower(), answer_type="text", meta=meta
    )


def official_rule(problem, response):
    right = problem.meta["gold"] in response.text
    return Judgement("correct" if right else "wrong", response.text[:20], f"holds the gold: {right}")


BENCHMARK = Benchmark(
    name="parity",
    protocol=replace(TEXT, max_tokens=Stated(4, "one word")),
    files=BenchmarkFiles(hub="", tables=("parity.jsonl",)),
    rows=BenchmarkRows(read_row=read_row, images=lambda row: [], response_ids=("n",)),
    rule=PublishedRule(judgement=official_rule, needs_judge_model=False),
    report=BenchmarkReport(facets=lambda problem: {"digits": problem.meta["digits"]}),
    prompt=PublishedPrompt("parity", "nowhere", before="Odd or even? "),
)
'''

COMMANDS = """
import sys
from vlm_rl.cli import main
model, rows, responses = sys.argv[1:]
assert main(["prepare", "parity", "--source", rows, "--out", "set/parity"]) == 0
assert main(["eval", "--model", model, "--data", "set/parity", "--out", "run", "--mode", "official",
             "--template", "parity", "--sampler", "transformers"]) == 0
for mode in ("official", "strict"):
    assert main(["score", "--benchmark", "parity", "--annotations", rows, "--responses", responses,
                 "--mode", mode, "--json", mode + ".json"]) == 0
"""


@pytest.mark.slow
def test_one_file_and_its_registry_line_are_enough(tmp_path: Path, tiny_model: Path) -> None:
    package = tmp_path / "package" / "vlm_rl"
    shutil.copytree(ROOT / "vlm_rl", package, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    benchmarks = package / "evaluation" / "benchmarks"
    (benchmarks / "parity.py").write_text(PARITY, encoding="utf-8")
    registry = (benchmarks / "registry.py").read_text(encoding="utf-8")
    registry = registry.replace("    olympiadbench,\n", "    olympiadbench,\n    parity,\n")
    registry = registry.replace('    "wemath":', '    "parity": parity.BENCHMARK,\n    "wemath":')
    (benchmarks / "registry.py").write_text(registry, encoding="utf-8")

    rows = [{"n": n, "ask": f"And {n}?", "parity": "Even" if n % 2 == 0 else "Odd", "digits": 1} for n in range(4)]
    said = ["Even", r"\boxed{odd}", "Odd", r"\boxed{Odd}"]  # official: right, wrong (its case), wrong, right
    responses = [{"n": n, "response": text} for n, text in enumerate(said)]
    for name, table in (("parity.jsonl", rows), ("responses.jsonl", responses)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    script = [sys.executable, "-c", COMMANDS, tiny_model, tmp_path / "parity.jsonl", tmp_path / "responses.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        list(map(str, script)), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    summary = json.loads((tmp_path / "run/eval/parity/step-000000.json").read_text(encoding="utf-8"))
    assert (summary["benchmark"], summary["rule"], summary["num_problems"]) == ("parity", "official", 4)
    assert summary["protocol"]["max_tokens"] == "one word"
    assert summary["by"]["digits"]["1"]["n"] == 4 and summary["template_words"]["before"] == "Odd or even? "
    verdicts = {
        mode: [row["verdict"] for row in json.loads((tmp_path / f"{mode}.json").read_text(encoding="utf-8"))["rows"]]
        for mode in ("official", "strict")
    }
    assert verdicts["official"] == ["correct", "wrong", "wrong", "correct"]
    assert verdicts["strict"] == ["no_answer", "correct", "no_answer", "correct"]
