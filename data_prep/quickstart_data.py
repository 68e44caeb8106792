"""Make the data of the quickstart, and of a paper's tiny runs: the counting task in ViRL39K's layout, prepared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.learner.sft import Example
from vlm_rl.run.terminal import make_console
from vlm_rl.toy.counting_squares import FORCED_SCAN, SQUARES
from vlm_rl.toy.quickstart import ToyData, WarmStart

DRAWN = Options(keep_duplicates=True)
"""For drawn squares: they all look alike to a perceptual hash."""
TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 512, 256
WARM_PROBLEMS, WARM_SPRINKLED = 1024, 800
PROGRAMS = {
    "their sum": [("1 2", "3"), ("-4 4", "0")],
    "the largest": [("1 2", "2"), ("7 3", "7")],
    "how many they are": [("5 5 5", "3"), ("9", "1")],
    "them in reverse order": [("1 2 3", "3 2 1"), ("4 4", "4 4")],
}
"""What a program of the tiny LiveCodeBench prints, with its tests: a line of input and the line of output."""


def make_quickstart_data(out: Path, *, seed: int) -> ToyData:
    """Make everything that the quickstart trains and measures on below the new folder `out`."""
    make_console().print("drawing images and preparing them like ViRL39K's ...")
    how = WarmStart.here()
    raw = SQUARES.write(
        out / "raw",
        seed=seed,
        train=TRAIN_PROBLEMS,
        heldout=HELDOUT_PROBLEMS,
        warm=WARM_PROBLEMS,
        mixture=WARM_SPRINKLED + how.mixture,
    )
    sets = {split: out / split for split in ("train", "heldout", "warm")}
    for split, folder in sets.items():
        prepare("virl39k", raw / split, folder, DRAWN)
    return ToyData(
        folder=out,
        train=sets["train"],
        heldout=sets["heldout"],
        warm_examples=warm_examples(
            raw / "warm", sets["warm"], seed=seed, passes=how.passes, sprinkled=WARM_SPRINKLED
        ),
        tokenizer_texts=SQUARES.tokenizer_texts(),
        forced_scan=FORCED_SCAN,
    )


def make_tiny_sets(out: Path, names: Sequence[str]) -> list[str]:
    """Make a training set of 16 problems, `train`, and sets with these names; return the tokenizer's texts.

    `livecodebench` has four programs. The other sets have squares: five problems, six, and so on. Sets that are there
    stay.
    """
    raw = out / "raw"
    if not raw.is_dir():
        SQUARES.write(raw, seed=0, train=16, heldout=5 + len(names), warm=1, mixture=0)
        _write_programs(raw / "livecodebench")
    for name, split, count in [("train", "train", 16), *((name, "heldout", 5 + n) for n, name in enumerate(names))]:
        if (out / name / "manifest.json").is_file():
            continue
        if name == "livecodebench":
            prepare(name, raw / name, out / name, Options(split="release_v1"))
        else:
            prepare("virl39k", raw / split, out / name, replace(DRAWN, limit=count))
    return SQUARES.tokenizer_texts()


def _write_programs(folder: Path) -> None:
    """Write LiveCodeBench's table for the problems of PROGRAMS: the first test is public, the second hidden."""
    rows = []
    for number, (printed, tests) in enumerate(PROGRAMS.items()):
        public, hidden = [[{"input": line, "output": out, "testtype": "stdin"}] for line, out in tests]
        rows.append(
            {
                "question_id": f"tiny-{number}",
                "question_content": f"A line holds whole numbers. Print {printed}.",
                "starter_code": "",
                "public_test_cases": json.dumps(public),
                "private_test_cases": json.dumps(hidden),
                "metadata": "{}",
                "contest_date": "2024-01-01T00:00:00",
                "platform": "none",
                "difficulty": "easy",
            }
        )
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "test.jsonl").write_text(text, encoding="utf-8")


def warm_examples(raw: Path, prepared: Path, *, seed: int, passes: int, sprinkled: int) -> list[Example]:
    """Return the examples of a warm start in order: the clean traces, then the mixture.

    Args:
        raw: the task's folder with traces.jsonl.
        prepared: the prepared set of the same problems.
        seed: of the order.
        passes: how often each image comes with its clean scan.
        sprinkled: mixed traces that are strewn among the clean ones; the rest follow alone. Without these, words
            that only the other styles use would still be untrained when their turn comes, and every unused word
            would rise with them.
    """
    problems = {problem.id: problem for problem in load_set(prepared)}
    lines = [json.loads(line) for line in (raw / "traces.jsonl").read_text(encoding="utf-8").splitlines()]
    phases = {name: [line for line in lines if line["phase"] == name] for name in ("clean", "mixture")}
    rng = np.random.default_rng([seed, len(problems)])
    order = [index for _ in range(passes) for index in rng.permutation(len(problems))]
    sequence = [phases["clean"][index] for index in order]
    for line in phases["mixture"][:sprinkled]:
        sequence.insert(int(rng.integers(len(sequence))), line)
    sequence += phases["mixture"][sprinkled:]
    return [Example(problems[line["id"]], line["response"]) for line in sequence]
