"""What the demo opens when it is told nothing: the quickstart's run, else a recorded toy run that ships with it."""

from __future__ import annotations

from pathlib import Path

_QUICKSTART = Path("runs/quickstart")
RECORDED = Path(__file__).parent / "assets" / "recorded"


def default_folders() -> list[Path]:
    """The quickstart's run below the working directory where it has an evaluation, else the recorded ones."""
    if any(_QUICKSTART.glob("eval/*/step-*.json")):
        return [_QUICKSTART]
    print(f"no {_QUICKSTART} here: showing a recorded toy run; vlm-rl demo RUN... shows yours", flush=True)
    return [RECORDED]
