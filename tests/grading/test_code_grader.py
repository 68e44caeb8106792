"""Programs as answers: which text is the program, what the rules call right, and tests as a set keeps them.

Cases by hand follow the published rules: LiveCodeBench's grade_stdio and grade_call_based, EvalPlus' check_output.
"""

from __future__ import annotations

import base64
import json
import math
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.processes import children_of
from vlm_rl.errors import UserError
from vlm_rl.grading.code_grader import CodeGrader, with_header
from vlm_rl.grading.code_rules import RULES
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.sandbox.functions import decode, encode
from vlm_rl.templates import last_program, programs


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    """Yield a grader whose sandbox has proved its walls, half a second of work, for whoever does not close it."""
    with CodeGrader(workers=1) as grader:
        yield grader


class Point(NamedTuple):
    x: int
    y: int


def test_each_program_is_a_sign_that_the_grader_goes_on() -> None:
    """Thousands of slow programs take longer than a run that hangs is given."""
    signs = list[None]()
    programs = ["print(1)", "print(2)", "print(3)"]
    with CodeGrader(workers=1, waits=lambda: signs.append(None)) as grader:
        tests = {"tests": CodeTests(inputs=[""], outputs=["1"]).packed()}
        judged = grader.judge([(program, tests) for program in programs])
    assert [verdict for verdict, _ in judged] == ["correct", "wrong", "wrong"] and len(signs) == len(programs)


# -- which text is the program -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx\ny\n```\nb", "x\ny"),
        ("```\nx\n```\n```py\ny\n```", "y"),
        ("```python\nx\n``` and\n```\ny", ""),  # the last block is not closed: between the last two fences
        ("```python\nx", None),
        ("x", None),
        ("one line ``` x ``` only", None),
        ("```\n```", ""),
    ],
)
def test_the_program_is_between_the_last_two_fences(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_programs_of_a_text() -> None:
    assert programs("```\na\n```\nb\n```\nc\n```\n```") == ["a", "c"]


# -- rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("3\n", "3", True),
        ("  3 \n\n", "\n3", True),
        ("1 2\n3", "1 2 \n 3\n", True),
        ("1.50 2", "1.5 2.0", True),
        ("1e2", "100", True),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("yes", "YES", False),
        ("0.1", "0.10000000000000001", False),  # decimal, not binary
        ("50000000000000000", "50000000000000001", False),
        ("", "0", False),
        ("nan", "nan", True),
        ("NaN", "nan", False),
    ],
)
def test_lines(printed: str, expected: str, is_right: bool) -> None:
    assert RULES["lines"](printed, expected) is is_right


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        ((1, 2), [1, 2], True),
        ([(1, 2)], [[1, 2]], False),  # only the outer tuple counts as a list
        (1.0, 1, True),
        (True, 1, True),
        ("1", 1, False),
        (None, [], False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_equal_values(value: Any, expected: Any, is_right: bool) -> None:
    assert RULES["equal"]([], value, expected, function="f", atol=0.0) is is_right


@pytest.mark.parametrize(
    ("dataset", "function", "call", "value", "expected", "atol", "is_right"),
    [
        ("humaneval", "f", [1], 0.3, 0.1 + 0.2, 0.0, True),  # floats are compared within 1e-6
        ("humaneval", "f", [1], 1, 1.0000001, 0.0, False),  # but only floats
        ("humaneval", "f", [1], [0.3], [0.1 + 0.2], 0.0, True),
        ("humaneval", "f", [1], (0.3,), [0.1 + 0.2], 0.0, False),
        ("humaneval", "f", [1], [0.3, 1.0], [0.3], 0.0, False),
        ("humaneval", "f", [1], 2.5, 2.6, 0.2, True),
        ("humaneval", "f", [1], math.nan, math.nan, 0.0, False),
        ("humaneval", "find_zero", [[-4, 0, 1]], -2.0, 2.0, 1e-4, True),
        ("humaneval", "find_zero", [[-4, 0, 1]], 2.1, 2.0, 1e-4, False),
        ("mbpp", "are_equivalent", [1, 2], None, True, 0.0, True),
        ("mbpp", "sum_div", [8], 0, 7, 0.0, True),
        ("mbpp", "sum_div", [8], 1, 7, 0.0, False),
        ("mbpp", "Diff", [[1], [2]], [2, 1, 1], [1, 2], 0.0, True),
        ("mbpp", "Diff", [[1], [2]], [1], [1, 2], 0.0, False),
        ("mbpp", "check_str", ["a"], "found", "match", 0.0, True),
        ("mbpp", "check_str", ["a"], None, True, 0.0, False),
        ("mbpp", "check_str", ["a"], None, None, 0.0, True),
        ("mbpp", "check_str", ["a"], False, True, 0.0, False),
        ("mbpp", "surface_Area", [3, 4], 33, 34, 1e-6, False),
        ("mbpp", "surface_Area", [3, 4], 35, 34, 0.5, True),  # 9 + 6 * sqrt(1.5 ** 2 + 4 ** 2) is 34.6, rounded 35
        ("mbpp", "digit_distance_nums", [123, 256], 7, 0, 0.0, True),
        ("mbpp", "f", [1], [2, 1], [1, 2], 0.0, False),
    ],
)
def test_evalplus(
    dataset: str, function: str, call: list[Any], value: Any, expected: Any, atol: float, is_right: bool
) -> None:
    assert RULES[f"evalplus_{dataset}"](call, value, expected, function=function, atol=atol) is is_right


# -- data in and out of the sandbox --------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False),
    lambda s: st.tuples(s, s) | st.frozensets(s, max_size=3),
    max_leaves=4,
)
SETS = st.sets(HASHABLE, max_size=3)
DATA = st.recursive(HASHABLE, lambda s: st.lists(s, max_size=3) | SETS | st.dictionaries(SCALARS, s, max_size=3))


@settings(max_examples=50, deadline=None)
@given(DATA)
def test_data_comes_out_as_it_went_in(value: Any) -> None:
    again = decode(encode(value))
    assert again == value and type(again) is type(value)


def test_subclasses_become_the_type_that_they_extend() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    values = [Counter("aab"), OrderedDict(a=1), Point(1, 2), Liar(5)]
    assert [decode(encode(value)) for value in values] == [{"a": 2, "b": 1}, {"a": 1}, (1, 2), 5]
    assert type(decode(encode(Liar(5)))) is int
    assert decode(encode(iter([]))) != decode(encode(iter([])))


def test_tests_are_kept_with_their_types() -> None:
    tests = CodeTests(
        function="f", inputs=[[(1, {2}), 10**40, 1j], ({},)], outputs=[None, b"x"], rule="equal", atol=0.5
    )
    again = CodeTests.of({"tests": tests.packed()})
    assert (again.inputs, again.outputs, again.atol, again.rule) == (tests.inputs, tests.outputs, 0.5, "equal")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": []}, "there is no test"),
        ({"inputs": ["1"], "outputs": []}, "there are 1 inputs and 0 outputs"),
        ({"inputs": ["1"]}, "neither outputs nor a reference"),
        ({"inputs": [[1]], "outputs": [1]}, "are texts"),
        ({"inputs": [1], "outputs": [1], "function": "f", "rule": "equal"}, "lists of arguments"),
        ({"inputs": [[1]], "outputs": [1], "function": "f"}, "the rule `lines` is of programs that read stdin"),
        ({"inputs": ["1"], "outputs": ["1"], "rule": "magic"}, "the rule is 'magic'; known: lines, equal"),
        ({"inputs": ["1"], "outputs": ["1"], "seconds": 0}, "seconds is 0"),
    ],
)
def test_tests_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CodeTests(**fields)


@pytest.mark.parametrize("text", ["", "!", "eJw=", base64.b64encode(zlib.compress(b"[" * 100_000)).decode(), 5, None])
def test_packed_tests_that_are_broken_are_an_error_of_their_own(grader: CodeGrader, text: Any) -> None:
    ((verdict, reason),) = grader.judge([("print(1)", {"tests": text})])
    assert verdict == "error" and ("tests" in reason)


def test_a_number_that_python_does_not_write_is_compared(grader: CodeGrader) -> None:
    tests = CodeTests(function="f", inputs=[[20_000]], outputs=[10**20_000], rule="equal")
    programs = [(f"def f(n): return 10 ** n + {more}", {"tests": tests.packed()}) for more in (0, 1)]
    (right, _), (wrong, reason) = grader.judge(programs)
    assert (right, wrong) == ("correct", "wrong") and "too large to show" in reason


@pytest.mark.parametrize("value", ['{"float": 1%s}', '{"complex": [1%s, 0]}', '{"none": %s}'])
def test_values_that_a_program_wrote_by_itself_are_wrong(grader: CodeGrader, value: str) -> None:
    """The descriptor of the answers is open to it, and an integer that JSON may hold is no float."""
    written = json.dumps('{"value": %s}\n' % (value % ("0" * 400)))
    source = f"import os\ndef f():\n    for fd in range(3, 16):\n        try: os.write(fd, {written}.encode())\n"
    source += "        except OSError: pass"
    tests = CodeTests(function="f", inputs=[[]], outputs=[1], rule="equal")
    ((verdict, reason),) = grader.judge([(source, {"tests": tests.packed()})])
    assert verdict == "wrong"
    assert reason in ("test 1 of 1: what it returned cannot be read", "test 1 of 1: 2 answers to 1 calls")


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
def test_a_program_that_catches_the_end_of_its_time_is_wrong(grader: CodeGrader, caught: str) -> None:
    wait = "import time\ndef f(seconds):\n    try: time.sleep(seconds)\n    except {}: pass\n    return seconds"
    verdicts = {}
    for seconds in (0.0, 1.0):
        tests = CodeTests(function="f", inputs=[[seconds]], outputs=[seconds], rule="equal", seconds=0.5)
        ((verdicts[seconds], reason),) = grader.judge([(wait.format(caught), {"tests": tests.packed()})])
    assert verdicts == {0.0: "correct", 1.0: "wrong"} and "the time of one call is over" in reason


HEADER = "from math import *"
FUTURE = "from __future__ import annotations"


@pytest.mark.parametrize(
    "program",
    [
        "print(sqrt(9))",
        "# no from __future__ here\nprint(sqrt(9))",
        f"x = '{FUTURE}'\nprint(sqrt(9))",
        f"{FUTURE}\nprint(sqrt(9))",
        f'"""A docstring."""\n# and\n\n{FUTURE}  # and\nfrom __future__ import division\nprint(sqrt(9))',
        "from __future__ import (  # and\n    annotations,\n    division,\n)\nprint(sqrt(9))",
        "from __future__ import annotations, \\\n    division\nprint(sqrt(9))",
    ],
)
def test_a_benchmark_s_imports_come_before_the_program_but_behind_future_imports(program: str) -> None:
    source = with_header(program, HEADER)
    compile(source, "program", "exec")  # a future import behind another statement is a syntax error
    assert source.index(HEADER) < source.index("print") and source.count(HEADER) == 1
    assert source.replace(f"{HEADER}\n", "").replace("\n", "") == program.replace("\n", "")
    assert with_header(program, "") == program


def test_closing_ends_what_is_judged() -> None:
    tests = CodeTests(inputs=["1"] * 50, outputs=["1"] * 50, seconds=30.0)
    grader, judged = CodeGrader(workers=1), []
    grader.check()
    programs = [(f"import time; time.sleep(60) # {number}", {"tests": tests.packed()}) for number in range(20)]
    thread = threading.Thread(target=lambda: judged.extend(grader.judge(programs)))
    thread.start()
    (launcher,) = grader._opened()._launchers
    while not children_of(launcher._process.pid):  # until the first runs
        time.sleep(0.01)
    grader.close()
    thread.join(timeout=30)
    assert {verdict for verdict, _ in judged} == {"error"} and len(judged) == 20


_SAME_HASH = "L = [n * (2**61 - 1) for n in range(20_000)]\nclass S(set):\n    __iter__ = lambda s: iter(L)\n"


def test_a_set_of_one_hash_is_not_made(grader: CodeGrader) -> None:
    """Neither one that a program returned, nor one in the tests of a set that somebody sent."""
    tests = CodeTests(function="f", inputs=[[1]], outputs=[[1] * 300_000], rule="equal")
    ((verdict, reason),) = grader.judge([(f"{_SAME_HASH}def f(x): return S()", {"tests": tests.packed()})])
    assert (verdict, reason) == ("wrong", "test 1 of 1: what it returned cannot be read")
    sent = {
        "function": "f",
        "inputs": [[1]],
        "outputs": [{"set": [{"int": hex(n * (2**61 - 1))} for n in range(4000)]}],
    }
    text = base64.b64encode(zlib.compress(json.dumps(sent).encode())).decode()
    with pytest.raises(UserError, match=r"cannot be unpacked \(too many keys share a hash"):
        CodeTests.of({"tests": text})
    powers = {2**n for n in range(5000)}  # Python's hash repeats with each 61st
    again = CodeTests.of({"tests": CodeTests(function="f", inputs=[[1]], outputs=[powers], rule="same").packed()})
    assert again.outputs == [powers]


def test_tests_that_unpack_to_many_values_are_refused() -> None:
    text = base64.b64encode(zlib.compress(b'{"inputs": [' + b"[]," * 9_000_000 + b"[]]}")).decode()
    with pytest.raises(UserError, match=r"cannot be unpacked \(more than 8388608 values"):
        CodeTests.of({"tests": text})
    commas = CodeTests(inputs=["," * 9_000_000], outputs=["1"])  # of a text are none
    assert CodeTests.of({"tests": commas.packed()}) == commas


def test_values_that_are_slow_to_compare_cost_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 integers of one hash make a set in 200 million steps; two megabytes hold 60,000."""
    monkeypatch.setattr("vlm_rl.grading.code_comparison.CPU_SECONDS", 0.3)
    gold = set(range(30_000))
    tests = CodeTests(function="f", inputs=[[1], [2]], outputs=[gold, gold], rule="same", views=["set", "set"])
    right, slow = "def f(x): return list(range(30_000))", f"{_SAME_HASH}def f(x): return L"
    with CodeGrader(workers=1) as grader:
        judged = grader.judge([(text, {"tests": tests.packed()}) for text in (slow, right)])
    reason = "comparing what it returned took more than 0.3 s of CPU time"
    assert judged == [("wrong", reason), ("correct", "passes all 2 tests")]


def test_all_tests_of_a_program_share_a_limit(grader: CodeGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_rl.grading.code_grader._ALL_TESTS", 0.5)
    tests = CodeTests(inputs=["1"] * 30, outputs=["1"] * 30)
    slow = "import time\nwhile time.process_time() < 0.2: pass\nprint(1)"
    ((verdict, reason),) = grader.judge([(slow, {"tests": tests.packed()})])
    assert verdict == "wrong"
    assert reason.endswith("of 30: all tests together took more than 0.5 s of CPU time")
