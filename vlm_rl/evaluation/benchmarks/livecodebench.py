"""LiveCodeBench, code generation (arXiv 2403.07974): contest problems by date, each with public and hidden tests.

A release N holds the problems of test.jsonl to testN.jsonl of livecodebench/code_generation_lite. Programs read stdin
(AtCoder, Codeforces) or are a method of a class Solution (LeetCode).
"""

from __future__ import annotations

import json
import pickletools
from dataclasses import replace
from typing import Any

from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    PublishedPrompt,
    PublishedRule,
    RawRow,
)
from vlm_rl.evaluation.benchmarks.code_sets import code_problem, fenced_program, no_images
from vlm_rl.evaluation.benchmarks.protocols import CODE, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, id_text, text
from vlm_rl.grading.code_tests import unpacked
from vlm_rl.types import Problem

_SECONDS = 6.0  # of a test: `--timeout` of its runner
_SAMPLING = "LiveCodeBench, lcb_runner/runner/parser.py"
_SOURCE = "LiveCodeBench, lcb_runner/prompts/code_generation.py, MIT"
_WITH_STARTER = (
    "### Format: You will use the following starter code to write the solution to the problem and enclose your code "
    "within delimiters.\n```python\n{starter}\n```\n\n"
)
_WITHOUT_STARTER = (
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test "
    "on the sample inputs). Enclose your code within delimiters as follows.\n```python\n# YOUR CODE HERE\n```\n\n"
)
# What its harness imports before every program (lcb_runner/evaluation/testing_util.py, import_string).
_ALL_OF = [
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
]
HEADER = "\n".join(
    [
        *(f"from {name} import *" for name in [*_ALL_OF, "builtins", "typing"]),
        *(f"import {name}" for name in _ALL_OF),
        "sys.setrecursionlimit(50000)",
    ]
)

_RELEASES = {
    f"release_v{last}": ("test.jsonl", *(f"test{n}.jsonl" for n in range(2, last + 1))) for last in range(1, 7)
}
_PARTS = {f"v{n}": (f"test{n}.jsonl" if n > 1 else "test.jsonl",) for n in range(1, 7)}


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row, its tests in the order public, hidden."""
    own_id, starter = id_text(row, "question_id"), text(row, "starter_code")
    tests = [*_listed(row, "public_test_cases"), *_listed(row, "private_test_cases")]
    function = _metadata(row).get("func_name") or ""
    try:
        inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
        if function:
            inputs = [[json.loads(line) for line in lines.split("\n")] for lines in inputs]
            outputs = [json.loads(line) for line in outputs]
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise UnusableRowError("bad_tests", f"its tests are not of the published form: {error!r:.80}") from None
    question = f"{text(row, 'question_content')}\n\n"
    question += _WITH_STARTER.format(starter=starter) if starter else _WITHOUT_STARTER
    date = text(row, "contest_date")[:10]
    return code_problem(
        "livecodebench",
        own_id,
        question,
        tests={
            "function": str(function),
            "inputs": inputs,
            "outputs": outputs,
            "header": HEADER,
            "rule": "equal" if function else "lines",
            "seconds": _SECONDS,
        },
        meta={"date": date, "platform": text(row, "platform"), "level": text(row, "difficulty")},
        category=text(row, "platform"),
    )


def _metadata(row: RawRow) -> dict[str, Any]:
    value = row.get("metadata") or {}
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UnusableRowError("bad_tests", f"metadata must be a JSON object, not {row.get('metadata')!r:.60}")
    return value


def _listed(row: RawRow, column: str) -> list[Any]:
    """Return the tests of a column: a list, its JSON, or its JSON pickled, compressed and in base64."""
    value = row.get(column) or []
    try:
        if isinstance(value, str):
            value = json.loads(value if value.lstrip()[:1] == "[" else _unpickled_text(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise UnusableRowError("bad_tests", f"{column} cannot be unpacked: {error}") from None
    if not isinstance(value, list):
        raise UnusableRowError("bad_tests", f"{column} must be a list, not {type(value).__name__}")
    return value


def _unpickled_text(packed: str) -> str:
    """Return the text in a pickle of nothing but a text; nothing of the pickle is executed. Raises ValueError."""
    texts = []
    for opcode, argument, _ in pickletools.genops(unpacked(packed)):
        if opcode.name.endswith("UNICODE") or opcode.name == "BINUNICODE8":
            texts.append(argument)
        elif opcode.name not in ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"):
            raise ValueError(f"its pickle holds {opcode.name}, not only a text")
    if len(texts) != 1:
        raise ValueError(f"its pickle holds {len(texts)} texts, not one")
    return texts[0]


BENCHMARK = Benchmark(
    name="livecodebench",
    license="CC, its card does not say which",
    protocol=replace(
        CODE,
        split=Stated("release_v6", "ours: the newest release that we know; name a paper's own with --split"),
        temperature=Stated(0.2, _SAMPLING),
        top_p=Stated(0.95, _SAMPLING),
        samples=Stated(10, _SAMPLING),
    ),
    files=BenchmarkFiles(
        hub="livecodebench/code_generation_lite",
        hub_files=("test*.jsonl",),
        tables=("{split}.jsonl",),
        split_files=_RELEASES | _PARTS,
        splits=(*reversed(_RELEASES), *_PARTS),
        num_rows=(1055, 880, 713, 612, 511, 400),
    ),
    rows=BenchmarkRows(read_row=read_row, images=no_images, response_ids=("question_id",)),
    rule=PublishedRule(judgement=fenced_program, needs_judge_model=False),
    report=BenchmarkReport(
        facets=lambda problem: {
            "level": problem.meta.get("level"),
            "platform": problem.meta.get("platform"),
            "month": str(problem.meta.get("date", ""))[:7],
        }
    ),
    prompt=PublishedPrompt(
        "livecodebench",
        _SOURCE,
        system="You are an expert Python programmer. You will be given a question (problem specification) and will "
        "generate a correct Python program that matches the specification and passes all tests. You will NOT return "
        "anything except for the program.",
        before="### Question:\n",
        after="### Answer: (use the provided format with backticks)\n\n",
    ),
    has_programs=True,
)
