r"""The grader from a response to its grade: where the answer is looked for, margins, golds, and code in an answer."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vlm_rl
from tests.conftest import shared_data
from vlm_rl.grading.extraction import extract_boxes
from vlm_rl.grading.grader import Grader, GradeTask, task_of
from vlm_rl.grading.symbolic_client import SymbolicClient
from vlm_rl.templates import TEMPLATES, boxes
from vlm_rl.types import AnswerType, Problem

PLAIN, THINK = TEMPLATES["plain"], TEMPLATES["think_answer"]
X: AnswerType = "expression"
N: AnswerType = "integer"
L: AnswerType = "list"
C: AnswerType = "choice"
T: AnswerType = "text"
F: AnswerType = "float"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout=5.0) as grader:
        yield grader


# -- where the answer is looked for -----------------------------------------------------------------

RESPONSES = [
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>So \boxed {5}.</answer>", "correct"),
    ("think_answer", r"<think>\boxed{5}</think><answer>5</answer>", "no_answer"),
    ("think_answer", r"<think>\boxed{7}</think><answer>\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}", "no_answer"),
    ("think_answer", r"It is \boxed{5}", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer><think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{3}</answer><answer>\boxed{5}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5} and \boxed{10/2}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{3}, no, \boxed{5}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{}\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}\boxed{5</answer>", "no_answer"),
    ("think_answer", "", "no_answer"),
    ("think_box", r"<think>a</think>\boxed{5}", "correct"),
    ("think_box", r"<think>\boxed{5}</think> I think", "no_answer"),
    ("think_box", r"<think>a \boxed{5}", "no_answer"),
    ("think_box", r"a</think>\boxed{5}", "correct"),
    ("think_box", r"\boxed{3}</think>\boxed{5}", "correct"),
    ("think_box", r"\boxed{5}", "correct"),
    ("plain", r"It is \boxed{5}", "correct"),
    ("plain", "It is 5", "no_answer"),
    ("plain", r"\boxed{3} or \boxed{5}", "no_answer"),
]


@pytest.mark.parametrize(("template", "response", "verdict"), RESPONSES)
def test_only_the_answer_region_counts(grader: Grader, template: str, response: str, verdict: str) -> None:
    grade = grader.grade(response, gold="5", answer_type="integer", template=TEMPLATES[template])
    assert grade.verdict == verdict, grade
    assert (grade.extracted is None) == (verdict == "no_answer")


FORMATS = [
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer>", True),
    ("think_answer", "<think>a</think>\n<answer>It is \\boxed{5}.</answer>\n", True),
    ("think_answer", r"<think>a</think><answer>5</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{}</answer>", False),
    ("think_answer", r"<think>a</think>\boxed{5}", False),
    ("think_answer", r"<think></think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"x<think>a</think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer> bye", False),
    ("think_answer", r"<think>a</think> so <answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a<think>b</think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<answer>\boxed{5}</answer><think>a</think>", False),
    ("think_answer", r"<think>a<answer>\boxed{5}</answer>", False),
    ("think_answer", r"\boxed{5}", False),
    ("think_box", r"<think>a</think>\boxed{5}", True),
    ("think_box", "<think>a</think>\n\nSo it is \\boxed{5}.", True),
    ("think_box", r"<think>a</think>5", False),
    ("think_box", r"<think>\boxed{5}</think>", False),
    ("think_box", r"<think>a</think><answer>\boxed{5}</answer>", False),
    ("think_box", r"a</think>\boxed{5}", False),
    ("think_box", r"<think>a</think>\boxed{5", False),
    ("plain", r"\boxed{5}", False),
    ("plain", r"<think>a</think><answer>\boxed{5}</answer>", False),
]


@pytest.mark.parametrize(("template", "response", "well_formed"), FORMATS)
def test_the_format_rule(template: str, response: str, well_formed: bool) -> None:
    assert TEMPLATES[template].is_well_formed(response) == well_formed


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.has_program])
def test_a_wrapped_answer_is_perfect(grader: Grader, name: str) -> None:
    template = TEMPLATES[name]
    response = template.wrap("Two and three.", r"\frac{1}{2}")
    assert template.is_well_formed(response) == (name != "plain")
    assert template.reasoning(response) == (None if name == "plain" else "Two and three.")
    assert grader.grade(response, gold="0.5", answer_type="expression", template=template).correct
    with pytest.raises(ValueError, match="</think>"):
        template.wrap("a </think> b", "5")


def test_boxes_count_braces() -> None:
    assert boxes(r"\boxed{\frac{1}{2}} and \boxed {\{1,2\}}") == [r"\frac{1}{2}", r"\{1,2\}"]
    assert boxes(r"\boxed{\left\{a\right.}") == [r"\left\{a\right."]
    assert boxes(r"\boxed{1") is None
    assert boxes("no box, \\boxedly{5}") == []


TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PIECES = [*TAGS, r"\boxed{", r"\boxed {", "{", "}", "\\", "5", "\u200b", "｛"]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30).map("".join))
@settings(max_examples=400)
def test_extraction_never_raises(response: str) -> None:
    for template in TEMPLATES.values():
        texts, why_none = extract_boxes(response, template)
        assert bool(texts) != bool(why_none)


# -- units, margins, alternatives, reasons -----------------------------------------------------------------------

# (gold, answer, type, meta, whether the two are equal); the corpus holds the rest
WITH_META: list[tuple[str, str, AnswerType, dict[str, Any], bool]] = [
    ("4", "4 years", N, {"unit": "years"}, True),
    ("4", "4 months", N, {"unit": "years"}, False),
    ("1.2", "1.23", F, {"precision": 1}, True),
    ("1.2", "1.23", F, {"precision": 1.0}, True),
    ("1.2", "1.15", F, {"precision": 1}, True),
    ("1.2", "1.26", F, {"precision": 1}, False),
    ("0.33", "1/3", F, {"precision": 2}, True),
    ("4.3", r"\frac{5\sqrt{3}}{2}", F, {"precision": 1}, True),
    ("4.4", r"\frac{5\sqrt{3}}{2}", F, {"precision": 1}, False),
    ("-1.2", "-1.23", F, {"precision": 1}, True),
    ("-1.2", "1.2", F, {"precision": 1}, False),
    ("2.0944", "2.0954", F, {"tolerance": 0.001}, True),
    ("2.0944", "2.1", F, {"tolerance": 0.001, "precision": 1}, False),  # the tolerance takes precedence
    ("3.33", r"\approx 3.333", F, {"precision": 2}, True),
    ("3.33", r"\approx 1{,}003.33", F, {"precision": 2}, False),
    ("1003.33", r"\approx 1{,}003.33", F, {"precision": 2}, True),
    ("3.33", r"\approx \frac{10}{3}", F, {"precision": 2}, True),
    ("3.33", r"\approx 3.34", F, {"precision": 2}, False),
    ("3.33", r"\approx 3.33", F, {"unit": "cm"}, False),  # no margin
    ("3.33", r"\approx 3.33\text{ cm}", F, {"precision": 2, "unit": "cm"}, True),
    ("3.33", r"\approx 3.33\text{ kg}", F, {"precision": 2, "unit": "cm"}, False),
]


def test_a_unit_a_precision_and_a_tolerance_count(grader: Grader) -> None:
    tasks = [
        GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN, meta=meta) for gold, answer, kind, meta, _ in WITH_META
    ]
    grades = grader.grade_many(tasks)
    assert [row for row, grade in zip(WITH_META, grades, strict=True) if grade.correct != row[-1]] == []


def test_a_reason_names_both_texts_and_differs_by_verdict(grader: Grader) -> None:
    equal, different = (
        grader.grade(rf"\boxed{{{answer}}}", gold="3/4", answer_type="expression", template=PLAIN)
        for answer in ("0.75", "0.7")
    )
    assert "0.75" in equal.reason and "3/4" in equal.reason
    assert equal.reason.rpartition(";")[2] != different.reason.rpartition(";")[2]


def test_an_answer_may_meet_any_of_several_golds(grader: Grader) -> None:
    for gold, verdict in ((("9^{9^{9^9}}", "5"), "correct"), (("4", "6"), "wrong")):
        assert grader.grade(r"\boxed{5}", gold=gold, answer_type="expression", template=PLAIN).verdict == verdict


# -- golds of benchmarks ------------------------------------------------------------------------------

# (gold, the same answer in a different form, type, choices, meta), in the shapes of the benchmarks' rows
SAMPLE_GOLDS: list[tuple[str, str, AnswerType, tuple[str, ...], dict[str, Any]]] = [
    ("C", "(C)", C, ("A", "B", "C", "D"), {}),
    ("Blue", "B", C, ("Red", "Blue", "Green"), {}),
    ("5.2", "B: 5.20", C, ("4.8", "5.2", "10.4"), {"unit": "cm"}),
    (r"145\degree", r"145^\circ", C, (r"35\degree", r"145\degree"), {}),
    ("A, C", "C and A", C, (), {}),
    ("27.0", "27", X, (), {}),
    ("1.34", "1.338", F, (), {"precision": 2}),
    ("0.6", "0.61", F, (), {"precision": 1.0}),
    ("2.0944", r"\frac{2\pi}{3}", F, (), {"tolerance": 0.001}),
    ("4.5e33", r"4.5\times10^{33}", F, (), {}),
    ("7", "7 years", N, (), {"unit": "years"}),
    ("[0, 2, 1]", "0, 2, 1", L, (), {}),
    (r"$2,-\frac{1}{3}$", r"-1/3 \text{ and } 2", L, (), {}),
    ("Sep", "sep", T, (), {}),
    ("4:45", r"\text{4:45}", T, (), {}),
    (r"5\sqrt{2}", r"\frac{10}{\sqrt{2}}", X, (), {}),
    ("x=-2 or x=4", "x=-2 or 4", X, (), {}),
    (r"$\frac{100!}{2^{50}}$", "100!/2^{50}", X, (), {}),
    (r"y(t)=\frac{1}{3} e^{-t}+c_1", r"c_{1}+\frac{e^{-t}}{3}", X, (), {}),
    (r"\frac{9}{4} \pi \mathrm{~cm}^{2}", r"2.25\pi", X, (), {}),
]


def test_a_gold_of_each_benchmark_accepts_itself_and_a_different_form(grader: Grader) -> None:
    wrong = []
    for gold, different_form, kind, choices, meta in SAMPLE_GOLDS:
        problem = Problem("p", "", (), gold, kind, choices, meta=meta)
        grade = grader.grade_many([task_of(problem, THINK.wrap("a", different_form), THINK)])[0]
        if not (grade.correct and grader.verifies_itself(problem)):
            wrong.append((gold, different_form, grade))
    assert wrong == []


def real_golds() -> dict[str, Problem]:
    """Return every gold of the sample data beside the checkout, as its benchmark would be prepared."""
    data = shared_data()
    golds: dict[str, Problem] = {}

    def add(name: str, answer: object, answer_type: AnswerType, choices: tuple[str, ...] = (), **meta: Any) -> None:
        meta = {key: value for key, value in meta.items() if value is not None}
        golds[name] = Problem(name, "", (), str(answer), answer_type, tuple(choices), meta=meta)

    for line in (data / "mathvision" / "testmini.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"mathvision {row['id']}", row["answer"], C if row["options"] else X, row["options"])
    for pid, row in json.loads((data / "mathvista" / "testmini_250_no_images.json").read_text()).items():
        kind = C if row["choices"] else row["answer_type"]
        precision = int(row["precision"]) if row["precision"] is not None else None
        extras = {"precision": precision, "unit": row["unit"]}
        add(f"mathvista {pid}", row["answer"], kind, row["choices"] or (), **extras)
    for row in json.loads((data / "mathverse" / "testmini_text_only_part.json").read_text()):
        kind = C if row["question_type"] == "multi-choice" else X
        add(f"mathverse {row['sample_index']}", row["answer"], kind)
    for name, row in json.loads((data / "logicvista" / "dataset_90.json").read_text()).items():
        add(f"logicvista {name}", row["answer"], C)
    for trial in sorted((data / "dynamath").glob("trial*/dataset.json")):
        for name, row in json.loads(trial.read_text()).items():
            kinds: dict[str, AnswerType] = {"float": F, "multiple choice": C, "text": T}
            kind = kinds[row["answer_type"]]
            tolerance = 0.001 if kind == F else None
            add(f"dynamath {trial.parent.name} {name}", row["answer"], kind, tolerance=tolerance)
    for number, row in enumerate(json.loads((data / "wemath" / "testmini.json").read_text())):
        add(f"wemath {number} {row['ID']}", row["answer"], C)
    for row in pq.read_table(data / "dapo_math" / "aime-2024.parquet").to_pylist():
        add(f"dapo {row['extra_info']['index']}", row["reward_model"]["ground_truth"], N)
    for name in ("aime24", "amc23"):
        for line in (data / "text_math" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            add(f"{name} {row['id']}", row["answer"], N)
    for line in (data / "text_math" / "minerva_math.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"minerva {row['idx']}", (boxes(row["solution"]) or [""])[-1], X)
    for line in (data / "text_math" / "olympiadbench_100.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"olympiad {row['id']}", row["final_answer"][0], L if row["is_multiple_answer"] else X)
    return golds


AMBIGUOUS = {"mathvista 849"}  # "(b)", the letter of option B and the text of option D


def test_a_real_gold_accepts_itself_and_no_other_number(grader: Grader) -> None:
    problems = real_golds()
    failing = {name for name, problem in problems.items() if not grader.verifies_itself(problem)}
    assert failing <= AMBIGUOUS
    numbers = list(
        {problem.answer: problem for problem in problems.values() if problem.answer_type in (N, F, X)}.values()
    )
    response = THINK.wrap("a", "987654.3210123")
    grades = grader.grade_many([task_of(problem, response, THINK) for problem in numbers[::3]])
    assert [problem.answer for problem, grade in zip(numbers[::3], grades, strict=True) if grade.correct] == []


# (gold, its type as prepared, whether its other spellings are accepted)
SPELLED: list[tuple[str, AnswerType, bool]] = [
    (r"3,\!250", L, True),
    (r"3,\!250", N, True),
    ("12,345.5", F, True),
    ("-1234", N, True),
    (r"-\frac{1}{2}", X, True),
    (r"2\frac{3}{4}", X, True),
    (r"3{,}5", X, False),  # a decimal comma, which the grader reads as that of a list
    ("9999/99999999", X, True),
    ("1,234", L, True),  # two numbers
    ("7/3/2021", T, True),
]


@pytest.mark.parametrize(("gold", "kind", "accepted"), SPELLED)
def test_a_gold_is_checked_against_its_other_spellings(
    grader: Grader, gold: str, kind: AnswerType, accepted: bool
) -> None:
    assert grader.verifies_itself(Problem("p", "", (), gold, kind)) == accepted


# -- code in an answer --------------------------------------------------------------------------------

PAYLOADS = [
    "__import__('os').system('touch {marker}')",
    "\\text{{__import__('os').system('touch {marker}')}}",
    "eval(\"open('{marker}','w')\")",
    "(lambda: __import__('pathlib').Path('{marker}').touch())()",
    "\\operatorname{{open}}('{marker}','w')",
    "[open('{marker}','w'), 1]",
    "$(touch {marker})",
    "x; import os; os.system('touch {marker}')",
]


def test_code_in_an_answer_is_only_text(grader: Grader, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    texts = [payload.format(marker=marker) for payload in PAYLOADS]
    responses = [THINK.wrap("a", text) for text in texts]
    grades = grader.grade_many([GradeTask(text, gold, X, THINK) for text in responses for gold in ("x+1", "0")])
    assert all(not grade.correct for grade in grades)
    # Also straight into the symbolic side, past every filter.
    with closing(SymbolicClient(workers=1, timeout=2.0)) as client:
        client.answer([query for text in texts for query in (("equal", "x", text), ("value", text))])
    assert not marker.exists()


GRADING_FILES = (
    *sorted(
        path.relative_to(Path(vlm_rl.__file__).parent).with_suffix("").as_posix()
        for path in (Path(vlm_rl.__file__).parent / "grading").glob("*.py")
    ),
    "templates",
)
FORBIDDEN = {"eval", "exec", "compile", "sympify", "parse_expr", "pickle", "__import__", "S", "literal_eval"}


@pytest.mark.parametrize("name", GRADING_FILES)
def test_no_code_path_from_model_text(name: str) -> None:
    tree = ast.parse((Path(vlm_rl.__file__).parent / f"{name}.py").read_text())
    for node in ast.walk(tree):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        if isinstance(node, ast.Call):
            # re.compile takes a pattern of ours, not code.
            names = {node.func.id} if isinstance(node.func, ast.Name) else set()
            if isinstance(node.func, ast.Attribute) and node.func.attr != "compile":
                names = {node.func.attr}
        assert not names & FORBIDDEN, f"{name}.py line {getattr(node, 'lineno', 0)}"


def test_the_grader_needs_no_torch() -> None:
    code = (
        "import sys, vlm_rl.grading.grader, vlm_rl.grading.symbolic_server as w;"
        "w._WARM_UP = ('x',); w.load_grammar();"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("base", ["\u2776", "9" * 300])
def test_a_base_that_python_does_not_read_is_wrong_and_no_fault(grader: Grader, base: str) -> None:
    """U+2776 is a digit for Unicode, and no numeral for int."""
    (grade,) = grader.grade_many([GradeTask(rf"\boxed{{A_{{{base}}}}}", "A_1", X, PLAIN)])
    assert (grade.verdict, grade.path == "fault") == ("wrong", False)
