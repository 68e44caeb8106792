"""The arguments of `vlm_rl.fit` as a configuration: sizes from a recipe, reward functions by their paths."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.config import Config, leaves, parse_config, put, with_values
from vlm_rl.errors import UserError
from vlm_rl.planning.init import recipe_tree
from vlm_rl.rewards.cell_functions import CELL
from vlm_rl.run.directory import RunDirectory

Functions = Mapping[str, tuple[str, Callable[..., Any] | None]]
"""By name: the path in the configuration, and the function itself where only this process has it."""
_WHERE = "fit()"


def flat_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as dotted keys and plain values: train__lr=1e-5, or train={"lr": 1e-5}."""
    dotted = {name.replace("__", "."): value for name, value in keys.items()}
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        tree |= dict(leaves(value, f"{name}.")) if isinstance(value, Mapping) and value else {name: value}
    return {name: _plain(value) for name, value in tree.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else [*map(_plain, value)] if isinstance(value, list) else value


def reward_functions(reward: Any) -> Functions:
    """Return the functions of `reward` by name. Raises UserError for what is none, and for a name used twice."""
    if isinstance(reward, Mapping):
        named = list(reward.items())
    else:
        rewards = reward if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
        named = [(_name_of(item, number), item) for number, item in enumerate(rewards, start=1)]
    functions: dict[str, tuple[str, Any]] = {}
    for name, item in named:
        if name in functions:
            raise UserError(
                f"reward has two functions called {name}: name them, as reward={{'first': ..., 'second': ...}}"
            )
        if not isinstance(item, str) and not callable(item):
            raise UserError(
                f"reward {name} is of type {type(item).__name__}: give functions, or their names as module.function; "
                "weights of the other parts are keys, such as reward__format=0"
            )
        path = item if isinstance(item, str) else _import_path(item)
        functions[name] = (path, None) if path else (f"{CELL}{name}", item)
    return functions


def _name_of(item: Any, number: int) -> str:
    """Return a name such as the configuration allows: the function's own, as far as it can be."""
    own = item.rpartition(".")[2] if isinstance(item, str) else getattr(item, "__name__", "")
    name = re.sub(r"[^a-z0-9_]", "_", own.lower()).strip("_")[:40]
    return name if re.match("[a-z]", name) and own != "<lambda>" else f"reward_{number}"


def _import_path(function: Callable[..., Any]) -> str:
    """Return where another process can import a function from; "" if it cannot."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    there = getattr(sys.modules.get(module), name, None)
    return f"{module}.{name}" if module != "__main__" and there is function else ""


def checked(values: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown key or a value of the wrong type, as far as that is known before the data."""
    tree: dict[str, Any] = {"out": "OUT", "model": {"path": "MODEL"}, "data": {"train": ["SET"]}}
    _put_all(tree, values)
    parse_config(_with_room(tree, values), _WHERE)


def new_configuration(
    out: Path,
    model: str,
    train: Sequence[Path],
    evaluated: Sequence[Path],
    functions: Functions,
    values: Mapping[str, Any],
) -> tuple[Config, dict[str, Callable[..., Any]]]:
    """Return the configuration of a new run, and the functions that only this process has.

    Raises UserError if the model does not fit on this machine, and for keys as `load_config` does.
    """
    tree = {"out": str(out), **recipe_tree(model, train, evaluated, template=values.get("data.template"))}
    for name, (path, own) in functions.items():
        section = {"path": path} if own is None else {"path": path, "on_failure": "stop"}
        put(tree, f"reward.functions.{name}", section)
        put(tree, "reward.allow_function", True)
    _put_all(tree, values)
    return parse_config(_with_room(tree, values), _WHERE), _own(functions)


def resumed_configuration(
    run: RunDirectory, model: str | Path | None, functions: Functions, values: Mapping[str, Any]
) -> tuple[Config, dict[str, Callable[..., Any]]]:
    """Return the run's own configuration with what the call changes, and the functions that only this process has.

    Raises UserError if the functions are not those of the run. What a resume may not change is refused later.
    """
    config = run.config()
    rewarded = {name for name, section in config.reward.functions.items() if section.path.startswith(CELL)}
    given = {name for name, (_, own) in functions.items() if own is not None}
    if rewarded != given:
        has, got = (", ".join(sorted(names)) or "none" for names in (rewarded, given))
        raise UserError(
            f"{run.path}: its reward has the functions {has} of a cell, and reward gives {got}: give those"
        )
    paths = {section.path for section in config.reward.functions.values()}
    for path, own in functions.values():
        if own is None and path not in paths:
            raise UserError(
                f"{run.path}: its reward has no function {path}, and a resume keeps the run's reward: leave it out "
                "of reward, or give it to a new run"
            )
    changed = dict(values) | ({} if model is None else {"model.path": str(model)})
    return with_values(config, changed), _own(functions)


def _own(functions: Functions) -> dict[str, Callable[..., Any]]:
    return {name: own for name, (_, own) in functions.items() if own is not None}


def _put_all(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        put(tree, key, value)


def _with_room(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree whose sizes fit those that were given: only keys that were not given change."""
    defaults = Config.model_validate({"out": "OUT", "model": {"path": "MODEL"}, "data": {"train": ["SET"]}})
    base = defaults.model_dump(mode="json")
    if not all(isinstance(tree.get(section, {}), dict) for section in _SIZES):
        return tree  # what is wrong is said where the tree is read
    for section in _SIZES:
        tree[section] = {**{name: base[section][name] for name in _SIZES[section]}, **tree.get(section, {})}
    rollout, train, reward = tree["rollout"], tree["train"], tree["reward"]
    prompts, tokens, steps = rollout["prompts_per_step"], rollout["max_tokens"], train["steps"]
    if not all(type(tree[section][name]) is int for section, names in _SIZES.items() for name in names):
        return tree
    row = tokens + tree["data"]["max_prompt_tokens"]
    fitting = {
        "reward.overlong_buffer": min(reward["overlong_buffer"], tokens // 4),
        "train.mini_batch_prompts": min(train["mini_batch_prompts"], prompts),
        "train.micro_batch_tokens": max(train["micro_batch_tokens"], row),
        "train.warmup_steps": 0
        if "train.warmup_rollout_steps" in values
        else min(train["warmup_steps"], steps // 10),
    }
    if tree["data"].get("eval") and "eval.every" not in values:
        fitting["eval.every"] = max(1, steps // 5)
    _put_all(tree, {key: value for key, value in fitting.items() if key not in values})
    return tree


_SIZES = {
    "rollout": ("prompts_per_step", "max_tokens"),
    "train": ("steps", "mini_batch_prompts", "micro_batch_tokens", "warmup_steps"),
    "reward": ("overlong_buffer",),
    "data": ("max_prompt_tokens",),
}
