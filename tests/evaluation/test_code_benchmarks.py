"""HumanEval+, MBPP+, LiveCodeBench: rows of their published form, and programs with verdicts worked out by hand."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmark_rows import ROWS, write_annotations
from vlm_rl.cli import main
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks import livecodebench, mbpp_plus
from vlm_rl.evaluation.benchmarks.benchmark import Response
from vlm_rl.evaluation.benchmarks.judging import judge
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, eval_template
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.grading.grader import Grader
from vlm_rl.templates import TEMPLATES, fenced
from vlm_rl.types import Problem

CODE = ("humaneval_plus", "mbpp_plus", "livecodebench")


FIRST = next(row for rows in ROWS["livecodebench"].values() for row in rows if isinstance(row, dict))


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


def problems_of(name: str) -> dict[str, Problem]:
    rows = [row for rows in ROWS[name].values() for row in rows]
    problems = [BENCHMARKS[name].rows.read_row(row) for row in rows if isinstance(row, dict)]
    return {BENCHMARKS[name].own_id(problem): problem for problem in problems}


def verdicts(grader: Grader, name: str, own_id: str, *programs: str) -> list[str]:
    problem = problems_of(name)[own_id]
    answered = [(problem, Response(own_id, f"So:\n{fenced(program)}\nDone.")) for program in programs]
    judged = judge(BENCHMARKS[name], answered, mode="official", grader=grader, template=TEMPLATES["plain"])
    return [item.judgement.verdict for item in judged]


def test_humaneval_plus_compares_with_its_own_solution(grader: Grader) -> None:
    programs = [
        "def double(x):\n    return x + x",
        "def double(x):\n    return 2.0 * x + 1e-9",  # 2e-9 off a float: within the tolerance, but 2.0 is not an int
        "def double(x):\n    return round(2 * x)",
        "def double(x): return {2: 2}.get(x)",
        "def other(x): return 2 * x",
    ]
    assert verdicts(grader, "humaneval_plus", "HumanEval/7", *programs) == ["correct", *["wrong"] * 4]


def test_a_root_need_only_be_one(grader: Grader) -> None:
    programs = ["def find_zero(xs):\n    return -xs[0] / xs[1] + 1e-6", "def find_zero(xs):\n    return 1.0"]
    assert verdicts(grader, "humaneval_plus", "HumanEval/32", *programs) == ["correct", "wrong"]


def test_mbpp_plus_has_python_types_and_its_exceptions(grader: Grader) -> None:
    as_list = "def similar_elements(a, b):\n    assert type(a) is tuple\n    return [x for x in b if x in a]"
    one_too_few = "def similar_elements(a, b):\n    return tuple(set(a) & set(b))[:1]"
    assert verdicts(grader, "mbpp_plus", "Mbpp/2", as_list, one_too_few) == ["correct", "wrong"]
    polar = "import math\ndef convert(z):\n    return (abs(z), math.atan2(z.imag, z.real) + 1e-9)"
    assert verdicts(grader, "mbpp_plus", "Mbpp/252", polar, "def convert(z): return 1") == ["correct", "wrong"]


@pytest.mark.parametrize(
    ("task", "call", "wanted"),
    [
        ("Mbpp/2", [[1], [2]], [(1,), (2,)]),
        ("Mbpp/63", [[[1, 2], [3, 4]]], [[(1, 2), (3, 4)]]),
        ("Mbpp/75", [[[1, 2]], 3], [[(1, 2)], 3]),
        ("Mbpp/106", [[1], [2]], [[1], (2,)]),
        ("Mbpp/115", [[[1], []]], [[{1}, {}]]),
        ("Mbpp/124", [1, "2+3j"], [1.0, 2 + 3j]),
        ("Mbpp/259", [[[1, 2]], [[3, 4]]], [((1, 2),), ((3, 4),)]),
        ("Mbpp/278", [[1, [2], 3]], [(1, (2,), 3)]),
        ("Mbpp/307", [[1], 2, 3], [(1,), 2, 3]),
        ("Mbpp/580", [[1, [2, [3]]]], [(1, (2, (3,)))]),
        ("Mbpp/722", [{"a": [1, 2]}, 3], [{"a": (1, 2)}, 3]),
        ("Mbpp/3", [[1]], [[1]]),
    ],
)
def test_mbpp_plus_arguments_get_their_types(task: str, call: list[Any], wanted: list[Any]) -> None:
    assert mbpp_plus.arguments(task, [call]) == [wanted]


def test_livecodebench_compares_lines_and_values(grader: Grader) -> None:
    programs = [
        "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(f'  {a + b}.0 \\n')",  # 3.0 is 3
        "a, b = map(int, input().split())\nprint(a + b, 'apples')",
        "print(3)",
        "a, b = map(int, input().split())\nprint(a + b)\nprint()\nprint()",
        "a, b = map(int, input().split())\nprint()\nprint(a + b, end='')\nexit(0)",
        "a, b = map(int, input().split())\nprint(a + b)\n1 / 0",
    ]
    verdict = ["correct", "wrong", "wrong", "correct", "correct", "wrong"]
    assert verdicts(grader, "livecodebench", "abc1", *programs) == verdict
    head = "class Solution:\n    def f(self, nums: List[int], k: int) -> List[int]:\n        "
    methods = ["return tuple(sorted(nums)) + (k,)", "return sorted(nums)", "nums.sort(); nums.append(k); return nums"]
    assert verdicts(grader, "livecodebench", "2808", *(head + body for body in methods)) == [
        *("correct", "wrong", "correct")
    ]


def test_the_last_block_is_the_program(grader: Grader) -> None:
    problem = problems_of("livecodebench")["abc1"]
    right = fenced("print(sum(map(int, input().split())))")
    texts = [f"{fenced('print(0)')} no:\n{right}", f"{right}\n{fenced('print(0)')}", "print(3)", ""]
    answered = [(problem, Response("abc1", text)) for text in texts]
    judged = judge(BENCHMARKS["livecodebench"], answered, mode="official", grader=grader, template=TEMPLATES["plain"])
    assert [item.judgement.verdict for item in judged] == ["correct", "wrong", "no_answer", "no_answer"]
    assert [item.has_box for item in judged] == [True, True, False, False]


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    for thing in (Evil(), ["[]", "[]"], {"a": "[]"}, 5):
        packed = base64.b64encode(zlib.compress(pickle.dumps(thing))).decode()
        with pytest.raises(UnusableRowError, match="private_test_cases cannot be unpacked"):
            livecodebench.read_row({**FIRST, "private_test_cases": packed})
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_a_pickled_text_is_read(protocol: int, size: int) -> None:
    tests = json.dumps([{"input": "é" * size, "output": "1", "testtype": "stdin"}], ensure_ascii=False)
    packed = base64.b64encode(zlib.compress(pickle.dumps(tests, protocol=protocol))).decode()
    problem = livecodebench.read_row({**FIRST, "private_test_cases": packed})
    assert CodeTests.of(problem.meta).inputs == ["1 2\n", "é" * size]


def test_releases_are_cumulative_and_dates_are_a_window(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_annotations("livecodebench", raw)

    def ids(name: str, **options: Any) -> list[str]:
        prepare("livecodebench", raw, tmp_path / name, Options(**options))
        return [problem.id for problem in load_set(tmp_path / name)]

    assert ids("v1", split="release_v1") == ["livecodebench-abc1"]
    assert ids("v2", split="release_v2") == ["livecodebench-abc1", "livecodebench-2808"]
    assert ids("only2", split="v2") == ["livecodebench-2808"]
    assert ids("window", split="release_v2", since="2023-05-02", until="2023-09-02") == ["livecodebench-2808"]
    with pytest.raises(UserError, match=r"test3.jsonl, test4.jsonl, test5.jsonl, test6.jsonl missing; the split"):
        ids("newest")
    with pytest.raises(UserError, match="--since 'May': give a day"):
        ids("bad", since="May")


@pytest.mark.parametrize("name", CODE)
def test_the_authors_words_surround_the_question(name: str) -> None:
    named = eval_template(name)
    assert named is not None and named[1] is not None
    asked = [named[1].applied(problem).question for problem in problems_of(name).values()]
    if name == "livecodebench":
        assert named[0].system.startswith("You are an expert Python programmer.")
        assert asked[0].startswith("### Question:\nSolve abc1.\n\n### Format: Read the inputs from stdin")
        assert "```python\nclass Solution:" in asked[1]
        assert asked[1].endswith("```\n\n### Answer: (use the provided format with backticks)\n\n")
    else:
        assert named[0].system == "" and asked[0].endswith("\n```\n")
        assert "in a markdown code block:\n```\n" in asked[0]


def test_score_reads_responses_from_elsewhere(tmp_path: Path) -> None:
    (annotations,) = write_annotations("humaneval_plus", tmp_path)
    right, wrong = "def double(x):\n    return 2 * x", "def double(x):\n    return x"
    rows = [
        {"task_id": "HumanEval/7", "response": right},  # a program without a fence
        {"task_id": "HumanEval/7", "response": fenced(wrong)},
        {"task_id": "HumanEval/32", "response": fenced("def find_zero(xs): return -xs[0] / xs[1]")},
        {"task_id": "HumanEval/32", "response": "I do not know ``` it"},
    ]
    responses = tmp_path / "responses.jsonl"
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "score.json"
    command = ["score", "--benchmark", "humaneval_plus", "--annotations", annotations, "--responses", responses]
    assert main([*map(str, command), "--mode", "official", "--json", str(out)]) == 0
    summary = json.loads(out.read_text(encoding="utf-8"))
    assert [row["verdict"] for row in summary["rows"]] == ["correct", "wrong", "correct", "no_answer"]
    assert summary["scores"]["pass@1"]["score"] == 0.5 and summary["scores"]["pass@2"]["score"] == 1.0
