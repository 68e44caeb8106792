"""Measure the sandbox: programs a second, and what a program costs in it beside a bare Python.

    python perf/sandbox.py [--programs 200] [--workers 2]

In turns: programs one after another in the sandbox, the same by `python -I -S -c` without one (a
sandbox has no installed packages to look through either), and many at a time in the sandbox. The program prints a
line, so all of its time is overhead. Each figure is the median of the rounds. The last lines are verdicts a second on
LiveCodeBench's form: a program with its header, on ten tests of stdin, and a function called ten times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vlm_rl.evaluation.benchmarks import livecodebench
from vlm_rl.grading.code_grader import CodeGrader
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.sandbox.programs import Program, Sandbox

ROUNDS = 5
SOURCE = "print(1)"


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def bare() -> None:
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", SOURCE]
    subprocess.run(command, check=True, capture_output=True, env={})


def main() -> None:
    parser = argparse.ArgumentParser(description="measure the sandbox")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    each = max(1, options.programs // ROUNDS)
    alone, outside, together = [], [], []
    with Sandbox(workers=options.workers) as sandbox, ThreadPoolExecutor(options.workers) as pool:
        print(f"walls built and proved in {seconds_of(sandbox.check):.2f} s")
        program = Program(SOURCE)
        for _ in range(ROUNDS):
            alone.append(seconds_of(lambda: [sandbox.run(program) for _ in range(each)]) / each)
            outside.append(seconds_of(lambda: [bare() for _ in range(each)]) / each)
            together.append(each / seconds_of(lambda: list(pool.map(sandbox.run, [program] * each))))
    inside, plain = statistics.median(alone), statistics.median(outside)
    print(f"one program: {1e3 * inside:.1f} ms in the sandbox, {1e3 * plain:.1f} ms bare: {inside / plain:.2f} times")
    print(f"{options.workers} at a time: {statistics.median(together):.0f} programs a second")
    header = livecodebench.HEADER
    sums = [[number, 5] for number in range(10)]
    kinds = {
        "stdin, 10 tests": CodeTests(
            inputs=[f"{a} {b}\n" for a, b in sums], outputs=[f"{a + b}\n" for a, b in sums], header=header
        ),
        "a function, 10 calls": CodeTests(
            inputs=sums, outputs=[a + b for a, b in sums], function="add", rule="equal", header=header
        ),
    }
    source = "def add(a, b): return a + b\nif __name__ == '__main__': print(add(*map(int, input().split())))"
    with CodeGrader(workers=options.workers) as grader:
        grader.check()
        for name, tests in kinds.items():
            responses = [(f"{source}\n# {number}", {"tests": tests.packed()}) for number in range(20)]
            seconds = seconds_of(lambda responses=responses: grader.judge(responses))
            print(f"{name}: {len(responses) / seconds:.1f} verdicts a second")


if __name__ == "__main__":
    main()
