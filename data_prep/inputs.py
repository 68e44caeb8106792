"""What a prepared set was made of: names, sizes and checksums of the tables and archives it was read from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.image_files import ARCHIVES
from vlm_rl.data_prep.prepared_set import sha256

_TABLES = {".parquet", ".json", ".jsonl", ".arrow", ".yaml", ".yml"}


def describe_inputs(source: str, path: Path) -> list[dict[str, Any]]:
    """One entry per table (with its sha256) and archive (size alone: each picture has a checksum of its own).

    A folder with very many small tables (MATH as published) is one entry over all of them.
    """
    if source == "generic":
        from vlm_rl.data_prep.generic import data_path, load_mapping

        data = data_path(path, load_mapping(path))
        return [_entry(path, path.parent), *describe_inputs("", data)]
    if path.is_file():
        beside = [path.parent / name for name in ARCHIVES if (path.parent / name).is_file()]
        return [_entry(file, path.parent) for file in (path, *beside)]
    files = sorted(file for file in _walk(path) if file.suffix in _TABLES or file.name in ARCHIVES)
    if len(files) <= 64:
        return [_entry(file, path) for file in files]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    size = sum(file.stat().st_size for file in files)
    return [{"name": f"{len(files)} files", "bytes": size, "sha256": digest.hexdigest()}]


def _walk(folder: Path) -> list[Path]:
    """The tables of a folder; folders of pictures are not entered."""
    pictures = {"images", "image", "figures"}
    found = [item for item in folder.iterdir() if item.is_file()]
    below = [item for item in folder.iterdir() if item.is_dir() and item.name not in pictures]
    return found + [file for item in below if not item.name.startswith(".") for file in _walk(item)]


def _entry(file: Path, root: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": file.relative_to(root).as_posix(), "bytes": file.stat().st_size}
    return entry if file.name in ARCHIVES else {**entry, "sha256": sha256(file)}
