"""Every published layout and every quirk in it, on rows made to the documented schemas."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import shared_data
from tests.helpers.benchmark_rows import REAL_FILES, write_annotations
from tests.helpers.data_sets import dapo_row, read_problems, write_json_lines, write_parquet
from vlm_rl.data.images import encode_png
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.row_golds import last_box, number_gold
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.readers.training_sources import clean_virl
from vlm_rl.data_prep.records import UsableRow, pass_rate_of
from vlm_rl.errors import UserError
from vlm_rl.toy.virl_layout import write_virl
from vlm_rl.types import Problem

PICTURE = encode_png(Image.new("RGB", (84, 84), "blue"))
EMBEDDED = {"bytes": PICTURE, "path": "x.png"}


def only(source: str, path: Path, split: str = "") -> Problem:
    problems, dropped = read_problems(source, path, split)
    assert len(problems) == 1 and not dropped, dropped
    return next(iter(problems.values()))


# -- ViRL39K ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("<image>\nThe above problem is with the following images:\nFind x", "<image>\nFind x"),
        ("Find x.\nThe above problem is with the following images:", "Find x."),
        ("Choose./nA. one/nB. two", "Choose.\nA. one/nB. two"),  # "one/n" could be a unit of measure
        ("Is it so?/n(A) yes", "Is it so?\n(A) yes"),
        ("the ratio m/n of 3/n", "the ratio m/n of 3/n"),
        ("/nFind", "Find"),
    ],
)
def test_virl_noise_is_removed_and_fractions_stay(raw, clean) -> None:
    assert clean_virl(raw) == clean


@pytest.mark.parametrize(
    ("value", "rate"),
    [(0.25, 0.25), (1, 1.0), (-1.0, -1.0), ("0.5", 0.5), ("3/8", 0.375), ("", -1.0), ("easy", -1.0), (None, -1.0),
     (7, -1.0), (float("nan"), -1.0), ("1/0", -1.0)],
)  # fmt: skip
def test_pass_rates(value, rate) -> None:
    assert pass_rate_of(value) == rate


def test_virl_markers_leading_trailing_in_the_middle_and_missing(tmp_path) -> None:
    questions = ["<image>Find x", "Find x <image>", "In <image> find x", "Find x"]
    rows = [{"question": question, "image": ["images/a.png"]} for question in questions]
    problems, _ = read_problems("virl39k", write_virl(tmp_path / "virl", rows, {"a.png": PICTURE}))
    assert [p.question for p in problems.values()] == [*questions[:3], "<image>\nFind x"]


def test_virl_row_34209_is_judged_by_its_own_gold(tmp_path) -> None:
    from vlm_rl.grading.grader import Grader

    gold = r"\boxed{\left\{\eqalign{x & = 1 \cr y & = 2}\right.}"
    folder = write_virl(
        tmp_path / "virl",
        [{}, {"question": "Solve", "answer": gold}, {"question": "x?", "answer": r"\boxed{\left\{\eqalign{x}"}],
        {},
    )
    with Grader() as grader:
        report = prepare("virl39k", folder, tmp_path / "out", gold_check=grader.verifies_itself)
    rows = pq.read_table(tmp_path / "out/data.parquet").to_pylist()
    assert report.dropped["gold_broken"] == 1
    assert "None" not in [row["answer"] for row in rows]


# -- DAPO ------------------------------------------------------------------------------------------


def test_dapo_folds_copies_over_batches_and_reports_conflicts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vlm_rl.data_prep.readers.dapo._BATCH", 7)  # copies are in different batches
    rows = [dapo_row(f"Problem {n % 5}", str(-n % 5), f"uuid-{n}") for n in range(50)]
    rows.append(dapo_row("Problem 2", "1000", "uuid-50"))
    rows.append(dapo_row("Problem 9", None, "uuid-51"))
    problems, dropped = read_problems("dapo", write_parquet(tmp_path / "train.parquet", rows))
    assert {p.question: p.answer for p in problems.values()} == {f"Problem {n}": str(-n % 5) for n in (0, 1, 3, 4)}
    assert [*problems] == ["dapo-uuid-0", "dapo-uuid-1", "dapo-uuid-3", "dapo-uuid-4"]
    # 52 rows: 4 kept, 4 x 9 copies and 10 of Problem 2, which disagree, and one without a gold
    assert dropped == {"duplicate": 46, "gold_conflict": 1, "answer_missing": 1}


def test_dapo_prompts_that_are_not_one_message(tmp_path) -> None:
    two = [{"content": "a", "role": "user"}, {"content": "b", "role": "user"}]
    rows = [dapo_row("Fine", "1", "u"), dapo_row(two, "1", "v"), dapo_row([], "1", "w")]
    problems, dropped = read_problems("dapo", write_parquet(tmp_path / "train.parquet", rows))
    assert list(problems) == ["dapo-u"] and dropped == {"bad_type": 2}


def test_dapos_validation_file_has_numbers_for_ids(tmp_path) -> None:
    problem = only(
        "dapo", write_parquet(tmp_path / "aime.parquet", [dapo_row("P", "7", 3, raw_problem="P", split="test")])
    )
    assert problem.id == "dapo-3" and problem.test_only


def test_a_parquet_file_of_another_layout_is_named(tmp_path) -> None:
    file = write_parquet(tmp_path / "x.parquet", [{"prompt": "text", "reward_model": "1", "extra_info": "i"}])
    with pytest.raises(UserError, match=r"x\.parquet"):
        read_problems("dapo", file)


def test_dapo_processed(tmp_path) -> None:
    row = {"prompt": "What is 1+1?", "solution": "2", "extra_info": {"index": "uuid"}, "ability": "MATH"}
    write_parquet(tmp_path / "en/train-00000-of-00001.parquet", [row])
    write_parquet(tmp_path / "all/train-00000-of-00001.parquet", [row, {**row, "extra_info": {"index": "two"}}])
    assert only("dapo_processed", tmp_path, "en").id == "dapo-uuid"
    assert len(read_problems("dapo_processed", tmp_path)[0]) == 2


# -- other training sets ---------------------------------------------------------------------------


def test_polaris(tmp_path) -> None:
    row = {"problem": "How many?", "answer": "12", "difficulty": "3/8"}
    problem = only("polaris", write_json_lines(tmp_path / "polaris-data-53K.jsonl", [row]))
    assert (problem.answer, problem.difficulty, problem.test_only) == ("12", 0.375, False)
    assert problem.id == f"polaris-{hashlib.sha256(row['problem'].encode()).hexdigest()[:16]}"  # as it always was


MATH_ROW = {
    "problem": "What is $1/2$ of 3?", "level": "Level 2", "type": "Algebra",
    "solution": r"It is \boxed{1} or \boxed{\frac32}.",
}  # fmt: skip


def test_math_as_hendrycks_published_it(tmp_path) -> None:
    for split, number in (("train", 1), ("train", 10), ("test", 2)):
        file = tmp_path / split / "algebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**MATH_ROW, "problem": f"Problem {split} {number}"}))
    (tmp_path / "train/algebra/3.json").write_text("{")
    with (tmp_path / "train/algebra/4.json").open("w") as file:
        file.truncate(300 << 20)
    problems, dropped = read_problems("math", tmp_path)
    assert list(problems) == ["math-algebra/1", "math-algebra/10"]
    assert dropped == {"bad_json": 1, "row_too_large": 1}
    first = problems["math-algebra/1"]
    assert (first.answer, first.category, first.meta["level"]) == (r"\frac32", "Algebra", "Level 2")
    assert not first.test_only and only("math", tmp_path, "test").test_only


@pytest.mark.parametrize("row", [MATH_ROW, {"problem": "What is $1/2$ of 3?", "answer": r"\frac32"}])
def test_math_as_parquet(tmp_path, row) -> None:
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", [row])
    problem = only("math", tmp_path)
    assert problem.answer == r"\frac32" and problem.id.startswith("math-train-")


def test_geometry3k(tmp_path) -> None:
    row = {"images": [EMBEDDED], "problem": "<image>Find x.", "answer": r"2 \sqrt { 221 }"}
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", [row])
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", [{**row, "problem": "<image>Find y."}])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", [row])
    problems, _ = read_problems("geometry3k", tmp_path)
    assert [p.images for p in problems.values()] == [(PICTURE,)] * 2
    assert only("geometry3k", tmp_path, "test").test_only
    with pytest.raises(UserError, match="train, validation, test"):
        read_problems("geometry3k", tmp_path, "dev")


def test_geometry3k_asks_the_same_of_many_pictures(tmp_path) -> None:
    """A row without an id is named by question, answer and picture: only a copy of it has the same name."""
    pictures = [encode_png(Image.new("RGB", (84, 84), colour)) for colour in ("red", "green", "blue")]
    rows = [{"images": [{"bytes": p, "path": None}], "problem": "<image>Find $x$.", "answer": "3"} for p in pictures]
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", [*rows, {**rows[0], "answer": "4"}, rows[1]])
    problems = [row.problem for row in SOURCES["geometry3k"].read(tmp_path) if isinstance(row, UsableRow)]
    assert len({problem.id for problem in problems[:4]}) == 4 and problems[4].id == problems[1].id


def test_geometry3k_newer_files_have_ids(tmp_path) -> None:
    row = {
        "id": 7,
        "images": [EMBEDDED],
        "problem": "<image>x?",
        "answer": "3",
        "choices": ["1"],
        "ground_truth": "A",
    }
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", [row])
    assert only("geometry3k", tmp_path).id == "geometry3k-7"


# -- MathVista -------------------------------------------------------------------------------------

VISTA = {
    "pid": "5", "question": "Find it", "image": "images/5.jpg", "decoded_image": EMBEDDED, "choices": None,
    "unit": None,
    "precision": None, "answer": "3", "question_type": "free_form", "answer_type": "integer",
    "metadata": {"task": "geometry problem solving", "skills": ["geometry reasoning"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "answer", "kind", "meta"),
    [
        ({}, "3", "integer", {}),
        ({"answer": "1.2", "answer_type": "float", "precision": 1.0}, "1.2", "float", {"precision": 1}),
        ({"answer": "2", "unit": "g"}, "2", "integer", {"unit": "g"}),
        ({"answer": "[0, 2, 7]", "answer_type": "list"}, "[0, 2, 7]", "expression", {}),
        (
            {"answer": "102", "choices": ["97", "102"], "question_type": "multi_choice", "answer_type": "text"},
            "B", "choice", {},
        ),
        (  # pids 587, 740, 781
            {"answer": "7", "choices": ["5", "7", "7"], "question_type": "multi_choice", "answer_type": "text"},
            "B", "choice", {},
        ),
        (  # pids 168 and 849: the gold is not an option
            {"answer": "(b)", "choices": ["x", "y"], "question_type": "multi_choice", "answer_type": "text"},
            "(b)", "text", {},
        ),
    ],
)  # fmt: skip
def test_mathvista_on_the_hub(tmp_path, changes, answer, kind, meta) -> None:
    write_parquet(tmp_path / "data/testmini-00000-of-00001-725687bf7a18d64b.parquet", [{**VISTA, **changes}])
    problem = only("mathvista", tmp_path)
    assert (problem.answer, problem.answer_type) == (answer, kind)
    assert {key: problem.meta.get(key) for key in meta} == meta and problem.test_only
    assert problem.images == (PICTURE,) and problem.question.startswith("<image>\nFind it")
    assert ("(Unit: g)" in problem.question) == ("unit" in changes)


def test_mathvista_test_split_has_no_golds(tmp_path) -> None:
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", [{**VISTA, "answer": ""}])
    assert read_problems("mathvista", tmp_path, "test")[1] == {"answer_missing": 1}


def test_mathvista_in_the_authors_layout_with_pictures(tmp_path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/5.jpg").write_bytes(PICTURE)
    row = {key: value for key, value in VISTA.items() if key != "decoded_image"}
    (tmp_path / "testmini.json").write_text(json.dumps({"5": row}))
    assert only("mathvista", tmp_path).images == (PICTURE,)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ("made", {"choice": 4, "integer": 2, "float": 2, "expression": 1}),
        ("real", {"choice": 123, "integer": 116, "float": 10, "expression": 1}),
    ],
)
def test_mathvista_annotations_without_images(tmp_path, rows, kinds) -> None:
    problems, dropped = read_problems("mathvista", sample_folder("mathvista", rows, tmp_path))
    assert not dropped and all(p.meta["annotations_only"] and not p.images for p in problems.values())
    assert Counter(p.answer_type for p in problems.values()) == kinds


def sample_folder(benchmark: str, rows: str, tmp_path: Path) -> Path:
    """Return the folder of the made rows of a benchmark, or of the real ones."""
    if rows == "real":
        return shared_data() / benchmark
    write_annotations(benchmark, tmp_path)
    return tmp_path


# -- MathVision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("$3$", "3"), (r"\boxed{4}", "4"), ("\x0crac{36}{13}", r"\frac{36}{13}"), ("5 ", "5"), ("C", "C"),
        ("69{degrees}", "69{degrees}"), ("1:2", "1:2"), ("45^2", "45^2"), ("(3,-4)", "(3,-4)"),
    ],
)  # fmt: skip
def test_mathvision_golds_on_the_hub(tmp_path, answer, gold) -> None:
    row = {
        "id": "1", "question": "Which?\n<image1>", "options": [], "answer": answer, "solution": None, "level": 2,
        "subject": "arithmetic", "image": "images/1.jpg", "decoded_image": EMBEDDED,
    }  # fmt: skip
    write_parquet(tmp_path / "data/test-00000-of-00001-3532b8d3f1b4047a.parquet", [row])
    problem = only("mathvision", tmp_path, "test")
    assert (problem.answer, problem.question, problem.images) == (gold, "Which?\n<image>", (PICTURE,))


# -- MathVerse -------------------------------------------------------------------------------------

VERSE = {
    "sample_index": "1", "problem_index": "1", "problem_version": "Text Dominant", "answer": "D",
    "question": "The size is ()\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°", "image": EMBEDDED,
    "question_type": "multi-choice", "metadata": {"subject": "Plane Geometry", "subfield": "Angle"},
}  # fmt: skip


def test_mathverse_five_versions(tmp_path) -> None:
    versions = ["Text Dominant", "Text Lite", "Vision Intensive", "Vision Dominant", "Vision Only"]
    rows = [
        {**VERSE, "sample_index": str(n), "problem_version": version, "question": VERSE["question"] if n < 4 else ""}
        for n, version in enumerate(versions)
    ]
    write_parquet(tmp_path / "testmini.parquet", rows)
    problems, dropped = read_problems("mathverse", tmp_path)
    assert not dropped and [p.meta["version"] for p in problems.values()] == versions
    assert problems["mathverse-0"].choices == ("40°", "60°", "120°", "140°")
    blind = problems["mathverse-4"]
    assert blind.question == "<image>\nAnswer the question that is written in the image."
    assert (blind.answer, blind.answer_type, blind.choices) == ("D", "choice", ())


@pytest.mark.parametrize(
    ("changes", "answer", "kind"),
    [
        ({"answer": "(B)"}, "B", "choice"),
        ({"answer": "118掳T", "question_type": "free-form"}, "118掳T", "expression"),
        ({"answer": r"217 ^\circ T", "question_type": "free-form"}, r"217 ^\circ T", "expression"),
        ({"answer": r"Area $=9 \pi \mathrm{cm}^{2}$", "question_type": "free-form"}, None, None),
    ],
)
def test_mathverse_messy_golds(tmp_path, changes, answer, kind) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/i.png").write_bytes(PICTURE)
    (tmp_path / "testmini.json").write_text(json.dumps([{**VERSE, "image": "i.png", **changes}]))
    problem = only("mathverse", tmp_path)
    assert problem.images == (PICTURE,)
    if answer is not None:
        assert (problem.answer, problem.answer_type) == (answer, kind)


@pytest.mark.parametrize(("rows", "count"), [("made", 3), ("real", 99)])
def test_mathverse_text_only_rows_are_whole_without_images(tmp_path, rows, count) -> None:
    problems, dropped = read_problems("mathverse", sample_folder("mathverse", rows, tmp_path))
    assert len(problems) == count and not dropped
    assert not any(p.meta.get("annotations_only") for p in problems.values())


# -- LogicVista, We-Math, DynaMath on the hub ------------------------------------------------------


def test_logicvista_letters_up_to_i_two_letters_and_the_row_without_gold(tmp_path) -> None:
    golds = ["G", "I", "A, C", "3", ""]
    rows = [{"image": EMBEDDED, "question": f"Which {n}?", "answer": gold} for n, gold in enumerate(golds)]
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", rows)
    problems, dropped = read_problems("logicvista", tmp_path)
    assert {p.answer: p.answer_type for p in problems.values()} == {
        "G": "choice", "I": "choice", "A, C": "choice", "3": "integer",
    }  # fmt: skip
    assert dropped == {"answer_missing": 1}  # v1_382 as published
    assert prepare("logicvista", tmp_path, tmp_path / "out", Options(strict=True)).kept == 4


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("A. 300, 400;B. 400, 300; C. none", ("300, 400", "400, 300", "none")),
        ("A. one/;B. two/;C. three", ("one", "two", "three")),
        ("A. 1; B. 2; C. 3; D. 4; E. 5; F. 6; G. 7", tuple("1234567")),
    ],
)
def test_wemath_on_the_hub(tmp_path, option, choices) -> None:
    row = {
        "ID": "2steps_1", "split": "testmini", "knowledge concept": "Angles", "question": "Which?",
        "option": option, "answer": "B", "image_path": EMBEDDED, "key": "2steps_multi", "question number": 1,
    }  # fmt: skip
    write_parquet(tmp_path / "data/testmini-00000-of-00001.parquet", [row])
    problem = only("wemath", tmp_path)
    assert (problem.id, problem.choices, problem.images) == ("wemath-2steps_1-2steps_multi", choices, (PICTURE,))
    assert (problem.meta["problem"], problem.meta["key"]) == ("2steps_1", "2steps_multi")


def test_wemath_options_that_cannot_be_told_apart(tmp_path) -> None:
    row = {
        "ID": "1",
        "key": "2steps_1",
        "question": "Which?",
        "option": "one or two",
        "answer": "A",
        "image_path": "x",
    }
    (tmp_path / "testmini.json").write_text(json.dumps([row]))
    assert read_problems("wemath", tmp_path)[1] == {"options": 1}


def test_dynamath_on_the_hub(tmp_path) -> None:
    row = {
        "id": "12", "question": "How long?", "image": "images/x.png", "decoded_image": EMBEDDED,
        "ground_truth": "2.5",
        "answer_type": "float", "subject": "algebra", "knowledge_level": "high school",
    }  # fmt: skip
    for variant in (1, 10):
        write_parquet(tmp_path / f"data/sample_variant{variant}-00000-of-00001.parquet", [row])
    problems, _ = read_problems("dynamath", tmp_path)
    assert list(problems) == ["dynamath-12-v1", "dynamath-12-v10"]
    assert problems["dynamath-12-v10"].meta["tolerance"] == 0.001


# -- text benchmarks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "gold"),
    [(27.0, "27"), (0.5, "0.5"), (73, "73"), ("073", "73"), ("000", "0"), (r"\frac12", r"\frac12"), ("-04", "-4")],
)
def test_numbers_as_golds(value, gold) -> None:
    assert number_gold(value) == gold


def test_the_last_box_is_the_answer() -> None:
    assert last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"


@pytest.mark.parametrize(
    ("source", "row", "expected"),
    [
        (
            "math500",
            {"problem": "P", "solution": "s", "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Precalculus",
             "level": 2, "unique_id": "test/precalculus/807.json"},
            ("math500-test/precalculus/807.json", r"\left( 3, \frac{\pi}{2} \right)", "Precalculus"),
        ),
        ("aime24", {"id": 60, "problem": "P", "solution": "s", "answer": "073", "url": "u"}, ("aime24-60", "73", "")),
        ("aime24", {"ID": "2024-II-4", "Problem": "P", "Solution": "s", "Answer": 33},
         ("aime24-2024-II-4", "33", "")),
        ("aime25", {"question": "P", "answer": "588"}, ("aime25-0", "588", "")),
        ("amc23", {"id": 0, "problem": "P", "answer": 142.0, "url": "u"}, ("amc23-0", "142", "")),
        ("minerva", {"question": "P", "answer": r"4.5e33"}, ("minerva-0", "4.5e33", "")),
        (
            "minerva",
            {"problem": "P", "solution": r"It is \boxed{1.6} cm", "type": "Astronomy", "idx": 3},
            ("minerva-3", "1.6", "Astronomy"),
        ),
        ("minerva", {"problem": "P", "answer": ["0.01\n", "0.02\n"], "idx": 4}, ("minerva-4", "0.01", "")),
        (
            "olympiadbench",
            {"id": 1606, "subfield": "Algebra", "context": None, "question": "P", "solution": ["s"],
             "final_answer": ["2"], "is_multiple_answer": False, "unit": None, "answer_type": "Numerical",
             "error": None},
            ("olympiadbench-1606", "2", "Algebra"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_benchmarks(tmp_path, source, row, expected, kind) -> None:
    name = {"aime24": "train", "olympiadbench": "OE_TO_maths_en_COMP"}.get(source, "test")
    if kind == "parquet":
        write_parquet(tmp_path / f"data/{name}-00000-of-00001.parquet", [row])
        path = tmp_path
    else:
        path = write_json_lines(tmp_path / "rows.jsonl", [row])
    problem = only(source, path)
    assert (problem.id, problem.answer, problem.category) == expected and problem.test_only


def test_any_of_minervas_alternative_golds_is_right(tmp_path) -> None:
    from vlm_rl.data.sets import load_set
    from vlm_rl.grading.grader import Grader, task_of
    from vlm_rl.templates import TEMPLATES

    rows = [{"problem": "P", "answer": ["0.01\n", "0.02\n", "0.01"], "idx": 4}, {"problem": "Q", "answer": ["3"]}]
    report = prepare("minerva", write_json_lines(tmp_path / "minerva.jsonl", rows), tmp_path / "out")
    first, second = load_set(tmp_path / "out")
    assert (first.answer, first.meta["alternatives"], report.notes["alternatives"]) == ("0.01", ["0.02"], 1)
    assert "alternatives" not in second.meta
    template = TEMPLATES["think_answer"]
    with Grader() as grader:
        tasks = [task_of(first, template.wrap("So.", text), template) for text in ("0.01", "0.02", "0.03")]
        grades = grader.grade_many(tasks)
    assert [grade.correct for grade in grades] == [True, True, False]


def test_olympiadbench_several_answers_units_tolerance_context_and_pictures(tmp_path) -> None:
    base = {
        "id": 1,
        "question": "P",
        "final_answer": ["1, 2"],
        "is_multiple_answer": True,
        "answer_type": "Numerical",
    }
    rows = [
        {**base, "unit": "cm", "error": None, "context": "Given.", "image_1": EMBEDDED},
        {**base, "id": 2, "final_answer": ["0.5"], "is_multiple_answer": False, "unit": None, "error": "1e-1",
         "context": None, "image_1": None},
        {**base, "id": 3, "final_answer": ["1", "2"], "unit": None, "error": None, "context": None, "image_1": None},
    ]  # fmt: skip
    write_parquet(tmp_path / "OE_MM_maths_en_COMP.parquet", rows)
    problems, dropped = read_problems("olympiadbench", tmp_path)
    first, second = problems.values()
    assert (first.answer_type, first.meta["unit"], first.images) == ("list", "cm", (PICTURE,))
    assert first.question == "<image>\nGiven.\n\nP"
    assert (second.answer_type, second.meta["tolerance"]) == ("float", 0.1)
    assert dropped == {"bad_type": 1}


def test_of_the_whole_olympiadbench_the_problems_in_text_are_read(tmp_path) -> None:
    """As `hf download` leaves it: the problems with pictures, and those in Chinese, are tables of their own."""
    row = {"question": "P", "final_answer": ["2"], "answer_type": "Numerical"}
    for name, number in (("OE_MM_maths_en_COMP", 1), ("OE_TO_maths_en_COMP", 2), ("OE_TO_maths_zh_COMP", 3)):
        write_parquet(tmp_path / "OlympiadBench" / name / f"{name}.parquet", [{**row, "id": number}])
    assert only("olympiadbench", tmp_path).id == "olympiadbench-2"


@pytest.mark.parametrize("rows", ["made", "real"])
@pytest.mark.parametrize("source", ["aime24", "amc23", "minerva", "olympiadbench"])
def test_text_benchmarks_are_read_whole(tmp_path, source, rows) -> None:
    (path,) = [shared_data() / REAL_FILES[source]] if rows == "real" else write_annotations(source, tmp_path)
    problems, dropped = read_problems(source, path)
    assert len(problems) == len(path.read_text().splitlines()) and not dropped
    assert not any("." in p.answer for p in problems.values()) or source not in ("aime24", "amc23")


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "generic"])
def test_an_empty_folder_is_a_mistake_that_is_named(tmp_path, source) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path}"):
        read_problems(source, tmp_path)


def test_several_files_that_fit_are_listed(tmp_path) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", [{"x": 1}])
    with pytest.raises(UserError, match=r"no 39Krelease\.parquet there; there are \['a\.parquet', 'b\.parquet'\]"):
        read_problems("virl39k", tmp_path)


@pytest.mark.parametrize(("source", "name"), [("mathvista", "testmini.json"), ("mathvision", "testmini.jsonl")])
def test_a_table_of_one_split_is_not_taken_for_another(tmp_path, source, name) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"no table of the split test there; {name} is of testmini"):
        list(SOURCES[source].read(tmp_path, "test"))
