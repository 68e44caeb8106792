"""RUN/log.txt: what rank 0 shows, with the time, and what libraries warn of.

    log = RunLog(run.path)      # from now on, until log.close()
    log.info("step 1/60 ...")

A resume appends. What the disk refuses ends the run at its next line, as it does with the other files of the run.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from vlm_rl.run.writing import writing
from vlm_rl.untrusted.visible_text import replace_invisible

LOG = "log.txt"


class _Handler(logging.FileHandler):
    refused: OSError | None = None  # the first error of the file system

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; the first one opens the file, whose error logging would let through."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Keep what the file system refused, without logging's own traceback: a library may be the caller."""
        error = sys.exception()
        if self.refused is None and isinstance(error, OSError):
            self.refused = error

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
        """Write a line. Raises UserError if the file system refuses it, or has refused an earlier one."""
        self._logger.info(text)
        with writing(Path(self._handler.baseFilename)):
            if self._handler.refused is not None:
                raise self._handler.refused

    def failure(self, error: BaseException) -> None:
        """Write what ended the run, with its traceback."""
        self._logger.error("the run ended: %s", error or type(error).__name__, exc_info=error)

    def close(self) -> None:
        """Write no more."""
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(self._handler)
        with suppress(OSError):  # it tries once more what was refused before
            self._handler.close()
