"""What the benchmarks of programs share: their problems, and the program in a response.

A problem's tests are in its meta (grading.code_tests), so that the grader judges responses to it like any others, in
its sandbox. Nothing of a row is executed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkRows,
    Judgement,
    PublishedPrompt,
    PublishedRule,
    RawRow,
    Response,
)
from vlm_rl.evaluation.benchmarks.protocols import CODE
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, id_text, problem_of, text
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.templates import last_program
from vlm_rl.types import Problem

_MEMORY_MIB = 4096  # the limit of EvalPlus and of LiveCodeBench


def code_problem(
    benchmark: str,
    own_id: str,
    question: str,
    *,
    tests: Mapping[str, Any],
    meta: Mapping[str, Any],
    category: str = "",
) -> Problem:
    """Return a problem whose answer is a program.

    Args:
        benchmark: the benchmark's name.
        own_id: the id in the benchmark.
        question: the text that is asked.
        tests: fields of CodeTests; the limit of memory is the benchmarks' own.
        meta: what the problem's meta has besides the tests.
        category: of the problem.

    Raises UnusableRowError for tests that make no sense.
    """
    try:
        checked = CodeTests(memory_mib=_MEMORY_MIB, **tests)
    except UserError as error:
        raise UnusableRowError("bad_tests", str(error)) from None
    return problem_of(
        benchmark,
        own_id,
        question,
        gold=checked.gold,
        answer=checked.gold,
        answer_type="code",
        category=category,
        meta={"tests": checked.packed(), **meta},
    )


def no_images(_: RawRow) -> tuple[()]:
    """Return the images of a row: none."""
    return ()


def fenced_program(_: Problem, response: Response) -> Judgement | str:
    """Return the program of a response: what is between its last two fences."""
    program = last_program(response.text)
    return Judgement("no_answer", None, "no fenced block (```)") if program is None else program


def fenced_or_bare_program(problem: Problem, response: Response) -> Judgement | str:
    """Return the program of a response, which may be nothing but the program."""
    return response.text if "```" not in response.text else fenced_program(problem, response)


def evalplus_benchmark(
    name: str,
    *,
    rule: str,
    num_rows: int,
    prefix: str,
    arguments: Callable[[str, list[Any]], list[list[Any]]],
) -> Benchmark:
    """Return a benchmark of EvalPlus, in the JSON lines that its releases publish.

    Args:
        name: ours.
        rule: the key of its rule in grading.code_rules.
        num_rows: of its newest release.
        prefix: how the released file's name begins.
        arguments: returns the calls of a task (its id, and its calls as JSON has them) with their Python types.
    """

    def read_row(row: RawRow) -> Problem:
        own_id, prompt = id_text(row, "task_id"), text(row, "prompt")
        calls = [call for column in ("base_input", "plus_input") for call in row.get(column) or []]
        try:
            inputs = arguments(own_id, calls)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise UnusableRowError("bad_tests", f"its inputs are not those of {own_id}: {error}") from None
        tests = {
            "function": text(row, "entry_point"),
            "inputs": inputs,
            "reference": prompt + text(row, "canonical_solution"),
            "rule": rule,
            "atol": float(row.get("atol") or 0),
            "seconds": 4.0,
        }
        return code_problem(name, own_id, prompt.strip(), tests=tests, meta={})

    return Benchmark(
        name=name,
        license="Apache-2.0",
        protocol=CODE,
        files=BenchmarkFiles(hub="", tables=(f"{prefix}*.jsonl",), num_rows=(num_rows,)),
        rows=BenchmarkRows(read_row=read_row, images=no_images, response_ids=("task_id",)),
        rule=PublishedRule(judgement=fenced_or_bare_program, needs_judge_model=False),
        prompt=PublishedPrompt(
            name,
            "EvalPlus 0.3.1, evalplus/codegen.py and provider/utility.py, Apache-2.0",
            before="Please provide a self-contained Python script that solves the following problem in a markdown "
            "code block:\n```\n",
            after="\n```\n",
        ),
        has_programs=True,
    )
