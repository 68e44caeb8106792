"""Whole training runs on toy problems: what they write, how they sample, what stops them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from tests.helpers.graded_groups import RIGHT, WRONG, make_group
from tests.helpers.prepared_sets import write_problems
from tests.helpers.rotation import todays
from tests.helpers.served import free_port
from tests.helpers.toy_runs import (
    WORKER,
    Toys,
    assert_equal_runs,
    assert_sound,
    clean_environment,
    metrics_of,
    rollouts_of,
)
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.config import Config, parse_config
from vlm_rl.data.sets import load_set
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.checkpoint import newest_verified
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.manifest import read_manifest
from vlm_rl.run.rollout_row import ROLLOUT_SCHEMA
from vlm_rl.samplers.fingerprint import StaleWeightsError
from vlm_rl.session.token_credit import weigh

# the names that other trainers of this kind use, so that curves can be compared
KNOWN_NAMES = {
    "stability/norm_spikes",
    "stability/loss_spikes",
    *(f"completions/{name}" for name in ("mean_length", "min_length", "max_length", "mean_terminated_length")),
    "completions/clipped_ratio",
    *(f"rewards/{part}/{number}" for part in ("accuracy", "format", "overlong") for number in ("mean", "std")),
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean")),
    "step_time",
    "num_tokens",
    "learning_rate",
    "grad_norm",
    "verifier/timeout_rate",
    "data/skipped",
    "steps/skipped",
}
OWN_REWARD = "tests.helpers.own_reward.short_words"
# a mean over no response, or a correlation of constants, has no value
MAY_BE_NAN = {
    "completions/mean_terminated_length",
    *(f"length/{name}" for name in ("correct_mean", "wrong_mean", "positive_mean", "negative_mean", "sign_gap")),
    "length/reward_correlation",
}


@pytest.fixture(scope="module")
def run(toys: Toys) -> RunDirectory:
    """Return a GRPO run of four steps with two mini-batches each, evaluated at 0, 2 and 4."""
    return toys.train_run("plain", data={"eval": [str(toys.heldout)]}, eval={"every": 2})


@pytest.fixture(scope="module")
def one_batch_run(toys: Toys) -> RunDirectory:
    """Return a run of two steps with HA-DW and one mini-batch each, which begins as `run` does."""
    hadw = {"enabled": True, "scale": 1.3}
    return toys.train_run("hadw", algorithm={"hadw": hadw}, train={"mini_batch_prompts": 4, "steps": 2})


# -- what a run leaves behind ----------------------------------------------------------------------


def test_the_files_of_a_run(run: RunDirectory) -> None:
    assert {path.name for path in run.path.iterdir()} == {
        "config.yaml",
        "log.txt",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "eval",
    }
    assert run.rollout_steps() == [1, 2, 3, 4]
    assert [step for step, _ in run.checkpoints()] == [2, 4]
    assert [(e.benchmark, e.step) for e in run.evals()] == [("heldout", step) for step in (0, 2, 4)]
    assert_sound(run)


def test_the_log_says_what_checkpoints_take_and_when_they_are_saved(run: RunDirectory) -> None:
    lines = [line.partition("vlm_rl: ")[2] for line in (run.path / "log.txt").read_text().splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith("step 1/4"))
    (room,) = (line for line in lines[:first] if line.startswith("checkpoints: "))
    found = re.fullmatch(
        r"checkpoints: ([\d.]+) MB each, every 2 steps, at most 2 at a time \(keep_last 2, the best, and the one "
        rf"being written\) = [\d.]+ MB; [\d.,]+ [GM]B free in {run.path}",
        room,
    )
    assert found, room
    assert float(found[1]) == pytest.approx(read_manifest(run.checkpoints()[-1][1]).num_bytes / 1e6, rel=0.03)
    said = [line.partition(" MB")[0].rpartition(" ")[0] for line in lines if re.match(r"step \d+: sav", line)]
    assert said == ["step 2: saving", "step 2: saved", "step 4: saving", "step 4: saved"]


def test_a_disk_without_room_is_refused_before_anything_is_written(toys: Toys) -> None:
    config = toys.config("no-room")
    result = toys.runner("train", config, faults={"leave_free": {"size": 28_000_000}})
    assert result.code == 2, result.output[-3000:]
    assert "2 checkpoints at a time take 28.9 MB, and 28.0 MB are free" in result.output
    assert not toys.run("no-room").path.exists()


def test_a_stage_that_the_weights_exclude_is_refused_before_they_are_loaded(toys: Toys) -> None:
    path = toys.config("no-masters", model={"dtype": "bfloat16"}, train={"zero_stage": 0})
    result = toys.runner("train", str(path))
    assert result.code == 2 and "train.zero_stage is 0 with bfloat16 weights" in result.output
    assert "layers: " not in result.output, "the line that follows the load"


def test_a_checkpoint_opens_as_it_is(run: RunDirectory) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = run.checkpoints()[-1][1]
    AutoProcessor.from_pretrained(folder)
    AutoModelForImageTextToText.from_pretrained(folder)


def test_metrics_have_the_known_names_and_finite_values(run: RunDirectory) -> None:
    records = run.metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record.keys() >= KNOWN_NAMES
        bad = {key for key, value in record.items() if not math.isfinite(value)}
        assert bad <= MAY_BE_NAN
    assert any(record["grad_norm"] > 0 for record in records)
    assert any(record["rewards/accuracy/std"] > 0 for record in records)


def test_metrics_agree_with_the_rollouts(run: RunDirectory) -> None:
    for record, rows in zip(run.metrics(), rollouts_of(run), strict=True):
        rewards = np.array([row["reward"] for row in rows])
        assert len(rows) == 16  # 4 prompts, 4 responses each
        assert record["reward"] == pytest.approx(rewards.mean())
        assert record["num_tokens"] == sum(row["length"] for row in rows)
        parts = [row["reward_accuracy"] + row["reward_format"] + row["reward_overlong"] for row in rows]
        assert rewards == pytest.approx(parts)
        share = np.mean([row["stop_reason"] == "length" for row in rows])
        assert record["completions/clipped_ratio"] == pytest.approx(share)
        masses = [value for key, value in record.items() if key.startswith("gradient_mass/")]
        assert sum(masses) == pytest.approx(1.0 if any(row["advantage"] for row in rows) else 0.0)


def test_rollouts_are_whole(run: RunDirectory) -> None:
    for step in run.rollout_steps():
        table = run.rollouts(step)
        assert table.schema.names == ROLLOUT_SCHEMA.names
        for row in table.to_pylist():
            assert row["length"] == len(row["token_ids"]) == len(row["logprobs"])
            assert all(value <= 0 for value in row["logprobs"])
            assert row["policy_version"] == 2 * (step - 1)  # two optimizer steps for each rollout step


def test_advantages_are_the_groups_own(run: RunDirectory) -> None:
    """GRPO: (r - mean) / (std + a little), and exactly 0 where all rewards are equal."""
    for rows in rollouts_of(run):
        for start in range(0, len(rows), 4):
            group = rows[start : start + 4]
            assert len({row["prompt_id"] for row in group}) == 1
            rewards = np.array([row["reward"] for row in group])
            advantages = np.array([row["advantage"] for row in group])
            if np.ptp(rewards) == 0:
                assert not advantages.any()
            else:
                assert advantages == pytest.approx((rewards - rewards.mean()) / rewards.std(ddof=1), rel=1e-3)


def test_the_first_mini_batch_of_a_step_does_not_clip(run: RunDirectory, one_batch_run: RunDirectory) -> None:
    """With one mini-batch the ratio is 1 throughout; with two the second may clip."""
    for record in one_batch_run.metrics():
        assert record["clip_ratio/region_mean"] == 0
        assert "timing/old_logprobs" not in record
    assert any(record["clip_ratio/region_mean"] > 0 for record in run.metrics())
    assert all("timing/old_logprobs" in record for record in run.metrics())


def test_sampler_and_learner_agree(run: RunDirectory) -> None:
    for record in run.metrics():
        assert 0 < record["rollout/logprob_gap"] < 1e-5


def test_the_ledger_closes(run: RunDirectory) -> None:
    for step, record in enumerate(run.metrics(), start=1):
        assert record["data/drawn"] == record["data/trained"] == 4 * step
        assert record["data/skipped"] == 0
        assert record["epoch"] == pytest.approx(4 * step / 12)
    newest = newest_verified(run.path / "checkpoints")
    assert newest is not None
    ledger = newest[1].info["ledger"]
    assert ledger == {"drawn": 16, "trained": 16, "skipped": {}}


@pytest.mark.slow
def test_the_saved_configuration_gives_the_same_run_again(run: RunDirectory, toys: Toys) -> None:
    out = toys.run("again").path
    result = toys.runner("train", str(run.path), f"out={out}")
    assert result.code == 0, result.output[-3000:]
    assert metrics_of(RunDirectory(out)) == metrics_of(run)


def test_prompts_above_the_limit_are_left_out_and_counted(toys: Toys) -> None:
    """Every fourth of 12 problems is too long: an epoch holds nine prompts, and none is cut."""
    problems = load_set(toys.train)
    long = {problem.id for problem in problems[::4]}
    rows = [replace(p, question=p.question + " and" * 200) if p.id in long else p for p in problems]
    folder = write_problems(rows, toys.folder / "some-too-long", {})
    run = toys.train_run(
        "too-long", data={"train": [str(folder)]}, rollout={"prompts_per_step": 3}, train={"steps": 3}
    )
    trained = [row["prompt_id"] for rows in rollouts_of(run) for row in rows]
    assert not long & set(trained)
    assert {name: trained.count(name) for name in trained} == {p.id: 4 for p in problems if p.id not in long}
    last = run.metrics()[-1]
    assert last["data/trained"] == 9  # 3 steps of 3 prompts
    assert 2 <= last["data/skipped"] == last["data/skipped/too_long"] <= 3  # a long one may be the epoch's last
    assert last["data/drawn"] == 9 + last["data/skipped"]


def test_a_set_in_which_no_prompt_fits_is_refused(toys: Toys) -> None:
    message = one_message(toys.runner("train", str(toys.config("none-fits", data={"max_prompt_tokens": 30}))))
    assert "fits data.max_prompt_tokens 30" in message
    assert "Toy-train-" in message  # the shortest is named
    assert not toys.run("none-fits").path.exists()


@pytest.mark.parametrize(
    ("folders", "words"),
    [(["a b"], ["a b", "rename the folder"]), (["one/same", "two/same"], ["'same'", "rename one"])],
    ids=["bad-name", "twice"],
)
def test_names_of_evaluation_sets_are_checked_first(toys: Toys, folders: list[str], words: list[str]) -> None:
    sets = [str(write_problems(load_set(toys.heldout), toys.folder / folder, {})) for folder in folders]
    name = f"eval-{len(folders)}"
    message = one_message(toys.runner("train", str(toys.config(name, data={"eval": sets}, eval={"every": 1}))))
    assert all(word in message for word in words), message
    assert not toys.run(name).path.exists()


# -- algorithms ------------------------------------------------------------------------------------


def test_dynamic_sampling_continues_when_nothing_is_left(toys: Toys) -> None:
    """A random model is never right: every group is dropped, the weights stay, the run ends well."""
    config = toys.config(
        "dapo-nothing",
        model={"path": str(toys.random_model)},
        algorithm={"name": "dapo", "max_sampling_rounds": 2},
        train={"steps": 2},
    )
    result = toys.runner("train", str(config))
    assert result.code == 0, result.output[-3000:]
    assert result.output.count("0 of 4 prompts after 2 rounds of sampling: the step trains on what it has") == 2
    run = toys.run("dapo-nothing")
    assert [record["data/skipped"] for record in run.metrics()] == [8.0, 16.0]  # 4 prompts, 2 rounds
    assert run.metrics()[-1]["data/trained"] == 0
    newest = newest_verified(run.path / "checkpoints")
    assert newest is not None
    assert newest[1].info["ledger"]["skipped"] == {"all_wrong": 16}
    assert newest[1].info["learner"]["num_updates"] == 0


def test_dynamic_sampling_keeps_mixed_groups_only(toys: Toys) -> None:
    run = toys.train_run("dapo", algorithm={"name": "dapo", "max_sampling_rounds": 3}, train={"steps": 2})
    last = run.metrics()[-1]
    assert last["data/drawn"] == last["data/trained"] + last["data/skipped"]
    assert last["data/trained"] > 0
    assert last["data/skipped"] > 0
    for rows in rollouts_of(run):
        assert len(rows) <= 16
        for start in range(0, len(rows), 4):
            assert len({row["verdict"] == "correct" for row in rows[start : start + 4]}) == 2


def test_hadw_scales_the_advantages(run: RunDirectory, one_batch_run: RunDirectory) -> None:
    """Phi = 1 in the first step; in the second lambda exp(-sgn(A) sgn(p - C) |p - C|), C the first accuracy."""
    first, second = rollouts_of(one_batch_run)
    assert [row["advantage"] for row in first] == [row["advantage"] for row in rollouts_of(run)[0]]
    belief = np.mean([row["verdict"] == "correct" for row in first])
    assert one_batch_run.metrics()[0]["hadw/belief"] == pytest.approx(belief)
    assert not {"hadw/weight_hard", "hadw/weight_easy"} & one_batch_run.metrics()[0].keys()
    assert {"hadw/weight_hard", "hadw/weight_easy"} < one_batch_run.metrics()[1].keys()
    for start in range(0, len(second), 4):
        group = second[start : start + 4]
        rewards = np.array([row["reward"] for row in group])
        if np.ptp(rewards) == 0:
            continue
        rate = np.mean([row["verdict"] == "correct" for row in group])
        gap = rate - belief if 0 < rate < 1 else 0.0
        plain = (rewards - rewards.mean()) / rewards.std(ddof=1)
        expected = plain * 1.3 * np.exp(-np.sign(plain) * gap)
        assert [row["advantage"] for row in group] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("masked", "tokens"), [(False, 2 + 3), (True, 3)])
def test_what_is_dropped_or_filtered_counts_no_token(masked: bool, tokens: int) -> None:
    """`token` aggregation: 1 over the tokens that count. The one of 5 is dropped, the one of 2 was cut off."""
    group = make_group([5, 2, 3], [RIGHT, WRONG, RIGHT], [0.0, -1.0, 1.0], cut=[1])
    rewards = (replace(group.rewards[0], dropped=True), *group.rewards[1:])
    s: Any = SimpleNamespace(
        algorithm=replace(ALGORITHMS["grpo"], aggregation="token"),
        config=parse_config(
            {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}, "algorithm": {"mask_truncated": masked}}
        ),
    )
    weights_PG = weigh(s, [replace(group, rewards=rewards)])
    assert weights_PG[0, 2] == pytest.approx(1 / tokens)


@pytest.mark.slow
def test_kl_is_to_the_model_that_the_run_began_with(toys: Toys) -> None:
    """A resume starts from a checkpoint and must still be held to model.path."""
    changes = {"algorithm": {"kl_coef": 0.05, "entropy_coef": 0.01}, "checkpoint": {"every": 1}}
    whole = toys.train_run("kl", **changes, train={"steps": 3})
    for record in whole.metrics():
        assert record["kl"] > 0  # in the first step too, whose second mini-batch has moved already
        assert record["loss"] != record["loss/policy"]
        assert "timing/reference_logprobs" in record
    for last in (1, 3):
        config = toys.config("kl-in-parts", **changes, train={"steps": last})
        assert toys.runner("train", str(config), *(["--resume"] if last > 1 else [])).code == 0
    assert_equal_runs(toys.run("kl-in-parts"), whole)


@pytest.mark.slow
def test_kl_is_to_model_path_with_its_own_tower(toys: Toys, tmp_path: Path) -> None:
    """Where a run starts from a checkpoint with another frozen tower, it equals one whose tower could be trained."""
    from safetensors.torch import load_file, save_file

    other = Path(shutil.copytree(toys.model, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    towers = {name: tensor for name, tensor in weights.items() if "visual" in name}
    assert towers
    weights |= {name: 5 * tensor.flip(0) for name, tensor in towers.items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    found = []
    for freeze in ([], ["tower", "merger"]):
        name = f"kl-start-{len(freeze)}"
        train = {"steps": 1, "mini_batch_prompts": 4, "lr": 1e-9}
        begun = toys.train_run(f"{name}-begun", model={"path": str(other), "freeze": freeze}, train=train)
        config = toys.config(
            name, model={"path": str(toys.model), "freeze": freeze}, algorithm={"kl_coef": 0.05}, train=train
        )
        result = toys.runner("train", config, "--start-from", begun.path)
        assert result.code == 0, result.output[-3000:]
        found += [record["kl"] for record in toys.run(name).metrics()]
    assert found[0] > 1e-4 and found[1] == pytest.approx(found[0], rel=1e-3)


def test_overlong_filtering_trains_on_no_truncated_response(toys: Toys) -> None:
    """Under `sequence` each response that counts has mass |A|, a truncated one none."""
    run = toys.train_run(
        "masked",
        algorithm={"mask_truncated": True},
        rollout={"max_tokens": 9, "temperature": 1.5},  # a guess in the right format has nine tokens
        train={"steps": 2, "mini_batch_prompts": 4},
    )
    some_cut = False
    for record, rows in zip(run.metrics(), rollouts_of(run), strict=True):
        kept = [row for row in rows if row["stop_reason"] != "length"]
        some_cut |= any(row["stop_reason"] == "length" and row["advantage"] for row in rows)
        for sign, name in ((1, "positive"), (-1, "negative")):
            mass = sum(abs(row["advantage"]) for row in kept if np.sign(row["advantage"]) == sign)
            total = sum(abs(row["advantage"]) for row in kept)
            shares = [record[f"gradient_mass/{name}/decile_{decile}"] for decile in range(1, 11)]
            assert sum(shares) == pytest.approx(mass / total)
    assert some_cut, "nothing was truncated, so nothing was tested"


@pytest.mark.slow
def test_a_fixed_norm_makes_every_step_as_long(toys: Toys) -> None:
    """Plain descent with gradients of norm 2 moves the weights by at most 2 lr a step, whatever the loss's scale."""
    moved = []
    for scale in (1.0, 100.0):
        run = toys.train_run(
            f"fixed-{scale:.0f}",
            reward={"accuracy": scale, "format": 0.5 * scale, "overlong_factor": 0.0},
            algorithm={"advantage": "group_center"},
            train={"optimizer": "sgd", "lr": 1e-2, "fixed_grad_norm": 2.0, "steps": 1, "mini_batch_prompts": 4},
        )
        moved.append((distance_from_start(toys.model, run), run.metrics()[0]["grad_norm"]))
    assert moved[0][0] == pytest.approx(2e-2, rel=1e-3)
    assert moved[1][0] == pytest.approx(2e-2, rel=1e-3)
    assert moved[1][1] == pytest.approx(100 * moved[0][1], rel=1e-3)  # the metric stays the gradient's own


def distance_from_start(start: Path, run: RunDirectory) -> float:
    from safetensors.torch import load_file

    before, after = (load_file(path / "model.safetensors") for path in (start, run.checkpoints()[-1][1]))
    return math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in before))


# -- configuration -----------------------------------------------------------------------------------


# Read by validation alone, which refuses every other value: nothing is left for the run to read.
def all_keys(section: type[BaseModel]) -> set[str]:
    keys = set()
    for name, field in section.model_fields.items():
        keys.add(f"{section.__name__}.{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= all_keys(field.annotation)
    return keys


def server_nobody_runs(toys: Toys) -> dict[str, Any]:
    token = toys.folder / "server-token"
    token.write_text("secret\n")
    url = f"http://127.0.0.1:{free_port()}"
    return {"sampler": "server", "servers": [url], "server_token": str(token), "server_timeout": 0.2}


def test_a_run_that_no_server_serves_saves_and_stops(toys: Toys) -> None:
    """It waits, says so, and leaves a checkpoint from which --resume continues."""
    result = toys.runner("train", str(toys.config("unserved", rollout=server_nobody_runs(toys))))
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert "no rollout server is left: waiting up to 0.2 s for one" in result.output
    assert "stopped after step 0; resume with: vlm-rl train" in result.output
    assert [step for step, _ in toys.run("unserved").checkpoints()] == [0]


def test_a_run_whose_servers_go_in_an_evaluation_saves_and_stops(toys: Toys) -> None:
    """The first evaluation is at step 0, the second at step 2, where no checkpoint is due."""
    changes = {"data": {"eval": [str(toys.heldout)]}, "eval": {"every": 2}, "checkpoint": {"every": 4}}
    fault = {"lose_servers_in": {"phase": "evaluation", "step": 2}}
    result = toys.runner("train", str(toys.config("servers-gone", **changes)), faults=fault)
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert "no rollout server has worked: stopped after step 2; resume with: vlm-rl train" in result.output
    run = toys.run("servers-gone")
    assert [step for step, _ in run.checkpoints()] == [2] and [e.step for e in run.evals()] == [0]


@pytest.mark.slow
def test_servers_that_one_of_two_ranks_loses_in_an_evaluation_stop_both(toys: Toys) -> None:
    """Rank 1 loses them at step 2, where rank 0 answers its half. Both save, and the resumed run is the same."""
    changes = {"data": {"eval": [str(toys.heldout)]}, "eval": {"every": 2}, "checkpoint": {"every": 4}}
    config = str(toys.config("servers-of-one", **changes))
    stopped = toys.runner("train", config, faults={"lose_servers_of": {"rank": 1, "evaluation": 2}}, ranks=2)
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    assert "no rollout server has worked: stopped after step 2; resume with" in stopped.output
    run = toys.run("servers-of-one")
    assert [step for step, _ in run.checkpoints()] == [2] and [e.step for e in run.evals()] == [0]
    resumed = toys.runner("train", config, "--resume", ranks=2)
    assert resumed.code == 0, resumed.output[-3000:]
    assert [e.step for e in run.evals()] == [0, 2, 4]
    assert toys.runner("train", str(toys.config("servers-never-lost", **changes)), ranks=2).code == 0
    assert_equal_runs(run, toys.run("servers-never-lost"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_servers_that_one_of_two_ranks_loses_in_a_rollout_stop_both(toys: Toys, rank: int) -> None:
    """The other one has finished its half of step 3. Both save the state from its beginning."""
    config = str(toys.config(f"rollout-servers-of-{rank}", checkpoint={"every": 4}))
    fault = {"lose_servers_of_rollout": {"rank": rank, "step": 3}}
    stopped = toys.runner("train", config, faults=fault, ranks=2)
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    assert "no rollout server has worked: stopped after step 2; resume with" in stopped.output
    run = toys.run(f"rollout-servers-of-{rank}")
    assert [step for step, _ in run.checkpoints()] == [2]
    assert toys.runner("train", config, "--resume", ranks=2).code == 0
    assert toys.runner("train", str(toys.config(f"rollout-never-lost-{rank}")), ranks=2).code == 0
    assert_equal_runs(run, toys.run(f"rollout-never-lost-{rank}"))


@pytest.mark.slow
def test_every_key_is_read(toys: Toys) -> None:
    """Two runs that turn features on: a key that nothing reads is an option that does nothing."""
    benchmark = benchmark_set(toys, "keys-set")
    runs = {
        "adamw": {
            "algorithm": {"name": "grpo", "hadw": {"enabled": True}, "credit": "visual", "length_bonus": 0.1},
            "data": {"train": [str(benchmark)], "allow_test_rows": True, "eval": [str(toys.heldout)]},
            "train": {"optimizer": "adamw", "schedule": "cosine", "warmup_steps": 1, "steps": 1},
            "log": {"samples_every": 1, "trackers": ["tensorboard"]},
            "eval": {"every": 1, "by_set": {"heldout": {"samples": 2, "temperature": 1.0}}},
        },
        "sgd": {
            "algorithm": {"name": "dapo", "distillation": {"teacher": str(toys.random_model), "top_k": 4}},
            "reward": {
                "repetition": 0.1,
                "brevity": 0.1,
                "function": OWN_REWARD,
                "allow_function": True,
            },
            "train": {"optimizer": "sgd", "deepspeed": {"wall_clock_breakdown": False}, "steps": 1},
        },
        "tools": {
            "environment": {"name": "tests.helpers.own_environment.Counter", "allow_class": True},
            "train": {"steps": 1, "micro_batch_tokens": 3000},
        },
        "server": {"rollout": server_nobody_runs(toys) | {"ahead": 1}},
    }
    read: set[str] = set()
    for name, changes in runs.items():
        out = toys.folder / f"keys-{name}.json"
        config = toys.config(f"keys-{name}", **changes)
        result = toys.runner("train", str(config), faults={"record_keys": {"out": str(out)}})
        assert result.code == (EXIT_STOPPED if name == "server" else 0), result.output[-3000:]
        read |= set(json.loads(out.read_text()))
    assert not all_keys(Config) - read
    assert [result.summary["k"] for result in toys.run("keys-adamw").evals()] == [2, 2]


@pytest.mark.slow
def test_two_ranks_that_share_rows_make_the_run_of_one_rank(toys: Toys) -> None:
    """With a reference and old log-probs, through ZeRO 2; the second step is that of a resume that shares no more."""
    options: dict[str, Any] = {"algorithm": {"name": "gspo", "kl_coef": 0.1, "entropy_coef": 0.01}}

    def settings(steps: int, ranks: int) -> dict[str, Any]:
        return options | {"train": {"steps": steps, "zero_stage": 2, "sequence_parallel": ranks}}

    alone = toys.train_run("rows-alone", **settings(2, 1))
    for config, *resume in (
        (toys.config("rows-shared", **settings(1, 2)),),
        (toys.config("rows-shared", **settings(2, 1)), "--resume"),
    ):
        result = toys.runner("train", str(config), *resume, ranks=2)
        assert result.code == 0, result.output[-3000:]
        assert ("each is computed by 2 ranks together" in result.output) == (not resume)
    shared = toys.run("rows-shared")
    for ours, wanted in zip(metrics_of(shared), metrics_of(alone), strict=True):
        assert 0 <= ours.pop("rollout/logprob_gap") < 1e-5 > wanted.pop("rollout/logprob_gap")  # type: ignore[operator]
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for ours, wanted in zip(rollouts_of(shared), rollouts_of(alone), strict=True):
        assert [row["text"] for row in ours] == [row["text"] for row in wanted]


# -- the card, which engine and learner share ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", todays([2, 3], days=2))
def test_the_optimizer_is_on_the_host_whenever_the_engine_is_awake(toys: Toys, stage: int) -> None:
    """From before the engine starts or wakes until it sleeps: a card that the engine shares may hold no more. A run
    that is stopped and resumed has the same optimizer, bit for bit, as one whose optimizer never moves."""
    changes: dict[str, Any] = {
        "data": {"eval": [str(toys.heldout)]},
        "eval": {"every": 2},
        "train": {"zero_stage": stage, "optimizer": "adamw"},
        "checkpoint": {"every": 1},
    }
    log = toys.folder / f"card-{stage}.jsonl"
    config = toys.config(f"card-{stage}", rollout={"offload_optimizer": True}, **changes)
    stops = {"terminate_in": {"phase": "rollout", "step": 2}}
    stopped = toys.runner("train", str(config), faults={"record_card": {"out": str(log)}, **stops})
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    resumed = toys.runner("train", str(config), "--resume", faults={"record_card": {"out": str(log)}})
    assert resumed.code == 0, resumed.output[-3000:]

    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert [doing for doing, _ in seen].count("restore") == 1
    engine_has_card = {"start": True, "wake": True, "draw": True, "save": True, "sleep": True}
    learner_has_card = {"restore": False, "train": False}
    on_host = engine_has_card | learner_has_card
    assert {doing for doing, _ in seen} == on_host.keys()
    assert all(states == (["hp_params", "optim_states"] if on_host[doing] else []) for doing, states in seen), seen
    awake = False
    for doing, _ in seen:
        assert not (awake and doing in learner_has_card), seen
        awake = doing != "sleep" and (awake or doing in ("start", "wake"))
    assert_equal_runs(toys.run(f"card-{stage}"), toys.train_run(f"card-never-moved-{stage}", **changes))


# -- responses that the grader could not judge --------------------------------------------------------


@pytest.mark.parametrize("policy", [pytest.param("zero", marks=pytest.mark.slow), "drop"])
def test_an_undecided_response_scores_nothing_or_leaves_its_group(toys: Toys, policy: str) -> None:
    """Response 1 of each group is not judged. Dropped, it has no advantage, and the others' add up to 0."""
    config = toys.config(f"undecided-{policy}", reward={"undecided": policy}, train={"steps": 2})
    result = toys.runner("train", str(config), faults={"undecided": {"index": 1}})
    assert result.code == 0, result.output[-3000:]
    run = toys.run(f"undecided-{policy}")
    for record, rows in zip(run.metrics(), rollouts_of(run), strict=True):
        assert record["verifier/error_rate"] == 0.25
        assert record["verifier/dropped_rate"] == (0.25 if policy == "drop" else 0)
        for start in range(0, len(rows), 4):
            group = rows[start : start + 4]
            assert [row["verdict"] == "error" for row in group] == [False, True, False, False]
            assert group[1]["reason"] == "injected" and group[1]["reward_accuracy"] == 0
            advantages = [row["advantage"] for row in group]
            assert sum(advantages) == pytest.approx(0, abs=1e-9)
            if policy == "drop":
                assert advantages[1] == 0
                rewards = np.array([row["reward"] for row in group])[[0, 2, 3]]
                expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                assert [advantages[i] for i in (0, 2, 3)] == pytest.approx(expected.tolist(), abs=1e-9)
    moved = any(row["advantage"] for rows in rollouts_of(run) for row in rows)
    assert moved and any(record["grad_norm"] > 0 for record in run.metrics())


# -- what stops a run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"skip_sync": {"number": 2}}, marks=pytest.mark.slow),
        {"drop_tensor": {"number": 2, "name": "model.language_model.norm.weight"}},
    ],
    ids=["sync-skipped", "tensor-dropped"],
)
def test_a_stale_sampler_stops_the_run(toys: Toys, fault: dict[str, Any]) -> None:
    """The second sync is the first after an update."""
    name = f"stale-{next(iter(fault))}"
    result = toys.runner("train", str(toys.config(name)), faults=fault)
    assert result.code == 1
    assert StaleWeightsError.__name__ in result.output
    assert "does not hold the learner's weights" in result.output
    assert toys.run(name).metrics() == [], "nothing was trained on another policy's responses"


def test_a_sampler_that_computes_differently_stops_the_run(toys: Toys) -> None:
    """Its weights and buffers agree; only its log-probs tell."""
    fault = {"rescale_attention": {"number": 2}}
    result = toys.runner("train", str(toys.config("rescaled")), faults=fault)
    assert result.code == 1
    assert "StaleWeightsError: sampler 'transformers' (policy version" in result.output
    assert "holds the learner's weights, but its log-probs of the probe" in result.output
    assert "compare model.layer_patches=false" in result.output
    assert toys.run("rescaled").metrics() == []


def test_a_gap_between_sampler_and_learner_stops_the_run(toys: Toys) -> None:
    result = toys.runner("train", str(toys.config("gap", rollout={"max_gap": 1e-12})))
    assert result.code == 1
    assert "GapError: step 1" in result.output
    assert "rollout.max_gap=1e-12" in result.output


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_trainer_that_lost_its_lease_stops_at_the_end_of_its_step(toys: Toys, every: int) -> None:
    """Also before it would save: the checkpoints are another machine's by then."""
    name = f"taken-over-{every}"
    run = toys.run(name)
    fault = {"lose_lease_in": {"phase": "update", "step": 2, "folder": str(run.path)}}
    result = toys.runner("train", str(toys.config(name, checkpoint={"every": every})), faults=fault)
    assert "was taken over by another process (host elsewhere, pid 7" in one_message(result)
    assert [record["step"] for record in run.metrics()] == [1, 2]
    assert [step for step, _ in run.checkpoints()] == ([1] if every == 1 else [])


def benchmark_set(toys: Toys, name: str) -> Path:
    """Write the toy problems as rows of a benchmark."""
    rows = [replace(p, source="MathVision", meta={"test_only": True}) for p in load_set(toys.train)]
    return write_problems(rows, toys.folder / name, {})


def one_message(result: Any) -> str:
    """Return the only line that a user's mistake prints."""
    assert result.code == 2, result.output[-3000:]
    assert "Traceback" not in result.output
    messages = [line for line in result.output.splitlines() if line.startswith("vlm-rl: ")]
    assert len(messages) == 1, result.output
    return messages[0]


def test_an_existing_run_is_not_touched(toys: Toys, run: RunDirectory) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    message = one_message(toys.runner("train", str(run.path)))
    assert str(run.path) in message
    assert "--resume" in message
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "key", "old"),
    [
        ("train.lr=1e-4", "train.lr", "0.001"),
        ("seed=4", "seed", "3"),
        ("algorithm.name=ba", "algorithm.name", "grpo"),
    ],
)
def test_a_resume_with_a_different_key_is_refused(
    toys: Toys, run: RunDirectory, change: str, key: str, old: str
) -> None:
    message = one_message(toys.runner("train", str(run.path), change, "--resume"))
    assert f"a different {key}" in message
    assert old in message


def test_a_resume_without_a_run_is_refused(toys: Toys) -> None:
    message = one_message(toys.runner("train", str(toys.config("never")), "--resume"))
    assert str(toys.run("never").path) in message
    assert not toys.run("never").path.exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": ""}, ["row 1", "no answer"]),
        ({"question": "<image><image> How many?"}, ["row 1", "2 <image> markers", "1 images"]),
        ({"images": (b"no picture",)}, ["row 1", "image 0", "prepare again"]),
    ],
    ids=["answer-missing", "markers", "unreadable-image"],
)
def test_a_bad_row_is_refused_before_anything_is_written(toys: Toys, row: dict[str, Any], words: list[str]) -> None:
    name = f"bad-{next(iter(row))}"
    problems = load_set(toys.train)[:2]
    folder = write_problems([problems[0], replace(problems[1], **row)], toys.folder / name, {})
    (folder / "manifest.json").unlink()  # a set that no preparation has checked
    message = one_message(toys.runner("train", str(toys.config(f"run-{name}", data={"train": [str(folder)]}))))
    assert all(word in message for word in [str(folder), *words]), message
    assert not toys.run(f"run-{name}").path.exists()


def test_evaluating_on_what_was_trained_on_is_refused(toys: Toys) -> None:
    train, held = benchmark_set(toys, "benchmark"), benchmark_set(toys, "benchmark-again")
    data = {"train": [str(train)], "allow_test_rows": True}
    contaminated = toys.config("refused-evaluation", data={**data, "eval": [str(held)]}, eval={"every": 1})
    assert "CONTAMINATED" in one_message(toys.runner("train", str(contaminated)))
    assert not toys.run("refused-evaluation").path.exists()

    run = toys.train_run("contaminated", data=data, train={"steps": 1})
    assert run.contaminated() == ("MathVision",)
    newest = newest_verified(run.path / "checkpoints")
    assert newest is not None
    assert newest[1].info["contaminated"] == ["MathVision"]


# -- several ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", todays([2, 3], days=2))
def test_two_ranks_train_and_resume_as_one_run(toys: Toys, stage: int) -> None:
    """The same prompts, rewards and (up to the order of sums) gradients as on one rank, also after two resumes.

    SIGTERM to the second rank alone stops both. The third step is made on one rank, from what two have saved, and the
    fourth on two again.
    """
    changes = {"data": {"eval": [str(toys.heldout)]}, "eval": {"every": 4}}
    single = toys.train_run(f"single-{stage}", train={"zero_stage": stage}, **changes)
    config = toys.config(f"double-{stage}", train={"zero_stage": stage}, **changes)
    stop = {"terminate_in": {"phase": "update", "step": 2}}
    stopped = toys.runner("train", config, ranks=2, faults_of_ranks=[{}, stop])
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    command = (
        f"torchrun --nproc-per-node 2 --shutdown-timeout 1800 -m vlm_rl train {toys.run(f'double-{stage}').path}"
    )
    assert f"stopped by SIGTERM after step 2; resume with: {command} --resume\n" in stopped.output
    alone = toys.runner("train", config, "--resume", faults={"terminate_in": {"phase": "update", "step": 1}})
    assert "stopped by SIGTERM after step 3;" in alone.output, alone.output[-3000:]
    resumed = toys.runner("train", config, "--resume", ranks=2)
    assert resumed.code == 0, resumed.output[-3000:]
    assert resumed.output.count("resuming ") == 1  # rank 0 alone says it
    double = toys.run(f"double-{stage}")
    assert_sound(double)
    assert [record["attempt"] for record in double.metrics()] == [1, 1, 2, 3]
    for ours, theirs in zip(rollouts_of(double), rollouts_of(single), strict=True):
        assert [row["prompt_id"] for row in ours] == [row["prompt_id"] for row in theirs]
    first, expected = double.metrics()[0], single.metrics()[0]
    for key in ("reward", "grad_norm", "loss", "entropy", "num_tokens"):
        assert first[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_one_rank_that_raises_ends_all(toys: Toys) -> None:
    faults = {"raise_in": {"phase": "update", "step": 2, "rank": 1}}
    job = {"arguments": ["train", str(toys.config("fail"))], "faults": faults}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "--shutdown-timeout", "2", "-m", WORKER, json.dumps(job)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "injected fault" in done.stderr


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_ranks_with_different_configurations_do_not_start(toys: Toys) -> None:
    """As two nodes whose files differ: they would train the weights of one at the learning rate of the other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    differing = "train.lr=$((RANK + 1))e-4 log.samples_every=$RANK"
    of_rank = f"exec {sys.executable} -m vlm_rl train {toys.config('differ')} {differing}"
    done = subprocess.run(
        [*torchrun, "bash", "-c", of_rank], env=clean_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    message = "vlm-rl: log.samples_every is 1 on rank 1 and 0 on rank 0: start every node with the same configuration"
    assert done.stderr.count(f"{message}; 2 of their keys differ") == 1
    assert len(re.findall(r"exitcode +: 2 ", done.stderr)) == 2, "of both ranks"
    assert done.stderr.count("Traceback") == 1, "torchrun's own"
    assert not toys.run("differ").path.exists()
