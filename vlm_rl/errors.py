"""The two exceptions that are not faults of the program: a user's mistake, and a stop that was asked for.

Beside them what messages share: what no code can help, what a misspelt name may have meant, where a user's module
is looked for, and a signal's name.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
from collections.abc import Iterable, Sequence

# What no code of ours can help: a full disk, a quota, a limit on a file's size, a file system mounted read-only, a
# disk that is damaged or has gone, and too many open files.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
FILE_LIMITS = (errno.EMFILE, errno.ENFILE)


class UserError(Exception):
    """A mistake that the user can fix; the command line prints it without a traceback.

    The message names the place, the value and the next step.
    """


EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by SIGTERM with everything saved; start again with --resume
EXIT_STALLED = 79  # no rank made progress for twice log.stall_minutes; the stacks are in log.txt


class StoppedError(SystemExit):
    """Raised after SIGTERM once everything is saved; exits with EXIT_STOPPED."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


def is_any_of(numbers: Sequence[int], error: Exception) -> bool:
    """Tell whether an error has one of these numbers, or the text of one: torch and safetensors raise that alone."""
    if (number := getattr(error, "errno", None)) is not None:
        return number in numbers
    return any(os.strerror(number) in str(error) for number in numbers)


def near(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return the question whether a known name was meant, or `otherwise` if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def where_to_look(path: str, fault: str) -> str:
    """Return the next step if importing module.NAME failed because its own module was not found, else nothing."""
    module = path.partition(".")[0]
    if f"No module named {module!r}" not in fault:
        return ""
    return (
        f"; start it as `python -m vlm_rl` or `torchrun -m vlm_rl` in the folder of {module}, or name that folder in "
        "PYTHONPATH: the command vlm-rl does not look into the working folder"
    )


def signal_name(number: int) -> str:
    """Return a signal's name, of a real-time signal its number: only the first and the last of them have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
