"""Messages for what is wrong in a configuration: the file or override, the key, its value, and the next step."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from vlm_rl.config.foreign_names import WHOLE_FILE, inner_hints, nearest, theirs_as_table, trainer_of, translate
from vlm_rl.errors import near


def explain(where: str, detail: Any, kind: type[BaseModel], overrides: Sequence[str]) -> list[str]:
    """Return the lines that explain an error of pydantic's.

    Args:
        where: where the tree comes from, such as the path of its file.
        detail: an item of `ValidationError.errors()`.
        kind: the class of the whole tree.
        overrides: the key=value that were applied to it.
    """
    path = _path_of(detail)
    if detail["type"] == "value_error":
        return conflict_lines(detail["msg"].removeprefix("Value error, ").split("\n"), where, path, overrides)
    where = place_of(path, where, overrides)
    if detail["type"] == "extra_forbidden":
        if theirs := list(translate(path, detail["input"])):
            return [f"{where}: unknown key: {line}" for line in theirs]
        known = _known_keys(kind, detail["loc"][:-1])
        hint = nearest(path, known) or near(str(detail["loc"][-1]), known, otherwise="")
        if not hint and isinstance(detail["input"], dict) and (inside := inner_hints(path, detail["input"])):
            return [f"{where}: unknown key {inner}: {hint}" for inner, hint in inside.items()]
        hint = hint or f"known keys: {', '.join(sorted(known))}"
        return [f"{where}: unknown key {path}: {hint}"]
    if detail["type"] == "missing":
        return [f"{where}: {path} is missing; add it, because it has no default"]
    return [f"{where}: {path} is {detail['input']!r}: {detail['msg']}"]


def explain_all(where: str, details: Sequence[Any], kind: type[BaseModel], overrides: Sequence[str]) -> list[str]:
    """Return the lines that explain all errors of a tree; many keys of another trainer become one table.

    Of a whole file of another trainer the table is all, and the last line says how to convert it: whatever else is
    wrong with it as a file of ours, its user has nothing to correct.

    The arguments are those of `explain`.
    """
    details = [*_without_unions(details)]
    unknown = {_path_of(detail): detail["input"] for detail in details if detail["type"] == "extra_forbidden"}
    foreign = {path: value for path, value in unknown.items() if any(translate(path, value))}
    lacks_ours = any(detail["type"] == "missing" for detail in details)
    theirs = {path: value for path, value in unknown.items() if place_of(path, where, overrides) == where}
    if lacks_ours and Path(where).is_file() and trainer_of(theirs) is not None:
        table = theirs_as_table(theirs)
        return [f"{where}: {table[0]}", *table[1:], converting(Path(where))]
    lines = [line for detail in details for line in explain(where, detail, kind, overrides)]
    if len([line for line in lines if ": unknown key: " in line]) < WHOLE_FILE:
        return lines
    table = theirs_as_table(foreign)
    rest = [detail for detail in details if _path_of(detail) not in foreign]
    others = [line for detail in rest for line in explain(where, detail, kind, overrides)]
    return [*others, f"{where}: {table[0]}", *table[1:]]


def converting(path: Path) -> str:
    """Return the line that says how a file of another trainer becomes a recipe."""
    return f"to convert it: vlm-rl init --from {shlex.quote(str(path))}"


def _without_unions(details: Iterable[Any]) -> Iterator[Any]:
    """Yield the errors as if a template could be nothing but a section; what is wrong with a name is told before."""
    for detail in details:
        location = detail["loc"]
        if "template" not in location or not str(location[-1]).startswith("literal["):
            yield {**detail, "loc": tuple(part for part in location if "TemplateConfig" not in str(part))}


def _path_of(detail: Any) -> str:
    return ".".join(str(part) for part in detail["loc"])


def conflict_lines(messages: Iterable[str], where: str, path: str, overrides: Sequence[str]) -> list[str]:
    """Return messages about values that do not fit together, from the file, the overrides or both.

    Args:
        messages: what does not fit.
        where: where the tree comes from, such as the path of its file.
        path: the section that they are about, with dots; "" for the whole tree.
        overrides: the key=value that were applied; those of the section are named.
    """
    given = [item for item in overrides if item.startswith(f"{path}." if path else "")]
    place = f"{where} with {' '.join(given)}" if given else where
    return [f"{place}: {path + ': ' if path else ''}{message}" for message in messages]


def place_of(key: str, where: str, overrides: Sequence[str]) -> str:
    """Return where a key got its value: the last override that touches it, or else the file."""
    path = f"{key.replace('[', '.').replace(']', '')}."
    for item in reversed(overrides):
        name = f"{item.partition('=')[0]}."
        if path.startswith(name) or name.startswith(path):
            return f"override {item!r}"
    return where


def _known_keys(section: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    names = iter(location)
    for name in names:
        if isinstance(name, str):  # a number is an index into a list of sections
            annotation = section.model_fields[name].annotation
            section = _section_type(annotation)
            if get_origin(annotation) is dict:
                next(names, None)  # the name of a section in it
    return list(section.model_fields)


def _section_type(annotation: Any) -> type[BaseModel]:
    if get_origin(annotation) in (Union, UnionType, list, dict):
        annotation = next(arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel))
    return annotation
