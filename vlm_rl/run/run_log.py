"""RUN/log.txt: what rank 0 shows, with the time, and what libraries warn of.

    log = RunLog(run.path)      # from now on, until log.close()
    log.info("step 1/60 ...")

A resume appends. A line that the disk refuses is dropped: what a run must not lose is in metrics.jsonl.
"""

from __future__ import annotations

import logging
from pathlib import Path

from vlm_rl.visible_text import replace_invisible

LOG = "log.txt"


class _Handler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record, without logging's own traceback on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, or several with a traceback; nothing in them can act on a terminal."""
        return replace_invisible(super().format(record), lambda character: f"<{ord(character):02x}>", keep="\n\t")


class RunLog:
    """The log of one run, on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._handler = _Handler(folder / LOG, encoding="utf-8", delay=True)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._logger = logging.getLogger("vlm_rl")
        self._logger.setLevel(logging.INFO)
        logging.getLogger().addHandler(self._handler)  # the root: libraries warn there
        logging.captureWarnings(True)

    def info(self, text: str) -> None:
        """Write a line."""
        self._logger.info(text)

    def failure(self, error: BaseException) -> None:
        """Write what ended the run, with its traceback."""
        self._logger.error("the run ended: %s", error or type(error).__name__, exc_info=error)

    def close(self) -> None:
        """Write no more."""
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
