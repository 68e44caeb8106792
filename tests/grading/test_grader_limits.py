r"""What the grader refuses unevaluated, and what ends a comparison that was let through.

The filter is tried limit by limit; the workers' limits are met by real comparisons in real workers.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import children_of
from vlm_rl.grading.grader import Grader, GradeTask, _grade
from vlm_rl.grading.limits import Undecided, refuse_explosive, refuse_long
from vlm_rl.grading.symbolic_client import SymbolicJudge
from vlm_rl.templates import TEMPLATES

PLAIN = TEMPLATES["plain"]
GOOD, WRONG = ("equal", r"\ln 8", r"3\ln 2"), ("equal", r"\ln 8", r"2\ln 3")
ENDLESS = ("equal", "9", "9^{9^{9^9}}")  # more digits than there are particles: only a limit ends it

# -- the filter ------------------------------------------------------------------------------------------

# Each limit on both sides: (a text that it refuses, a neighbour that it lets through).
LIMITS = [
    ("characters", "x" * 1001, "x" * 1000),
    ("nested brackets", "(" * 41 + "x" + ")" * 41, "(" * 40 + "x" + ")" * 40),
    ("nested brackets", "[{(" * 14 + "x", "[{(" * 13 + "x" + ")}]" * 13 + "[{("),
    ("an exponent tower", "2^{x^{y^{z}}}", "2^{x^{y}}+2^{x^{y}}"),
    ("an exponent tower", "((x^{a})^{b})^{c}", "(x^{a})^{b}"),
    ("a huge power", "x^{12345}", "x^{1234}"),
    ("a huge power", "x^(12345+y)", "x^(1234+y)"),
    ("a huge power", "(x+y)^{100}", "(x+y)^{99}"),
    ("a huge power", "[x+y] ^ { 100}", "[x+y] ^ { 99}"),
    ("a power of a power of digits", "x^{10^{10}}", "x^{10^{9}}"),
    ("a power of a power of digits", "x^(2^(99))", "x^(2^(9))"),
    ("a huge factorial", "12345!", "1234!"),
    ("a huge factorial", "(10^{4})!", "(10^{4}+x)!"),
    ("a huge factorial", "(5!)!", "5!+3!"),
    ("a huge binomial", r"\binom{12345}{x}", r"\binom{1234}{x}"),
    ("a huge binomial", r"\dbinom{10^{8}}{2}", r"\dbinom{10}{2}"),
    ("a long sum or product", r"\sum_{k=1000}^{n} k", r"\sum_{k=999}^{n} k"),
    ("a long sum or product", r"\sum_{k=1}^{12345} k", r"\sum_{k=1}^{100} k"),
    ("a huge power", r"\int_{0}^{9} x^{12345} dx", r"\int_{0}^{1234} x dx"),
    ("a long sum or product", r"\prod_{k=1}^{10^{9}} k", r"\prod_{k=1}^{10} k"),
    ("several integrals", r"\int_0^1\int_0^1 x dx dy", r"\int_0^1 x dx"),
    ("several integrals", r"\iint x", r"\int x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "over", "within"), LIMITS, ids=[f"{row[0]} {row[1]}"[:40] for row in LIMITS])
def test_each_limit_of_the_filter_holds_where_it_is_drawn(name: str, over: str, within: str) -> None:
    refuse_explosive(within)
    with pytest.raises(Undecided, match=name) as refusal:
        refuse_explosive(over)
    assert (refusal.value.verdict, refusal.value.path) == ("error", "prefilter")
    assert refusal.value.reason.startswith("refused unevaluated: ")


def asked(answer: str, gold: str, kind: Any = "expression", **meta: Any) -> tuple[str, int]:
    """(verdict, or "" while open; symbolic comparisons asked for), the judge not spoken to."""
    wanted: dict[Any, None] = {}
    grade = _grade(GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN, meta=meta), {}, wanted)
    return grade.verdict if grade else "", len(wanted)


def test_no_way_to_the_judge_leads_past_the_filter() -> None:
    explosive, harmless = r"\ln((x+y)^{100})", r"\ln((x+y)^{99})"
    assert asked(explosive, r"\ln 8") == ("error", 0)
    assert asked(harmless, r"\ln 8") == ("", 1)
    assert asked(r"\ln(2^{12345})", "5", "float", tolerance=0.1) == ("error", 0)  # its value would be computed
    assert asked(r"\ln(2^{1234})", "5", "float", tolerance=0.1) == ("", 1)
    assert asked(f"{explosive}, 2", r"\ln 8, 2", "list") == ("error", 0)
    assert asked(rf"{explosive} \approx 69.3", r"\ln 8") == ("error", 0)


def test_a_long_answer_and_a_long_list_are_refused_at_their_limits() -> None:
    refuse_long("5" * 8000)
    with pytest.raises(Undecided, match="8000 characters"):
        refuse_long("5" * 8001)
    assert asked("y" * 8001, "x") == ("error", 0)
    assert asked(rf"y}} \boxed{{{'y' * 8001}", "x") == ("error", 0)  # of any of the boxes
    for size, verdict in ((24, "wrong"), (25, "error")):  # items to pair off
        gold, answer = (rf"\{{{','.join(map(str, range(start, start + size)))}\}}" for start in (1, 101))
        assert asked(answer, gold) == (verdict, 0)


def test_many_boxes_of_many_spellings_are_no_answer() -> None:
    """Thin spaces and their opposites, in every order: all are 5, and each would have to be read."""
    spellings = [
        rf"\boxed{{5{''.join(order)}}}" for order in itertools.islice(itertools.product([r"\,", r"\!"], repeat=8), 65)
    ]
    for number, verdict in ((64, "correct"), (65, "no_answer")):
        grade = _grade(GradeTask(" ".join(spellings[:number]), "5", "integer", PLAIN), {}, {})
        assert grade is not None and grade.verdict == verdict


# Each text of one character or more is repeated to the length of the noise; what runs away takes hours.
NOISE = [
    *(r"\boxed{5}", r"\boxed{", r"\boxed", r"\boxed   ", r"\boxed{1}\boxed{", r"\boxed{\{"),
    *("{", "}", "{}", "\\", r"\{", "\uff5b", "\uff3c\uff42\uff4f\uff58\uff45\uff44\uff5b\uff15\uff5d"),
    *("\u200b", "\\\u200bboxed{5}", "\ud800", "\0", "\u4e2d", "\u0665", "\u00bd", "e\u0301"),
    *("7", "1,", "x=", "a ", "&#52;", "&lt;", "<", "<  ", "< think ", "<think"),
    *("<think>", "</think>", "<answer>", "</answer>", "<answer></answer>", "<think></think>"),
]
TEMPLATE_TAG = re.compile("think|answer")
FRAMES = {
    "in the reasoning": r"<think>{}</think><answer>\boxed{{5}}</answer>",
    "before the box": r"<think>a</think><answer>{}\boxed{{5}}</answer>",
    "after the answer": r"<think>a</think><answer>\boxed{{5}}</answer>{}",
    "in the box": r"<think>a</think><answer>\boxed{{{}}}</answer>",
    "all there is": "{}",
}


@pytest.mark.timeout(240)  # each size takes a second
@pytest.mark.parametrize(
    "size", [10_000, 100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_noise_of_any_length_is_read_in_linear_time(size: int) -> None:
    r"""Where it runs away, it runs for hours. Noise outside the answer region, and without tags, changes nothing.

    An answer of nothing but noise is refused or no answer, never a fault and never right.
    """
    for noise in NOISE:
        text = (noise * (size // len(noise) + 1))[: size // len(noise) * len(noise)]
        for where, frame in FRAMES.items():
            task = GradeTask(frame.format(text), "5", "integer", TEMPLATES["think_answer"])
            grade = _grade(task, {}, {})
            assert grade is not None and grade.path != "fault", (noise, where)
            if where == "in the box" and noise not in ("\u200b", r"\boxed{5}"):
                assert not grade.correct, noise
            if where in ("in the reasoning", "after the answer") and not TEMPLATE_TAG.search(noise):
                assert grade.correct, (noise, where)


# -- the workers' limits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge() -> Iterator[SymbolicJudge]:
    """One worker, which may take 128 MiB and is replaced after each job; its CPU clock plays no part."""
    judge = SymbolicJudge(workers=1, timeout=100.0, memory_bytes=128 << 20, jobs_per_worker=1)
    yield judge
    judge.close()


def workers(judge: SymbolicJudge) -> list[int]:
    """The process ids of the server's children."""
    assert judge._server is not None
    return children_of(judge._server.pid)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within two minutes: what is waited for takes milliseconds."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_memory_bomb_meets_its_limit_and_nothing_else_notices(judge: SymbolicJudge) -> None:
    r"""\sin(2^{9999^3}) passes the filter, and has 10^12 bits: 125 GB."""
    with Grader() as grader:
        grader._judge = judge

        def grade(answer: str) -> tuple[str, str]:
            grade = grader.grade(rf"\boxed{{{answer}}}", gold=r"\ln 8", answer_type="expression", template=PLAIN)
            return grade.verdict, grade.reason

        assert grade(r"3\ln 2")[0] == "correct"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert grade(r"\sin(2^{9999^3})") == ("error", "more than 128 MiB of memory")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
        assert judge._server is not None
        peak = re.search(r"VmHWM:\s+([0-9]+)", Path(f"/proc/{judge._server.pid}/status").read_text())
        assert peak and int(peak[1]) < 128 << 10  # KiB, of the server
        assert (grade(r"3\ln 2")[0], grade(r"2\ln 3")[0]) == ("correct", "wrong")


def test_a_worker_writes_no_file_and_is_replaced(judge: SymbolicJudge) -> None:
    assert judge.decide([GOOD]) == [("ok", True)]
    assert eventually(lambda: len(workers(judge)) == 1)
    (worker,) = workers(judge)
    rows = Path(f"/proc/{worker}/limits").read_text().splitlines()
    limits = {row[:26].strip(): row[26:].split()[:2] for row in rows}
    assert limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    soft, hard = limits["Max address space"]
    assert soft == hard and 128 << 20 < int(soft) < 1 << 30
    assert judge.decide([GOOD, WRONG]) == [("ok", True), ("ok", False)]
    assert eventually(lambda: worker not in workers(judge))


def busy(judge: SymbolicJudge) -> list[int]:
    """The workers that have computed for a tenth of a second."""
    ticks = os.sysconf("SC_CLK_TCK") / 10
    return [worker for worker in workers(judge) if cpu_ticks(worker) > ticks] if judge._server else []


def cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])  # user and system


def test_a_worker_that_dies_takes_its_own_answer_with_it(judge: SymbolicJudge) -> None:
    with ThreadPoolExecutor(1) as thread:
        outcomes = thread.submit(judge.decide, [GOOD, ENDLESS, GOOD, WRONG])
        assert eventually(lambda: bool(busy(judge)))
        os.kill(busy(judge)[0], signal.SIGKILL)
        assert outcomes.result(120) == [
            ("ok", True),
            ("error", "the worker died with exit code -9"),
            ("ok", True),
            ("ok", False),
        ]


@pytest.mark.slow
def test_a_server_that_dies_twice_is_an_error_and_a_third_one_answers(judge: SymbolicJudge) -> None:
    with ThreadPoolExecutor(1) as thread:
        outcomes = thread.submit(judge.decide, [ENDLESS, GOOD])
        killed: set[int] = set()
        for _ in range(2):
            assert eventually(lambda: bool(busy(judge)) and judge._server.pid not in killed)  # type: ignore[union-attr]
            assert judge._server is not None
            killed.add(judge._server.pid)
            os.kill(judge._server.pid, signal.SIGKILL)
        assert outcomes.result(120) == [("error", "the comparison server died twice on this batch")] * 2
    assert judge.decide([GOOD]) == [("ok", True)]


def test_a_comparison_that_waits_meets_the_wall_clock_and_is_an_error(
    judge: SymbolicJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENDLESS stands for one that waits: its CPU clock would end it after 100 seconds."""
    judge.close()
    monkeypatch.setitem(judge.options, "wall_seconds", 2.0)
    assert judge.decide([ENDLESS, GOOD]) == [("error", "no verdict within 2 s of wall-clock time"), ("ok", True)]
    judge.close()


def test_a_server_that_cannot_start_says_what_is_missing() -> None:
    judge = SymbolicJudge(workers=1, timeout=1.0)
    judge.options["path"] = []
    with pytest.raises(RuntimeError, match="did not start: cannot import pebble"):
        judge.decide([GOOD])


OWNER = """
import os, sys, threading, time
from vlm_rl.grading.symbolic_client import SymbolicJudge

judge = SymbolicJudge(workers=1, timeout=100.0)
judge.decide([("equal", "x", "2x")])
threading.Thread(target=judge.decide, args=([("equal", "9", "9^{9^{9^9}}")] * (sys.argv[1] == "busy"),)).start()
child = os.fork()  # it keeps the pipe to the server open
if child == 0:
    time.sleep(300)
print(judge._server.pid, child, flush=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_process_outlives_its_owner(state: str) -> None:
    """Killed with no time to clean up: the server, where it is idle; the workers, where the server goes too."""
    with subprocess.Popen([sys.executable, "-c", OWNER, state], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server, child = map(int, owner.stdout.readline().split())
        processes = [server, *children_of(server)]
        assert len(processes) == 2
        if state == "busy":
            assert eventually(lambda: cpu_ticks(processes[1]) > 50)
        try:
            owner.kill()
            if state == "busy":
                os.kill(server, signal.SIGKILL)
            assert eventually(lambda: not any(map(runs, processes)))
        finally:
            os.kill(child, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
