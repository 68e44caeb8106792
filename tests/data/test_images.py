"""Image guards and the model's pixel grid."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from tests.conftest import shared_data
from tests.helpers.images import (
    black_png,
    encoded,
    jpeg_with,
    many_scans,
    noise,
    one_row_png,
    png_with,
    repeating_exif,
    sixteen_bit_grey,
    smooth_noise,
)
from vlm_rl.data.images import TEST_LIMITS, ImageLimits, decode_image, encode_png, fit_to_grid, grid_size
from vlm_rl.errors import UserError

PROFILE = b"a\0\0" + zlib.compress(bytes(1000))  # of a PNG: its name, how it is packed
RANGE = {"min_pixels": 3136, "max_pixels": 1_003_520}


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_pixels_survive(kind):
    image = noise(40, 30)
    decoded = decode_image(encoded(image, kind, lossless=True), where="x")
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), np.asarray(image))


@pytest.mark.parametrize("size", [(1, 1), (1, 90), (90, 1), (31, 17), (128, 64)])
@pytest.mark.parametrize("kind", ["noise", "drawing"])
def test_the_png_that_is_written_holds_these_very_pixels(size, kind):
    image = noise(*size, seed=sum(size))
    if kind == "drawing":  # flat colours, and differences that fall below zero
        image = image.quantize(3).convert("RGB")
    data = encode_png(image)
    opened = Image.open(io.BytesIO(data))
    assert (opened.format, opened.mode, opened.size) == ("PNG", "RGB", size)
    assert np.array_equal(np.asarray(opened), np.asarray(image))
    other = torchvision.io.decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8))  # libpng itself
    assert np.array_equal(other.permute(1, 2, 0).numpy(), np.asarray(image))


def test_transparency_is_laid_on_white():
    # Black at alpha 0 over white is white; at alpha 255 black; at 128 it is 255 * (1 - 128/255) = 127.
    alphas = np.array([0, 255, 128], dtype=np.uint8).repeat(30)[None, :].repeat(30, axis=0)
    rgba = np.zeros((30, 90, 4), dtype=np.uint8)
    rgba[..., 3] = alphas
    pixels = np.asarray(decode_image(encoded(Image.fromarray(rgba)), where="x"))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 30].tolist() == [0, 0, 0]
    assert pixels[0, 60].tolist() == [127, 127, 127]


def test_palette_with_a_transparent_entry_is_laid_on_white():
    image = Image.new("P", (30, 30), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    opaque = decode_image(encoded(image), where="x")
    clear = decode_image(encoded(image, transparency=1), where="x")
    assert opaque.getpixel((0, 0)) == (200, 100, 50)
    assert clear.getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_becomes_rgb():
    # No ink at all is white, full black ink is black.
    white = decode_image(encoded(Image.new("CMYK", (32, 32), (0, 0, 0, 0)), "JPEG"), where="x")
    black = decode_image(encoded(Image.new("CMYK", (32, 32), (0, 0, 0, 255)), "JPEG"), where="x")
    assert white.getpixel((9, 9)) == (255, 255, 255)
    assert black.getpixel((9, 9)) == (0, 0, 0)


def test_sixteen_bit_grey_keeps_its_brightness():
    # 51400 = 200 * 257, so exactly 200 of 255; a clipping conversion would give 255.
    assert decode_image(sixteen_bit_grey(51400), where="x").getpixel((0, 0)) == (200, 200, 200)


def test_exif_orientation_is_applied_and_metadata_dropped():
    image = Image.new("RGB", (60, 30), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    exif[0x010E] = "a secret caption"
    decoded = decode_image(encoded(image, "JPEG", exif=exif), where="x")
    assert decoded.size == (30, 60)
    assert not decoded.info
    assert not decoded.getexif()
    assert b"secret" not in encode_png(decoded)


def test_broken_exif_does_not_cost_the_picture():
    data = encoded(Image.new("RGB", (60, 30), "red"), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff junk" * 500)
    assert decode_image(data, where="x").size == (60, 30)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})]
)
def test_every_cut_of_a_file_is_refused(kind, options):
    data = encoded(noise(64, 48), kind, **options)
    decode_image(data, where="whole")
    for length in [*range(1, len(data), 97), len(data) - 1]:
        with pytest.raises(UserError, match=r"^row 3: "):
            decode_image(data[:length], where="row 3")


def test_a_png_with_another_bit_in_its_palette_is_refused():
    """Its pixels are whole: nothing but the checksum of the chunk tells."""
    data = encoded(noise(40, 30).quantize(16))
    first = data.index(b"PLTE") + 4
    for position in (first, first + 47, first + 48):  # the first colour, the last one, and the checksum itself
        with pytest.raises(UserError, match=r"^row 3: the image cannot be decoded"):
            decode_image(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], where="row 3")
    decode_image(data, where="row 3")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"just some text saved as a.png", "not a PNG, JPEG or WEBP"),
        (encoded(Image.new("RGB", (64, 64)), "GIF"), "not a PNG, JPEG or WEBP"),
        (encoded(Image.new("RGB", (64, 64)), "BMP"), "not a PNG, JPEG or WEBP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG, JPEG or WEBP"),
        (encoded(Image.new("RGB", (1, 1))), "each side"),
        (encoded(Image.new("RGB", (28, 5600))), "aspect"),
        (black_png(9000), "limit is 40000000"),
        (black_png(20_000), "pixels"),
    ],
    ids=["empty", "text", "gif", "bmp", "svg", "1x1", "strip", "9000", "20000"],
)
def test_bad_images_are_refused_with_the_place(data, message):
    with pytest.raises(UserError, match=message) as error:
        decode_image(data, where="set.parquet row 7")
    assert str(error.value).startswith("set.parquet row 7: ")


def test_pixel_and_byte_limits_are_checked_before_decoding(monkeypatch):
    from PIL import ImageFile

    def refuse(*args):
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    data = encoded(Image.new("RGB", (100, 100)))
    with pytest.raises(UserError, match="10000 pixels; the limit is 9999"):
        decode_image(data, where="x", limits=ImageLimits(max_pixels=9999))
    with pytest.raises(UserError, match="bytes; the limit is 10"):
        decode_image(data, where="x", limits=ImageLimits(max_bytes=10))


@pytest.mark.parametrize(("scans", "side"), [(1200, 64), (300, 2000)])
def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(monkeypatch, scans, side):
    data = many_scans(scans, side)
    assert len(data) < 100_000
    with pytest.raises(UserError, match=rf"^x: the image is a JPEG of {scans + 10} scans over {side * side} pixels"):
        decode_image(data, where="x")
    monkeypatch.setattr("vlm_rl.data.images._MAX_SCANS", scans + 10)
    monkeypatch.setattr("vlm_rl.data.images._MAX_SCANNED_PIXELS", 10**10)
    if side < 100:
        assert decode_image(data, where="x").size == (side, side)


@pytest.mark.parametrize(
    ("bits", "samples", "key", "expected"),
    [
        (1, [0, 1], 0, [255, 255]),
        (2, [0, 1, 2, 3], 1, [0, 255, 170, 255]),
        (4, [5, 10], 5, [255, 170]),
        (8, [5, 10], 5, [255, 10]),
        (16, [5 * 257, 10 * 257, 5 * 257 + 1], 5 * 257, [255, 10, 5]),
    ],
)
def test_the_transparent_grey_of_a_png_is_white_at_any_depth(bits, samples, key, expected):
    image = decode_image(one_row_png(samples, bits=bits, transparent=[key]), where="x", limits=TEST_LIMITS)
    assert np.asarray(image).tolist() == [[[value] * 3 for value in expected]]


def test_the_transparent_colour_of_a_png_of_16_bits_is_white():
    key, other = [0x0201, 0x0403, 0x0605], [0x0807, 0x0A09, 0x0C0B]
    data = one_row_png([*key, *other], bits=16, channels=3, transparent=key)
    assert np.asarray(decode_image(data, where="x", limits=TEST_LIMITS)).tolist() == [[[255] * 3, [8, 10, 12]]]


def test_a_png_whose_pixels_are_a_part_of_it_is_refused():
    """Pillow would move the pixels into the frame that an animation's chunk names."""
    plain = png_with(b"", times=0)
    parts = (
        png_with(b"acTL", struct.pack(">II", 1, 0)),
        png_with(b"fcTL", struct.pack(">IIIIIHHBB", 0, 1, 1, 9, 9, 0, 0, 0, 0)),
    )
    data = plain[:33] + b"".join(part[33 : len(part) - len(plain) + 33] for part in parts) + plain[33:]
    with pytest.raises(UserError, match=r"^x: the image is an animation's frame of a part of it"):
        decode_image(data, where="x")


@pytest.mark.parametrize(
    ("few", "many", "message"),
    [
        (png_with(b"teSt", times=10_000), png_with(b"teSt", times=20_000), "a PNG of more than 20000 chunks"),
        (png_with(b"iCCP", PROFILE, times=16), png_with(b"iCCP", PROFILE, times=17), "more than 16 colour profiles"),
        (jpeg_with(b"\xff\xfe\0\2", times=10_000), jpeg_with(b"\xff\xfe\0\2", times=20_000), "more than 20000 segm"),
        (jpeg_with(b"\xff" * 60_000), jpeg_with(b"\xff" * 70_000), "65536 bytes between them"),
        (jpeg_with(b"\xff\xd0\1\1" * 9_000), jpeg_with(b"\xff\xf0\0\x99" + bytes(70_000)), "65536 bytes between"),
        (
            png_with(b"eXIf", repeating_exif(5, 1_000_000)),
            png_with(b"eXIf", repeating_exif(300, 1_000_000)),
            "1000000 bytes of EXIF, which may be read many times",
        ),
        (
            jpeg_with(b"\xff\xe1\x75\x38Exif\0\0" + repeating_exif(5, 30_000)),
            jpeg_with(b"\xff\xe1\x75\x38Exif\0\0" + repeating_exif(5, 30_000), times=3),
            "more than 65536 bytes of EXIF",
        ),
        (
            png_with(b"tEXt", b"Raw profile type exif\0\nexif\n 9000\n" + repeating_exif(5, 9_000).hex().encode()),
            png_with(b"tEXt", b"Raw profile type exif\0\nexif\n 70000\n" + repeating_exif(5, 70_000).hex().encode()),
            "70006 bytes of EXIF",
        ),
    ],
    ids=["chunks", "profiles", "segments", "fill", "junk", "eXIf", "Exif", "text"],
)
def test_what_takes_long_before_the_pixels_is_refused(few: bytes, many: bytes, message: str) -> None:
    assert decode_image(few, where="x").size == (64, 64)
    with pytest.raises(UserError, match=f"^x: .*{message}"):
        decode_image(many, where="x")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_are_refused(kind):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(UserError, match="animated"):
        decode_image(data, where="x")


def test_phone_photo_with_a_second_picture_gives_the_first():
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("white", "black"))
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert decode_image(data, where="x").getpixel((5, 5)) == (255, 255, 255)


def test_small_benchmark_images_are_scaled_up_not_refused():
    data = encoded(Image.new("RGB", (10, 20), "red"))
    with pytest.raises(UserError, match="each side"):
        decode_image(data, where="x")
    fitted = fit_to_grid(decode_image(data, where="x", limits=TEST_LIMITS), **RANGE)
    assert min(fitted.size) >= 28


def random_sizes(count: int) -> list[tuple[int, int]]:
    """Sides from 15 to about 3,000 px, log-uniform, aspect below 200."""
    rng = np.random.default_rng(7)
    sizes: list[tuple[int, int]] = []
    while len(sizes) < count:
        height, width = np.exp(rng.uniform(np.log(15), np.log(3000), 2)).astype(int).tolist()
        if max(height, width) < 200 * min(height, width):
            sizes.append((height, width))
    return sizes


@pytest.mark.parametrize("limits", [(3136, 1_003_520), (200_704, 1_003_520), (3136, 12_845_056)])
def test_grid_equals_the_processors_on_500_sizes(limits):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    low, high = limits
    for height, width in random_sizes(500):
        ours = grid_size(height, width, min_pixels=low, max_pixels=high)
        assert ours == smart_resize(height, width, 28, low, high), (height, width)


def test_grid_vectors():
    # Published examples (height, width): 480x640 gives 391 tokens, 1080x1920 gives 2691.
    wide = {"min_pixels": 3136, "max_pixels": 12_845_056}
    assert grid_size(480, 640, **wide) == (476, 644)
    assert grid_size(1080, 1920, **wide) == (1092, 1932)
    assert grid_size(1080, 1920, **RANGE) == (728, 1316)
    assert grid_size(70, 70, **wide) == (56, 56)  # 70 / 28 = 2.5 rounds to the even 2


def test_grid_is_stable_where_one_pass_is_not():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    once = smart_resize(28, 5572, 28, 3136, 100_000)
    assert once[0] * once[1] > 100_000  # the trap: one pass leaves the range
    height, width = grid_size(28, 5572, min_pixels=3136, max_pixels=100_000)
    assert height * width <= 100_000
    assert smart_resize(height, width, 28, 3136, 100_000) == (height, width)


def test_impossible_pixel_ranges_are_an_error():
    with pytest.raises(UserError, match="need 784"):
        grid_size(100, 100, min_pixels=100, max_pixels=1000)
    with pytest.raises(UserError, match="need 784"):
        grid_size(100, 100, min_pixels=5000, max_pixels=4000)
    with pytest.raises(UserError, match="no 28-pixel grid"):
        grid_size(100, 100, min_pixels=800, max_pixels=1000)  # one cell is 784, two are 1568


def test_image_on_the_grid_is_left_alone():
    image = noise(84, 84)
    assert fit_to_grid(image, **RANGE) is image
    assert fit_to_grid(noise(90, 80), **RANGE).size == (84, 84)


def test_the_models_own_processor_does_not_resize_again(tiny_model: Path):
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tiny_model)
    for height, width in random_sizes(25):
        image = fit_to_grid(noise(width, height), **RANGE)
        grid = processor(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert grid == [1, image.height // 14, image.width // 14]


@pytest.mark.parametrize("folder", ["mathvision/images", "dynamath/trial1", "wemath", "logicvista/images"])
def test_real_samples_decode_and_fit(folder):
    paths = sorted(p for p in (shared_data() / folder).rglob("*") if p.suffix in (".png", ".jpg"))[:12]
    assert paths
    for path in paths:
        image = decode_image(path.read_bytes(), where=path.name, limits=TEST_LIMITS)
        fitted = fit_to_grid(image, **RANGE)
        assert fitted.width % 28 == fitted.height % 28 == 0
        assert 3136 <= fitted.width * fitted.height <= 1_003_520


@pytest.mark.parametrize("kind", ["WEBP", "palette", "CMYK", "RGBA", "grey"])
@pytest.mark.parametrize("image", ["made", "real"])
def test_the_same_image_in_an_unusual_format(kind, image):
    if image == "real":
        original = Image.open(min((shared_data() / "mathvision/images").glob("*.jpg"))).convert("RGB")
    else:
        original = smooth_noise(300, 200)
    data = {
        "WEBP": lambda: encoded(original, "WEBP", lossless=True),
        "palette": lambda: encoded(original.quantize(256)),
        "CMYK": lambda: encoded(original.convert("CMYK"), "JPEG", quality=95),
        "RGBA": lambda: encoded(original.convert("RGBA")),
        "grey": lambda: encoded(original.convert("L")),
    }[kind]()
    decoded = decode_image(data, where="x")
    stored = {"grey": lambda: original.convert("L"), "palette": lambda: original.quantize(256)}
    reference = stored.get(kind, lambda: original)().convert("RGB")
    error = np.abs(np.asarray(decoded, dtype=int) - np.asarray(reference, dtype=int)).mean()
    assert decoded.size == original.size
    assert error <= {"CMYK": 4}.get(kind, 0)
