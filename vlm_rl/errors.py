"""The one exception that a user's mistake raises; the command line prints it without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend. The message names the place, the value and the next step."""
