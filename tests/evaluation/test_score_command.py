"""`vlm-rl score` on files as their authors publish them, and as people write them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_rl.cli import main
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Response
from vlm_rl.evaluation.benchmarks.judging import judge, summary_of
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations, read_responses
from vlm_rl.grading.grader import Grader
from vlm_rl.stats import score_interval
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem


def test_scoring_loads_neither_torch_nor_an_engine() -> None:
    """The command starts at once, and the demo may use the same modules."""
    code = (
        "import sys, vlm_rl.evaluation.benchmarks.score_command, vlm_rl.paired\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'gradio', 'sympy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def write(path: Path, tree: object) -> Path:
    if isinstance(tree, str):
        path.write_text(tree, encoding="utf-8")
        return path
    lines = isinstance(tree, list) and path.suffix == ".jsonl"
    text = "\n".join(map(json.dumps, tree)) if lines else json.dumps(tree)  # type: ignore[arg-type]
    path.write_text(text, encoding="utf-8")
    return path


def score(tmp_path: Path, benchmark: str, mode: str, **files: object) -> dict:
    arguments = ["score", "--benchmark", benchmark, "--mode", mode, "--json", str(tmp_path / "score.json")]
    for flag, paths in files.items():
        arguments += [f"--{flag}", *map(str, paths if isinstance(paths, list) else [paths])]
    assert main(arguments) == 0
    return json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))


def test_published_mathvision_rows_keep_their_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations = write(
        tmp_path / "test.jsonl",
        [
            {"id": "1", "options": [], "answer": "60", "level": 2, "subject": "arithmetic"},
            {"id": "2", "options": ["A", "B"], "answer": "A", "level": 1, "subject": "counting"},
            {"id": "3", "options": ["$1$", "$2$"], "answer": "B", "level": 1, "subject": "counting"},
        ],
    )
    responses = write(
        tmp_path / "model.jsonl",
        [
            {"id": "1", "response": "It is $\\boxed{60}$.", "model_answer": "60", "correct": True},
            {"id": "2", "response": "The answer is (B).", "model_answer": "b", "correct": False},
            {"id": "3", "response": "2", "model_answer": "2", "correct": False},  # wrong on purpose
        ],
    )
    official = score(tmp_path, "mathvision", "official", annotations=annotations, responses=responses)
    assert official["rule"] == "official" and official["scores"]["accuracy"]["score"] == pytest.approx(2 / 3)
    assert official["published_accuracy"] == pytest.approx(1 / 3) and official["judged_otherwise"] == ["3"]
    assert [r["verdict"] for r in official["rows"]] == ["correct", "wrong", "correct"]
    assert [r["category"] for r in official["rows"]] == ["arithmetic", "counting", "counting"]  # the first facet
    assert official["by"]["subject"]["counting"]["n"] == 2
    printed = capsys.readouterr().out
    for part in (
        "66.67 [",
        "n 3 questions",
        "with a box 33.3%",
        "truncated unknown",
        "timeouts 0",
        "otherwise here: 1: 3",
    ):
        assert part in printed
    strict = score(tmp_path, "mathvision", "strict", annotations=annotations, responses=responses)
    assert strict["scores"]["accuracy"]["score"] == pytest.approx(1 / 3) and strict["no_answer"] == 2


def test_mathvista_starts_from_the_shipped_extraction(tmp_path: Path) -> None:
    fields = {"question_type": "free_form", "answer_type": "integer", "precision": None, "choices": None}
    tree = {
        "1": {**fields, "pid": "1", "answer": "3", "response": "?", "extraction": "3.2", "metadata": {"task": "t"}},
        "2": {**fields, "answer": "3", "response": r"\boxed{3}", "extraction": "", "metadata": {"task": "t"}},
    }
    found = score(tmp_path, "mathvista", "official", responses=write(tmp_path / "out.json", tree))
    assert [r["verdict"] for r in found["rows"]] == ["correct", "wrong"]
    assert (found["rule"], found["shipped_extractions"]) == ("official", 2)
    del tree["2"]["extraction"]
    found = score(tmp_path, "mathvista", "official", responses=write(tmp_path / "out.json", tree))
    assert [r["verdict"] for r in found["rows"]] == ["correct", "correct"] and found["rule"] == "emulated"


@pytest.mark.parametrize(
    ("benchmark", "question", "extraction"),
    [
        ("math500", {"problem": "What is 3 + 4?", "answer": "7"}, "7"),
        ("logicvista", {"question": "Which?", "answer": "A, C"}, "A, C"),
    ],
)
def test_extractions_do_not_make_rules_of_ours_the_published_ones(
    tmp_path: Path, benchmark: str, question: dict, extraction: str
) -> None:
    """They are read, but what is compared with the gold, and how, stays ours."""
    annotations = write(tmp_path / "golds.json", {"1": question, "2": question})
    responses = write(tmp_path / "r.json", {"1": {"extraction": extraction}, "2": {"extraction": "B"}})
    found = score(tmp_path, benchmark, "official", annotations=annotations, responses=responses)
    assert (found["rule"], found["shipped_extractions"]) == ("emulated", 2)
    assert [row["verdict"] for row in found["rows"]] == ["correct", "wrong"]


def test_dynamath_trials_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for trial, gold in (("trial2", "2"), ("trial10", "3")):
        (tmp_path / trial).mkdir()
        rows = {"5": {"question": "q", "answer": gold, "answer_type": "float", "subject": "s", "level": "l"}}
        write(tmp_path / trial / "dataset.json", rows)
    (tmp_path / "answers_trial10.csv").write_text('id,response\n5,"{""short answer"": ""3""}"\n')
    report = {"5": {"response": {"solution": "s", "short answer": "4"}, "result": "fail"}}
    answers = [write(tmp_path / "report_trial2.json", report), tmp_path / "answers_trial10.csv"]
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=answers)
    assert {r["id"]: r["verdict"] for r in found["rows"]} == {"5-v2": "wrong", "5-v10": "correct"}
    assert found["scores"]["worst_case"]["score"] == 0 and found["scores"]["average"]["score"] == 0.5


def test_our_own_records_are_scored_too(tmp_path: Path) -> None:
    records = [
        {
            "problem_id": "mathvision-7",
            "sample_index": 0,
            "response": r"\boxed{B}",
            "length": 5,
            "stop_reason": "stop",
        },
        {"problem_id": "mathvision-7", "sample_index": 1, "response": "I am", "length": 9, "stop_reason": "length"},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "step-000000.parquet")
    annotations = write(tmp_path / "a.jsonl", [{"id": "7", "options": ["A", "B"], "answer": "B"}])
    responses = tmp_path / "step-000000.parquet"
    found = score(tmp_path, "mathvision", "strict", annotations=annotations, responses=responses)
    assert (found["scores"]["accuracy"]["score"], found["k"], found["truncated_share"]) == (0.5, 2, 0.5)
    assert found["scores"]["pass@2"]["score"] == 1.0 and [r["sample"] for r in found["rows"]] == [0, 1]
    assert [r["length"] for r in found["rows"]] == [5, 9]


@pytest.mark.parametrize(
    "tree",
    [
        [{"ID": "2steps_1", "key": "2steps_1", "response": "Answer: A"}],
        {"2steps_1": {"2steps_1": "Answer: A"}},
        {"2steps_1": {"2steps_1": {"response": "Answer: A"}}},
        {"2steps_1": [{"ID": "2steps_1", "key": "2steps_1", "response": "Answer: A"}]},
        {"2steps_1-2steps_1": "Answer: A"},
    ],
)
def test_wemath_responses_in_every_layout(tmp_path: Path, tree: object) -> None:
    (response,) = read_responses(BENCHMARKS["wemath"], [write(tmp_path / "r.json", tree)])
    assert (response.id, response.text) == ("2steps_1-2steps_1", "Answer: A")


def test_golds_of_a_text_benchmark_by_id(tmp_path: Path) -> None:
    golds = {str(number): {"problem": f"What is {number}?", "answer": str(number)} for number in range(3)}
    annotations = write(tmp_path / "golds.json", golds)
    responses = write(tmp_path / "r.json", {number: rf"\boxed{{{number}}}" for number in golds})
    found = score(tmp_path, "math500", "strict", annotations=annotations, responses=responses)
    assert found["scores"]["accuracy"]["score"] == 1.0 and [row["id"] for row in found["rows"]] == ["0", "1", "2"]


def test_a_second_folder_without_trials_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one/trial1").mkdir(parents=True)
    write(tmp_path / "one/trial1/dataset.json", [])
    (tmp_path / "two").mkdir()
    words = [
        "--benchmark=dynamath",
        "--annotations",
        str(tmp_path / "one"),
        str(tmp_path / "two"),
        "--responses",
        "r",
    ]
    assert main(["score", *words]) == 2
    assert f"{tmp_path / 'two'}: the folder holds no trial1" in capsys.readouterr().err


@pytest.mark.parametrize("place", [".", "/"])
def test_a_folder_without_a_name_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """No summary can be beside it; the judge's replies would be inside."""
    monkeypatch.chdir(tmp_path)
    rows = {"5": {"question": "q", "answer": "2", "answer_type": "float", "response": "2"}}
    Path("trial1").mkdir()
    write(Path("trial1/dataset.json"), rows)
    words = ["score", "--benchmark", "dynamath", "--mode", "official", "--annotations", ".", "--responses", place]
    assert main(words) == (0 if place == "." else 2)
    assert place == "." or "/: the folder holds no trial1" in capsys.readouterr().err
    assert main([*words, "--judge", "http://127.0.0.1:1/v1"]) == 2
    assert ("asks no model" if place == "." else "no trial1") in capsys.readouterr().err


def test_one_set_of_answers_in_every_layout_gives_one_score(tmp_path: Path) -> None:
    """List, object by id, lines; whole-number and text ids; a byte order mark; wrong suffixes; other column names."""
    questions = [{"id": str(i), "options": [], "answer": str(i)} for i in range(4)]
    annotations = write(tmp_path / "golds.jsonl", questions)
    rows = [{"id": i, "response": str(i if i < 3 else 0)} for i in range(4)]
    lines, whole = "\n".join(map(json.dumps, rows)), json.dumps(rows, indent=1)
    layouts = {
        "a.jsonl": lines,
        "b.json": whole,
        "c.json": json.dumps({str(row["id"]): {"response": row["response"]} for row in rows}),
        "d.json": json.dumps({str(row["id"]): row["response"] for row in rows}),
        "e.jsonl": "\ufeff" + lines.replace("\n", "\r\n") + "\n\n",
        "f.json": lines,
        "g.jsonl": whole,
        "h.json": json.dumps({"results": rows}),
        "i.csv": "\ufeffid,model_answer\n"
        + "".join(f"{r['id']}.0,{r['response']}\n" for r in rows).replace(".0", ""),
        "j.jsonl": lines.replace("response", "prediction").replace('"id": 1,', '"id": 1.0,'),
        "k.jsonl": json.dumps(rows),
    }
    for name, text in layouts.items():
        found = score(
            tmp_path, "mathvision", "official", annotations=annotations, responses=write(tmp_path / name, text)
        )
        assert [r["verdict"] for r in found["rows"]] == ["correct"] * 3 + ["wrong"], name
        assert [r["id"] for r in found["rows"]] == ["0", "1", "2", "3"], name


def test_missing_repeated_and_foreign_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = {f"v1_{i}": {"question": "q", "answer": "AB"[i % 2] if i < 4 else ""} for i in range(5)}
    answers = {f"v1_{i}": {"answer": "A"} for i in (0, 1, 4)}  # v1_2, v1_3 missing; v1_4 has no gold, like v1_382
    files = {
        "annotations": write(tmp_path / "dataset.json", questions),
        "responses": write(tmp_path / "model.json", answers),
    }
    found = score(tmp_path, "logicvista", "official", **files)
    assert (found["n"], found["missing"], found["left_out"]) == (2, 2, ["v1_4"])
    assert found["scores"]["accuracy"]["score"] == 0.5
    assert "left out: 1 ids that no annotated question with a gold has: v1_4" in capsys.readouterr().out
    twice = [{"id": name, "answer": "A"} for name in ("v1_0", "v1_1", "v1_1")]
    found = score(tmp_path, "logicvista", "official", **(files | {"responses": write(tmp_path / "t.json", twice)}))
    assert (found["k_min"], found["k"], found["num_responses"]) == (1, 2, 3)
    assert "between 1 and 2 responses a question" in capsys.readouterr().out


def write_dynamath(folder: Path) -> Path:
    """Write three seeds of two variants, and the table of their verdicts as its authors publish it; return that."""
    for trial in ("1", "2"):
        (folder / f"trial{trial}").mkdir()
        rows = {str(q): {"question": "q", "answer": "2", "answer_type": "float", "subject": "s"} for q in (1, 2, 3)}
        write(folder / f"trial{trial}" / "dataset.json", rows)
    table = "Question ID,Variant 1,Variant 2,Topic\nQ1,correct,correct,s\nQ2,correct,fail,s\nQ3,correct,correct,s\n"
    return write(folder / "model-result.csv", table)


def test_dynamaths_published_verdict_tables_are_summed_up(tmp_path: Path, capsys) -> None:
    """Its authors publish a verdict per seed and variant: 5 of 6 right, one seed of three not in all variants."""
    responses = write_dynamath(tmp_path)
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=responses)
    assert found["scores"]["average"]["score"] == 5 / 6 and found["published_verdicts"] == 6
    assert found["scores"]["worst_case"]["score"] == 2 / 3
    arguments = ["--benchmark", "dynamath", "--annotations", str(tmp_path), "--responses", str(responses)]
    assert main(["score", *arguments, "--mode", "strict"]) == 2
    assert "holds verdicts and no answers" in capsys.readouterr().err
    answers = write(tmp_path / "answers.csv", 'Question ID,Variant 1,Variant 2\nQ1,"{""short answer"": 2}",no\n')
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=answers)
    assert {r["id"]: r["verdict"] for r in found["rows"]} == {"1-v1": "correct", "1-v2": "wrong"}


def test_variants_and_versions_of_one_problem_are_one_cluster(tmp_path: Path) -> None:
    """DynaMath's three seeds of two variants, five of six right; MathVerse's two problems of two versions."""
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=write_dynamath(tmp_path))
    assert {row["id"]: row["cluster"] for row in found["rows"]} == {
        f"{seed}-v{variant}": f"seed {seed}" for seed in (1, 2, 3) for variant in (1, 2)
    }
    three = list(score_interval(np.array([1, 0.5, 1])))
    assert found["scores"]["average"]["interval"] == found["by"]["subject"]["s"]["interval"] == three
    assert found["scores"]["worst_case"]["interval"] == list(score_interval(np.array([1, 0, 1])))

    verdicts = [("7", "Text Lite", 1), ("7", "Vision Only", 1), ("8", "Text Lite", 0), ("8", "Vision Only", 0)]
    tree = [
        {"sample_index": place, "problem_index": problem, "problem_version": version, "answer": "14"}
        | {"category": {"subject": "Solid Geometry"}, "model_answer": f"The answer is {14 if right else 15}"}
        for place, (problem, version, right) in enumerate(verdicts)
    ]
    found = score(tmp_path, "mathverse", "official", responses=write(tmp_path / "out.json", tree))
    assert [row["cluster"] for row in found["rows"]] == ["problem 7", "problem 7", "problem 8", "problem 8"]
    two = list(score_interval(np.array([1, 0])))
    assert found["scores"]["accuracy"]["interval"] == found["by"]["subject"]["Solid Geometry"]["interval"] == two
    assert found["by"]["version"]["Text Lite"]["interval"] == two  # one version of each problem


def test_mathverse_files_are_read_with_their_judgements(tmp_path: Path) -> None:
    rows = [
        {"problem_id": 0, "answer": "14", "problem_version": "Text Lite", "category": {"subject": "Solid Geometry"}},
        {"problem_id": 1, "answer": "A", "question_type": "multi-choice", "category": {"subject": "Plane Geometry"}},
    ]
    extra = [
        {"model_answer": "The answer is 14", "judgement": 1},
        {"model_answer": "?", "extraction": "A", "judgement": "0"},
    ]
    tree = [row | more for row, more in zip(rows, extra, strict=True)]
    found = score(tmp_path, "mathverse", "official", responses=write(tmp_path / "out.json", tree))
    assert found["by"]["subject"]["Solid Geometry"]["n"] == 1 and found["rule"] == "emulated"
    assert found["published_accuracy"] == 0.5 and found["rows"][1]["verdict"] == "correct"
    assert found["judged_otherwise"] == ["1"]


def test_text_golds_in_their_publishers_shapes(tmp_path: Path, grader: Grader) -> None:
    rows = [
        {"id": 1, "problem": "p", "answer": 27.0},
        {"id": 2, "problem": "p", "answer": "073"},
        {"idx": 3, "problem": "p", "solution": r"so \boxed{1.6}"},
        {"id": 4, "problem": "p", "answer": ["0.01\n", "0.02\n"]},
        {"id": 5, "problem": "p", "final_answer": ["1,3,5"], "is_multiple_answer": True},
        {"id": 6, "problem": "p", "final_answer": ["2.5"], "error": "0.1"},
        {"id": 7, "problem": "p", "final_answer": ["3"], "error": "0.1"},
        {"id": 8, "problem": "p", "final_answer": ["3,4"], "error": "0.1,0.2", "is_multiple_answer": True},
    ]
    benchmark = BENCHMARKS["minerva"]
    problems = read_annotations(benchmark, [write(tmp_path / "a.jsonl", rows)])
    assert [problem.answer for problem in problems] == ["27", "73", "1.6", "0.01", "1,3,5", "2.5", "3", "3,4"]
    texts = [r"\boxed{27}", "The answer is 73.", r"\boxed{1.6}", r"\boxed{0.02}", r"\boxed{5, 1, 3}"]
    texts += [r"\boxed{2.58}", r"\boxed{3.12}", r"\boxed{4, 3}"]
    answered = [(problem, Response(problem.id, text)) for problem, text in zip(problems, texts, strict=True)]
    plain = TEMPLATES["plain"]
    official = judge(benchmark, answered, mode="official", grader=grader, template=plain)
    assert [item.correct for item in official] == [True] * 6 + [False, True]
    strict = judge(benchmark, answered, mode="strict", grader=grader, template=plain)
    assert [item.correct for item in strict] == [True, False, True, True, True, True, False, True]
    summary = summary_of(benchmark, official, mode="official", num_problems=9, template="plain")
    assert (summary["rule"], summary["missing"], summary["n"]) == ("emulated", 1, 8)


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ({"99": {"response": "x"}}, "none of the 1 responses belongs to one of the 1 annotated questions"),
        ("", "holds no rows"),
        ("{", "cannot be read: Expecting property name"),
        ('{"id": "1", "response": "x"}\n{"id": "2", "resp', "cannot be read: Extra data"),
        ({"1": {"reply": "x"}}, "no response: name its column one of"),
        ([], "holds no rows"),
        (["x"], "row 0 is not an object"),
    ],
)
def test_what_cannot_be_scored_is_said(tmp_path: Path, responses: object, message: str, capsys) -> None:
    annotations = write(tmp_path / "a.jsonl", [{"id": "1", "options": [], "answer": "6"}])
    path = write(tmp_path / "r.json", responses)
    arguments = ["score", "--benchmark", "mathvision", "--annotations", str(annotations), "--responses", str(path)]
    assert main(arguments) == 2 and message in capsys.readouterr().err
    with pytest.raises(UserError, match="a second, different question '1'"):
        twice = [{"id": "1", "options": [], "answer": "6"}, {"id": "1", "options": [], "answer": "7"}]
        read_annotations(BENCHMARKS["mathvision"], [write(tmp_path / "b.jsonl", twice)])


# -- the samples -------------------------------------------------------------------------------------------

Annotated = Callable[[str], list[Problem]]
COUNTS = {  # of the real samples
    "mathvision": 304,
    "wemath": 152,
    "dynamath": 250,
    "logicvista": 90,
    "mathvista": 250,
    "mathverse": 99,
    "aime24": 30,
    "amc23": 40,
    "minerva": 272,
    "olympiadbench": 100,
}


def facet_counts(benchmark: str, problems: list[Problem], facet: str) -> dict[str, int]:
    values = [value for problem in problems for value in BENCHMARKS[benchmark].facet_values(problem)[facet]]
    return {value: values.count(value) for value in sorted(set(values))}


@pytest.mark.parametrize("name", COUNTS)
def test_every_row_of_an_authors_file_is_a_problem(
    name: str, annotated: Annotated, request: pytest.FixtureRequest
) -> None:
    problems = annotated(name)
    assert len({problem.id for problem in problems}) == len(problems) > 0
    assert all(problem.source == name and problem.test_only and problem.answer for problem in problems)
    if "real" not in request.node.callspec.params.values():
        return
    assert len(problems) == COUNTS[name]
    if name == "mathvision":
        assert set(facet_counts(name, problems, "subject").values()) == {19}  # 16 subjects of 19
    elif name == "wemath":
        assert facet_counts(name, problems, "step") == {f"2steps_{k}": 24 for k in ("1", "2", "multi")} | {
            f"3steps_{k}": 20 for k in ("1", "2", "3", "multi")
        }
        assert min(len(p.choices) for p in problems) >= 4 and max(len(p.choices) for p in problems) <= 7
    elif name == "dynamath":
        assert len({problem.meta["seed"] for problem in problems}) == 25
    elif name == "logicvista":
        skills = {"deductive": 20, "inductive": 21, "mechanical": 15, "numerical": 18, "spatial": 16}
        assert facet_counts(name, problems, "skill") == skills
    elif name == "mathvista":
        kinds = {"float": 10, "integer": 116, "list": 1, "text": 123}
        assert facet_counts(name, problems, "answer_type") == kinds
    elif name == "mathverse":
        assert facet_counts(name, problems, "version") == {"Text Only": 99}
