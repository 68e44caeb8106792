"""Prepare an image: kept where possible, else fitted to the grid, encoded again and hashed."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import shared_data
from tests.helpers.images import encoded, smooth_noise
from vlm_rl.data.images import decode_image, encode_jpeg
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data_prep.duplicates import NEAR_BITS
from vlm_rl.data_prep.prepared_images import Grid, perceptual_hash, prepare_image
from vlm_rl.data_prep.readers.image_files import ImageBytes
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

GRID = Grid(3136, 1_003_520)


def fitted(data: bytes, grid: Grid = GRID, *, test_only: bool = False):
    return prepare_image(ImageBytes(data), where="x", grid=grid, test_only=test_only)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_on_the_grid_keeps_its_bytes(kind) -> None:
    data = encoded(smooth_noise(84, 112), kind)
    picture = fitted(data)
    assert picture.data == data and picture.is_kept
    assert (picture.width, picture.height) == (84, 112)


@pytest.mark.parametrize(("kind", "stored"), [("JPEG", "JPEG"), ("PNG", "PNG"), ("WEBP", "PNG")])
def test_an_image_off_the_grid_is_encoded_again_in_its_own_format(kind, stored) -> None:
    data = encoded(smooth_noise(100, 120), kind)
    picture = fitted(data)
    image = Image.open(io.BytesIO(picture.data))
    assert (image.format, image.mode, image.size) == (stored, "RGB", (112, 112))  # 100/28 = 3.57, 120/28 = 4.29
    assert (picture.original_width, picture.original_height, picture.original_format) == (100, 120, kind)
    assert picture.original_sha256 == hashlib.sha256(data).hexdigest() and not picture.is_kept


def test_a_resized_jpeg_has_quality_95_and_full_colour() -> None:
    stored = Image.open(io.BytesIO(fitted(encoded(smooth_noise(100, 100), "JPEG", quality=60)).data))
    reference = Image.open(io.BytesIO(encode_jpeg(smooth_noise(84, 84))))
    assert stored.quantization == reference.quantization  # the tables of quality 95
    assert [layer[1:3] for layer in stored.layer] == [(1, 1)] * 3  # 4:4:4


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK"])
def test_other_modes_on_the_grid_become_rgb(mode) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = smooth_noise(84, 84).quantize(16) if mode == "P" else smooth_noise(84, 84).convert(mode)
    picture = fitted(encoded(image, kind))
    assert Image.open(io.BytesIO(picture.data)).mode == "RGB" and not picture.is_kept


def test_exif_is_applied_and_dropped() -> None:
    exif = Image.Exif()
    exif[274] = 6  # turn by 90 degrees
    picture = fitted(encoded(smooth_noise(84, 112), "JPEG", exif=exif))
    assert (picture.width, picture.height) == (112, 84)
    assert not Image.open(io.BytesIO(picture.data)).getexif()


def test_a_different_patch_size_gives_a_different_grid() -> None:
    picture = fitted(encoded(smooth_noise(100, 100), "PNG"), Grid(4096, 1_003_520, 32))
    assert (picture.width, picture.height) == (96, 96)


def test_training_takes_what_was_prepared_for_its_models_grid(family_model: Callable[[str], Path]) -> None:
    """Qwen3-VL's visual tokens are 32 pixels wide, and the default range of pixels holds for them too."""
    builder = PromptBuilder(family_model("qwen3_vl"), template=TEMPLATES["plain"])
    grid = Grid(builder.min_pixels, builder.max_pixels, factor=2 * builder.patch_size)
    grid.check()
    for width, height in ((40, 40), (333, 77), (1600, 1200)):
        picture = fitted(encoded(smooth_noise(width, height), "PNG"), grid)
        problem = Problem("p", "<image>?", (picture.data,), "1", "integer")
        prompt = builder.build(problem)
        assert prompt.images[0].size == (picture.width, picture.height), "it is not resized again"
        assert (prompt.ids == builder.image_token_id).sum() == picture.width * picture.height // 32**2 >= 4


@pytest.mark.parametrize(("low", "high"), [(3 * 1024, 10_000), (10_000, 5_000), (3136, 16_384 * 1024 + 1)])
def test_ranges_that_training_refuses_are_refused(low: int, high: int, family_model: Callable[[str], Path]) -> None:
    for refused in (
        lambda: Grid(low, high, 32).check(),
        lambda: PromptBuilder(family_model("qwen3_vl"), template=TEMPLATES["plain"], min_pixels=low, max_pixels=high),
    ):
        with pytest.raises(UserError, match="32 x 32 pixels need 3073 <= min_pixels"):
            refused()


def test_real_images_differ_from_each_other_and_not_from_their_copies() -> None:
    files = [f for name in ("logicvista", "mathvision") for f in sorted((shared_data() / name / "images").iterdir())]
    chosen = {}
    for file in files[:: len(files) // 20]:
        picture = fitted(file.read_bytes(), test_only=True)
        chosen[picture.original_sha256] = (int(picture.phash, 16), decode_image(picture.data, where=file.name))
    assert len(chosen) >= 18
    hashes = [phash for phash, _ in chosen.values()]
    assert min((a ^ b).bit_count() for i, a in enumerate(hashes) for b in hashes[:i]) > NEAR_BITS
    for phash, image in list(chosen.values())[::3]:
        for factor, quality in ((0.5, 85), (0.93, 60), (1.0, 60), (1.3, 85)):
            size = max(28, int(image.width * factor)), max(28, int(image.height * factor))
            copy = fitted(encoded(image.resize(size), "JPEG", quality=quality))
            assert (phash ^ int(copy.phash, 16)).bit_count() <= NEAR_BITS, (factor, quality)


@pytest.mark.parametrize("size", [(300, 200), (999, 700)])
def test_the_perceptual_hash_survives_sizes_and_formats(size) -> None:
    image = smooth_noise(600, 400, seed=1)
    other = Image.open(io.BytesIO(encoded(image.resize(size), "JPEG", quality=75)))
    near = (int(perceptual_hash(image), 16) ^ int(perceptual_hash(other), 16)).bit_count()
    far = (int(perceptual_hash(image), 16) ^ int(perceptual_hash(smooth_noise(600, 400, seed=2)), 16)).bit_count()
    assert near <= NEAR_BITS < far


def test_bytes_that_are_no_image_are_a_bad_row() -> None:
    with pytest.raises(RowError, match="not a PNG, JPEG or WEBP"):
        fitted(b"<svg/>")
