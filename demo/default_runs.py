"""Choose what the demo opens when no run is named: the quickstart's run, else recorded toy runs that ship with it."""

from __future__ import annotations

from pathlib import Path

_QUICKSTART = Path("runs/quickstart")
RECORDED = Path(__file__).parent / "assets" / "recorded"
FIRST_VIEW = "sort=difference"  # what these open with: the problem whose lengths differ most


def default_folders() -> list[Path]:
    """Return the quickstart's run below the working directory where it has an evaluation, else the recorded ones."""
    if any(_QUICKSTART.glob("eval/*/step-*.json")):
        return [_QUICKSTART]
    print(f"no {_QUICKSTART} here: showing recorded toy runs; vlm-rl demo RUN... shows yours", flush=True)
    return [RECORDED]
