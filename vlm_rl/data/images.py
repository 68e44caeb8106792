"""Turn hostile bytes into clean RGB pixels on the model's grid.

    image = decode_image(data, where="train.parquet row 7 image 0")
    image = fit_to_grid(image, min_pixels=3136, max_pixels=1_003_520)

Every image of training, evaluation and the demo passes through here once and is never resized again.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, JpegImagePlugin

from vlm_rl.errors import UserError

T = TypeVar("T")

GRID = 28
"""Pixels of a merged visual token's side in Qwen2.5-VL: patch 14 x merge 2."""

MIN_TOKENS, MAX_TOKENS = 4, 16_384
"""Merged visual tokens of an image; with fewer or more qwen-vl-utils would resize it again."""

MAX_ASPECT = 200
"""Long side over short side must stay below this; Qwen's smart_resize refuses more."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of an image; bytes and pixels are checked before anything is decoded."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 40_000_000
    min_side: int = GRID  # pixels; smaller images of a benchmark are scaled up instead (TEST_LIMITS)


TEST_LIMITS = ImageLimits(min_side=1)
"""For benchmark rows, which must all be kept: tiny images are allowed and scaled up."""

DEFAULT_LIMITS = ImageLimits()

_PNG_START = b"\x89PNG\r\n\x1a\n"
_JPEG_SCAN = b"\xff\xda"  # begins a scan; compressed pixels never hold it
_MAX_SCANS, _MAX_SCANNED_PIXELS = 1000, 10**9  # an encoder makes at most some dozens; about 2 seconds
_MAX_PARTS = 20_000  # chunks of a PNG, which usually hold 8 KiB each, or segments before a JPEG's first scan
_MAX_PROFILES = 16  # of a PNG, which may have one; each unpacks to 1 MiB
_MAX_PADDING = 1 << 16  # bytes of a JPEG between its segments, which Pillow reads one by one
_MAX_EXIF = 1 << 16  # bytes, as in a JPEG
_MAX_EXIF_COPIES = 1 << 28  # bytes that its entries are, each of which may be all of it
_FILL = re.compile(rb"\xff+")
_PNG_END = b"IEND\xae\x42\x60\x82"  # the closing chunk with its checksum


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image, and what its file was."""

    image: Image.Image  # RGB without metadata
    format: str  # Pillow's name: PNG, JPEG or WEBP
    is_plain: bool  # whether the file holds exactly these pixels as upright RGB, and no metadata


def decode_image(data: bytes, *, where: str, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode an encoded PNG, JPEG or WEBP into an 8-bit RGB image without metadata.

    The content decides the format, never a name. EXIF orientation is applied and transparency laid on white;
    colour profiles are dropped without being applied. Truncated files and animations are refused.
    Raises UserError starting with `where`.
    """
    return decode(data, where=where, limits=limits).image


def decode(data: bytes, *, where: str, limits: ImageLimits = DEFAULT_LIMITS) -> Decoded:
    """Decode as `decode_image` does, and also return what the file was."""
    kind = _sniff(data, where=where, limits=limits)
    if kind != "WEBP":  # whose parts are read in C
        (_check_chunks if kind == "PNG" else _check_segments)(data, where=where)
    with warnings.catch_warnings():
        # Pillow warns of huge images and broken EXIF; our own limits decide, and an error says so.
        warnings.simplefilter("ignore")
        image = _guarded(lambda: Image.open(io.BytesIO(data), formats=[kind]), where)
        _check_shape(image, where=where, limits=limits)
        if kind == "JPEG":
            _check_scans(data, image.width * image.height, where=where)
        if kind == "PNG":
            _check_frame(image, where=where)
            _scale_transparency(image)
            # load() ignores the chunks' checksums, and so takes some files that are cut or changed
            _guarded(Image.open(io.BytesIO(data), formats=[kind]).verify, where)
        _guarded(image.load, where)
        metadata = set(image.info) & {"exif", "icc_profile", "xmp", "comment", "transparency", "mpoffset"}
        is_plain = image.mode == "RGB" and not metadata and not getattr(image, "text", None)
        _check_exif(image, where=where)
        upright = _guarded(lambda: _to_rgb(_upright(image)), where)
    # A new image of the pixels alone: no EXIF, text chunks or profile travel on.
    bare = Image.new("RGB", upright.size)
    bare.paste(upright)
    return Decoded(bare, kind, is_plain)


def fit_to_grid(image: Image.Image, *, min_pixels: int, max_pixels: int, factor: int = GRID) -> Image.Image:
    """Resize once (bicubic) to `grid_size`; an image that has this size already is returned itself.

    Args:
        image: the image.
        min_pixels: least area of the result.
        max_pixels: largest area of the result.
        factor: pixels that both sides are multiples of.

    Raises UserError as `grid_size` does.
    """
    height, width = grid_size(image.height, image.width, min_pixels=min_pixels, max_pixels=max_pixels, factor=factor)
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def check_pixel_range(min_pixels: int, max_pixels: int, *, factor: int) -> None:
    """Raise UserError unless every image between these pixels has MIN_TOKENS to MAX_TOKENS on a grid of `factor`."""
    area = factor * factor
    low, high = (MIN_TOKENS - 1) * area + 1, MAX_TOKENS * area  # an image is made of whole tokens
    if not low <= min_pixels <= max_pixels <= high:
        raise UserError(
            f"min_pixels {min_pixels} and max_pixels {max_pixels}: with visual tokens of {factor} x {factor} pixels "
            f"need {low} <= min_pixels <= max_pixels <= {high}"
        )


def grid_size(height: int, width: int, *, min_pixels: int, max_pixels: int, factor: int = GRID) -> tuple[int, int]:
    """Return the (height, width) in pixels at which Qwen2-VL's `smart_resize` changes nothing any more.

    A single pass can leave the pixel range (a 28 x 5600 strip under a small max_pixels), and a model's
    processor would then resize the image a second time. So the rule is repeated until it is stable;
    usually that is once.

    Args:
        height: of the image, in pixels.
        width: in pixels too.
        min_pixels: least area of the result.
        max_pixels: largest area of the result.
        factor: pixels that both sides are multiples of.

    Raises UserError if the pixel range holds no stable size.
    """
    if not factor * factor <= min_pixels <= max_pixels:
        raise UserError(f"min_pixels {min_pixels} and max_pixels {max_pixels}: need {factor * factor} <= min <= max")
    size = (height, width)
    for _ in range(32):
        fitted = _smart_resize(*size, factor, min_pixels, max_pixels)
        if fitted == size:
            return size
        size = fitted
    raise UserError(
        f"no {factor}-pixel grid for a {width}x{height} image lies between {min_pixels} and {max_pixels} "
        "pixels; raise max_pixels or lower min_pixels"
    )


def encode_png(image: Image.Image) -> bytes:
    """Encode an image losslessly for a prepared set, at the fastest compression."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def encode_jpeg(image: Image.Image) -> bytes:
    """Encode a resized photograph for a prepared set: quality 95 without chroma subsampling."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _smart_resize(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Compute a pass of transformers.models.qwen2_vl's `smart_resize`; round() is banker's in both."""
    fitted_h = round(height / factor) * factor
    fitted_w = round(width / factor) * factor
    if fitted_h * fitted_w > high:
        beta = math.sqrt(height * width / high)
        fitted_h = max(factor, math.floor(height / beta / factor) * factor)
        fitted_w = max(factor, math.floor(width / beta / factor) * factor)
    elif fitted_h * fitted_w < low:
        beta = math.sqrt(low / (height * width))
        fitted_h = math.ceil(height * beta / factor) * factor
        fitted_w = math.ceil(width * beta / factor) * factor
    return fitted_h, fitted_w


def _sniff(data: bytes, *, where: str, limits: ImageLimits) -> str:
    """Return Pillow's name of the format, judged by the first bytes."""
    if not data:
        raise UserError(f"{where}: the image is empty (0 bytes)")
    if len(data) > limits.max_bytes:
        raise UserError(f"{where}: the image has {len(data)} bytes; the limit is {limits.max_bytes}")
    if data.startswith(_PNG_START):
        if _PNG_END not in data:  # Pillow is content once the last row is there
            raise UserError(f"{where}: the image cannot be decoded: the PNG file is truncated")
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise UserError(f"{where}: not a PNG, JPEG or WEBP image (it starts with {data[:8]!r}); convert it first")


def _guarded(step: Callable[[], T], where: str) -> T:
    """Run a step of Pillow on hostile bytes; whatever it raises becomes a UserError."""
    try:
        return step()
    except Image.DecompressionBombError:
        raise UserError(f"{where}: the image has far more pixels than any limit allows") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, zlib.error and others
        raise UserError(f"{where}: the image cannot be decoded: {error or type(error).__name__}") from None


def open_packed(images: Iterable[bytes]) -> tuple[Image.Image, ...]:
    """Return images of an environment, which this program has fitted and packed as PNG, as the sampler gets them."""
    return tuple(Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB") for data in images)


def _check_shape(image: Image.Image, *, where: str, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise UserError(
            f"{where}: the image is {width}x{height}, {width * height} pixels; the limit is {limits.max_pixels}"
        )
    if min(width, height) < limits.min_side:
        raise UserError(f"{where}: the image is {width}x{height}; each side must have {limits.min_side} pixels")
    if max(width, height) >= MAX_ASPECT * min(width, height):
        raise UserError(f"{where}: the image is {width}x{height}; the aspect ratio must be below {MAX_ASPECT}")
    # A phone's JPEG may hold a second image behind the first (MPO); the first is the photo.
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise UserError(f"{where}: the image is animated, and which frame is meant is unknown; keep a single frame")


def _check_chunks(data: bytes, *, where: str) -> None:
    """Refuse a PNG of so many chunks that reading them takes longer than its pixels."""
    position, count, profiles = len(_PNG_START), 0, 0
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        position, count, profiles = position + 12 + length, count + 1, profiles + (name == b"iCCP")
        if count > _MAX_PARTS:
            raise UserError(f"{where}: the image is a PNG of more than {_MAX_PARTS} chunks; save it again")
        if profiles > _MAX_PROFILES:
            raise UserError(
                f"{where}: the image is a PNG of more than {_MAX_PROFILES} colour profiles; save it again"
            )
        if name == b"IEND":
            return


def _check_frame(image: Image.Image, *, where: str) -> None:
    """Refuse a PNG whose pixels Pillow would put into a part of the image, as those of an animation's frame."""
    if any(tile[1] != (0, 0, *image.size) for tile in getattr(image, "tile", ())):
        raise UserError(f"{where}: the image is an animation's frame of a part of it; keep a single whole frame")


def _scale_transparency(image: Image.Image) -> None:
    """Bring a PNG's transparent colour, in samples of the file's bits, to those that Pillow makes of its pixels."""
    if (key := image.info.get("transparency")) is None:  # a sample, or one of each channel
        return
    samples = next((tile[3] for tile in getattr(image, "tile", ())), "")
    if samples in ("L;2", "L;4"):
        most = 2 ** int(samples[-1]) - 1
        image.info["transparency"] = (key & most) * 255 // most
    elif samples == "RGB;16B":  # of pixels too, the high byte is what is kept
        image.info["transparency"] = tuple(sample >> 8 for sample in key)


def _check_segments(data: bytes, *, where: str) -> None:
    """Refuse a JPEG of so many segments or fill bytes, or so much EXIF, that what is before its pixels takes long."""
    position, count, padding, exif = 2, 0, 0, 0
    while (start := data.find(b"\xff", position)) >= 0 and (fill := _FILL.match(data, start)):
        after = fill.end()
        marker = data[after : after + 1]
        handler = JpegImagePlugin.MARKER.get(0xFF00 + (marker or b"\0")[0], ("", "", None))[2]
        if marker in (b"", _JPEG_SCAN[1:]):
            return
        count, padding = count + 1, padding + after - 1 - position
        position = after + 1
        if handler is not None:  # those without one are read as if nothing belonged to them
            (length,) = struct.unpack_from(">H", data, position) if position + 2 <= len(data) else (0,)
            exif += length if data.startswith(b"Exif\0\0", position + 2) else 0
            position += max(length, 2)
        if count > _MAX_PARTS or padding > _MAX_PADDING:
            raise UserError(
                f"{where}: the image is a JPEG with more than {_MAX_PARTS} segments or {_MAX_PADDING} bytes between "
                "them; save it again with an ordinary encoder"
            )
        if exif > _MAX_EXIF:
            raise UserError(f"{where}: the image has more than {_MAX_EXIF} bytes of EXIF; save it again without")


def _check_exif(image: Image.Image, *, where: str) -> None:
    """Refuse EXIF whose entries may each be a copy of far too much."""
    exif: bytes = (image.info.get("exif") or b"").removeprefix(b"Exif\0\0")
    as_text = len(image.info.get("Raw profile type exif") or "") // 2  # two digits a byte, in a PNG's text
    order = "<" if exif.startswith(b"II") else ">"
    copies = 0
    with suppress(struct.error):  # what cannot be read says nothing about orientation either
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        copies = len(exif) * struct.unpack_from(f"{order}H", exif, start)[0]
    if copies > _MAX_EXIF_COPIES or as_text > _MAX_EXIF:
        size = max(len(exif), as_text)
        raise UserError(f"{where}: the image has {size} bytes of EXIF, which may be read many times; save it without")


def _check_scans(data: bytes, pixels: int, *, where: str) -> None:
    """Refuse a progressive JPEG of so many scans that decoding takes minutes: each goes over all pixels again."""
    scans = data.count(_JPEG_SCAN)
    if scans > _MAX_SCANS or scans * pixels > _MAX_SCANNED_PIXELS:
        raise UserError(
            f"{where}: the image is a JPEG of {scans} scans over {pixels} pixels, which takes long to decode; "
            "save it again with an ordinary encoder"
        )


def _upright(image: Image.Image) -> Image.Image:
    with suppress(Exception):  # unreadable EXIF says nothing about orientation; the pixels are still good
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own convert() would clip it to white
        grey = np.asarray(image).astype(np.float64) / 257.0
        if (key := image.info.get("transparency")) is not None:
            grey[np.asarray(image) == key] = 255.0
        return Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
