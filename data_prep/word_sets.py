"""Make the sets of word problems that a run in plain language trains and is measured on.

python -m vlm_rl.data_prep.word_sets runs/words                   # small numbers
python -m vlm_rl.data_prep.word_sets runs/words-large --numbers large
python -m vlm_rl.data_prep.word_sets runs/words-study --control    # with traces that are longer and no better

runs/words/traces       problems with a response each, for `vlm-rl sft`
runs/words/train        problems for reinforcement
runs/words/heldout      problems whose equations are in neither
"""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.generic import Columns, GenericSet
from vlm_rl.toy.word_problems import (
    LARGE,
    SMALL,
    STUDY_SHARE,
    TRACE_SHARE,
    NumberRanges,
    Style,
    make_problems,
    make_traces,
)

NUMBERS = {"small": SMALL, "large": LARGE}
NUM_TRACES, NUM_TRAIN, NUM_HELDOUT = 1600, 3000, 96
_KEPT = Options(keep_duplicates=True)  # different problems may have the same sums


@dataclass(frozen=True, slots=True)
class StyledSets:
    """Prepared sets: traces in several styles, problems for reinforcement, and held-out ones."""

    traces: Path
    train: Path
    heldout: Path


def make_word_sets(
    out: Path,
    *,
    seed: int = 0,
    numbers: NumberRanges = SMALL,
    shares: Mapping[Style, float] = TRACE_SHARE,
    traces: int = NUM_TRACES,
    train: int = NUM_TRAIN,
    heldout: int = NUM_HELDOUT,
) -> StyledSets:
    """Make the sets below the folder `out`; those that exist are kept.

    Args:
        out: the folder.
        seed: of the problems and the traces.
        numbers: the ranges of the problems' numbers.
        shares: style -> its share of the traces.
        traces, train, heldout: the problems of each set.
    """
    sets = StyledSets(out / "traces", out / "train", out / "heldout")
    for folder, count in ((sets.traces, traces), (sets.train, train), (sets.heldout, heldout)):
        if folder.exists():
            continue
        problems = make_problems(count, numbers, seed=seed, split=folder.name)
        rows = [[problem.id, problem.question, str(problem.answer)] for problem in problems]
        header = ["id", "question", "answer"]
        if folder == sets.traces:
            header.append("trace")
            texts = make_traces(problems, seed=seed, shares=shares)
            rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
        _prepare(out / "raw" / folder.name, folder, header, rows)
    return sets


def _prepare(raw: Path, folder: Path, header: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the rows as a table in the new folder `raw`, and prepare it."""
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    with (raw / "problems.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    response = "trace" if "trace" in header else ""
    columns = Columns(question="question", answer="answer", id="id", response=response)
    prepare("generic", raw, folder, _KEPT, mapping=GenericSet(path=".", source="words", columns=columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of the sets")
    parser.add_argument("--numbers", choices=NUMBERS, default="small", help="where a check pays, or does not")
    parser.add_argument("--control", action="store_true", help="a fifth of the traces tell the question twice")
    parser.add_argument("--seed", type=int, default=0, help="of problems and traces")
    options = parser.parse_args()
    shares = STUDY_SHARE if options.control else TRACE_SHARE
    make_word_sets(options.out, seed=options.seed, numbers=NUMBERS[options.numbers], shares=shares)


if __name__ == "__main__":
    main()
