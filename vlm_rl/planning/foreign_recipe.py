"""Write a recipe from another trainer's file: `vlm-rl init --from easyr1.yaml`.

Every setting of the file ends in one of two places: as a value of the recipe, with a comment that names what it was
there, or in the list of what was not converted, with the reason. What the other trainer does by default is set too.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_rl.config import parse_config
from vlm_rl.data.sets import read_manifest
from vlm_rl.errors import UserError
from vlm_rl.planning.foreign_files import ForeignFile, read_foreign
from vlm_rl.planning.foreign_rows import Conversion
from vlm_rl.planning.foreign_values import convert
from vlm_rl.planning.init import Recipe, body_of
from vlm_rl.run.run_files import write_atomically

_ROW_TOKENS = 16_384
_SECTIONS = ("model", "data", "algorithm", "reward", "rollout", "train", "eval", "checkpoint", "log")
_NONE_THERE = {  # what we do by default and they do not
    "reward.format": 0.0,
    "reward.overlong_buffer": 0,
}


def init_from(options: argparse.Namespace) -> None:
    """Write the recipe and print what could not be converted, and the commands that follow.

    Raises UserError if the file cannot be read, or names no model.
    """
    source: Path = options.source
    file = read_foreign(source)
    out = options.out or Path(f"{source.stem}_vlm_rl.yaml")
    if out.exists():
        raise UserError(f"{out} exists already; remove it, or choose a different --out")
    rows = sum(int(read_manifest(path).get("kept", 0)) for path in options.data) or None
    conversion = convert(file, rows=rows, processes=options.gpus)
    if options.model:
        conversion.values["model.path"] = (options.model, "--model")
    if "model.path" not in conversion.values:
        raise UserError(f"--from {source} names no model: add --model")
    prepares = _name_sets(conversion, options)
    recipe = _recipe(conversion, out)
    text = _text(file, conversion, recipe, prepares, out)
    write_atomically(out, lambda place: place.write_text(text, encoding="utf-8"))
    left = conversion.left
    print(f"{out}: {len(conversion.values)} keys from {source}, which is a file of {file.trainer}")
    if left:
        print(f"not converted, {len(left)}:")
        print("\n".join(f"  {line}" for line in left))
    for fault in _faults(recipe):
        print(f"to change before it trains: {fault}")
    print("next:")
    print("\n".join(f"  {line}" for line in [*prepares, f"vlm-rl train {shlex.quote(str(out))} --dry-run"]))


def _name_sets(conversion: Conversion, options: argparse.Namespace) -> list[str]:
    """Put the prepared sets into the conversion, and return the commands that make those that are missing."""
    prepares = []
    for kind, given in (("train", options.data), ("eval", options.eval)):
        if given:
            conversion.values[f"data.{kind}"] = ([str(path) for path in given], "the command line")
            continue
        sets = []
        for source in conversion.data.get(kind, []):
            name, words = _prepare_words(source, conversion.columns)
            sets.append(f"data/{name}")
            prepares.append(f"vlm-rl prepare {words} --out data/{name}")
        if sets or kind == "train":
            there = ", ".join(conversion.data.get(kind, [])) or "no set is named there"
            conversion.values[f"data.{kind}"] = (sets or ["data/SET"], there)
    return prepares


def _prepare_words(source: str, columns: Mapping[str, str]) -> tuple[str, str]:
    """Return a name for a data set of theirs, and the words of `vlm-rl prepare` that make it.

    They write a split as NAME@SPLIT (EasyR1), and a number of rows as NAME#ROWS (ms-swift).
    """
    place, _, limit = source.partition("#")
    place, _, split = place.partition("@")
    path = Path(place)
    parts = [path.parent.name if path.suffix else "", path.stem if path.suffix else path.name, split]
    name = re.sub(r"[^\w.-]+", "_", "_".join(filter(None, parts))) or "set"
    words = [place]
    words += ["--split", split] if split else []
    words += ["--limit", limit] if limit.isdecimal() else []
    for option, column in columns.items():
        words += [f"--{option}", column]
    return name, shlex.join(words)


def _recipe(conversion: Conversion, out: Path) -> Recipe:
    """Return the values by section, with what we do by default and they do not taken back."""
    values = dict(conversion.values)
    for key, value in _NONE_THERE.items():
        values.setdefault(key, (value, "none there"))
    if "eval.every" not in values and "data.eval" in values:
        values["eval.every"] = (10, "not given there")
    if "data.eval" not in values:
        values = {key: value for key, value in values.items() if not key.startswith("eval.")}
    if values.get("eval.temperature", (0.0, ""))[0] == 0 and values.get("eval.samples", (1, ""))[0] != 1:
        values["eval.samples"] = (1, "greedy answers are all the same")
    if values.get("rollout.tensor_parallel", (1, ""))[0] > 1:
        values["rollout.sampler"] = ("vllm", "rollout.tensor_parallel needs it")
    longest = conversion.value("data.max_prompt_tokens", 4096) + conversion.value("rollout.max_tokens", 4096)
    values.setdefault("train.micro_batch_tokens", (max(_ROW_TOKENS, longest), "rows are packed, not counted"))
    values.setdefault("out", (f"runs/{out.stem}", ""))
    recipe = Recipe({}, {})
    order = sorted(values, key=lambda key: _SECTIONS.index(key.split(".")[0]) if "." in key else -1)
    for key in order:
        value, there = values[key]
        recipe.put(key, value, there)
    return recipe


def _faults(recipe: Recipe) -> list[str]:
    """Return why the recipe would be refused as it is."""
    try:
        parse_config(recipe.tree, "the recipe")
    except UserError as error:
        return str(error).split("\n")
    return []


def _text(file: ForeignFile, conversion: Conversion, recipe: Recipe, prepares: list[str], out: Path) -> str:
    """Return the text of the recipe."""
    head = [
        f"From {file.path.name}, a file of {file.trainer}; the comments name what each value was there.",
        "",
        *(["Before the first start:", *(f"  {line}" for line in prepares), ""] if prepares else []),
        f"  vlm-rl train {out} --dry-run",
        "",
        "vlm-rl config KEY explains a key; docs/config.md lists all.",
    ]
    plain: dict[str, Any] = {key: value for key, value in recipe.tree.items() if key not in _SECTIONS}
    text = "".join(f"# {line}".rstrip() + "\n" for line in head) + "\n"
    text += "".join(f"{key}: {value}\n" for key, value in plain.items())
    sections = {key: value for key, value in recipe.tree.items() if key in _SECTIONS}
    text += body_of(Recipe(sections, recipe.comments))
    if conversion.left:
        text += "\n# Not converted:\n" + "".join(f"#   {line}\n" for line in conversion.left)
    if conversion.same:
        text += "\n# No key needed:\n" + "".join(f"#   {line}\n" for line in conversion.same)
    return text
