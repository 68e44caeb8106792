"""Rollout servers as a user starts them, each a process group beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.served import free_port, wait_for_status
from tests.helpers.toy_runs import Toys, clean_environment, toy_problem
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.fingerprint import FingerprintBuilder, check_fresh
from vlm_rl.samplers.servers import ServerSampler, ServerSettings
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Prompt, Rollout


class RolloutServer:
    """`vlm-rl serve CONFIG`; its signals go to all of its processes. Use as a context manager."""

    def __init__(self, config: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._config, self._log = config, log
        self.start()

    def start(self) -> None:
        """Start it, or start it again at the same address."""
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vlm_rl", "serve", str(self._config), "--port", str(self.port)],
                env=clean_environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, *, seconds: float = 480) -> Self:
        """Wait until the server answers; without a token, that is a refusal."""
        wait_for_status(self._process, self.port, "/vlm_rl/info", 401, log=self._log, seconds=seconds)
        return self

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
    """Two servers, and a learner beside them."""

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
def served_fleet(toys: Toys, folder: Path, **rollout: Any) -> Iterator[Fleet]:
    """Start two servers of the toy policy."""
    settings = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "batch_size": 4, **rollout}
    config = toys.config("served-config", rollout=settings | {"server_token": str(folder / "token")})
    builder = PromptBuilder(toys.model, template=TEMPLATES["think_answer"], max_pixels=1_003_520)
    model = AutoModelForImageTextToText.from_pretrained(toys.model, dtype=torch.float32)
    prompts = [builder.build(toy_problem(index, "train", 12)) for index in range(8)]
    with RolloutServer(config, folder / "first") as first, RolloutServer(config, folder / "second") as second:
        first.wait()
        second.wait()
        yield Fleet(toys, [first, second], folder / "token", model, prompts, builder, [])


def same(left: list[list[Rollout]], right: list[list[Rollout]]) -> bool:
    """Tell whether two calls of generate gave the same tokens, with log-probs equal but for float noise."""
    pairs = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return all(
        a.ids.tolist() == b.ids.tolist() and np.allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0) for a, b in pairs
    )
