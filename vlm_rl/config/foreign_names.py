"""What the settings of other trainers are called here, from assets/foreign_names.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "assets" / "foreign_names.yaml"
TRAINERS = ("EasyR1", "verl", "TRL", "OpenRLHF")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of several trainers."""

    ours: str  # "" where there is none
    names: Mapping[str, list[str]]  # by trainer, for each of TRAINERS
    note: str


@cache
def settings() -> tuple[Setting, ...]:
    """Read the file."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple(
        Setting(row.get("here", ""), {name: row.get(name, "").split() for name in TRAINERS}, row.get("note", ""))
        for row in rows
    )


def translate(key: str, value: Any = None) -> Iterator[str]:
    """Yield what an unknown key is called here: a sentence for each setting of another trainer that it can be.

    Args:
        key: its path, e.g. algorithm.clip_ratio.
        value: what it was given; of a section, such as verl's actor_rollout_ref, every key is translated.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from translate(f"{key}.{name}", inner)
        return
    for setting in settings():
        trainers = [trainer for trainer, names in setting.names.items() if any(_is(name, key) for name in names)]
        if trainers and setting.ours != key:
            note = f" ({setting.note})" if setting.note else ""
            ours = f"is {setting.ours} here{note}" if setting.ours else f"is not a key here: {setting.note}"
            yield f"{key} of {' and '.join(trainers)} {ours}"


def _is(name: str, key: str) -> bool:
    """Say whether a key is a setting of this name, whatever sections it is in."""
    return f".{key}".endswith(f".{name}")


def table() -> str:
    """Return the settings as a Markdown table."""

    def cells(setting: Setting) -> list[str]:
        ours = " and ".join(f"`{key}`" for key in setting.ours.split(" and ")) if setting.ours else ""
        theirs = [", ".join(f"`{name}`" for name in names) for names in setting.names.values()]
        return [ours, *theirs, setting.note]

    rows = [["here", *TRAINERS, ""], ["---"] * (len(TRAINERS) + 2), *map(cells, settings())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
