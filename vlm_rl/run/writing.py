"""What the file system refuses, as a message of one line: a full disk, a folder that is read-only or has vanished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_rl.errors import UserError

ADVICE = "make sure that the folder is there, can be written and has free space, then resume"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError, which names the path, for what the file system refuses in a `with` block."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}: {ADVICE}") from error
