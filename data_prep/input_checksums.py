"""Describe what a prepared set was made of: names, sizes and checksums of its tables and archives."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.prepared_set import sha256
from vlm_rl.data_prep.readers.generic import GenericSet, data_path, image_root, load_mapping, tables_of
from vlm_rl.data_prep.readers.image_files import ARCHIVES
from vlm_rl.untrusted.plain_files import check_utf8_name

_TABLES = {".parquet", ".json", ".jsonl", ".arrow", ".yaml", ".yml"}
_IMAGE_FOLDERS = {"images", "image", "figures"}


def describe_inputs(source: str, path: Path, mapping: GenericSet | None = None) -> list[dict[str, Any]]:
    """Return an entry for each table (with its sha256) and archive (size alone: every image has its own checksum).

    A folder of very many small tables (MATH as published) gets a single entry for all of them. With a mapping, `path`
    is the data and the entries are those of the tables that the mapping names.
    """
    if mapping is not None:
        tables = tables_of(path, mapping)
        beside = [image_root(path, tables, mapping) / name for name in ARCHIVES]
        return [_entry(file, file.parent) for file in (*tables, *filter(Path.is_file, beside))]
    if source == "generic":
        mapping = load_mapping(path)
        data = data_path(path, mapping)
        entries = [_entry(path, path.parent), *describe_inputs("", data)]
        return entries + [entry for entry in describe_inputs("", data, mapping) if entry not in entries]
    if path.is_file():
        beside = [path.parent / name for name in ARCHIVES if (path.parent / name).is_file()]
        return [_entry(file, path.parent) for file in (path, *beside)]
    files = sorted(file for file in _files_below(path) if file.suffix in _TABLES or file.name in ARCHIVES)
    if len(files) <= 64:
        return [_entry(file, path) for file in files]
    digest = hashlib.sha256()
    for file in files:
        check_utf8_name(file)
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    size = sum(file.stat().st_size for file in files)
    return [{"name": f"{len(files)} files", "bytes": size, "sha256": digest.hexdigest()}]


def _files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders; folders of images and hidden ones are not entered."""
    items = list(folder.iterdir())
    inner = [item for item in items if item.is_dir() and item.name not in _IMAGE_FOLDERS and item.name[0] != "."]
    return [item for item in items if item.is_file()] + [file for item in inner for file in _files_below(item)]


def _entry(file: Path, root: Path) -> dict[str, Any]:
    check_utf8_name(file)
    entry: dict[str, Any] = {"name": file.relative_to(root).as_posix(), "bytes": file.stat().st_size}
    return entry if file.name in ARCHIVES else {**entry, "sha256": sha256(file)}
