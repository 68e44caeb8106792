"""Read the public layouts, and prepare what was read."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import shared_data
from tests.helpers.data_sets import (
    DAPO_HEAD,
    DAPO_TAIL,
    dapo_file,
    dapo_row,
    read_problems,
    write_parquet,
    write_sample,
)
from tests.helpers.images import encoded, plain_png, smooth_noise
from tests.helpers.prepared_sets import rows_of, write_problems
from vlm_rl.data.golds import infer_answer_type, parse_choices, unwrap_gold
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.prepared_set import to_row
from vlm_rl.data_prep.readers.dapo import read_dapo
from vlm_rl.data_prep.records import DroppedRow, RowError, UsableRow, fit_markers
from vlm_rl.data_prep.smoke_data import write_unusual_formats
from vlm_rl.errors import UserError
from vlm_rl.toy.virl_layout import write_virl
from vlm_rl.types import Problem

# -- the answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\boxed{17^\circ}", r"17^\circ"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("5 ", "5"),
        ("$x$", "x"),
        (r"$\boxed{3}$", "3"),
        ("$a$ and $b$", "$a$ and $b$"),  # the dollars are not one pair
        ("\x0crac{36}{13}", r"\frac{36}{13}"),
        (r"\boxed{\left\{x\right.", None),
        (r"\boxed{1} or \boxed{2}", None),
        (r"\boxed{}", ""),
    ],
)
def test_gold_is_unwrapped(answer, gold):
    assert unwrap_gold(answer) == gold


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("B", "choice"),
        ("(B)", "choice"),
        ("J", "choice"),
        ("K", "expression"),
        ("27", "integer"),
        ("-3", "integer"),
        ("1,000", "integer"),
        ("073", "integer"),
        ("2.50", "float"),
        ("-.5", "float"),
        ("1,234.5", "float"),
        (r"17^\circ", "expression"),
        (r"\frac{1}{2}", "expression"),
        ("50%", "expression"),
        ("5 cm", "expression"),
        ("x", "expression"),
        ("2x+3", "expression"),
        (r"\sqrt{3}", "expression"),
        ("(3,-4)", "expression"),
        (r"\{1, 2\}", "expression"),
        (r"1\,000", "expression"),
        ("1:2", "expression"),
        (r"3,\!250", "integer"),
        (r"32,\! 349", "integer"),
        (r"1{,}000.5", "float"),
        (r"\$1,200", "expression"),
        ("1,234 cm", "expression"),
        ("3, 5", "list"),
        ("x^2,100", "list"),
        ("1, 234", "list"),
        ("-12;-11;-10", "list"),
        ("2or3", "list"),
        (r"\frac{1}{2}, 3", "list"),
        ("(1,2), (3,4)", "list"),
        ("4 or 5", "list"),
        (r"x=1 \text{ or } x=2", "list"),
        ("x=1或x=2", "list"),
        ("3和-5", "list"),
        ("3，5", "list"),
        ("3、5、7", "list"),
        ("1，234", "integer"),
        ("（3，-4）", "expression"),
        ("甲和乙", "text"),
        ("orange", "text"),
        ("1:30 PM", "text"),
        ("10 a.m.", "text"),
        ("Yes", "text"),
        (r"\text{Tuesday}", "text"),
        ("mitochondria", "text"),
        ("Paris, France", "text"),
        ("sin x", "expression"),
    ],
)
def test_answer_type_follows_from_the_form(answer, expected):
    assert infer_answer_type(answer) == expected


@pytest.mark.parametrize(
    ("question", "choices"),
    [
        ("Which?\nChoices:\n(A) 12\n(B) 13\n(C) 14", ("12", "13", "14")),
        ("Which?\nChoices:\nA: left\nB: right\nAnswer briefly.", ("left", "right")),
        ("Is it so? Choices: (A) yes (B) no", ("yes", "no")),
        ("A. 300, 400;B. 400, 300; C. none", ("300, 400", "400, 300", "none")),
        ("Point (A) lies on BC. How long?\n(A) 1 cm\n(B) 2 cm", ("1 cm", "2 cm")),
        ("Select A, B, or C. Triangle ABC has AB = 3.", ()),
        ("Select from (A) (B) (C)", ()),  # drawn in the picture
        ("What choice (A, B, C, or D) fits?", ()),
        ("How many squares?", ()),
    ],
)
def test_choices_are_read_from_the_question(question, choices):
    assert parse_choices(question) == choices


@pytest.mark.parametrize(
    ("question", "images", "expected"),
    [
        ("see <image> here", 1, "see <image> here"),
        ("<image> or <image>?", 2, "<image> or <image>?"),
        ("no marker", 0, "no marker"),
        ("no marker", 1, "<image>\nno marker"),
        ("no marker", 2, "<image><image>\nno marker"),
    ],
)
def test_markers_are_kept_or_prepended(question, images, expected):
    assert fit_markers(question, images) == expected


@pytest.mark.parametrize(("question", "images"), [("<image><image>", 1), ("<image>", 2), ("<image>", 0)])
def test_markers_that_disagree_are_refused(question, images):
    with pytest.raises(RowError, match="markers"):
        fit_markers(question, images)


# -- the real samples ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "folder", "kept", "types"),
    [
        ("mathvision", "mathvision", 304, {"choice": 191, "integer": 110, "float": 2, "expression": 1}),
        ("dynamath", "dynamath", 250, {"float": 180, "choice": 50, "text": 20}),
        ("wemath", "wemath", 152, {"choice": 152}),
        ("logicvista", "logicvista", 90, {"choice": 89, "integer": 1}),
        ("dapo", "dapo_math", 30, {"integer": 30}),
    ],
)
def test_real_samples_are_read_whole_and_marked_test_only(source, folder, kept, types):
    problems, dropped = read_problems(source, shared_data() / folder)
    assert len(problems) == kept
    assert Counter(p.answer_type for p in problems.values()) == types
    assert dropped == ({"duplicate": 930} if source == "dapo" else {})
    assert all(p.test_only for p in problems.values())
    assert all(p.question.count("<image>") == len(p.images) for p in problems.values())
    assert all(len(p.images) == (source != "dapo") for p in problems.values())
    lettered = [p for p in problems.values() if p.choices]
    assert all("ABCDEFGHI".index(letter) < len(p.choices) for p in lettered for letter in p.answer.split(", "))


def test_mathvision_has_one_merged_picture_at_the_first_marker():
    problems, _ = read_problems("mathvision", shared_data() / "mathvision")
    ant = problems["mathvision-33"]
    assert ant.question.startswith("When the ant <image> walks from home <image2> along")
    assert "does the ant <image1> get to" in ant.question  # a second mention stays text
    assert ant.question.endswith("\nChoices: A, B, C, D, E")  # the options are drawn
    marked_in_options = problems["mathvision-2673"]
    assert marked_in_options.question.startswith("<image>\nJorge")
    assert "(A) <image1>" in marked_in_options.question


def test_dynamath_variants_and_tolerance():
    problems, _ = read_problems("dynamath", shared_data() / "dynamath")
    first = problems["dynamath-1-v10"]
    assert (first.meta["seed"], first.meta["variant"], first.meta["tolerance"]) == ("1", 10, 0.001)
    assert problems["dynamath-5-v1"].choices == ("yes", "no")
    for trial in (1, 10):  # each variant's picture comes from its own folder
        data = (shared_data() / f"dynamath/trial{trial}/image/image7.png").read_bytes()
        assert problems[f"dynamath-7-v{trial}"].images == (data,)


def test_wemath_and_logicvista_golds():
    problems, _ = read_problems("wemath", shared_data() / "wemath")
    first = problems["wemath-2steps_1-2steps_1"]
    assert first.choices == ("300, 400", "400, 300", "3000, 4000", "4000, 3000", "No correct answer")
    assert first.question.endswith("(E) No correct answer")
    problems, _ = read_problems("logicvista", shared_data() / "logicvista")
    assert (problems["logicvista-v1_5"].answer, problems["logicvista-v1_5"].answer_type) == ("B, D", "choice")


@pytest.mark.parametrize("rows", ["made", "real"])
def test_dapos_wrapper_is_removed_exactly(tmp_path, rows):
    # The validation file holds each problem a second time, bare.
    if rows == "made":
        bare_text = "Find the answer to the problem.\n\nRemember me?"
        row = dapo_row(DAPO_HEAD + bare_text + DAPO_TAIL, "1", 0, raw_problem=bare_text)
        table = write_parquet(tmp_path / "aime.parquet", [row])
    else:
        table = next((shared_data() / "dapo_math").glob("*.parquet"))
    bare = {row["raw_problem"].strip() for row in pq.read_table(table)["extra_info"].to_pylist()}
    problems, _ = read_problems("dapo", table)
    assert {p.question for p in problems.values()} == bare


# -- rows made in the published schemas ------------------------------------------------------------


def test_dapo_keeps_a_problem_once_and_drops_disputed_ones(tmp_path):
    rows = [("What is 1+1?", "2"), ("What is 2+2?", "4"), ("What is 1+1?", "2"), ("What is 2+2?", "5")]
    items = list(read_dapo(dapo_file(tmp_path / "train.parquet", rows)))
    kept = [item.problem for item in items if isinstance(item, UsableRow)]
    assert [(p.id, p.question, p.answer, p.test_only) for p in kept] == [("dapo-uuid-0", "What is 1+1?", "2", False)]
    assert Counter(item.reason for item in items if isinstance(item, DroppedRow)) == {
        "duplicate": 2,
        "gold_conflict": 1,
    }


def test_virl_rows_of_every_kind(tmp_path):
    outside = tmp_path / "secret.png"
    outside.write_bytes(plain_png())
    rows = [
        {"question": "<image>Find it", "image": ["images/a.png"], "PassRate_32BTrained": 0.25},
        {"question": "Find it", "image": ["images/a.png", "images/b.png"], "PassRate_32BTrained": -1.0},
        {"question": "text only", "source": "DeepScaleR"},
        {"question": "Pick.\n(A) one\n(B) two", "answer": r"\boxed{B}"},
        {"question": "<image><image> two for one", "image": ["images/a.png"]},
        {"question": "<image>", "image": ["images/none.png"]},
        {"question": "<image>", "image": ["../secret.png"]},
        {"question": "<image>", "image": [str(outside)]},
        {"question": "<image>", "image": ["images/link.png"]},
        {"question": "<image>", "image": ["images/\0.png"]},
        {"answer": None},
        {"answer": r"\boxed{ }"},
        {"answer": r"\boxed{\left\{1"},
        {"question": None},
    ]
    folder = write_virl(tmp_path / "virl", rows, {"a.png": plain_png(), "b.png": plain_png(colour="blue")})
    (folder / "images" / "link.png").symlink_to(outside)
    problems, dropped = read_problems("virl39k", folder)
    assert list(problems) == [f"Processed-{index}" for index in range(4)]
    first, second, third, fourth = problems.values()
    assert (first.difficulty, second.difficulty) == (0.25, -1.0)
    assert first.images == (plain_png(),)
    assert second.question == "<image><image>\nFind it"
    assert second.meta == {"markers_prepended": True}
    assert third.images == () and third.source == "virl39k/DeepScaleR"
    assert (fourth.answer_type, fourth.choices) == ("choice", ("one", "two"))
    assert dropped == {
        "marker_mismatch": 1,
        "image_missing": 2,
        "image_outside": 3,
        "answer_missing": 2,
        "gold_broken": 1,
        "question_missing": 1,
    }


def test_wrong_types_are_bad_rows_and_missing_columns_an_error(tmp_path):
    folder = write_virl(tmp_path / "virl", [{}], {})
    table = pq.read_table(folder / "39Krelease.parquet")
    numbers = table.set_column(table.schema.get_field_index("answer"), "answer", pa.array([7]))
    pq.write_table(numbers, folder / "39Krelease.parquet")
    assert read_problems("virl39k", folder)[1] == {"bad_type": 1}
    pq.write_table(table.drop_columns(["qid"]), folder / "39Krelease.parquet")
    with pytest.raises(UserError, match="no column 'qid'"):
        read_problems("virl39k", folder)
    (folder / "39Krelease.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_problems("virl39k", folder)


def test_a_broken_json_line_costs_that_line_only(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(plain_png())
    good = {"id": "1", "question": "How many?\n<image1>", "options": [], "answer": "2", "image": "images/1.jpg"}
    lines = [json.dumps(good), '{"id": "2", ', "[1, 2]", json.dumps({**good, "question": 3})]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    problems, dropped = read_problems("mathvision", tmp_path)
    assert list(problems) == ["mathvision-1"]
    assert dropped == {"bad_json": 1, "bad_type": 2}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("virl39k", "no 39Krelease.parquet"),
        ("mathvision", "no testmini.jsonl"),
        ("dynamath", r"no trial\*/dataset\.json"),
        ("wemath", "no testmini.json"),
        ("logicvista", "no dataset.json"),
        ("dapo", "no data/dapo-math-17k.parquet"),
    ],
)
def test_an_empty_folder_is_named_with_what_was_expected(source, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_problems(source, tmp_path)


# -- preparing -------------------------------------------------------------------------------------


BAD_ROWS = [
    {"question": "<image>ok", "image": ["images/a.png"]},
    {"question": "<image>cut", "image": ["images/cut.png"]},
    {"question": "<image>text", "image": ["images/text.png"]},
    {"question": "again", "qid": "Processed-0"},
    {"question": "say <|image_pad|> now"},
    {"question": "a missing marker", "image": ["images/a.png"]},
    {"answer": ""},
]
BAD_IMAGES = {"a.png": plain_png(), "cut.png": plain_png()[:-30], "text.png": b"only text"}


def test_lenient_counts_close(tmp_path):
    folder = write_virl(tmp_path / "virl", BAD_ROWS, BAD_IMAGES)
    report = prepare("virl39k", folder, tmp_path / "out")
    assert report.dropped == {"image_unreadable": 2, "duplicate_id": 1, "control_token": 1, "answer_missing": 1}
    assert report.rows_in == 7 == report.kept + sum(report.dropped.values())
    assert report.notes == {"images": 2, "images_resized": 2, "markers_prepended": 1}
    assert [row["id"] for row in rows_of(tmp_path / "out")] == ["Processed-0", "Processed-5"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    data = (tmp_path / "out" / "data.parquet").read_bytes()
    assert manifest["sha256"] == {"data.parquet": hashlib.sha256(data).hexdigest()}
    assert (manifest["rows_in"], manifest["kept"], manifest["dropped"]) == (7, 2, dict(report.dropped))


@pytest.mark.parametrize("bad", [1, 2, 3, 4, 6])  # 5, a missing marker, is fixed
def test_strict_stops_with_file_and_row_and_leaves_nothing(bad, tmp_path):
    rows = [BAD_ROWS[0], BAD_ROWS[bad]]
    folder = write_virl(tmp_path / "virl", rows, BAD_IMAGES)
    with pytest.raises(UserError, match=r"^39Krelease\.parquet row 1: "):
        prepare("virl39k", folder, tmp_path / "out", Options(strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["virl"]


def test_strict_accepts_a_known_property_of_the_data(tmp_path):
    file = dapo_file(tmp_path / "train.parquet", [("What is 1+1?", "2")] * 3)
    assert prepare("dapo", file, tmp_path / "out", Options(strict=True)).dropped == {"duplicate": 2}


def test_unusual_formats_and_several_pictures_in_a_row(tmp_path):
    (tmp_path / "sample.jpg").write_bytes(encoded(smooth_noise(300, 200), "JPEG"))
    folder = write_unusual_formats(tmp_path / "virl", tmp_path / "sample.jpg")
    report = prepare("virl39k", folder, tmp_path / "out", Options(strict=True, max_pixels=100_352))
    rows = rows_of(tmp_path / "out")
    assert report.kept == 6
    assert [len(row["images"]) for row in rows] == [1, 1, 1, 1, 1, 5]
    assert rows[5]["images"] == [row["images"][0] for row in rows[:5]]
    for row in rows:
        for stored in row["images"]:
            image = Image.open(io.BytesIO(stored["bytes"]))
            assert image.mode == "RGB"
            assert image.width % 28 == image.height % 28 == 0
            assert 3136 <= image.width * image.height <= 100_352


def test_prepared_sets_repeat_byte_for_byte_and_open_in_datasets(tmp_path):
    import datasets

    write_sample("mathvision", tmp_path / "raw")
    for name in ("a", "b"):
        prepare("mathvision", tmp_path / "raw", tmp_path / name, Options(limit=5))
    assert (tmp_path / "a/data.parquet").read_bytes() == (tmp_path / "b/data.parquet").read_bytes()
    table = datasets.Dataset.from_parquet(str(tmp_path / "a/data.parquet"), cache_dir=str(tmp_path / "cache"))
    assert isinstance(table, datasets.Dataset)
    assert len(table) == 5
    assert isinstance(table[0]["images"][0], Image.Image)
    assert json.loads(table[0]["meta"])["test_only"] is True
    assert json.loads((tmp_path / "a/manifest.json").read_text())["test_only"] is True


def test_text_rows_can_get_a_blank_picture(tmp_path):
    file = dapo_file(tmp_path / "train.parquet", [("What is 1+1?", "2")])
    prepare("dapo", file, tmp_path / "out", Options(text_image="blank"))
    (row,) = rows_of(tmp_path / "out")
    image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
    assert row["question"] == "<image>\nWhat is 1+1?"
    assert image.size == (56, 56)  # 3,136 pixels, the smallest picture allowed
    assert image.getextrema() == ((255, 255),) * 3


def test_golds_that_fail_the_grader_are_dropped_from_training_and_flagged_in_tests(tmp_path):
    folder = write_virl(tmp_path / "virl", [{}, {"answer": r"\boxed{2}"}], {})
    report = prepare("virl39k", folder, tmp_path / "train", gold_check=lambda problem: problem.answer != "2")
    assert (report.kept, report.dropped) == (1, {"gold_unverified": 1})
    count = write_sample("dapo", tmp_path / "raw")
    report = prepare("dapo", tmp_path / "raw", tmp_path / "test", gold_check=lambda problem: False)
    assert (report.kept, report.notes["gold_unverified"]) == (count, count)
    assert json.loads(rows_of(tmp_path / "test")[0]["meta"])["gold_unverified"] is True


def test_tiny_pictures_of_benchmarks_are_scaled_up_and_of_training_sets_dropped(tmp_path):
    images = {"small.png": plain_png(10, 20)}
    rows = [{"question": "<image>", "image": ["images/small.png"]}, {}]
    folder = write_virl(tmp_path / "virl", rows, images)
    assert prepare("virl39k", folder, tmp_path / "a").dropped == {"image_unreadable": 1}
    row = {"imagename": "small.png", "question": "Which?", "answer": "A", "skill": ["spatial"]}
    (folder / "dataset.json").write_text(json.dumps({"v1_0": row}))
    assert prepare("logicvista", folder, tmp_path / "b").kept == 1


def test_mistakes_of_the_caller(tmp_path):
    folder = write_virl(tmp_path / "virl", [{}], {})
    with pytest.raises(UserError, match="no data source 'virl'"):
        prepare("virl", folder, tmp_path / "out")
    with pytest.raises(UserError, match="does not exist"):
        prepare("virl39k", tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="min_pixels 10"):
        prepare("virl39k", folder, tmp_path / "out", Options(min_pixels=10))
    with pytest.raises(UserError, match="already exists"):
        prepare("virl39k", folder, folder)
    empty = write_virl(tmp_path / "empty", [{"answer": ""}], {})
    wrong = tmp_path / "wrong"
    (wrong / "virl").mkdir(parents=True)
    for options, message in (
        (Options(patch_size=0), "--patch-size 0"),
        (Options(against=(empty,)), "--against .*not a prepared set"),
    ):
        with pytest.raises(UserError, match=message):
            prepare("virl39k", empty, tmp_path / "out", options)
    with pytest.raises(UserError, match="--workers 0"):
        prepare("virl39k", folder, tmp_path / "out", workers=0)
    with pytest.raises(UserError, match=r"no 39Krelease\.parquet there, only virl/; docs/data\.md"):
        prepare("virl39k", wrong, tmp_path / "out")
    with pytest.raises(UserError, match=r"no row is left to write; .*parquet row 0: the answer is missing"):
        prepare("virl39k", empty, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare("virl39k", folder, tmp_path / "file" / "out")
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_write_problems_keeps_every_field(tmp_path):
    problem = Problem(
        id="p", question="<image> é", images=(plain_png(),), answer="B", answer_type="choice", choices=("x", "y"),
        source="s", category="c", difficulty=0.5, meta={"unit": "cm"},
    )  # fmt: skip
    write_problems([problem] * 130, tmp_path / "set", {"source": "made"})
    rows = rows_of(tmp_path / "set")
    assert len(rows) == 130  # more than one row group
    assert rows[129] == to_row(problem)
    assert rows[0]["images"] == [{"bytes": plain_png(), "path": None}]
    assert json.loads((tmp_path / "set" / "manifest.json").read_text())["source"] == "made"
