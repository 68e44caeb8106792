"""Kill one of two rollout servers at random moments of a push, of rollouts and of an evaluation: nothing differs.

    python -m tests.server_kills                          # 20 of each: half an hour
    python -m tests.server_kills --times 2 --seed 7       # two of each, at other moments
    python -m tests.server_kills --phases push            # of a push alone

A moment is drawn from the time that the phase takes when nothing happens, so some kills come a little after it. The
server starts again at its address before the next one. What is drawn and evaluated must equal what it is without a
kill, and the weights that are left must be the learner's.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.helpers.rollout_servers import Fleet, learner_logps, same, served_fleet
from tests.helpers.toy_runs import Runner, make_toys
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.remote import push as server_push
from vlm_rl.samplers.remote.servers import ServerSampler
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Rollout

PARAMS = SamplingParams(temperature=1.0, max_tokens=14, responses=4)


class Kills:
    """Two servers, the second of which is killed and starts again."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._rng, self._runs = fleet, random.Random(seed), 0
        self._version = 0

    def push(self) -> Iterator[bool]:
        """Kill it while weights arrive, again and again; yield whether a kill came before the end."""
        server_push._PART = 1 << 16  # the toy's weights in many parts
        seconds = self._seconds(lambda: self._push(self._fleet.sampler(silence=10.0)))
        while True:
            sampler = self._fleet.sampler(silence=10.0)
            self._push(sampler)
            with self._kill_within(seconds) as is_killed:
                self._push(sampler)
                was_killed = is_killed()
            assert self._fleet.servers[0].url in sampler.fleet.rooms
            groups = self._draw(sampler)
            for prompt, group in zip(self._fleet.prompts, groups, strict=True):
                drawn = np.concatenate([rollout.logprobs for rollout in group])
                np.testing.assert_allclose(drawn, learner_logps(self._fleet, prompt, group), atol=1e-4)
            yield was_killed

    def rollouts(self) -> Iterator[bool]:
        """Kill it while responses are drawn."""
        sampler = self._fleet.sampler()
        self._push(sampler)
        expected = self._draw(sampler)
        seconds = self._seconds(lambda: self._draw(sampler))
        while True:
            with self._kill_within(seconds) as is_killed:
                drawn = self._draw(sampler)
                was_killed = is_killed()
            assert same(drawn, expected)
            yield was_killed
            sampler = self._fleet.sampler()
            sampler.load_weights(self._fleet.model.named_parameters(), version=self._version)

    def evaluation(self) -> Iterator[bool]:
        """Kill it in a run of one step that is evaluated before and after it."""
        start = time.monotonic()
        expected = self._train()
        seconds = time.monotonic() - start
        while True:
            with self._kill_within(seconds) as is_killed:
                run = self._train()
                was_killed = is_killed()
            for ours, theirs in zip(run.evals(), expected.evals(), strict=True):
                assert ours.rows(["problem_id", "response"]) == theirs.rows(["problem_id", "response"])
            yield was_killed

    def _train(self) -> RunDirectory:
        self._runs += 1
        shared = {"batch_size": 4, "server_token": str(self._fleet.token), "prompts_per_step": 4}
        return self._fleet.toys.train_run(
            f"evaluated-{self._runs}",
            data={"eval": [str(self._fleet.toys.heldout)]},
            eval={"every": 1, "samples": 4, "temperature": 1.0},
            train={"steps": 1, "mini_batch_prompts": 4},
            rollout={"sampler": "server", "servers": [server.url for server in self._fleet.servers], **shared},
        )

    def _push(self, sampler: ServerSampler) -> None:
        self._version += 1
        self._fleet.sync(sampler, self._version)

    def _draw(self, sampler: ServerSampler) -> list[list[Rollout]]:
        return sampler.generate(SampleRequest(self._fleet.prompts, PARAMS, seed=1, step=2))

    def _seconds(self, act: Callable[[], object]) -> float:
        """Return what the second of two calls takes: the first warms up."""
        act()
        start = time.monotonic()
        act()
        return time.monotonic() - start

    @contextmanager
    def _kill_within(self, seconds: float) -> Iterator[Callable[[], bool]]:
        """Kill the server at a moment of the next seconds, and start it again at the end."""
        server, killed = self._fleet.servers[1], threading.Event()

        def kill() -> None:
            killed.set()
            server.send(signal.SIGKILL)

        timer = threading.Timer(self._rng.uniform(0, seconds), kill)
        timer.start()
        try:
            yield killed.is_set
        finally:
            timer.join()
            server.start()
            server.wait()


PHASES: dict[str, Callable[[Kills], Iterator[bool]]] = {
    "push": Kills.push,
    "rollouts": Kills.rollouts,
    "evaluation": Kills.evaluation,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server_kills")
    parser.add_argument("--times", type=int, default=20, help="kills of each phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES])
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "toys").mkdir()
        model = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
        with Runner(folder) as runner:
            toys = make_toys(folder / "toys", tiny_model=model, runner=runner)
            with served_fleet(toys, folder) as fleet:
                for name in options.phases:
                    kills = PHASES[name](Kills(fleet, options.seed))
                    inside = sum(next(kills) for _ in range(options.times))
                    print(f"{name}: {options.times} kills, {inside} before its end; nothing differs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
