"""Push the learner's weights to servers, part by part. A server that fails drops out; the others get the rest.

push = Push(servers, label="a1b2-7", ...)
push.begin()
push.send(tensors)      # as often as there are parts
push.finish()
push.failed             # why, by the address of the server
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from vlm_rl.samplers.remote.client import ServerError, ask, connected
from vlm_rl.samplers.remote.gloo_link import address_towards, join_store, open_store, send
from vlm_rl.types import NamedTensors

_PART = 256 << 20  # bytes of gathered weights that wait to be sent


@dataclass(frozen=True)
class Peer:
    """One process of a server; a restart makes a new Peer."""

    url: str
    instance: str
    backend: str
    workers: int = 1  # tensor parallel ranks


class Link(Protocol):
    """The learner's end of a connection that carries weights. Where its server hangs, it raises RuntimeError."""

    def init_info(self) -> dict[str, Any]:
        """Return the server's arguments for joining."""
        ...

    def join(self) -> None:
        """Wait for the server."""
        ...

    def send(self, tensor: Tensor) -> None:
        """Send one tensor."""
        ...

    def close(self) -> None:
        """Leave, from any thread, whatever the server does; where possible this ends what the others wait for."""
        ...


class GlooLink:
    """A connection over TCP, from and to host memory."""

    def __init__(self, host: str, seconds: float, *, workers: int) -> None:
        self._host, self._seconds, self._size = host, seconds, 1 + workers
        self._timeout = timedelta(seconds=seconds)
        address = address_towards(host)
        self._store = open_store(address, timeout=self._timeout)
        self._address = address

    def init_info(self) -> dict[str, Any]:
        """See Link.init_info."""
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "world_size": self._size,
            "seconds": self._seconds,
        }

    def join(self) -> None:
        """See Link.join."""
        self._group: ProcessGroupGloo = join_store(
            self._store, self._host, rank=0, size=self._size, timeout=self._timeout
        )

    def send(self, tensor: Tensor) -> None:
        """See Link.send."""
        send(self._group, tensor)

    def close(self) -> None:
        """See Link.close. The connection goes with the link; what waits for it has a time limit."""


class NcclLink:
    """A connection of vLLM's own NCCL engine."""

    def __init__(self, host: str, seconds: float, *, workers: int) -> None:
        from vlm_rl.samplers.vllm.nccl import NcclGroup

        self._seconds = seconds
        self._group = NcclGroup(address_towards(host), workers=workers, seconds=seconds)

    def init_info(self) -> dict[str, Any]:
        """See Link.init_info."""
        return self._group.init_info

    def join(self) -> None:
        """See Link.join."""
        self._limited(self._group.join)

    def send(self, tensor: Tensor) -> None:
        """See Link.send."""
        self._limited(partial(self._group.send, tensor))

    def close(self) -> None:
        """See Link.close."""
        self._group.abort()

    def _limited(self, work: Callable[[], None]) -> None:
        """Do this in a thread, which is left behind where even an abort does not end it. Raises RuntimeError."""
        done: Future[None] = Future()

        def act() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=act, name="nccl", daemon=True).start()
        try:
            done.result(self._seconds)
        except TimeoutError:
            self.close()
            raise RuntimeError(f"NCCL: silent for {self._seconds:g} s") from None


_LINKS: dict[str, Callable[..., Link]] = {"gloo": GlooLink, "nccl": NcclLink}
BACKENDS = frozenset(_LINKS)


class Push:
    """One update of all weights, of every server at the same time."""

    def __init__(
        self,
        peers: Sequence[Peer],
        links: dict[Peer, Link],
        *,
        label: str,
        token: str,
        seconds: float,
        in_flight: bool = False,
    ) -> None:
        """Prepare it; nothing is sent.

        Args:
            peers: the servers.
            links: connections of earlier updates; those that are new or broken are changed here.
            label: of the new weights.
            token: that the servers ask for.
            seconds: that a server may take for each request.
            in_flight: what the servers are sampling continues under the new weights; otherwise it is dropped.
        """
        self.peers = list(peers)
        self.failed: dict[str, str] = {}
        self._links, self._label, self._token, self._seconds = links, label, token, seconds
        self._mode = "keep" if in_flight else "abort"

    def begin(self) -> None:
        """Stop what the servers are sampling, drop what they cached, and connect.

        Keys and values are dropped in flight too: a response that continues is read in again by the new weights.
        """
        self._each(self._begin)

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send some of the weights."""
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }

        async def deliver(client: httpx.AsyncClient, peer: Peer) -> None:
            link = self._links[peer]
            receiving = self._post(client, "/update_weights", {"update_info": info})
            await _both(receiving, asyncio.to_thread(_send_all, link, tensors), link)

        self._each(deliver)

    def finish(self) -> None:
        """Let the servers sample from the new weights."""
        self._each(self._finish)

    async def _begin(self, client: httpx.AsyncClient, peer: Peer) -> None:
        await self._post(client, f"/pause?mode={self._mode}&clear_cache=false")
        await self._forget_old_weights(client)
        if peer not in self._links:
            for earlier in [other for other in self._links if other.url == peer.url]:
                await self._drop(earlier)
            host = urlsplit(peer.url).hostname or ""
            link = await asyncio.to_thread(_LINKS[peer.backend], host, self._seconds, workers=peer.workers)
            self._links[peer] = link
            joining = self._post(client, "/init_weight_transfer_engine", {"init_info": link.init_info()})
            await _both(joining, asyncio.to_thread(link.join), link)
        await self._post(client, "/collective_rpc", {"method": "vlm_rl_end_update"})
        # Whatever happens from here on, nobody knows which weights it has.
        await self._post(client, "/update_weight_version", {"new_version": "in an update"})
        await self._post(client, "/start_weight_update")

    async def _forget_old_weights(self, client: httpx.AsyncClient) -> None:
        """Clear what was computed with the earlier weights: keys and values, and the features of images.

        The pause's own clear_cache would also drop prepared images, which depend on no weight. It drops them while
        requests are being prepared, which then fail.
        """
        reply = await ask(client, "/reset_prefix_cache?reset_running_requests=true", seconds=self._seconds)
        if reply != {"success": True}:
            raise ServerError(f"/reset_prefix_cache: {reply}: it keeps keys and values of earlier weights")
        await self._post(client, "/reset_encoder_cache")

    async def _finish(self, client: httpx.AsyncClient, _: Peer) -> None:
        await self._post(client, "/finish_weight_update", {"weight_version": self._label})
        await self._post(client, "/resume")

    async def _drop(self, peer: Peer) -> None:
        """Close the connection with a process that is gone, or has failed."""
        if (link := self._links.pop(peer, None)) is not None:
            await asyncio.to_thread(link.close)

    async def _post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None = None) -> None:
        await ask(client, path, body, seconds=self._seconds)

    def _each(self, work: Callable[[httpx.AsyncClient, Peer], Coroutine[Any, Any, None]]) -> None:
        """Do this with every server; those that fail drop out."""

        async def attempt(peer: Peer) -> None:
            try:
                async with connected(peer.url, self._token) as client:
                    await work(client, peer)
            except (ServerError, RuntimeError, OSError) as error:  # torch's of a connection are RuntimeErrors
                self.failed[peer.url] = str(error).splitlines()[0]
                await self._drop(peer)

        async def all_of_them() -> None:
            await asyncio.gather(*map(attempt, self.peers))

        asyncio.run(all_of_them())
        self.peers = [peer for peer in self.peers if peer.url not in self.failed]


def parts(tensors: NamedTensors) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in parts of about 256 MB, so that no second copy of the model is ever complete."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        part.append((name, tensor.detach().clone()))  # a gathered one is released at the next
        size += tensor.numel() * tensor.element_size()
        if size >= _PART:
            yield part
            part, size = [], 0
    if part:
        yield part


async def _both(asking: Coroutine[Any, Any, None], working: Coroutine[Any, Any, None], link: Link) -> None:
    """Wait for both, also where the first fails: a thread cannot be cancelled, but has no reason to wait any more."""

    async def ask_or_close() -> None:
        try:
            await asking
        except ServerError:
            await asyncio.to_thread(link.close)
            raise

    results = await asyncio.gather(ask_or_close(), working, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _send_all(link: Link, tensors: Sequence[tuple[str, Tensor]]) -> None:
    for _, tensor in tensors:
        link.send(tensor)
