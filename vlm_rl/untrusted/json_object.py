"""Read a JSON object that a file, a server or another process gives."""

from __future__ import annotations

import json
import reprlib
from typing import Any


def read_object(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text. Raises ValueError for everything else.

    That is what is not JSON or not UTF-8, a value of another kind, and one that is nested too deeply.
    """
    try:
        tree = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(tree, dict):
        raise ValueError(f"it must hold a JSON object, not {reprlib.repr(tree)}")
    return tree
