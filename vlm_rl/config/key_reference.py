"""Describe every key of the configuration: `vlm-rl config [KEY]`, and docs/config.md.

The only source is the room vlm_rl.config: its types, its defaults, and the docstring below each key.

    python -m vlm_rl.config.key_reference docs      # write docs/config.md and docs/other_trainers.md again
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from vlm_rl.config import Config, ConfigSection, SftConfig
from vlm_rl.config.foreign_names import nearest, table, translate
from vlm_rl.errors import UserError, near

_SFT_MARK = "(vlm-rl sft) "


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration."""

    path: str  # with dots
    kind: str  # what it may hold, in words
    default: str  # as in YAML; "" if there is none
    text: str  # what it does

    def __str__(self) -> str:
        """Return the key as `vlm-rl config` prints it."""
        default = f"default {self.default}" if self.default else "no default"
        return f"{self.path}: {self.kind}; {default}\n    {self.text}"


def find_keys(name: str = "") -> list[Key]:
    """Return the keys of that name, in that section, or that end in it; all for "". Raises UserError for none."""
    keys = [*_keys(Config)]
    known = {key.path for key in keys}
    keys += [key for key in _sft_keys() if key.path not in known]
    chosen = [key for key in keys if key.path == name or key.path.startswith(f"{name}." if name else "")]
    chosen = chosen or [key for key in keys if key.path.endswith(f".{name}")]
    if chosen:
        return chosen
    if theirs := list(translate(name)):
        raise UserError("\n".join(theirs))
    paths = [key.path for key in keys]
    known_names = [*paths, *(path.rpartition(".")[2] for path in paths)]
    if said := nearest(name, known_names):
        raise UserError(f"no key {name!r}: {said}")
    raise UserError(f"no key {name!r}: {near(name, known_names, otherwise='vlm-rl config lists all keys')}")


def _keys(section: type[ConfigSection], prefix: str = "") -> Iterator[Key]:
    texts: dict[str, str] = {}
    for parent in reversed(section.__mro__):
        if issubclass(parent, ConfigSection):
            texts |= _docstrings(parent)
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is None or texts.get(name):
            kind = _section_in_words(field.annotation) if inner else _in_words(field.annotation, field.metadata)
            required = field.default is PydanticUndefined
            value = None if required else field.get_default(call_default_factory=True)
            default = "" if required else json.dumps(value)
            yield Key(f"{prefix}{name}", kind, default, texts.get(name, ""))
        if inner is not None:
            names = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _keys(inner, f"{prefix}{name}.{names}")


def _sft_keys() -> Iterator[Key]:
    """Yield the keys of `vlm-rl sft` that a training run does not have, or has with a different meaning."""
    known = {key.path: key for key in _keys(Config)}
    for key in _keys(SftConfig):
        if key != known.get(key.path):
            yield replace(key, text=f"{_SFT_MARK}{key.text}")


@cache
def _docstrings(section: type[ConfigSection]) -> dict[str, str]:
    """Return the text below each key of a section, without those of its parents."""
    texts: dict[str, str] = {}
    (node,) = ast.parse(inspect.getsource(section)).body
    for item, below in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
            texts[item.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return texts


def _section_in(annotation: Any) -> type[ConfigSection] | None:
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, ConfigSection)), None)


def _section_in_words(annotation: Any) -> str:
    """Describe what a key may hold that may be a section."""
    if get_origin(annotation) is dict:
        return "sections by name"
    others = [item for item in get_args(annotation) if _section_in(item) is None and item is not type(None)]
    return " or ".join([*map(_in_words, others), "a section"]) if others else "a section, or null"


def _in_words(kind: Any, limits: list[Any] | None = None) -> str:
    """Describe the values of a type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _in_words(inner[0], [item for limit in inner[1:] for item in getattr(limit, "metadata", [limit])])
    if origin is Literal:
        return " or ".join(json.dumps(value).strip('"') for value in inner)
    if origin in (Union, UnionType):
        lists_last = sorted(inner, key=lambda item: get_origin(item) is list)
        return " or ".join(dict.fromkeys(_in_words(item, limits) for item in lists_last))
    if origin is list:
        return f"a list of: {_in_words(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: {_in_words(inner[0])}"
    if origin is dict:
        return "any keys and values" if inner[1] is Any else f"by name ({_in_words(inner[0])}): {_in_words(inner[1])}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{word} {getattr(limit, sign)}"
        for limit in (limits or [] if kind in (int, float) else [])
        for sign, word in signs.items()
        if getattr(limit, sign, None) is not None
    ]
    return " ".join([words, *([" and ".join(bounds)] if bounds else [])])


# -- the pages -------------------------------------------------------------------------------------

_CONFIG_HEAD = """\
# Configuration

Every key of a run's YAML file. `vlm-rl config KEY` prints the same, e.g. `vlm-rl config train.lr` or
`vlm-rl config rollout`; `vlm-rl train FILE.yaml KEY=VALUE` changes one. `vlm-rl init` writes a file to start from.
An unknown key, a wrong value and values that do not fit together are refused, all in one message. With
`extends: OTHER.yaml`, a path relative to the file, a file gives only what differs from another, as
`configs/virl39k_gspo_7b.yaml` does. A path that begins with `~/` or `$HOME/` is one in your home.

This page is made from `vlm_rl/config/`: `python -m vlm_rl.config.key_reference docs`.
"""
_SFT_HEAD = """
## vlm-rl sft

A YAML file of [supervised fine-tuning](sft.md) has the sections `model`, `data`, `train`, `checkpoint` and `log`,
`seed` and `out`. Their keys are those above, except for these:

| key | value | default | |
|---|---|---|---|"""
_NAMES_HEAD = """\
# Names from other trainers

`vlm-rl init --from FILE` writes a recipe from a file of EasyR1, verl, TRL, OpenRLHF or ms-swift: its YAML, or the
shell script that starts it.

```bash
vlm-rl init --from easyr1.yaml --out mine.yaml
vlm-rl init --from grpo.sh --data data/mine --out mine.yaml      # passes over the data become steps
vlm-rl train mine.yaml --dry-run
```

Values are converted: TRL's and ms-swift's batches from responses to prompts (`--gpus N` says how many processes,
where the file does not), warm-ups from shares to steps, frozen towers, offloads, clips. What the other trainer does
where its file says nothing, such as its clip and betas, is written out, because ours differs. A comment names where
each value came from. Whatever has no counterpart is listed with the reason, on the screen and at the end of the
recipe. A script is read, never run: what only a shell can compute is listed there too, with its line.

What their settings are called here. The same table is behind the message for an unknown key: `rollout.n=8` is
answered with `rollout.responses_per_prompt`. A whole file of theirs is answered with the table of its keys and, last,
the command that converts it.

This page is made from `vlm_rl/assets/foreign_names.yaml`: `python -m vlm_rl.config.key_reference docs`.
"""


def pages() -> dict[str, str]:
    """Return the generated pages of docs/, by file name."""
    lines = [_CONFIG_HEAD]
    section = None
    for key in _keys(Config):
        place = key.path.rpartition(".")[0] or "the run"
        if place != section:
            section = place
            lines.append(f"\n## {section}\n\n| key | value | default | |\n|---|---|---|---|")
        lines.append(_row(key))
    lines.append(_SFT_HEAD)
    lines += [_row(key) for key in _sft_keys()]
    return {"config.md": "\n".join(lines) + "\n", "other_trainers.md": f"{_NAMES_HEAD}\n{table()}\n"}


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "required"
    return f"| `{key.path}` | {key.kind} | {default} | {_cell(key.text.removeprefix(_SFT_MARK))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for name, page in pages().items():
        (Path(sys.argv[1]) / name).write_text(page, encoding="utf-8")
