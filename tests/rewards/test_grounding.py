"""Boxes and points: identities of IoU, hand-computed rewards, what is read of a response, and prepared gold boxes."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.images import plain_png
from vlm_rl.config import GroundingConfig, IouConfig, RewardConfig
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.rewards.coordinates import Box, read_boxes, read_point
from vlm_rl.rewards.grounding import COORDINATES, GroundingReward, gold_boxes, iou, is_inside, matched_overlap
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt, Rollout

corner = st.integers(0, 1000)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    x1, y1 = draw(corner), draw(corner)
    return Box(x1, y1, x1 + draw(st.integers(1, 1000)), y1 + draw(st.integers(1, 1000)))


def scaled(box: Box, x: float, y: float) -> Box:
    return Box(box.x1 * x, box.y1 * y, box.x2 * x, box.y2 * y)


# -- the overlap --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(boxes(), boxes())
def test_iou_is_symmetric_and_1_only_with_itself(a: Box, b: Box) -> None:
    assert 0 <= iou(a, b) == iou(b, a) <= 1
    assert iou(a, a) == 1
    assert (iou(a, b) == 1) == (a == b)


@settings(max_examples=40)
@given(boxes(), boxes(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 8, 16]))
def test_iou_is_unchanged_by_scaling_each_axis_and_by_moving(a: Box, b: Box, x: int, y: int) -> None:
    assert iou(scaled(a, x, y), scaled(b, x, y)) == iou(a, b)  # powers of two: exact
    moved = [Box(box.x1 + x, box.y1 + y, box.x2 + x, box.y2 + y) for box in (a, b)]
    assert iou(*moved) == iou(a, b)


@settings(max_examples=40)
@given(boxes(), boxes())
def test_boxes_side_by_side_share_nothing(a: Box, b: Box) -> None:
    beside = Box(a.x2, b.y1, a.x2 + (b.x2 - b.x1), b.y2)  # they touch at most
    assert iou(a, beside) == 0


@settings(max_examples=40)
@given(boxes(), boxes())
def test_iou_counts_cells(a: Box, b: Box) -> None:
    """Against the shares of each axis: a cell is in a box where its row and its column are."""
    shared = [len(range(max(a[i], b[i]), min(a[i + 2], b[i + 2]))) for i in (0, 1)]  # type: ignore[arg-type]
    common = shared[0] * shared[1]
    assert iou(a, b) == pytest.approx(common / (a.area + b.area - common), rel=1e-15)


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [
        (Box(0, 0, 2, 2), Box(1, 0, 3, 2), 1 / 3),  # 2 shared of 6
        (Box(0, 0, 4, 4), Box(1, 1, 3, 3), 1 / 4),  # inside: 4 of 16
        (Box(0, 0, 2, 2), Box(1, 1, 3, 3), 1 / 7),  # 1 of 7
        (Box(2, 2, 0, 0), Box(0, 0, 2, 2), 0),  # corners exchanged: no area
        (Box(1, 1, 1, 5), Box(0, 0, 2, 6), 0),
    ],
)
def test_iou_by_hand(a: Box, b: Box, share: float) -> None:
    assert iou(a, b) == share


@settings(max_examples=40)
@given(boxes(), corner, corner)
def test_a_point_is_inside_if_a_box_around_it_is_covered(box: Box, x: int, y: int) -> None:
    assert is_inside((x, y), box) == (max(box.x1, x) == x == min(box.x2, x) and max(box.y1, y) == y == min(box.y2, y))


A, B, C = Box(0, 0, 10, 10), Box(20, 0, 30, 10), Box(5, 0, 15, 10)  # C shares a third with A


@pytest.mark.parametrize(
    ("given", "golds", "share"),
    [
        ([A], [A], 1),
        ([C], [A], 1 / 3),
        ([], [A], 0),
        ([A, B], [A], 0),  # a response that hedges
        ([A, B], [A, B], 1),
        ([B, A], [A, B], 1),
        ([A], [A, B], 1 / 2),
        ([A, B, C], [A, B], 2 / 3),
        ([C, A], [A, B], 1 / 2),  # A is A's, and C shares nothing with B
        ([C, C], [A, C], (1 + 1 / 3) / 2),
    ],
)
def test_several_boxes_are_matched(given: list[Box], golds: list[Box], share: float) -> None:
    assert matched_overlap(given, golds) == pytest.approx(share, rel=1e-12)


@settings(max_examples=30)
@given(st.lists(boxes(), max_size=4), st.lists(boxes(), min_size=2, max_size=4))
def test_the_matching_is_the_best_of_all(given: list[Box], golds: list[Box]) -> None:
    few, many = sorted((given, golds), key=len)
    best = max(sum(map(iou, few, chosen)) for chosen in itertools.permutations(many, len(few)))
    assert matched_overlap(given, golds) == pytest.approx(best / len(many), rel=1e-9)


# -- reading a response -------------------------------------------------------------------------------


ONE = [Box(1, 2, 3, 4)]
TWO = [Box(1, 2, 3, 4), Box(5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ('```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]\n```', ONE),
        ("{'bbox_2d': [1.5,2,3,4]}", [Box(1.5, 2, 3, 4)]),
        ('{"bbox": [ 1 , 2,\n3, 4 ]}', ONE),
        ('{"box": [1, 2, 3, 4]}', ONE),
        ('{"Bounding_Box": [[1, 2], [3, 4]]}', ONE),
        ("the box [1, 2, 3, 4].", ONE),
        ("(1,2),(3,4)", ONE),  # Qwen2-VL's, whose special tokens are not decoded
        ("[1, 2], [3, 4]", ONE),
        ("[[1, 2], [3, 4]]", ONE),
        ("(1, 2, 3, 4)", ONE),
        ("[1 2 3 4]", ONE),
        ("[1;2;3;4]", ONE),
        (r"\boxed{[1, 2, 3, 4]}", ONE),
        (r"\boxed{1, 2, 3, 4}", ONE),
        (r"\boxed{1 2 3 4}", ONE),
        (r"$\left[1, 2, 3, 4\right]$", ONE),
        (r"$\left(1, 2\right), \left(3, 4\right)$", ONE),
        ('{"x1": 1, "y1": 2, "x2": 3, "y2": 4}', ONE),
        ('{"y2": "4", "x2": "3", "y1": "2", "x1": "1"}', ONE),
        ("x1=1, y1=2, x2=3, y2=4", ONE),
        ('{"x_min": 1, "y_min": 2, "x_max": 3, "y_max": 4}', ONE),
        ('{"xmin": 1, "ymin": 2, "xmax": 3, "ymax": 4}', ONE),
        ("left: 1, top: 2, right: 3, bottom: 4", ONE),
        ('{"x": 1, "y": 2, "width": 2, "height": 2}', ONE),
        ('{"left": 1, "top": 2, "w": 2, "h": 2}', []),  # half of two vocabularies
        ('[{"x1": 1, "y1": 2, "x2": 3, "y2": 4}, {"x1": 5, "y1": 6, "x2": 7, "y2": 8}]', TWO),
        ('{"bbox_2d": [1, 2, 3, 4], "size": [9, 9, 9, 9]}', ONE),
        ('{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [1, 2, 3, 4]}', ONE),  # the same twice
        ('{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6, 7, 8]}', TWO),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", TWO),
        ("[1, 2, 3, 4] or [1, 2, 3, 5]", [Box(1, 2, 3, 4), Box(1, 2, 3, 5)]),
        ('{"bbox_2d": [-1, 2, 3, 4]}', [Box(-1, 2, 3, 4)]),
        ('{"bbox_2d": [1, 2, 3]}', []),
        ('{"bbox_2d": [1, 2, 3, 4, 5]}', []),
        ("[[1, 2, 3], [4, 5, 6]]", []),
        ('{"bbox_2d": ["1", null, 3, 4]}', []),
        ('{"bbox_2d": [1e9, 2, 3, 4]}', []),
        ('{"bbox_2d": [99999999999, 2, 3, 4]}', []),
        ("1 2 3 4", []),
        ("1, 2, 3, 4", ONE),
        ("about 1, 2, 3, 4", []),
        ("1, 2, 3, 4, 5", []),
        (r"\boxed{1,\,2,\,3,\,4}", ONE),
        (r"\boxed{\{1,2,3,4\}}", ONE),
        (r"\[1,2,3,4\]", ONE),
        ("（1，2，3，4）", ONE),
        ("[\u22121, 2, 3, 4]", [Box(-1, 2, 3, 4)]),
        ("The box is from (1, 2) to (3, 4).", ONE),
        ("(1,2)-(3,4)", ONE),
        ("[1,2] and [3,4]", ONE),
        ("(1,2) or (3,4)", []),
        ("top-left (1,2), bottom-right (3,4)", ONE),
        ("top-left: (1, 2); bottom-right: (3, 4)", ONE),
        ("The top left corner is (1, 2) and the bottom right corner is (3, 4).", ONE),
        ("upper-left [1,2], lower-right [3,4]", ONE),
        ('{"top_left": [1, 2], "bottom_right": [3, 4]}', ONE),
        ("左上角(1,2)，右下角(3,4)", ONE),
        ("左上角：(1,2)，右下角：(3,4)", ONE),
        ("(1,2) (top-left), (3,4) (bottom-right)", ONE),
        ("(1,2) top-left and (3,4) bottom-right", ONE),
        ("bottom-right (3,4), top-left (1,2)", ONE),
        ("top-right (3,2), bottom-left (1,4)", ONE),
        ("<bbox>1,2,3,4</bbox>", ONE),
        ("<box>1, 2, 3, 4</box>", ONE),
        ("<bbox>[1,2,3,4]</bbox>", ONE),
        ("<box>(1,2),(3,4)</box>", ONE),
        ("<box>[[1,2,3,4]]</box>", ONE),
        ("<bbox>1 2 3 4</bbox>", ONE),
        ("<bbox_2d>1,2,3,4</bbox_2d>", ONE),
        ('{"x0":1,"y0":2,"x1":3,"y1":4}', ONE),
        ("x0=1,y0=2,x1=3,y1=4", ONE),
        ("xmin=1, ymin=2, xmax=3, ymax=4", ONE),
        ("xmin: 1, xmax: 3, ymin: 2, ymax: 4", ONE),
        ('{"bbox_2d": [+1, 2, 3, 4]}', ONE),
        ("[+1,2,3,4]", ONE),
        ("[1px,2px,3px,4px]", ONE),
        ("[1 px, 2 px, 3 px, 4 px]", ONE),
        ("(1px, 2px), (3px, 4px)", ONE),
        ('["1","2","3","4"]', ONE),
        ("[3,4,1,2]", ONE),
        ("[3,2,1,4]", ONE),
        ("(3,4),(1,2)", ONE),
        ("x1=3,y1=4,x2=1,y2=2", ONE),
        ("1px, 2px, 3px, 4px", ONE),
        ("+1, +2, 3, 4", ONE),
        ("top-left (1,2) to bottom-right (3,4)", ONE),
        ("from top-left (1,2) to the bottom-right corner (3,4)", ONE),
        ("Top-Left: [1, 2], Bottom-Right: [3, 4]", ONE),
        ("**Top-left:** (1,2), **Bottom-right:** (3,4)", ONE),
        ("(x1, y1) = (1, 2), (x2, y2) = (3, 4)", ONE),
        ("x: 1, y: 2, w: 2, h: 2", ONE),
        ("x_0=1, y_0=2, x_1=3, y_1=4", ONE),
        ("[1.0, 2.0, 3.0, 4.0]", ONE),
        ("[.25, .5, .75, 1]", [Box(0.25, 0.5, 0.75, 1)]),
        ("[x1=1, y1=2, x2=3, y2=4]", ONE),
        ("[x1: 1, y1: 2, x2: 3, y2: 4]", ONE),
        ("top-left corner: (1,2)\nbottom-right corner: (3,4)", ONE),
        ("x: 1, y: 2, w: -2, h: 2", []),
        ("[1%,2%,3%,4%]", []),
        ("[1cm,2,3,4]", []),
        ("[1,2,3px]", []),
        ("1px 2px 3px 4px", []),
        ("<bbox>1,2,3</bbox>", []),
        ("size 1,2,3,4", []),
        ("[1,2,3,4,5]", []),
        ("[--1,2,3,4]", []),
        ("none", []),
        ("", []),
    ],
)
def test_the_boxes_of_a_text_are_read(text: str, boxes: list[Box]) -> None:
    assert read_boxes(text) == boxes


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ('{"point_2d": [1, 2], "label": "x"}', (1, 2)),
        ("(3.5, 4)", (3.5, 4)),
        (r"\boxed{[3, 4]}", (3, 4)),
        ('{"point_2d": [1, 2]} {"point_2d": [2, 2]}', None),
        ("[1, 2, 3, 4]", None),
        ("3, 4", None),
    ],
)
def test_the_only_point_of_a_text_is_read(text: str, point: tuple[float, float] | None) -> None:
    assert read_point(text) == point


@settings(max_examples=40)
@given(st.text(alphabet='[]()(){}",:. -0123456789bobx_2dpoint\n', max_size=300))
def test_any_text_is_read_without_an_error(text: str) -> None:
    boxes, point = read_boxes(text), read_point(text)
    assert len({*boxes}) == len(boxes) and all(len(box) == 4 for box in boxes)
    assert point is None or len(point) == 2


# -- the rewards --------------------------------------------------------------------------------------

# The gold covers the left upper quarter of the image.
PROBLEM = Problem("p", "<image>\nwhere?", (b"",), "[0, 0, 50, 50]", "list", meta={"box": [0.0, 0.0, 0.5, 0.5]})
SIZE = (280, 140)  # as the model saw it
REWARDS = {  # by hand
    # Qwen2.5-VL writes pixels of that size: the gold is [0, 0, 140, 70]
    ("qwen2_5_vl", "[0, 0, 140, 70]"): 1.0,
    ("qwen2_5_vl", "[0, 0, 70, 70]"): 0.5,
    ("qwen2_5_vl", "[0, 0, 500, 500]"): 70 * 140 / 500 / 500,
    # Qwen3-VL and Qwen2-VL write thousandths of it: the gold is [0, 0, 500, 500]
    ("qwen3_vl", "[0, 0, 500, 500]"): 1.0,
    ("qwen2_vl", "[0, 0, 500, 1000]"): 0.5,
    ("qwen3_vl", "[0, 0, 140, 70]"): 140 * 70 / 500 / 500,
    ("qwen3_vl", "nowhere"): 0.0,
}


@pytest.mark.parametrize(("model_type", "answer"), REWARDS)
def test_the_iou_of_each_family(model_type: str, answer: str) -> None:
    template = TEMPLATES["think_answer"]
    text = template.wrap("[9, 9, 9, 9] or so", answer)  # the reasoning does not count
    reward = GroundingReward("iou", IouConfig(), template=template, model_type=model_type)
    value = reward.outcome(PROBLEM, text, SIZE)
    assert value == pytest.approx(REWARDS[model_type, answer], rel=1e-12)
    strict = GroundingReward("iou", IouConfig(threshold=0.5), template=template, model_type=model_type)
    assert strict.outcome(PROBLEM, text, SIZE) == float(REWARDS[model_type, answer] >= 0.5)


@pytest.mark.parametrize(
    ("model_type", "point", "value"),
    [("qwen2_5_vl", "[140, 70]", 1), ("qwen2_5_vl", "[141, 70]", 0), ("qwen3_vl", "[500, 499]", 1),
     ("qwen3_vl", "[501, 0]", 0), ("qwen3_vl", "here", 0)],
)  # fmt: skip
def test_the_point_of_each_family(model_type: str, point: str, value: float) -> None:
    reward = GroundingReward("point_in_box", GroundingConfig(), template=TEMPLATES["plain"], model_type=model_type)
    assert reward.outcome(PROBLEM, rf'{{"point_2d": {point}}}', SIZE) == value


def test_a_problem_with_several_gold_boxes_asks_for_all() -> None:
    problem = replace(PROBLEM, meta={"box": [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]]})
    reward = GroundingReward("iou", IouConfig(), template=TEMPLATES["plain"], model_type="qwen3_vl")
    assert reward.outcome(problem, "[[500, 500, 1000, 1000], [0, 0, 500, 500]]", SIZE) == 1
    assert reward.outcome(problem, "[0, 0, 500, 500]", SIZE) == 1 / 2
    point = GroundingReward("point_in_box", GroundingConfig(), template=TEMPLATES["plain"], model_type="qwen3_vl")
    assert [point.outcome(problem, f"[{x}, {x}]", SIZE) for x in (100, 900)] == [1, 1]
    assert point.outcome(problem, "[100, 900]", SIZE) == 0


def test_a_problem_without_a_box_is_not_asked_for_one() -> None:
    reward = GroundingReward("iou", IouConfig(), template=TEMPLATES["plain"], model_type="qwen2_vl")
    assert reward.outcome(Problem("p", "?", (), "5", "integer"), "[1, 2, 3, 4]", SIZE) is None


def test_a_family_whose_coordinates_are_not_known_has_to_be_told() -> None:
    with pytest.raises(UserError, match=r"reward\.iou\.coordinates is auto.*'paligemma'.*pixels.*thousandths"):
        GroundingReward("iou", IouConfig(), template=TEMPLATES["plain"], model_type="paligemma")
    told = GroundingReward(
        "iou", IouConfig(coordinates="thousandths"), template=TEMPLATES["plain"], model_type="paligemma"
    )
    assert told.outcome(PROBLEM, "[0, 0, 500, 500]", SIZE) == 1


def test_every_vision_family_of_qwen_has_coordinates() -> None:
    """Of the other families no source says what they write: there the setting has to."""
    assert {name for name in SUPPORTED if re.match(r"qwen.*vl", name)} == COORDINATES.keys()


def test_boxes_decide_accuracy_where_asked_and_only_there() -> None:
    """The grader compares texts and calls neither right; the problem without a box stays the grader's."""
    plain = Problem("q", "?", (), "5", "integer")
    empty = np.zeros(0, dtype=np.int32)
    prompts = [
        Prompt("p", "", "", empty, empty, (Image.new("RGB", SIZE),), {}),
        Prompt("q", "", "", empty, empty, (), {}),
    ]
    texts = ['{"bbox_2d": [0, 0, 140, 60]}', '{"bbox_2d": [0, 0, 60, 60]}', r"\boxed{5}"]
    items = [
        (problem, prompt, Rollout("p", 0, empty, empty, text, "stop", 0))
        for problem, prompt, text in zip([PROBLEM, PROBLEM, plain], [prompts[0], *prompts], texts, strict=True)
    ]
    sections = {"iou": IouConfig(role="accuracy"), "point_in_box": GroundingConfig(weight=2.0)}
    config = RewardConfig(overlong_buffer=0, format=0.0, undecided="drop", **sections)
    with Grader(workers=1) as grader:
        reward = RewardFunction(
            config, template=TEMPLATES["plain"], max_tokens=8, grader=grader, model_type="qwen2_5_vl"
        )
        got = reward.score(items)
        reward.check_golds([plain, PROBLEM])
        with pytest.raises(UserError, match=r"reward\.iou is on, but no problem of data\.train has a gold box"):
            reward.check_golds([plain])
    # 140 x 60 of 140 x 70; 60 x 60 of 140 x 70; no point is given
    assert [reward.logged["iou"] for reward in got[:2]] == pytest.approx([6 / 7, 3600 / 9800])
    assert [reward.parts["accuracy"] for reward in got] == [1, 0, 1]
    assert [reward.total for reward in got] == [1, 0, 1] and not any(reward.dropped for reward in got)
    assert got[2].grade.path == "text" and np.isnan(got[2].logged["iou"])


# -- gold boxes of a prepared set -----------------------------------------------------------------------

ROWS = [
    {"q": "where is a?", "b": [10, 20, 60, 40], "i": "wide.png"},
    {"q": "where is b?", "b": [0, 0, 100.4, 50], "i": "wide.png"},  # annotators round
    {"q": "where is c?", "b": [60, 20, 10, 40], "i": "wide.png"},
    {"q": "where is d?", "b": [10, 20, 160, 40], "i": "wide.png"},
    {"q": "where is e?", "b": [10, 20, 60], "i": "wide.png"},
    {"q": "where is f?", "b": [10, 20, 60, 40], "i": None},
    {"q": "where is g?", "b": "left", "i": "wide.png"},
    {"q": "where is h?", "b": [100.2, 20, 100.6, 40], "i": "wide.png"},
]


def prepared(folder: Path, rows: list[dict[str, Any]], **tree: Any) -> list[Problem]:
    (folder / "wide.png").write_bytes(plain_png(100, 50))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"question": "q", "box": "b", "images": "i"}
    mapping = {"path": "rows.jsonl", "source": "mine", "columns": columns, **tree}
    (folder / "set.yaml").write_text(json.dumps(mapping))
    prepare("generic", folder / "set.yaml", folder / "out", Options())
    return load_set(folder / "out")


def test_gold_boxes_become_fractions_of_the_image(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, ROWS)
    assert first.answer == "[10, 20, 60, 40]"
    assert first.meta == {"box": [0.1, 0.4, 0.6, 0.8], "markers_prepended": True}
    assert second.meta["box"] == [0, 0, 1, 1]
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in dropped] == ["bad_box"] * 6


@pytest.mark.parametrize(
    ("unit", "box"),
    [("pixels", [10, 20, 50, 20]), ("thousandths", [100, 400, 500, 400]), ("fractions", [0.1, 0.4, 0.5, 0.4])],
)
def test_other_units_and_sizes_give_the_same_box(tmp_path: Path, unit: str, box: list[float]) -> None:
    row = {"q": "where is a?", "b": box, "i": "wide.png", "name": "a cat"}
    columns = {"question": "q", "answer": "name", "box": "b", "images": "i"}
    (problem,) = prepared(tmp_path, [row], columns=columns, box_format="xywh", box_unit=unit)
    assert problem.meta["box"] == pytest.approx([0.1, 0.4, 0.6, 0.8], rel=1e-12)
    assert problem.answer == "a cat"


@pytest.mark.parametrize(
    "stored",
    [[[10, 20, 60, 40], [0, 0, 50, 25]], "[[10, 20, 60, 40], [0, 0, 50, 25]]", "[(10,20,60,40),(0,0,50,25)]"],
)
def test_several_gold_boxes_of_a_row_are_kept(tmp_path: Path, stored: Any) -> None:
    rows = [
        {"q": "where are they?", "b": stored, "i": "wide.png"},
        {"q": "where?", "b": [[1, 2, 3]], "i": "wide.png"},
    ]
    (problem,) = prepared(tmp_path, rows)
    assert problem.meta["box"] == [[0.1, 0.4, 0.6, 0.8], [0, 0, 0.5, 0.5]]
    assert problem.answer == "[[10, 20, 60, 40], [0, 0, 50, 25]]"
    assert len(gold_boxes(problem)) == 2


@pytest.mark.parametrize("stored", ["[10, 20, 60, 40]", [[10, 20, 60, 40]], [[10, 20, 60, 40], [10, 20, 60, 40]]])
def test_one_gold_box_is_one_however_it_is_stored(tmp_path: Path, stored: Any) -> None:
    (problem,) = prepared(tmp_path, [{"q": "where is it?", "b": stored, "i": "wide.png"}])
    assert problem.meta["box"] == [0.1, 0.4, 0.6, 0.8] and problem.answer == "[10, 20, 60, 40]"


def test_a_set_without_answer_and_box_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set\.yaml.*columns: answer is missing.*box"):
        prepared(tmp_path, ROWS, columns={"question": "q"})
