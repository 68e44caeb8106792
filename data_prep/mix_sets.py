"""Mix several prepared sets into one training set, by weights and quotas written in YAML.

    # mix.yaml;  vlm-rl prepare mix --source mix.yaml --out data/mix
    seed: 0
    rows: 20000                       # optional: without it as many as the weights allow
    sets:
      - {path: data/virl39k, weight: 3}
      - {path: data/dapo, weight: 1, quota: 4000}   # at most so many rows of this set
    quotas: {virl39k/ai2d: 500}       # at most so many rows of a source within the sets

A hash of (seed, id) decides which rows are taken, and the rows keep the order of the sets: the same file
gives the same mix, and a larger number of rows only adds rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config import ConfigSection, parse_tree, read_tree
from vlm_rl.data.sets import load_set, read_manifest
from vlm_rl.data_prep.card import write_card
from vlm_rl.data_prep.partial_set import PartialSet
from vlm_rl.data_prep.prepared_set import DATA, SetWriter, copy_rows, schema, write_manifest
from vlm_rl.data_prep.report import write_report
from vlm_rl.errors import UserError

_SAME = ("format", "min_pixels", "max_pixels", "patch_size")  # what the sets of a mix must have in common
_OF_PARTS = ("source", "options", "dropped", "notes", "parts")  # what its manifest repeats of each


class MixedSet(ConfigSection):
    """A prepared set of the mix."""

    path: str
    weight: PositiveFloat = 1.0
    quota: PositiveInt | None = None


class MixPlan(ConfigSection):
    """The contents of the YAML file."""

    sets: list[MixedSet] = Field(min_length=1)
    seed: NonNegativeInt = 0
    rows: PositiveInt | None = None
    quotas: dict[str, NonNegativeInt] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixReport:
    """The rows taken from each set, and how many it could give under the quotas."""

    out: Path
    taken: Mapping[str, int]
    available: Mapping[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{count} of {self.available[name]} from {name}" for name, count in self.taken.items())
        return f"{self.out}: {sum(self.taken.values())} rows: {parts}"


def mix_sets(file: Path, out: Path) -> MixReport:
    """Write the mix that `file` describes as the prepared set `out`.

    Raises UserError for a bad file, sets that do not fit together, benchmark rows, an id in two sets, or when no row
    is left.
    """
    plan = parse_tree(MixPlan, _floats(read_tree(file)), str(file))
    paths = [file.parent / part.path for part in plan.sets]  # an absolute path stays as it is
    manifests = [_manifest(path) for path in paths]
    _check_alike(paths, manifests)
    _check_quotas(paths, plan)
    candidates = [_candidates(path, part, plan) for path, part in zip(paths, plan.sets, strict=True)]
    _check_ids(paths, candidates)
    counts = allot([part.weight for part in plan.sets], [len(rows) for rows in candidates], plan.rows)
    if not any(counts):
        empty = ", ".join(str(path) for path, rows in zip(paths, candidates, strict=True) if not rows)
        raise UserError(f"{file}: no row is left to write: the quotas leave no row of {empty}; raise them")
    with PartialSet(out, {"mix": plan.model_dump()}) as partial:
        with SetWriter(partial.build / DATA, schema()) as writer:
            for path, rows, count in zip(paths, candidates, counts, strict=True):
                copy_rows(path / DATA, {number for number, _ in rows[:count]}, writer)
        facts = {key: manifests[0][key] for key in _SAME if key in manifests[0]}
        parts = [
            {"name": path.name, "taken": count, "sha256": manifest["sha256"][DATA]}
            | {key: manifest[key] for key in _OF_PARTS if key in manifest}
            for path, count, manifest in zip(paths, counts, manifests, strict=True)
        ]
        options = {**plan.model_dump(exclude={"sets"}), "weights": [part.weight for part in plan.sets]}
        facts |= {"source": "mix", "parts": parts, "options": options, "test_only": False}
        facts |= {"kept": writer.num_rows, "rows_in": writer.num_rows, "dropped": {}, "notes": {}}
        write_manifest(partial.build, facts)
        write_report(partial.build, name=out.name, seed=plan.seed)
        write_card(partial.build)
        partial.publish()
    names = [str(part.path) for part in plan.sets]  # as written: two sets may end in the same folder name
    available = dict(zip(names, map(len, candidates), strict=True))
    return MixReport(out, dict(zip(names, counts, strict=True)), available)


def allot(weights: Sequence[float], available: Sequence[int], rows: int | None) -> list[int]:
    """Return how many rows each set gives: in proportion to the weights; where a set has too few, the others fill up.

    With `rows` None it is the most for which the proportion is exact, rounded down. Fewer than `rows` come
    out only if all sets together have fewer.
    """
    if rows is None:
        share = min(have / weight for weight, have in zip(weights, available, strict=True))
        return [int(share * weight + 1e-9) for weight in weights]
    counts = [0] * len(weights)
    open_sets = {index for index, have in enumerate(available) if have}
    left = min(rows, sum(available))
    while left and open_sets:
        total = sum(weights[index] for index in open_sets)
        wanted = {index: left * weights[index] / total for index in open_sets}
        full = [index for index in sorted(open_sets) if counts[index] + wanted[index] >= available[index]]
        if full:  # these give all they have; the others share the rest
            for index in full:
                left -= available[index] - counts[index]
                counts[index] = available[index]
            open_sets -= set(full)
            continue
        for index in open_sets:
            counts[index] += int(wanted[index])
        left -= sum(int(value) for value in wanted.values())
        by_rest = sorted(open_sets, key=lambda index: (int(wanted[index]) - wanted[index], index))
        for index in by_rest[:left]:
            counts[index] += 1
        left = 0
    return counts


def _floats(tree: Any) -> Any:
    """Turn weights written as whole numbers into floats; the strict sections take no int for a float."""
    if isinstance(tree, dict) and isinstance(tree.get("sets"), list):
        for part in tree["sets"]:
            if isinstance(part, dict) and type(part.get("weight")) is int:
                part["weight"] = float(part["weight"])
    return tree


def _manifest(path: Path) -> dict[str, Any]:
    facts = read_manifest(path)
    if not facts or not (path / DATA).is_file():
        raise UserError(f"{path}: not a prepared set; `vlm-rl prepare` makes one")
    if facts.get("test_only"):
        raise UserError(
            f"{path}: is a benchmark, and training on its rows makes every score on it worthless; "
            "take it out of the mix"
        )
    load_set(path)  # refuses a damaged one
    return facts


def _check_alike(paths: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> None:
    for path, facts in zip(paths, manifests, strict=True):
        for key in _SAME:
            if facts.get(key) != manifests[0].get(key):
                raise UserError(
                    f"{path} was prepared with {key} {facts.get(key)}, {paths[0]} with {manifests[0].get(key)}: "
                    "prepare both with the same value"
                )


def _check_quotas(paths: Sequence[Path], plan: MixPlan) -> None:
    import pyarrow.parquet as pq

    known: set[str] = set()
    for path in paths:
        known |= set(pq.read_table(path / DATA, columns=["source"])["source"].unique().to_pylist())
    if unknown := [name for name in plan.quotas if name not in known]:
        raise UserError(f"quotas: no set has rows of the source {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _candidates(path: Path, part: MixedSet, plan: MixPlan) -> list[tuple[int, str]]:
    """Return (row number, id) of the rows that the quotas leave, in the order in which a mix takes them."""
    import pyarrow.parquet as pq

    table = pq.read_table(path / DATA, columns=["id", "source"]).to_pylist()
    order = sorted(range(len(table)), key=lambda number: (_key(plan.seed, table[number]["id"]), number))
    seen: Counter[str] = Counter()
    rows: list[tuple[int, str]] = []
    for number in order:
        source = table[number]["source"]
        seen[source] += 1
        if seen[source] <= plan.quotas.get(source, len(table)):
            rows.append((number, table[number]["id"]))
    return rows[: part.quota]


def _key(seed: int, identity: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{identity}".encode(), digest_size=8).digest()


def _check_ids(paths: Sequence[Path], candidates: Sequence[Sequence[tuple[int, str]]]) -> None:
    origin: dict[str, Path] = {}
    for path, rows in zip(paths, candidates, strict=True):
        for _, identity in rows:
            if identity in origin:
                raise UserError(f"problem id {identity!r} is in {origin[identity]} and again in {path}; drop one")
            origin[identity] = path
