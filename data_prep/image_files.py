"""Where a row's picture lies: a file beside the table, a member of a zip archive, or bytes in the table.

Readers only name pictures; the workers that decode them read the bytes. No path leaves the data set's
folder, and an archive is read member by member: nothing of it is ever unpacked to disk.
"""

from __future__ import annotations

import stat
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.rows import RowError
from vlm_rl.errors import UserError
from vlm_rl.images import DEFAULT_LIMITS

MAX_MEMBERS = 1_000_000  # of one archive
MAX_RATIO = 200  # unpacked over packed size of one member; JPEG and PNG hardly shrink at all


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file below `root`."""

    root: Path
    name: str

    def read(self) -> bytes:
        """Raises RowError if the file is missing, too large or outside `root`."""
        base = self.root.resolve()
        try:
            path = (base / self.name).resolve()
            if not path.is_relative_to(base):
                raise RowError("image_outside", f"the image path {self.name!r} leaves the data set's folder")
            if not path.is_file():
                raise RowError("image_missing", f"there is no image {self.name!r}")
            if path.stat().st_size > DEFAULT_LIMITS.max_bytes:
                raise RowError(
                    "image_unreadable", f"the image {self.name!r} is above {DEFAULT_LIMITS.max_bytes} bytes"
                )
            return path.read_bytes()
        except (OSError, ValueError) as error:  # a NUL in the name, a name too long, no permission
            raise RowError("image_missing", f"the image {self.name!r:.80} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of an archive, under its own name or below the archive's one top folder."""

    archive: Path
    name: str

    def read(self) -> bytes:
        """Raises RowError for a missing, linked, encrypted or implausibly packed member."""
        archive, names = _open_archive(self.archive)
        info = names.get(_member_key(self.name))
        if info is None:
            raise RowError("image_missing", f"there is no image {self.name!r} in {self.archive.name}")
        if stat.S_ISLNK(info.external_attr >> 16) or info.is_dir() or info.flag_bits & 1:
            raise RowError("image_outside", f"{self.name!r} in {self.archive.name} is no plain file")
        limit = DEFAULT_LIMITS.max_bytes
        if info.file_size > limit or info.file_size > MAX_RATIO * max(info.compress_size, 64):
            raise RowError(
                "image_unreadable", f"{self.name!r} in {self.archive.name} unpacks to {info.file_size} bytes"
            )
        try:
            with archive.open(info) as stream:
                data = stream.read(limit + 1)  # the header's size may lie
        except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, EOFError) as error:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name}: {error}") from None
        if len(data) > limit:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name} is above {limit} bytes")
        return data


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """A picture that stands in the table itself."""

    data: bytes

    def read(self) -> bytes:
        return self.data


ImageRef = ImageFile | ZipMember | ImageBytes


class ImageStore:
    """The pictures beside a table: files below its folder, or images.zip there."""

    def __init__(self, root: Path, *, archive: str = "images.zip") -> None:
        self.root = root
        self.archive = root / archive if (root / archive).is_file() else None

    def find(self, name: str) -> ImageRef:
        """The reference of a picture that a row names; a missing file is found out when it is read."""
        if self.archive is not None and not self._is_file(name):
            return ZipMember(self.archive, name)
        return ImageFile(self.root, name)

    def is_empty(self) -> bool:
        """Whether the pictures were not downloaded at all: neither an archive nor a folder with any file."""
        if self.archive is not None or not self.root.is_dir():
            return self.archive is None
        kinds = {".png", ".jpg", ".jpeg", ".webp"}
        return not any(path.suffix.lower() in kinds for path in self.root.rglob("*"))

    def _is_file(self, name: str) -> bool:
        try:
            return (self.root / name).is_file()
        except (OSError, ValueError):
            return False


def image_ref(value: Any, store: ImageStore) -> ImageRef:
    """The reference behind a cell: a path, or datasets' struct of bytes and path. Raises RowError."""
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return ImageBytes(value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes):
        return ImageBytes(value)
    if not isinstance(value, str) or not value:
        raise RowError("image_missing", f"the image is {value!r:.60}, neither bytes nor a path")
    return store.find(value)


@lru_cache(maxsize=4)
def _open_archive(path: Path) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    """The archive and its members by key, opened once in each process."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as a zip archive: {error}") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise UserError(f"{path}: has {len(members)} members; the limit is {MAX_MEMBERS}")
    names: dict[str, zipfile.ZipInfo] = {}
    for info in members:
        parts = PurePosixPath(info.filename.replace("\\", "/")).parts
        if ".." in parts or PurePosixPath(info.filename).is_absolute():
            continue  # never looked up: a row that wants it finds nothing
        names.setdefault(_member_key(info.filename), info)
    return archive, names


def _member_key(name: str) -> str:
    """images/a.png, ./images/a.png and a.png are one picture where the archive wraps a folder of that name."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return "/".join(parts[1:] if parts and parts[0] == "images" else parts)
