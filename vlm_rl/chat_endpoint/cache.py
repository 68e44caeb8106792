"""Replies on disk, a file for each request, named after the sha256 of all that decides the reply.

Several ranks and runs may share a folder: a file appears whole or not at all, and equal requests have equal names. A
file that is damaged counts as absent and is written again.
"""

from __future__ import annotations

import json
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Any

from vlm_rl.json_object import read_object


def key_of(url: str, body: dict[str, Any]) -> str:
    """Return the name of a request: server and body, images included, in 64 hex digits."""
    return sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """A folder of replies, made on the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> str | None:
        """Return the stored text of a reply, or None."""
        try:
            tree = read_object(self._file(key).read_bytes())
            text = tree["text"] if tree["key"] == key else None
        except (OSError, ValueError, KeyError):
            return None
        return text if isinstance(text, str) else None

    def put(self, key: str, text: str) -> None:
        """Store the text of a reply. Raises OSError where the disk does not take it."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{key}.{secrets.token_hex(8)}.tmp")  # other nodes may have this process's id
        temporary.write_text(json.dumps({"key": key, "text": text}))
        temporary.replace(file)

    def _file(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
