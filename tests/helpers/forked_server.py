"""`vlm-rl serve` whose engine and worker are forked: vLLM starts them anew, and each imports everything for 10 s."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import BaseContext

from vlm_rl.cli import main

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> BaseContext:
    return _get_context("fork" if method == "spawn" else method)


if __name__ == "__main__":
    multiprocessing.get_context = _forking  # type: ignore[assignment]
    sys.exit(main())
