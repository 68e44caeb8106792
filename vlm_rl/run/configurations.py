"""Configurations compared: a resume's with that of its run, and those of the ranks with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.config import ENGINE_KEYS, MUTABLE_KEYS, Config, ConfigSection, SftConfig, changed_keys
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import hub_name
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import resume_command


def changes(own: ConfigSection, other: ConfigSection) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, own value, the other's) of each difference; the hub's cache may be in different folders."""
    return _differences(_comparable(own), _comparable(other))


def fixed_changes(own: ConfigSection, other: ConfigSection) -> list[tuple[str, Any, Any]]:
    """Return those of the changes that a run does not survive."""
    return [change for change in changes(own, other) if not change[0].startswith(MUTABLE_KEYS)]


def check_unchanged(path: Path, own: ConfigSection, config: ConfigSection) -> None:
    """Raise UserError if a resume changes a key that it has to keep.

    Args:
        path: the run's folder.
        own: the configuration in it.
        config: that of the resume.
    """
    if changed := fixed_changes(own, config):
        short = resume_command(path, command="sft" if isinstance(own, SftConfig) else "train")
        new_run = f"start a new run with a different out, which takes over its weights with --start-from {path}"
        if len(changed) == 1:
            key, value, other = changed[0]
            raise UserError(
                f"{path}: cannot resume with a different {key}: the run has {value!r}, not {other!r}; give it that "
                f"value, or {new_run}. With all of its own values: {short}"
            )
        width = max(len(key) for key, *_ in changed)
        lines = [f"  {key:{width}}  the run has {value!r}, not {other!r}" for key, value, other in changed]
        raise UserError(
            "\n".join(
                [
                    f"{path}: cannot resume with {len(changed)} different keys:",
                    *lines,
                    f"give them those values, or {new_run}. With all of its own: {short}",
                ]
            )
        )


def keep_changes(run: RunDirectory, config: Config | SftConfig) -> list[str]:
    """Make the configuration of a resume the run's own, and return a line for each key that it changes.

    A later resume, report or evaluation without these changes would otherwise take the run for a different one.
    """
    own = run.any_config()
    changed = changes(own, config)
    if changed:
        model = config.model.model_copy(update={"path": own.model.path})  # it may be in this machine's cache
        run.replace_config(config.model_copy(update={"model": model}))
    lines = [f"{key} is {new!r} from now on, and was {old!r}" for key, old, new in changed]
    if engine_keys := [key for key, *_ in changed if key.startswith(ENGINE_KEYS)]:
        lines.append(
            f"with a different {', '.join(engine_keys)} the run samples other responses than it would have, from the "
            "same distribution"
        )
    return lines


def check_alike(configs: Sequence[ConfigSection]) -> None:
    """Raise UserError if a rank, such as one on a second node, was given a different configuration than rank 0.

    Its file may differ, and the newest revision of a model of the hub too.
    """
    check_same([_comparable(config) for config in configs], what="configuration")


def check_same(trees: Sequence[Mapping[str, Any]], *, what: str) -> None:
    """Raise UserError, which calls them `what`, if the values of a rank are not those of rank 0."""
    for rank, tree in enumerate(trees):
        if changed := _differences(trees[0], tree):
            key, first, there = changed[0]
            pinned = ", and pin the model's revision" if key in ("model.path", "--model") else ""
            raise UserError(
                f"{key} is {there!r} on rank {rank} and {first!r} on rank 0: start every node with the same "
                f"{what}{pinned}; {len(changed)} of their keys differ"
            )


def _comparable(config: ConfigSection) -> dict[str, Any]:
    tree = config.model_dump()
    tree["model"]["path"] = hub_name(tree["model"]["path"]) or tree["model"]["path"]
    return tree


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, _value_at(first, key), _value_at(second, key)) for key in changed_keys(first, second)]


def _value_at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
