"""The order in which prompts are taken, and the ledger that accounts for each of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder

# -- order ---------------------------------------------------------------------------------------


@given(num_problems=st.integers(1, 40), seed=st.integers(0, 2**31), counts=st.lists(st.integers(0, 30), max_size=12))
def test_each_epoch_takes_each_problem_once(num_problems, seed, counts) -> None:
    order = PromptOrder(num_problems, seed)
    epochs, taken = [], []
    for count in counts:
        epochs += order.epochs(count)
        taken += order.take(count)
    assert len(taken) == order.cursor == sum(counts)
    for start in range(0, len(taken) - num_problems + 1, num_problems):
        assert sorted(taken[start : start + num_problems]) == list(range(num_problems))
    assert len({*zip(taken, epochs, strict=True)}) == len(taken) and epochs == sorted(epochs)
    assert len(set(taken[len(taken) // num_problems * num_problems :])) == len(taken) % num_problems


@given(
    num_problems=st.integers(1, 20),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    stops=st.sets(st.integers(0, 9), max_size=4),
)
def test_a_resumed_order_continues_where_it_stopped(num_problems, counts, stops) -> None:
    """Only the cursor survives a stop; stops fall inside an epoch, at its end, or several into one epoch."""
    whole = PromptOrder(num_problems, seed=5)
    foreseen = [(whole.upcoming(count), whole.take(count)) for count in counts]
    assert all(upcoming == taken for upcoming, taken in foreseen)
    expected = [taken for _, taken in foreseen]
    order, taken = PromptOrder(num_problems, seed=5), []
    for number, count in enumerate(counts):
        if number in stops:
            order = PromptOrder(num_problems, seed=5, cursor=order.cursor)
        taken.append(order.take(count))
    assert taken == expected


def test_epochs_and_seeds_have_their_own_order() -> None:
    order = PromptOrder(50, seed=1)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert PromptOrder(50, seed=2).take(50) != first
    assert PromptOrder(50, seed=1).take(50) == first


def test_epoch_counts_passes() -> None:
    order = PromptOrder(4, seed=0)
    order.take(6)
    assert order.epoch == 1.5


# -- ledger --------------------------------------------------------------------------------------


def test_a_ledger_that_closes() -> None:
    ledger = Ledger(taken=10, trained=6, skipped=Counter(all_right=1, all_wrong=3))
    ledger.check()
    assert dict(ledger.metrics()) == {
        "data/drawn": 10.0,
        "data/trained": 6.0,
        "data/skipped": 4.0,
        "data/skipped/all_right": 1.0,
        "data/skipped/all_wrong": 3.0,
    }


@pytest.mark.parametrize("change", [{"taken": 11}, {"trained": 7}, {"skipped": Counter(all_right=1)}])
def test_a_ledger_that_does_not_close_stops_the_run(change) -> None:
    whole = {"taken": 10, "trained": 6, "skipped": Counter(all_right=1, all_wrong=3)}
    with pytest.raises(RuntimeError, match="does not close"):
        Ledger(**{**whole, **change}).check()


def test_a_ledger_survives_json() -> None:
    ledger = Ledger(taken=10, trained=6, skipped=Counter(all_right=4))
    restored = Ledger()
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored == ledger
    restored.skipped["all_wrong"] += 1  # a reason that is new after the resume
