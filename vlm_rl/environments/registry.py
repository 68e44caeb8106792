"""The shipped environments by their names. To add one, write a file like zoom and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_rl.environments import answer_check, python, zoom
from vlm_rl.environments.environment import Environment, EnvironmentSetup

ENVIRONMENTS: dict[str, tuple[Callable[[EnvironmentSetup], Environment], Mapping[str, Any]]] = {
    "zoom": (zoom.Zoom, zoom.OPTIONS),
    "python": (python.Python, python.OPTIONS),
    "answer_check": (answer_check.AnswerCheck, answer_check.OPTIONS),
}
