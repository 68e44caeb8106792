"""The tests of programs in the forms of users' sets, and programs that are judged by them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vlm_rl.data_prep.readers.program_tests import tests_in as read_tests
from vlm_rl.data_prep.records import RowError
from vlm_rl.grading.code_grader import CodeGrader
from vlm_rl.sandbox.limited import LimitedWorker

ADD = {"function": "add", "inputs": [[1, 2]], "outputs": [3]}
CHECK = """METADATA = {'author': 'x'}

def check(candidate):
    assert True, 'sanity'
    assert candidate(1, 2) == 3
"""


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, ADD),
        (["assert add(1, 2) == 3"], ADD),
        (json.dumps(["assert add(1, 2) == 3"]), ADD),
        ("assert add(1, 2) == 3", ADD),
        ("import math\nassert add(1, 2) == 3, 'one and two'", ADD),
        (["assert 3 == add(1, 2)"], ADD),
        ({"test": CHECK, "entry_point": "add"}, ADD),
        ({"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}, ADD),
        ({"asserts": "assert add(1, 2) == 3"}, ADD),
        (CHECK + "\ncheck(add)", ADD | {"function": "candidate"}),
        (["assert is_even(2)", "assert not is_even(3)", "assert is_even(4) is True"],
         {"function": "is_even", "inputs": [[2], [3], [4]], "outputs": [True, False, True]}),
        (["assert f([1, -2], {'a': (1,)}) == {1, 2}", "assert f([], {}) is None"],
         {"inputs": [[[1, -2], {"a": (1,)}], [[], {}]], "outputs": [{1, 2}, None]}),
        (["assert abs(root(2) - 1.414) < 1e-3", "assert math.isclose(root(4), 2, rel_tol=1e-4)"],
         {"inputs": [[2], [4]], "outputs": [1.414, 2.0], "atol": [1e-3, 2 * 1e-4]}),
        (["assert set(f(1)) == {1, 2}", "assert sorted(f(2)) == [1]", "assert len(f(3)) == 1", "assert f(4) == 1"],
         {"outputs": [{1, 2}, [1], 1, 1], "views": ["set", "sorted", "len", ""], "function": "f"}),
        (["assert {1, 2} == set(f(1))"], {"outputs": [{1, 2}], "views": ["set"]}),
        (["assert f(1)", "assert not f(2)"], {"outputs": [True, False], "views": ["bool", "bool"]}),
        (["assert f([0] * 3, float('inf')) == [math.pi, -math.inf]"],
         {"inputs": [[[0, 0, 0], math.inf]], "outputs": [[math.pi, -math.inf]]}),
        (["assert f(10**9) == 2**40 + 1 and f(1) == 'ab' * 2"],
         {"inputs": [[10**9], [1]], "outputs": [2**40 + 1, "abab"]}),
        (["assert f(1) == pytest.approx(2.0)", "assert math.isclose(2.0, f(2), abs_tol=0.5)"],
         {"outputs": [2.0, 2.0], "atol": [2e-6, 0.5]}),
        (["assert f(1) == list(range(3))", "assert f(2) == set()"], {"outputs": [[0, 1, 2], set()]}),
    ],
)  # fmt: skip
def test_every_form_is_read(cell: Any, wanted: dict[str, Any]) -> None:
    tests = read_tests(cell)
    assert {key: getattr(tests, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (["assert f(1) == 1", "assert f(1) in (1, 2)"], r"line 2, 'assert f\(1\) in \(1, 2\)': it does not compare"),
        (["assert f(1) is not None"], "does not compare a call with a value"),
        (["assert f(1) != 2"], "does not compare a call with a value"),
        (["assert f(1)[0] == 2"], "no call of a function with plain arguments"),
        (["assert sorted(f(1), reverse=True) == [1]"], "sorted has more than one argument"),
        (["assert f(1) == float('nan')"], "nan equals nothing"),
        (["assert f(1) == 10 ** 10 ** 10"], "power is too large"),
        (["assert f(1) == [0] * 10 ** 9"], "more than can be read"),
        (["assert f(1) == [[0] * 1000] * 1000"], "more than can be read"),
        (["assert f(1) == list(range(10 ** 9))"], "more than 100000 numbers"),
        (["assert f(1) == 1 / 0"], "division by zero"),
        (["assert f(1) == __import__('os').system('true')"], "is no plain value"),
        (["assert f(1) == g(1)"], "'g.1.' is no plain value"),
        (["assert f(x=1) == 1"], "no call of a function with plain arguments"),
        (["assert f(1) == 1", "assert g(1) == 1"], "asserts call 2 functions: f, g"),
        ({"inputs": ["nums = [1, 2], k = 3"], "outputs": ["3"]}, "are arguments of a function"),
        ([{"input": "s = 'a'", "output": "'a'"}], "are arguments of a function"),
        (["assert f(1) < 2"], "does not compare a call with a value"),
        (["x = open('/etc/passwd')", "assert f(1) == 2"], "is no assert"),
        (["assert f(1) =="], "invalid syntax"),
        (["assert f(" * 300], "assert"),
        ("five", "its tests are refused"),
        (
            [{"input": "1\n2", "output": "3", "testtype": "functional"}],
            "name no function; give inputs, outputs and fn_name",
        ),
        ({"inputs": ["1"], "outputs": ["2"], "time_limit": "soon"}, "time limit is 'soon'"),
        ({"inputs": ["1"], "outputs": ["2"], "time_limit": 0}, "seconds is 0"),
        ({"inputs": ["1"], "outputs": ["2"], "memory_limit": "much"}, "memory limit is 'much'"),
    ],
)
def test_what_is_no_test_is_refused_with_its_words(cell: Any, words: str) -> None:
    with pytest.raises(RowError, match=words) as refused:
        read_tests(cell)
    assert refused.value.reason == "bad_tests"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("assert f(1) == [" + "list(range(100000))," * 200 + "]", "needed more memory than it may take"),
        (
            "assert f(1) == {" + ",".join(hex(n * (2**61 - 1)) for n in range(8000)) + "}",
            "0.2 s of CPU time",
        ),
    ],
    ids=["values", "a set of one hash"],
)
def test_a_short_text_of_asserts_without_an_end_costs_a_process_of_its_own(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writes out 20 million numbers in 4 kB, the second is a set that is made in 32 million steps."""
    worker = LimitedWorker("vlm_rl.data_prep.readers.written_asserts.read", cpu_seconds=0.2, memory=64 << 20)
    monkeypatch.setattr("vlm_rl.data_prep.readers.written_asserts._worker", worker)
    with pytest.raises(RowError, match=f"reading its asserts .*{words}"):
        read_tests(text)
    worker.close()


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(2, 2), (2.5, 2.5), ("2", 2), ("2 seconds", 2), ("500 ms", 0.5), ({"seconds": 1, "nanos": 5e8}, 1.5)],
)
def test_a_row_has_a_time_limit_of_its_own(time: Any, seconds: float) -> None:
    io = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests(io | {"time_limit": time}).seconds == seconds
    assert read_tests(io, seconds=time).seconds == seconds
    assert read_tests(io).seconds == 6


@pytest.mark.parametrize(
    ("memory", "mib"),
    [(256, 256), ("256", 256), ("256 MB", 256), ("256 megabytes", 256), (256 << 20, 256), ("1 GB", 1024)],
)
def test_a_row_has_a_memory_limit_of_its_own(memory: Any, mib: int) -> None:
    io = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests(io | {"memory_limit": memory}).memory_mib == mib
    assert read_tests(io, memory=memory).memory_mib == mib


PROGRAMS = [  # program, tests, verdict, words of the reason
    (
        "class Solution:\n    def add(self, a: int, b: Optional[int]) -> int:\n        return a + b",
        "==",
        "correct",
        "",
    ),
    ("def add(a: List[int], b):\n    return math.comb(a + b, 1)", "==", "correct", ""),
    ("import numpy as np\ndef add(a, b):\n    return np.array([a, b]).sum()", "==", "correct", ""),
    ("import numpy as np\ndef add(a, b):\n    return np.array([a, b])", "==", "wrong", "in place of 3"),
    ("import pandas\ndef add(a, b):\n    return 3", "==", "wrong", "it imports pandas, which is not there"),
    ("def add(a, b):\n    return 3.0005", "~", "correct", ""),
    ("def add(a, b):\n    return 3.02", "~", "wrong", "returned 3.02 in place of 3"),
    ("def add(a, b):\n    return '3'", "~", "wrong", "in place of 3"),
]


@pytest.mark.parametrize(("program", "kind", "verdict", "words"), PROGRAMS)
def test_a_program_is_judged_by_asserts(
    programs: CodeGrader, program: str, kind: str, verdict: str, words: str
) -> None:
    cell = {"==": ["assert add(1, 2) == 3"], "~": ["assert abs(add(1, 2) - 3) < 1e-2"]}[kind]
    ((said, reason),) = programs.judge([(program, {"tests": read_tests(cell).packed()})])
    assert said == verdict and words in reason, reason


def test_a_tolerance_is_of_its_own_test_alone(programs: CodeGrader) -> None:
    meta = {"tests": read_tests(["assert abs(f(9) - 100) < 5", "assert f(1) == 7"]).packed()}
    near, off = "def f(x):\n    return 102 if x == 9 else 7", "def f(x):\n    return 102 if x == 9 else 8"
    assert [verdict for verdict, _ in programs.judge([(near, meta), (off, meta)])] == ["correct", "wrong"]


def test_a_program_is_judged_by_the_view_of_its_assert(programs: CodeGrader) -> None:
    asserts = {
        "set": "assert set(f(1)) == {1, 2}",
        "sorted": "assert sorted(f(1)) == [1, 2]",
        "true": "assert f(1)",
        "false": "assert not f(1)",
        "infinite": "assert f(1) == float('inf')",
    }
    cases = [
        ("return [2, 1, 1]", "set", "correct"),
        ("return [2, 1, 1]", "sorted", "wrong"),
        ("return (2, 1)", "sorted", "correct"),
        ("return [3]", "set", "wrong"),
        ("return 5", "set", "wrong"),
        ("return [0]", "true", "correct"),
        ("return 0", "true", "wrong"),
        ("return ''", "false", "correct"),
        ("return 'x'", "false", "wrong"),
        ("return math.inf", "infinite", "correct"),
        ("return 1e300", "infinite", "wrong"),
    ]
    judged = programs.judge(
        [(f"def f(x):\n    {body}", {"tests": read_tests([asserts[name]]).packed()}) for body, name, _ in cases]
    )
    assert [verdict for verdict, _ in judged] == [verdict for *_, verdict in cases]


def test_an_output_may_stand_in_a_list_of_its_own(programs: CodeGrader) -> None:
    wrapped = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]}
    lists = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3, 0], [4]]}
    cases = [
        ("return a + b", wrapped, "correct"),
        ("return [a + b]", wrapped, "correct"),
        ("return a - b", wrapped, "wrong"),
        ("return [[a + b]]", wrapped, "wrong"),
        ("return a + b", lists, "wrong"),
    ]
    judged = programs.judge(
        [(f"def add(a, b):\n    {body}", {"tests": read_tests(cell).packed()}) for body, cell, _ in cases]
    )
    assert [verdict for verdict, _ in judged] == [verdict for *_, verdict in cases]


def test_a_program_that_reads_stdin_says_what_it_imports_in_vain(programs: CodeGrader) -> None:
    meta = {"tests": read_tests([{"input": "1", "output": "1"}]).packed()}
    verdicts = programs.judge([("import pandas", meta), ("import numpy\nprint(numpy.int64(input()))", meta)])
    assert verdicts[0][0] == "wrong" and "it imports pandas, which is not there" in verdicts[0][1]
    assert verdicts[1] == ("correct", "passes all 1 tests")


@pytest.fixture(scope="module")
def programs() -> Any:
    with CodeGrader(workers=1) as grader:
        try:
            grader.check()
        except Exception as error:
            pytest.skip(str(error))
        yield grader
