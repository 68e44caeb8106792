"""The task that needs a tool: grey at the resolution of the prompt, exact in the crop, and its traces."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_rl.config import EnvironmentConfig
from vlm_rl.data.images import encode_png, fit_to_grid
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.turns import TOOL_TOKENS, open_images
from vlm_rl.environments.host import open_host
from vlm_rl.environments.script import play
from vlm_rl.grading.grader import Grader
from vlm_rl.toy.quickstart import TEMPLATE
from vlm_rl.toy.small_board import (
    BOARD,
    CELLS,
    PATTERNS,
    SHOWN,
    SIDE,
    STYLE_SHARES,
    BoardProblem,
    box_of,
    draw,
    make_problems,
    mixture,
    tokenizer_texts,
    turns,
)
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.toy.tools_quickstart import ENVIRONMENT, MAX_PROMPT_TOKENS, MAX_TOKENS
from vlm_rl.types import Problem


def shown(problem: BoardProblem) -> np.ndarray:
    image = fit_to_grid(draw(problem), min_pixels=3136, max_pixels=SHOWN**2)
    assert image.size == (SHOWN, SHOWN)
    return np.asarray(image).astype(float)


def board(patterns: tuple[str, ...]) -> BoardProblem:
    cells = ("empty",) * 4 + ("board",) + ("empty",) * 4
    return BoardProblem("p", cells, patterns, patterns[0], (0, "x"))


def test_every_pattern_is_the_same_grey_at_the_resolution_of_the_prompt() -> None:
    """A period is one pixel of the prompt. Away from a board's edge not one grey level differs."""
    x1, y1, x2, y2 = box_of(4)
    inner = [shown(board((pattern,) * 9))[y1 + 2 : y2 - 2, x1 + 2 : x2 - 2] for pattern in PATTERNS]
    for one, other in itertools.combinations(inner, 2):
        assert np.abs(one - other).max() <= 1


def test_problems_are_a_function_of_their_seed_and_answers_are_counts() -> None:
    problems = make_problems(200, seed=3, split="train")
    assert problems == make_problems(200, seed=3, split="train") != make_problems(200, seed=3, split="heldout")
    assert {problem.count for problem in problems} == set(range(9))
    assert all(problem.cells.count("board") == 1 for problem in problems)
    assert {problem.cells.index("board") for problem in problems} == set(range(len(CELLS)))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    folder = tmp_path_factory.mktemp("board") / "tiny"
    model = build_tiny_model(folder, tokenizer_texts=tokenizer_texts(), visible=TOOL_TOKENS)
    return PromptBuilder(model, template=TEMPLATE, max_pixels=SHOWN**2)


def test_the_tool_shows_the_board_and_a_look_elsewhere_does_not(builder: PromptBuilder, tmp_path: Path) -> None:
    drawn = make_problems(6, seed=1, split="train")
    with Grader() as grader:
        host = open_host(EnvironmentConfig(**ENVIRONMENT), builder, grader)
        assert host is not None
        for one in drawn:
            problem = Problem(one.id, one.question, (encode_png(draw(one)),), str(one.count), "integer")
            prompt = builder.build(problem)
            assert len(prompt.ids) <= MAX_PROMPT_TOKENS
            top, left = (SIDE // 3 * part + (SIDE // 3 - BOARD) // 2 for part in divmod(one.cells.index("board"), 3))
            whole = np.asarray(Image.open(io.BytesIO(problem.images[0])))[top : top + BOARD, left : left + BOARD]
            for style, is_there in (("zoom", True), ("stray", False)):
                rollout = play(host, builder, problem, prompt, turns(one, style, np.random.default_rng(0)))
                assert len(rollout.ids) <= MAX_TOKENS
                assert rollout.num_observed <= ENVIRONMENT["max_observed_tokens"]
                (crop,) = open_images(rollout.observed[0][1])
                assert crop.size == (BOARD, BOARD)
                assert np.array_equal(np.asarray(crop), whole) == is_there
        host.close()


def test_the_mixture_has_the_styles_in_their_proportions() -> None:
    problems = make_problems(20, seed=1, split="warm")
    texts = [said for _, said in mixture(problems, 400, seed=0)]
    two = sum(len(said) == 2 for said in texts) / len(texts)
    expected = STYLE_SHARES["zoom"] + STYLE_SHARES["stray"] + STYLE_SHARES["broken"] / 2
    assert abs(two - expected) < 0.08  # three standard deviations of 400 draws
