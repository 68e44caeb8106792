"""The configurations that the project ships."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
PAPER_RECIPES = sorted(CONFIGS.glob("papers/*/*.yaml"))
