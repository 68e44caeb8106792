"""The long-horizon task: right answers, traces that read what is there, and lengths that pay."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_rl.templates import TEMPLATES, boxes
from vlm_rl.toy.counting_votes import COLOURS, COLUMNS, ROWS, SIZE, VOTES, VotesProblem
from vlm_rl.toy.tiny_model import train_tokenizer

TEMPLATE = TEMPLATES["think_answer"]
PROBLEMS = VOTES.make_problems(300, seed=0, split="train")


def reasoning_of(response: str) -> list[str]:
    return response.split("</think>")[0].removeprefix("<think>").split()


def right_share(rows: int) -> float:
    """Return the share of right answers of who reads so many rows; a tie is right half of the time."""
    right = []
    for problem in PROBLEMS:
        lead = sum(1 if vote == problem.target else -1 for vote in problem.votes[: rows * COLUMNS])
        right.append(0.5 if lead == 0 else float((lead > 0) == problem.count))
    return float(np.mean(right))


def test_the_answer_is_the_majority() -> None:
    votes = ("red",) * 3 + ("blue", "green")
    assert [VotesProblem("p", target, 0, votes, "").count for target in ("red", "blue")] == [1, 0]
    assert 110 < sum(problem.count for problem in PROBLEMS) < 190  # half; 4.6 standard deviations around 150


def test_the_question_lists_the_votes() -> None:
    for problem in PROBLEMS[:20]:
        words = problem.question.split("1 or 0.")[1].replace(".", "").split()
        assert tuple(words[1::4]) == problem.votes
        assert words[0] == "a0" and words[-4] == f"{ROWS[-1]}{COLUMNS - 1}"


def test_reading_more_is_right_more_often() -> None:
    """A sixth of the list leaves a quarter to chance; the whole list leaves nothing."""
    shares = [right_share(rows) for rows in (1, 4, 13, 26)]
    assert shares == sorted(shares) and shares[-1] == 1
    assert 0.6 < shares[0] < 0.8 < shares[2] < 0.97


def test_a_scan_counts_what_it_reads_and_answers_by_it() -> None:
    rng = np.random.default_rng(0)
    for problem in PROBLEMS[:50]:
        response = VOTES.trace(problem, "look", rng)
        words = [word for word in reasoning_of(response) if word != "next"]
        assert words.pop() == "so" and len(words) % (4 * COLUMNS) == 0
        lead = 0
        for index, (_, colour, seen, told) in enumerate(zip(*(words[n::4] for n in range(4)), strict=True)):
            assert colour == problem.votes[index] and seen == ("yes" if colour == problem.target else "no")
            lead += 1 if seen == "yes" else -1
            assert told == ("even" if lead == 0 else f"{'lead' if lead > 0 else 'lag'}{abs(lead)}")
        if lead:
            assert boxes(response) == [str(int(lead > 0))]


def test_a_look_stops_by_a_coin() -> None:
    """A geometric number of rows with mean 1 / .25 = 4, cut at 26: the mean is 4 (1 - .75^26), its error .2."""
    rng = np.random.default_rng(0)
    rows = [1 + reasoning_of(VOTES.trace(problem, "look", rng)).count("next") for problem in PROBLEMS]
    assert np.mean(rows) == pytest.approx(4, abs=5 * 0.2)


def test_lengths_reach_from_nine_tokens_to_1500() -> None:
    tokenizer = train_tokenizer(VOTES.tokenizer_texts(), vocabulary=1500)
    rng = np.random.default_rng(0)
    sizes = {
        style: len(tokenizer.encode(VOTES.trace(PROBLEMS[0], style, rng) + "<|im_end|>", add_special_tokens=False))
        for style in ("guess", "all")
    }
    assert sizes == {"guess": 9, "all": 1490}


def test_a_vote_is_as_long_in_the_question_as_in_a_scan() -> None:
    """Each word that is read lies equally far behind, and follows the same name: a tiny model can learn that."""
    tokenizer = train_tokenizer(VOTES.tokenizer_texts(), vocabulary=1500)
    problem = PROBLEMS[0]
    asked = tokenizer.encode(problem.question, add_special_tokens=False)
    told = tokenizer.encode(VOTES.trace(problem, "all", np.random.default_rng(0)), add_special_tokens=False)
    colours = set(tokenizer.convert_tokens_to_ids([f"Ġ{colour}" for colour in COLOURS]))
    first_asked, first_told = (ids.index(tokenizer.convert_tokens_to_ids("Ġa0")) for ids in (asked, told))
    places = [
        [place - first for place, token in enumerate(ids) if token in colours]
        for ids, first in ((asked, first_asked), (told, first_told))
    ]
    assert len(places[0]) == SIZE
    assert {ours - theirs for theirs, ours in zip(*places, strict=True)} == {0}


def test_a_broken_trace_has_no_box() -> None:
    response = VOTES.trace(PROBLEMS[0], "broken", np.random.default_rng(0))
    assert not boxes(response) and not TEMPLATE.is_well_formed(response)


def test_the_picture_shows_the_colour() -> None:
    for problem in PROBLEMS[:20]:
        pixels = np.array(VOTES.draw(problem, seed=0), dtype=float)
        assert pixels.shape == (56, 56, 3)
        distance = {name: np.abs(np.array(colour) - pixels[14, 14]).max() for name, colour in COLOURS.items()}
        assert min(distance, key=distance.__getitem__) == problem.target
