"""Put a row's images where its question names them: `<image 1>`, `[image 1]`, `<|image_1|>`, `[image]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlm_rl.data_prep.readers.image_files import ImageRef
from vlm_rl.data_prep.records import RowError
from vlm_rl.types import IMAGE_MARKER

_NUMBERED = re.compile(r"(?i)[<\[]\|?\s*(?:image|img|picture)[\s_#-]*(\d{1,3})\s*\|?[>\]]")
_BARE = re.compile(r"(?i)[<\[]\|?\s*(?:image|img|picture|imagehere)\s*\|?[>\]]")


def place_images(question: str, images: Sequence[ImageRef]) -> tuple[str, list[ImageRef]]:
    """Return the question with IMAGE_MARKER where it names an image, and the images in that order.

    The first mention of an image is its place, a later one stays as words. A question with IMAGE_MARKER, or a row
    without images, stays as it is. Raises RowError("marker_mismatch") where the numbers are not those of the images.
    """
    if IMAGE_MARKER in question or not images:
        return question, [*images]
    order = [*dict.fromkeys(int(mark[1]) for mark in _NUMBERED.finditer(question))]
    if not order:
        marked, count = _BARE.subn(IMAGE_MARKER, question)
        return (marked if count == len(images) else question), [*images]
    first = min(1, *order)
    if sorted(order) != [*range(first, first + len(images))]:
        numbers = ", ".join(map(str, sorted(order)))
        raise RowError("marker_mismatch", f"the row names the images {numbers} in its question but has {len(images)}")
    placed: set[int] = set()

    def marker(mark: re.Match[str]) -> str:
        number = int(mark[1])
        if number in placed:
            return f"image {number}"
        placed.add(number)
        return IMAGE_MARKER

    return _NUMBERED.sub(marker, question), [images[number - first] for number in order]
