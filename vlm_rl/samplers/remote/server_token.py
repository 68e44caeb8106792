"""The token that every route of a rollout server asks for: a file that servers and learners share.

rollout.server_token names it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import check_plain, in_home, read_small


def token_path(setting: str) -> Path:
    """Return the absolute path of rollout.server_token. Raises UserError as check_plain does."""
    path = Path(in_home(setting))
    check_plain(path)
    return path.resolve()


def create_token(path: Path) -> None:
    """Write a random token that only this user can read, unless the file is there.

    The file is whole or not there: several servers may start at once, and an empty one would be a token for all of
    them. Raises UserError if it cannot be written, or holds no token.
    """
    work = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):
            os.link(work, path)
    except OSError as error:
        raise UserError(f"rollout.server_token: {path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)
    read_token(path)


def read_token(path: Path) -> str:
    """Return the servers' token. Raises UserError if there is none."""
    try:
        token = read_small(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"rollout.server_token: {path} cannot be read ({error}): `vlm-rl serve` writes it; copy it to machines "
            "that share no home folder"
        ) from None
    if not token.isascii() or not token.isprintable() or not token:
        raise UserError(f"rollout.server_token: {path} holds no token: remove it, and start the servers again")
    return token
