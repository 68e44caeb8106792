"""Rollouts on vLLM servers: the contract of an engine in this process, over a fleet that may lose and gain servers.

A server draws only while it holds the current weights: the label of every token says so. One that fails gets no more
work until weights were pushed to it again, at the next sync, or at once where no other is left.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from vlm_rl.config import is_server_address
from vlm_rl.data.checkpoint_layout import as_published
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, from_main, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.samplers.base import OnGroup, SamplingParams, check_lengths, make_rollout, response_seed
from vlm_rl.samplers.fingerprint import (
    Fingerprint,
    FingerprintBuilder,
    Layout,
    NamedTensors,
    StaleWeightsError,
    check_buffers,
)
from vlm_rl.samplers.schedule import Schedule
from vlm_rl.samplers.server_client import ServerError, ask, ask_group, ask_info, ask_proof, connected
from vlm_rl.samplers.server_push import BACKENDS, Link, Peer, Push, parts
from vlm_rl.types import Prompt, Rollout

SILENCE = 60.0  # seconds after which a server that does not answer is taken for hung


class ServersGoneError(UserError):
    """No server has answered for rollout.server_timeout; what was trained can be saved."""


@dataclass(frozen=True)
class ServerSettings:
    """How the servers are reached, and what they must serve."""

    servers: Sequence[str] | str  # addresses, or a file with one a line
    token_file: Path
    timeout: float  # seconds without any server
    model_sha256: str  # of the served model's config.json
    tensor_parallel: int = 1  # cards of each server
    silence: float = SILENCE


class ServerSampler:
    """A vlm_rl.samplers.base.Sampler on servers that `vlm-rl serve` has started.

    Rank 0 pushes the weights and proves what each server holds; every rank asks for its own prompts. All methods but
    `generate` and `stream` are called on all ranks at once.
    """

    name = "server"

    def __init__(
        self,
        settings: ServerSettings,
        *,
        model_path: str,
        builder: PromptBuilder,
        max_model_len: int,
        dtype: torch.dtype,
        weights: Callable[[], NamedTensors],
        is_stopped: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """Prepare the client; the servers are looked for at the first sync.

        Args:
            settings: of the servers.
            model_path: a folder with the model's configuration.
            builder: the prompt builder for this model.
            max_model_len: most tokens of a prompt, images expanded, and its response together.
            dtype: of the servers' weights.
            weights: streams the learner's weights again, for servers that have come back; called on all ranks.
            is_stopped: tells whether the run is to end.
            note: prints a line.

        Raises UserError where there is no token, for a list of servers that cannot be read, and for videos.
        """
        if builder.max_videos:
            raise UserError("rollout.sampler is server, and servers are not sent videos: set rollout.sampler=vllm")
        self.policy_version = 0
        self.dtype = dtype
        self._settings = settings
        self._builder = builder
        self._max_model_len = max_model_len
        self._weights, self._is_stopped, self._note = weights, is_stopped, note
        self._as_published = as_published(model_path)
        self._token = _read_token(settings.token_file)
        self._addresses()
        self._run = from_main(lambda: uuid.uuid4().hex)  # tells our weights from those of another run
        self._rooms: dict[str, int] = {}  # the servers that hold the current weights, and what each can draw at once
        self._links: dict[Peer, Link] = {}  # rank 0's
        self._buffers: Mapping[str, str] | None = None  # of the first server before its first push; all have the same
        self._said: dict[str, str] = {}  # of each server, so that it is said once
        self._lost_since: float | None = None  # since when no server has completed a group

    @property
    def label(self) -> str:
        """The label of the current weights."""
        return f"{self._run}-{self.policy_version}"

    # -- weights -------------------------------------------------------------------------------------

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """See Sampler.load_weights. Pushes to every server that is there; none need be."""
        self.policy_version = version
        self._push(tensors, from_main(self._look_around))

    def fingerprint(self, layout: Layout) -> Fingerprint:
        """See Sampler.fingerprint. Where no server is left, this waits for one, and the weights are pushed again.

        Raises StaleWeightsError where a server's buffers are not what they were, or servers hold different weights.
        """
        checksum = self._prove(layout)
        return self._restore() if checksum is None else Fingerprint(checksum, layout)

    def sleep(self) -> None:
        """See Sampler.sleep: a server's memory is its own."""

    def close(self) -> None:
        """Drop the connections; the servers stay."""
        self._links.clear()

    def _push(self, tensors: NamedTensors, rooms: Mapping[Peer, int]) -> None:
        """Push the weights to these servers. Every rank takes its part in gathering them, whatever fails."""
        if rank() != 0:
            for _ in tensors:
                pass
        else:
            push = Push(list(rooms), self._links, label=self.label, token=self._token, seconds=self._settings.silence)
            push.begin()
            for part in parts(self._as_published(tensors)):
                push.send(part)
            push.finish()
            for url, reason in push.failed.items():
                self._say(url, f"{reason}: it gets the weights again at the next sync")
            rooms = {peer: rooms[peer] for peer in push.peers}
        self._rooms = from_main(lambda: {peer.url: room for peer, room in rooms.items()})

    def _restore(self) -> Fingerprint:
        """Wait for a server, push the weights again, and return their proven fingerprint."""
        while True:
            fingerprint = FingerprintBuilder(dtype=self.dtype)
            self._push(fingerprint.watch(self._weights()), from_main(self._wait))
            expected = fingerprint.result()
            if (checksum := self._prove(expected.layout)) is None:
                continue
            if checksum != expected.checksum:
                raise StaleWeightsError(
                    f"rollout servers {', '.join(self._rooms)}: after a second push they do not hold the learner's "
                    f"weights: checksum {checksum:016x} against {expected.checksum:016x}; start them again"
                )
            return expected

    def _prove(self, layout: Layout) -> int | None:
        """Return the checksum that all servers agree on; None where none is left."""
        proofs, self._buffers = from_main(
            lambda: (asyncio.run(self._ask_proofs(json.dumps(layout), list(self._rooms))), self._buffers)
        )
        self._rooms = {url: self._rooms[url] for url in proofs}
        for url, proof in proofs.items():
            check_buffers(f"server {url}", proof["buffers"], self._buffers or {})
        held = {proof["checksum"]: url for url, proof in proofs.items()}
        if len(held) > 1:
            raise StaleWeightsError(
                f"rollout servers hold different weights after a sync: {', '.join(held.values())}; start them again"
            )
        return next(iter(held), None)

    async def _ask_proofs(self, layout: str, urls: Sequence[str]) -> dict[str, dict[str, Any]]:
        async def attempt(url: str) -> dict[str, Any] | None:
            try:
                async with connected(url, self._token) as client:
                    dtype = str(self.dtype).removeprefix("torch.")
                    return await ask_proof(client, layout=layout, dtype=dtype, seconds=10 * self._settings.silence)
            except ServerError as error:
                self._say(url, str(error))
                return None

        proofs = await asyncio.gather(*map(attempt, urls))
        return {url: proof for url, proof in zip(urls, proofs, strict=True) if proof is not None}

    # -- which servers there are ---------------------------------------------------------------------

    def _look_around(self, holding: str | None = None) -> dict[Peer, int]:
        """Return the servers that answer now and serve the right model, with their rooms.

        With `holding` only those that hold the weights with this label.
        """

        async def attempt(url: str) -> tuple[Peer, int] | None:
            try:
                async with connected(url, self._token) as client:
                    info = await ask_info(client, seconds=min(10.0, self._settings.silence))
                if problem := self._mismatch(info):
                    raise ServerError(problem)
                if holding not in (None, info["weight_version"]):
                    raise ServerError("it was started again, and has not got the weights")
                if self._buffers is None:
                    async with connected(url, self._token) as client:
                        proof = await ask_proof(client, layout="", dtype="", seconds=self._settings.silence)
                    self._buffers = self._buffers or proof["buffers"]
                return Peer(url, str(info["instance"]), info["backend"], info["world_size"]), int(
                    info["max_num_seqs"]
                )
            except (ServerError, KeyError, ValueError, TypeError, OverflowError) as error:
                self._say(url, str(error))
                return None

        async def all_of_them() -> list[tuple[Peer, int] | None]:
            return await asyncio.gather(*map(attempt, self._addresses()))

        return dict(peer for peer in asyncio.run(all_of_them()) if peer is not None)

    def _mismatch(self, info: Mapping[str, Any]) -> str | None:
        """Return how a server differs from what this run needs, or None."""
        needed: dict[str, Any] = {
            "model": self._settings.model_sha256,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self._max_model_len,
            "logprobs_mode": "processed_logprobs",
            "world_size": self._settings.tensor_parallel,
        }
        if self._builder.is_vision:
            needed["mm_processor_kwargs"] = self._builder.engine_options["mm_processor_kwargs"]
        for key, value in needed.items():
            if info.get(key) != value:
                what = (
                    "a different model"
                    if key == "model"
                    else f"{key} {info.get(key)!r}, and this run needs {value!r}"
                )
                return f"it serves {what}: start it with `vlm-rl serve` and this run's configuration"
        if info.get("backend") not in BACKENDS:
            return f"it takes weights by {info.get('backend')!r}: start it with `vlm-rl serve`"
        return None

    def _wait(self, *, holding: str | None = None) -> dict[Peer, int]:
        """Return the servers there are, once there is one; with `holding` only those that hold these weights.

        Raises ServersGoneError where no group was completed for rollout.server_timeout, or the run is to end.
        """
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            self._note(f"no rollout server is left: waiting up to {self._settings.timeout:g} s for one")
        while not self._is_stopped():
            # Those that come back and never complete a group are as good as gone.
            is_over = time.monotonic() - self._lost_since >= self._settings.timeout
            if not is_over and (ready := self._look_around(holding)):
                return ready
            if is_over:
                raise ServersGoneError(
                    f"no rollout server has worked for {self._settings.timeout:g} s: {', '.join(self._addresses())}: "
                    "start servers with `vlm-rl serve`, then resume"
                )
            time.sleep(min(1.0, self._settings.timeout / 10))
        raise ServersGoneError("the run was stopped while no rollout server was there")

    def _addresses(self) -> list[str]:
        """Return the addresses of all servers. Raises UserError for a file that cannot be read or names none."""
        where = self._settings.servers
        if not isinstance(where, str):
            return [url.rstrip("/") for url in where]
        try:
            lines = Path(where).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"rollout.servers: {where} cannot be read: {error}") from None
        wrong = [line for line in lines if not is_server_address(line)]
        if wrong or not lines:
            problem = (
                f"{wrong[0]!r} is not an address such as http://127.0.0.1:8000" if wrong else "it names no server"
            )
            raise UserError(f"rollout.servers: {where}: {problem}")
        return [line.rstrip("/") for line in lines]

    def _say(self, url: str, text: str) -> None:
        """Note what is wrong with a server, once."""
        if self._said.get(url) != text:
            self._said[url] = text
            self._note(f"rollout server {url}: {text}")

    # -- responses -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_group: OnGroup | None = None,
        together: bool | None = None,
    ) -> list[list[Rollout]]:
        """See Sampler.generate.

        With `together` (the default on a single rank) every rank is here: where a rank has lost all its servers,
        those that come back get the weights again. Otherwise a rank waits for a server that still has them.
        Raises ServersGoneError where none is there for rollout.server_timeout.
        """
        check_lengths(prompts, params, max_model_len=self._max_model_len)
        together = world_size() == 1 if together is None else together
        groups: dict[int, list[Rollout]] = {}
        draw = _Draw(prompts, params, seed, step, groups, on_group)
        while True:
            before = len(groups)
            left = asyncio.run(self._draw(draw)) if len(groups) < len(prompts) else False
            states = all_gather((left, len(groups) > before)) if together else [(left, len(groups) > before)]
            if any(progress for _, progress in states):
                self._lost_since = None
            if not any(left for left, _ in states):
                return [groups[index] for index in range(len(prompts))]
            if together:
                self._restore()
            else:
                self._rooms = {peer.url: room for peer, room in self._wait(holding=self.label).items()}

    async def _draw(self, draw: _Draw) -> bool:
        """Draw until every group is complete or no server is left, and tell whether groups are missing."""
        missing = [index for index in range(len(draw.prompts)) if index not in draw.groups]
        rooms = {url: 2 * room // world_size() for url, room in self._rooms.items()}  # none idles between two groups
        schedule = Schedule(missing, size=draw.params.responses, rooms=rooms, first=rank())
        tasks: dict[asyncio.Task[Any], tuple[str, int | None]] = {}
        async with AsyncExitStack() as stack:
            clients = {url: await stack.enter_async_context(connected(url, self._token)) for url in rooms}
            try:
                for url, client in clients.items():
                    tasks[asyncio.create_task(self._watch(client))] = (url, None)
                while schedule.left and schedule.at:
                    while given := schedule.next():
                        url, index = given
                        tasks[asyncio.create_task(self._ask(clients[url], draw, index))] = given
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._settle(task, tasks, schedule, draw)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return schedule.left

    def _settle(
        self,
        task: asyncio.Task[Any],
        tasks: dict[asyncio.Task[Any], tuple[str, int | None]],
        schedule: Schedule,
        draw: _Draw,
    ) -> None:
        """Take a finished task's group, or take its server off."""
        if task not in tasks:  # of a server that was lost a moment ago, for the same reason
            return
        url, index = tasks.pop(task)
        try:
            group = task.result()
        except ServerError as error:
            self._say(url, f"{error}: its requests go elsewhere, and it gets the weights again at the next sync")
            self._rooms.pop(url)
            schedule.lose(url)
            for other in [other for other, (place, _) in tasks.items() if place == url]:
                del tasks[other]
                other.cancel()
            return
        assert index is not None, "a watch never ends"
        schedule.done(url, index)
        draw.groups[index] = group
        if draw.on_group is not None:
            draw.on_group(index, group)

    async def _ask(self, client: httpx.AsyncClient, draw: _Draw, index: int) -> list[Rollout]:
        """Return one group. Raises ServerError, also where a token was drawn by other weights than the current."""
        prompt = draw.prompts[index]
        seeds = [response_seed(draw.seed, draw.step, prompt.problem_id, g) for g in range(draw.params.responses)]
        responses = await ask_group(client, prompt, draw.params, seeds, builder=self._builder)
        labels = {label for response in responses for _, _, label in response.versions}
        if labels != {self.label}:
            raise ServerError(f"its tokens are of the weights {', '.join(map(str, labels))}, not {self.label}")
        return [
            make_rollout(
                prompt,
                g,
                np.array(response.ids),
                np.array(response.logprobs),
                builder=self._builder,
                version=self.policy_version,
            )
            for g, response in enumerate(responses)
        ]

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Look after a server while it draws. Raises ServerError once it is silent, or holds other weights."""
        while True:
            info = await ask(client, "/weight_info", seconds=self._settings.silence, post=False)
            if info != {"weight_version": self.label}:
                raise ServerError(f"it holds the weights {str(info)[:100]}, not {self.label}")
            await asyncio.sleep(min(5.0, self._settings.silence / 4))

    def stream(self, prompt: Prompt, params: SamplingParams, *, seed: int, step: int) -> Iterator[int]:
        """See Sampler.stream; the whole response is drawn before its first token is given."""
        assert params.responses == 1, params
        ((rollout,),) = self.generate([prompt], params, seed=seed, step=step)
        yield from rollout.ids.tolist()


@dataclass(frozen=True)
class _Draw:
    """What one call of `generate` asks for, and what it has."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    seed: int
    step: int
    groups: dict[int, list[Rollout]]
    on_group: OnGroup | None


def _read_token(path: Path) -> str:
    """Return the servers' token. Raises UserError where there is none."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"rollout.server_token: {path} cannot be read ({error}): `vlm-rl serve` writes it; copy it to machines "
            "that share no home folder"
        ) from None
    if not token.isascii() or not token.isprintable() or not token:
        raise UserError(f"rollout.server_token: {path} holds no token: remove it, and start the servers again")
    return token
