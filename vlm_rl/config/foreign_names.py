"""What the settings of other trainers are called here, from assets/foreign_names.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "assets" / "foreign_names.yaml"
TRAINERS = ("EasyR1", "verl", "TRL", "OpenRLHF", "ms-swift")
WHOLE_FILE = 5  # settings of another trainer that make a file its own, and are answered by one table
_MARKS = {"worker": "EasyR1", "actor_rollout_ref": "verl", "rlhf_type": "ms-swift"}  # keys at the top of a file


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of several trainers."""

    ours: str  # "" if there is none
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
        value: what it was given; of a section, such as verl's actor_rollout_ref, every key is translated, and those
            that nobody knows are named too. Nothing is yielded where nobody knows any of them.
    """
    if isinstance(value, Mapping):
        keys = [f"{key}.{name}" for name in _paths_in(value)]
        known = {inner: [*translate(inner)] for inner in keys}
        if any(known.values()):
            for inner, sentences in known.items():
                meant = nearest(inner, ())
                yield from sentences or [f"{inner}: {meant}" if meant else f"{inner} is no name that is known here"]
        return
    for setting in _fitting(key):
        trainers = [trainer for trainer, names in setting.names.items() if any(_is(name, key) for name in names)]
        if setting.ours != key:
            note = f" ({setting.note})" if setting.note else ""
            ours = f"is {setting.ours} here{note}" if setting.ours else f"is not a key here: {setting.note}"
            yield f"{key} of {' and '.join(trainers)} {ours}"


def _fitting(key: str, trainers: Collection[str] = TRAINERS) -> list[Setting]:
    """Return the settings of these trainers that a key can be: those whose name covers most of its path."""
    lengths = [
        (max((len(name) for trainer in trainers for name in setting.names[trainer] if _is(name, key)), default=0))
        for setting in settings()
    ]
    longest = max(lengths)
    return [setting for setting, length in zip(settings(), lengths, strict=True) if length == longest > 0]


def trainer_of(tree: Any) -> str | None:
    """Return the trainer whose file a tree of settings is; None for ours, also with a few settings of another's."""
    if not isinstance(tree, Mapping):
        return None
    for mark, trainer in _MARKS.items():
        if isinstance(tree.get(mark), Mapping if mark != "rlhf_type" else str):
            return trainer
    paths = [path for path in _paths_in(tree) if any(translate(path))]
    return _trainer_by_names(paths) if len(paths) >= WHOLE_FILE else None


def _trainer_by_names(paths: Sequence[str]) -> str:
    """Return the trainer that knows most of these keys."""
    return max(TRAINERS, key=lambda name: sum(bool(_fitting(path, [name])) for path in paths))


def inner_hints(key: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Return the question which setting of another trainer was meant, for each key of a section that is near one."""
    hints = {path: nearest(path, ()) for path in _paths_in(section, f"{key}.")}
    return {path: hint for path, hint in hints.items() if hint}


def nearest(key: str, known: Iterable[str]) -> str:
    """Return the question whether another trainer's name was meant, with ours; "" if a `known` name is nearer.

    Names below sections, such as adam.betas, are left out: their last words are everybody's.
    """
    last = key.rpartition(".")[2]
    names = {name for setting in settings() for name in chain(*setting.names.values()) if "." not in name}
    close = get_close_matches(last, names, n=1, cutoff=0.8)
    if not close or any(_likeness(last, name) >= _likeness(last, close[0]) for name in known):
        return ""
    return next(f"did you mean {close[0]!r}? {sentence}" for sentence in translate(close[0]))


def _likeness(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()


def theirs_as_table(keys: Mapping[str, Any]) -> list[str]:
    """Return a table with a line for each of many unknown keys: what it is called there, and here."""
    inside = {
        key: [f"{key}.{name}" for name in _paths_in(value)] if isinstance(value, Mapping) else [key]
        for key, value in keys.items()
    }
    paths = [*chain(*inside.values())]
    trainer = _trainer_by_names(paths)
    width = max(map(len, paths))
    lines = []
    for path in paths:
        fits = _fitting(path, [trainer]) or _fitting(path)
        ours = "; ".join(setting.ours or f"no key: {setting.note}" for setting in fits)
        meant = nearest(path, ()).partition("?")[0]
        lines.append(f"  {path:{width}}  {ours or (f'not known; {meant}?' if meant else 'not known')}")
    return [f"{len(paths)} keys of another trainer, {trainer} by their names, and what they are here:", *lines]


def _paths_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values in a section."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _paths_in(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


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
