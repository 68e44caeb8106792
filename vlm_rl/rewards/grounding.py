"""Boxes and points against the gold box of a problem.

    iou(Box(0, 0, 2, 2), Box(1, 0, 3, 2))      # 1/3

The gold is `meta["box"]` of a prepared set: [x1, y1, x2, y2] as fractions of the image's width and height, so that no
resizing changes it, or a list of such boxes. What a model writes depends on its family:

    pixels       of the resized image that the model saw: Qwen2.5-VL (QwenLM/Qwen3-VL, issues 866 and 940)
    thousandths  of the image's width and height, 0 to 1000: Qwen2-VL (arXiv 2409.12191) and Qwen3-VL (issue 1486)

The model's numbers are turned into fractions too. That changes no IoU: both areas are scaled by the same factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from vlm_rl.config import GroundingConfig, IouConfig
from vlm_rl.errors import UserError
from vlm_rl.rewards.coordinates import Box, read_boxes, read_point
from vlm_rl.rewards.part import GradedResponse, Part, PartVerdict, RewardSetup
from vlm_rl.templates import Template
from vlm_rl.types import Outcome, Problem

COORDINATES = {
    "qwen2_5_vl": "pixels",
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"), "thousandths"),
}
MOST_BOXES = 100  # of a response that are matched: the rest of a loop of boxes only counts


def open_grounding(name: str, setup: RewardSetup) -> Iterator[Part]:
    """Yield the part `iou` or `point_in_box`, if it is on. Raises UserError as GroundingReward does."""
    section: GroundingConfig | None = getattr(setup.config, name)
    if section is None:
        return
    reward = GroundingReward(name, section, template=setup.template, model_type=setup.model_type)

    def verdicts(responses: Sequence[GradedResponse]) -> list[PartVerdict]:
        sizes = [response.prompt.images[0].size if response.prompt.images else (1, 1) for response in responses]
        return [
            PartVerdict(reward.outcome(response.problem, response.text, size))
            for response, size in zip(responses, sizes, strict=True)
        ]

    yield Part(name, section, verdicts, check=reward.check)


def iou(a: Box, b: Box) -> float:
    """Return the area that two boxes share over the area that they cover, 0 to 1; 0 if a box has no area."""
    shared = Box(max(a.x1, b.x1), max(a.y1, b.y1), min(a.x2, b.x2), min(a.y2, b.y2)).area
    covered = a.area + b.area - shared
    return shared / covered if shared > 0 else 0.0


def is_inside(point: tuple[float, float], box: Box) -> bool:
    """Tell whether a point is in a box or on its edge."""
    return box.x1 <= point[0] <= box.x2 and box.y1 <= point[1] <= box.y2


def matched_overlap(given: Sequence[Box], golds: Sequence[Box]) -> float:
    """Return the overlap of boxes with gold boxes, 0 to 1: the best matching's IoUs, over the larger number of boxes.

    A box too many costs as much as a box that is missing. Where the gold is one box, several different ones have
    given none: a response that hedges.
    """
    if not given or (len(golds) == 1 and len(given) > 1):
        return 0.0
    ious = np.array([[iou(box, gold) for gold in golds] for box in given[:MOST_BOXES]])
    return float(ious[linear_sum_assignment(ious, maximize=True)].sum()) / max(len(given), len(golds))


def gold_boxes(problem: Problem) -> list[Box]:
    """Return the gold boxes of a problem, in fractions of its image's sides; [] where it has none."""
    box = problem.meta.get("box") or []
    return [Box(*corners) for corners in (box if box and isinstance(box[0], list) else [box])] if box else []


def is_answered_by_boxes(problem: Problem) -> bool:
    """Tell whether the answer of a problem is the text of its gold boxes, and nothing beside them."""
    return (
        bool(gold_boxes(problem))
        and not re.search(r"[a-z]{2}", problem.answer, re.I)
        and bool(read_boxes(f"[{problem.answer}]"))
    )


class GroundingReward:
    """The rewards `iou` and `point_in_box`: compares what a response gives with the problem's gold box."""

    def __init__(self, name: str, config: GroundingConfig, *, template: Template, model_type: str) -> None:
        """Choose the coordinates. Raises UserError if those of the model's family are not known.

        Args:
            name: iou or point_in_box, as in the configuration.
            config: its section.
            template: says where in a response the answer is.
            model_type: the model's, by which `coordinates: auto` is resolved.
        """
        coordinates = COORDINATES.get(model_type) if config.coordinates == "auto" else config.coordinates
        if coordinates is None:
            raise UserError(
                f"reward.{name}.coordinates is auto, and it is not known what a model of type {model_type!r} writes: "
                "set it to pixels (of the resized image) or thousandths (0 to 1000)"
            )
        self._name = name
        self._in_pixels = coordinates == "pixels"
        self._threshold = config.threshold if isinstance(config, IouConfig) else None
        self._gives_point = name == "point_in_box"
        self._template = template

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise UserError if no problem has a gold box."""
        if not any(map(gold_boxes, problems)):
            raise UserError(
                f"reward.{self._name} is on, but no problem of data.train has a gold box: prepare the set with a box "
                "column (docs/data.md), or leave the reward out"
            )

    def outcome(self, problem: Problem, text: str, size: tuple[int, int]) -> Outcome:
        """Return the reward of a response, 0 to 1; 0 if it gives nothing, None for a problem without a gold box.

        Args:
            problem: its `meta["box"]` is the gold.
            text: the response with its prefill.
            size: width and height in pixels of the image as the model saw it.
        """
        if not (golds := gold_boxes(problem)):
            return None
        answer = self._template.answer_region(text) or ""
        width, height = size if self._in_pixels else (1000, 1000)
        if self._gives_point:
            point = read_point(answer)
            return float(
                point is not None and any(is_inside((point[0] / width, point[1] / height), gold) for gold in golds)
            )
        given = [Box(box.x1 / width, box.y1 / height, box.x2 / width, box.y2 / height) for box in read_boxes(answer)]
        share = matched_overlap(given, golds)
        return share if self._threshold is None else float(share >= self._threshold)
