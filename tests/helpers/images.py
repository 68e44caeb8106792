"""Encoded images for tests."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an RGB image of independent random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth_noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an RGB image of smooth colours that survive JPEG, different for each seed."""
    return noise(6, 6, seed).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Return the bytes of an image in one of Pillow's formats."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise_png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG of independent random pixels."""
    return encoded(noise(width, height, seed))


def plain_png(width: int = 60, height: int = 60, colour: str = "red") -> bytes:
    """Return a PNG of a single colour."""
    return encoded(Image.new("RGB", (width, height), colour))


def sixteen_bit_grey(value: int, side: int = 32) -> bytes:
    """Return a square 16-bit grey PNG, which Pillow cannot write."""
    return _png(side, side, 16, struct.pack(">H", value) * side)


@cache
def black_png(side: int) -> bytes:
    """Return a square black PNG of one bit a pixel: many pixels in few bytes, made in a fraction of Pillow's time."""
    return _png(side, side, 1, bytes((side + 7) // 8))


def one_row_png(samples: list[int], *, bits: int, channels: int = 1, transparent: list[int]) -> bytes:
    """Return a PNG of one row, grey or of three channels, with a transparent colour; a sample has `bits` bits."""
    number = 0
    for sample in samples:
        number = number << bits | sample
    spare = -len(samples) * bits % 8
    row = (number << spare).to_bytes((len(samples) * bits + spare) // 8, "big")
    key = struct.pack(f">{channels}H", *transparent)
    return _png(len(samples) // channels, 1, bits, row, kind=2 if channels == 3 else 0, chunks=_chunk(b"tRNS", key))


def _png(width: int, height: int, bits: int, row: bytes, *, kind: int = 0, chunks: bytes = b"") -> bytes:
    """Return a PNG of equal rows: a zlib stream of filter bytes and samples."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    pixels = zlib.compress((b"\0" + row) * height, level=1)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + chunks + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def many_scans(scans: int, side: int) -> bytes:
    """Return a progressive JPEG whose last scan comes so many times more: a small file that is long to decode."""
    data = encoded(Image.new("RGB", (side, side), (10, 200, 30)), "JPEG", progressive=True, quality=1)
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * scans + data[-2:]


def png_with(name: bytes, content: bytes = b"", *, times: int = 1) -> bytes:
    """Return a PNG of 64 x 64 pixels with a chunk before them, so many times."""
    data = encoded(Image.new("RGB", (64, 64), "red"))
    return data[:33] + _chunk(name, content) * times + data[33:]


def jpeg_with(start: bytes, *, times: int = 1) -> bytes:
    """Return a JPEG of 64 x 64 pixels with bytes before its segments, so many times."""
    data = encoded(Image.new("RGB", (64, 64), "red"), "JPEG")
    return data[:2] + start * times + data[2:]


def repeating_exif(entries: int, size: int) -> bytes:
    """Return EXIF of entries that are each all of its bytes."""
    # An entry: its number, its type (7, bytes), how many, and where.
    listed = b"".join(struct.pack(">HHII", number, 7, size - 8, 8) for number in range(1000, 1000 + entries))
    return (b"MM\0*" + struct.pack(">IH", 8, entries) + listed + bytes(4)).ljust(size, b"\0")
