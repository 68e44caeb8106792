"""Memory that ends late in a run: what a resume may change then, and a step that is made again in shorter rows."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers.graded_groups import RIGHT, WRONG, make_group
from tests.helpers.groups import bare_prompt
from tests.helpers.pretended_cuda import PretendedCuda
from tests.helpers.toy_runs import ROOT, Toys, assert_sound, metrics_of, rollouts_of
from vlm_rl.distributed import alive
from vlm_rl.errors import EXIT_STALLED
from vlm_rl.learner.row_budget import RowBudget
from vlm_rl.learner.sequence_parallel import RankGroup
from vlm_rl.run.directory import RunDirectory
from vlm_rl.session import recorder
from vlm_rl.session import watch as watch_module
from vlm_rl.session.mini_batches import MiniBatches
from vlm_rl.session.watch import Watch

SMALLER = {
    "train.micro_batch_tokens": "150",
    "train.zero_stage": "2",
    "model.layer_patches": "false",
    "model.gradient_checkpointing": "true",
}


def test_a_gpu_has_its_memory_back_before_an_update_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps of freed memory is cut for the longer rows."""
    done: list[str] = []
    config: Any = SimpleNamespace(train=SimpleNamespace(micro_batch_tokens=100), shorter_rows=lambda tokens: 50)
    learner: Any = SimpleNamespace(is_stepping=False, discard_gradients=lambda: done.append("discarded"))

    def attempt(tokens: int) -> int:
        done.append(f"{tokens} tokens")
        if tokens == 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tokens

    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
        budget = RowBudget(config, learner, lambda _: None, lambda tokens: done.append(f"kept {tokens}"))
        assert [budget.run(attempt), budget.run(attempt)] == [50, 50]
    assert done == ["100 tokens", "discarded", "freed", "50 tokens", "kept 50", "50 tokens"]


def test_the_seconds_of_an_attempt_without_memory_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tokens a second and MFU of that step would be those of the repeated update alone."""
    clock = iter([0.0, 1.0, 4.0, 10.0, 12.0])  # begun; the attempt's 3 seconds; the repeat's 2
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timings = recorder.Timings(lambda _: None)
    with pytest.raises(torch.OutOfMemoryError), timings.phase("update"):
        raise torch.OutOfMemoryError
    with timings.phase("update"):
        pass
    assert timings.seconds == {"update": 5.0}


def test_rows_that_are_made_again_measure_the_gap_on_the_same_tokens() -> None:
    """On those that the step's sampler sampled, though an optimizer step has been taken since."""
    group = make_group([4, 6], [RIGHT, WRONG], [1.0, -1.0])
    new, mixed = (replace(rollout, policy_version=7) for rollout in group.rollouts)
    group = replace(group, rollouts=(new, replace(mixed, older=((5, 2),))))
    model = nn.Identity()
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))  # type: ignore[assignment]
    session: Any = SimpleNamespace(
        policy=SimpleNamespace(ranks=RankGroup(), is_padded=False, model=model),
        learner=SimpleNamespace(num_updates=7),
        sampler=SimpleNamespace(policy_version=7),
        builder=None,
        config=SimpleNamespace(rollout=SimpleNamespace(mixes_versions=True)),
    )
    prompts = SimpleNamespace(with_start=lambda problem, start: bare_prompt(problem.id))
    batch: Any = SimpleNamespace(prompts=prompts, prompt_lengths={group.problem.id: 1})
    credit: Any = SimpleNamespace(parts=[[group]], of_responses=[np.ones((1, 2))])
    mini_batches = MiniBatches(session, batch, credit)

    def fresh(tokens: int) -> list[list[bool]]:
        (rows,) = mini_batches.packed(tokens)
        return [cast(torch.Tensor, row.loss.fresh_K).tolist() for row in rows]

    first, second = [True] * 4, [False] * 2 + [True] * 4
    assert fresh(100) == [first + second]
    session.learner.num_updates += 1
    assert fresh(7) == [second, first]


def words(changes: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def assert_close_runs(run: RunDirectory, expected: RunDirectory) -> None:
    """Compare prompts, responses, metrics and the last weights up to the rounding of float32."""
    assert [[row["text"] for row in rows] for rows in rollouts_of(run)] == [
        [row["text"] for row in rows] for rows in rollouts_of(expected)
    ]
    for mine, theirs in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert mine["num_tokens"] == theirs["num_tokens"]
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    weights, others = (load_file(last_checkpoint(each) / "model.safetensors") for each in (run, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=2e-5)


def last_checkpoint(run: RunDirectory) -> Path:
    return run.checkpoints()[-1][1]


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_a_killed_run_resumes_in_less_memory_and_with_another_sampler(toys: Toys) -> None:
    whole = toys.train_run("memory-whole")
    config = toys.config("memory-cut")
    killed = toys.runner("train", config, faults={"raise_in": {"phase": "update", "step": 3, "rank": 0}})
    assert killed.code == 1 and "injected fault" in killed.output, killed.output[-3000:]
    run, copy = toys.run("memory-cut"), toys.folder / "cut-copy"
    shutil.copytree(run.path, copy)
    resumed = toys.runner("train", run.path, "--resume", *words(SMALLER))
    assert resumed.code == 0, resumed.output[-3000:]
    for key, value in SMALLER.items():
        assert resumed.output.count(f"{key} is {value.title()} from now on") == 1
    assert "other responses" not in resumed.output
    assert_close_runs(run, whole)
    assert_sound(run)
    now = run.config()
    assert (now.train.micro_batch_tokens, now.train.zero_stage, now.model.layer_patches) == (150, 2, False)
    assert now.model.gradient_checkpointing and now.model.path == whole.config().model.path

    shutil.rmtree(run.path)
    copy.rename(run.path)
    pytest.importorskip("vllm")
    other = toys.runner("train", run.path, "--resume", "rollout.sampler=vllm", "rollout.vllm.enforce_eager=true")
    assert other.code == 0, other.output[-3000:]
    assert (
        "with a different rollout.sampler, rollout.vllm.enforce_eager the run samples other responses" in other.output
    )
    assert [step for step, _ in run.checkpoints()] == [2, 4] and run.config().rollout.sampler == "vllm"
    assert metrics_of(run)[:2] == metrics_of(whole)[:2]


# -- a new run from another's checkpoint -------------------------------------------------------------


def optimizer_of(run: RunDirectory) -> dict:
    saved = torch.load(last_checkpoint(run) / "learner" / "state" / "mp_rank_00_model_states.pt", weights_only=False)
    return saved["optimizer"]["state"]


@pytest.mark.slow
def test_a_new_run_starts_from_another_s_weights_and_optimizer(toys: Toys, tmp_path: Path) -> None:
    """With a different rate and rule. Of AdamW's second moments nothing but decay takes anything away.

    Killed before its first checkpoint, it begins there again. Counters, order and versions are those of a new run.
    """
    hadw = {"algorithm": {"name": "grpo", "hadw": {"enabled": True}}}
    old = toys.train_run("start-old", train={"steps": 2}, **hadw)
    config = toys.config(
        "start-new", train={"steps": 1, "lr": 1e-9, "weight_decay": 0.0}, algorithm={"name": "luspo"}
    )
    run = toys.run("start-new")
    words = ["--start-from", f"{old.path}/2"]
    killed = toys.runner("train", config, *words, faults={"raise_in": {"phase": "update", "step": 1, "rank": 0}})
    assert killed.code == 1 and "injected fault" in killed.output, killed.output[-3000:]
    away = old.path.rename(old.path.with_name("start-away"))
    gone = toys.runner("train", run.path, "--resume")
    away.rename(old.path)
    assert gone.code == 2 and f"train.start_from is {last_checkpoint(old)}, which is gone" in gone.output, gone.output
    done = toys.runner("train", run.path, "--resume")
    assert done.code == 0, done.output[-3000:]
    said = f"starting from {last_checkpoint(old)}: its weights and its optimizer; steps, belief and order of prompts"
    assert killed.output.count(said) == done.output.count(said) == 1
    old_weights, weights = (load_file(last_checkpoint(each) / "model.safetensors") for each in (old, run))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, old_weights[name], rtol=0, atol=1e-7)
    before, after = optimizer_of(old), optimizer_of(run)
    assert all(float(after[n]["step"]) == float(state["step"]) + 2 for n, state in before.items())
    assert any(state["exp_avg_sq"].max() > 0 for state in before.values())
    for number, state in before.items():
        assert (after[number]["exp_avg_sq"] >= 0.95**2 * state["exp_avg_sq"] * (1 - 1e-5)).all()
    first, new = old.rollouts(1).to_pylist(), run.rollouts(1).to_pylist()
    assert [row["prompt_id"] for row in new] == [row["prompt_id"] for row in first]
    assert {row["policy_version"] for row in new} == {0}
    assert [record["learning_rate"] for record in run.metrics()] == [1e-9]

    other = tmp_path / "wider"
    shutil.copytree(toys.model, other)
    settings = json.loads((other / "config.json").read_text())
    size = settings["text_config"]["intermediate_size"]
    settings["text_config"]["intermediate_size"] = 2 * size
    (other / "config.json").write_text(json.dumps(settings))
    refused = {
        (f"{old.path}/3",): f"--start-from {old.path}/3: {old.path} has no checkpoint of step 3: it has 2",
        (
            f"{run.path}/1",
        ): f"--start-from {run.path}/1 is a checkpoint of {run.path} itself: name the new run's folder",
        (f"{old.path}/2", "train.optimizer=sgd"): "train.optimizer is 'adamw' there and 'sgd' here",
        (f"{old.path}/2", "model.lora.rank=2"): "it holds a whole model, and model.lora is set",
        (f"{old.path}/2", f"model.path={other}"): f"is [{size}, ",
    }
    for number, (arguments, message) in enumerate(refused.items()):
        out = [] if number == 1 else [f"out={tmp_path / 'never'}"]
        result = toys.runner("train", config, "--start-from", *arguments, *out)
        assert result.code == 2 and message in result.output, (arguments, result.output[-3000:])
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_new_run_keeps_how_its_adapters_weigh_and_which_parts_share_a_rate(toys: Toys, tmp_path: Path) -> None:
    """Of adapters only A and B are kept, not what they add with another alpha. Parts of one rate share a group."""
    adapters = {"model": {"path": str(toys.model), "lora": {"rank": 4, "alpha": 8}}}
    rates = {"lr": 1e-3, "lr_by_part": {"tower": 1e-4, "merger": 1e-3}}
    by_rate = "language_model + merger | tower have one rate each there, and language_model + tower | merger here"
    refused = {
        "model.lora.alpha=64": (adapters, "model.lora.alpha is 8 there and 64 here", "vlm-rl export {} --merge"),
        "model.lora.targets=[q_proj]": (adapters, "['language_model'] there and ['q_proj'] here", "vlm-rl export {}"),
        "train.lr=1e-4": ({"train": {"steps": 1, **rates}}, by_rate, "{}"),
        f"model.path={toys.random_model}": (adapters, "was trained on the weights", f"give model.path={toys.model}"),
    }
    for number, (change, (settings, message, advice)) in enumerate(refused.items()):
        changes = {"train": {"steps": 1}} | settings
        old = toys.train_run(f"begins-{number}", **changes)
        out = tmp_path / str(number)
        result = toys.runner("train", toys.config("new", **changes), "--start-from", old.path, f"out={out}", change)
        assert result.code == 2 and not out.exists(), result.output[-3000:]
        said = result.output.splitlines()[-1]
        assert message in said and advice.format(last_checkpoint(old)) in said, said


# -- an update in which memory ends ------------------------------------------------------------------


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_gradients_of_an_update_that_failed_are_forgotten(toys: Toys, tmp_path: Path) -> None:
    """The next updates are bit for bit those of a learner that had not begun it, in each stage and place."""
    done = toys.runner(toys.random_model, tmp_path / "out.pt", module="tests.helpers.discard_worker")
    assert done.code == 0, done.output[-4000:]
    result = torch.load(tmp_path / "out.pt")
    assert result and [way for way, is_same in result.items() if not is_same] == []


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_a_step_in_which_memory_ends_is_made_again_in_shorter_rows(toys: Toys) -> None:
    """Equal to the run that had begun with them. It ends in the second mini-batch, whose old log-probs are kept.

    A resume has the shorter rows from its first update on.
    """
    train = {"steps": 2, "zero_stage": 2}
    halves = toys.train_run("ends-halves", train=train | {"micro_batch_tokens": 150})
    config = toys.config("ends", train=train)
    result = toys.runner("train", config, faults={"end_memory": {"where": "backward", "rows": [2]}})
    assert result.code == 0, result.output[-3000:]
    line = "step 1: out of memory in an update with rows of up to 300 tokens: repeating it with 150, which later"
    assert line in result.output and line in (toys.run("ends").path / "log.txt").read_text()
    assert_close_runs(toys.run("ends"), halves)
    again = toys.runner("train", toys.run("ends").path, "--resume", "train.steps=3")
    assert again.code == 0 and "micro_batch_tokens" not in again.output, again.output[-3000:]
    assert toys.run("ends").config().train.micro_batch_tokens == 150


def test_memory_that_ends_twice_ends_in_the_command(toys: Toys) -> None:
    """With half of what was tried last. Nothing is half written: the command resumes."""
    config = toys.config("ends-twice", train={"steps": 2}, checkpoint={"every": 1})
    fault = {"end_memory": {"where": "forward", "rows": [4, 5]}}
    result = toys.runner("train", config, faults=fault)
    assert result.code == 2 and "Traceback" not in result.output, result.output[-3000:]
    command = f"vlm-rl train {toys.run('ends-twice').path} --resume train.micro_batch_tokens=75"
    assert result.output.rstrip().endswith(f"To continue from the newest checkpoint: {command}")


@pytest.mark.slow
def test_rows_that_became_shorter_are_not_proposed_again(toys: Toys) -> None:
    """Memory ends in step 1 with 20 tokens a row, and in step 2 with 14, the longest response: each is a row."""
    changes = {"steps": 2, "micro_batch_tokens": 20, "mini_batch_prompts": 4}
    config = toys.config("ends-later", train=changes, checkpoint={"every": 1})
    result = toys.runner("train", config, faults={"end_memory": {"where": "forward", "rows": [1, 18]}})
    assert result.code == 2, result.output[-3000:]
    assert "step 1: out of memory" in result.output and "repeating it with 14" in result.output
    assert [record["step"] for record in toys.run("ends-later").metrics()] == [1]
    command = f"vlm-rl train {toys.run('ends-later').path} --resume "
    last = result.output.rstrip().splitlines()[-1]
    assert last.startswith(f"To continue from the newest checkpoint: {command}"), last
    assert "=" in last and "micro_batch_tokens" not in last, last
    assert toys.run("ends-later").config().train.micro_batch_tokens == 14


# -- several ranks -----------------------------------------------------------------------------------


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_a_rank_out_of_memory_ends_all_with_a_message(toys: Toys) -> None:
    """Where the other is told by gloo that a rank is gone, and where it would wait on, as NCCL does."""
    memory = {"end_memory": {"where": "forward", "rows": [2], "rank": 1}}
    for name, other in {"ends-of-two": {}, "waits-on": {"ignore_others": {"rank": 0}}}.items():
        config = toys.config(name)
        result = toys.runner("train", config, ranks=2, faults_of_ranks=[other, memory])
        assert result.code in (1, 2), result.output[-3000:]
        command = f"-m vlm_rl train {toys.run(name).path} --resume train.micro_batch_tokens=150\n"
        assert command in result.output, result.output[-3000:]
        assert "rank 1 of 2 failed: CUDA out of memory." in result.output
        assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_rank_that_hangs_is_seen_and_ends_the_run(toys: Toys) -> None:
    """The rank that hangs and the one that waits for it write their stacks, and end with a code of their own."""
    config = toys.config("hangs", log={"stall_minutes": 0.05})
    fault = {"hang_in": {"phase": "update", "step": 2, "rank": 1}}
    result = toys.runner("train", config, ranks=2, faults_of_ranks=[{}, fault])
    assert result.code == EXIT_STALLED, result.output[-3000:]
    log = (toys.run("hangs").path / "log.txt").read_text()
    for rank, function in ((0, "all_gather_object"), (1, "hang")):
        line = f"rank {rank} of 2: no rank has made progress for 0.05"
        stacks = log[log.index(line) :]
        assert (
            stacks.count("the stacks of its threads") >= 1 and "its last collective of ours: all_gather of " in stacks
        )
        assert f" in {function}\n" in stacks, stacks
        assert re.search(rf"rank {rank} of 2: no rank has made progress for [\d.]+ minutes: the run ends", log)
    assert "it was last in update" in log


SUSPENDED = """
import sys, time
from pathlib import Path
from vlm_rl.distributed import alive
from vlm_rl.session.watch import Watch

watch = Watch()
watch.arm(Path(sys.argv[1]) / "log.txt", minutes=6 / 60)
watch.join(Path(sys.argv[1]))
alive("a row")
time.sleep(1.5)  # two looks
print("begun", flush=True)
begun = time.process_time()  # of which a stopped process takes none
while time.process_time() < begun + 0.3:
    pass
alive("the next row")
time.sleep(0.5)
watch.close()
"""


@pytest.mark.slow
def test_a_run_that_is_suspended_goes_on(tmp_path: Path) -> None:
    """A scheduler stops a job, in the middle of a row, for more than twice the limit, and lets it continue."""
    words = [sys.executable, "-c", SUSPENDED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(13.0)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0
    assert not (tmp_path / "log.txt").exists()


def test_a_run_that_is_slow_but_alive_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life, and bytes that are written, keep a watch quiet; then it writes this thread's stack.

    Its clock is that of its looks, between which a busy machine may take longer than the limit.
    """
    log, now = tmp_path / "log.txt", 0.0
    said_after: list[bool] = []

    def live() -> Iterator[None]:
        for _ in range(25):
            yield alive("a long phase")
        for _ in range(25):
            (tmp_path / "file").write_bytes(bytes(2_000_000))
            yield
        for _ in range(15):
            said_after.append(log.exists())
            yield

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return next(life, "over") == "over"

    life, watch = live(), Watch()
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now, strftime=time.strftime))
    monkeypatch.setattr(watch, "_closed", SimpleNamespace(wait=wait))
    watch.arm(log, minutes=40 / 60)
    watch._watch()  # ten looks in this time
    assert said_after == [False] * 11 + [True] * 4
    said = log.read_text()
    assert "it was last in a long phase; it has no other ranks" in said and "test_a_run_that_is_slow" in said
