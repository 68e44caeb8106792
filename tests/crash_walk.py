"""Kill a toy run at the points where it touches the disk or forks; a resume must equal the run that was never killed.

With --error its disk fails from that point on instead, and the run must end in one message with a path.

    python -m tests.crash_walk                                     # every point: hours (make crash)
    python -m tests.crash_walk --samplers transformers --ranks 1   # every point of one kind of run
    python -m tests.crash_walk --part 2/3                          # every third point, from the second
    python -m tests.crash_walk --points 6 --seed 20260101          # a sample
    python -m tests.crash_walk --error EIO --ranks 1               # ENOSPC, EDQUOT, EROFS, EMFILE likewise

The points are those of tests/helpers/crash_points.c: every open that creates, write, sync, rename, removal and new
folder below the run's folder, and every fork, on each rank. The run has what can be lost: evaluations with their
journal, and a checkpoint per step, of which the second prunes the first.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.helpers.toy_runs import (
    ExitResult,
    Runner,
    Toys,
    assert_equal_runs,
    assert_sound,
    make_toys,
)
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model

SAMPLERS = ("transformers", "vllm")
RANKS = (1, 2)


@dataclass
class Walk:
    """One kind of run: its uninterrupted form, and the points of each rank."""

    toys: Toys
    sampler: str
    ranks: int
    async_save: bool = False
    whole: RunDirectory = field(init=False)
    points: list[tuple[int, int, str]] = field(init=False)  # (rank, number, what is done to which file)

    def __post_init__(self) -> None:
        logs = [self.toys.folder / f"points-{self.name}-{rank}.txt" for rank in range(self.ranks)]
        for log in logs:
            log.unlink(missing_ok=True)
        self.whole = self.toys.run(f"{self.name}-whole")
        faults = [{"list_points": {"folder": str(self.whole.path), "log": str(log)}} for log in logs]
        result = self.start(f"{self.name}-whole", faults)
        assert result.code == 0, result.output[-3000:]
        listed = [log.read_text().splitlines() for log in logs]
        self.points = [
            (rank, number, what) for rank, lines in enumerate(listed) for number, what in enumerate(lines, start=1)
        ]

    @property
    def name(self) -> str:
        return f"{self.sampler}-{self.ranks}{'-async' if self.async_save else ''}"

    def start(self, run: str, faults: Sequence[Mapping[str, Any]] = ()) -> ExitResult:
        """Train in the folder `run`, or resume there; `faults` has those of each rank."""
        config = self.toys.config(
            run,
            data={"eval": [str(self.toys.heldout)]},
            eval={"every": 2},
            checkpoint={"every": 1, "keep_last": 1, "async_save": self.async_save},
            rollout={"sampler": self.sampler},
            train={"steps": 2, "zero_stage": 0 if self.ranks == 1 else 2},
        )
        is_begun = (self.toys.run(run).path / "config.yaml").exists()
        words = ["train", str(config), *(["--resume"] if is_begun else [])]
        # vLLM compiles one small function, for seconds; none of it is in the run's folder.
        environment = {"TORCH_COMPILE_DISABLE": "1"}
        return self.toys.runner(*words, ranks=self.ranks, faults_of_ranks=faults, environment=environment)

    def crash(self, rank: int, number: int, what: str) -> None:
        """Kill a run at this point, resume it and compare. Raises AssertionError, which names the point."""
        point = f"{self.name} rank {rank} point {number} ({what})"
        run = f"{self.name}-{rank}-{number}"
        folder = str(self.toys.run(run).path)
        faults = [
            {"die_at_point": {"folder": folder, "number": number}} if r == rank else {} for r in range(self.ranks)
        ]
        # The order in which threads reach their points may differ, so that the last ones may be behind the end.
        self._compare(run, point, self.start(run, faults), ends=(-signal.SIGKILL, 0))

    def _compare(self, run: str, point: str, ended: ExitResult, *, ends: Sequence[int]) -> None:
        """Check how a run ended, resume it, and compare it with the whole one."""
        folder = self.toys.run(run).path
        assert ended.code in ends, f"{point}: {ended.code} {ended.output[-3000:]}"
        if ended.code == 2:
            last = ended.output.strip().splitlines()[-1]
            assert "Traceback" not in ended.output and str(folder) in last, f"{point}: {ended.output[-3000:]}"
        resumed = self.start(run)
        assert resumed.code == 0, f"{point}: {resumed.output[-3000:]}"
        try:
            assert_equal_runs(self.toys.run(run), self.whole)
            assert_sound(self.toys.run(run))
        except AssertionError as error:
            raise AssertionError(f"{point}: {error}") from error
        shutil.rmtree(folder)

    def fail(self, rank: int, number: int, what: str, *, error: str) -> None:
        """Let a rank's disk fail from this point on, resume the run and compare.

        Raises AssertionError, which names the point.
        """
        point = f"{self.name} rank {rank} {error} from point {number} ({what})"
        run = f"{self.name}-{error}-{rank}-{number}"
        folder = str(self.toys.run(run).path)
        faults = [
            {"fail_disk": {"folder": folder, "error": error, "number": number}} if r == rank else {}
            for r in range(self.ranks)
        ]
        self._compare(run, point, self.start(run, faults), ends=(2, 0))

    def sample(self, count: int, seed: int) -> list[tuple[int, int, str]]:
        """Return this many points, spread over the run: one of each of `count` parts of the list."""
        rng, size = random.Random(seed), len(self.points)
        bounds = [size * part // count for part in range(count + 1)]
        return [self.points[rng.randrange(low, high)] for low, high in pairwise(bounds)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_walk")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--async-save", action="store_true", help="runs with checkpoint.async_save")
    parser.add_argument("--points", type=int, help="a sample of each kind of run; default: every point")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--part", default="1/1", help="2/3: every third point, from the second")
    parser.add_argument("--error", help="of a disk that fails from the point on, such as EIO; default: a kill")
    parser.add_argument("--first", type=int, default=1, help="the point to begin with, after a walk that was stopped")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder, Runner(Path(folder), crash=True) as runner:
        tiny = build_tiny_model(Path(folder) / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
        toys = make_toys(Path(folder), tiny_model=tiny, runner=runner)
        for sampler in options.samplers:
            for ranks in options.ranks:
                run = Walk(toys, sampler, ranks, options.async_save)
                points = run.sample(options.points, options.seed) if options.points else run.points
                failed += walk(run, points[options.first - 1 :][part - 1 :: parts], options.error)
    return 1 if failed else 0


def walk(run: Walk, points: Sequence[tuple[int, int, str]], error: str | None = None) -> int:
    """Crash at these points, or let the disk fail there, and return how many runs differ.

    Prints a line for each of them, and a last one.
    """
    kinds = Counter(what.split()[0] for _, _, what in run.points)
    print(f"{run.name}: {len(run.points)} points ({dict(kinds)}), {len(points)} walked", flush=True)
    failed, begun = 0, time.monotonic()
    for done, point in enumerate(points, start=1):
        try:
            run.crash(*point) if error is None else run.fail(*point, error=error)
        except AssertionError as difference:
            failed += 1
            print(f"FAILED {difference}", flush=True)
        if done % 20 == 0:
            print(f"{run.name}: {done}/{len(points)} in {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{run.name}: {len(points) - failed} of {len(points)} points equal, {failed} not", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
