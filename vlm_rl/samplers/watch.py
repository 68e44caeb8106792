"""How far the sampling of a request is, told about once a second while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = 1.0  # between two texts


class SamplingWatch:
    """Adds up what an engine samples for one request, and shows it now and then.

    watch = SamplingWatch(1024, show=print)
    watch.add(tokens=256, longest=12, ended=3)     # 3 of 1,024 responses, 4,180 tokens/s, longest 12
    """

    def __init__(self, total: int = 0, *, show: Callable[[str], None] | None = None) -> None:
        """Start the clock.

        Args:
            total: responses of the request.
            show: gets a text about once a second; None: nobody looks.
        """
        self._total, self._show = total, show
        self._tokens = self._longest = self._ended = 0
        self._begun = self._shown = time.monotonic()

    def add(self, *, tokens: int = 0, longest: int = 0, ended: int = 0) -> None:
        """Note what was sampled since the last call.

        Args:
            tokens: of all responses.
            longest: tokens of the longest response, the growing ones included.
            ended: responses.
        """
        if self._show is None:
            return
        self._tokens += tokens
        self._longest = max(self._longest, longest)
        self._ended += ended
        now = time.monotonic()
        if now - self._shown >= _SECONDS:
            self._shown = now
            rate = self._tokens / (now - self._begun)
            self._show(
                f"{self._ended:,} of {self._total:,} responses, {rate:,.0f} tokens/s, longest {self._longest:,}"
            )
