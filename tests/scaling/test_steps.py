"""The simulated steps: hand arithmetic, and what holds for any lengths. No torch, no model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.scaling.lengths import BatchLengths
from vlm_rl.scaling.rates import CardSpeed, assumed_rates, with_decode_rate, with_learner_rate
from vlm_rl.scaling.simulator import Decoding, EngineFleet, Sides, simulate

PROMPTS, RESPONSES = 8, 2
CONSTANT = BatchLengths([1] * PROMPTS, [[10] * RESPONSES] * PROMPTS)  # 16 responses of 10 tokens
ONE_STEP = Decoding(step=2.0, context=0.0, reading=0.0)  # 20 s for any number of responses of 10 tokens

groups = st.lists(st.lists(st.integers(1, 60), min_size=RESPONSES, max_size=RESPONSES), min_size=1, max_size=9)
batches = st.lists(groups, min_size=4, max_size=5).map(
    lambda drawn: [BatchLengths([1 + 3 * index for index in range(len(batch))], batch) for batch in drawn]
)
decodings = st.builds(Decoding, st.floats(0.01, 2), st.floats(0, 0.1), st.floats(0, 0.1))
numbers = st.integers(1, 5)


def fleet_of(
    decoding: Decoding, *, engines: int, places: int, ranks: int = 1, is_served: bool = False, ahead: int = 0
) -> EngineFleet:
    return EngineFleet(decoding, Sides(engines, ranks, places, is_served, ahead), size=RESPONSES)


# -- by hand -----------------------------------------------------------------------------------------


def test_a_rollout_by_hand() -> None:
    """A prompt of 10 tokens is read once, 1 s. Three steps of both responses: contexts of 20, 22 and 24 tokens, then
    two of the longer one: 13 and 14. So 1 + 5 x 1 + .01 x (66 + 27) = 6.93 s."""
    fleet = fleet_of(Decoding(step=1.0, context=0.01, reading=0.1), engines=1, places=2)
    fleet.begin(0, BatchLengths([10], [[3, 5]]), 0.0)
    assert fleet.wait(0, 0.0) == pytest.approx(6.93)
    assert fleet.busy(100.0) == pytest.approx(6.93)


def test_who_finds_no_place_waits() -> None:
    """Two places: 4 and 6 tokens begin; the third response of 3 follows the first and ends at step 7."""
    fleet = fleet_of(Decoding(1.0, 0.0, 0.0), engines=1, places=2)
    fleet.begin(0, BatchLengths([1, 1], [[4, 6], [3, 1]]), 0.0)
    assert fleet.wait(0, 0.0) == 7.0  # the fourth begins at 6, where the second ends


def test_servers_are_given_whole_groups() -> None:
    """Two servers with room for a group each: 5 and 2 steps; the third group goes to the second server, to step 6."""
    fleet = fleet_of(Decoding(1.0, 0.0, 0.0), engines=2, places=2, is_served=True, ahead=1)
    fleet.begin(0, BatchLengths([1] * 3, [[5, 1], [2, 2], [4, 4]]), 0.0)
    assert fleet.wait(0, 0.0) == 6.0


def test_new_weights_in_flight() -> None:
    """Pushed at 2.5 s: the third step is finished, then 1 s of pause, and prompt and 2 x 3 tokens are read in again,
    once the prompt: 13 x .1 s. Two steps of the longer response are left."""
    fleet = fleet_of(Decoding(1.0, 0.0, 0.1), engines=1, places=2)
    fleet.begin(0, BatchLengths([7], [[4, 5]]), 0.0)  # read in by .7 s
    fleet.pause(3.2, 1.0)
    assert fleet.wait(0, 0.0) == pytest.approx(0.7 + 3 + 1 + 1.3 + 2)
    assert fleet.tokens == {(0, 0): 6, (0, 1): 3}


@pytest.mark.parametrize("sides", [Sides(4, 4, 16, False), Sides(2, 2, 16, True), Sides(3, 1, 16, True)])
def test_without_overlap_a_step_is_the_sum_of_its_phases(sides: Sides) -> None:
    pace = simulate([CONSTANT] * 3, sides, decoding=ONE_STEP, train=[5.0] * 3, sync=1.0, other=0.5)
    assert pace.seconds == 20 + 5 + 1 + 0.5
    assert (pace.rollout, pace.age) == (20, 0)
    assert pace.learner_waits == pytest.approx(20 / 26.5)
    assert pace.engines_wait == pytest.approx(1 - 20 / 26.5 if sides.is_served else 0.0)


@pytest.mark.parametrize(("train", "expected"), [(20.0, 20.0), (30.0, 30.0), (19.0, 20.0)])
def test_one_step_ahead_hides_the_shorter_side(train: float, expected: float) -> None:
    """Both sides take 20 s, or the learner 30 or 19: a step is the longer of the two. No sync, so no pause."""
    pace = simulate(
        [CONSTANT] * 8, Sides(2, 2, 16, True, 1), decoding=ONE_STEP, train=[train] * 8, sync=0.0, other=0.0, skipped=2
    )
    assert pace.seconds == expected
    assert pace.rollout == expected - train


def test_a_sync_in_flight_by_hand() -> None:
    """Servers need .8 s to read 8 prompts of one token, and 20 s. At 5 s three steps are drawn (the third is finished
    at 6.8 s) of 16 responses; 1 s of sync; 8 + 48 tokens are read in again. So the batch is done 1 + 5.6 s late."""
    decoding = Decoding(step=2.0, context=0.0, reading=0.1)
    pace = simulate(
        [CONSTANT] * 8, Sides(1, 1, 16, True, 1), decoding=decoding, train=[5.0] * 8, sync=1.0, other=0.0, skipped=2
    )
    assert pace.seconds == pytest.approx(0.8 + 20 + 1 + 5.6)
    assert pace.age == pytest.approx(0.3)  # 3 of 10 tokens are a step old


def test_rates_by_hand() -> None:
    """10 parameters of 2 bytes, 4 bytes a token of context, 5 bytes and 20 operations a second."""
    card = CardSpeed(bandwidth=5.0, operations=20.0, link=10.0, network=2.0)
    rates = assumed_rates(
        card,
        parameters=10,
        all_parameters=15,
        kv_bytes=4,
        itemsize=2,
        is_checkpointed=True,
        zero_stage=2,
        updates=3,
        passes=1,
    )
    assert rates.decoding == Decoding(step=4.0, context=0.8, reading=1.0)
    assert (rates.forward, rates.update) == (1.0, 4.0)  # 2 and 8 operations a parameter
    assert rates.train_seconds(7.0, ranks=1, rows=2) == 7 * (4 + 1)
    # two ranks send half of 30 bytes at 10 a second: gradients of 2 rows and new weights, in 3 updates
    assert rates.train_seconds(7.0, ranks=2, rows=2) == pytest.approx(35 + 3 * 3 * 1.5)
    assert replace(rates, zero_stage=3).train_seconds(7.0, ranks=2, rows=2) == pytest.approx(35 + 3 * 2 * 4 * 1.5)
    assert replace(rates, zero_stage=1).train_seconds(7.0, ranks=16, rows=2) == pytest.approx(
        35 + 3 * 2 * 30 * 15 / 32
    )
    given = with_decode_rate(rates, 2.0, places=8, context=5.0).decoding
    assert given.step + 8 * 5 * given.context == pytest.approx(8 / 2)
    assert given.context / given.step == pytest.approx(0.2)
    assert (with_learner_rate(rates, 0.5).update, with_learner_rate(rates, 0.5).forward) == (2.0, 0.5)


# -- for any lengths -----------------------------------------------------------------------------------


@given(
    batches=batches,
    decoding=decodings,
    engines=numbers,
    ranks=numbers,
    places=st.integers(2, 20),
    ahead=st.integers(0, 2),
    is_served=st.booleans(),
    train=st.floats(0.1, 200),
    sync=st.floats(0, 3),
)
def test_what_every_simulation_keeps(
    batches, decoding, engines, ranks, places, ahead, is_served, train, sync
) -> None:
    if not is_served:
        ahead, ranks = 0, engines
    sides = Sides(engines, ranks, places, is_served, ahead)
    pace = simulate(batches, sides, decoding=decoding, train=[train] * len(batches), sync=sync, other=0.1)
    assert pace.seconds == pytest.approx(pace.rollout + train + sync + 0.1)
    assert 0 <= pace.age <= ahead
    assert 0 <= pace.learner_waits < 1
    a_step = decoding.step + decoding.context * (60 + 30) * places  # one may be in progress at either end
    assert -2 * a_step / min(pace.seconds, pace.rollout or 1) <= pace.engines_wait <= 1
    longest = max(max(map(max, batch.responses)) for batch in batches[: len(batches) - ahead])
    if ahead == 0:  # at least the decode steps of the longest response
        assert len(batches) * pace.rollout >= longest * decoding.step - 1e-9


@given(batch=batches.map(lambda drawn: drawn[0]), decoding=decodings, engines=numbers, places=st.integers(2, 20))
def test_every_token_is_drawn_once(batch, decoding, engines, places) -> None:
    fleet = fleet_of(decoding, engines=engines, places=places, ranks=2, is_served=True, ahead=1)
    fleet.begin(0, batch, 0.0)
    fleet.pause(5.0, 1.0)
    fleet.begin(1, batch, 7.0)
    fleet.wait(0, fleet.wait(1, 7.0))
    tokens = sum(map(sum, batch.responses))
    assert [sum(n for (b, _), n in fleet.tokens.items() if b == k) for k in (0, 1)] == [tokens, tokens]


@given(batch=batches.map(lambda drawn: drawn[0]), decoding=decodings, engines=numbers)
def test_twice_as_many_engines_never_draw_longer(batch, decoding, engines) -> None:
    """With a place for every response: each of the 2 N engines draws a part of what one of the N engines draws."""
    few, many = (
        simulate([batch], Sides(n, n, 100, False), decoding=decoding, train=[1.0], sync=0.0, other=0.0)
        for n in (engines, 2 * engines)
    )
    assert many.rollout <= few.rollout * (1 + 1e-12)


@given(batch=batches.map(lambda drawn: drawn[0]), decoding=decodings, engines=numbers)
def test_servers_of_one_rank_draw_as_engines_in_process(batch, decoding, engines) -> None:
    """With room for all, groups are dealt out in turns, which is what ranks do with their shares."""
    here, there = (
        simulate([batch], sides, decoding=decoding, train=[1.0], sync=0.0, other=0.0)
        for sides in (Sides(engines, engines, 100, False), Sides(engines, 1, 100, True))
    )
    assert there.rollout == pytest.approx(here.rollout)


@given(servers=st.integers(1, 7), decoding=decodings, work=st.floats(1, 100), length=st.integers(1, 40))
def test_on_policy_no_split_beats_all_cards_at_both(servers, decoding, work, length) -> None:
    """With equal lengths, an update divided evenly and nothing lost between phases."""
    batch = BatchLengths([5] * 16, [[length] * RESPONSES] * 16)
    both, split = (
        simulate([batch] * 2, sides, decoding=decoding, train=[work / sides.ranks] * 2, sync=0.0, other=0.0)
        for sides in (Sides(8, 8, 100, False), Sides(servers, 8 - servers, 100, True))
    )
    assert both.seconds <= split.seconds * (1 + 1e-9)


def test_more_ahead_helps_where_lengths_differ_from_step_to_step() -> None:
    """Steps of 10 and 30 s in turns, a learner of 20 s. One ahead, every second step waits 10 s for the long batch.
    Two ahead, it was begun a step earlier."""
    short, long = (BatchLengths([1], [[n] * RESPONSES]) for n in (5, 15))
    times = []
    for ahead in (0, 1, 2):
        sides = Sides(1, 1, 4, True, ahead)
        steps = [short, long] * 8 + [short] * ahead  # an even number counts
        pace = simulate(steps, sides, decoding=ONE_STEP, train=[20.0] * len(steps), sync=0, other=0, skipped=4)
        times.append(pace.seconds)
    assert times == [40, 25, 20]


def test_mini_batches_hold_every_prompt_once() -> None:
    parts = CONSTANT.mini_batches(3)
    assert [len(part.prompts) for part in parts] == [3, 3, 2]
    assert np.concatenate([part.responses for part in parts]).tolist() == list(CONSTANT.responses)
