"""Models by their name on the hub: ORG/NAME for its newest revision, ORG/NAME@REVISION for a given one.

A model is downloaded into the hub's own cache, whose folder names the commit: models--ORG--NAME/snapshots/COMMIT. A
run keeps the path of that folder, so its configuration says which weights it began with.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vlm_rl.errors import UserError

_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w-][\w./-]*))?")
_SNAPSHOT = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
# These are local folders, never organisations of the hub.
_LOCAL_FOLDERS = {"checkpoints", "data", "model", "models", "output", "outputs", "raw", "runs", "weights"}
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# Folders in a repository repeat its weights in other formats, and so does Mistral's consolidated.safetensors.
_IGNORED = ("*/*", "consolidated*", "*.bin.index.json")


def locate_model(named: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model: a path as it is, a name of the hub as its folder in the hub's cache.

    Args:
        named: a path, ORG/NAME or ORG/NAME@REVISION. A path that exists is never a name of the hub.
        weights: whether to download the weights too; configuration and tokenizer are always.

    A revision that is in the cache is not downloaded again. With HF_HUB_OFFLINE=1 nothing is asked of the hub. Where
    several processes ask at once, each file is downloaded by one of them. Raises UserError, with the command that
    downloads the model, where it cannot be obtained.
    """
    path = Path(named)
    if path.exists() or (request := _request(str(named))) is None:
        return path
    name, revision = request
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("RANK", "0") != "0":
        disable_progress_bars()
    files = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=list(_IGNORED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        folder = f"models/{name.partition('/')[2]}"
        pinned = f" --revision {revision}" if revision else ""
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(
            f"model {named}: no such folder here, and it cannot be downloaded from the hub: {reason}; "
            f"where there is a network, `hf download {name}{pinned} --local-dir {folder}` (after `hf auth login`, if "
            f"the model's page asks for its licence), and then give {folder} as the model"
        ) from None


def is_hub_name(named: str | Path) -> bool:
    """Tell whether this names a model of the hub: ORG/NAME or ORG/NAME@REVISION, and no path of this machine."""
    return not Path(named).exists() and _request(str(named)) is not None


def hub_name(path: str | Path) -> str | None:
    """Return ORG/NAME@COMMIT for a folder in the hub's cache, None for any other."""
    match = _SNAPSHOT.search(str(path))
    return f"{match['org']}/{match['name']}@{match['commit']}" if match else None


def short_name(path: str | Path) -> str:
    """Return a model's short name: NAME of ORG/NAME@REVISION, or the last part of a path."""
    return Path(hub_name(path) or str(path)).name.partition("@")[0]


def pinned(named: str, stored: str) -> str:
    """Return the name with the revision that a run began with.

    Args:
        named: the model that a resume names.
        stored: the path in the run's configuration.

    Only a name without a revision is changed, and only where `stored` is in the hub's cache and of the same model.
    """
    begun = hub_name(stored)
    return begun if begun is not None and is_hub_name(named) and begun.partition("@")[0] == named else named


def _request(named: str) -> tuple[str, str | None] | None:
    """Return (ORG/NAME, revision), also for a folder that has gone from the cache; None for a path."""
    match = _HUB_NAME.fullmatch(hub_name(named) or named)
    if match is None:
        return None
    first = match[1].partition("/")[0]
    return None if first in _LOCAL_FOLDERS or Path(first).is_dir() else (match[1], match[2])
