"""Prepare a set: shards, resuming after a kill, and what the set records."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

import vlm_rl.data_prep.shards
from tests.conftest import shared_data
from tests.helpers.benchmark_rows import write_annotations
from tests.helpers.data_sets import write_sample
from tests.helpers.images import encoded, smooth_noise
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl.cli import main
from vlm_rl.config import DataConfig
from vlm_rl.data.images import encode_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size, load_eval_sets, load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.partial_set import PartialSet
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.prepared_set import schema
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.virl_layout import write_virl
from vlm_rl.types import IMAGE_MARKER, VIDEO_MARKER, AnswerType


def many(folder: Path, count: int, *, width: int = 80, height: int = 100) -> Path:
    """Write rows with a picture each, wider by a pixel from row to row."""
    pictures = {f"{n}.jpg": encoded(smooth_noise(width + n, height, seed=n), "JPEG") for n in range(count)}
    rows = [{"question": f"<image>Which is {name}?", "image": [f"images/{name}"]} for name in pictures]
    return write_virl(folder, rows, pictures)


SCRIPT = """
import sys, time
from pathlib import Path
from vlm_rl.data_prep import preparation

def until_killed(*args, make_shards=preparation.make_shards, **options):
    for number, row in enumerate(make_shards(*args, **options), start=1):
        yield row
        while number == 8:  # of 15
            time.sleep(1)

if __name__ == "__main__":
    preparation.SHARD_ROWS, preparation.make_shards = 8, until_killed
    print(preparation.prepare("virl39k", Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_resumes_without_redoing_finished_shards(tmp_path, monkeypatch, workers) -> None:
    source = many(tmp_path / "virl", 120, width=300, height=500)
    out = tmp_path / "sets" / "out"
    (tmp_path / "run.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", source, out, str(workers)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    partial = out.parent / ".out.partial"
    deadline = time.monotonic() + 300
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
def test_shards_of_a_different_plan_and_broken_ones_are_made_again(tmp_path, monkeypatch, change) -> None:
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
        options = Options(max_pixels=5000)
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


@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_a_shard_whose_image_has_come_meanwhile_is_made_again(tmp_path, monkeypatch, fault) -> None:
    monkeypatch.setattr("vlm_rl.data_prep.preparation.SHARD_ROWS", 8)
    source, out = many(tmp_path / "virl", 24), tmp_path / "out"
    (source / "images" / "20.jpg").unlink()  # this one stays away
    late = source / "images" / "3.jpg"
    whole = late.read_bytes()
    late.unlink()
    if fault == "cut":
        late.write_bytes(whole[: len(whole) // 2])
    with monkeypatch.context() as patch:
        patch.setattr("vlm_rl.data_prep.preparation.merge_shards", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare("virl39k", source, out)
    late.write_bytes(whole)
    report = prepare("virl39k", source, out)
    assert (report.shards_reused, report.kept, report.dropped) == (2, 23, {"image_missing": 1})
    prepare("virl39k", source, tmp_path / "fresh")
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


def test_load_dataset_opens_it_with_pictures(tmp_path) -> None:
    import datasets

    prepare("virl39k", many(tmp_path / "virl", 3), tmp_path / "out")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out/data.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert isinstance(loaded, datasets.Dataset)
    assert loaded[2]["images"][0].size == (84, 112)  # 82 and 100 on the grid of 28
    assert loaded[2]["originals"][0]["width"] == 82


def test_the_card_is_one_that_datasets_reads(tmp_path) -> None:
    """With the licence of the source's own card and the ledger of rows; load_dataset opens the set by its folder."""
    import datasets
    from huggingface_hub import DatasetCard

    source = many(tmp_path / "virl", 3)
    (source / "README.md").write_text("---\nlicense: mit\n---\nThe authors' card.\n")
    benchmark = tmp_path / "benchmark"
    write_annotations("mathvista", tmp_path / "raw")
    prepare("mathvista", tmp_path / "raw", benchmark)
    prepare("virl39k", source, tmp_path / "out", Options(against=(benchmark,)))
    card = DatasetCard.load(tmp_path / "out/README.md")
    assert (card.data.license, card.data.source_datasets) == ("mit", ["TIGER-Lab/ViRL39K"])
    assert "| read | 3 |" in card.text and "| kept | 3 |" in card.text
    assert "Compared with benchmark: 0 rows" in card.text
    for column in schema().names:
        assert f"| {column} |" in card.text
    assert all(kind in card.text for kind in get_args(AnswerType))
    assert IMAGE_MARKER in card.text and VIDEO_MARKER in card.text
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert [row["id"] for row in loaded] == [row["id"] for row in rows_of(tmp_path / "out")]
    assert "make every score" not in card.text and "benchmark" in (benchmark / "README.md").read_text()
    assert "split: test" in (benchmark / "README.md").read_text()


def test_a_separator_of_unicode_in_a_detail_ends_no_line(tmp_path) -> None:
    answers = ["1", "seven\u2028teen", "\x85"]
    rows = [{"question": "<image>How many?", "answer": answer, "image": ["images/a.png"]} for answer in answers]
    rows.append({"question": "Another?"})
    source = write_virl(tmp_path / "virl", rows, {"a.png": encode_png(smooth_noise(84, 84))})
    report = prepare("virl39k", source, tmp_path / "out")
    lines = (tmp_path / "out/dropped.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == sum(report.dropped.values()) == 3
    assert any("seven\u2028teen" in json.loads(line)["detail"] for line in lines)


def test_the_schema_is_the_one_that_datasets_would_write() -> None:
    from datasets import Features, Image

    features = Features.from_arrow_schema(schema())
    assert features["images"].feature == Image()
    assert features.arrow_schema.equals(schema(), check_metadata=True)


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
    facts = manifest_of(tmp_path / "out")
    digest = hashlib.sha256((source / "39Krelease.parquet").read_bytes()).hexdigest()
    assert [(entry["name"], entry["sha256"]) for entry in facts["files"]] == [("39Krelease.parquet", digest)]
    assert (facts["rows_in"], facts["kept"], facts["dropped"], facts["patch_size"]) == (4, 4, {}, 16)
    assert facts["grader_version"] and facts["options"]["max_pixels"] == 1_003_520
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()


def test_prompt_lengths_are_the_builders_and_long_prompts_go(tmp_path, tiny_model) -> None:
    builder = PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])
    rows: list[dict] = [
        {"question": "no picture"},
        {"question": "<image>one", "image": ["images/0.jpg"]},
        {"question": "this <image> and <image>?", "image": ["images/0.jpg", "images/1.jpg"]},
    ]
    images = {f"{n}.jpg": encoded(smooth_noise(300, 100 + 400 * n, seed=n), "JPEG") for n in range(2)}
    source = write_virl(tmp_path / "virl", rows, images)
    counted = {"tokenizer": "tiny", "template": "think_answer"}
    prepare("virl39k", source, tmp_path / "all", count_tokens=builder.count_unexpanded, counted_with=counted)
    lengths = [row["prompt_tokens"] for row in rows_of(tmp_path / "all")]
    assert lengths == [len(builder.build(problem).ids) for problem in load_set(tmp_path / "all")]
    report = prepare(
        "virl39k", source, tmp_path / "short", Options(max_prompt_tokens=lengths[1]),
        count_tokens=builder.count_unexpanded,
    )  # fmt: skip
    assert (report.kept, report.dropped) == (2, {"prompt_too_long": 1})
    with pytest.raises(UserError, match="needs a tokenizer"):
        prepare("virl39k", source, tmp_path / "none", Options(max_prompt_tokens=9))


def test_the_patch_size_is_that_of_the_tokenizers_model(tmp_path, family_model, capsys) -> None:
    source = many(tmp_path / "virl", 1)
    arguments = ["prepare", "virl39k", "--source", str(source), "--tokenizer", str(family_model("qwen3_vl"))]
    assert main([*arguments, "--out", str(tmp_path / "a"), "--workers", "1"]) == 0
    assert json.loads((tmp_path / "a/manifest.json").read_text())["patch_size"] == 16
    assert main([*arguments, "--out", str(tmp_path / "b"), "--patch-size", "14"]) == 2
    assert "--patch-size 14: the model of --tokenizer" in capsys.readouterr().err and not (tmp_path / "b").exists()


@pytest.mark.parametrize("model_type", ["internvl", "idefics3", "mistral3"])
def test_tokens_of_tiles_are_those_of_the_prompt(tmp_path, family_model, model_type) -> None:
    """The counts are those of the prompts that the trainer builds, and the limit acts on them."""
    model, source = family_model(model_type), many(tmp_path / "virl", 2, width=300, height=500)
    arguments = ["prepare", "virl39k", "--source", str(source), "--tokenizer", str(model), "--workers", "1"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--max-pixels", "50176"]) == 0
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"], max_pixels=50_176)
    counts = [len(builder.build(problem).ids) for problem in load_set(tmp_path / "out")]
    assert [row["prompt_tokens"] for row in rows_of(tmp_path / "out")] == counts and counts
    few = [*arguments, "--max-pixels", "50176", "--max-prompt-tokens", str(max(counts) - 1)]
    main([*few, "--out", str(tmp_path / "few")])
    assert not (tmp_path / "few").exists() or len(rows_of(tmp_path / "few")) < len(counts)


def test_long_prompts_of_benchmarks_stay_and_are_counted(tmp_path) -> None:
    row = {"imagename": "a.png", "question": "Which?", "answer": "A", "skill": ["spatial"]}
    source = write_virl(tmp_path / "raw", [], {"a.png": encode_png(smooth_noise(84, 84))})
    (source / "dataset.json").write_text(json.dumps({"v1_0": row}))
    report = prepare("logicvista", source, tmp_path / "out", Options(max_prompt_tokens=57), count_tokens=lambda _: 50)
    assert (report.kept, report.notes["prompt_too_long"]) == (1, 1)
    assert rows_of(tmp_path / "out")[0]["prompt_tokens"] == 58  # 50, of which one is the picture, and its 3 x 3


# -- samples of the benchmarks ----------------------------------------------------------------------

SAMPLES = {  # below the folder of sample data, and how many rows are kept of it
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
@pytest.mark.parametrize("rows", ["made", pytest.param("real", marks=pytest.mark.slow)])
def test_every_sample_prepares(tmp_path, source, rows) -> None:
    if rows == "made":
        path = tmp_path / "raw"
        kept = write_sample(source, path) - (source == "logicvista")  # a row published without an answer
    else:
        folder, kept = SAMPLES[source]
        path = shared_data() / folder
    report = prepare(source, path, tmp_path / "out", Options(max_pixels=50_176, strict=True))
    assert report.kept == kept and report.test_only
    assert set(report.dropped) <= {"duplicate", "answer_missing"}
    assert "BENCHMARK" in (tmp_path / "out/report.html").read_text()


def test_a_set_of_annotations_alone_is_not_run(tmp_path) -> None:
    write_annotations("mathvista", tmp_path / "raw")
    prepare("mathvista", tmp_path / "raw", tmp_path / "mathvista")
    assert all(problem.meta["annotations_only"] for problem in load_set(tmp_path / "mathvista"))  # scorable
    with pytest.raises(UserError, match="has no image, only its annotation"):
        load_eval_sets(DataConfig(train=["x"], eval=[str(tmp_path / "mathvista")]))


def test_a_set_for_other_patches_is_refused(tmp_path) -> None:
    prepare("virl39k", many(tmp_path / "virl", 1), tmp_path / "out", Options(patch_size=16, min_pixels=4096))
    check_patch_size([tmp_path / "out"], 16)
    with pytest.raises(UserError, match="--patch-size 14"):
        check_patch_size([tmp_path / "out"], 14)
