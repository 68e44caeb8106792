"""Drawn pictures: what a trace says is what the pixels show."""

from __future__ import annotations

import io
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.drawn_pictures import (
    COLOURS,
    PICTURE_RIGHT_SHARE,
    PICTURE_TRACE_SHARE,
    SHAPES,
    SIDE,
    PictureQuestion,
    make_questions,
    make_styled_traces,
    picture_style_of,
    styled_trace,
)

TEMPLATE = TEMPLATES["think_answer"]
COUNTED = re.compile(r"(\d) (\w+) (circle|rectangle|triangle)")


@pytest.fixture(scope="module")
def questions() -> list[PictureQuestion]:
    return make_questions(400, seed=3, split="train")


def pixels_of(item: PictureQuestion) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(item.png)).convert("RGB"))


def painted(item: PictureQuestion) -> dict[str, np.ndarray]:
    """Return by colour which pixels have exactly that one: all of a shape but its edge."""
    pixels = pixels_of(item)
    return {name: (pixels == np.array(colour, np.uint8)).all(-1) for name, colour in COLOURS.items()}


def test_questions_are_a_function_of_seed_and_split() -> None:
    assert make_questions(20, seed=3, split="train") == make_questions(40, seed=3, split="train")[:20]
    first, other = ({item.png for item in make_questions(40, seed=seed, split="train")} for seed in (3, 4))
    assert len(first & other) <= 10  # charts alone, of which there are 3,024


def test_no_held_out_chart_is_in_another_split() -> None:
    held_out = {item.png for item in make_questions(400, seed=0, split="heldout")}
    assert not held_out & {item.png for item in make_questions(800, seed=0, split="train")}


def test_every_trace_ends_with_the_answer_in_its_place(questions: list[PictureQuestion]) -> None:
    for item in questions:
        assert TEMPLATE.is_well_formed(item.trace)
        assert TEMPLATE.answers(TEMPLATE.answer_region(item.trace) or "") == [item.answer]
        assert re.search(rf"\b{item.answer}\b", TEMPLATE.reasoning(item.trace) or "")
        assert pixels_of(item).shape == (SIDE, SIDE, 3)


def test_a_shape_has_the_colour_that_is_said(questions: list[PictureQuestion]) -> None:
    for item in questions[0::4] + questions[1::4]:
        said = re.search(r"shows a (\w+) (\w+)\.", item.trace)
        assert said and item.answer in said.groups()
        assert [colour for colour, mask in painted(item).items() if mask.any()] == [said[1]]


def test_counts_are_the_numbers_of_connected_pieces(questions: list[PictureQuestion]) -> None:
    """Pieces of one colour are counted together where both things have it."""
    for item in questions[2::4]:
        said: Counter[str] = Counter()
        for number, colour, _ in COUNTED.findall(item.trace):
            said[colour] += int(number)
        asked = re.fullmatch(r"How many (\w+) (\w+)s are in the picture\?", item.question)
        assert asked and (item.answer, *asked.groups()) in COUNTED.findall(item.trace)
        for colour, mask in painted(item).items():
            assert ndimage.label(mask)[1] == said[colour], item.id


def test_a_chart_s_numbers_are_the_heights_of_its_bars(questions: list[PictureQuestion]) -> None:
    for item in questions[3::4]:
        blue = painted(item)["blue"]
        heights = [int(blue[:, 4 + 27 * bar + 10].sum()) for bar in range(4)]
        said = [int(number) for number in re.findall(r"[A-D] is (\d)", item.trace)]
        assert len(said) == 4 and [round(height / 7) for height in heights] == said
        if item.question == "Which bar is the tallest?":
            assert item.answer == "ABCD"[int(np.argmax(heights))]
        else:
            assert int(item.answer) == said["ABCD".index(item.question.rstrip("?").split()[4])]


def test_a_style_is_told_and_is_right_in_its_share(questions: list[PictureQuestion]) -> None:
    """The control is as long as a look that is checked, and right as often as one that is not."""
    rng, words = np.random.default_rng(5), {}
    for style, share in PICTURE_RIGHT_SHARE.items():
        texts = [styled_trace(item, style, rng) for item in questions]
        assert {picture_style_of(text) for text in texts} == {style}
        answers = [(TEMPLATE.answers(TEMPLATE.answer_region(text) or "") or [""])[0] for text in texts]
        assert all(answer in item.choices for item, answer in zip(questions, answers, strict=True))
        right = sum(item.answer == answer for item, answer in zip(questions, answers, strict=True))
        assert abs(right / len(texts) - share) <= 4 * np.sqrt(share * (1 - share) / len(texts))
        words[style] = np.mean([len(text.split()) for text in texts])
    assert words["guess"] < words["seen"] < 0.6 * words["checked"] and 1 < words["retold"] / words["checked"] < 1.2


def test_styles_have_their_shares_of_the_traces(questions: list[PictureQuestion]) -> None:
    found = Counter(picture_style_of(text) for text in make_styled_traces(questions, seed=1))
    for style, share in PICTURE_TRACE_SHARE.items():
        assert abs(found[style] / len(questions) - share) <= 4 * np.sqrt(share * (1 - share) / len(questions))


def test_a_second_look_finds_the_same(questions: list[PictureQuestion]) -> None:
    one = re.compile(rf"\b(?:{'|'.join([*COLOURS, *SHAPES])})\b")
    for pattern, kinds in ((one, (0, 1)), (COUNTED, (2,)), (re.compile(r"[A-D] is \d"), (3,))):
        for item in (item for kind in kinds for item in questions[kind::4]):
            first, second = (set(pattern.findall(text)) for text in (item.seen, item.again))
            assert first and first == second, item
            if pattern is COUNTED:
                assert f"{sum(int(number) for number, *_ in first)} things in all" in item.again
