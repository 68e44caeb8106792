"""Refuse pipes, devices and sockets where files are expected: reading one may wait for ever, or never end."""

from __future__ import annotations

import os
from pathlib import Path

from vlm_rl.errors import UserError


def check_plain(path: str | Path) -> None:
    """Raise UserError for what is there and is neither a file nor a folder, links followed."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no file (a pipe, a device or a socket): put a file in its place, or remove it")


def check_plain_tree(folder: str | Path) -> None:
    """Check everything below a folder as check_plain does. Links to folders are not followed."""
    for parent, _, files in os.walk(folder):
        for name in files:
            check_plain(Path(parent, name))
