"""Find the tables that a user's folder or file holds, and which split they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.data.sets import is_prepared
from vlm_rl.data_prep.readers.image_files import ARCHIVES, IMAGE_SUFFIXES
from vlm_rl.data_prep.readers.table_files import FORMATS, format_of
from vlm_rl.errors import UserError
from vlm_rl.untrusted.json_object import read_object

_NO_TABLES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", *ARCHIVES}
_NUMBER = re.compile(  # of a part of a table
    r"[-_.]?\d+-of-\d+|(?:^|[-_.])(?:part|shard|chunk|batch|piece)s?[-_.]?\d+|(?:^|[-_.])\d{4,}|(?<=part)\.\d+",
    re.I,
)
_LAST_NUMBER = re.compile(r"(?:^|[-_.])(\d+)$")
_SHEETS = (".xlsm", ".xls", ".ods", ".numbers")
_SPLIT = re.compile(r"(?:^|.*[-_.])(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:mini)?|eval)(?:[-_.].*)?")


@dataclass(frozen=True, slots=True)
class FoundData:
    """The tables of a split."""

    format: str
    tables: list[Path]
    split: str  # "" if there is only one
    splits: list[str]  # all that are there


def find_data(path: Path, split: str = "") -> FoundData:
    """Return the tables at `path`: of the split named, else of train, else of the first.

    Raises UserError if there is no table, no such split, or more than one table that is not a split.
    """
    if path.is_file():
        _check_spreadsheet([path])
        if not format_of(path):
            raise UserError(f"{path}: only {', '.join(FORMATS)} can be prepared; give such a file, or its folder")
        if split:
            raise UserError(f"--split {split!r}: {path} is one file, which has no splits")
        return FoundData(FORMATS[format_of(path)], [path], "", [])
    if is_prepared(path):
        raise UserError(f"{path}: is a prepared set already; name it in data.train, or give it to vlm-rl init --data")
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits") or []
        groups = {str(name): _saved(path / str(name)) for name in splits}
        if not groups:
            raise UserError(f"{path / 'dataset_dict.json'} names no splits; give a split's folder")
    elif (path / "state.json").is_file():
        groups = {"": _saved(path)}
    else:
        groups = _splits(path, _groups(path))
    names = sorted(groups)
    if split and split not in groups:
        raise UserError(f"--split {split!r}: {path} has {', '.join(filter(None, names)) or 'no splits'}")
    chosen = split or next((name for name in names if name.startswith("train")), names[0])
    tables = groups[chosen]
    return FoundData(FORMATS[format_of(tables[0])], tables, chosen, [name for name in names if name])


def _json(file: Path) -> dict:
    try:
        return read_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from None


def _saved(folder: Path) -> list[Path]:
    """Return the files of a data set that `save_to_disk` wrote; its state names them, and caches are beside them."""
    names = [entry.get("filename", "") for entry in _json(folder / "state.json").get("_data_files", [])]
    files = [folder / Path(name).name for name in names]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{folder}: state.json names {names or 'no files'}, which are not all there; save it again")
    return files


def _groups(folder: Path) -> dict[str, list[Path]]:
    """Return the tables in a folder, or below it: the parts of each table, by its name without their numbers."""
    for pattern in ("*", "*/*", "*/*/*"):
        files = sorted(file for file in folder.glob(pattern) if _is_table(file, folder))
        if not all(format_of(file) == ".tar" for file in files):  # a tar beside a table holds its images
            files = [file for file in files if format_of(file) != ".tar"]
        if files:
            if len(files) > 1 and all(_is_beside_image(file) for file in files):
                return {"": files}
            names = [_stem(file) for file in files]
            groups = _grouped(files, [_NUMBER.sub("", name) for name in names], folder)
            if len(groups) == len(files) > 1:
                wider = _grouped(files, [_LAST_NUMBER.sub("", name) for name in names], folder)
                groups = wider if all(map(_are_consecutive, wider.values())) else groups
            return groups
    _check_spreadsheet([*folder.glob("*"), *folder.glob("*/*")])
    inside = sorted(item.name + "/" * item.is_dir() for item in folder.iterdir())[:5]
    raise UserError(
        f"{folder}: no table there ({', '.join(FORMATS)}); it has {', '.join(inside) or 'nothing'}. Images need a "
        "table beside them that names each, its question and its answer, e.g. data.csv: image,question,answer"
    )


def _stem(file: Path) -> str:
    """Return the name of a table without its endings: train of train.jsonl.gz."""
    name = file.name[: -len(".gz")] if file.name.lower().endswith(".gz") else file.name
    return Path(name).stem


def _grouped(files: list[Path], stems: list[str], folder: Path) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for file, stem in zip(files, stems, strict=True):
        name = file.relative_to(folder).parent / f"{stem}{format_of(file)}"
        groups.setdefault(name.as_posix(), []).append(file)
    return groups


def _are_consecutive(files: list[Path]) -> bool:
    """Say whether these are one file, or are numbered from 0 or 1 without a gap: train_1, train_2."""
    numbers = sorted(int(match[1]) for file in files if (match := _LAST_NUMBER.search(_stem(file))))
    return len(files) == 1 or numbers in [[*range(first, first + len(files))] for first in (0, 1)]


def _is_beside_image(file: Path) -> bool:
    """Say whether this is 7.json with 7.png beside it: a file for each row."""
    return format_of(file) == ".json" and any(file.with_suffix(suffix).is_file() for suffix in IMAGE_SUFFIXES)


def _check_spreadsheet(files: list[Path]) -> None:
    """Raise UserError for a spreadsheet, with the command that makes a table of it."""
    if sheet := next((file for file in files if file.suffix.lower() in _SHEETS), None):
        raise UserError(
            f"{sheet}: is a spreadsheet of a kind that is not read: save it as {sheet.with_suffix('.xlsx').name}, or "
            f"as CSV in UTF-8"
        )


def _is_table(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return bool(format_of(file)) and file.name not in _NO_TABLES and not hidden and file.is_file()


def _splits(folder: Path, groups: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Return the groups by the split that each is. Raises UserError if that cannot be told."""
    if len(groups) == 1:
        return {"": next(iter(groups.values()))}
    splits: dict[str, list[Path]] = {}
    for name, files in groups.items():
        stem = Path(name).stem
        match = _SPLIT.fullmatch(stem) or _SPLIT.fullmatch(Path(name).parent.name)
        if match is None or match[1] in splits:
            listed = ", ".join(str(files[0].relative_to(folder)) for files in list(groups.values())[:8])
            raise UserError(f"{folder}: there are several tables ({listed}); name one of them instead of the folder")
        splits[match[1]] = files
    return splits
