"""What the file system refuses, as a message of one line: a full disk, a folder that is read-only or has vanished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_rl.errors import DISK_ERRORS, FILE_LIMITS, UserError, is_any_of

ADVICE = "make sure that the folder is there, can be written and has free space, then resume"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError, which names the path, for what the file system refuses in a `with` block."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not is_any_of((*DISK_ERRORS, *FILE_LIMITS), error):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path} could not be written: {reason}: {ADVICE}") from error
