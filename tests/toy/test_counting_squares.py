"""The counting task: pictures, questions, traces and the files they are written to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from vlm_rl.data_prep.readers.training_sources import read_virl39k
from vlm_rl.data_prep.records import UsableRow
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES, boxes
from vlm_rl.toy.counting_squares import CELLS, COLOURS, FORCED_SCAN, PHRASINGS, SQUARES, is_held_out
from vlm_rl.toy.counting_task import CELL_SIDE
from vlm_rl.toy.tiny_model import train_tokenizer

TEMPLATE = TEMPLATES["think_answer"]
PROBLEMS = SQUARES.make_problems(900, seed=3, split="train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return SQUARES.write(tmp_path_factory.mktemp("toy") / "set", seed=0, train=30, heldout=12, warm=40, mixture=50)


def boxed(response: str) -> str | None:
    found = boxes(TEMPLATE.answer_region(response) or "")
    return found[0] if found else None


def test_layout_is_virl39ks(folder):
    table = pq.read_table(folder / "train" / "39Krelease.parquet")
    assert table.schema.names == [
        "question", "answer", "PassRate_32BTrained", "PassRate_7BBase", "category", "source", "qid", "image",
    ]  # fmt: skip
    row = table.to_pylist()[4]
    assert row["answer"].startswith(r"\boxed{")
    assert row["image"] == ["images/Toy-train-4-0.png"]
    assert (folder / "train" / row["image"][0]).is_file()
    assert row["question"].startswith("<image>\n")


def test_the_ordinary_reader_gives_the_true_counts(folder):
    rows = list(read_virl39k(folder / "train"))
    problems = SQUARES.make_problems(30, seed=0, split="train")
    assert [row.problem.answer for row in rows if isinstance(row, UsableRow)] == [str(p.count) for p in problems]
    assert {row.problem.answer_type for row in rows if isinstance(row, UsableRow)} == {"integer"}


def test_each_cell_is_drawn_in_its_colour():
    names = list(COLOURS)
    palette = np.array([COLOURS[name] for name in names])
    for problem in PROBLEMS[:40]:
        pixels = np.asarray(SQUARES.draw(problem, seed=3)).astype(int)
        assert pixels.shape == (84, 84, 3)
        for index, colour in enumerate(problem.cells):
            row, column = divmod(index, 3)
            cell = pixels[row * CELL_SIDE : (row + 1) * CELL_SIDE, column * CELL_SIDE : (column + 1) * CELL_SIDE]
            middle = cell[14, 14]
            assert names[np.abs(palette - middle).sum(axis=1).argmin()] == colour
            assert np.abs(middle - COLOURS[colour]).max() <= 15
            # A margin of 2 to 5 px is white on every side, so the square has 18 to 24 px.
            inside = (cell != 255).any(axis=2)
            assert 18 <= inside.any(axis=1).sum() <= 24
            assert not inside[:2].any() and not inside[-2:].any()
            assert not inside[:, :2].any() and not inside[:, -2:].any()


def test_counts_are_uniform():
    counts = Counter(problem.count for problem in SQUARES.make_problems(4500, seed=1, split="train"))
    # 500 each are expected; the binomial's standard deviation is sqrt(4500 * 8/81) = 21, so 5 of them:
    assert set(counts) == set(range(9))
    assert all(abs(number - 500) < 105 for number in counts.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_no_seed_ever_trains_on_what_another_holds_out(seed):
    trained = {
        (p.cells, p.target)
        for split in ("train", "warm")
        for p in SQUARES.make_problems(2000, seed=seed, split=split)
    }
    held = {(p.cells, p.target) for p in SQUARES.make_problems(500, seed=1 - seed, split="heldout")}
    assert not trained & held
    assert all(is_held_out(*key) for key in held)


def test_same_seed_same_problems_other_seed_others():
    assert SQUARES.make_problems(50, seed=3, split="train") == PROBLEMS[:50]
    assert SQUARES.make_problems(50, seed=4, split="train") != PROBLEMS[:50]
    warm = SQUARES.make_problems(50, seed=3, split="warm")
    assert [p.cells for p in warm] != [p.cells for p in PROBLEMS[:50]]


def test_files_repeat_byte_for_byte(folder, tmp_path):
    again = SQUARES.write(tmp_path / "again", seed=0, train=30, heldout=12, warm=40, mixture=50)
    files = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    assert len(files) == 30 + 12 + 40 + 3 + 1
    for file in files:
        assert (again / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("style", list(SQUARES.style_shares))
def test_format_is_perfect_except_in_the_broken_style(style):
    rng = np.random.default_rng(0)
    responses = [SQUARES.trace(problem, style, rng) for problem in PROBLEMS]
    assert {TEMPLATE.is_well_formed(response) for response in responses} == {style != "broken"}


@pytest.mark.parametrize("style", ["full", "check"])
def test_scans_tell_the_truth(style):
    rng = np.random.default_rng(0)
    for problem in PROBLEMS[:100]:
        response = SQUARES.trace(problem, style, rng)
        words = response.removeprefix("<think>").split("</think>")[0].split()
        passes = " ".join(words).split(" check ")
        assert len(passes) == (2 if style == "check" else 1)
        for scan in passes:
            parts = scan.split()
            assert parts[0::3] == list(CELLS)
            assert parts[1::3] == list(problem.cells)
            hits = [colour == problem.target for colour in problem.cells]
            assert parts[2::3] == [str(n) for n in np.cumsum(hits)]
        assert boxed(response) == str(problem.count)


def test_accuracy_grows_with_the_effort():
    rng = np.random.default_rng(0)
    share = {
        style: np.mean([boxed(SQUARES.trace(p, style, rng)) == str(p.count) for p in PROBLEMS])
        for style in ("guess", "partial", "full")
    }
    # Guess: 1/9, standard deviation .0105 at n = 900. Partial: at best one in (unseen cells + 1) >= 4.
    assert abs(share["guess"] - 1 / 9) < 0.05
    assert share["guess"] < share["partial"] < 0.5
    assert share["full"] == 1


def test_a_partial_scan_stops_early_and_never_contradicts_itself():
    rng = np.random.default_rng(0)
    for problem in PROBLEMS[:200]:
        response = SQUARES.trace(problem, "partial", rng)
        parts = response.removeprefix("<think>").split("</think>")[0].split()
        cells = len(parts) // 3
        assert 3 <= cells <= 6
        assert int(parts[-1]) <= int(boxed(response) or -1) <= min(8, int(parts[-1]) + 9 - cells)


def test_every_word_is_one_token_and_the_lengths_follow():
    tokenizer = train_tokenizer(SQUARES.tokenizer_texts(), vocabulary=512)
    for word in (*CELLS, *COLOURS, "check", "guess", *map(str, range(10))):
        assert len(tokenizer(f" {word}").input_ids) == 1, word
    for phrasing in PHRASINGS:
        words = phrasing.format("red").split()
        assert len(tokenizer(phrasing.format("red")).input_ids) == len(words) + 1  # the final mark
    rng = np.random.default_rng(0)
    lengths = {
        style: {len(tokenizer(SQUARES.trace(p, style, rng)).input_ids) + 1 for p in PROBLEMS[:50]}
        for style in SQUARES.style_shares
    }
    # <think> </think> <answer> \boxed{ digit } </answer> end: 8; a scan adds 9 * 3, a check 1 + 27.
    assert lengths["guess"] == {8 + 1}
    assert lengths["full"] == {8 + 27}
    assert lengths["check"] == {8 + 27 + 28}
    assert lengths["partial"] == {8 + 3 * cells for cells in (3, 4, 5, 6)}


def test_forced_scan_is_how_every_scan_begins():
    rng = np.random.default_rng(0)
    tokenizer = train_tokenizer(SQUARES.tokenizer_texts(), vocabulary=512)
    forced = tokenizer(FORCED_SCAN).input_ids
    for style in ("partial", "full", "check"):
        assert tokenizer(SQUARES.trace(PROBLEMS[0], style, rng)).input_ids[: len(forced)] == forced
    assert not SQUARES.trace(PROBLEMS[0], "guess", rng).startswith(FORCED_SCAN)


def test_traces_file_names_warm_problems_in_two_phases(folder):
    lines = [json.loads(line) for line in (folder / "warm" / "traces.jsonl").read_text().splitlines()]
    ids = {p.id for p in SQUARES.make_problems(40, seed=0, split="warm")}
    assert [line["phase"] for line in lines] == ["clean"] * 40 + ["mixture"] * 50
    assert {line["id"] for line in lines} == ids
    assert {line["style"] for line in lines[:40]} == {"full"}


def test_mixture_has_its_proportions():
    lines = SQUARES.traces(PROBLEMS, seed=0, mixture=5000)[len(PROBLEMS) :]
    share = Counter(line["style"] for line in lines)
    # The widest standard deviation, at one half, is sqrt(.25 / 5000) = .007.
    for style, expected in SQUARES.style_shares.items():
        assert abs(share[style] / 5000 - expected) < 0.035


def test_an_existing_folder_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="already exists"):
        SQUARES.write(tmp_path, seed=0, train=1, heldout=1, warm=1, mixture=1)
