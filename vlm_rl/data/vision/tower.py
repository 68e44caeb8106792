"""The size of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TowerSize:
    """The size of a vision tower, from which its memory is estimated."""

    hidden: int
    mlp: int
    heads: int
    layers: int
    patches: int  # of one image at its largest
    patch_values: int  # numbers of a patch
