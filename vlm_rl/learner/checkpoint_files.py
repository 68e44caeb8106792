"""The files that a rank writes into a checkpoint's folder: at once, or later from copies in host memory."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vlm_rl.run.manifest import BUFFER_BYTES, FileEntry, HashedFile, file_entries


class CheckpointFiles:
    """The files of one rank.

    files = CheckpointFiles(folder, later=True)
    files.add_shard(state, "learner/state.pt")      # copies
    written = files.write()                         # writes what the state was, in any thread
    """

    def __init__(self, folder: Path, *, later: bool) -> None:
        """Write nothing yet; without `later` each file is written as it is added."""
        self.folder, self.later = folder, later
        self._written: dict[str, FileEntry] = {}
        self._jobs: deque[Callable[[], object]] = deque()

    def add_shard(self, state: Any, path: str | Path) -> None:
        """Add a file that holds `state` as torch.save writes it."""
        self._add(partial(self._write_shard, host_copy(state) if self.later else state, Path(path)))

    def add_model(self, write: Callable[[], object]) -> None:
        """Add the files that `write` puts into the folder itself. What it writes must not change any more."""
        self._add(write)
        self._add(self._hash_model)

    def write(self) -> dict[str, FileEntry]:
        """Write what was left for later; return size and SHA-256 of all these files, by their names in the folder."""
        while self._jobs:
            self._jobs.popleft()()  # frees its copy
        return self._written

    def _add(self, job: Callable[[], object]) -> None:
        if self.later:
            self._jobs.append(job)
        else:
            job()

    def _write_shard(self, state: Any, path: Path) -> None:
        # A file is hashed while it is written: reading 100 GB again would keep every rank waiting.
        with HashedFile(path) as raw, io.BufferedWriter(raw, BUFFER_BYTES) as file:
            torch.save(state, file)
        self._written[path.relative_to(self.folder).as_posix()] = raw.entry()

    def _hash_model(self) -> None:
        files = [path for path in self.folder.iterdir() if path.is_file()]
        self._written |= file_entries(self.folder, files, sync=True)


def host_copy(tree: Any) -> Any:
    """Return a deep copy whose tensors are in host memory; those that share a storage share its copy."""
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {}
    for tensor in pytree.tree_leaves(tree):
        if isinstance(tensor, Tensor):
            source = tensor.untyped_storage()
            if source._cdata not in storages:
                storages[source._cdata] = source.clone() if source.device.type == "cpu" else source.cpu()
            shared = (storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
            host = torch.empty(0, dtype=tensor.dtype).set_(*shared)
            vars(host).update(vars(tensor))  # DeepSpeed gives tensors a name, which torch.save stores
            memo[id(tensor)] = host.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(tree, memo)
