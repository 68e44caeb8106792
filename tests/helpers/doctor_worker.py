"""Answers a group of the doctor's checks in a process of train_worker."""

from __future__ import annotations

from pathlib import Path

from vlm_rl.doctor import apart


def main(module: str, folder: str) -> int:
    return apart.main(module, Path(folder))
