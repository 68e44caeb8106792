"""Refuse what a user asked for: one line, and the same exit code on every rank that torchrun has started here.

torchrun ends all ranks as soon as one has ended, so a rank that refuses waits for its neighbours to come to the same
end. They meet in a folder that bears the process number of the torchrun that started them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

EXIT_REFUSED = 2
_PATIENCE = 10.0  # seconds for the other ranks; one that waits in a collective will not come


def refuse(message: str) -> int:
    """Print the message, once a machine, and return the exit code when the other ranks here have refused too."""
    line = f"vlm-rl: {message}"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks <= 1:
        print(line, file=sys.stderr)
        return EXIT_REFUSED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, for the end of the first of us
    folder = Path(tempfile.gettempdir(), f"vlm-rl-refused-{os.getuid()}-{os.getppid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        is_ours = False
    if not is_ours or _is_first(folder / hashlib.sha256(line.encode()).hexdigest()):
        print(line, file=sys.stderr, flush=True)
    if is_ours:
        _is_first(folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}")
        deadline = time.monotonic() + _PATIENCE
        with suppress(FileNotFoundError):  # another rank has met all, and has just removed the folder
            while 0 < len([*folder.glob("rank-*")]) < ranks and time.monotonic() < deadline:
                time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_REFUSED


def _is_first(mark: Path) -> bool:
    """Make an empty file; False where another rank has made it."""
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return False
    return True
