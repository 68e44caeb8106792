"""How large checkpoints are and how many there are at a time, against real ones; whether the disk has room."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.recipes import RECIPES
from tests.helpers.size_worker import WAYS
from tests.helpers.toy_runs import Runner
from vlm_rl.config import CheckpointConfig, Config, TrainConfig, load_config
from vlm_rl.learner.checkpoint_size import DiskRoom, checkpoint_bytes, most_at_a_time

WORKER = "tests.helpers.size_worker"
THREE_B = 3_754_622_976  # parameters of Qwen2.5-VL-3B
# Each branch of the formula, and half of the ways to combine them.
BRANCHES = (
    "sgd, float32, ZeRO 0, all",
    "adamw, bfloat16, ZeRO 2, adapters",
    "adamw, bfloat16, ZeRO 3, frozen",
)
FAST = [(1, BRANCHES, way) for way in BRANCHES]
MANY = tuple(WAYS)[::2]
SLOW = [(1, MANY, way) for way in MANY] + [(2, BRANCHES, way) for way in BRANCHES]


@pytest.fixture(scope="module")
def sizes(runner: Runner, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return a function that saves in these ways on so many ranks, and returns what each rank saw."""

    @cache
    def run(ranks: int, ways: Sequence[str]) -> list[Any]:
        out = tmp_path_factory.mktemp("sizes") / "results.pt"
        done = runner(tiny_model, out, *ways, module=WORKER, ranks=ranks, deadline=500)
        assert done.code == 0, done.output[-4000:]
        return [torch.load(f"{out}.{rank}") for rank in range(ranks)]

    return run


@pytest.mark.parametrize(
    ("ranks", "ways", "way"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_it_is_what_its_files_take(
    sizes: Callable[..., list[Any]], ranks: int, ways: Sequence[str], way: str
) -> None:
    """The files hold a little more: names of tensors, and a tokenizer, which is 1 % of this model."""
    of_main, *of_others = sizes(ranks, ways)
    planned, real, lines = of_main[way]
    assert 0 < real - planned < 0.04 * real, f"{planned} planned, {real} written"
    begun, ended = lines
    assert re.fullmatch(r"step 1: saving [\d.]+ MB", begun)
    assert re.fullmatch(r"step 1: saved [\d.]+ MB in [\d.]+ s, [\d.]+ [kM]B/s with checks and hashes", ended)
    assert all(of_other[way][2] == [] for of_other in of_others)


@pytest.mark.parametrize(
    ("stage", "trainable", "bytes_each"),
    [
        (2, THREE_B, 2 + 2 + 12),  # the model folder, DeepSpeed's copy; master and two moments
        (3, THREE_B, 2 + 12),
    ],
)
def test_a_3b_by_hand(stage: int, trainable: int, bytes_each: int) -> None:
    config = TrainConfig(zero_stage=stage)
    size = checkpoint_bytes(config, torch.bfloat16, total=THREE_B, trainable=trainable)
    assert size == bytes_each * THREE_B


def test_frozen_weights_are_stored_once_more_where_deepspeed_copies_them_from_a_gpu() -> None:
    of = {"total": 10, "trainable": 4}
    sizes = {
        (stage, on_gpu): checkpoint_bytes(TrainConfig(zero_stage=stage), torch.bfloat16, on_gpu=on_gpu, **of)
        for stage in (1, 2, 3)
        for on_gpu in (False, True)
    }
    assert sizes == {
        (1, False): 88, (1, True): 88, (2, False): 88, (2, True): 88 + 12, (3, False): 80, (3, True): 80,
    }  # fmt: skip


# -- how many ---------------------------------------------------------------------------------------


@given(
    every=st.integers(1, 6),
    keep_last=st.integers(1, 4),
    keep_every=st.integers(0, 12),
    steps=st.integers(1, 60),
    best=st.none() | st.integers(1, 60),
    stop=st.integers(0, 60),
)
def test_it_is_the_most_that_a_run_has(
    every: int, keep_last: int, keep_every: int, steps: int, best: int | None, stop: int
) -> None:
    """A run saves, prunes as docs/reliability.md says, and is stopped and resumed once; the best one stays."""
    keep = CheckpointConfig(every=every, keep_last=keep_last, keep_every=keep_every)
    disk: list[int] = []
    most = 0
    for step in range(1, steps + 1):
        if step == stop:  # SIGTERM in this step, or a start
            there, most = list(disk), len(disk)
        if step % every == 0 or step == steps:
            disk.append(step)
            most = max(most, len(disk))
            kept = {*disk[-keep_last:], best, *(s for s in disk if keep_every and s % keep_every == 0)}
            disk = [s for s in disk if s in kept]
    if not 1 <= stop <= steps:
        there = []
    planned = most_at_a_time(keep, steps, there=there, has_best=best is not None)
    assert most <= planned <= most + (best is not None)


# -- room -------------------------------------------------------------------------------------------

GB = 10**9


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., DiskRoom]:
    """Return a function that looks at a run of 10 saves of a GB each, on a disk with so many GB free."""

    def look(free: float, *overrides: str, there: tuple[int, ...] = ()) -> DiskRoom:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free * GB)))
        for step in there:
            folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "MANIFEST.json").touch()
        keys = ["checkpoint.every=20", "train.steps=200", "eval.every=0", f"out={tmp_path / 'run'}", *overrides]
        config = load_config(next(path for path in RECIPES if path.stem == "virl39k_luspo_3b"), keys)
        assert isinstance(config, Config)
        return DiskRoom.of(config, GB)

    return look


def test_the_line_says_size_number_and_free_space(room: Callable[..., DiskRoom], tmp_path: Path) -> None:
    assert room(512).lines() == [
        "checkpoints: 1.0 GB each, every 20 steps, at most 3 at a time (keep_last 2, and the one being written) = "
        f"3.0 GB; 512 GB free in {tmp_path / 'run'}"
    ]
    (line,) = room(512, "checkpoint.keep_every=60", "eval.every=20").lines()
    # 180 is among the last; 60, 120, the best, 160, 180, and 200 being written
    assert "at most 6 at a time (keep_last 2, keep_every 60, the best, and the one being written) = 6.0 GB" in line


def test_a_run_that_cannot_save_is_refused_and_the_advice_helps(room: Callable[..., DiskRoom]) -> None:
    """One byte decides. What it says would help does, and it says nothing that would not."""
    assert room(3).refusal() is None
    reason = room(3 - 1e-9).refusal()
    assert reason is not None and "3 checkpoints at a time take 3.0 GB, and 3.0 GB are free" in reason
    assert "lower checkpoint.keep_last" in reason
    assert room(2, "checkpoint.keep_last=1").refusal() is None
    reason = room(1.9, "checkpoint.keep_last=1").refusal()
    assert reason is not None and "keep_last" not in reason
    assert room(2, "checkpoint.every=100").refusal() is None, "of two saves none is removed"


def test_what_is_there_already_needs_no_more_room(room: Callable[..., DiskRoom]) -> None:
    assert room(1, there=(20, 40)).refusal() is None
    reason = room(0.9, there=(20, 40)).refusal()
    assert reason is not None and "a checkpoint takes 1.0 GB, and 900 MB are free" in reason
    assert room(0, "train.steps=40", there=(20, 40)).lines()[1:] == [], "it is finished"


def test_milestones_that_may_be_moved_away_are_a_warning(room: Callable[..., DiskRoom]) -> None:
    """Each of the ten is a milestone."""
    ten = room(9.9, "checkpoint.keep_every=20")
    assert ten.most == 10 and ten.refusal() is None
    assert ten.lines()[1].startswith("warning: 10.0 GB are needed")
    assert ten.lines()[1].endswith("or raise checkpoint.keep_every")
    assert room(10, "checkpoint.keep_every=20").lines()[1:] == []
    assert room(2.9, "checkpoint.keep_every=20").lines()[1].startswith("does not fit on the disk of ")


def test_a_refusal_says_that_the_checkpoints_which_stay_are_not_counted(room: Callable[..., DiskRoom]) -> None:
    """Of ten saves: two of the last and the one being written, without five milestones and the best one."""
    reason = room(2.9, "checkpoint.keep_every=40", "eval.every=20").refusal()
    assert reason is not None and ": even without milestones and the best one, 3 checkpoints at a time take" in reason
    reason = room(2.9, "eval.every=20").refusal()
    assert reason is not None and ": even without the best one, 3 checkpoints at a time take" in reason
