"""HumanEval+ (EvalPlus, arXiv 2305.01210): 164 functions to complete, with about 80 times HumanEval's tests.

The tests are inputs; what should come out is computed by the task's own solution, in the sandbox too.
"""

from __future__ import annotations

from typing import Any

from vlm_rl.evaluation.benchmarks.code_sets import evalplus_benchmark


def arguments(_: str, calls: list[Any]) -> list[list[Any]]:
    """Return the calls as they are: JSON's types are those that the tasks take."""
    return [list(call) for call in calls]


BENCHMARK = evalplus_benchmark(
    "humaneval_plus", rule="evalplus_humaneval", num_rows=164, prefix="HumanEvalPlus", arguments=arguments
)
