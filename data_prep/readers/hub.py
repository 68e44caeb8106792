"""Find a data set's files: a local path as it is, or a repository of the hub at a pinned revision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vlm_rl.errors import UserError

CACHE: str | None = None  # None: the hub's own default, $HF_HUB_CACHE
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(named: str, revision: str, patterns: Sequence[str] = ()) -> tuple[Path, str]:
    """Return (folder or file, commit) for a local path or a hub id; the commit of a local path is "".

    Args:
        named: what --source names.
        revision: the commit of a hub id, required so that the same command gives the same set next year.
        patterns: the files needed of the repository, as globs; () for all.

    A revision that is in the hub's cache is not downloaded again. Raises UserError if the files cannot be obtained.
    """
    path = Path(named)
    if path.exists() or not _HUB_ID.fullmatch(named):
        if revision:
            raise UserError(f"--revision {revision}: only a hub id has one, and {named} is a local path")
        return path, ""
    if not revision:
        raise UserError(
            f"{named}: does not exist here; if it is a hub id, pin it with --revision COMMIT (the commit is on "
            "the page of its files)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        wanted = [*patterns, "README.md"] if patterns else None  # the card, which names the licence
        folder = snapshot_download(
            named, repo_type="dataset", revision=revision, allow_patterns=wanted, cache_dir=CACHE
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{named} at {revision}: not in the cache, and it cannot be downloaded: {reason}. Where there is a "
            f"network: `hf download {named} --repo-type dataset --revision {revision}`"
        ) from None
    return Path(folder), Path(folder).name


def newest_commit(named: str) -> str:
    """Return the newest commit of a hub id, to pin it.

    Raises UserError if `named` is not a hub id, or the hub cannot be asked: with the command that downloads it.
    """
    if not _HUB_ID.fullmatch(named):
        raise UserError(f"{named}: no such file or folder, and no name of a data set; docs/data.md lists the names")
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(named).sha
    except Exception as error:  # whatever the client raises: offline, no such repository, no network
        folder = f"raw/{named.partition('/')[2]}"
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{named}: no such file or folder here, and the hub cannot be asked: {reason}. "
            f"If it is a data set on the hub, download it where there is a network:\n"
            f"  hf download {named} --repo-type dataset --local-dir {folder}\n"
            f"  vlm-rl prepare {folder} --out SET"
        ) from None
    assert commit is not None
    return commit
