"""An image on its way into a prepared set: decoded once, brought to the grid once, hashed.

Bytes that are within the limits and on the grid already are kept as they are. Others are encoded again,
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
    check_pixel_range,
    decode,
    encode_jpeg,
    encode_png,
    fit_to_grid,
    grid_size,
)
from vlm_rl.data_prep.records import BlankImage, ImageReference, RowError, TypesetImage
from vlm_rl.data_prep.typeset import typeset
from vlm_rl.errors import UserError

_CELLS, _LOW = 64, 16  # cells on a side, and frequencies of each direction
_COSINES = np.cos(np.pi / _CELLS * (np.arange(_CELLS) + 0.5) * np.arange(_LOW)[:, None])
_FLOOR = 0.004  # of the strongest frequency
_NO_CONTRAST = 64.0  # a pen stroke over one cell is more


@dataclass(frozen=True, slots=True)
class Grid:
    """The model's pixel grid, and how many pixels an image may have."""

    min_pixels: int
    max_pixels: int
    factor: int = 28  # pixels of a merged visual token's side: patch size x 2

    def check(self) -> None:
        """Raise UserError for a range that no image fits, or that training refuses."""
        check_pixel_range(self.min_pixels, self.max_pixels, factor=self.factor)
        grid_size(
            self.factor, self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels, factor=self.factor
        )


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A finished image, and what it was before."""

    data: bytes  # encoded, on the grid
    width: int  # pixels
    height: int
    original_width: int  # upright
    original_height: int
    original_format: str  # PNG, JPEG or WEBP
    original_sha256: str
    phash: str  # 64 hex digits, of the fitted pixels
    is_kept: bool  # whether these are the original bytes


def prepare_image(reference: ImageReference, *, where: str, grid: Grid, test_only: bool) -> PreparedImage:
    """Read, check, fit and hash one image.

    Args:
        reference: where its bytes are, or what to draw.
        where: the start of an error message.
        grid: the grid and the range of pixels to fit it to.
        test_only: whether it belongs to a benchmark, whose tiny images are scaled up and not refused.

    Raises RowError if the image cannot be used.
    """
    if isinstance(reference, BlankImage):
        return _drawn(Image.new("RGB", (grid.factor, grid.factor), "white"), grid)
    if isinstance(reference, TypesetImage):
        return _drawn(typeset(reference.text, max_pixels=grid.max_pixels), grid)
    data = reference.read()
    try:
        decoded = decode(data, where=where, limits=TEST_LIMITS if test_only else DEFAULT_LIMITS)
    except UserError as error:
        raise RowError("image_unreadable", str(error)) from None
    fitted = fit_to_grid(decoded.image, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels, factor=grid.factor)
    if fitted is decoded.image and decoded.is_plain:
        encoded = data
    else:
        encoded = encode_jpeg(fitted) if decoded.format == "JPEG" else encode_png(fitted)
    return PreparedImage(
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


def _drawn(image: Image.Image, grid: Grid) -> PreparedImage:
    """Fit an image that the preparation itself drew."""
    fitted = fit_to_grid(image, min_pixels=grid.min_pixels, max_pixels=grid.max_pixels, factor=grid.factor)
    data = encode_png(fitted)
    return PreparedImage(
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
    """Return 256 bits, as 64 hex digits, that hardly change when an image is resized or encoded again.

    A bit says whether one of the 16 x 16 lowest frequencies (cosine transform of 64 x 64 grey cells) is above
    their median. It must also be above a floor (which ImageHash's `phash` does not have): below it an encoder's noise
    would decide. An image without contrast gets zeros.
    """
    cells = np.asarray(image.convert("L").resize((_CELLS, _CELLS), Image.Resampling.BOX), dtype=np.float64)
    low = (_COSINES @ (cells - cells.mean()) @ _COSINES.T).ravel()
    if np.abs(low).max() < _NO_CONTRAST:
        return "0" * 64
    floor = _FLOOR * np.abs(low).max()
    return np.packbits(low > max(float(np.median(low)), floor)).tobytes().hex()
