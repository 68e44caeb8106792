"""A data set's files: a local path as it is, or a repository of the hub at a pinned revision."""

from __future__ import annotations

import re
from pathlib import Path

from vlm_rl.data_prep.generic import load_mapping
from vlm_rl.data_prep.sources import SOURCES
from vlm_rl.errors import UserError

CACHE: str | None = None  # None: the hub's own place, $HF_HUB_CACHE
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(source: str, named: str, revision: str) -> tuple[Path, str]:
    """(folder or file, commit) of what --source names; the commit is "" for a local path that names none.

    A hub id wants a revision, so that the same command gives the same set next year; what is in the
    hub's cache already is not asked for again. Raises UserError if it cannot be had.
    """
    path = Path(named)
    if path.exists() or not _HUB_ID.fullmatch(named):
        if revision:
            raise UserError(f"--revision {revision}: only a hub id has one, and {named} is a local path")
        return path, load_mapping(path).revision if source == "generic" and path.is_file() else ""
    if not revision:
        raise UserError(
            f"{named}: does not exist here; if it is a hub id, pin it with --revision COMMIT (the commit is on "
            "the page of its files)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    files = list(SOURCES[source].files) if source in SOURCES else []
    try:
        folder = snapshot_download(
            named, repo_type="dataset", revision=revision, allow_patterns=files or None, cache_dir=CACHE
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{named} at {revision}: not in the cache, and it cannot be downloaded: {reason}") from None
    return Path(folder), Path(folder).name
