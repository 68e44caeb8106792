"""Look again: crop a box out of one of the prompt's images, at the resolution of the file.

The model gives the box in the coordinates of its family: pixels of the image as it saw it, or thousandths of its
sides (vlm_rl.rewards.grounding). The crop is cut out of the stored image, so that it shows what the prompt's
resolution lost. A box that reaches over an edge is cut there; one that is too small grows around its centre. The tool
has the name under which Qwen's models and DeepEyes (arXiv 2505.14362) know it.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from vlm_rl.data.images import TEST_LIMITS, decode_image
from vlm_rl.environments.calls import ToolCall, ToolCallError, described, read_call
from vlm_rl.environments.environment import Done, EnvironmentSetup, Observation
from vlm_rl.errors import UserError
from vlm_rl.rewards.grounding import COORDINATES
from vlm_rl.types import IMAGE_MARKER, Problem, group_by_marker, split_at_markers

_ROUNDING = 1e-6  # pixels: a whole pixel's edge may come out a little beside it

OPTIONS: dict[str, Any] = {
    "tool": "image_zoom_in_tool",  # its name
    "calls": 4,  # most that are followed
    "min_side": 28,  # least side of a box, in pixels as the model sees them
    "coordinates": "auto",  # pixels, thousandths, or the model's own
    "blank": False,  # a control: the crop has the right size and shows nothing
}


class Zoom:
    """One episode of zooming."""

    is_quick = True

    def __init__(self, setup: EnvironmentSetup) -> None:
        """Read the options. Raises UserError if the coordinates of the model's family are not known."""
        self._setup = setup
        self._tool, self._left = setup.option("tool", OPTIONS["tool"]), setup.calls_left(OPTIONS["calls"])
        self._min_side, self._is_blank = setup.option("min_side", 28), setup.option("blank", False)
        asked = setup.option("coordinates", "auto")
        coordinates = COORDINATES.get(setup.model_type) if asked == "auto" else asked
        if coordinates not in ("pixels", "thousandths"):
            raise UserError(
                f"environment.options.coordinates is {asked}, and it is not known what a model of type "
                f"{setup.model_type!r} writes: set it to pixels (of the resized image) or thousandths (0 to 1000)"
            )
        self._in_pixels = coordinates == "pixels"
        unit = "pixels of the image" if self._in_pixels else "thousandths of the image's width and height"
        box = {"type": "array", "items": {"type": "number"}, "description": f"x1, y1, x2, y2 in {unit}"}
        image = {"type": "integer", "description": "which image, counted from 0"}
        self.instructions = described(
            self._tool,
            "Shows a part of an image larger.",
            {"bbox_2d": box, "img_idx": image},
            ["bbox_2d"],
            setup.calls,
        )

    async def reset(self, problem: Problem, seed: int) -> None:
        self._problem, self._shown = problem, self._setup.shown(problem)
        self._places = _places_of_images(problem)

    async def step(self, text: str) -> Observation | Done:
        try:
            call = read_call(text, self._setup.calls)
            if call is None:
                return Done()
            if self._left <= 0:
                raise ToolCallError("no calls are left; answer now")
            number, box = self._box(call)
        except ToolCallError as error:
            return Observation(f"Error: {error}", error=str(error), tool=self._tool)
        self._left -= 1
        crop = await asyncio.to_thread(self._crop, number, box)
        return Observation(images=(crop,), tool=self._tool)

    def _box(self, call: ToolCall) -> tuple[int, tuple[float, float, float, float]]:
        """Return the image's number and the box in fractions of its sides."""
        if call.name != self._tool:
            raise ToolCallError(f"there is no tool {call.name[:40]!r}; call {self._tool}")
        number = _whole(call.arguments)
        if not 0 <= number < len(self._shown):
            raise ToolCallError(f"there is no image {number}; there are {len(self._shown)}, counted from 0")
        width, height = self._shown[number]
        x1, y1, x2, y2 = _numbers(call.arguments.get("bbox_2d"))
        scale_x, scale_y = (width, height) if self._in_pixels else (1000, 1000)
        left, right = sorted((x1 / scale_x, x2 / scale_x))
        top, bottom = sorted((y1 / scale_y, y2 / scale_y))
        if left >= 1 or top >= 1 or right <= 0 or bottom <= 0:
            raise ToolCallError(f"the box is outside of the image, whose {self._size(width, height)}")
        left, right = _grown(max(left, 0.0), min(right, 1.0), min(1.0, self._min_side / width))
        top, bottom = _grown(max(top, 0.0), min(bottom, 1.0), min(1.0, self._min_side / height))
        return number, (left, top, right, bottom)

    def _size(self, width: int, height: int) -> str:
        return f"size is {width} x {height} pixels" if self._in_pixels else "coordinates go from 0 to 1000"

    def _crop(self, number: int, box: tuple[float, float, float, float]) -> bytes:
        data = self._problem.images[self._places[number]]
        image = decode_image(data, where=f"problem {self._problem.id!r} image {number}", limits=TEST_LIMITS)
        left, top, right, bottom = box
        x1, y1 = math.floor(left * image.width + _ROUNDING), math.floor(top * image.height + _ROUNDING)
        x2, y2 = math.ceil(right * image.width - _ROUNDING), math.ceil(bottom * image.height - _ROUNDING)
        crop = image.crop((x1, y1, max(x2, x1 + 1), max(y2, y1 + 1)))
        if self._is_blank:
            crop = Image.new("RGB", crop.size, (128, 128, 128))
        buffer = io.BytesIO()
        crop.save(buffer, format="PNG", compress_level=0)  # it is read again at once, and not kept
        return buffer.getvalue()


def _places_of_images(problem: Problem) -> list[int]:
    """Return where each image is among a problem's pictures, which hold the frames of videos too."""
    places = group_by_marker(problem.question, range(len(problem.images)), problem.videos)
    markers = split_at_markers(problem.question, problem.videos)[1]
    return [place for (place, *_), marker in zip(places, markers, strict=True) if marker == IMAGE_MARKER]


def _whole(arguments: Mapping[str, Any]) -> int:
    number = arguments.get("img_idx", 0)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ToolCallError("img_idx must be a whole number")
    return number


def _numbers(value: Any) -> tuple[float, float, float, float]:
    if not isinstance(value, list) or len(value) != 4:
        raise ToolCallError("bbox_2d must be four numbers: x1, y1, x2, y2")
    numbers = [n for n in value if isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e9]
    if len(numbers) != 4:
        raise ToolCallError("bbox_2d must be four finite numbers: x1, y1, x2, y2")
    x1, y1, x2, y2 = map(float, numbers)
    return x1, y1, x2, y2


def _grown(low: float, high: float, least: float) -> tuple[float, float]:
    """Return the interval inside [0, 1], around its middle at least so long."""
    if high - low >= least:
        return low, high
    low = min(max((low + high - least) / 2, 0.0), 1 - least)
    return low, low + least
