"""What rollout.ahead brings on this machine: a server on one core, the learner on another.

    python perf/ahead.py                   # minutes
    python perf/ahead.py --rounds 3 --steps 12

Toy problems and a random tiny model, whose responses nearly all have the longest length. The same server samples
for ahead 0 and ahead 1, in turns; only the learner is started again. The run in process has both cores for its engine
and its learner, which take turns. Seconds are means over all steps but the first, which pays for caches, and the
last, which begins no other batch; saves and the start are not counted.

"Predicted" is `vlm-rl plan`'s simulation of the same steps, from the seconds and lengths that the runs with ahead 0
measured. For ahead 0 it is a check of the bookkeeping, for ahead 1 of the simulation.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from vlm_rl.data_prep.preparation import prepare
from vlm_rl.run.directory import RunDirectory
from vlm_rl.scaling.command import measure
from vlm_rl.scaling.rates import CardSpeed
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model


def toy_config(folder: Path, *, prompts: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the configuration of all runs; their data and model are written into the folder."""
    raw = SQUARES.write(folder / "raw", seed=0, train=64, heldout=8, warm=8, mixture=8)
    prepare("virl39k", raw / "train", folder / "train")
    model = build_tiny_model(folder / "model", tokenizer_texts=SQUARES.tokenizer_texts())
    return {
        "model": {"path": str(model)},
        "data": {"train": [str(folder / "train")], "max_prompt_tokens": 160},
        "reward": {"overlong_buffer": tokens // 2},
        "rollout": {"prompts_per_step": prompts, "max_tokens": tokens, "batch_size": 256},
        "train": {"steps": steps, "mini_batch_prompts": max(1, prompts // 2), "lr": 1e-4},
        "checkpoint": {"every": steps},
        "log": {"samples_every": 0},
    }


def start(words: Sequence[str], *, cores: set[int], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of vlm-rl on these cores, with a thread for each."""
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "vlm_rl", *words],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )


def train(tree: dict[str, Any], out: Path, *, cores: set[int], **rollout: Any) -> list[dict[str, float]]:
    """Train a run and return the metrics of the steps that count."""
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**tree, "out": str(out), "rollout": tree["rollout"] | rollout}))
    if start(["train", str(path)], cores=cores, log=out.with_suffix(".log")).wait():
        raise SystemExit(out.with_suffix(".log").read_text()[-2000:])
    return [record for record in RunDirectory(out).metrics() if "step_time" in record][1:-1]


def predicted(run: RunDirectory, *, ahead: int) -> float:
    """Return the seconds of a step of this run, simulated with batches ahead, from its own seconds and lengths."""
    return measure(run, CardSpeed(), ranks=1).again(ahead=ahead, skipped=ahead, saves=False).seconds


def mean(records: Sequence[dict[str, float]], key: str) -> float:
    return statistics.fmean(record.get(key, 0.0) for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, with 8 responses each")
    parser.add_argument("--tokens", type=int, default=72, help="the longest response")
    parser.add_argument("--steps", type=int, default=8, help="rollout steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be at least 4: the first step and the last do not count")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = toy_config(folder, prompts=options.prompts, tokens=options.tokens, steps=options.steps)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        served = {
            "sampler": "server",
            "servers": [f"http://127.0.0.1:{port}"],
            "server_token": str(folder / "token"),
            "ahead": 1,
        }
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump({**tree, "out": str(folder / "x"), "rollout": tree["rollout"] | served}))
        server = start(["serve", str(config), "--port", str(port)], cores={second}, log=folder / "server.log")
        measured: dict[str, list[dict[str, float]]] = {"ahead 0": [], "ahead 1": [], "in process": []}
        try:
            while not is_open(port):
                if server.poll() is not None:
                    raise SystemExit((folder / "server.log").read_text()[-2000:])
                time.sleep(1)
            for turn in range(options.rounds):
                for ahead in (0, 1):
                    run = folder / f"ahead-{ahead}-{turn}"
                    measured[f"ahead {ahead}"] += train(tree, run, cores={first}, **served | {"ahead": ahead})
        finally:
            server.terminate()  # killed, it would leave its shared memory behind
            server.wait()
        for turn in range(options.rounds):
            run = folder / f"in-process-{turn}"
            measured["in process"] += train(tree, run, cores={first, second}, sampler="vllm")
        on_policy_runs = [RunDirectory(folder / f"ahead-0-{turn}") for turn in range(options.rounds)]
        simulated = {
            f"ahead {k}": f"{statistics.fmean(predicted(run, ahead=k) for run in on_policy_runs):.2f}" for k in (0, 1)
        }
    print("| | cores | a step, s | predicted | of it waiting for responses | update | sync | tokens a step | age |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, records in measured.items():
        seconds = [mean(records, key) for key in ("step_time", "timing/rollout", "timing/update", "timing/sync")]
        cores = "2" if kind == "in process" else "1 + 1"
        whole, *parts = [f"{value:.2f}" for value in seconds]
        print(
            f"| {kind} | {cores} | {whole} | {simulated.get(kind, '')} | {' | '.join(parts)} "
            f"| {mean(records, 'num_tokens'):.0f} | {mean(records, 'ahead/age_mean'):.2f} |"
        )
    on_policy, ahead = (mean(measured[f"ahead {k}"], "step_time") for k in (0, 1))
    share = mean(measured["ahead 0"], "timing/rollout") / on_policy
    size = options.steps - 2  # that count, of each run
    rounds = [
        mean(measured["ahead 0"][at : at + size], "step_time")
        / mean(measured["ahead 1"][at : at + size], "step_time")
        for at in range(0, options.rounds * size, size)
    ]
    print(
        f"ahead 1 is {on_policy / ahead:.2f} times as fast as ahead 0 (by round {min(rounds):.2f} to "
        f"{max(rounds):.2f}), where rollouts are {share:.0%} of a step"
    )


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()
