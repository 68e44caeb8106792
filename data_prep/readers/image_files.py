"""The places a row's image can be: a file beside the table, a member of a zip or tar archive, bytes in the table.

Readers only name images; the workers that decode them read the bytes. No path may leave the data set's
folder. An archive is read member by member: nothing of it is ever unpacked to disk.
"""

from __future__ import annotations

import re
import stat
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

from vlm_rl.data.images import DEFAULT_LIMITS
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

T = TypeVar("T")

ARCHIVES = ("images.zip", "images.tar")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_MEMBERS = 1_000_000  # of one archive
MAX_RATIO = 200  # unpacked over packed size of one member; JPEG and PNG hardly shrink at all


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file below `root`."""

    root: Path
    name: str

    def read(self) -> bytes:
        """Return the file's bytes. Raises RowError if it is missing, too large or outside `root`."""
        base = self.root.resolve()
        try:
            path = (locate_file(base, self.name) or base / self.name).resolve()
            if not path.is_relative_to(base):
                raise RowError("image_outside", f"the image path {self.name!r} leaves the data set's folder")
            if not path.is_file():
                raise RowError("image_missing", f"there is no image {self.name!r}")
            if path.stat().st_size > DEFAULT_LIMITS.max_bytes:
                raise RowError(
                    "image_unreadable", f"the image {self.name!r} has more than {DEFAULT_LIMITS.max_bytes} bytes"
                )
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, no right, links in a circle
            raise RowError("image_missing", f"the image {self.name!r:.80} cannot be read: {error}") from None


def locate_file(root: Path, name: str) -> Path | None:
    """Return the file below `root` that a table names; None if there is none, or two could be meant.

    The exact name comes first. A name of a different system may differ in its slashes, in case, in the Unicode form
    of its accents, and in escapes such as %20.
    """
    try:
        if (root / name).is_file():
            return root / name
        found = root
        for part in PurePosixPath(_plain_name(name)).parts:
            exact = found / part
            fitting = [exact] if exact.exists() else _names_in(found, found.stat().st_mtime_ns).get(_loose(part), [])
            if len(fitting) != 1 or part in ("/", ".."):
                return None
            found = fitting[0]
        return found if found.is_file() else None
    except (OSError, ValueError):  # a NUL in the name, a name too long
        return None


@lru_cache(maxsize=4096)
def _names_in(folder: Path, changed: int) -> dict[str, list[Path]]:
    """Return the files and folders in a folder by their loose names; `changed` is the time of its last change."""
    names: dict[str, list[Path]] = {}
    for item in folder.iterdir():
        names.setdefault(_loose(item.name), []).append(item)
    return names


def _plain_name(name: str) -> str:
    return unquote(name).replace("\\", "/")


def _loose(name: str) -> str:
    return unicodedata.normalize("NFC", unquote(name)).casefold()


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of an archive, under its own name or below the archive's one top folder."""

    archive: Path
    name: str

    def read(self) -> bytes:
        """Return the member's bytes. Raises RowError if it is missing, a link, encrypted or implausibly packed."""
        archive, names = _open_zip(self.archive)
        info = _member(names, self.name)
        if info is None:
            raise RowError("image_missing", f"there is no image {self.name!r} in {self.archive.name}")
        if stat.S_ISLNK(info.external_attr >> 16) or info.is_dir() or info.flag_bits & 1:
            raise RowError("image_outside", f"{self.name!r} in {self.archive.name} is not a plain file")
        limit = DEFAULT_LIMITS.max_bytes
        if info.file_size > limit or info.file_size > MAX_RATIO * max(info.compress_size, 64):
            raise RowError(
                "image_unreadable", f"{self.name!r} in {self.archive.name} unpacks to {info.file_size} bytes"
            )
        try:
            with archive.open(info) as stream:
                data = stream.read(limit + 1)  # the size in the header may be false
        except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, EOFError) as error:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name}: {error}") from None
        if len(data) > limit:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name} has more than {limit} bytes")
        return data


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of an uncompressed tar archive, named as in `ZipMember`."""

    archive: Path
    name: str

    def read(self) -> bytes:
        """Return the member's bytes. Raises RowError if it is missing, too large or not a plain file."""
        archive, names = _open_tar(self.archive)
        info = _member(names, self.name)
        if info is None:
            raise RowError("image_missing", f"there is no image {self.name!r} in {self.archive.name}")
        if not info.isreg():  # a link would be followed to another member, or anywhere
            raise RowError("image_outside", f"{self.name!r} in {self.archive.name} is not a plain file")
        if info.size > DEFAULT_LIMITS.max_bytes:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name} has {info.size} bytes")
        try:
            stream = archive.extractfile(info)
            assert stream is not None
            return stream.read()
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            raise RowError("image_unreadable", f"{self.name!r} in {self.archive.name}: {error}") from None


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """An image whose bytes are in the table itself."""

    data: bytes

    def read(self) -> bytes:
        """Return the bytes, which are in memory already."""
        return self.data


ImageRef = ImageFile | ZipMember | TarMember | ImageBytes


class ImageStore:
    """The images beside a table: files below its folder, or an archive there (ARCHIVES)."""

    def __init__(self, root: Path) -> None:
        """Look into the folder `root`. Raises UserError if its images are in a compressed tar."""
        self.root = root
        self.archive = next((root / name for name in ARCHIVES if (root / name).is_file()), None)
        packed = next((file for file in sorted(root.glob("images.t*z*")) if file.is_file()), None)
        if packed is not None and self.archive is None and not (root / "images").is_dir():
            raise UserError(f"{packed}: a compressed tar cannot be read image by image; unpack it there with tar -xf")

    def find(self, name: str) -> ImageRef:
        """Return the reference to an image that a row names; whether it exists shows when it is read."""
        if self.archive is not None and locate_file(self.root, name) is None:
            return (ZipMember if self.archive.suffix == ".zip" else TarMember)(self.archive, name)
        return ImageFile(self.root, name)

    def folder(self, name: str) -> list[ImageRef]:
        """Return the images in a folder below the root, in the order of by_number. Raises RowError without one."""
        base = self.root.resolve()
        try:
            folder = (base / name).resolve()
            if not folder.is_relative_to(base):
                raise RowError("image_outside", f"the folder {name!r} is outside of the data set's folder")
            files = [file.name for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
        except (OSError, ValueError) as error:
            raise RowError("image_missing", f"the folder {name!r:.80} cannot be read: {error}") from None
        if not files:
            raise RowError("image_missing", f"the folder {name!r} has no images")
        return [ImageFile(self.root, f"{name}/{own}") for own in sorted(files, key=by_number)]

    def is_empty(self) -> bool:
        """Tell whether no images were downloaded: there is no archive, and no image file below the folder."""
        if self.archive is not None or not self.root.is_dir():
            return self.archive is None
        return not any(path.suffix.lower() in IMAGE_SUFFIXES for path in self.root.rglob("*"))


def by_number(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Return what sorts names with the numbers in them by their values: image_2 comes before image_10."""
    pairs = re.findall(r"(\D*)(\d*)", name)
    return [(text, len(bare := number.lstrip("0")), bare) for text, number in pairs], name


def image_ref(value: Any, store: ImageStore) -> ImageRef:
    """Return the reference in a cell: a path, bytes, or datasets' struct of both. Raises RowError otherwise."""
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
def _open_zip(path: Path) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    """Open an archive once in each process; returns it and its members by key."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as a zip archive: {error}") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise UserError(f"{path}: has {len(members)} members; the limit is {MAX_MEMBERS}")
    return archive, _by_key((info.filename, info) for info in members)


@lru_cache(maxsize=4)
def _open_tar(path: Path) -> tuple[tarfile.TarFile, dict[str, tarfile.TarInfo]]:
    """Open a tar archive as `_open_zip` opens a zip."""
    try:
        archive = tarfile.open(path, "r:")  # noqa: SIM115 (stays open as long as the process)
        members: list[tarfile.TarInfo] = []
        for info in archive:
            members.append(info)
            if len(members) > MAX_MEMBERS:
                raise UserError(f"{path}: has more than {MAX_MEMBERS} members")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise UserError(f"{path}: cannot be read as an uncompressed tar archive: {error}") from None
    return archive, _by_key((info.name, info) for info in members)


def _by_key(members: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the members by the key that a row's name is looked up with."""
    names: dict[str, T] = {}
    for name, info in members:
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or PurePosixPath(name).is_absolute():
            continue  # a row that names it is told that there is no such image
        names.setdefault(_member_key(name), info)
    return names


def _member(names: dict[str, T], name: str) -> T | None:
    """Return the member of this name, else the only one whose name differs as in `locate_file`."""
    exact = names.get(_member_key(name))
    return exact if exact is not None else _by_loose_key(names).get(_member_key(_loose(_plain_name(name))))


def _by_loose_key(names: dict[str, T]) -> dict[str, T]:
    """Return the members by loose key, without those that share one; made once for each archive."""
    if (known := _LOOSE_KEYS.get(id(names))) is not None and known[0] is names:
        return known[1]
    counts = Counter(map(_loose, names))
    loose = {_loose(key): info for key, info in names.items() if counts[_loose(key)] == 1}
    _LOOSE_KEYS.clear()
    _LOOSE_KEYS[id(names)] = names, loose
    return loose


_LOOSE_KEYS: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}


def _member_key(name: str) -> str:
    """Return the same key for images/a.png, ./images/a.png and a.png: an archive may wrap a folder `images`."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return "/".join(parts[1:] if parts and parts[0] == "images" else parts)
