"""Connections that must say what they want in ten seconds and 64 KiB: the demo's and a rollout server's.

    class OurProtocol(TimedHeads, H11Protocol): ...

uvicorn itself waits for the rest of a request's head for ever, so that a few thousand half-sent ones take every file
that the server may open. With httptools it also keeps whatever a head holds: one of short headers without an end
takes 200 MB a second.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_SECONDS = 10.0  # for the head of a request
HEAD_BYTES = 1 << 16  # of it; what has come of the next bytes at once is read too, at most 256 KiB


class TimedHeads:
    """What a protocol of uvicorn gets from this class: HEAD_SECONDS and HEAD_BYTES for each head of a connection."""

    cycle: Any  # uvicorn's request in progress, or the last one
    transport: Any
    loop: asyncio.AbstractEventLoop
    _late: asyncio.TimerHandle | None = None  # set while the head of a request is awaited
    _held = 0  # bytes of that head so far

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # pyright: ignore[reportAttributeAccessIssue]
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)  # pyright: ignore[reportAttributeAccessIssue]
        if self._is_asking:
            self._stop_waiting()
            return
        if self._late is None:  # the beginning of another head, or the rest of a body that was refused
            self._await_head()
        if self.cycle is None or not self.cycle.more_body:
            self._held += len(data)
            if self._held > HEAD_BYTES:
                self.transport.abort()

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
            self._late, self._held = None, 0
