"""Text of models and data sets made safe to show: characters that hide, reorder or control others become visible."""

from __future__ import annotations

import re
from collections.abc import Callable

# Control characters, zero-width ones, and those that change the direction of writing.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def replace_invisible(text: str, replacement: Callable[[str], str], *, keep: str = "") -> str:
    """Replace every invisible character that is not in `keep` by what `replacement` returns for it."""
    return _INVISIBLE.sub(lambda match: match[0] if match[0] in keep else replacement(match[0]), text)
