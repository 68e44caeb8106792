"""Paths that a user or a data set gives: where home is, and no pipes, devices or sockets in the place of files.

Reading one of these may wait for ever, or never end.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from vlm_rl.errors import UserError


def check_plain(path: str | Path) -> None:
    """Raise UserError for what is there and is neither a file nor a folder, links followed.

    Links in a circle are refused too.
    """
    path = Path(path)
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a link that leads back to itself: remove it") from None
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no file (a pipe, a device or a socket): put a file in its place, or remove it")


def check_utf8_name(path: str | Path) -> None:
    """Raise UserError for a path that is not UTF-8: JSON and a page cannot hold it, and Arrow does not open it."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UserError(f"{shown}: this name is not UTF-8; rename the file or folder") from None


def check_plain_tree(folder: str | Path) -> None:
    """Check everything below a folder as check_plain does. Links to folders are not followed."""
    for parent, _, files in os.walk(folder):
        for name in files:
            check_plain(Path(parent, name))


def read_small(path: str | Path, *, most: int = 16 << 20) -> str:
    """Return the text of a file that people write: a configuration, a list, a token.

    Raises UserError for what check_plain refuses and for more than `most` bytes, which a file with holes has on an
    empty disk; OSError and UnicodeDecodeError as Path.read_text.
    """
    check_plain(path)
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} has more than {most >> 20} MiB: give the file that is meant, which is small")
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()


def in_home(text: str) -> str:
    """Return a path that begins with ~ or $HOME with that folder's own path, and any other text as it is.

    A shell leaves them as they are in `out=~/runs` and `--out=~/runs`, between single quotes and in a file. A printed
    command may then quote its paths.
    """
    head, slash, rest = text.partition("/")
    return str(Path.home() / rest) if slash and head in ("~", "$HOME", "${HOME}") else text
