"""The harder toy task: right answers, honest traces, pictures that show what the text says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.quickstart_data import DRAWN
from vlm_rl.templates import TEMPLATES, boxes
from vlm_rl.toy.counting_shades import COLOURS, PAINTS, SHADED_SQUARES, SHADES, SIDE, ShadesProblem
from vlm_rl.toy.counting_task import CELL_SIDE, MAX_COUNT
from vlm_rl.toy.tiny_model import train_tokenizer

TEMPLATE = TEMPLATES["think_answer"]
PROBLEMS = SHADED_SQUARES.make_problems(400, seed=0, split="train")


def answer_of(response: str) -> str:
    region = TEMPLATE.answer_region(response)
    assert region is not None
    (answer,) = boxes(region) or [""]
    return answer


def test_only_the_asked_rows_count() -> None:
    red, blue = ("light", "red"), ("dark", "blue")
    rows = [[red, red, red, red], [red, blue, blue, red], [blue, red, blue, blue], [red, red, red, red]]
    problem = ShadesProblem("p", tuple(cell for row in rows for cell in row), red, 1, 2, "")
    assert list(problem.asked) == list(range(4, 12))
    assert problem.count == 3  # b1, b4 and c2


def test_counts_and_regions_cover_their_range() -> None:
    sizes = Counter(len(problem.asked) for problem in PROBLEMS)
    assert set(sizes) == {4, 8, 12, 16}
    assert min(sizes.values()) > 60  # 100 of each are expected; below 60 is beyond 4.6 standard deviations
    for size in sizes:
        counts = {problem.count for problem in PROBLEMS if len(problem.asked) == size}
        assert counts == set(range(min(MAX_COUNT, size) + 1))
    outside = [problem for problem in PROBLEMS if problem.cells.count(problem.target) > problem.count]
    assert len(outside) > 100, "squares outside the asked rows must tempt"


def test_nothing_held_out_is_trained_on() -> None:
    held = {problem.cells for problem in SHADED_SQUARES.make_problems(200, seed=1, split="heldout")}
    trained = {
        problem.cells
        for split in ("train", "warm")
        for problem in SHADED_SQUARES.make_problems(200, seed=2, split=split)
    }
    assert not held & trained


@pytest.mark.parametrize("style", ["careful", "whole", "check"])
def test_careful_traces_are_right(style) -> None:
    rng = np.random.default_rng(0)
    for problem in PROBLEMS[:100]:
        response = SHADED_SQUARES.trace(problem, style, rng)
        assert answer_of(response) == str(problem.count)
        assert TEMPLATE.is_well_formed(response)


def test_useful_length_follows_the_question() -> None:
    """Name, shade, colour and running count of each asked cell."""
    rng = np.random.default_rng(0)
    for problem in PROBLEMS[:50]:
        reasoning = SHADED_SQUARES.trace(problem, "careful", rng).split("</think>")[0].removeprefix("<think>")
        assert len(reasoning.split()) == 4 * len(problem.asked)


def test_hasty_traces_misread_at_their_rate() -> None:
    """A misread cell shows another paint in 7 of 8 cases: a cell is wrong with probability .12 * 7/8 = .105."""
    rng = np.random.default_rng(0)
    wrong = total = 0
    for problem in PROBLEMS:
        words = SHADED_SQUARES.trace(problem, "hasty", rng).split("</think>")[0].removeprefix("<think>").split()
        seen = list(zip(words[1::4], words[2::4], strict=True))
        wrong += sum(paint != problem.cells[index] for index, paint in zip(problem.asked, seen, strict=True))
        total += len(seen)
    assert wrong / total == pytest.approx(0.105, abs=5 * (0.105 * 0.895 / total) ** 0.5)


def test_a_broken_trace_has_no_box() -> None:
    response = SHADED_SQUARES.trace(PROBLEMS[0], "broken", np.random.default_rng(0))
    assert not boxes(response)
    assert not TEMPLATE.is_well_formed(response)


def test_pictures_show_the_cells() -> None:
    for problem in PROBLEMS[:20]:
        pixels = np.array(SHADED_SQUARES.draw(problem, seed=0), dtype=float)
        assert pixels.shape == (SIDE * CELL_SIDE, SIDE * CELL_SIDE, 3)
        for index, cell in enumerate(problem.cells):
            row, column = divmod(index, SIDE)
            middle = pixels[row * CELL_SIDE + 14, column * CELL_SIDE + 14]
            distance = {
                paint: np.abs(np.array(COLOURS[paint[1]]) * SHADES[paint[0]] - middle).max() for paint in PAINTS
            }
            assert min(distance, key=distance.__getitem__) == cell


def test_every_word_is_one_token() -> None:
    tokenizer = train_tokenizer(SHADED_SQUARES.tokenizer_texts(), vocabulary=512)
    rng = np.random.default_rng(0)
    for style in SHADED_SQUARES.style_shares:
        reasoning = SHADED_SQUARES.trace(PROBLEMS[0], style, rng).split("</think>")[0].removeprefix("<think>")
        if reasoning.strip():
            assert len(tokenizer.encode(reasoning, add_special_tokens=False)) == len(reasoning.split())


def test_the_files_go_through_the_real_reader(tmp_path: Path) -> None:
    raw = SHADED_SQUARES.write(tmp_path / "raw", seed=0, train=12, heldout=4, warm=8, mixture=20)
    prepare("virl39k", raw / "train", tmp_path / "train", DRAWN)
    problems = load_set(tmp_path / "train")
    expected = SHADED_SQUARES.make_problems(12, seed=0, split="train")
    assert [(p.id, p.answer) for p in problems] == [(p.id, str(p.count)) for p in expected]
    assert len((raw / "warm" / "traces.jsonl").read_text().splitlines()) == 8 + 20
