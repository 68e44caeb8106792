"""Choose what the demo opens when no run is named: the quickstart's run, else toy runs that ship with the demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_QUICKSTART = Path("runs/quickstart")
RECORDED = Path(__file__).parent / "assets" / "recorded"
FIRST_VIEW = "first_view.txt"  # beside the recorded runs: the query that they open with


def default_folders() -> list[Path]:
    """Return the quickstart's run below the working directory where it has an evaluation, else the recorded ones."""
    if any(_QUICKSTART.glob("eval/*/step-*.json")):
        return [_QUICKSTART]
    print(f"no {_QUICKSTART} here: showing recorded runs; vlm-rl demo RUN... shows yours", flush=True)
    return [RECORDED]


def first_view(folders: Sequence[Path]) -> str:
    """Return the query with which these folders open: that of the recorded runs, else none."""
    return (RECORDED / FIRST_VIEW).read_text(encoding="utf-8").strip() if list(folders) == [RECORDED] else ""
