"""Checks of names and addresses that a user gives."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from vlm_rl.errors import UserError

BENCHMARK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_plain_address(url: str) -> bool:
    """Tell whether an address has scheme, host and path alone: no name, password, query or fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bare


def is_server_address(text: str) -> bool:
    """Tell whether this is http://HOST:PORT, or https, and nothing more."""
    return is_plain_address(text) and urlsplit(text).port is not None and urlsplit(text).path in ("", "/")


def is_variable_name(text: str) -> bool:
    """Tell whether this is how variables of the environment are called; an API key hardly is."""
    return re.fullmatch(r"[A-Z_][A-Z0-9_]*", text) is not None


def check_benchmark_name(name: str) -> str:
    """Return the name if results can be stored under it. Raises UserError otherwise.

    The name of a prepared set is that of its folder.
    """
    if not BENCHMARK_NAME.fullmatch(name):
        raise UserError(
            f"results cannot be stored under the name {name!r}: a set is named after its folder, which may hold "
            "only letters, digits, dot, dash and underscore; rename the folder"
        )
    return name
