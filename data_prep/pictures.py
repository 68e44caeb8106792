"""One picture on its way into a prepared set: decoded once, brought once to the grid, hashed.

Bytes that are within the limits and on the grid already are kept as they are. Others are encoded anew,
JPEG as JPEG, PNG and WEBP as PNG, without any metadata.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlm_rl.data.images import (
    DEFAULT_LIMITS,
    TEST_LIMITS,
    decode,
    encode_jpeg,
    encode_png,
    fit_to_grid,
    grid_size,
)
from vlm_rl.data_prep.image_files import ImageRef
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

_CELLS, _LOW = 64, 16  # cells on a side, and frequencies of each direction
_COSINES = np.cos(np.pi / _CELLS * (np.arange(_CELLS) + 0.5) * np.arange(_LOW)[:, None])
_FLOOR = 0.004  # of the strongest frequency
_NO_CONTRAST = 64.0  # a pen stroke over one cell is more


@dataclass(frozen=True, slots=True)
class Grid:
    """The model's pixel grid and the range of a picture's pixels."""

    min_pixels: int
    max_pixels: int
    factor: int = 28  # pixels of a merged visual token's side: patch size x 2

    def check(self) -> None:
        """Raises UserError for a range that holds no picture."""
        grid_size(
            self.factor, self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels, factor=self.factor
        )


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture and what it was before."""

    data: bytes  # encoded, on the grid
    width: int  # pixels
    height: int
    original_width: int  # upright
    original_height: int
    original_format: str  # PNG, JPEG or WEBP
    original_sha256: str
    phash: str  # 64 hex digits, of the fitted pixels
    is_kept: bool  # whether these are the original bytes


@dataclass(frozen=True, slots=True)
class Blank:
    """A white picture of the smallest size."""


@dataclass(frozen=True, slots=True)
class Typeset:
    """A problem's text, to be set as a picture."""

    text: str


PictureRef = ImageRef | Blank | Typeset


def prepare_picture(ref: PictureRef, *, where: str, grid: Grid, test_only: bool) -> Picture:
    """Read, check, fit and hash one picture. Raises RowError if it cannot be used."""
    if isinstance(ref, Blank):
        return _drawn(Image.new("RGB", (grid.factor, grid.factor), "white"), grid)
    if isinstance(ref, Typeset):
        from vlm_rl.data_prep.typeset import typeset

        return _drawn(typeset(ref.text, max_pixels=grid.max_pixels), grid)
    data = ref.read()
    try:
        decoded = decode(data, where=where, limits=TEST_LIMITS if test_only else DEFAULT_LIMITS)
    except UserError as error:
        raise RowError("image_unreadable", str(error)) from None
    fitted = fit_to_grid(decoded.image, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels, factor=grid.factor)
    if fitted is decoded.image and decoded.is_plain:
        encoded = data
    else:
        encoded = encode_jpeg(fitted) if decoded.format == "JPEG" else encode_png(fitted)
    return Picture(
        data=encoded,
        width=fitted.width,
        height=fitted.height,
        original_width=decoded.image.width,
        original_height=decoded.image.height,
        original_format=decoded.format,
        original_sha256=hashlib.sha256(data).hexdigest(),
        phash=perceptual_hash(fitted),
        is_kept=encoded is data,
    )


def _drawn(image: Image.Image, grid: Grid) -> Picture:
    """A picture that preparation itself drew, fitted like any other."""
    fitted = fit_to_grid(image, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels, factor=grid.factor)
    data = encode_png(fitted)
    return Picture(
        data=data,
        width=fitted.width,
        height=fitted.height,
        original_width=image.width,
        original_height=image.height,
        original_format="PNG",
        original_sha256=hashlib.sha256(data).hexdigest(),
        phash=perceptual_hash(fitted),
        is_kept=True,
    )


def perceptual_hash(image: Image.Image) -> str:
    """256 bits as hex that hardly change when a picture is resized or encoded again.

    Which of the 16 x 16 lowest frequencies (cosine transform of 64 x 64 grey cells) are above their
    median, and above a floor under which an encoder's noise decides; zero for a picture without contrast.
    """
    cells = np.asarray(image.convert("L").resize((_CELLS, _CELLS), Image.Resampling.BOX), dtype=np.float64)
    low = (_COSINES @ (cells - cells.mean()) @ _COSINES.T).ravel()
    if np.abs(low).max() < _NO_CONTRAST:
        return "0" * 64
    floor = _FLOOR * np.abs(low).max()
    return np.packbits(low > max(float(np.median(low)), floor)).tobytes().hex()
