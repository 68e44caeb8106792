"""The base of every section of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class ConfigSection(BaseModel):
    """The base of every section: it refuses unknown keys, converts no types, and its values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each pair of values that do not fit together."""
        yield from ()

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if messages := list(self.conflicts()):
            raise ValueError("\n".join(messages))
        return self
