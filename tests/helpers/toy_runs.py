"""Small training runs on toy problems, each in its own process, and the comparison of two runs bit for bit."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from tests.helpers import crash_points
from tests.helpers.prepared_sets import write_problems
from vlm_rl.data.images import encode_png
from vlm_rl.run.checkpoint import newest_verified, verify
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.types import Problem

WORKER = "tests.helpers.train_worker"
# A fifth of the time of these imports would go into looking for garbage among what they make.
_SERVE = f"import gc; gc.disable(); from {WORKER} import serve; serve()"
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
DEADLINE = 240.0  # seconds for a run, which takes a few


def clean_environment(*, crash: bool = False) -> dict[str, str]:
    """Return the environment without what a process group of this process may have set.

    With `crash` it preloads the library of crash_points, where there is a compiler for it.
    """
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return (
        {key: value for key, value in os.environ.items() if key not in ranks}
        | ENVIRONMENT
        | {"PYTHONPATH": str(ROOT)}
        | ({"LD_PRELOAD": str(library)} if crash and (library := crash_points.library()) else {})
    )


@dataclass
class ExitResult:
    """How a process ended, and what it printed."""

    code: int  # exit code, or minus the signal
    output: str


class Runner:
    """Starts commands through tests/helpers/train_worker.py. Use as a context manager."""

    def __init__(self, folder: Path, *, crash: bool = False) -> None:
        """With `crash`, runs may be killed at the points of crash_points."""
        self.folder = folder
        self.crash = crash
        self.count = 0

    def __enter__(self) -> Self:
        self.server = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean_environment(crash=self.crash),
        )
        assert self._reply() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(timeout=DEADLINE)

    def __call__(self, *arguments: object, faults: Mapping[str, Any] | None = None, **job: Any) -> ExitResult:
        """Run `vlm-rl ARGUMENTS` in its own process, in the working directory `folder` if given."""
        self.count += 1
        log = self.folder / f"job-{self.count}.log"
        whole = {
            "arguments": [str(word) for word in arguments],
            "faults": faults or {},
            "log": str(log),
            "deadline": DEADLINE,
            **job,
        }
        return ExitResult(self._ask(whole), log.read_text())

    def try_tokenizer(self, model: Path) -> None:
        """Try a model's tokenizer for all later jobs, each of which would take most of a second for it."""
        assert self._ask({"tokenizer": str(model)}) == 0

    def _ask(self, job: Mapping[str, Any]) -> Any:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())


@cache
def shared_runner() -> Runner:
    """Return the runner of this process, started on first use, whose jobs may be killed at a point."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    runner = Runner(folder, crash=True).__enter__()
    atexit.register(runner.__exit__)
    return runner


@dataclass
class Toys:
    """Prepared sets, and a policy that answers in the right format by guessing."""

    folder: Path
    train: Path
    heldout: Path
    model: Path  # warm-started
    random_model: Path
    runner: Runner
    count: int = field(default=0)

    def __post_init__(self) -> None:
        self.runner.try_tokenizer(self.random_model)

    def config(self, name: str, **changes: Any) -> Path:
        """Write the YAML file of a run in the folder `name`; changes are given as section={key: value}."""
        tree: dict[str, Any] = {
            "seed": 3,
            "out": str(self.folder / "runs" / name),
            "model": {"path": str(self.model)},
            "data": {"train": [str(self.train)], "max_prompt_tokens": 160},
            "algorithm": {"name": "grpo"},
            "reward": {"overlong_buffer": 8},
            "rollout": {
                "sampler": "transformers",
                "prompts_per_step": 4,
                "responses_per_prompt": 4,
                "max_tokens": 14,
                "temperature": 1.1,
            },
            "train": {"steps": 4, "mini_batch_prompts": 2, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 0},
            "checkpoint": {"every": 2},
            "log": {"samples_every": 0},
        }
        for section, values in changes.items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        self.count += 1
        path = self.folder / f"{name.replace('/', '-')}-{self.count}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def train_run(self, name: str, **changes: Any) -> RunDirectory:
        """Train a run, which must succeed, and return its folder."""
        result = self.runner("train", str(self.config(name, **changes)))
        assert result.code == 0, result.output[-3000:]
        return self.run(name)

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / name)


def make_toys(folder: Path, *, tiny_model: Path, runner: Runner) -> Toys:
    train = toy_set(folder / "train", count=12, split="train")
    heldout = toy_set(folder / "heldout", count=4, split="heldout")
    traces = folder / "traces.json"
    rng = np.random.default_rng(0)
    problems = SQUARES.make_problems(12, seed=0, split="train")
    traces.write_text(json.dumps([(p.id, SQUARES.trace(p, "guess", rng)) for _ in range(16) for p in problems]))
    warm = folder / "warm"
    job = {"model": str(tiny_model), "train": str(train), "traces": str(traces), "out": str(warm)}
    result = runner(warm_start=job)
    assert result.code == 0, result.output[-3000:]
    return Toys(folder, train, heldout, warm, tiny_model, runner)


def toy_problem(index: int, split: str, count: int) -> Problem:
    toy = SQUARES.make_problems(count, seed=0, split=split)[index]
    image = encode_png(SQUARES.draw(toy, seed=0))
    return Problem(toy.id, toy.question, (image,), str(toy.count), "integer", source="Toy")


def toy_set(out: Path, *, count: int, split: str) -> Path:
    problems = [toy_problem(index, split, count) for index in range(count)]
    return write_problems(problems, out, {"min_pixels": 3136, "max_pixels": 1_003_520})


# -- equality of runs ----------------------------------------------------------------------------


def metrics_of(run: RunDirectory) -> list[dict[str, float | str]]:
    """Return all metrics but those of time, speed and memory, and the attempt; NaN is a word that equals itself."""
    return [
        {
            key: "NaN" if value != value else value
            for key, value in record.items()
            if not key.startswith(("timing/", "speed/", "memory/")) and key not in ("step_time", "attempt")
        }
        for record in run.metrics()
    ]


def rollouts_of(run: RunDirectory) -> list[list[dict[str, Any]]]:
    return [run.rollouts(step).drop_columns(["attempt"]).to_pylist() for step in run.rollout_steps()]


def state_of(run: RunDirectory) -> dict[str, Any]:
    """Return what the newest checkpoint holds, the optimizer's tensors included; it must verify."""
    import torch

    newest = newest_verified(run.path / "checkpoints")
    assert newest is not None
    folder, manifest = newest
    shards = sorted(path for path in (folder / "learner").rglob("*.pt"))
    return {
        "info": {key: value for key, value in manifest.info.items() if key != "config_sha256"},
        "weights": {name: entry for name, entry in manifest.files.items() if not name.startswith("learner/")},
        "optimizer": [_plain(torch.load(path, weights_only=False)) for path in shards],
    }


def _plain(tree: Any) -> Any:
    """Turn tensors into bytes, so that == compares bits; objects of other classes become their class's name."""
    import torch

    if isinstance(tree, torch.Tensor):
        flat = tree.detach().contiguous().reshape(-1)
        return str(tree.dtype), tuple(tree.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return tree if isinstance(tree, str | int | float | bool | None) else type(tree).__name__


def assert_equal_runs(run: RunDirectory, expected: RunDirectory) -> None:
    """Compare bit for bit: metrics, rollouts, weights, optimizer, counters, evaluations."""
    assert metrics_of(run) == metrics_of(expected)
    assert rollouts_of(run) == rollouts_of(expected)
    ours, theirs = state_of(run), state_of(expected)
    assert ours["info"] == theirs["info"]
    assert ours["weights"] == theirs["weights"]
    assert ours["optimizer"] == theirs["optimizer"]
    evals = [[(e.benchmark, e.step, e.rows().to_pylist()) for e in each.evals()] for each in (run, expected)]
    assert evals[0] == evals[1]


def assert_sound(run: RunDirectory) -> None:
    """Check that every checkpoint verifies and no half-written file is left."""
    for _, folder in run.checkpoints():
        verify(folder)
    leftovers = [path for path in run.path.rglob("*") if ".tmp" in path.name]
    assert not leftovers, leftovers
