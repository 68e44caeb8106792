"""`vlm-rl plan`: the command, what fits, the learner's planner, and the rates of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.example_run import build_run
from vlm_rl.cli import main
from vlm_rl.config import Config, load_config
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import Card, fits
from vlm_rl.run.directory import RunDirectory
from vlm_rl.scaling.answers import advice, write_plot
from vlm_rl.scaling.command import rates_of
from vlm_rl.scaling.divisions import Division, Workload, best_of, divide, plans, server_cards
from vlm_rl.scaling.hours import hours_line
from vlm_rl.scaling.lengths import BatchLengths, check_measures, groups_of_run, made_up, of_groups
from vlm_rl.scaling.measured import measured_rates
from vlm_rl.scaling.rates import CardSpeed, PhaseRates, assumed_rates
from vlm_rl.scaling.simulator import Pace
from vlm_rl.scaling.update import Rows, UpdateTime, useful_cost

RECIPE = Path(__file__).parents[2] / "configs" / "virl39k_luspo_7b.yaml"
SERVED_RECIPE = RECIPE.with_stem("virl39k_luspo_7b_servers")
LONG_ROWS = RECIPE.with_stem("virl39k_luspo_7b_32k_48gb")
ROWS = Rows(budget=2048, hidden_size=128)


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a recipe on 8 and on 3 cards, as JSON, PNG and HTML."""
    folder = tmp_path_factory.mktemp("plan")
    words = ["plan", str(RECIPE), "--gpus", "8", "3", "--ahead", "0", "1", "--steps", "2"]
    for plot in ("plan.png", "plan.html"):
        assert main([*words, "--json", str(folder / "plan.json"), "--plot", str(folder / plot)]) == 0
    return folder


def test_the_command_weighs_every_division(answered: Path) -> None:
    tree = json.loads((answered / "plan.json").read_text())
    eight, three = tree["gpus"]
    assert [eight["gpus"], three["gpus"]] == [8, 3]
    found = eight["divisions"]
    assert {each["learner_cards"] + each["server_cards"] for each in found if each["server_cards"]} == {8}
    assert {each["server_cards"] for each in found} == set(range(8))
    fitting = [each for each in found if each["pace"]]
    for each in fitting:
        assert each["responses_per_second"] == pytest.approx(128 * 8 / each["pace"]["seconds"])
    most = max(each["responses_per_second"] for each in fitting)
    equal = [each for each in fitting if each["responses_per_second"] >= 0.98 * most]
    best = min(equal, key=lambda each: (each["ahead"], each["server_cards"]))
    cards = f"{best['learner_cards']} cards for the learner and {best['server_cards']} for servers"
    assert eight["advice"].startswith(f"8 GPUs: {cards if best['server_cards'] else 'colocated'}, ")
    assert "assumptions" in eight["advice"]
    assert [line["what"] for line in tree["basis"]][:2] == ["a step", "lengths"]


def test_what_does_not_fit_is_shown_with_its_reason(answered: Path) -> None:
    """The verdict is the dry run's: 7B under ZeRO 2 on one card of 80 GB."""
    tree = json.loads((answered / "plan.json").read_text())
    alone = [each for each in tree["gpus"][0]["divisions"] if each["learner_cards"] == 1]
    assert len(alone) == 1 and alone[0]["pace"] is None
    _, served = plans(load_config(RECIPE), [8])
    assert "; ".join(alone[0]["misfits"]) == fits(served.on(1), Card.of(80)).faults != ""


def test_the_plots_are_a_picture_and_a_page(answered: Path) -> None:
    with Image.open(answered / "plan.png") as picture:
        assert picture.format == "PNG" and picture.width > 300
    text = (answered / "plan.html").read_text()
    assert "does not fit" in text and "3 GPUs: nothing fits" in text
    assert text.count('aria-label="Responses a second on ') == 1  # there is nothing to draw for 3


def test_where_nothing_fits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPE), "--gpus", "2", "--gpu-memory", "20", "--steps", "1"]) == 0
    assert "2 GPUs: nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ahead", "-1"], "--ahead is -1"),
        (["--bandwidth", "0"], "--bandwidth is 0: it must be above 0"),
        (["--lengths", "0"], "--lengths is 0"),
        (["--steps", "0"], "--steps is 0"),
        (["--run-gpus", "8"], "go together"),
        (["rollout.carry_over=0.75"], "rollout.carry_over=null"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPE), *words]) == 2
    assert message in capsys.readouterr().err


# -- divisions -----------------------------------------------------------------------------------------


@given(gpus=st.integers(1, 300), shared=st.sampled_from([1, 2, 4, 8]))
def test_servers_get_whole_engines_and_never_all(gpus: int, shared: int) -> None:
    cards = server_cards(gpus, shared)
    assert len(cards) <= 7 and all(0 < count < gpus and count % shared == 0 for count in cards)
    assert gpus < 2 * shared or cards


def test_an_engine_samples_as_many_responses_as_the_rule_has_room_for() -> None:
    """7B in bfloat16, and 1 GiB beside it; 28 layers keep 2 x 4 heads of 128 for each of 2,000 tokens.

    Beside the learner it takes .45 of 80 GB, a server .92.
    """
    config = load_config(SERVED_RECIPE, ["rollout.batch_size=4096"])
    batch = BatchLengths([1000] * 16, [[1000] * 8] * 16)
    work = Workload(*plans(config, [8]), [batch], ROWS, rates_of_any_run(config), card=80e9, skipped=0)
    response = 2000 * 28 * 2 * 4 * 128 * 2
    together, apart = ((share * 80e9 - 2 * 8_292_166_656 - 2**30) / response for share in (0.45, 0.92))
    divisions = divide(work, 8, [0])
    assert divisions[0].is_colocated and divisions[0].places == int(together) == 159
    assert {each.places for each in divisions[1:]} == {int(apart)} == {487}


def test_the_advice_says_which_side_does_not_fit() -> None:
    pace = Pace(seconds=1.0, rollout=0.5, learner_waits=0.5, engines_wait=0.0, age=0.0)
    fit = Division(8, 8, 0, 0, pace=pace, efficiency=1.0, responses_per_second=2.0)
    split = Division(8, 4, 4, 0, pace=pace, efficiency=1.0, responses_per_second=2.0)
    over = {"misfits": ("too large",), "pace": None}
    assert "; no split fits." in advice([fit, replace(split, **over)], {"longer": [fit]}, "")
    assert "; colocated does not fit." in advice([replace(fit, **over), split], {"longer": [split]}, "")


def test_a_plot_has_a_colour_for_every_ahead(tmp_path: Path) -> None:
    pace = Pace(seconds=1.0, rollout=0.5, learner_waits=0.5, engines_wait=0.0, age=0.0)
    many = [Division(8, 4, 4, ahead, pace=pace, responses_per_second=1.0) for ahead in range(12)]
    assert write_plot({8: many}, {8: ""}, [], tmp_path / "plan.png").stat().st_size


def test_ranks_that_share_rows_stay_together() -> None:
    """Four ranks compute a row: 4 of 8 cards can go to servers. The dry run says the hours by the same rule."""
    config = load_config(LONG_ROWS, ["rollout.tensor_parallel=1"])
    assert config.train.sequence_parallel == 4
    batch = BatchLengths([1000] * 16, [[1000] * 8] * 16)
    colocated, served = plans(config, [8])
    work = Workload(colocated, served, [batch], ROWS, rates_of_any_run(config), card=500e9, skipped=0)
    assert [(each.learner_cards, each.server_cards) for each in divide(work, 8, [0])] == [(8, 0), (4, 4)]
    uneven = divide(work, 6, [0])[0]
    assert uneven.misfits == ("train.sequence_parallel 4 does not divide 6",)
    assert "8 cards" in hours_line(dry_run(load_config(LONG_ROWS), num_ranks=8, on_gpu=True), 48)


def test_a_row_that_two_ranks_share_costs_each_half() -> None:
    batch = BatchLengths([10] * 4, [[200, 400]] * 4)
    alone = UpdateTime.of([batch], ROWS, ranks=2, waits_at_rows=True)
    shared = UpdateTime.of([batch], replace(ROWS, shared_by=2), ranks=4, waits_at_rows=True)
    assert shared.rows == alone.rows
    assert shared.cost_per_rank(1000.0) == pytest.approx(alone.cost_per_rank(1000.0) / 2)


def test_the_best_is_the_one_with_most_responses() -> None:
    pace = Pace(1.0, 0.5, 0.5, 0.0, 0.0)
    slow, fast = (Division(8, 4, 4, k, pace=pace, responses_per_second=rate) for k, rate in ((0, 2.0), (1, 3.0)))
    assert best_of([slow, fast, Division(8, 8, 0, 0, ("too large",))]) is fast
    younger = replace(fast, ahead=0, responses_per_second=2.95)  # within 2 %, with tokens of the current weights
    assert best_of([slow, fast, younger]) is younger
    assert best_of([Division(8, 8, 0, 0, ("too large",))]) is None


# -- the learner ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 400), min_size=2, max_size=2), min_size=1, max_size=6),
    prompt=st.integers(1, 300),
    ranks=st.integers(1, 5),
)
def test_no_plan_is_better_than_its_bounds(lengths: list[list[int]], prompt: int, ranks: int) -> None:
    """Every rank does at most all of the work, and one has the most expensive response, which no plan cuts."""
    batch = BatchLengths([prompt] * len(lengths), lengths)
    by_rows, once = (
        UpdateTime.of([batch], ROWS, ranks=ranks, waits_at_rows=waits).efficiency for waits in (True, False)
    )
    longest = max(useful_cost(BatchLengths([prompt], [[length]]), ROWS) for group in lengths for length in group)
    bound = min(1.0, useful_cost(batch, ROWS) / (ranks * longest))
    assert 0 < by_rows <= once * (1 + 1e-9) <= bound * (1 + 2e-9)
    assert ranks > 1 or by_rows == pytest.approx(once)


def test_costs_by_hand() -> None:
    """A prompt of 10 tokens and responses of 2 and 4: 16 tokens, and 50 + (20 + 2) + (40 + 8) pairs at 1 / 768."""
    batch = BatchLengths([10], [[2, 4]])
    assert useful_cost(batch, ROWS) == pytest.approx(16 + 120 / 768)
    time = UpdateTime.of([batch], ROWS, ranks=1, waits_at_rows=True)
    assert time.efficiency == pytest.approx(1)
    assert (time.rows, time.cost_per_rank(32)) == (1, pytest.approx(32))


@pytest.mark.parametrize(
    ("keys", "passes"),
    [
        ([], 7 / 8),  # of the first of eight mini-batches they are those of its own forward pass
        (["train.mini_batch_prompts=48"], 80 / 128),
        (["train.mini_batch_prompts=128"], 0),
        (["train.old_logprobs=sampler"], 0),
        (["algorithm.kl_coef=0.01"], 7 / 8 + 1),
        (["algorithm.credit=visual"], 2),  # with the image and without it
        (["algorithm.perception_coef=0.01", "train.old_logprobs=sampler"], 2),
    ],
)
def test_forward_passes_before_the_updates_are_those_of_a_run(keys: list[str], passes: float) -> None:
    colocated, _ = plans(load_config(RECIPE, keys), [8])
    assert rates_of(colocated, CardSpeed()).passes == pytest.approx(passes)


# -- lengths and rates of a run -------------------------------------------------------------------------


def rates_of_any_run(config: Config) -> PhaseRates:
    return assumed_rates(
        CardSpeed(1e9, 1e9),
        parameters=10_000,
        all_parameters=12_000,
        kv_bytes=64,
        itemsize=4,
        is_checkpointed=False,
        zero_stage=config.train.zero_stage,
        updates=2,
        passes=1,
    )


def measured_run(folder: Path, *, factor: float) -> RunDirectory:
    """A run whose seconds are what the assumed rates give for its own responses, times a factor."""
    run = build_run(folder, steps=4, metrics=False, eval_steps=())
    for step in run.rollout_steps():
        run.append_metrics(step, 1, {"timing/rollout": 1.0, "timing/update": 1.0, "step_time": 2.0})
    rates = rates_of_any_run(run.config())
    plain = measured_rates(run, rates, ROWS, ranks=2, prompts_of=lambda count: [20] * count)
    drawn = 1.0 / plain.rollout_scale  # what the assumptions give for a mean step
    learned = 1.0 / plain.rates.learner_scale
    for step in run.rollout_steps():
        seconds = {"timing/rollout": factor * drawn, "timing/old_logprobs": 0.25 * learned}
        seconds |= {"timing/update": factor * learned - 0.25 * learned, "timing/sync": 0.5, "timing/save": 0.25}
        run.append_metrics(step, 2, seconds | {"step_time": factor * (drawn + learned) + 0.5 + 0.125})
    return run


def test_a_run_sets_the_scale_and_is_found_again(tmp_path: Path) -> None:
    """Seconds of three times the assumptions scale both by three; simulated again, the steps take as long."""
    run = measured_run(tmp_path / "run", factor=3.0)
    rates = rates_of_any_run(run.config())
    measured = measured_rates(run, rates, ROWS, ranks=2, prompts_of=lambda count: [20] * count)
    assert len(measured.batches) == 3  # all but the first
    assert measured.rollout_scale == pytest.approx(3)
    assert measured.rates.learner_scale == pytest.approx(3)
    assert measured.rates.decoding.step == pytest.approx(3 * rates.decoding.step)
    assert (measured.rates.sync, measured.rates.other) == (0.5, pytest.approx(0.125 + 0.25))
    step = sum(measured.seconds.values())
    assert measured.again(ahead=0).seconds == pytest.approx(step)
    assert measured.again(ahead=0, saves=False).seconds == pytest.approx(step - 0.25)


def test_a_run_that_does_not_measure_rollouts_is_refused(tmp_path: Path) -> None:
    config = build_run(tmp_path / "run", steps=1, metrics=False, eval_steps=()).config()
    check_measures(config)
    for changes in (
        {"sampler": "server", "servers": ["http://127.0.0.1:1"], "ahead": 1},
        {"carry_over": 0.5},
        {"sampler": "server", "servers": "servers.txt"},
    ):
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})
        with pytest.raises(UserError, match=r"rollout\.(ahead|carry_over|servers) is"):
            check_measures(changed)
    with pytest.raises(UserError, match="train longer"):
        rates = rates_of_any_run(config)
        measured_rates(RunDirectory(tmp_path / "run"), rates, ROWS, ranks=1, prompts_of=lambda count: [1] * count)


def test_groups_of_a_run_stay_whole(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=8, metrics=False, eval_steps=())
    groups = groups_of_run(run, responses=8)
    assert groups.shape == (3 * 8, 8)  # the last quarter of eight steps, and one more; eight prompts each
    rng = np.random.default_rng(0)
    batch = made_up(rng, 5, responses=8)
    drawn = of_groups(rng, batch, groups, longest=64)
    assert drawn.prompts == batch.prompts
    assert all(any((np.array(lengths) == group).all() for group in groups) for lengths in drawn.responses)
    fewer = of_groups(rng, made_up(rng, 5, responses=3), groups, longest=10)
    assert np.shape(fewer.responses) == (5, 3) and np.max(fewer.responses) <= 10
    with pytest.raises(UserError, match="responses_per_prompt = 7"):
        groups_of_run(run, responses=7)
