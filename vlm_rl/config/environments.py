"""The section `environment`: tools that answer the policy between its turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection

SHIPPED_ENVIRONMENTS = ("zoom", "python", "answer_check")


class EnvironmentConfig(ConfigSection):
    """What answers the policy between its turns; see docs/environments.md."""

    name: str | None = None
    """zoom, python, answer_check, or your own class as module.Class (needs allow_class); null: a response is one
    turn. Environments are experimental on GPUs."""
    options: dict[str, Any] = {}
    """The environment's own options, by name; docs/environments.md lists those of the shipped ones."""
    instructions: str | None = None
    """What the system's message says about it; null: the environment's own words."""
    allow_class: bool = False
    """Allow importing your own class, which runs the code of its module."""
    max_turns: PositiveInt = 5
    """Most turns of the policy in an episode; what the last one calls is not shown to it."""
    max_observed_tokens: PositiveInt = 2048
    """Most tokens that an episode observes, images and what is shown before the first turn included. They are not in
    rollout.max_tokens, which all turns together sample."""
    max_images: NonNegativeInt = 4
    """Most images that an episode observes, before its first turn and after."""
    min_pixels: PositiveInt | None = None
    """Least pixels of an observed image, which is enlarged to it; null: data.min_pixels."""
    max_pixels: PositiveInt | None = None
    """Most pixels of an observed image, which is reduced to it; null: data.max_pixels."""
    timeout: PositiveFloat = 30.0
    """Seconds that the answer to one turn, or a reset, may take, once it is its turn; later it is an error."""
    workers: PositiveInt = 2
    """Processes of each rank in which your own class runs, or programs and answers that are judged at the same
    time."""

    @property
    def is_own(self) -> bool:
        """Tell whether the environment is the user's class."""
        return self.name is not None and self.name not in SHIPPED_ENVIRONMENTS

    def conflicts(self) -> Iterator[str]:
        if self.name is not None and self.is_own and "." not in self.name:
            yield f"name is {self.name!r}: give {', '.join(SHIPPED_ENVIRONMENTS)}, or your own class as module.Class"
        elif self.is_own and not self.allow_class:
            yield (
                f"name is {self.name!r}, and importing it runs the code of its module: read that code, then set "
                "environment.allow_class=true"
            )
