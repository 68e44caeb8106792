"""Checkpoints: whole or not there, whatever is cut, flipped, killed or full."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.helpers import disks
from vlm_rl.errors import UserError
from vlm_rl.model_files import finite_weights
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.run import manifest
from vlm_rl.run.checkpoint import (
    begin,
    commit,
    newest_verified,
    prune,
    recover,
    saving,
    size_text,
    verify,
    verify_model,
)
from vlm_rl.run.manifest import (
    BUFFER_BYTES,
    CheckpointError,
    FileEntry,
    HashedFile,
    file_entries,
    read_manifest,
)

WEIGHTS = "model.safetensors"
INFO = {"config_hash": "c", "seed": 7, "data_cursor": 12, "world_size": 1, "algorithm": {"belief": 0.1 + 0.2}}


def fill(work: Path, step: int) -> None:
    """What a checkpoint looks like: weights, JSON, an empty file and shards in folders."""
    save_file({"w": torch.full((64,), float(step))}, work / "model.safetensors")
    (work / "config.json").write_text(json.dumps({"step": step}))
    (work / "tokenizer.json").write_text("{}")
    (work / "learner" / "state").mkdir(parents=True)
    (work / "learner" / "state" / "rank_0.pt").write_bytes(bytes([step % 256]) * 300)
    (work / "learner" / "empty").touch()


def save(root: Path, step: int, **info: object) -> Path:
    with saving(root, step=step) as work:
        fill(work, step)
        return commit(work, root, step=step, info={**INFO, **info})


def newest_step(root: Path) -> int | None:
    verified = newest_verified(root)
    return verified[1].step if verified else None


# -- a save ---------------------------------------------------------------------------------------


def test_a_save_comes_back_as_it_was_given(tmp_path: Path) -> None:
    path = save(tmp_path, 60)
    manifest = verify(path)
    assert path == tmp_path / "step-000060"
    assert (tmp_path / "latest").read_text() == "step-000060\n"
    assert (manifest.step, manifest.info) == (60, INFO)
    assert set(manifest.files) == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "learner/state/rank_0.pt",
        "learner/empty",
    }
    shard = manifest.files["learner/state/rank_0.pt"]
    assert shard.size == 300
    assert shard.sha256 == hashlib.sha256(bytes([60]) * 300).hexdigest()
    assert manifest.versions["torch"] == torch.__version__.partition("+")[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000060"]


def test_all_is_synced_before_it_has_its_name_and_the_name_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, manifest, their folders, the new name, the folder of names; a rename keeps the inodes noted here."""
    save(tmp_path, 1)
    calls: list[int | str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda work, path: calls.append(Path(path).name) or rename(work, path))
    newest = save(tmp_path, 2)
    prune(tmp_path, newest=newest, keep_last=1, keep_every=0, best=None)
    named = calls.index(newest.name)
    place = {inode: number for number, inode in enumerate(calls[:named])}
    folders = [newest, *(path for path in newest.rglob("*") if path.is_dir())]
    files = [path for path in newest.rglob("*") if path.is_file()]
    *_, last = sorted(files, key=lambda path: place[path.stat().st_ino])
    assert last.name == "MANIFEST.json" and len(files) == 6
    assert min(place[folder.stat().st_ino] for folder in folders) > place[last.stat().st_ino]
    assert calls[named + 1] == tmp_path.stat().st_ino
    (gone,) = (number for number, call in enumerate(calls) if str(call).startswith(".tmp-step-000001"))
    assert gone > named + 1


def test_the_code_version_covers_the_whole_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(manifest, "__file__", str(tmp_path / "run" / "manifest.py"))
    (tmp_path / "losses.py").write_text("sign = 1")
    before = manifest.code_version()
    (tmp_path / "losses.py").write_text("sign = -1")
    assert manifest.code_version() != before


def test_the_processor_hash_follows_the_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    def saved(step: int, tokenizer: str) -> str:
        with saving(tmp_path, step=step) as work:
            fill(work, step)
            (work / "tokenizer.json").write_text(tokenizer)
            return verify(commit(work, tmp_path, step=step, info=INFO)).processor_sha256

    assert saved(1, "{}") == saved(2, "{}") != saved(3, "{ }")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
@settings(max_examples=40)
def test_any_json_in_info_survives_exactly(value: object) -> None:
    info: dict[Any, Any] = {"value": value, 3: (1, 2), 20: 0}
    text = manifest.manifest_text(1, {}, info)
    tree = json.loads(text)
    assert tree["info"] == {"value": value, "3": [1, 2], "20": 0}
    seal = tree.pop("sha256")
    assert manifest._sealed(tree) == text and seal in text.decode()


def test_not_a_number_in_info_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, 1, loss=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_an_exception_inside_a_save_leaves_the_earlier_checkpoint_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="collective"), saving(tmp_path, step=2) as work:
        fill(work, 2)
        raise RuntimeError("collective failed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert newest_step(tmp_path) == 1


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, attempt=1)
    path = save(tmp_path, 5, attempt=2)
    assert verify(path).info["attempt"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000005"]


def test_a_link_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    root = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="plain files only"), saving(root, step=1) as work:
        (work / "link").symlink_to(outside)
        commit(work, root, step=1, info={})


# -- damage ---------------------------------------------------------------------------------------


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zero(data: bytes) -> bytes:
    return bytes(len(data))


def flip_one_bit(data: bytes) -> bytes:
    position = random.Random(len(data)).randrange(len(data))
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


@pytest.mark.parametrize("damage", [truncate, zero, flip_one_bit])
def test_damage_to_any_file_is_found_and_the_older_checkpoint_taken(tmp_path: Path, damage, capsys) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    files = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) == 5  # MANIFEST.json among them
    for file in files:
        good = file.read_bytes()
        file.write_bytes(damage(good))
        with pytest.raises(CheckpointError, match=str(newest)):
            verify(newest)
        assert newest_step(tmp_path) == 10, file
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "PASSED OVER" in lines[0] and str(newest) in lines[0]
        file.write_bytes(good)
    assert newest_step(tmp_path) == 20
    assert capsys.readouterr().err == ""


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "MANIFEST.json"
    good = file.read_bytes()
    for position in range(0, len(good), 3):  # every third byte: all kinds of places, a third of the time
        for bit in (1, 16, 128):
            file.write_bytes(good[:position] + bytes([good[position] ^ bit]) + good[position + 1 :])
            with pytest.raises(CheckpointError):
                read_manifest(path)
    file.write_bytes(good)
    assert read_manifest(path).step == 1


def test_safetensors_itself_does_not_notice_the_bit_that_the_manifest_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = save(tmp_path, 1) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    load_file(file)
    with pytest.raises(CheckpointError, match=r"content of model\.safetensors changed"):
        verify(file.parent)


def test_missing_and_additional_files_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "learner" / "state" / "rank_1.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"learner/state/rank_1\.pt is not in the manifest"):
        verify(path)
    (path / "learner" / "state" / "rank_1.pt").unlink()
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        verify(path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1).rename(tmp_path / "step-000900")
    with pytest.raises(CheckpointError, match="step 1"):
        verify(path)


@pytest.mark.parametrize("latest", [None, b"", b"step-000999\n", b"../../elsewhere\n", b"step-000010\n", b"\xff\x00"])
def test_latest_is_not_trusted(tmp_path: Path, latest: bytes | None) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_bytes(latest)
    assert newest_step(tmp_path) == 20


def test_a_recovery_cleans_up_after_a_killed_save(tmp_path: Path) -> None:
    """Killed between the last checkpoint and `latest`, with no later save that would clear up."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (tmp_path / "latest").write_text("step-000001\n")
    (tmp_path / ".tmp-latest").write_text("step-0")
    (tmp_path / ".tmp-step-000003-ab").mkdir()
    verified = recover(tmp_path)
    assert verified is not None and verified[0] == newest
    assert (tmp_path / "latest").read_text() == "step-000002\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]
    assert recover(tmp_path / "never") is None and not (tmp_path / "never").exists()


def test_nothing_to_find(tmp_path: Path) -> None:
    assert newest_verified(tmp_path) is None
    assert newest_verified(tmp_path / "never") is None
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-000004").write_text("a file")
    assert newest_verified(tmp_path) is None
    with pytest.raises(CheckpointError, match="no manifest"):
        verify(tmp_path / "step-000003")


# -- disk full ------------------------------------------------------------------------------------


def test_a_save_that_will_not_fit_is_refused_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = verify(save(tmp_path, 1)).num_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(CheckpointError, match=r"step 2 needs about .* step-000001 is untouched"):
        begin(tmp_path, step=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    assert begin(tmp_path, step=2, size=2 * size).is_dir(), "what the newest takes is known better than planned"


def test_the_first_save_that_will_not_fit_is_refused_by_its_planned_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=45_000_000_000 - 1))
    with pytest.raises(CheckpointError, match=r"step 1 needs about 45\.0 GB, .* there is no earlier checkpoint"):
        begin(tmp_path, step=1, size=45_000_000_000)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 kB"),
        (224_724, "225 kB"),
        (99_949, "99.9 kB"),
        (14_455_879, "14.5 MB"),
        (60_073_967_616, "60.1 GB"),
        (4_398e9, "4,398 GB"),
    ],
)
def test_sizes_are_short(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 KB."""
    try:
        with disks.small_disk(tmp_path / "small", kilobytes=256) as place:
            yield place
    except disks.CannotMountError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("written_by", ["python", "safetensors", "torch"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(small_disk: Path, written_by: str) -> None:
    save(small_disk, 1)
    big = torch.zeros(100_000)
    message = r"step 2 could not be written.*step-000001 is untouched"
    with pytest.raises(CheckpointError, match=message), saving(small_disk, step=2) as work:
        if written_by == "python":
            (work / "model.safetensors").write_bytes(bytes(400_000))
        elif written_by == "safetensors":
            save_file({"w": big}, work / "model.safetensors")
        else:
            with HashedFile(work / "rank_0.pt") as raw, io.BufferedWriter(raw, BUFFER_BYTES) as file:
                torch.save(big, file)
        commit(work, small_disk, step=2, info=INFO)
    assert sorted(p.name for p in small_disk.iterdir()) == ["latest", "step-000001"]
    assert (small_disk / "latest").read_text() == "step-000001\n"
    assert newest_step(small_disk) == 1
    verify(save(small_disk, 3))  # there is room again


def test_a_disk_that_fills_up_at_the_manifest_leaves_the_earlier_checkpoint(small_disk: Path) -> None:
    save(small_disk, 1)
    with pytest.raises(CheckpointError, match="No space left"), saving(small_disk, step=2) as work:
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (work / "model.safetensors").write_bytes(bytes(free))
        commit(work, small_disk, step=2, info=INFO)
    assert newest_step(small_disk) == 1
    assert (small_disk / "latest").read_text() == "step-000001\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        begin(tmp_path / "file" / "checkpoints", step=1)


# -- kills ----------------------------------------------------------------------------------------


def keep_saving(root: Path, kill_at: int, same_step: bool, turns: int, said: Connection) -> None:
    """Save and prune, and send (step, turn) of each save that is safe; at last the number of calls.

    The process dies by SIGKILL on entering the call number `kill_at` of those that touch the disk for good.
    """
    calls = 0

    def make_deadly(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        make_deadly(name)
    found = newest_verified(root)
    step = found[1].step if found else 0
    for turn in range(1, turns + 1):
        step += 0 if same_step and step else 1
        work = begin(root, step=step)
        (work / "learner").mkdir()
        for name in ("tokenizer.json", "learner/shard.pt"):
            (work / name).write_bytes(os.urandom(20_000))
        newest = commit(work, root, step=step, info={"turn": turn})
        said.send((step, turn))
        prune(root, newest=newest, keep_last=1, keep_every=0, best=None)
    said.send(calls)


class Saver:
    """A forked process in keep_saving; importing everything anew takes longer than what it does."""

    def __init__(self, root: Path, *, kill_at: int = 0, same_step: bool = False, turns: int) -> None:
        self.said, theirs = Pipe(duplex=False)
        arguments = (root, kill_at, same_step, turns, theirs)
        self.process = get_context("fork").Process(target=keep_saving, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def finish(self) -> tuple[int | None, list[Any]]:
        """Wait for its end; return the exit code, and what it had said."""
        heard: list[Any] = []
        with suppress(EOFError):
            while True:
                heard.append(self.said.recv())
        self.process.join(120)
        return self.process.exitcode, heard


@pytest.mark.slow
@pytest.mark.parametrize("same_step", [False, True])
def test_a_kill_at_any_call_of_a_save_or_prune_leaves_the_last_safe_checkpoint(
    tmp_path: Path, same_step: bool, capsys
) -> None:
    code, (*_, calls) = Saver(tmp_path / "whole", same_step=same_step, turns=2).finish()
    assert code == 0 and calls > 20
    for kill_at in range(1, calls + 1):
        root = tmp_path / str(kill_at)
        code, safe = Saver(root, kill_at=kill_at, same_step=same_step, turns=2).finish()
        assert code == -signal.SIGKILL, kill_at
        verified = newest_verified(root)
        if safe:
            assert verified is not None, kill_at
            assert (verified[1].step, verified[1].info["turn"]) >= safe[-1], kill_at
        assert capsys.readouterr().err == "", kill_at
        for path in root.glob("step-*"):
            verify(path)  # nothing half-written or half-deleted goes by a checkpoint's name
        if (root / "latest").exists():
            assert list(root.glob((root / "latest").read_text().strip() + "*")), kill_at
        # The next save clears up and goes through.
        assert verify(save(root, 9)).step == 9
        assert not list(root.glob(".tmp-*"))


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_safe(tmp_path: Path) -> None:
    rng = random.Random(0)
    safe = 0
    for _ in range(20):
        saver = Saver(tmp_path, turns=10**6)
        first = saver.said.recv()
        time.sleep(rng.uniform(0, 0.2))
        saver.process.kill()
        safe = max(safe + 1, *(step for step, _ in [first, *saver.finish()[1]]))
        step = newest_step(tmp_path)
        assert step is not None and step >= safe
        safe = step
    assert safe > 20


# -- pruning --------------------------------------------------------------------------------------


def kept_steps(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in root.glob("step-*"))


def test_prune_keeps_the_last_the_best_and_every_mth(tmp_path: Path) -> None:
    for step in range(1, 11):
        newest = save(tmp_path, step)
    gone = prune(tmp_path, newest=newest, keep_last=2, keep_every=4, best=3)
    assert kept_steps(tmp_path) == [3, 4, 8, 9, 10]  # last two: 9, 10; multiples of 4: 4, 8; best: 3
    assert sorted(int(p.name[5:]) for p in gone) == [1, 2, 5, 6, 7]
    assert prune(tmp_path, newest=newest, keep_last=2, keep_every=4, best=3) == []


def test_prune_counts_only_what_has_a_manifest_and_nothing_later(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-000002" / "MANIFEST.json").write_text("damaged")
    prune(tmp_path, newest=tmp_path / "step-000003", keep_last=2, keep_every=0, best=None)
    assert kept_steps(tmp_path) == [1, 3, 4]


def change_a_bit(folder: Path) -> None:
    file = folder / "learner" / "state" / "rank_0.pt"
    file.write_bytes(flip_one_bit(file.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "config.json is missing": lambda folder: (folder / "config.json").unlink(),
    "rank_0.pt holds 5 bytes": lambda folder: os.truncate(folder / "learner" / "state" / "rank_0.pt", 5),
    "MANIFEST.json is damaged": lambda folder: (folder / "MANIFEST.json").write_text("{"),
    "the content of learner/state/rank_0.pt changed": change_a_bit,
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a run that passed over its newest checkpoint, resumed from the one before, and saves again."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    DAMAGE[fault](tmp_path / "step-000003")
    assert newest_step(tmp_path) == 2
    newest = save(tmp_path, 4)
    capsys.readouterr()
    monkeypatch.setattr(hashlib, "file_digest", None)  # nothing is read to prune
    prune(tmp_path, newest=newest, keep_last=2, keep_every=0, best=None)
    assert kept_steps(tmp_path) == [2, 4]
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "step-000003") in line and fault in line
    assert prune(tmp_path, newest=newest, keep_last=2, keep_every=0, best=None) == []
    assert capsys.readouterr().err == ""


def test_a_manifest_of_another_format_names_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, so it is not called damaged."""
    monkeypatch.setattr(manifest, "_FORMAT", 2)
    monkeypatch.setattr(manifest, "_versions", lambda: {"code": "9.8.7+sources.abc"})
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError) as refused:
        read_manifest(tmp_path / "step-000001")
    ours = f"format 2, and vlm-rl {metadata.version('vlm-rl')} reads format 1"
    assert ours in str(refused.value) and "wrote it, vlm-rl 9.8.7+sources.abc" in str(refused.value)


def test_weights_that_a_resume_found_not_finite_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    save_weights(tmp_path, 3, torch.tensor([math.nan]))
    assert newest_step(tmp_path) == 2
    prune(tmp_path, newest=save(tmp_path, 4), keep_last=2, keep_every=0, best=None)
    assert kept_steps(tmp_path) == [2, 4]


def test_a_checkpoint_that_was_repaired_counts_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    file = tmp_path / "step-000003" / "config.json"
    good = file.read_bytes()
    file.write_bytes(flip_one_bit(good))
    assert newest_step(tmp_path) == 2
    file.write_bytes(good)
    prune(tmp_path, newest=save(tmp_path, 4), keep_last=2, keep_every=0, best=None)
    assert kept_steps(tmp_path) == [3, 4]


def test_a_damaged_milestone_stays_and_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights may be whole: somebody removed the optimizer's state to save room."""
    for step in (1, 2, 3):
        newest = save(tmp_path, step)
    shutil.rmtree(tmp_path / "step-000002" / "learner")
    for _ in range(2):
        prune(tmp_path, newest=newest, keep_last=2, keep_every=2, best=None)
        assert kept_steps(tmp_path) == [1, 2, 3]
    assert capsys.readouterr().err.count("step-000002") == 1


# -- files that are hashed while they are written ----------------------------------------------------


@given(pieces=st.lists(st.binary(max_size=40), max_size=20), buffer=st.integers(1, 50))
def test_a_file_is_hashed_while_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], buffer: int
) -> None:
    path = tmp_path_factory.mktemp("hashed") / "shard.pt"
    with HashedFile(path) as raw, io.BufferedWriter(raw, buffer) as file:
        for piece in pieces:
            file.write(piece)
    whole = b"".join(pieces)
    assert path.read_bytes() == whole
    assert raw.entry() == FileEntry(len(whole), hashlib.sha256(whole).hexdigest())


def test_what_was_hashed_while_it_was_written_is_not_read_again(tmp_path: Path) -> None:
    """Its bytes change before the commit: that is noticed by the next who verifies, not by the commit."""
    shard = "learner/state/rank_0.pt"
    with saving(tmp_path, step=1) as work:
        fill(work, 1)
        written = {shard: file_entries(work, [work / shard])[shard]}
        (work / shard).write_bytes(bytes(300))
        path = commit(work, tmp_path, step=1, info=INFO, written=written)
    with pytest.raises(CheckpointError, match=f"the content of {shard} changed"):
        verify(path)


def test_a_shard_of_a_different_size_than_was_written_stops_the_commit(tmp_path: Path) -> None:
    shard = "learner/state/rank_0.pt"
    refused = pytest.raises(CheckpointError, match="holds 300 bytes, and 301 were written")
    with refused, saving(tmp_path, step=1) as work:
        fill(work, 1)
        commit(work, tmp_path, step=1, info=INFO, written={shard: FileEntry(301, "")})
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_a_rank_wrote_and_that_is_not_there_stops_the_commit(tmp_path: Path) -> None:
    """As where two nodes have folders of the same name that they do not share."""
    refused = pytest.raises(CheckpointError, match=r"wrote learner/state/rank_9\.pt, .*all nodes share")
    with refused, saving(tmp_path, step=1) as work:
        fill(work, 1)
        commit(work, tmp_path, step=1, info=INFO, written={"learner/state/rank_9.pt": FileEntry(300, "")})
    assert list(tmp_path.iterdir()) == []


# -- weights that are not finite -------------------------------------------------------------------


def save_weights(root: Path, step: int, tensor: torch.Tensor) -> Path:
    with saving(root, step=step) as work:
        save_file({"a": torch.ones(3), "empty": torch.zeros(0), "w": tensor, "z": torch.arange(4)}, work / WEIGHTS)
        return commit(work, root, step=step, info=INFO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_nan_or_an_infinity_in_any_place_is_seen_and_nothing_else(tmp_path: Path, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    finite = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 4, -0.0], dtype=dtype)
    verify(save_weights(tmp_path, 1, finite))
    for step, bad in enumerate([math.nan, math.inf, -math.inf], start=2):
        for place in (0, 4):
            tensor = finite.clone()
            tensor[place] = bad
            with pytest.raises(CheckpointError, match=rf"step-00000{step}: damaged: w in model\.safetensors"):
                verify(save_weights(tmp_path, step, tensor))
    assert newest_step(tmp_path) == 1


def test_a_nan_far_into_a_large_tensor_is_seen(tmp_path: Path) -> None:
    tensor = torch.zeros(finite_weights._BLOCK + 2, dtype=torch.bfloat16)
    tensor[-1] = math.nan
    with pytest.raises(CheckpointError, match="w in model"):
        verify(save_weights(tmp_path, 1, tensor))


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 8, b"\xff" * 100, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": 12}']
)
def test_weights_in_another_format_are_refused_by_name(tmp_path: Path, data: bytes) -> None:
    with saving(tmp_path, step=1) as work:
        (work / WEIGHTS).write_bytes(data)
        path = commit(work, tmp_path, step=1, info=INFO)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        verify(path)


# -- a run of which no checkpoint is left ----------------------------------------------------------


def test_a_recovery_refuses_where_there_are_checkpoints_and_none_verifies(tmp_path: Path, capsys) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        (save(root, step) / "config.json").write_text("damaged")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints verifies.*nothing was changed") as refusal:
        recover(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    command = re.search(r"\((mv .*)\)", str(refusal.value))
    assert command is not None
    subprocess.run(shlex.split(command[1]), check=True)
    assert recover(root) is None  # what the message said
    assert capsys.readouterr().err.count("PASSED OVER") == 2


def test_a_run_folder_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not be written.*No such file"):
        begin(tmp_path / "run" / "checkpoints", step=1)
    assert not (tmp_path / "run").exists()


# -- checkpoints opened as models ------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_not_verified(tmp_path: Path) -> None:
    assert verify_model(tmp_path) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "learner/state/rank_0.pt"])
def test_a_changed_bit_is_found_where_a_checkpoint_is_opened_as_a_model(tmp_path: Path, name: str) -> None:
    """Also one that changes after the file was read once; learner/, which no model is opened from, does not count."""
    folder = save(tmp_path, 1)
    verify_model(folder)
    file = folder / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    if name.startswith("learner/"):
        verify_model(folder)
    else:
        with pytest.raises(CheckpointError, match=f"{folder}: damaged: the content of {name} changed"):
            verify_model(folder)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = save(tmp_path, 1), []
    file_digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: read.append(file.name) or file_digest(file, kind))
    manifest._digest_of.clear()
    verify_model(folder)
    assert read and not any("learner" in name for name in read)
    whole = len(read)
    verify_model(folder)
    assert len(read) == whole
    os.utime(folder / "config.json")
    verify_model(folder)
    assert len(read) == whole + 1


# -- models from elsewhere ------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"auto_map": 5}}}')  # a word, not a setting
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def test_a_plain_model_folder_passes(model_folder: Path) -> None:
    check_model_folder(model_folder)


def test_our_own_checkpoint_passes_with_its_shards(tmp_path: Path) -> None:
    check_model_folder(save(tmp_path, 1))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", "MODEL.PTH", "x.pkl", "last.ckpt"]
)
def test_pickles_are_refused_by_name(model_folder: Path, name: str) -> None:
    (model_folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"{name} is a pickle.*safetensors"):
        check_model_folder(model_folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_code_that_comes_with_a_model_is_refused(model_folder: Path, name: str) -> None:
    tree = {"model_type": "qwen2_5_vl", "parts": [{"auto_map": {"AutoModel": "evil.Model"}}]}
    (model_folder / name).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"{name} has an auto_map"):
        check_model_folder(model_folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "not readable JSON"),
        ("config.json", "[1]", "must hold a JSON object"),
        ("model.safetensors", None, r"no \*\.safetensors"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../x.safetensors"}}', r"'\.\./x\.safetensors'"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "weights.dat"}}', r"'weights\.dat'"),
    ],
)
def test_folders_that_cannot_be_loaded_are_refused(model_folder: Path, name: str, text, message: str) -> None:
    (model_folder / name).unlink(missing_ok=True)
    if text is not None:
        (model_folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        check_model_folder(model_folder)


def test_a_missing_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no model folder at {tmp_path / 'nowhere'}"):
        check_model_folder(tmp_path / "nowhere")
