"""Read, check and write configurations: YAML with dotted overrides.

Nothing in a file is run or interpolated.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import OmegaConf
from pydantic import ValidationError

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.foreign_names import trainer_of
from vlm_rl.config.messages import conflict_lines, converting, explain_all, place_of
from vlm_rl.config.sft import SftConfig
from vlm_rl.config.templates import TemplateConfig
from vlm_rl.config.training import Config
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES, Template
from vlm_rl.untrusted.plain_files import in_home, read_small
from vlm_rl.untrusted.yaml_text import read_yaml

_Model = TypeVar("_Model", bound="ConfigSection")
_YAML = (".yaml", ".yml")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key.path=value`` overrides, and validate.

    ``extends`` names another file, relative to this one. Keys missing here come from it. That file may not extend a
    third.

    Raises UserError with the file or the override at fault, the key's path, the value, and the nearest known key.
    """
    raw, where = _read_extended(Path(path), overrides)
    return parse_config(raw, where=where, overrides=overrides)


def load_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the configuration of `vlm-rl sft`. Raises UserError as load_config does."""
    raw, where = _read_extended(Path(path), overrides)
    return parse_tree(SftConfig, _settled(raw, where), where, overrides)


def parse_config(raw: Any, where: str = "config", overrides: Sequence[str] = ()) -> Config:
    """Validate a tree of plain values as a run's configuration. Raises UserError as load_config does.

    ``where`` and ``overrides`` say in messages where the tree comes from; the overrides are applied already.
    """
    return parse_tree(Config, _settled(raw, where) if isinstance(raw, dict) else raw, where, overrides)


def find_template(name: str) -> Template | None:
    """Return the shipped template of that name, or that of a file of one's own; None if it is neither.

    Raises UserError for a file as load_config does.
    """
    return read_template(Path(name)).record if name.endswith(_YAML) else TEMPLATES.get(name)


def read_template(path: Path) -> TemplateConfig:
    """Read a prompt template of one's own. Raises UserError as load_config does, with the key and its value."""
    if not _is_file(path):
        raise UserError(
            f"data.template: there is no file {path}; give one, or one of {', '.join(TEMPLATES)}. A run keeps the "
            "text of its template: its own config.yaml needs no such file"
        )
    return parse_tree(TemplateConfig, {"name": path.stem, **_open(path)}, str(path))


def with_values(config: _Model, values: Mapping[str, Any]) -> _Model:
    """Return a configuration with the values of some dotted keys changed. Raises UserError as load_config does."""
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        put(tree, key, value)
    return parse_tree(type(config), _tuples(tree), "the configuration")


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in a tree of sections; those that are missing or null begin empty."""
    *sections, last = key.split(".")
    for name in sections:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a YAML file as plain values and apply the overrides. Raises UserError if it cannot be read."""
    return _overridden(_open(Path(path)), overrides)


def recorded_template(summary: Mapping[str, Any]) -> Template | None:
    """Return the template that an evaluation's summary records: a shipped one's name, or the whole of another.

    None if it is neither, or was not written by us.
    """
    if (record := summary.get("template_record")) is None:
        return TEMPLATES.get(str(summary.get("template", "")))
    try:
        return parse_tree(TemplateConfig, record, "the summary").record
    except UserError:
        return None


def _read_extended(path: Path, overrides: Sequence[str]) -> tuple[Any, str]:
    """Return the values of a file over those of the file that it extends, and what to call both in messages."""
    tree, where = _located(_open(path), path.parent), str(path)
    if (name := tree.pop("extends", None)) is not None:
        if not isinstance(name, str) or not _is_file(path.parent / name):
            raise UserError(f"{path}: extends is {name!r}: it must name a YAML file, relative to this one's folder")
        base = _located(_open(path.parent / name), (path.parent / name).parent)
        if "extends" in base:
            raise UserError(f"{path}: it extends {name}, which extends a third file: extend that one, or none")
        where = f"{path}, which extends {name}"
        tree = _merged(base, tree, where)
    return _overridden(tree, overrides), where


def _located(tree: Any, folder: Path) -> Any:
    """Return a file's values, with the path of its template relative to the file's folder."""
    data = tree.get("data")
    if isinstance(data, dict) and str(data.get("template")).endswith(_YAML):
        tree = {**tree, "data": {**data, "template": str(folder / str(data["template"]))}}
    return tree


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _settled(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tree with today's names, and with the text of its template. Raises UserError as load_config does."""
    raw = _renamed(_tuples(_all_in_home(raw)), where)
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(path := data.get("template"), str) and path.endswith(_YAML):
        raw = {**raw, "data": {**data, "template": read_template(Path(path)).model_dump()}}
    return raw


def _open(path: Path) -> Any:
    """Return a file's tree as plain values. Raises UserError if it cannot be read."""
    if path.is_dir():
        raise UserError(f"{path} is no file: give a YAML file")
    try:
        plain = _parsed(read_small(path))
    except FileNotFoundError:
        raise UserError(f"no configuration file at {path}; the shipped ones are in configs/") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(plain, dict):
        raise UserError(f"{path}: the top level must be a mapping of sections, as in the files of configs/")
    if any("${" in value for _, value in _strings(plain)) and (trainer := trainer_of(plain)) is not None:
        raise UserError(f"{path} is a file of {trainer}, by its keys; {converting(path)}")
    _refuse_interpolation(plain, str(path))  # a merge would carry it out
    return _all_in_home(plain)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return the values of a file's text, which the caller may not change.

    Reading a run's own takes 20 ms, and a demo asks for it in a dozen places.
    """
    return read_yaml(text, _plain)


def _plain(text: str) -> Any:
    """Read YAML as OmegaConf does: 1e-6 is a number, and a key that is there twice is refused."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def parse_tree(kind: type[_Model], raw: Any, where: str, overrides: Sequence[str] = ()) -> _Model:
    """Validate a tree of plain values as a model of class ``kind``. Raises UserError as load_config does.

    Args:
        kind: the class of the whole tree.
        raw: the tree.
        where: where the tree comes from, for messages.
        overrides: those that are applied already, for messages.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{where}: the top level must be a mapping of sections, not {type(raw).__name__}")
    _refuse_interpolation(raw, where, overrides)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = explain_all(where, error.errors(), kind, overrides)
        if all(detail["type"] == "value_error" and detail["loc"] for detail in error.errors()):  # of sections alone
            lines += conflict_lines(_unchecked(kind, raw).conflicts(), where, "", overrides)
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def save_config(config: Config | SftConfig, path: Path) -> None:
    """Write the resolved configuration; load_config or load_sft_config reads it back to an equal one."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree of sections with their dotted keys; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed_keys(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ between two dumped configurations.

    Of a section of DeepSpeed's or vLLM's options that only one of them has, these are its keys.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        changed = []
        for name in sorted({*old, *new}):
            first, second = (
                tree.get(name, {} if isinstance(other.get(name), dict) else None)
                for tree, other in ((old, new), (new, old))
            )
            changed += changed_keys(first, second, f"{prefix}.{name}".lstrip("."))
        return changed
    return [] if old == new or (isinstance(old, list | tuple) and list(old) == list(new)) else [prefix]


def _overridden(tree: Any, overrides: Sequence[str]) -> Any:
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"override {item!r} is not of the form key.path=value, e.g. train.lr=1e-5")
        try:
            change = read_yaml(value, lambda _, item=item: OmegaConf.from_dotlist([item]))
        except ValueError as error:
            raise UserError(f"override {item!r} cannot be read: {error}") from None
        tree = _merged(tree, change, f"override {item!r}")
    return tree


def _merged(tree: Any, change: Any, what: str) -> Any:
    """Return plain values with those of `change` over them. Raises UserError if one has a list for a section."""
    try:
        return OmegaConf.to_container(OmegaConf.merge(tree, change), resolve=False)
    except TypeError:
        raise UserError(
            f"{what}: a list cannot replace a section, nor a section a list: give a list whole, as data.train=[a,b], "
            "and a section by its keys, as train.lr=1e-5"
        ) from None


def _unchecked(kind: type[_Model], raw: dict[str, Any]) -> _Model:
    """Return the section with values that are valid one by one, so that more conflicts can be looked for."""
    values = {}
    for name, value in raw.items():
        annotation = kind.model_fields[name].annotation
        sections = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
        section = next((item for item in sections if issubclass(item, ConfigSection)), None)
        if section is None or not isinstance(value, dict):
            values[name] = value
        elif get_origin(annotation) is dict:
            values[name] = {key: _unchecked(section, item) for key, item in value.items()}
        else:
            values[name] = _unchecked(section, value)
    return kind.model_construct(**values)


def _refuse_interpolation(raw: Any, where: str, overrides: Sequence[str] = ()) -> None:
    for key, value in _strings(raw):
        if "${" in value:
            place = place_of(key, where, overrides)
            raise UserError(f"{place}: {key} is {value!r}: interpolation is not supported; write the value itself")


def _all_in_home(tree: Any) -> Any:
    if isinstance(tree, dict):  # a server's token is in the home of each machine
        return {key: value if key == "server_token" else _all_in_home(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_all_in_home, tree))
    return in_home(tree) if isinstance(tree, str) else tree


def _strings(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, str):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _strings(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _strings(value, f"{prefix}[{index}]")


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    """Turn `betas`, a list in YAML, into the tuple that strict validation asks for."""
    train = raw.get("train")
    if isinstance(train, dict) and isinstance(train.get("betas"), list):
        raw = {**raw, "train": {**train, "betas": tuple(train["betas"])}}
    return raw


def _renamed(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Give the old key model.freeze_vision its new name. Raises UserError if both are given."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("freeze_vision"), bool):
        return raw
    if model.get("freeze"):
        raise UserError(f"{where}: model.freeze_vision is the old name of a part of model.freeze: remove it")
    model = dict(model)
    if model.pop("freeze_vision"):
        model["freeze"] = ["tower", "merger"]
        _note("model.freeze_vision=true is read as model.freeze=[tower, merger], its name today")
    return {**raw, "model": model}


@cache
def _note(text: str) -> None:
    """Print a line to standard error, once, and on one rank alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)
