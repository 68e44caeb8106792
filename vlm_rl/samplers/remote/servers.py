"""Rollouts on vLLM servers: the contract of an engine in this process, over a fleet that may lose and gain servers.

A server samples only while it holds the current weights: the label of every token says so. One that fails gets no
more work until weights were pushed to it again, at the next sync, or at once where no other is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vlm_rl.config import Quantization
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, from_main, rank, world_size
from vlm_rl.model_files.checkpoint_layout import as_published
from vlm_rl.samplers.base import PROBE_PLACES, OnGroup, SampleRequest
from vlm_rl.samplers.episodes import EpisodeBatch
from vlm_rl.samplers.fingerprint import (
    Fingerprint,
    FingerprintBuilder,
    StaleWeightsError,
    WeightLayout,
    check_buffers,
)
from vlm_rl.samplers.remote.background import Background
from vlm_rl.samplers.remote.client import ServerError, ask_proof, connected
from vlm_rl.samplers.remote.fleet import Fleet, ServerSettings, ServersGoneError, all_served
from vlm_rl.samplers.remote.push import Link, Peer, Push, parts
from vlm_rl.samplers.remote.sampling import GroupRequest, Sampling
from vlm_rl.samplers.remote.schedule import rank_room
from vlm_rl.samplers.remote.turns import TurnSampling
from vlm_rl.types import NamedTensors, Rollout

__all__ = ["ServerSampler", "ServerSettings", "ServersGoneError", "all_served"]


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

        Raises UserError if there is no token, and for a list of servers that cannot be read.
        """
        self.policy_version = 0
        self.dtype = dtype
        self.quantization: Quantization | None = settings.quantization
        self.fleet = Fleet(
            settings, builder=builder, max_model_len=max_model_len, dtype=dtype, is_stopped=is_stopped, note=note
        )
        self._builder = builder
        self._max_model_len = max_model_len
        self._weights = weights
        self._as_published = as_published(model_path)
        self._links: dict[Peer, Link] = {}  # rank 0's
        self._background: Background | None = None  # from the first `begin` on

    # -- weights -------------------------------------------------------------------------------------

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """See Sampler.load_weights. Pushes to every server that is there; none need be."""
        with self.fleet.pushing():
            self.policy_version = self.fleet.version = version
            self._push(tensors, from_main(self.fleet.look_around))

    def fingerprint(self, layout: WeightLayout) -> Fingerprint:
        """See Sampler.fingerprint. Where no server is left, this waits for one, and the weights are pushed again.

        Raises StaleWeightsError if a server's buffers are not what they were, or servers hold different weights.
        """
        checksum = self._prove(layout)
        return self._restore() if checksum is None else Fingerprint(checksum, layout)

    def sleep(self) -> None:
        """See Sampler.sleep: a server's memory is its own."""

    def close(self) -> None:
        """Drop the connections and what is being sampled; the servers stay."""
        if self._background is not None:
            self._background.close()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _push(self, tensors: NamedTensors, rooms: Mapping[Peer, int]) -> None:
        """Push the weights to these servers. Every rank takes its part in gathering them, whatever fails."""
        if rank() != 0:
            for _ in tensors:
                pass
        else:
            fleet = self.fleet
            push = Push(
                list(rooms),
                self._links,
                label=fleet.label,
                token=fleet.token,
                seconds=fleet.settings.silence,
                in_flight=self._background is not None,
            )
            push.begin()
            for part in parts(self._as_published(tensors)):
                push.send(part)
            push.finish()
            for url, reason in push.failed.items():
                self.fleet.say(url, f"{reason}: it gets the weights again at the next sync")
            rooms = {peer: rooms[peer] for peer in push.peers}
        self._use(from_main(lambda: {peer.url: room for peer, room in rooms.items()}))

    def _use(self, rooms: Mapping[str, int]) -> None:
        """Sample on these servers from now on: they hold the current weights."""
        self.fleet.rooms = dict(rooms)
        if self._background is not None:
            self._background.use(self._places())

    def _places(self) -> dict[str, int]:
        """Return how many responses of this rank each server samples at once; a place is left for the probe."""
        return {
            url: rank_room(room - PROBE_PLACES, world_size(), is_ahead=True)
            for url, room in dict(self.fleet.rooms).items()
        }

    def _restore(self) -> Fingerprint:
        """Wait for a server, push the weights again, and return their proven fingerprint."""
        while True:
            fingerprint = FingerprintBuilder(dtype=self.dtype, quantization=self.quantization)
            with self.fleet.pushing():
                self._push(fingerprint.watch(self._weights()), from_main(self.fleet.wait))
            expected = fingerprint.result()
            if (checksum := self._prove(expected.layout)) is None:
                continue
            if checksum != expected.checksum:
                raise StaleWeightsError(
                    f"rollout servers {', '.join(self.fleet.rooms)}: after a second push they do not hold the "
                    f"learner's weights: checksum {checksum:016x} against {expected.checksum:016x}; start them again"
                )
            return expected

    def _prove(self, layout: WeightLayout) -> int | None:
        """Return the checksum that all servers agree on; None if none is left."""
        proofs, self.fleet.buffers = from_main(
            lambda: (asyncio.run(self._ask_proofs(json.dumps(layout), list(self.fleet.rooms))), self.fleet.buffers)
        )
        rooms = dict(self.fleet.rooms)  # the thread of a batch ahead may lose one meanwhile
        self._use({url: rooms[url] for url in proofs if url in rooms})
        for url, proof in proofs.items():
            check_buffers(f"server {url}", proof["buffers"], self.fleet.buffers or {})
        held = {proof["checksum"]: url for url, proof in proofs.items()}
        if len(held) > 1:
            raise StaleWeightsError(
                f"rollout servers hold different weights after a sync: {', '.join(held.values())}; start them again"
            )
        return next(iter(held), None)

    async def _ask_proofs(self, layout: str, urls: Sequence[str]) -> dict[str, dict[str, Any]]:
        async def attempt(url: str) -> dict[str, Any] | None:
            try:
                async with connected(url, self.fleet.token) as client:
                    dtype, seconds = str(self.dtype).removeprefix("torch."), 10 * self.fleet.settings.silence
                    return await ask_proof(client, layout=layout, dtype=dtype, seconds=seconds)
            except ServerError as error:
                self.fleet.say(url, str(error))
                return None

        proofs = await asyncio.gather(*map(attempt, urls))
        return {url: proof for url, proof in zip(urls, proofs, strict=True) if proof is not None}

    # -- responses -----------------------------------------------------------------------------------

    def generate(self, request: SampleRequest, *, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        """See Sampler.generate.

        Where all ranks make the call together, as a single rank always does, and one has lost all its servers, those
        that come back get the weights again. Otherwise a rank waits for a server that still has them.
        Raises ServersGoneError if none is there for rollout.server_timeout.
        """
        request.check_lengths(self._max_model_len)
        if request.episodes is not None:
            return self._episodes(request, on_group)
        groups: dict[int, list[Rollout]] = {}

        def take(index: int, group: list[Rollout]) -> None:
            groups[index] = group
            lengths = [len(rollout.ids) for rollout in group]
            request.watch.add(tokens=sum(lengths), longest=max(lengths), ended=len(group))
            if on_group is not None:
                on_group(index, group)

        while True:
            missing = [
                GroupRequest.of(request, index, since=self.fleet.version, on_done=partial(take, index))
                for index in range(len(request.prompts))
                if index not in groups
            ]
            left = self._sample(missing, size=request.params.responses) if missing else False
            progress = len(groups) > len(request.prompts) - len(missing)
            if self._is_complete(request, left, progress):
                return [groups[index] for index in range(len(request.prompts))]

    def _episodes(self, request: SampleRequest, on_group: OnGroup | None) -> list[list[Rollout]]:
        """Sample episodes; what `generate` says of servers that are lost holds for their turns."""
        batch = EpisodeBatch(request, self._builder, version=self.fleet.version, on_group=on_group)
        turns = TurnSampling(self.fleet, self._builder, request, batch)
        while True:
            before = turns.num_sampled
            left = asyncio.run(turns.run(self._rooms())) if not batch.is_over else False
            if self._is_complete(request, left, turns.num_sampled > before):
                return batch.groups

    def _is_complete(self, request: SampleRequest, left: bool, progress: bool) -> bool:
        """Tell whether every rank has all responses. Otherwise wait for servers with the current weights.

        Args:
            request: what is sampled.
            left: whether responses of this rank are missing.
            progress: whether some came since the last call.
        """
        together = request.together or world_size() == 1
        states = all_gather((left, progress)) if together else [(left, progress)]
        if any(progress for _, progress in states):
            self.fleet.note_progress()
        if not any(left for left, _ in states):
            return True
        if together:
            self._restore()
        else:
            rooms = self.fleet.wait(holding=self.fleet.label)
            self._use({peer.url: room for peer, room in rooms.items()})
        return False

    def _rooms(self) -> dict[str, int]:
        """Return the servers, and the most responses of this rank that each is given at once."""
        return {url: rank_room(room, world_size(), is_ahead=False) for url, room in dict(self.fleet.rooms).items()}

    def _sample(self, requests: Sequence[GroupRequest], *, size: int) -> bool:
        """Sample until every group is complete or no server is left, and tell whether groups are missing."""
        sampling = Sampling(self.fleet, self._builder, self._rooms(), requests, size=size)
        return asyncio.run(sampling.run())

    # -- batches of later steps ----------------------------------------------------------------------

    def begin(self, request: SampleRequest) -> None:
        """See BackgroundSampler.begin. The responses have the seeds that `generate` would give them."""
        request.check_lengths(self._max_model_len)
        if self._background is None:
            size = request.params.responses
            self._background = Background(self.fleet, self._builder, self._places(), size=size)
        self._background.begin(request, version=self.fleet.version)

    def take(self, step: int, on_group: OnGroup) -> list[list[Rollout]]:
        """See BackgroundSampler.take.

        Where a rank has lost all its servers, those that come back get the weights again. Raises ServersGoneError
        where none is there for rollout.server_timeout.
        """
        assert self._background is not None, "`begin` comes first"
        while True:
            before = self.sampled(step).count(None)
            left = self._background.wait(step, on_group)
            states = all_gather((left, self.sampled(step).count(None) < before))
            if any(progress for _, progress in states):
                self.fleet.note_progress()
            if not any(left for left, _ in states):
                return [group for group in self.sampled(step) if group is not None]
            self._restore()

    def sampled(self, step: int) -> list[list[Rollout] | None]:
        """See BackgroundSampler.sampled."""
        assert self._background is not None, "`begin` comes first"
        return self._background.sampled(step)

    def forget(self, step: int) -> None:
        """See BackgroundSampler.forget."""
        if self._background is not None:
            self._background.forget(step)

    def stream(self, request: SampleRequest) -> Iterator[int]:
        """See Sampler.stream; the whole response is sampled before its first token is given."""
        ((rollout,),) = self.generate(request)
        yield from rollout.ids.tolist()
