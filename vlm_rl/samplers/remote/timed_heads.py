"""Connections to a server of ours that must say what they want in ten seconds; the demo's and a rollout server's.

    class OurProtocol(TimedHeads, H11Protocol): ...

uvicorn itself waits for the rest of a request's head for ever, so that a few thousand half-sent ones take every file
that the server may open.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_SECONDS = 10.0  # for the head of a request


class TimedHeads:
    """What a protocol of uvicorn gets from this class: a connection has HEAD_SECONDS for each of its heads."""

    cycle: Any  # uvicorn's request in progress, or the last one
    transport: Any
    loop: asyncio.AbstractEventLoop
    _late: asyncio.TimerHandle | None = None  # set while the head of a request is awaited

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # pyright: ignore[reportAttributeAccessIssue]
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)  # pyright: ignore[reportAttributeAccessIssue]
        if self._is_asking:
            self._stop_waiting()
        elif self._late is None:  # the beginning of another head, or the rest of a body that was refused
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        super().connection_lost(exc)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _is_asking(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
