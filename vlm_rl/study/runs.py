"""A study: several rules trained over the same seeds from the same warm starts, over the same prompts.

    base:                                   # without seed and out; a start replaces model.path
      data: {train: [data/toy-train], eval: [data/toy-test]}
      train: {steps: 40}
    starts: {a: models/warm-0, b: models/warm-1}
    seeds: [0, 1, 2, 3]                     # they take the starts in turn: a, b, a, b
    rules:
      grpo: {algorithm.name: grpo}          # dotted keys, replaced in the base
      luspo+hadw: {algorithm.name: luspo, algorithm.hadw.enabled: true}
    baseline: grpo

Every rule gets the same pairs of seed and start, so runs of one seed differ only in the rule and are
compared in pairs. This module reads and checks a study; it starts no run and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config, ConfigSection, leaves, parse_config, parse_tree, read_tree
from vlm_rl.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")

# The study sets these itself: key -> what does it.
_OWN_KEYS = {"seed": "seeds", "out": "--out"}

# A rule may not change these: its runs would see different problems, or more of them, or be measured differently.
# G, rollout.responses_per_prompt, it may: the problems are the same, and the page says that the responses are more.
_SHARED_KEYS = (
    "seed",
    "out",
    "model.path",
    "data.",
    "eval.",
    "train.steps",
    "rollout.prompts_per_step",
)


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a study."""

    rule: str
    seed: int
    start: str  # name of the warm start
    config: Config

    @property
    def out(self) -> Path:
        """Return the run directory; its log and its configuration file are next to it."""
        return Path(self.config.out)

    @property
    def log(self) -> Path:
        """Return the file that takes what the run prints."""
        return self.out.with_name(f"{self.out.name}.log")

    @property
    def config_file(self) -> Path:
        """Return the configuration that the run is started with."""
        return self.out.with_name(f"{self.out.name}.yaml")

    @property
    def measurement(self) -> dict[str, Any]:
        """Return how held-out sets are measured, by key of the section eval; when is left out."""
        limit = self.config.eval.max_tokens or self.config.rollout.max_tokens
        return self.config.eval.model_dump(exclude={"every"}) | {"max_tokens": limit}

    @property
    def title(self) -> str:
        """Return the run's name in messages."""
        return f"{self.rule} seed {self.seed}"


class Study(ConfigSection):
    """A study file."""

    base: dict[str, Any]
    """A training configuration without seed and out; the start replaces its model.path."""
    starts: dict[str, str] = Field(min_length=1)
    """Name -> model folder."""
    seeds: list[int] = Field(min_length=1)
    rules: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name -> what the rule changes in the base, by dotted key."""
    baseline: str
    """The rule that the others are compared with."""

    _where: str = PrivateAttr(default="study")

    @field_validator("base")
    @classmethod
    def _leaves_its_place_to_the_study(cls, base: dict[str, Any]) -> dict[str, Any]:
        for key, setter in _OWN_KEYS.items():
            if key in base:
                raise ValueError(f"{key} is {base[key]!r}, but {setter} sets it; take it out of base")
        return base

    @field_validator("rules", "starts")
    @classmethod
    def _names_are_plain(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name!r} cannot be part of a path: use letters, digits, dot, underscore, plus and "
                    "dash, and begin with a letter or digit"
                )
        return named

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is there twice; the same run again adds nothing; remove it")
        return seeds

    @model_validator(mode="after")
    def _baseline_is_a_rule(self) -> Study:
        if self.baseline not in self.rules:
            raise ValueError(f"baseline is {self.baseline!r}, which is not a rule; rules: {', '.join(self.rules)}")
        return self

    @property
    def rule_names(self) -> list[str]:
        """Return the baseline, then the others in the file's order."""
        return [self.baseline, *(name for name in self.rules if name != self.baseline)]

    @property
    def responses_per_prompt(self) -> dict[str, int]:
        """Return G of each rule."""
        return {run.rule: run.config.rollout.responses_per_prompt for run in self.runs(Path())}

    def runs(self, out: Path) -> list[StudyRun]:
        """Return every run below `out`, all rules of the first seed first: a part of the list is balanced too.

        Raises UserError, naming the rule and the key, where any of the configurations is not valid.
        """
        starts = list(self.starts)
        pairs = [(seed, starts[place % len(starts)]) for place, seed in enumerate(self.seeds)]
        return [self._planned(rule, seed, start, out) for seed, start in pairs for rule in self.rule_names]

    def _planned(self, rule: str, seed: int, start: str, out: Path) -> StudyRun:
        where = f"{self._where}: rules.{rule}"
        tree = deepcopy(self.base)
        changes = dict(leaves(self.rules[rule]))
        for key, value in changes.items():
            if f"{key}.".startswith(tuple(f"{shared.rstrip('.')}." for shared in _SHARED_KEYS)):
                raise UserError(
                    f"{where}: {key} is {value!r}: all rules of a study share it, or their runs could not be "
                    "compared in pairs; set it in base, or make two studies"
                )
            _put(tree, key, value, where)
        for key, value in (("seed", seed), ("out", str(out / rule / f"seed-{seed}"))):
            _put(tree, key, value, where)
        _put(tree, "model.path", self.starts[start], where)
        config = parse_config(tree, where)
        if "rollout.max_tokens" in changes and config.eval.every and config.eval.max_tokens is None:
            raise UserError(
                f"{where}: rollout.max_tokens is {config.rollout.max_tokens}, which would limit this rule's held-out "
                "responses alone: set base.eval.max_tokens, the limit of all"
            )
        try:
            resolve_algorithm(config.algorithm)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return StudyRun(rule, seed, start, config)


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file, apply ``key.path=value`` overrides, and validate it with every configuration that it makes.

    Raises UserError naming the file, the key's path, the value and the next step.
    """
    study = parse_tree(Study, read_tree(path, overrides), str(path), overrides)
    study._where = str(path)
    study.runs(Path("study"))
    return study


def _put(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    *sections, last = key.split(".")
    for depth, name in enumerate(sections, 1):
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise UserError(
                f"{where}: cannot set {key}: {'.'.join(sections[:depth])} is {tree!r}, not a section; "
                "remove one of them"
            )
    if value != {} or not isinstance(tree.get(last), dict):  # an empty section begins one and clears none
        tree[last] = deepcopy(value)
