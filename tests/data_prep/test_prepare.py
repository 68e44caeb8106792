"""The path of `vlm-rl prepare`: pictures, shards, resuming, filters, and what the prepared set records."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vlm_rl.data_prep.shards
from tests.conftest import shared_data
from vlm_rl.data.images import decode_image, encode_jpeg, encode_png
from vlm_rl.data_prep.duplicates import NEAR_BITS, normalised
from vlm_rl.data_prep.filters import cached
from vlm_rl.data_prep.image_files import ImageBytes
from vlm_rl.data_prep.leakage import BenchmarkIndex
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.prepared_images import Grid, perceptual_hash, prepare_image
from vlm_rl.data_prep.records import RowError
from vlm_rl.data_prep.virl_layout import write_virl
from vlm_rl.errors import UserError
from vlm_rl.types import Problem

GRID = Grid(3136, 1_003_520)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours that survive JPEG, different for each seed."""
    cells = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def fitted(data: bytes, grid: Grid = GRID, *, test_only: bool = False):
    return prepare_image(ImageBytes(data), where="x", grid=grid, test_only=test_only)


def table(folder: Path) -> list[dict]:
    return pq.read_table(folder / "data.parquet").to_pylist()


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


# -- a picture -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_on_the_grid_keeps_its_bytes(kind) -> None:
    data = encoded(noise(84, 112), kind)
    picture = fitted(data)
    assert picture.data == data and picture.is_kept
    assert (picture.width, picture.height) == (84, 112)


@pytest.mark.parametrize(("kind", "stored"), [("JPEG", "JPEG"), ("PNG", "PNG"), ("WEBP", "PNG")])
def test_a_picture_off_the_grid_is_encoded_anew_in_its_own_kind(kind, stored) -> None:
    data = encoded(noise(100, 120), kind)
    picture = fitted(data)
    image = Image.open(io.BytesIO(picture.data))
    assert (image.format, image.mode, image.size) == (stored, "RGB", (112, 112))  # 100/28 = 3.57, 120/28 = 4.29
    assert (picture.original_width, picture.original_height, picture.original_format) == (100, 120, kind)
    assert picture.original_sha256 == hashlib.sha256(data).hexdigest() and not picture.is_kept


def test_a_resized_jpeg_has_quality_95_and_full_colour() -> None:
    stored = Image.open(io.BytesIO(fitted(encoded(noise(100, 100), "JPEG", quality=60)).data))
    reference = Image.open(io.BytesIO(encode_jpeg(noise(84, 84))))
    assert stored.quantization == reference.quantization  # the tables of quality 95
    assert [layer[1:3] for layer in stored.layer] == [(1, 1)] * 3  # 4:4:4


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK"])
def test_other_modes_on_the_grid_become_rgb(mode) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = noise(84, 84).quantize(16) if mode == "P" else noise(84, 84).convert(mode)
    picture = fitted(encoded(image, kind))
    assert Image.open(io.BytesIO(picture.data)).mode == "RGB" and not picture.is_kept


def test_exif_is_applied_and_leaves() -> None:
    exif = Image.Exif()
    exif[274] = 6  # turn by 90 degrees
    picture = fitted(encoded(noise(84, 112), "JPEG", exif=exif))
    assert (picture.width, picture.height) == (112, 84)
    assert not Image.open(io.BytesIO(picture.data)).getexif()


def test_a_model_with_other_patches_has_another_grid() -> None:
    picture = fitted(encoded(noise(100, 100), "PNG"), Grid(4096, 1_003_520, 32))
    assert (picture.width, picture.height) == (96, 96)


def test_real_pictures_have_no_false_twins_and_know_their_copies() -> None:
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
    image = noise(600, 400, seed=1)
    other = Image.open(io.BytesIO(encoded(image.resize(size), "JPEG", quality=75)))
    near = (int(perceptual_hash(image), 16) ^ int(perceptual_hash(other), 16)).bit_count()
    far = (int(perceptual_hash(image), 16) ^ int(perceptual_hash(noise(600, 400, seed=2)), 16)).bit_count()
    assert near <= NEAR_BITS < far


# -- shards, workers, a kill -----------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import vlm_rl.data_prep.preparation
from vlm_rl.data_prep.preparation import prepare
if __name__ == "__main__":
    vlm_rl.data_prep.preparation.SHARD_ROWS = 8
    print(prepare("virl39k", Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3])))
"""


def many(folder: Path, count: int = 120) -> Path:
    pictures = {f"{n}.jpg": encoded(noise(300 + n, 500, seed=n), "JPEG") for n in range(count)}
    rows = [{"question": f"<image>Which is {name}?", "image": [f"images/{name}"]} for name in pictures]
    return write_virl(folder, rows, pictures)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on_without_redoing_finished_shards(tmp_path, monkeypatch, workers) -> None:
    source, out = many(tmp_path / "virl"), tmp_path / "sets" / "out"
    (tmp_path / "run.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", source, out, str(workers)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    partial = out.parent / ".out.partial"
    deadline = time.monotonic() + 120
    while len(list(partial.glob("shard-*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("shard-*.json")}
    assert 3 <= len(finished) < 15 and not out.exists()
    monkeypatch.setattr("vlm_rl.data_prep.preparation.SHARD_ROWS", 8)
    made: list[str] = []
    original = vlm_rl.data_prep.shards.make_shard
    monkeypatch.setattr(
        vlm_rl.data_prep.shards, "make_shard", lambda task: made.append(task.stem.name) or original(task)
    )
    wait_for_lock(partial)
    report = prepare("virl39k", source, out)
    assert report.shards_reused >= len(finished) and len(made) == 15 - report.shards_reused
    assert not {f"{name}.json" for name in made} & set(finished)
    prepare("virl39k", source, tmp_path / "whole")
    assert (out / "data.parquet").read_bytes() == (tmp_path / "whole/data.parquet").read_bytes()
    assert not partial.exists()


def wait_for_lock(partial: Path) -> None:
    """Workers of a killed process end themselves; until then they hold what they inherited."""
    import fcntl

    deadline = time.monotonic() + 30
    with (partial / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, "a worker outlived its parent"
                time.sleep(0.05)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["options", "source", "shard"])
def test_shards_of_another_plan_or_broken_ones_are_made_again(tmp_path, monkeypatch, change) -> None:
    monkeypatch.setattr("vlm_rl.data_prep.preparation.SHARD_ROWS", 8)
    source, out = many(tmp_path / "virl", 24), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            "vlm_rl.data_prep.preparation.merge_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare("virl39k", source, out)
    partial = tmp_path / ".out.partial"
    assert len(list(partial.glob("shard-*.json"))) == 3
    options = Options()
    if change == "options":
        options = Options(max_pixels=50_176)
    elif change == "source":
        many(tmp_path / "other", 25)
        source = tmp_path / "other"
    else:
        data = bytearray((partial / "shard-000001.parquet").read_bytes())
        data[len(data) // 2] ^= 1
        (partial / "shard-000001.parquet").write_bytes(data)
    report = prepare("virl39k", source, out, options)
    assert report.shards_reused == (2 if change == "shard" else 0)
    prepare("virl39k", source, tmp_path / "fresh", options)
    assert (out / "data.parquet").read_bytes() == (tmp_path / "fresh/data.parquet").read_bytes()


def test_finished_shards_hold_what_strict_mode_stops_at(tmp_path, monkeypatch) -> None:
    rows = [{"question": "<image>", "image": ["images/none.png"]}, {}]
    source, out = write_virl(tmp_path / "virl", rows, {}), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            "vlm_rl.data_prep.preparation.merge_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare("virl39k", source, out)
    with pytest.raises(UserError, match=r"^39Krelease\.parquet row 0: .*image_missing"):
        prepare("virl39k", source, out, Options(strict=True))
    assert not (tmp_path / ".out.partial").exists()  # the same call would only fail again


def test_two_preparations_of_one_set_do_not_mix(tmp_path) -> None:
    from vlm_rl.data_prep.partial_set import PartialSet

    source = many(tmp_path / "virl", 2)
    with PartialSet(tmp_path / "out", {}), pytest.raises(UserError, match="another preparation is writing it"):
        prepare("virl39k", source, tmp_path / "out")


def test_the_number_of_workers_and_shards_changes_nothing(tmp_path, monkeypatch) -> None:
    source = many(tmp_path / "virl", 40)
    prepare("virl39k", source, tmp_path / "a")
    monkeypatch.setattr("vlm_rl.data_prep.preparation.SHARD_ROWS", 7)
    prepare("virl39k", source, tmp_path / "b", workers=2)
    assert (tmp_path / "a/data.parquet").read_bytes() == (tmp_path / "b/data.parquet").read_bytes()


def test_a_limit_counts_what_it_has_seen(tmp_path) -> None:
    source = write_virl(
        tmp_path / "virl", [{"question": f"{n}?", "answer": "" if n % 3 else "1"} for n in range(99)], {}
    )
    report = prepare("virl39k", source, tmp_path / "out", Options(limit=9))
    assert (report.kept, report.rows_in, report.dropped) == (9, 25, {"answer_missing": 16})


# -- the set ---------------------------------------------------------------------------------------


def test_load_dataset_opens_it_with_pictures(tmp_path) -> None:
    import datasets

    prepare("virl39k", many(tmp_path / "virl", 3), tmp_path / "out")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out/data.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert isinstance(loaded, datasets.Dataset)
    assert loaded[2]["images"][0].size == (308, 504)  # 302 and 500 on the grid of 28
    assert loaded[2]["originals"][0]["width"] == 302


def test_row_groups_are_small_and_pictures_not_compressed_again(tmp_path) -> None:
    prepare("virl39k", many(tmp_path / "virl", 70), tmp_path / "out")
    layout = pq.ParquetFile(tmp_path / "out/data.parquet").metadata
    assert [layout.row_group(i).num_rows for i in range(layout.num_row_groups)] == [16, 16, 16, 16, 6]
    columns = {layout.row_group(0).column(i).path_in_schema: layout.row_group(0).column(i).compression
               for i in range(layout.num_columns)}  # fmt: skip
    assert columns["images.list.element.bytes"] == "UNCOMPRESSED" and columns["question"] == "ZSTD"


def test_the_manifest_says_what_the_set_was_made_of(tmp_path) -> None:
    source = many(tmp_path / "virl", 4)
    prepare("virl39k", source, tmp_path / "out", Options(patch_size=16, min_pixels=4096), gold_check=lambda _: True)
    facts = manifest(tmp_path / "out")
    digest = hashlib.sha256((source / "39Krelease.parquet").read_bytes()).hexdigest()
    assert [(entry["name"], entry["sha256"]) for entry in facts["files"]] == [("39Krelease.parquet", digest)]
    assert (facts["rows_in"], facts["kept"], facts["dropped"], facts["patch_size"]) == (4, 4, {}, 16)
    assert facts["grader_version"] and facts["options"]["max_pixels"] == 1_003_520
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()


def test_prompt_lengths_are_the_builders_and_long_prompts_go(tmp_path, tiny_model) -> None:
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.data.sets import load_set
    from vlm_rl.templates import TEMPLATES

    builder = PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])
    rows: list[dict] = [
        {"question": "no picture"},
        {"question": "<image>one", "image": ["images/0.jpg"]},
        {"question": "this <image> and <image>?", "image": ["images/0.jpg", "images/1.jpg"]},
    ]
    images = {f"{n}.jpg": encoded(noise(300, 100 + 400 * n, seed=n), "JPEG") for n in range(2)}
    source = write_virl(tmp_path / "virl", rows, images)
    counted = {"tokenizer": "tiny", "template": "think_answer"}
    prepare("virl39k", source, tmp_path / "all", count_tokens=builder.count_unexpanded, counted_with=counted)
    lengths = [row["prompt_tokens"] for row in table(tmp_path / "all")]
    assert lengths == [len(builder.build(problem).ids) for problem in load_set(tmp_path / "all")]
    report = prepare(
        "virl39k", source, tmp_path / "short", Options(max_prompt_tokens=lengths[1]),
        count_tokens=builder.count_unexpanded,
    )  # fmt: skip
    assert (report.kept, report.dropped) == (2, {"prompt_too_long": 1})
    with pytest.raises(UserError, match="needs a tokenizer"):
        prepare("virl39k", source, tmp_path / "none", Options(max_prompt_tokens=9))


def test_long_prompts_of_benchmarks_stay_and_are_counted(tmp_path) -> None:
    row = {"imagename": "a.png", "question": "Which?", "answer": "A", "skill": ["spatial"]}
    source = write_virl(tmp_path / "raw", [], {"a.png": encode_png(noise(84, 84))})
    (source / "dataset.json").write_text(json.dumps({"v1_0": row}))
    report = prepare("logicvista", source, tmp_path / "out", Options(max_prompt_tokens=57), count_tokens=lambda _: 50)
    assert (report.kept, report.notes["prompt_too_long"]) == (1, 1)
    assert table(tmp_path / "out")[0]["prompt_tokens"] == 58  # 50, of which one is the picture, and its 3 x 3


# -- filters ---------------------------------------------------------------------------------------


def test_pass_rates_and_types(tmp_path) -> None:
    rows: list[dict] = [{"question": f"{r}?", "PassRate_32BTrained": r} for r in (-1.0, 0.0, 0.3, 0.7, 1.0)]
    rows.append({"question": "letter", "answer": "B"})
    source = write_virl(tmp_path / "virl", rows, {})
    options = Options(min_pass_rate=0.3, max_pass_rate=0.9, exclude_types=("choice",))
    report = prepare("virl39k", source, tmp_path / "out", options)
    assert [row["difficulty"] for row in table(tmp_path / "out")] == [-1.0, 0.3, 0.7]  # unknown ones stay
    assert report.dropped == {"pass_rate": 2, "answer_type": 1}


@pytest.mark.parametrize(
    "changes", [{"limit": 0}, {"min_pass_rate": 0.8, "max_pass_rate": 0.2}, {"exclude_types": ("word",)}]
)
def test_impossible_options(tmp_path, changes) -> None:
    with pytest.raises(UserError, match="--"):
        prepare("virl39k", write_virl(tmp_path / "virl", [{}], {}), tmp_path / "out", replace(Options(), **changes))


def test_duplicates_conflicts_and_variants(tmp_path) -> None:
    square = noise(200, 200, seed=5)
    numbered = square.copy()
    numbered.paste((0, 0, 0), (100, 100, 104, 106))  # a small label: nearly the same picture
    images = {
        "a.png": encode_png(square),
        "copy.png": encode_png(square),
        "small.jpg": encoded(square.resize((150, 150)), "JPEG"),
        "numbered.png": encode_png(numbered),
        "other.png": encode_png(noise(200, 200, seed=6)),
    }

    def row(name: str, answer: str, question: str = "<image>Find $x$.") -> dict:
        return {"question": question, "answer": answer, "image": [f"images/{name}"]}

    rows = [
        row("a.png", "3"),
        row("copy.png", "3"),  # duplicate
        row("small.jpg", "3", "<image> find x"),  # near duplicate
        row("numbered.png", "4"),  # a variant: another gold
        row("other.png", "3"),  # another picture
        {"question": "Text?", "answer": "1"},
        {"question": "Text?", "answer": "2"},  # both go
        {"question": "x+2?", "answer": "1"},
        {"question": "x-2?", "answer": "1"},  # another sign is another problem
    ]
    source = write_virl(tmp_path / "virl", rows, images)
    report = prepare("virl39k", source, tmp_path / "out")
    assert report.dropped == {"duplicate": 1, "near_duplicate": 1, "gold_conflict": 2}
    assert [r["id"] for r in table(tmp_path / "out")] == [f"Processed-{n}" for n in (0, 3, 4, 7, 8)]
    assert prepare("virl39k", source, tmp_path / "all", Options(keep_duplicates=True)).kept == 9


def test_benchmarks_keep_their_duplicates(tmp_path) -> None:
    row = {"imagename": "a.png", "question": "Which?", "answer": "A", "skill": ["spatial"]}
    source = write_virl(tmp_path / "raw", [], {"a.png": encode_png(noise(84, 84))})
    (source / "dataset.json").write_text(json.dumps({"v1_0": row, "v1_1": row}))
    report = prepare("logicvista", source, tmp_path / "out")
    assert (report.kept, report.dropped) == (2, {})


def test_a_gold_is_judged_once_under_the_same_rules_and_anew_under_others() -> None:
    judged: list[tuple[str, object]] = []
    check = cached(lambda problem: bool(judged.append((problem.answer, problem.meta.get("precision"))) or True))
    problem = Problem(id="a", question="?", images=(), answer="2.5", answer_type="float")
    other = replace(problem, id="b", question="other words")
    for one in (problem, other, replace(problem, meta={"precision": 1}), replace(problem, answer="3.5"), other):
        assert check(one)
    assert judged == [("2.5", None), ("2.5", 1), ("3.5", None)]


def test_normalised_text_ignores_dress_and_keeps_signs() -> None:
    assert normalised(r"Find  \left( $X$ \right).") == normalised("find (x)")
    assert normalised("x + 2") != normalised("x - 2")
    assert normalised(r"\text{cm}") == normalised("cm") != normalised("m")


LONG = "A farmer walks nine kilometres every single morning before he feeds the eleven grey horses in his {} barn"


@pytest.fixture
def benchmark(tmp_path) -> Path:
    rows = [
        {"question": LONG.format("red")},
        {"question": "<image>What is x?", "image": ["images/b.png"]},
        {"question": "How many primes divide 2024?"},
        {"question": "<image>Nothing is drawn.", "image": ["images/white.png"]},
    ]
    pictures = {"b.png": noise(300, 300, seed=8), "white.png": Image.new("RGB", (200, 200), "white")}
    encoded_ones = {name: encode_png(image) for name, image in pictures.items()}
    source = write_virl(tmp_path / "bench-raw", rows, encoded_ones)
    prepare("virl39k", source, tmp_path / "bench")
    return tmp_path / "bench"


def test_overlap_with_a_benchmark_by_text_and_picture(tmp_path, benchmark) -> None:
    rows = [
        {"question": "Listen. " + LONG.format("blue") + "?"},  # 13 words in a row
        {"question": "A farmer walks nine kilometres every single morning."},  # fewer than 13
        {"question": "how many primes divide 2024"},  # short, and the same as a whole
        {"question": "<image>Something else altogether?", "image": ["images/b.jpg"]},  # its picture
        {"question": "<image>What is x?", "image": ["images/c.png"]},  # same short text, another picture
        {"question": "<image>Nothing to see", "image": ["images/white.png"]},
    ]
    images = {
        "b.jpg": encoded(noise(300, 300, seed=8).resize((250, 250)), "JPEG"),
        "c.png": encode_png(noise(300, 300, seed=9)),
        "white.png": encode_png(Image.new("RGB", (300, 300), "white")),
    }
    source = write_virl(tmp_path / "virl", rows, images)
    report = prepare("virl39k", source, tmp_path / "out", Options(against=(benchmark,)))
    assert report.dropped == {"benchmark_overlap": 3}
    assert [row["id"] for row in table(tmp_path / "out")] == [f"Processed-{n}" for n in (1, 4, 5)]
    lines = [json.loads(line) for line in (tmp_path / "out/dropped.jsonl").read_text().splitlines()]
    assert [line["detail"].split()[-1] for line in lines] == [f"bench/Processed-{n}" for n in (0, 2, 1)]
    kept = prepare("virl39k", source, tmp_path / "kept", Options(against=(benchmark,), keep_overlap=True))
    assert (kept.kept, kept.notes["benchmark_overlap"]) == (6, 3)


@pytest.mark.parametrize(("shared", "is_overlap"), [(12, False), (13, True)])
def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none(shared, is_overlap) -> None:
    words = [f"w{number}" for number in range(30)]
    benchmarks = BenchmarkIndex()
    benchmarks.add("bench/1", " ".join(words), [])
    question = " ".join(["Other", *words[5 : 5 + shared], "and an end of its own"])
    assert bool(benchmarks.by_text(question, [])) == is_overlap


def test_phrases_of_the_trade_are_no_overlap(tmp_path, benchmark) -> None:
    # 21 training rows share the words: more than COMMON, so they prove nothing
    rows = [{"question": LONG.format(f"number {n}")} for n in range(21)]
    source = write_virl(tmp_path / "virl", rows, {})
    assert prepare("virl39k", source, tmp_path / "out", Options(against=(benchmark,))).kept == 21
    few = write_virl(tmp_path / "few", rows[:20], {})
    with pytest.raises(UserError, match="benchmark_overlap"):
        prepare("virl39k", few, tmp_path / "out-few", Options(against=(benchmark,)))


def test_a_benchmark_to_compare_with_must_be_prepared(tmp_path) -> None:
    source = write_virl(tmp_path / "virl", [{}], {})
    with pytest.raises(UserError, match=r"--against .*not a prepared set"):
        prepare("virl39k", source, tmp_path / "out", Options(against=(tmp_path,)))


# -- text as a picture -----------------------------------------------------------------------------


def test_text_problems_become_pictures_of_their_text(tmp_path) -> None:
    rows = [
        {"question": r"Find $\frac{1}{2} + x^2$ when $x=3$."},
        {"question": "求方程的解"},
        {"question": "long " * 9000},
    ]
    source = write_virl(tmp_path / "virl", rows, {})
    report = prepare("virl39k", source, tmp_path / "out", Options(text_image="typeset"))
    assert report.dropped == {"typeset_font": 1, "typeset_too_long": 1}
    (row,) = table(tmp_path / "out")
    assert row["question"] == "<image>\nSolve the problem in the image."
    image = decode_image(row["images"][0]["bytes"], where="x")
    grey = np.asarray(image.convert("L"))
    assert image.width == 728 and (grey[:, :20] == 255).all() and (grey < 64).any()
    assert json.loads(row["meta"])["typeset_text"] == rows[0]["question"]


def test_a_longer_text_is_a_taller_picture_and_a_formula_is_no_source() -> None:
    from vlm_rl.data_prep.typeset import typeset

    short, long = typeset("Ten words.", max_pixels=10**6), typeset("Ten words. " * 30, max_pixels=10**6)
    assert short.width == long.width and short.height < long.height
    # A fraction is taller than its line of text; an environment is beyond mathtext and shown as its source.
    line, fraction = typeset("x", max_pixels=10**6), typeset(r"$\dfrac{\frac{a}{b}}{\frac{c}{d}}$", max_pixels=10**6)
    assert fraction.height > line.height
    # The words of a source wrap: two short lines, not one that is cut; and words inside a formula keep their spaces.
    source = r"$\begin{cases} " + "x & y " * 9 + r"\end{cases}$"
    assert (
        typeset(source, max_pixels=10**6).height > typeset(source.replace("x & y " * 9, ""), max_pixels=10**6).height
    )
    together, apart = (_ink_width(typeset(text, max_pixels=10**6)) for text in ("$xandy$", r"$x\quad\text{ and }y$"))
    assert apart > together + 20
    assert typeset(r"A \$5 note, $x^2$", max_pixels=10**6) == typeset(r"A \$5 note, \(x^2\)", max_pixels=10**6)
    display = typeset(r"\begin{equation*} x^2 \end{equation*}", max_pixels=10**6)
    assert display == typeset("$$x^2$$", max_pixels=10**6)


def _ink_width(image: Image.Image) -> int:
    columns = np.flatnonzero((np.asarray(image.convert("L")) < 128).any(axis=0))
    return int(columns[-1] - columns[0])


# -- the real samples ------------------------------------------------------------------------------

SAMPLES = {
    "mathvision": ("mathvision", 304),
    "dynamath": ("dynamath", 250),
    "wemath": ("wemath", 152),
    "logicvista": ("logicvista", 90),
    "dapo": ("dapo_math", 30),
    "mathvista": ("mathvista", 250),
    "mathverse": ("mathverse", 99),
    "aime24": ("text_math/aime24.jsonl", 30),
    "amc23": ("text_math/amc23.jsonl", 40),
    "minerva": ("text_math/minerva_math.jsonl", 272),
    "olympiadbench": ("text_math/olympiadbench_100.jsonl", 100),
}


@pytest.mark.parametrize("source", SAMPLES)
def test_every_real_sample_prepares(tmp_path, source) -> None:
    folder, kept = SAMPLES[source]
    # Small pictures: what they look like in full is another test's business.
    report = prepare(source, shared_data() / folder, tmp_path / "out", Options(max_pixels=50_176))
    assert report.kept == kept and report.test_only
    assert set(report.dropped) <= {"duplicate"}
    page = (tmp_path / "out/report.html").read_text()
    assert "BENCHMARK" in page and page.count("class='card'") == min(24, kept)


def problems_of(folder: Path) -> list[Problem]:
    from vlm_rl.data.sets import load_set

    return load_set(folder)


def test_a_set_of_annotations_alone_is_not_run(tmp_path) -> None:
    from vlm_rl.config import DataConfig
    from vlm_rl.data.sets import load_eval_sets

    prepare("mathvista", shared_data() / "mathvista", tmp_path / "mathvista")
    assert len(problems_of(tmp_path / "mathvista")) == 250  # scorable
    with pytest.raises(UserError, match="has no image, only its annotation"):
        load_eval_sets(DataConfig(train=["x"], eval=[str(tmp_path / "mathvista")]))


def test_a_set_for_other_patches_is_refused(tmp_path) -> None:
    from vlm_rl.data.sets import check_patch_size

    prepare("virl39k", many(tmp_path / "virl", 1), tmp_path / "out", Options(patch_size=16, min_pixels=4096))
    check_patch_size([tmp_path / "out"], 16)
    with pytest.raises(UserError, match="--patch-size 14"):
        check_patch_size([tmp_path / "out"], 14)


def test_a_missing_picture_is_not_another_rows_fault() -> None:
    with pytest.raises(RowError, match="not a PNG, JPEG or WEBP"):
        fitted(b"<svg/>")
