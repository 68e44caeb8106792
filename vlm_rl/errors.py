"""A user's mistake, which the command line prints without a traceback, and a stop that was asked for."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend. The message names the place, the value and the next step."""


EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by SIGTERM after saving; the same work goes on when it is run again


class StoppedError(SystemExit):
    """SIGTERM arrived and everything is saved; exits with EXIT_STOPPED."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)
