"""Make the data of `quickstart --tools`: boards that are too small to read, in ViRL39K's layout, prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlm_rl.data.images import encode_png
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.run.terminal import make_console
from vlm_rl.toy.counting_task import keyed_rng
from vlm_rl.toy.small_board import BoardProblem, draw, make_problems, mixture, turns
from vlm_rl.toy.tools_quickstart import Script, ToolsData
from vlm_rl.toy.virl_layout import write_virl

SIZES = {"train": 384, "heldout": 252, "warm": 768}
PASSES, SPRINKLED, MIXED = 8, 800, 1600  # passes over the clean traces; mixed ones among them; mixed ones after them


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace of the warm start: the place of its problem, and its turns."""

    place: int
    turns: Sequence[str]


def make_tools_data(out: Path, *, seed: int) -> ToolsData:
    """Make everything that the quickstart with a tool trains and measures on below the new folder `out`."""
    make_console().print("drawing images and preparing them like ViRL39K's ...")
    made = {split: make_problems(count, seed=seed, split=split) for split, count in SIZES.items()}
    for split, problems in made.items():
        _write(out / "raw" / split, problems)
        prepare("virl39k", out / "raw" / split, out / split, Options(keep_duplicates=True))
    problems = {problem.id: problem for problem in load_set(out / "warm")}
    warm = made["warm"]
    scripts = [Script(problems[warm[trace.place].id], trace.turns) for trace in _traces(warm, seed=seed)]
    return ToolsData(folder=out, train=out / "train", heldout=out / "heldout", scripts=scripts)


def _traces(warm: Sequence[BoardProblem], *, seed: int) -> list[_Trace]:
    """Return the traces in training order: clean ones with some mixed ones among them, then the other mixed ones."""
    rng = keyed_rng(seed, "order", 0)
    clean = [_Trace(place, turns(problem, "zoom", rng)) for place, problem in enumerate(warm)]
    order = np.concatenate([rng.permutation(len(clean)) for _ in range(PASSES)])
    mixed = [_Trace(*trace) for trace in mixture(warm, SPRINKLED + MIXED, seed=seed)]
    sequence = [clean[place] for place in order]
    for trace in mixed[:SPRINKLED]:
        sequence.insert(int(rng.integers(len(sequence))), trace)
    return sequence + mixed[SPRINKLED:]


def _write(folder: Path, problems: Sequence[BoardProblem]) -> None:
    rows = [
        {
            "question": problem.question,
            "answer": rf"\boxed{{{problem.count}}}",
            "PassRate_32BTrained": -1.0,  # not measured
            "source": "Toy",
            "qid": problem.id,
            "image": [f"images/{problem.id}.png"],
        }
        for problem in problems
    ]
    write_virl(folder, rows, {f"{problem.id}.png": encode_png(draw(problem)) for problem in problems})
