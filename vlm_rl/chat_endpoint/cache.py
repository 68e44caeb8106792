"""Replies on disk, a file for each request, named after the sha256 of all that decides the reply.

Several ranks and runs may share a folder: a file appears whole or not at all, and equal requests have equal names. A
file that is damaged counts as absent and is written again.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vlm_rl.chat_endpoint.client import Completion
from vlm_rl.errors import UserError
from vlm_rl.untrusted.json_object import read_object
from vlm_rl.untrusted.plain_files import check_plain

_CHECK = TypeAdapter(Completion)


def key_of(url: str, body: dict[str, Any], apart: str = "") -> str:
    """Return the name of a request in 64 hex digits: of server, body, images included, and what sets it apart."""
    tree = [url, body, apart] if apart else [url, body]
    return sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """A folder of replies, made on the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> Completion | None:
        """Return a stored reply, or None. Of those that were stored by older versions only the text is known."""
        try:
            check_plain(self._file(key))
            data = self._file(key).read_bytes()
            return _CHECK.validate_json(data, strict=True) if read_object(data)["key"] == key else None
        except (OSError, ValueError, KeyError, UserError):  # a ValidationError is a ValueError
            return None

    def put(self, key: str, completion: Completion) -> None:
        """Store a reply. Raises OSError if the disk does not take it."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{key}.{secrets.token_hex(8)}.tmp")  # other nodes may have this process's id
        try:
            temporary.write_text(json.dumps({"key": key, **asdict(completion)}))
            temporary.replace(file)
        except OSError:
            with suppress(OSError):  # a file system that refused the file may refuse this too
                temporary.unlink(missing_ok=True)
            raise

    def _file(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
