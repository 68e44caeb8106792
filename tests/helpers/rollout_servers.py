"""Rollout servers as a user starts them, each a process group beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.forked_server import ForkedServer
from tests.helpers.served import free_port, wait_for_status
from tests.helpers.toy_runs import Toys, clean_environment, toy_problem
from vlm_rl.config import ModelConfig
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.learner.loading import policy_of
from vlm_rl.learner.packing import Chunk, pack_row
from vlm_rl.learner.self_check import group_of
from vlm_rl.rollouts.groups import empty_group
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.fingerprint import FingerprintBuilder, check_fresh
from vlm_rl.samplers.remote.servers import ServerSampler, ServerSettings
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Prompt, Rollout


class RolloutServer:
    """`vlm-rl serve CONFIG`; its signals go to all of its processes. Use as a context manager."""

    def __init__(
        self,
        config: Path,
        log: Path,
        *,
        host: str = "127.0.0.1",
        program: Sequence[str] = (),
    ) -> None:
        """Start it by the words `program`, which the arguments of `vlm-rl` follow; without any it is forked."""
        self.host, self.port = host, free_port()
        self.url = f"http://{host}:{self.port}"
        self._program, self._log = program, log
        self._arguments = ["serve", str(config), "--host", host, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        """Start it, or start it again at the same address."""
        self._process: ForkedServer | subprocess.Popen[bytes]
        if not self._program:
            self._log.write_text("")
            self._process = ForkedServer(self._arguments, environment=clean_environment(), log=self._log)
            return
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [*self._program, *self._arguments],
                env=clean_environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, *, seconds: float = 480) -> Self:
        """Wait until the server answers; without a token, that is a refusal."""
        where = {"host": self.host, "log": self._log, "seconds": seconds}
        wait_for_status(self._process, self.port, "/vlm_rl/info", 401, **where)
        return self

    def ended(self, *, seconds: float = 480) -> int:
        """Wait until the server has ended; return its exit code."""
        return self._process.wait(timeout=seconds)

    @property
    def pid(self) -> int:
        """Return the process id of the server, whose group has all of its processes."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.send(signal.SIGKILL)


@dataclass
class Fleet:
    """Servers, and a learner beside them."""

    toys: Toys
    servers: list[RolloutServer]
    token: Path
    model: PreTrainedModel
    prompts: list[Prompt]
    builder: PromptBuilder
    notes: list[str]

    def sampler(self, **settings: Any) -> ServerSampler:
        config = (self.toys.model / "config.json").read_bytes()
        given = ServerSettings(
            [server.url for server in self.servers],
            token_file=self.token,
            timeout=60.0,
            model_sha256=sha256(config).hexdigest(),
        )
        self.notes.clear()
        return ServerSampler(
            replace(given, **settings),
            model_path=str(self.toys.model),
            builder=self.builder,
            max_model_len=174,
            dtype=torch.float32,
            weights=self.model.named_parameters,
            is_stopped=lambda: False,
            note=self.notes.append,
        )

    def sync(self, sampler: ServerSampler, version: int) -> None:
        """Push other weights than before, and prove that they arrived."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        fingerprint = FingerprintBuilder(dtype=sampler.dtype)
        sampler.load_weights(fingerprint.watch(self.model.named_parameters()), version=version)
        check_fresh(sampler, fingerprint.result())


@contextmanager
def served_fleet(toys: Toys, folder: Path, *, servers: int = 2, **rollout: Any) -> Iterator[Fleet]:
    """Start servers of the toy policy."""
    videos = {"limit_mm_per_prompt": {"video": 2}}
    settings = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "batch_size": 4, "vllm": videos, **rollout}
    config = toys.config("served-config", rollout=settings | {"server_token": str(folder / "token")})
    builder = PromptBuilder(toys.model, template=TEMPLATES["think_answer"], max_pixels=1_003_520)
    model = AutoModelForImageTextToText.from_pretrained(toys.model, dtype=torch.float32)
    prompts = [builder.build(toy_problem(index, "train", 12)) for index in range(8)]
    with ExitStack() as stack:
        started = [stack.enter_context(RolloutServer(config, folder / f"log-{i}")) for i in range(servers)]
        for server in started:
            server.wait()
        yield Fleet(toys, started, folder / "token", model, prompts, builder, [])


def begin_batch(sampler: ServerSampler, fleet: Fleet, step: int, params: SamplingParams) -> None:
    """Let the servers begin the batch of a step, with a group for each prompt of the fleet."""
    groups = [empty_group(toy_problem(index, "train", 12), 1, responses=params.responses) for index in range(8)]
    sampler.begin(SampleRequest(fleet.prompts, params, seed=1, step=step, begun=[group.rollouts for group in groups]))


def same(left: list[list[Rollout]], right: list[list[Rollout]]) -> bool:
    """Tell whether two calls of generate gave the same tokens, with log-probs equal except for float noise."""
    pairs = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return all(
        a.ids.tolist() == b.ids.tolist() and np.allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0) for a, b in pairs
    )


def learner_logps(fleet: Fleet, prompt: Prompt, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return the log-probs of all tokens at temperature 1 and the learner's weights, end to end. Each response has a
    row of its own."""
    tokens = {"banned_ids": fleet.builder.banned_ids, "temperature": 1.0}
    policy = policy_of(fleet.model, ModelConfig(path="x"), **tokens)
    rows = [
        pack_row(
            [Chunk(0, (g,))],
            groups=[group_of(prompt, rollouts)],
            prompts={0: prompt},
            weights_PG=np.zeros((1, len(rollouts))),
            positions=partial(rope_positions, fleet.model),
        )
        for g in range(len(rollouts))
    ]
    with torch.no_grad():
        return np.concatenate([policy(row)[0].numpy() for row in rows])
