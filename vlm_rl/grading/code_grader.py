"""Judge programs: run each in the sandbox on the tests of its problem, and compare what comes out, outside.

What is expected never goes into the sandbox, so nothing that a program prints, raises or replaces there can make it
right. A program that is stopped by a limit is wrong; one that the sandbox fails to run is not judged (`error`).
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.grading.code_comparison import NO_GOLD, compare, comparison_worker, shown, written
from vlm_rl.grading.code_rules import RULES
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.grading.reasons import shorten
from vlm_rl.sandbox.functions import Answers, call_function, encode
from vlm_rl.sandbox.limited import LimitError
from vlm_rl.sandbox.program import Program, ProgramLimits
from vlm_rl.sandbox.programs import Sandbox, SandboxError
from vlm_rl.types import Verdict

Judged = tuple[Verdict, str]  # with the reason, one sentence
_SLACK = 1  # CPU seconds for the start of Python
_ALL_TESTS = 60.0  # CPU seconds of one program on all tests, and half of those that it may take by the clock
_FUTURE_IMPORT = re.compile(
    r"^from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^()]*\)[^\n]*|(?:\\\n|[^\n])*)", re.MULTILINE
)


class CodeGrader:
    """Judge programs with a pool of sandboxes, which starts with the first program."""

    def __init__(self, *, workers: int, waits: Callable[[], object] = lambda: None) -> None:
        """Start nothing yet; `waits` is called after each program."""
        self._workers, self._waits = workers, waits
        self._sandbox: Sandbox | None = None
        self._comparison = comparison_worker()
        self._outputs: dict[tuple[str, str], Answers] = {}  # of references
        self._lock = threading.Lock()

    def __enter__(self) -> CodeGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Build the sandbox and prove its walls. Raises UserError if that fails."""
        self._opened().check()

    def close(self) -> None:
        """Stop the sandbox, and what is being judged, as errors; a later call starts it again."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()
        self._comparison.close()

    def judge(self, programs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Judged]:
        """Return the verdicts on (program, meta of its problem); equal pairs are run once.

        Raises UserError if there is no sandbox.
        """
        sandbox = self._opened()
        sandbox.check()
        distinct = {(program, str(meta.get("tests"))): (program, meta) for program, meta in programs}
        verdicts: dict[tuple[str, str], Judged] = {}
        with ThreadPoolExecutor(self._workers) as pool:
            judged = pool.map(lambda pair: self._judge(sandbox, *pair), distinct.values())
            for key, verdict in zip(distinct, judged, strict=True):
                verdicts[key] = verdict
                self._waits()
        return [verdicts[program, str(meta.get("tests"))] for program, meta in programs]

    def _opened(self) -> Sandbox:
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox(workers=self._workers)
            return self._sandbox

    def _judge(self, sandbox: Sandbox, program: str, meta: Mapping[str, Any]) -> Judged:
        try:
            tests = CodeTests.of(meta)
        except UserError as error:
            return "error", str(error)
        source = with_header(program, tests.header)
        try:
            return (self._by_values if tests.function else self._by_lines)(sandbox, source, tests)
        except SandboxError as error:
            return "error", str(error)
        except Exception as fault:  # as in the grader of answers: it must not take the whole batch with it
            return "error", f"a fault of the grader: {type(fault).__name__}: {shorten(str(fault))}"

    def _by_lines(self, sandbox: Sandbox, source: str, tests: CodeTests) -> Judged:
        """Run the program once for each test, up to the first that fails."""
        limits = ProgramLimits(
            seconds=2 * tests.seconds + _SLACK,
            cpu_seconds=math.ceil(tests.seconds) + _SLACK,
            memory=tests.memory_mib << 20,
        )
        cpu, clock = 0.0, 0.0
        for number, (stdin, expected) in enumerate(zip(tests.inputs, tests.outputs or (), strict=True), start=1):
            # What is much longer than it should be is wrong; no need to read it.
            room = (1 << 20) + 2 * len(expected.encode(errors="surrogatepass"))
            run = sandbox.run(Program(source, stdin.encode(errors="surrogatepass"), replace(limits, output=room)))
            where = f"test {number} of {len(tests.inputs)}"
            cpu, clock = cpu + run.cpu_seconds, clock + run.seconds
            if cpu > _ALL_TESTS or clock > 2 * _ALL_TESTS:
                return "wrong", f"{where}: all tests together took more than {_ALL_TESTS:g} s of CPU time"
            if not run.succeeded:
                return "wrong", f"{where}: {run.reason}"
            printed = run.stdout.decode(errors="replace")
            if not RULES[tests.rule](printed, expected):
                return "wrong", f"{where}: printed {shown(printed)} in place of {shown(expected)}"
        return "correct", f"passes all {len(tests.inputs)} tests"

    def _by_values(self, sandbox: Sandbox, source: str, tests: CodeTests) -> Judged:
        """Call the function once for each test, in one run."""
        expected = self._expected(sandbox, tests)
        # Much longer values are wrong: no need to read them.
        answers = self._call(sandbox, source, tests, output=(64 << 10) + 4 * len(expected.text))
        total = len(tests.inputs)
        try:
            wrong = compare(self._comparison, answers, tests, expected)
        except LimitError as limit:
            return "wrong", f"comparing what it returned {limit}"
        if wrong is not None and wrong[0] == NO_GOLD:
            return "error", f"the problem's own program fails: {wrong[1]}"
        if wrong is not None:
            return "wrong", f"test {wrong[0] + 1} of {total}: {wrong[1]}"
        return "correct", f"passes all {total} tests"

    def _expected(self, sandbox: Sandbox, tests: CodeTests) -> Answers:
        """Return the expected outputs, by the problem's own program where it states none."""
        if tests.outputs is not None:
            return written(tests.outputs)
        key = (tests.reference, json.dumps(encode(tests.inputs)))
        if key not in self._outputs:
            self._outputs[key] = self._call(sandbox, tests.reference, tests)
        return self._outputs[key]

    def _call(self, sandbox: Sandbox, source: str, tests: CodeTests, *, output: int = 16 << 20) -> Answers:
        return call_function(
            sandbox,
            source,
            tests.function,
            tests.inputs,
            seconds=tests.seconds,
            memory=tests.memory_mib << 20,
            output=output,
        )


def with_header(program: str, header: str) -> str:
    """Return a program with its benchmark's imports in front, but after those from __future__."""
    if not header:
        return program
    end = max((found.end() for found in _FUTURE_IMPORT.finditer(program)), default=0)
    return "\n".join(part for part in (program[:end], header, program[end:]) if part)
