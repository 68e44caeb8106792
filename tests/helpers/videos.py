"""Problems with videos for tests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.images import noise_png
from vlm_rl.types import Problem

VIDEO_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SHORT = [0.5, 0.7, 1.0]  # an odd number of frames, at uneven times
LONG = [0, 10, 20, 30]  # its time reaches further than its height and width


def video_problem(*videos: Sequence[float], question: str = "", size: tuple[int, int] = (80, 120)) -> Problem:
    """Return a problem with an image in front of each video of these times; its question has them in this order."""
    frames = [noise_png(*size, seed) for seed in range(sum(map(len, videos)))]
    pictures, rest = [], iter(frames)
    for number, times in enumerate(videos):
        pictures += [noise_png(96, 64, 100 + number), *(next(rest) for _ in times)]
    question = question or "Before <image> came <video>" * len(videos) + " and then?"
    return Problem(
        f"video-{videos}",
        question,
        tuple(pictures),
        "4",
        "integer",
        meta={"videos": [list(times) for times in videos]},
    )
