"""Show problems with other images, to measure what a policy scores without looking at its own."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from PIL import Image

from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image, encode_png
from vlm_rl.stats import random_derangement
from vlm_rl.types import Problem

ImageMode = Literal["real", "blank", "shuffled"]

_GREY = (128, 128, 128)
_SHUFFLES = 20  # tried, to keep problems with equal images apart


def with_images(problems: Sequence[Problem], mode: ImageMode, *, seed: int) -> list[Problem]:
    """Return the problems with other images.

    blank: each image becomes a grey one of its size. shuffled: every problem gets the images of a different problem
    that has as many, and as many frames in each video, by a random derangement of the set; equal images are kept
    apart where the set allows it. Problems without images are left out, and for shuffled also those whose numbers no
    other problem has.
    """
    if mode == "real":
        return list(problems)
    if mode == "blank":
        return [replace(problem, images=_blank_images(problem)) for problem in problems if problem.images]
    donors = _donors(problems, np.random.default_rng(seed))
    return [replace(problem, images=problems[donors[i]].images) for i, problem in enumerate(problems) if i in donors]


def _donors(problems: Sequence[Problem], rng: np.random.Generator) -> dict[int, int]:
    """Return index of a problem -> index of the problem whose images it gets."""
    by_count: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, problem in enumerate(problems):
        if problem.images:
            by_count[len(problem.images), *map(len, problem.videos)].append(index)
    donors: dict[int, int] = {}
    for members in by_count.values():
        if len(members) < 2:
            continue
        tries = [random_derangement(len(members), rng) for _ in range(_SHUFFLES)]
        digests = [image_digests(problems[index]) for index in members]
        best = min(tries, key=lambda order: sum(digests[i] == digests[j] for i, j in enumerate(order)))
        donors |= {members[i]: members[j] for i, j in enumerate(best.tolist())}
    return donors


def image_digests(problem: Problem) -> list[str]:
    """Return the SHA-256 of each image."""
    return [hashlib.sha256(data).hexdigest() for data in problem.images]


def _blank_images(problem: Problem) -> tuple[bytes, ...]:
    limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
    sizes = [
        decode_image(data, where=f"problem {problem.id!r} image {index}", limits=limits).size
        for index, data in enumerate(problem.images)
    ]
    return tuple(encode_png(Image.new("RGB", size, _GREY)) for size in sizes)
