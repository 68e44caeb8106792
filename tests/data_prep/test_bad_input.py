"""Give preparation bad images, rows and archives: each is counted and named, and good rows stay as they are."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.helpers.images import black_png, encoded, sixteen_bit_grey, smooth_noise
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl.data.images import decode_image, encode_png
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.image_files import ZipMember
from vlm_rl.data_prep.records import DroppedRow, RowError, convert_rows
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.toy.virl_layout import write_virl


def files_below(folder: Path) -> Counter[str]:
    return Counter(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


SET_FILES = Counter(["", "/data.parquet", "/manifest.json", "/dropped.jsonl", "/report.html", "/README.md"])


# -- pictures --------------------------------------------------------------------------------------


@cache
def bad_pictures() -> dict[str, bytes]:
    good = encode_png(smooth_noise(84, 84))
    bomb = PngInfo()
    bomb.add_text("Comment", "a" * 10_000_000, zip=True)  # 10 kB that unpack to 10 MB
    return {
        "cut.png": good[: len(good) // 2],
        "closed.png": good[: len(good) - 30] + good[-12:],  # cut inside its data, with the end of a whole file
        "cut.jpg": encoded(smooth_noise(400, 400), "JPEG")[:3000],
        "empty.png": b"",
        "text.png": b"only text",
        "gif.png": encoded(smooth_noise(84, 84), "GIF"),
        "animated.webp": encoded(
            smooth_noise(84, 84), "WEBP", save_all=True, append_images=[smooth_noise(84, 84, seed=3)]
        ),
        "one.png": encode_png(Image.new("RGB", (1, 1))),
        "strip.png": encode_png(Image.new("RGB", (1, 5000))),
        "9000.png": black_png(9000),
        "20000.png": black_png(20_000),
        "comment.png": encoded(smooth_noise(84, 84), "PNG", pnginfo=bomb),
    }


@cache
def odd_pictures() -> dict[str, bytes]:
    """Unusual and sound."""
    image, turned, huge = smooth_noise(84, 112), Image.Exif(), Image.Exif()
    turned[274] = 6  # turn by 90 degrees
    huge[0x010E] = "a secret caption" * 200_000  # 3 MB
    clear = image.quantize(16)
    clear.info["transparency"] = 0
    return {
        "cmyk.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "sixteen.png": sixteen_bit_grey(51400, 84),
        "palette.png": encoded(clear, "PNG"),
        "turned.jpg": encoded(image, "JPEG", exif=turned),
        "huge-exif.png": encoded(image, "PNG", exif=huge),
        "jpeg.png": encoded(image, "JPEG"),  # the content tells the format
        "lossless.webp": encoded(image, "WEBP", lossless=True),
        "second.jpg": encoded(image, "MPO", save_all=True, append_images=[smooth_noise(84, 112, seed=9)]),
    }


def mixed_rows() -> tuple[list[dict], list[dict], dict[str, bytes]]:
    """(good rows, the same with bad ones between them, pictures)."""
    pictures = {f"{n}.{kind}": encoded(smooth_noise(90 + n, 80, seed=n), {"jpg": "JPEG"}.get(kind, "PNG"))
                for n in range(26) for kind in (["jpg", "png"][n % 2],)} | odd_pictures()  # fmt: skip
    good = [{"question": f"<image>Good {name}?", "image": [f"images/{name}"], "qid": name} for name in pictures]
    bad: list[dict] = [{"question": f"<image>{name}", "image": [f"images/{name}"]} for name in bad_pictures()]
    bad += [
        {"question": "<image>", "image": ["images/none.png"]},
        {"question": "<image>", "image": ["../outside.png"]},
        {"answer": None},
        {"answer": ""},
        {"question": "<image><image> two for one", "image": ["images/0.jpg"]},
        {"question": "<image> none"},
        {"question": "say <|image_pad|>"},
    ]
    between: list[dict] = []
    for index, row in enumerate(good):
        between += [row, {**bad[index % len(bad)], "qid": f"bad-{index}"}]
    return good, between, {**pictures, **bad_pictures()}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_good_rows_are_byte_equal_with_and_without_bad_ones(tmp_path, monkeypatch, workers) -> None:
    monkeypatch.setattr("vlm_rl.data_prep.preparation.SHARD_ROWS", 16)
    good, between, pictures = mixed_rows()
    (tmp_path / "outside.png").write_bytes(pictures["1.png"])
    clean = write_virl(tmp_path / "clean", good, pictures)
    dirty = write_virl(tmp_path / "dirty", between, pictures)
    before = files_below(tmp_path)
    prepare("virl39k", clean, tmp_path / "a", Options(strict=True))
    report = prepare("virl39k", dirty, tmp_path / "b", workers=workers)
    written = Counter(f"{name}{file}" for name in "ab" for file in SET_FILES)
    assert files_below(tmp_path) - before == written and not before - files_below(tmp_path)
    assert (tmp_path / "a/data.parquet").read_bytes() == (tmp_path / "b/data.parquet").read_bytes()
    assert report.kept == len(good) == 34 and report.rows_in == 68 == report.kept + sum(report.dropped.values())
    # 34 bad rows are 19 kinds once and the first 15 of them twice
    assert report.dropped == {
        "image_unreadable": 24, "image_missing": 2, "image_outside": 2, "answer_missing": 3, "marker_mismatch": 2,
        "control_token": 1,
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "b/dropped.jsonl").read_text().splitlines()]
    assert [line["where"] for line in lines] == [f"39Krelease.parquet row {n}" for n in range(1, 68, 2)]


def test_odd_pictures_are_upright_rgb_without_what_came_along(tmp_path) -> None:
    pictures = odd_pictures()
    rows = [{"question": f"<image>{name}", "image": [f"images/{name}"]} for name in pictures]
    prepare("virl39k", write_virl(tmp_path / "virl", rows, pictures), tmp_path / "out", Options(strict=True))
    stored = {name: row["images"][0]["bytes"] for name, row in zip(pictures, rows_of(tmp_path / "out"), strict=True)}
    for name, data in stored.items():
        image = Image.open(io.BytesIO(data))
        assert image.mode == "RGB" and image.size == {"turned.jpg": (112, 84), "sixteen.png": (84, 84)}.get(
            name, (84, 112)
        )
        assert not image.getexif() and b"secret" not in data, name
    pixels = {name: np.asarray(decode_image(data, where=name)).astype(int) for name, data in stored.items()}
    original = np.asarray(smooth_noise(84, 112)).astype(int)
    assert np.array_equal(pixels["lossless.webp"], original) and np.array_equal(pixels["huge-exif.png"], original)
    assert (pixels["sixteen.png"] == 200).all()  # 51400 of 65535
    assert np.abs(pixels["turned.jpg"] - np.rot90(original, -1)).mean() < 4
    assert np.abs(pixels["second.jpg"] - original).mean() < 4
    clear = np.asarray(smooth_noise(84, 112).quantize(16)) == 0
    assert clear.any() and (pixels["palette.png"][clear] == 255).all()


@pytest.mark.parametrize("name", sorted(bad_pictures()))
def test_strict_names_the_file_the_row_and_the_picture(tmp_path, name) -> None:
    rows = [{}, {"question": "<image>", "image": [f"images/{name}"]}]
    folder = write_virl(tmp_path / "virl", rows, bad_pictures())
    with pytest.raises(UserError, match=r"^39Krelease\.parquet row 1: image 0: "):
        prepare("virl39k", folder, tmp_path / "out", Options(strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["virl"]


# -- rows ------------------------------------------------------------------------------------------

PICTURE = encode_png(smooth_noise(84, 84))
MAPPING = {"question": "q", "answer": "a", "images": "pics", "id": "uid"}
FINE = {"q": "Which <image>?", "a": "7", "pics": "a.png"}
LEAKED = "A farmer walks nine kilometres every single morning before he feeds the eleven grey horses in his barn"
# (row or line, reason, what the message must say)
BAD_ROWS = [
    ({**FINE, "a": None}, "answer_missing", "answer is missing"),
    ({**FINE, "a": "  "}, "answer_missing", "answer is missing"),
    ({**FINE, "a": r"\boxed{\left\{1"}, "gold_broken", "do not close"),
    ({**FINE, "a": {"value": 7}}, "bad_type", "answer must be text, not dict"),
    ({**FINE, "a": [["7"]]}, "bad_type", "answer must be text, not list"),
    ({**FINE, "q": ["Which?"]}, "bad_type", "q must be text, not list"),
    ({**FINE, "q": None}, "q_missing", "q is missing"),
    ({**FINE, "pics": 7}, "image_missing", "the image is 7"),
    ({**FINE, "q": "<image> or <image>?"}, "marker_mismatch", "2 <image> markers in its question but 1 images"),
    ({**FINE, "uid": None}, "id_missing", "none of uid names the row"),
    ({**FINE, "uid": {"x": 1}}, "id_missing", "uid is {'x': 1}, and an id is a text or a whole number"),
    ({**FINE, "q": "Which other <image>?", "uid": "good-0"}, "duplicate_id", "'mine-good-0' appeared before"),
    ("[1, 2]", "bad_type", "a row must be an object"),
    ('{"q": "cut', "bad_json", "is not JSON"),
    ({**FINE, "a": "7\ud800"}, "bad_text", r"holds '\ud800', half of a surrogate pair"),
    ({**FINE, "q": "Which \udfff <image>?"}, "bad_text", r"holds '\udfff', half of a surrogate pair"),
    ({**FINE, "pics": "\ud800.png"}, "image_missing", "cannot be read"),
    ({**FINE, "a": float("inf")}, "answer_missing", "the answer is inf"),
    ('{"a": 1' + "0" * 5000 + "}", "bad_json", "is not JSON"),
]


def generic(folder: Path, rows: list[dict | str]) -> Path:
    folder.mkdir()
    lines = [row if isinstance(row, str) else json.dumps({"uid": f"row-{n}", **row}) for n, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "a.png").write_bytes(PICTURE)
    file = folder / "set.yaml"
    file.write_text(json.dumps({"path": "rows.jsonl", "source": "mine", "columns": MAPPING}))
    return file


@pytest.fixture
def held_out(tmp_path) -> Path:
    rows = [{"question": LEAKED}]
    prepare("virl39k", write_virl(tmp_path / "test-raw", rows, {}), tmp_path / "test-set")
    return tmp_path / "test-set"


def test_bad_rows_are_counted_and_good_ones_do_not_notice(tmp_path, held_out) -> None:
    good: list[dict | str] = [{**FINE, "q": f"Which {n} <image>?", "uid": f"good-{n}"} for n in range(20)]
    good[1] = {**FINE, "q": "No marker", "uid": "good-1"}
    leaked = {"q": f"Say: {LEAKED}!", "a": "7", "pics": None, "uid": "leak"}
    bad = [row for row, _, _ in BAD_ROWS] + [leaked]
    dirty = [row for n, row in enumerate(good) for row in (row, *bad[n : n + 1])]
    options = Options(against=(held_out,))
    prepare("generic", generic(tmp_path / "clean", good), tmp_path / "a", Options(strict=True))
    report = prepare("generic", generic(tmp_path / "dirty", dirty), tmp_path / "b", options)
    assert (tmp_path / "a/data.parquet").read_bytes() == (tmp_path / "b/data.parquet").read_bytes()
    assert report.dropped == Counter([reason for _, reason, _ in BAD_ROWS] + ["benchmark_overlap"])
    assert report.rows_in == 20 + 20 == report.kept + sum(report.dropped.values())
    # Markers that were missing are put in front, and counted.
    assert rows_of(tmp_path / "b")[1]["question"] == "<image>\nNo marker" and report.notes["markers_prepended"] == 1
    lines = [json.loads(line) for line in (tmp_path / "b/dropped.jsonl").read_text().splitlines()]
    assert [line["where"] for line in lines] == [f"rows.jsonl line {n}" for n in range(2, 42, 2)]
    for line, (_, reason, words) in zip(lines, BAD_ROWS, strict=False):
        assert line["reason"] == reason and words in line["detail"]
    assert lines[-1]["detail"].endswith("test-set/Processed-0")


def test_golds_of_many_digits_are_kept(tmp_path) -> None:
    golds = [10**400, "1" + "0" * 400, "0" * 5000 + "7", -(10**400)]
    rows: list[dict | str] = [{**FINE, "q": f"Which {n} <image>?", "a": gold} for n, gold in enumerate(golds)]
    with Grader(workers=1) as grader:
        report = prepare(
            "generic", generic(tmp_path / "raw", rows), tmp_path / "out", gold_check=grader.verifies_itself
        )
    assert report.dropped == {}
    assert [row["answer"] for row in rows_of(tmp_path / "out")] == [str(gold) for gold in golds]


def test_a_row_that_its_reader_cannot_take_is_dropped(tmp_path) -> None:
    """A Parquet column of text may hold bytes that are not UTF-8, or a number be where a reader expects text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array([b"Which?", b"\xff\xfe", b"When?"], pa.binary()).view(pa.string())
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table({"q": text, "a": ["1", "2", "3"]}), tmp_path / "raw/rows.parquet")
    mapping = {"path": "rows.parquet", "source": "mine", "columns": {"question": "q", "answer": "a"}}
    (tmp_path / "raw/set.yaml").write_text(json.dumps(mapping))
    report = prepare("generic", tmp_path / "raw/set.yaml", tmp_path / "out")
    assert (report.kept, report.dropped) == (2, {"bad_text": 1})
    row = convert_rows([("here", {"a": 1})], lambda fields: fields["a"].strip())
    assert [(item.where, item.reason) for item in row if isinstance(item, DroppedRow)] == [("here", "bad_value")]


@pytest.mark.parametrize("case", range(len(BAD_ROWS)))
def test_strict_stops_at_a_bad_row_with_file_and_line(tmp_path, case) -> None:
    row, reason, words = BAD_ROWS[case]
    file = generic(tmp_path / "raw", [{**FINE, "uid": "good-0"}, row, FINE])
    with pytest.raises(UserError) as caught:
        prepare("generic", file, tmp_path / "out", Options(strict=True))
    message = str(caught.value)
    assert message.startswith("rows.jsonl line 2: ") and words in message and f"({reason})" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_strict_counts_overlap_and_missing_markers(tmp_path, held_out) -> None:
    rows: list[dict | str] = [{**FINE, "q": "No marker"}, {"q": LEAKED, "a": "7", "pics": None}]
    options = Options(strict=True, against=(held_out,))
    report = prepare("generic", generic(tmp_path / "raw", rows), tmp_path / "out", options)
    assert (report.kept, report.dropped, report.notes["markers_prepended"]) == (1, {"benchmark_overlap": 1}, 1)


# -- archives --------------------------------------------------------------------------------------

MEMBERS = {
    "images/good.png": PICTURE,
    "../evil.png": PICTURE,
    "images/../../evil.png": PICTURE,
    "/abs.png": PICTURE,
    "images\\..\\..\\back.png": PICTURE,
    "images/bomb.png": b"\x89PNG\r\n\x1a\n" + bytes(33_600_000),  # above 32 MB, packed to 33 kB
}
NAMES = ["good.png", "../evil.png", "/abs.png", "..\\back.png", "link.png", "bomb.png", "none.png"]


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        info = zipfile.ZipInfo("images/link.png")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return path


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for kind, name, target in ((tarfile.SYMTYPE, "link.png", "/etc/passwd"), (tarfile.LNKTYPE, "hard.png", "x")):
            info = tarfile.TarInfo(f"images/{name}")
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return path


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["images/a.png", "./images/a.png", "a.png"])
def test_pictures_are_read_out_of_the_archive(tmp_path, kind, name) -> None:
    folder = write_virl(tmp_path / "virl", [{"question": "<image>", "image": ["images/a.png"]}], {})
    (make_zip if kind == "zip" else make_tar)(folder / f"images.{kind}", {name: PICTURE})
    assert prepare("virl39k", folder, tmp_path / "out").kept == 1
    assert rows_of(tmp_path / "out")[0]["images"][0]["bytes"] == PICTURE
    assert not any((folder / "images").iterdir())  # nothing was unpacked
    assert [entry["name"] for entry in manifest_of(tmp_path / "out")["files"]] == [
        "39Krelease.parquet",
        f"images.{kind}",
    ]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_that_attack_cost_their_rows_only(tmp_path, kind) -> None:
    rows = [{"question": f"<image>{name}", "image": [f"images/{name}"]} for name in NAMES]
    rows.append({"question": "<image>hard", "image": ["images/hard.png"]})
    folder = write_virl(tmp_path / "virl", rows, {})
    (make_zip if kind == "zip" else make_tar)(folder / f"images.{kind}", MEMBERS)
    before = files_below(tmp_path)
    report = prepare("virl39k", folder, tmp_path / "out")
    outside = {"zip": {"image_missing": 5, "image_outside": 1}, "tar": {"image_missing": 4, "image_outside": 2}}[kind]
    assert report.kept == 1 and report.rows_in == 8
    assert report.dropped == {**outside, "image_unreadable": 1}
    assert files_below(tmp_path) - before == Counter(f"out{file}" for file in SET_FILES)
    for row in rows[1:]:
        folder_of_row = write_virl(tmp_path / f"one-{row['question'][7:11].strip('./')}", [{}, row], {})
        (folder_of_row / f"images.{kind}").hardlink_to(folder / f"images.{kind}")
        with pytest.raises(UserError, match=r"^39Krelease\.parquet row 1: .*\(image_\w+\); fix the row"):
            prepare("virl39k", folder_of_row, tmp_path / "strict", Options(strict=True))
    assert not (tmp_path / "strict").exists()


def test_a_member_that_is_packed_implausibly_well_is_not_unpacked(tmp_path) -> None:
    archive = make_zip(tmp_path / "images.zip", {"images/zeros.png": bytes(2_000_000), "images/a.png": PICTURE})
    with pytest.raises(RowError, match=r"'images/zeros\.png' in images\.zip unpacks to 2000000 bytes"):
        ZipMember(archive, "images/zeros.png").read()
    assert ZipMember(archive, "images/a.png").read() == PICTURE


def test_files_that_are_no_archives(tmp_path) -> None:
    folder = write_virl(tmp_path / "virl", [{"question": "<image>", "image": ["images/a.png"]}], {})
    (folder / "images.tar").write_bytes(b"no archive at all" * 99)
    with pytest.raises(UserError, match=r"images\.tar: cannot be read as an uncompressed tar archive"):
        prepare("virl39k", folder, tmp_path / "out")
    (folder / "images.zip").write_bytes(b"PK no")
    with pytest.raises(UserError, match="cannot be read as a zip archive"):
        ZipMember(folder / "images.zip", "a.png").read()


def test_a_compressed_tar_is_to_be_unpacked_by_its_owner(tmp_path) -> None:
    folder = write_virl(tmp_path / "virl", [{}], {})
    (folder / "images").rmdir()
    (folder / "images.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"images\.tar\.gz: a compressed tar .* unpack it there"):
        prepare("virl39k", folder, tmp_path / "out")
