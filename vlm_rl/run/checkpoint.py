"""Checkpoints that are complete or absent: written aside, checksummed, moved into place; old ones pruned last.

    with saving(root, step=60) as work:                # rank 0; the other ranks write into the same folder
        written = learner.save(work)
        commit(work, root, step=60, info={...}, written=written)        # -> root/step-000060
    prune(root, newest=root / "step-000060", keep_last=2, keep_every=0, best=40)

    newest = newest_verified(root)                     # None, or (folder, manifest)

A checkpoint counts only if its manifest verifies (vlm_rl.run.manifest), which is written last. The weights are a
Hugging Face folder. DeepSpeed's shards are pickles under learner/ and are opened only after `verify`. The file
`latest` is for people and other tools: nothing here trusts it. This module imports no heavy library.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from vlm_rl.model_files.finite_weights import non_finite_tensor
from vlm_rl.run.checkpoint_names import LATEST
from vlm_rl.run.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    file_entries,
    files_of,
    manifest_text,
    read_manifest,
)
from vlm_rl.run.writing import ADVICE

# step-000060, or step-000060.old, which is set aside while a save replaces the same step.
_NAME = re.compile(r"step-(\d{6,})(\.old)?")
_TEMPORARY = ".tmp-"

_Identity: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
_faults_in_bytes: dict[_Identity, str] = {}  # what `verify` found by reading; `prune` reads nothing
_named: set[str] = set()  # the faults that `prune` has printed


# -- writing -------------------------------------------------------------------------------------


@contextmanager
def saving(root: Path, *, step: int, size: int = 0) -> Iterator[Path]:
    """Make a folder to write a checkpoint into (`begin`), and remove it if writing fails.

    Raises CheckpointError for what the file system refused, such as a full disk.
    """
    work = begin(root, step=step, size=size)
    try:
        with writing_checkpoint(root, step=step):
            yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def writing_checkpoint(root: Path, *, step: int) -> Iterator[None]:
    """Raise CheckpointError for what the file system refused in a `with` block; `saving` has it already."""
    try:
        yield
    except Exception as error:
        if _is_write_failure(error):
            raise _write_failed(root, step, error) from error
        raise


def begin(root: Path, *, step: int, size: int = 0) -> Path:
    """Make an empty folder next to the checkpoints, on the same file system. Only one save may run at a time.

    Leftovers of killed saves are removed first. Raises CheckpointError if less is free than the newest checkpoint
    takes, or `size` bytes if there is none yet.
    """
    work = root / f"{_TEMPORARY}{_name(step)}-{secrets.token_hex(4)}"
    try:
        root.mkdir(exist_ok=True)  # without parents: a run folder that vanished is not made again
        _remove_leftovers(root)
        needed = _newest_size(root) or size
        free = shutil.disk_usage(root).free
        if free < needed:
            raise CheckpointError(
                f"{root}: the checkpoint of step {step} needs about {size_text(needed)}, "
                f"and {size_text(free)} are free: free some space, then resume; {_untouched(root)}"
            )
        work.mkdir()
    except OSError as error:
        raise _write_failed(root, step, error) from error
    return work


def commit(
    work: Path,
    root: Path,
    *,
    step: int,
    info: Mapping[str, Any],
    written: Mapping[str, FileEntry] | None = None,
) -> Path:
    """Write the manifest of the files in `work`, move the folder to its place, and return the checkpoint's folder.

    Raises CheckpointError if writing fails; earlier checkpoints and `latest` then stay as they were.

    Args:
        work: the folder that `saving` made.
        root: the folder of all checkpoints.
        step: the checkpoint's.
        info: is stored in the manifest as JSON, without NaN.
        written: the files of any rank that were hashed while they were written; the others are read.
    """
    assert work.parent == root, f"{work} is not in {root}"
    final = root / _name(step)
    try:
        files = file_entries(work, files_of(work), sync=True, written=written)
        if missing := sorted((written or {}).keys() - files.keys()):
            raise CheckpointError(
                f"{final}: a rank wrote {missing[0]}, and the rank that commits does not see it: `out` must be on a "
                "file system that all nodes share"
            )
        _write_synced(work / MANIFEST, manifest_text(step, files, info))
        for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
            _sync_folder(folder)
        _move_into_place(work, final)
        _write_latest(root, final.name)
    except OSError as error:
        raise _write_failed(root, step, error) from error
    return final


def prune(root: Path, *, newest: Path, keep_last: int, keep_every: int, best: int | None) -> list[Path]:
    """Delete the checkpoints before `newest` that no rule keeps, and return their folders.

    One that is known to be damaged is named, and takes no place among the last. No file but manifests is read.

    Args:
        root: the folder of the checkpoints.
        newest: the one that `commit` has just returned; it is kept, and not read again.
        keep_last: how many of the newest good ones are kept, at least 1.
        keep_every: steps that are multiples of this are kept; 0 is off.
        best: a step that is kept, if any.
    """
    assert keep_last >= 1, keep_last
    older = [path for path in _candidates(root) if _step_of(path) <= _step_of(newest)]
    readable = {path: known for path in older if (known := _readable_manifest(path)) is not None}
    last, faults = _last_good(older, newest, keep_last)
    kept = {newest, *last}
    kept |= {path for path, known in readable.items() if known.step == best}
    kept |= {path for path, known in readable.items() if keep_every and known.step % keep_every == 0}
    for path, fault in faults.items():
        if path not in kept or fault not in _named:
            what = "KEPT, BUT NOT COUNTED AMONG THE LAST" if path in kept else "REMOVED"
            print(f"!! CHECKPOINT {what}: {fault}", file=sys.stderr, flush=True)
        _named.add(fault)
    gone = [path for path in older if path not in kept]
    for path in gone:
        _remove_tree(path)
    return gone


def _last_good(older: Sequence[Path], newest: Path, number: int) -> tuple[list[Path], dict[Path, str]]:
    """Return the newest checkpoints up to this number, and those passed over on the way, each with its fault."""
    good: list[Path] = []
    faults: dict[Path, str] = {}
    for path in older:
        if len(good) == number:
            break
        if path == newest or (fault := _known_fault(path)) is None:
            good.append(path)
        else:
            faults[path] = fault
    return good, faults


# -- reading -------------------------------------------------------------------------------------


def verify(path: Path) -> Manifest:
    """Compare every byte with the manifest, and require finite weights.

    Raises CheckpointError, which names what differs or which tensor is not finite.
    """
    return _verify(path)


def verify_model(path: Path) -> Manifest | None:
    """Verify a checkpoint that is opened as a model; return None for a folder without a manifest.

    Unlike `verify` it leaves out learner/, which only a resume opens, and the check that weights are finite, which
    belongs to loading them. It reads a file once in this process, unless its inode, size or time has changed since.
    Raises CheckpointError, which names what differs.
    """
    return _verify(path, as_model=True) if (path / MANIFEST).exists() else None


def _verify(path: Path, *, as_model: bool = False) -> Manifest:
    manifest, files = _listed(path, as_model=as_model)
    try:
        digests = file_entries(path, [path / name for name in files], once=as_model)
        faults = [
            f"the content of {name} changed" for name, digest in digests.items() if digest != manifest.files[name]
        ]
        if not faults and not as_model:
            faults = list(_non_finite_weights(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if faults:
        error = _damaged(path, faults)
        _faults_in_bytes[_as_they_are(files)] = str(error)
        raise error
    return manifest


def _listed(path: Path, *, as_model: bool = False) -> tuple[Manifest, dict[str, os.stat_result]]:
    """Return a checkpoint's manifest, and its files, which have the names and the sizes that it says.

    Raises CheckpointError. The files are not read: a missing or cut one is found before all others are.
    """
    manifest = read_manifest(path)
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(f"{path}: its manifest is of step {manifest.step}; rename the folder to its own step")
    wanted = dict(manifest.files)
    try:
        present = {file.relative_to(path).as_posix(): file.stat() for file in files_of(path)}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if as_model:
        present, wanted = _without_learner(present), _without_learner(wanted)
    faults = [f"{name} is missing" for name in wanted if name not in present]
    faults += [f"{name} is not in the manifest" for name in present if name not in wanted]
    faults += [
        f"{name} holds {present[name].st_size} bytes, not {entry.size}"
        for name, entry in wanted.items()
        if name in present and present[name].st_size != entry.size
    ]
    if faults:
        raise _damaged(path, faults)
    return manifest, present


def _damaged(path: Path, faults: Sequence[str]) -> CheckpointError:
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return CheckpointError(f"{path}: damaged: {'; '.join(faults[:3])}{more}: use a different checkpoint")


def _known_fault(path: Path) -> str | None:
    """Describe a checkpoint's fault as far as it is known without reading its files."""
    try:
        _, files = _listed(path)
    except CheckpointError as error:
        return str(error)
    return _faults_in_bytes.get(_as_they_are(files))


def _as_they_are(files: Mapping[str, os.stat_result]) -> _Identity:
    """Return a key that changes if one of the files is written or replaced."""
    return tuple((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files.items())


def newest_verified(root: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that verifies, whatever `latest` says, or None. Print each one passed over."""
    for path in _candidates(root):
        try:
            return path, verify(path)
        except CheckpointError as error:
            print(f"!! CHECKPOINT PASSED OVER, falling back to an older one: {error}", file=sys.stderr, flush=True)
    return None


def recover(root: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that verifies, after a killed run: remove leftovers, and let `latest` name it.

    Returns None if there is no checkpoint yet. Must not run while another process writes here. Raises
    CheckpointError if there are checkpoints and none verifies, or if `root` cannot be written.
    """
    newest = newest_verified(root)
    if newest is None and (damaged := _candidates(root)):
        move = shlex.join(["mv", str(root), f"{root}.damaged"])
        raise CheckpointError(
            f"{root}: none of its {len(damaged)} checkpoints verifies, and nothing was changed: "
            f"restore one from a copy, or move them away ({move}) and resume, which starts over at step 1"
        )
    try:
        _remove_leftovers(root)
        if newest is not None and newest[0].name == _name(newest[1].step):
            latest = root / LATEST
            if not latest.is_file() or latest.read_bytes().strip() != newest[0].name.encode():
                _write_latest(root, newest[0].name)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written ({error}); make it writable, then resume") from error
    return newest


# -- files ---------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _candidates(root: Path) -> list[Path]:
    """Return the folders that may be checkpoints, newest first; one set aside comes after its successor."""
    folders = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (-_step_of(path), path.suffix == ".old"))


def _readable_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _newest_size(root: Path) -> int:
    return next((m.num_bytes for path in _candidates(root) if (m := _readable_manifest(path)) is not None), 0)


def _without_learner(by_name: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in by_name.items() if not name.startswith("learner/")}


def _non_finite_weights(folder: Path) -> Iterator[str]:
    """Yield a sentence for each weights file with a NaN or an infinity, and for each that cannot be read."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            if tensor := non_finite_tensor(file):
                yield f"{tensor} in {file.name} holds NaN or infinity"
        except ValueError as error:
            yield str(error)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(work: Path, final: Path) -> None:
    """Rename the folder. An earlier checkpoint of the same step is set aside first and counts until then."""
    aside = final.with_name(f"{final.name}.old")
    if final.exists():
        _remove_tree(aside)
        final.rename(aside)
    work.rename(final)
    _sync_folder(final.parent)
    _remove_tree(aside)


def _remove_leftovers(root: Path) -> None:
    for leftover in root.glob(f"{_TEMPORARY}*"):
        _remove_tree(leftover)


def _write_latest(root: Path, name: str) -> None:
    work = root / f"{_TEMPORARY}{LATEST}"
    _write_synced(work, f"{name}\n".encode())
    work.replace(root / LATEST)
    _sync_folder(root)


def _remove_tree(path: Path) -> None:
    """Delete a folder or file, renamed first: a kill half-way leaves a leftover, not a damaged checkpoint."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.name.startswith(_TEMPORARY):
        path = path.rename(path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- messages ------------------------------------------------------------------------------------


def _is_write_failure(error: Exception) -> bool:
    """Tell a failed write from other errors: safetensors and torch wrap the system's error in theirs."""
    if isinstance(error, CheckpointError):
        return False
    wrapped = any(text in str(error) for text in ("No space left", "os error", "file write failed", "enforce fail"))
    return isinstance(error, OSError) or wrapped


def _write_failed(root: Path, step: int, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{root}: the checkpoint of step {step} could not be written: {error}: {ADVICE}; {_untouched(root)}"
    )


def _untouched(root: Path) -> str:
    newest = next((path.name for path in _candidates(root) if _readable_manifest(path) is not None), None)
    return f"{newest} is untouched" if newest else "there is no earlier checkpoint"


def size_text(size: float) -> str:
    """Return a number of bytes as text: 45.1 GB, 512 GB, 17.9 MB (10^9, 10^6, 10^3 bytes)."""
    value, unit = (size / 1e9, "GB") if size >= 1e9 else (size / 1e6, "MB") if size >= 1e6 else (size / 1e3, "kB")
    return f"{value:,.{0 if value >= 99.95 else 1}f} {unit}"
