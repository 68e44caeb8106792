"""The learner on 1 and 2 ranks at every ZeRO stage, against plain gradient descent without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.groups import WeighedGroup, load_reference, padded_logps, padded_scores
from tests.helpers.learner_worker import (
    CASES,
    GRADIENT_LR,
    LR,
    MAX_TOKENS,
    STEPS,
    TEMPERATURE,
    VARIANTS,
    banned_ids,
    make_groups,
    norm_of,
    perturb,
    weigh,
)
from tests.helpers.paper_sums import paper_sum
from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Runner
from vlm_rl.algorithms import ALGORITHMS, Algorithm
from vlm_rl.config import TrainConfig
from vlm_rl.distributed import from_main
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.learner.deepspeed import deepspeed_block, import_deepspeed, offload_optimizer, reload_optimizer
from vlm_rl.model_files.weights import sent_buffers, used_parameters

WORKER = "tests.helpers.learner_worker"
TOLERANCE = 1e-4  # of ||delta_a - delta_b|| / ||delta||
GRADIENTS = ("some_algorithms", "every_rule")
PARTS = ("frozen_parts", "rates_by_part")
ALL = tuple(name for name in CASES if name not in (*GRADIENTS, *PARTS, "families", "row_sums"))
LATER = ("offloaded", "started_recipes", "gradient_sums")  # what the fast start leaves to the slow ones
# That the gradient depends on no split of the rows is in "some_algorithms" too.
SPLITS = ("one_wide_row", "many_narrow_rows", "text_here_images_there")
MOST = tuple(name for name in ALL if name not in (*LATER, *SPLITS, "adapters"))
# What depends on how ranks share gradients and state; the other cases run on one rank and in ZeRO 2.
SHARED = ("three_steps", "text_here_images_there", "guarded", "saved")
# What depends on weights in shards, each of which every rank must gather as often as all others.
GATHERED = ("some_algorithms", "head_in_chunks", "frozen_features", "one_group", "rates_by_part", "offloaded")

TODAY = todays(SUPPORTED, days=3)  # families of models

Start = tuple[int, int, tuple[str, ...]]  # ranks, ZeRO stage, cases
FAST: list[Start] = [(1, 0, (*MOST, "adapters", *PARTS, "row_sums", "some_algorithms"))]
# Every rule where gradients and optimizer are split; what ZeRO does to a gradient does not depend on the algorithm.
SPLIT: Start = (2, 2, (*ALL, "every_rule"))
OTHERS: list[Start] = [
    (2, 0, (*SHARED, "many_narrow_rows", "several_mini_batches")),
    (2, 3, (*SHARED, *GATHERED)),
]
SLOW = [*dict.fromkeys(todays([SPLIT, OTHERS[0], SPLIT, OTHERS[1]], days=4))]

_results_of: dict[Start, dict[str, dict[str, Any]]] = {}


def over(*cases: str) -> pytest.MarkDecorator:
    """Run the test on every start that has these cases."""
    fast = [pytest.param(s, id=f"{s[0]}rank-zero{s[1]}") for s in FAST if {*cases} <= {*s[2]}]
    slow = [
        pytest.param(s, id=f"{s[0]}rank-zero{s[1]}-all", marks=pytest.mark.slow) for s in SLOW if {*cases} <= {*s[2]}
    ]
    return pytest.mark.parametrize("results", [*fast, *slow], indirect=True, scope="module")


def start_ranks(runner: Runner, model: Path, start: Start, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the cases return, from one start of the ranks for all of them."""
    if start not in _results_of:
        ranks, stage, cases = start
        out = folder / f"found-{ranks}-{stage}-{len(cases)}.pt"
        done = runner(model, stage, out, *cases, module=WORKER, ranks=ranks, deadline=500)
        assert done.code == 0, done.output[-4000:]
        _results_of[start] = torch.load(out, weights_only=False)
    return _results_of[start]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learner")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, runner: Runner, tiny_model: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return what rank 0 of a start wrote down."""
    return start_ranks(runner, tiny_model, request.param, folder)


@pytest.fixture(scope="module")
def single(runner: Runner, tiny_model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of one rank without ZeRO, which all others must equal."""
    return start_ranks(runner, tiny_model, FAST[0], folder)


@pytest.fixture(scope="module")
def descent(tiny_model: Path) -> dict[str, Tensor]:
    """Return the change of every weight after STEPS steps of p -= LR * grad on padded one-response rows.

    With old log-probs those of the step itself the ratio is 1 and the gradient of the clipped
    surrogate is -weight * A * grad lp (no rollout has sampler's log-probs here).
    """
    model = load_reference(tiny_model)
    groups = make_groups(tiny_model, model.config)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(STEPS):
        gradient = gradient_of(model, groups)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LR * gradient[name]
    return {name: p.detach() - start[name] for name, p in model.named_parameters()}


def gradient_of(model: torch.nn.Module, groups: list[WeighedGroup]) -> dict[str, Tensor]:
    """Return the gradient of the sum of -weight * A * lp on padded rows of the unmodified model."""
    logps = padded_logps(model, groups, banned=banned_ids(model.config), temperature=TEMPERATURE)
    factors = [group.weights_G * group.advantages_G for group in groups]
    terms = [-float(factors[g][i]) * lp.sum() for g, row in enumerate(logps) for i, lp in enumerate(row)]
    model.zero_grad()
    torch.stack(terms).sum().backward()
    return {name: parameter.grad for name, parameter in used_parameters(model)}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """||a - b|| / ||b||."""
    assert a.keys() == b.keys()
    return norm_of({name: a[name] - b[name] for name in b}) / norm_of(b)


def is_vision(name: str) -> bool:
    return ".visual." in name


def check_same_batch(results, single, descent, case: str) -> None:
    delta = results[case]["delta"]
    assert distance(delta, single["three_steps"]["delta"]) <= TOLERANCE
    assert distance(delta, descent) <= TOLERANCE
    assert all(change.any() for change in delta.values()), "a trainable tensor did not move"
    assert results[case]["loss"] == pytest.approx(single["three_steps"]["loss"], rel=1e-5)
    assert results[case]["norm"] == pytest.approx(single["three_steps"]["norm"], rel=1e-5)
    # 5 groups of 5 + 9 + 3 + 12 tokens; padding rows are not counted
    assert results[case]["tokens"] == [145] * STEPS


@over("three_steps")
def test_three_steps_are_plain_gradient_descent(results, single, descent) -> None:
    check_same_batch(results, single, descent, "three_steps")


@over("one_wide_row")
def test_one_wide_row_gives_the_same(results, single, descent) -> None:
    check_same_batch(results, single, descent, "one_wide_row")


@over("many_narrow_rows")
def test_many_narrow_rows_give_the_same(results, single, descent) -> None:
    check_same_batch(results, single, descent, "many_narrow_rows")


@over("checkpointing")
def test_gradient_checkpointing_gives_the_same(results, single, descent) -> None:
    check_same_batch(results, single, descent, "checkpointing")


@over("text_here_images_there")
def test_text_on_one_rank_and_images_on_the_other_give_the_same(results, single, descent) -> None:
    check_same_batch(results, single, descent, "text_here_images_there")


@over("head_in_chunks")
def test_a_head_in_chunks_gives_the_same(results, single, descent) -> None:
    """More chunks on one rank than on the other."""
    check_same_batch(results, single, descent, "head_in_chunks")


@over("one_wide_row", "three_steps", "many_narrow_rows")
def test_the_splits_differ(results) -> None:
    counts = [results[case]["rows"] for case in ("one_wide_row", "three_steps", "many_narrow_rows")]
    assert all(len(set(per_rank)) == 1 for per_rank in counts), "all ranks do the same number of rows"
    assert counts[0][0] < counts[1][0] < counts[2][0]


@over("frozen_vision")
def test_a_frozen_vision_tower_stays_bit_for_bit(results, single) -> None:
    delta = results["frozen_vision"]["delta"]
    for name, change in delta.items():
        assert change.any() != is_vision(name), name
    assert distance(delta, single["frozen_vision"]["delta"]) <= TOLERANCE


@over("frozen_features")
def test_a_frozen_tower_is_passed_once_for_all_passes_of_a_step(results, single) -> None:
    case = results["frozen_features"]
    assert case["is_frozen"] and case["passes"] == case["rows"][0], "old log-probs and updates do not pass it again"
    assert distance(case["delta"], single["frozen_vision"]["delta"]) <= TOLERANCE


@over("blind")
def test_the_blind_pass_is_the_model_s_with_blank_images(results, tiny_model: Path) -> None:
    """Against padded rows of the unmodified model; a prompt of text has the same log-probs as ever."""
    model = load_reference(tiny_model)
    groups = make_groups(tiny_model, model.config)
    grey = [
        replace(
            g,
            prompt=replace(
                g.prompt,
                vision={k: torch.full_like(t, 0.01) if "pixel" in k else t for k, t in g.prompt.vision.items()},
            ),
        )
        for g in groups
    ]
    for name, chosen in (("blind", grey), ("seeing", groups)):
        with torch.no_grad():
            wanted = padded_logps(model, chosen, banned=banned_ids(model.config), temperature=TEMPERATURE)
        assert results["blind"][name].keys() == {(g, i) for g in range(5) for i in range(4)}
        for (g, i), logp in results["blind"][name].items():
            np.testing.assert_allclose(logp, wanted[g][i].numpy(), atol=2e-5)
    blind, seeing = results["blind"]["blind"], results["blind"]["seeing"]
    assert np.abs(blind[0, 1] - seeing[0, 1]).max() > 1e-3, "the image changes the tokens"
    np.testing.assert_array_equal(blind[2, 1], seeing[2, 1])


def part_of(name: str) -> str:
    return "merger" if ".visual.merger." in name else "tower" if is_vision(name) else "language_model"


@over("frozen_parts")
def test_only_the_part_that_is_trained_moves(results, single) -> None:
    """Where nothing is clipped, a learning rate of 0 for a part ends as freezing it does."""
    cases = results["frozen_parts"]
    for way, case in cases.items():
        for name, change in case["delta"].items():
            assert change.any() == (part_of(name) == case["part"]), (way, name)
        assert distance(case["delta"], single["frozen_parts"][way]["delta"]) <= TOLERANCE
    still, frozen = (cases[way]["delta"] for way in ("merger, the others still", "merger"))
    assert all(torch.equal(still[name], change) for name, change in frozen.items())


@over("rates_by_part", "three_steps")
def test_each_part_has_its_learning_rate(results, single, tiny_model) -> None:
    """After a step of plain descent the change is minus the rate times the gradient, part by part."""
    case, rates = results["rates_by_part"], {"tower": 3 * LR, "merger": 0.5 * LR, "language_model": LR}
    model = load_reference(tiny_model)
    gradient = gradient_of(model, make_groups(tiny_model, model.config))
    wanted = {name: -rates[part_of(name)] * grad for name, grad in gradient.items()}
    for part in rates:
        mine, theirs = ({n: d[n] for n in d if part_of(n) == part} for d in (case["delta"], wanted))
        assert distance(mine, theirs) <= TOLERANCE
    assert case["moved"] > 0 and case["same"], "after a resume the next step must be the same"
    # a cosine over three steps, at 60 degrees; the second of four steps of warm-up
    assert case["rates"] == pytest.approx([0.75 * LR, 0.5 * LR, 0.5 * LR])


@over("several_mini_batches")
def test_several_mini_batches_use_the_log_probs_before_the_first_update(results, single) -> None:
    case = results["several_mini_batches"]
    for first, second in case["clipped"]:
        assert first == 0, "at the first mini-batch the ratio is 1"
        assert second > 0, "the first update moved the log-probs of the second mini-batch's tokens"
    assert distance(case["delta"], single["several_mini_batches"]["delta"]) <= TOLERANCE


@over("clipped_norm")
def test_clipping_scales_the_global_norm(results, single) -> None:
    case = results["clipped_norm"]
    assert case["norm"] == pytest.approx(single["three_steps"]["norm"][0], rel=1e-5)
    assert case["change"] == pytest.approx(0.01, rel=1e-3)  # lr 1 times a gradient of norm 0.01


@over("no_signal")
def test_equal_rewards_change_nothing(results) -> None:
    case = results["no_signal"]
    assert case["norm"] == case["loss"] == 0
    assert case["skipped"] == 0
    assert not any(change.any() for change in case["delta"].values())


@over("one_group")
def test_one_response_trains_whatever_the_number_of_ranks(results, single) -> None:
    case = results["one_group"]
    assert case["rows"] in ([1], [1, 1])
    assert case["tokens"] == [5] * STEPS
    assert np.isfinite(case["loss"]).all() and np.isfinite(case["norm"]).all()
    assert distance(case["delta"], single["one_group"]["delta"]) <= TOLERANCE


@over("guarded")
def test_a_bad_gradient_is_not_applied(results) -> None:
    """On the last rank alone the loss is NaN, then infinite, then 1e7 times too large."""
    case = results["guarded"]
    assert case["moved_before"] > 0
    for number, fault in enumerate(("nan", "inf", "spike"), start=1):
        assert case[fault]["skipped"] == number, fault
        assert case[fault]["unchanged"], f"{fault}: weights must stay bit for bit"
    assert not math.isfinite(case["nan"]["norm"])
    assert not math.isfinite(case["inf"]["norm"])
    assert 1e6 * case["good_norm"] < case["spike"]["norm"] < math.inf
    assert case["skipped"] == 3
    assert case["in_a_row"] == 0, "the good step ends the row"
    assert case["same_as_without"], "a refused step left a trace in the optimizer"


@over("aborts")
def test_too_many_bad_gradients_in_a_row_abort_on_every_rank(results) -> None:
    """good, bad, good, bad, bad: the fifth try is the second bad one in a row."""
    case = results["aborts"]
    assert set(case["tries"]) == {5}
    assert "2 optimizer steps in a row" in case["error"]


@over("aborts")
def test_what_is_raised_before_the_step_leaves_the_weights_alone(results) -> None:
    """Where sampler and learner disagree, the run ends so; the sums are those of all ranks."""
    assert results["aborts"]["refusal"] == "145 tokens" and results["aborts"]["kept_when_refused"]


@over("adapters")
def test_adapters_alone_are_trained_and_saved(results, single) -> None:
    """In every stage and on any number of ranks: the same merged weights, of which no frozen one moved by a bit."""
    case = results["adapters"]
    adapted = {name.partition(".lora_")[0] for name in case["trained"]}
    assert len(adapted) == 3 * 7 and len(case["trained"]) == 2 * 3 * 7
    moved = {name for name, change in case["delta"].items() if change.any()}
    assert moved == {f"{name}.weight" for name in adapted}
    assert distance(case["delta"], single["adapters"]["delta"]) <= TOLERANCE
    assert case["norm"] == pytest.approx(single["adapters"]["norm"], rel=1e-5)
    # the reference is the base model, whatever the adapters are; their KL grows from exactly 0
    assert all(case["references"]) and len(case["references"]) == 4
    assert abs(case["kl"][0]) <= 1e-9 < 1e-6 < case["kl"][1] < case["kl"][2]
    # what is stored: the adapters, and moments for them alone, which ZeRO 0 has on every rank
    size = sum(tensor.numel() for tensor in case["adapter"].values())
    assert case["moments"] in (size, 2 * size)
    assert case["files"] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_model.json",
        "config.json",
        "generation_config.json",
        "learner",
    ]
    assert all(".lora_" in name for name in case["stored"]) and not any(case["frozen"])
    assert {name.removeprefix("base_model.model.") for name in case["adapter"]} == {
        name.replace(".default.", ".") for name in case["trained"]
    }
    assert case["same"] and case["same_norm"]


@over("offloaded")
def test_an_optimizer_on_the_host_takes_the_same_step(results, request: pytest.FixtureRequest) -> None:
    """ZeRO 3's shards are copied, here to other memory of the same device: a master of 4 bytes, and from the second
    step on two moments of 4."""
    stage = request.node.name.partition("zero")[2][0]
    for dtype in ("torch.float32", "torch.bfloat16"):
        case = results["offloaded"][dtype]
        assert case["norm"] > 0 and case["same"], dtype
        assert case["states"] == ([["hp_params", "optim_states"]] * 2 if stage in "23" else [])
        if stage == "3":
            assert case["moved"] == [4 * case["shards"], 12 * case["shards"]]


def test_weights_that_are_their_own_masters_stay_where_they_are() -> None:
    """On a GPU DeepSpeed has no further copy of float32 weights; parameters are views of these."""
    weights, master = torch.arange(3.0), torch.arange(4.0)
    view = weights[1:]
    zero = SimpleNamespace(
        offloaded_states=set(),
        fp16_partitioned_groups_flat=[weights, master.bfloat16()],
        fp32_partitioned_groups_flat=[weights, master],
        optimizer=SimpleNamespace(state={}),
    )
    engine = SimpleNamespace(optimizer=zero, device=torch.device("cpu"), zero_optimization_stage=lambda: 3)
    addresses = weights.data_ptr(), master.data_ptr()
    offload_optimizer(engine)
    assert (weights.data_ptr() == addresses[0], master.data_ptr() == addresses[1]) == (True, False)
    reload_optimizer(engine)
    weights += 1
    assert torch.equal(view, weights[1:]) and torch.equal(master, torch.arange(4.0))


@over("started_recipes")
def test_every_recipe_and_every_documented_setting_starts(results) -> None:
    norms = results["started_recipes"]["norms"]
    some = {"virl39k_luspo_7b", "toy", "qwen3_30b_a3b_luspo", "llama3.2_3b_dapo_hadw", "cold_start_7b"}
    assert some | {"1 x 24 or 80 GB", "8 x 80 GB"} <= norms.keys()
    assert all(0 < norm < math.inf for norm in norms.values()), norms


@over("saved")
def test_a_saved_state_loads_without_running_code(results) -> None:
    case = results["saved"]
    assert case["moved"] > 0 and case["same"] and case["same_norm"], "the next step must be the same"
    for refusal in case["refusals"]:
        assert refusal.startswith(case["folder"]) and ".pt is not a file that DeepSpeed wrote" in refusal
    assert not case["ran"]


@over("saved")
def test_a_nan_on_any_rank_is_known_to_all(results) -> None:
    """Under ZeRO 3 the padding of shards must not be taken for one."""
    case = results["saved"]
    assert case["finite"] is None
    assert set(case["weight"]) == {case["largest"]}
    assert set(case["moment"]) == {"the optimizer's exp_avg"}


@pytest.fixture(scope="module")
def every_family(runner: Runner, family_model: Callable[[str], Path], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what two ranks with ZeRO 3 made of a tiny model of each type."""
    models = folder / "families"
    models.mkdir()
    for model_type in TODAY:
        (models / model_type).symlink_to(family_model(model_type))
    return start_ranks(runner, models, (2, 3, ("families",)), folder)["families"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TODAY)
def test_every_family_trains_on_two_ranks(every_family, family_model, model_type: str) -> None:
    """The step is that of plain descent on the unmodified model, the tower frozen or not, and is saved.

    A third of the families a day.
    """
    case, reference = every_family[model_type], load_reference(family_model(model_type))
    gradient = gradient_of(reference, make_groups(family_model(model_type), reference.config))
    wanted = {name: -GRADIENT_LR * grad for name, grad in gradient.items()}
    wanted |= {name: torch.zeros_like(buffer) for name, buffer in sent_buffers(reference)}
    layers = getattr(reference.config.get_text_config(), "layer_types", None) or ()
    tolerance = 3e-5 if "linear_attention" in layers else 1e-5  # float32 rounds a state along the whole sequence
    assert distance(case["delta"], wanted) <= tolerance
    assert case["is_saved"]
    if frozen := case.get("frozen_delta"):
        part_of = SUPPORTED[model_type].part_of
        assert not any(change.any() for name, change in frozen.items() if part_of(name) != "language_model")
        text = {name: change for name, change in wanted.items() if part_of(name) == "language_model"}
        assert distance({name: frozen[name] for name in text}, text) <= tolerance


def test_what_only_rank_0_can_see_is_known_to_all() -> None:
    assert from_main(lambda: 3) == 3

    def refuse() -> int:
        raise UserError("no such folder")

    with pytest.raises(UserError, match="no such folder"):
        from_main(refuse)


@pytest.mark.parametrize(
    ("stage", "dtype", "kept"), [*((stage, "bfloat16", True) for stage in (1, 2, 3)), (2, "float32", False)]
)
def test_bfloat16_gradients_are_summed_in_float32(stage: int, dtype: str, kept: bool) -> None:
    block = deepspeed_block(TrainConfig(zero_stage=stage), getattr(torch, dtype))
    assert (block.get("data_types") == {"grad_accum_dtype": "fp32"}) is kept


@over("gradient_sums")
def test_zero_1_sums_gradients_once_a_step(
    results: dict[str, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """Ranks with rows of unequal length then wait for each other once, where ZeRO 2 waits after each row."""
    (few, once), (many, often) = results["gradient_sums"]["wide"], results["gradient_sums"]["narrow"]
    assert many > few
    assert often == once if "zero1" in request.node.name else often >= many / few * (once - 2)


@over("row_sums")
@pytest.mark.parametrize("way", ["all weights", "adapters", "two rates, checkpointing"])
def test_one_rank_sums_its_rows_without_buckets(results: dict[str, dict[str, Any]], way: str) -> None:
    """Bit for bit as DeepSpeed does, which fills and empties a bucket for each row."""
    ours, theirs = (results["row_sums"][f"{way}, {whose}"] for whose in ("ours", "DeepSpeed's"))
    assert all(torch.equal(weight, theirs["weights"][name]) for name, weight in ours["weights"].items())
    assert ours["norms"] == theirs["norms"] and min(ours["norms"]) > 0
    assert ours["buckets"] == 0 < theirs["buckets"]


def test_deepspeed_compiles_nothing_at_its_start() -> None:
    """DeepSpeed's build of a shared-memory operator would wait forever on the lock of a build that was killed."""
    import_deepspeed()
    from deepspeed.comm.torch import build_shm_op

    assert build_shm_op() is None


# -- every algorithm, against its equation ---------------------------------------------------------


Paper = Callable[[str], tuple[float, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def paper(tiny_model: Path) -> Paper:
    """Return loss and gradient of a variant, from padded rows of the unmodified model and the papers' sums."""
    model = load_reference(tiny_model)
    bans = banned_ids(model.config)
    groups = make_groups(tiny_model, model.config)
    start = padded_logps(model, groups, banned=bans, temperature=TEMPERATURE)
    before = [[logp.detach().numpy() for logp in row] for row in start]
    other = load_reference(tiny_model)
    perturb(other)
    with torch.no_grad():
        reference = padded_logps(other, groups, banned=bans, temperature=TEMPERATURE)

    @cache
    def loss_and_gradient(name: str) -> tuple[float, dict[str, Tensor]]:
        variant = VARIANTS[name]
        rule = ALGORITHMS[variant["algorithm"]]
        weighed = weigh(groups, before, rule, hadw=variant.get("hadw", False))
        logps, entropies = padded_scores(model, groups, banned=bans, temperature=TEMPERATURE)
        loss = papers_loss(rule, weighed, logps)
        tokens = sum(len(logp) for row in logps for logp in row)
        if kl_coef := variant.get("kl_coef"):
            gaps = [r - lp for a, b in zip(reference, logps, strict=True) for r, lp in zip(a, b, strict=True)]
            loss = loss + kl_coef * sum((gap.exp() - gap - 1).sum() for gap in gaps) / tokens
        if entropy_coef := variant.get("entropy_coef"):
            loss = loss - entropy_coef * sum(h.sum() for row in entropies for h in row) / tokens
        model.zero_grad()
        loss.backward()
        gradient = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        return float(loss.detach()), gradient

    return loss_and_gradient


def papers_loss(rule: Algorithm, groups: list[WeighedGroup], logps: list[list[Tensor]]) -> Tensor:
    """Return -min(w A, clip(w) A), or CISPO's or SAPO's term, token by token, summed as the rule's paper sums it."""
    terms = []
    for group, row in zip(groups, logps, strict=True):
        assert group.old_logps is not None
        terms.append([])
        for logp, old, advantage in zip(row, group.old_logps, group.advantages_G, strict=True):
            gap = logp - torch.from_numpy(old).float()
            ratio = (gap.mean() if rule.ratio == "sequence" else gap).exp().expand(len(logp))
            bounded = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
            if rule.surrogate == "cispo":
                values = -bounded.detach() * float(advantage) * logp
            elif rule.surrogate == "sapo":
                t = 1.0 if advantage > 0 else 1.05
                values = -float(advantage) * 4 / t / (1 + (-t * (ratio - 1)).exp())
            else:
                values = -torch.minimum(ratio * float(advantage), bounded * float(advantage))
            terms[-1].append(list(values))
    advantages_PG = np.stack([group.advantages_G for group in groups])
    return paper_sum(rule.aggregation, terms, advantages_PG, max_tokens=MAX_TOKENS)


def check_gradients(results: dict[str, Any], paper: Paper) -> None:
    for name, result in results.items():
        assert len(set(result["rows"])) > 1, "all splits were the same"
        assert max(result["gaps"]) <= 1e-5, f"{name}: the gradient depends on the split: {result['gaps']}"
        is_frozen = name.endswith("+frozen")
        loss, gradient = paper(name.removesuffix("+frozen"))
        wanted = {key: g for key, g in gradient.items() if not (is_frozen and is_vision(key))}
        ours = {key: result["gradient"][key] for key in wanted}
        assert distance(ours, wanted) <= 1e-5, name
        assert result["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6), name
        if is_frozen:
            assert not any(g.any() for key, g in result["gradient"].items() if is_vision(key))


@over("some_algorithms")
def test_gradients_equal_the_equations(results, paper) -> None:
    check_gradients(results["some_algorithms"], paper)


@over("every_rule")
def test_every_gradient_equals_its_equation(results, paper) -> None:
    assert {VARIANTS[name]["algorithm"] for name in results["every_rule"]} == {*ALGORITHMS}
    check_gradients(results["every_rule"], paper)


def test_the_rules_differ(paper) -> None:
    """Gradients that agree would prove nothing: no two rules point the same way at this batch."""
    names = list(ALGORITHMS)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert distance(paper(name)[1], paper(other)[1]) > 1e-3, (name, other)


@pytest.mark.parametrize("added", ["hadw", "kl+entropy"])
def test_what_is_added_to_a_rule_turns_its_gradient(paper, added: str) -> None:
    assert distance(paper("grpo")[1], paper(f"grpo+{added}")[1]) > 1e-3


def test_there_is_a_gradient_for_freezing_to_take_away(paper) -> None:
    assert any(g.any() for key, g in paper("grpo")[1].items() if is_vision(key))
