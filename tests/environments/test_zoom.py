"""The tool zoom: which part of which image it shows, and what it answers to calls that cannot be followed."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlm_rl.environments.calls import ToolCallError, read_call, written
from vlm_rl.environments.environment import Done, EnvironmentSetup, Observation
from vlm_rl.environments.zoom import OPTIONS, Zoom
from vlm_rl.errors import UserError
from vlm_rl.types import Problem

WIDTH, HEIGHT = 200, 100  # of the stored image; the prompt shows it at half that


def stored() -> bytes:
    """Return an image whose red is its x and whose green its y."""
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=2)).save(buffer, "PNG")
    return buffer.getvalue()


PROBLEM = Problem("p", "<image>Where?", (stored(),), "3", "integer")


def zoom(form: str = "tool_call", model_type: str = "qwen2_5_vl", *, max_turns: int = 9, **options: Any) -> Zoom:
    setup = EnvironmentSetup(
        options,
        calls=form,
        model_type=model_type,
        workers=1,
        timeout=30.0,
        max_turns=max_turns,
        grade=lambda *_: False,
        shown=lambda _: [(WIDTH // 2, HEIGHT // 2)],
    )
    setup.check_options(OPTIONS)
    opened = Zoom(setup)
    asyncio.run(opened.reset(PROBLEM, 0))
    return opened


def step(opened: Zoom, text: str) -> Observation | Done:
    return asyncio.run(opened.step(text))


def ask(opened: Zoom, box: Any, **more: Any) -> Observation:
    answer = step(opened, written("image_zoom_in_tool", {"bbox_2d": box, **more}, "tool_call"))
    assert isinstance(answer, Observation)
    return answer


def corners(answer: Observation) -> tuple[int, int, int, int]:
    """Return which pixels of the stored image an answer shows."""
    pixels = np.asarray(Image.open(io.BytesIO(answer.images[0])))
    x1, y1 = pixels[0, 0, :2].tolist()
    x2, y2 = pixels[-1, -1, :2].tolist()
    assert pixels.shape == (y2 - y1 + 1, x2 - x1 + 1, 3)
    return x1, y1, x2 + 1, y2 + 1


@pytest.mark.parametrize(
    ("box", "shown"),
    [
        ([10, 5, 50, 45], (20, 10, 100, 90)),  # twice the prompt's pixels
        ([50, 45, 10, 5], (20, 10, 100, 90)),  # corners in any order
        ([60, 10, 900, 45], (120, 20, 200, 90)),  # cut at the edge
        ([50, 25, 52, 25], (74, 22, 130, 78)),  # grown to 28 pixels around its middle, 51 and 25
        ([0, 0, 2, 2], (0, 0, 56, 56)),  # the same at a corner
        ([99, 49, 100, 50], (144, 44, 200, 100)),
    ],
)
def test_the_box_is_cut_out_of_the_stored_image(box: list[float], shown: tuple[int, ...]) -> None:
    assert corners(ask(zoom(), box)) == shown


def test_other_families_give_thousandths() -> None:
    assert corners(ask(zoom(model_type="qwen3_vl"), [100, 100, 500, 900])) == (20, 10, 100, 90)


@given(st.lists(st.floats(-500, 500), min_size=4, max_size=4))
def test_no_box_leads_out_of_the_image(box: list[float]) -> None:
    answer = ask(zoom(), box)
    if answer.error:
        assert "outside" in answer.error
        return
    x1, y1, x2, y2 = corners(answer)
    assert 0 <= x1 < x2 <= WIDTH
    assert 0 <= y1 < y2 <= HEIGHT
    assert x2 - x1 >= 56
    assert y2 - y1 >= 56


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{</tool_call>", "no JSON"),
        ("<tool_call>" + "[" * 90_000 + "</tool_call>", "no JSON"),
        ("<tool_call>" + "1" * 200_000 + "</tool_call>", "characters"),
        ("<tool_call>" + "1" * 9_000 + "</tool_call>", "no JSON"),
        ('<tool_call>{"name": "image_zoom_in_tool"}', "no end"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "no tool 'rm'"),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"name": "image_zoom_in_tool", "arguments": [1]}</tool_call>', "object"),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", "2 calls"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_turn(text: str, told: str) -> None:
    answer = step(zoom(), text)
    assert isinstance(answer, Observation)
    assert told in answer.error
    assert answer.text == f"Error: {answer.error}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "four numbers"),
        ({"bbox_2d": [1, 2, 3]}, "four numbers"),
        ({"bbox_2d": "1,2,3,4"}, "four numbers"),
        ({"bbox_2d": [1, 2, 3, "4"]}, "four finite"),
        ({"bbox_2d": [1, 2, 3, True]}, "four finite"),
        ({"bbox_2d": [1, 2, 3, float("nan")]}, "four finite"),
        ({"bbox_2d": [1, 2, 3, float("inf")]}, "four finite"),
        ({"bbox_2d": [1, 2, 3, 10**400]}, "four finite"),
        ({"bbox_2d": [1, 2, 3, 4], "img_idx": 1}, "no image 1"),
        ({"bbox_2d": [1, 2, 3, 4], "img_idx": -1}, "no image -1"),
        ({"bbox_2d": [1, 2, 3, 4], "img_idx": "0"}, "whole number"),
        ({"bbox_2d": [200, 5, 300, 9]}, "outside of the image, whose size is 100 x 50"),
    ],
)
def test_arguments_that_cannot_be_followed_are_an_error_turn(arguments: dict[str, Any], told: str) -> None:
    text = f"<tool_call>{json.dumps({'name': 'image_zoom_in_tool', 'arguments': arguments})}</tool_call>"
    answer = step(zoom(), text)
    assert isinstance(answer, Observation)
    assert told in answer.error


def test_frames_of_a_video_are_no_images() -> None:
    """The image stands behind a video of two frames, which are among the problem's pictures."""
    opened = zoom()
    frame = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(frame, "PNG")
    pictures = (frame.getvalue(), frame.getvalue(), stored())
    problem = Problem("p", "<video> and <image>", pictures, "3", "integer", meta={"videos": [[0.0, 1.0]]})
    asyncio.run(opened.reset(problem, 0))
    assert corners(ask(opened, [10, 5, 50, 45])) == (20, 10, 100, 90)


def test_calls_are_counted_and_errors_are_not() -> None:
    opened = zoom(calls=1)
    assert isinstance(step(opened, "<tool_call>{</tool_call>"), Observation)
    assert not ask(opened, [1, 2, 30, 40]).error
    assert "no calls are left" in ask(opened, [1, 2, 30, 40]).error
    assert isinstance(step(opened, "the answer is 3"), Done)


def test_no_crop_is_made_that_nobody_would_see() -> None:
    opened = zoom(max_turns=2)
    assert not ask(opened, [1, 2, 30, 40]).error
    assert "no calls are left" in ask(opened, [1, 2, 30, 40]).error


def test_the_control_shows_nothing_of_the_right_size() -> None:
    blank, real = ask(zoom(blank=True), [10, 5, 50, 45]), ask(zoom(), [10, 5, 50, 45])
    images = [Image.open(io.BytesIO(answer.images[0])) for answer in (blank, real)]
    assert images[0].size == images[1].size
    assert len(images[0].getcolors() or ()) == 1


def test_the_fenced_form() -> None:
    text = f"so I look\n{written('zoom', {'bbox_2d': [1, 2, 3, 4]}, 'fenced')}"
    call = read_call(text, "fenced")
    assert call is not None
    assert (call.name, call.arguments) == ("zoom", {"bbox_2d": [1, 2, 3, 4]})
    assert read_call(text, "tool_call") is None
    with pytest.raises(ToolCallError, match="no end"):
        read_call(text.removesuffix("```"), "fenced")


def test_options_and_families_that_are_not_known_are_refused() -> None:
    with pytest.raises(UserError, match=r"environment\.options\.minside: .*min_side"):
        zoom(minside=3)
    with pytest.raises(UserError, match=r"environment\.options\.calls is '3', and must be of type int"):
        zoom(calls="3")
    with pytest.raises(UserError, match="'internvl' writes"):
        zoom(model_type="internvl")
