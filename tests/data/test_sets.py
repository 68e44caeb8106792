"""The order of prompts, the ledger, and what is refused before training begins."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import toy_problem, toy_set
from vlm_rl.config import DataConfig
from vlm_rl.data.sets import check_is_set, contaminated_sources, load_set, load_training_sets, refuse_contaminated
from vlm_rl.data.stored_images import ImageColumn
from vlm_rl.errors import UserError
from vlm_rl.types import Problem

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"min_pixels": 3136, "max_pixels": 1_003_520}


def problem(index: int = 0, **changes: object) -> Problem:
    return replace(toy_problem(index, "train", 4), **changes)


def write(out: Path, *problems: Problem, **manifest: object) -> str:
    return str(write_problems(problems, out, {**LIMITS, **manifest}))


def load(*paths: str, **settings: object) -> list[Problem]:
    return load_training_sets(DataConfig(train=list(paths), **settings))


LIGHT = """
import sys
import vlm_rl.data.images, vlm_rl.model_files.model_folder, vlm_rl.data.sets
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""


def test_all_but_the_prompt_builder_import_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


# -- prepared sets -------------------------------------------------------------------------------


def test_a_prepared_set_comes_back_as_it_was(tmp_path) -> None:
    problems = [
        problem(0, meta={"precision": 2}, difficulty=0.25, category="Spatial"),
        problem(1, question="no picture", images=(), answer="B", answer_type="choice", choices=("1", "2")),
    ]
    assert load_set(write(tmp_path / "set", *problems)) == problems


MEASURE = """
import hashlib, random, sys
import psutil
import vlm_rl.distributed  # torch, which load_set loads when it is first called
from vlm_rl.data.sets import load_set
process = psutil.Process()
before = process.memory_info().rss
problems = load_set(sys.argv[1])
print((process.memory_info().rss - before) / 2**20)
drawn = random.Random(0).sample(range(len(problems)), 100)
digests = [hashlib.sha256(problems[index].images[0]).hexdigest() for index in drawn]
print((process.memory_info().rss - before) / 2**20)
print(*drawn)
print(*digests)
"""


@pytest.mark.slow
def test_images_stay_in_the_file(tmp_path) -> None:
    """100 MB of pictures: neither loading nor drawing rows in random order holds them all."""

    def pixels(index: int) -> bytes:
        return np.random.default_rng(index).bytes(200_000)

    folder = write(tmp_path / "set", *(problem(0, id=f"p{index}", images=(pixels(index),)) for index in range(500)))
    command = [sys.executable, "-c", MEASURE, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True, cwd=ROOT)
    loaded, drawn, rows, digests = done.stdout.splitlines()
    assert float(loaded) < 40 and float(drawn) < 80
    assert digests.split() == [hashlib.sha256(pixels(int(row))).hexdigest() for row in rows.split()]


def test_images_of_any_row_in_any_order_are_those_of_the_file(tmp_path, monkeypatch) -> None:
    """Rows of none, one and three pictures over several row groups; the two that were read last are kept."""
    counts = [index % 4 if index % 4 != 2 else 0 for index in range(40)]
    written = [
        problem(
            0,
            id=f"p{index}",
            question="<image>" * count + "?",
            images=tuple(bytes([index, part]) * 50 for part in range(count)),
        )
        for index, count in enumerate(counts)
    ]
    problems = load_set(write(tmp_path / "set", *written))
    assert [len(p.images) for p in problems] == counts
    file = ImageColumn(tmp_path / "set" / "data.parquet")
    assert pq.ParquetFile(file.path).num_row_groups == 3
    per_group = sum(100 * count for count in counts[:16])
    monkeypatch.setattr("vlm_rl.data.stored_images.KEPT_BYTES", 2 * per_group)
    for index in [39, 0, 20, 1, 38, 17, 2, 39]:
        assert file.row(index) == written[index].images
        assert len(file._kept) <= 2 and file._num_kept_bytes <= 2 * per_group
        assert file._num_kept_bytes == sum(len(b) for rows in file._kept.values() for row in rows for b in row)
    three = problems[3].images
    assert (three[0], three[-1], three[1:]) == (written[3].images[0], written[3].images[2], written[3].images[1:])
    assert three == list(written[3].images) and three != written[7].images
    assert hash(three) == hash(written[3].images)


def test_several_threads_may_read_the_images(tmp_path, monkeypatch) -> None:
    """Where one row group is kept, each thread makes the other's go; a pause where they count lets them meet."""
    images = [(bytes([index]) * 50,) for index in range(48)]
    problems = [problem(0, id=f"p{i}", question="<image>?", images=data) for i, data in enumerate(images)]
    file = ImageColumn(Path(write(tmp_path / "set", *problems)) / "data.parquet")
    monkeypatch.setattr("vlm_rl.data.stored_images.KEPT_BYTES", 1)
    monkeypatch.setattr("vlm_rl.data.stored_images._num_bytes", lambda rows: time.sleep(0.002) or 1000)
    order = [0, 20, 40] * 5
    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(lambda rows: [file.row(index) for index in rows], [order, order[::-1]]):
            assert rows in ([images[index] for index in order], [images[index] for index in order[::-1]])


def test_images_that_can_no_longer_be_read_name_the_file(tmp_path) -> None:
    folder = Path(write(tmp_path / "set", problem(0)))
    (loaded,) = load_set(folder)
    with (folder / "data.parquet").open("r+b") as file:  # in place, as something else might
        file.truncate(8)
    with pytest.raises(UserError, match=r"data\.parquet: the images of row group 0 cannot be read"):
        list(loaded.images)


def test_a_folder_that_is_no_prepared_set(tmp_path) -> None:
    with pytest.raises(UserError, match=r"not a prepared set.*vlm-rl prepare"):
        load_set(tmp_path)


def test_a_missing_column_is_named(tmp_path) -> None:
    folder = Path(write(tmp_path / "set", problem()))
    table = pq.read_table(folder / "data.parquet").drop_columns(["answer"])
    pq.write_table(table, folder / "data.parquet")
    with pytest.raises(UserError, match=r"data\.parquet: column 'answer' is missing"):
        load_set(folder)


PICTURE = problem().images[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer": ""}, "has no answer"),
        ({"question": "<image> <image> How many?"}, "2 <image> markers in its question but 1 images"),
        ({"question": "How many?"}, "0 <image> markers in its question but 1 images"),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, words) -> None:
    folder = write(tmp_path / "set", problem(0), problem(1, **changes))
    with pytest.raises(UserError, match=rf"data\.parquet row 1: problem 'Toy-train-1'.*{words}"):
        load_set(folder)


@pytest.mark.parametrize("data", [b"", b"no picture", PICTURE[: len(PICTURE) // 2]], ids=["empty", "text", "cut"])
def test_an_unreadable_image_in_a_file_that_was_changed(tmp_path, data) -> None:
    folder = Path(write(tmp_path / "set", problem(0), problem(1)))
    rows = pq.read_table(folder / "data.parquet")
    records = rows.to_pylist()
    records[1]["images"][0]["bytes"] = data
    pq.write_table(pa.Table.from_pylist(records, schema=rows.schema), folder / "data.parquet")
    with pytest.raises(UserError, match=r"data\.parquet row 1: problem 'Toy-train-1' image 0.*prepare again"):
        load_set(folder)


def test_a_file_that_is_no_parquet(tmp_path) -> None:
    folder = Path(write(tmp_path / "set", problem()))
    (folder / "data.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match=r"data\.parquet cannot be read as Parquet.*prepare the set again"):
        load_set(folder)


def test_two_sets_are_read_in_order(tmp_path) -> None:
    first, second = write(tmp_path / "one", problem(0)), write(tmp_path / "two", problem(1), problem(2))
    assert [p.id for p in load(second, first)] == ["Toy-train-1", "Toy-train-2", "Toy-train-0"]


def test_an_id_in_two_sets_is_refused(tmp_path) -> None:
    first, second = write(tmp_path / "one", problem(0)), write(tmp_path / "two", problem(0))
    with pytest.raises(UserError, match=r"'Toy-train-0' is in .*one and again in .*two"):
        load(first, second)


@pytest.mark.parametrize("key", ["min_pixels", "max_pixels"])
def test_other_pixel_limits_are_refused(tmp_path, key) -> None:
    path = write(tmp_path / "set", problem(), **{key: 4000})
    with pytest.raises(UserError, match=f"prepared with {key} 4000, but data.{key} is {LIMITS[key]}"):
        load(path)
    assert load(path, **{key: 4000})


# -- benchmarks ----------------------------------------------------------------------------------

TEST_ROW = {"source": "MathVision", "meta": {"test_only": True}}


def test_rows_of_a_benchmark_are_refused(tmp_path) -> None:
    path = write(tmp_path / "set", problem(0), problem(1, **TEST_ROW))
    with pytest.raises(UserError, match=r"'Toy-train-1' belongs to a benchmark \(MathVision\).*allow_test_rows"):
        load(path)
    problems = load(path, allow_test_rows=True)
    assert contaminated_sources(problems) == ["MathVision"]


def test_a_clean_set_contaminates_nothing(tmp_path) -> None:
    assert contaminated_sources(load(write(tmp_path / "set", problem()))) == []


def test_a_benchmark_that_was_trained_on_is_not_evaluated() -> None:
    benchmark = [problem(0, **TEST_ROW), problem(1, source="WeMath", meta={"test_only": True})]
    with pytest.raises(UserError, match=r"trained on rows of WeMath \(CONTAMINATED\)"):
        refuse_contaminated("sets/mixed", benchmark, ["WeMath"])
    refuse_contaminated("sets/mixed", benchmark, ["DynaMath"])
    refuse_contaminated("sets/mixed", benchmark, [])


def test_a_hub_id_in_place_of_a_set_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORG/NAME below no folder here; a path below a folder that is here is a folder that is missing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="`vlm-rl prepare lmms-lab/Math --out data/Math`, and then data/Math"):
        check_is_set("lmms-lab/Math")
    Path("data").mkdir()
    with pytest.raises(UserError) as refused:
        check_is_set("data/train")
    assert "--out data/train" in str(refused.value) and "data set of the hub" not in str(refused.value)


def test_stored_images_travel_as_their_place(tmp_path: Path) -> None:
    """To the processes of users' environments: a pickle of a problem holds no picture."""
    problem = load_set(toy_set(tmp_path / "set", count=3, split="train"))[1]
    packed = pickle.dumps(problem)
    assert b"PNG" in problem.images[0] and b"PNG" not in packed
    assert tuple(pickle.loads(packed).images) == tuple(problem.images)


def test_a_tool_may_see_more_than_the_prompt(tmp_path: Path) -> None:
    """Images stored larger than data.max_pixels are refused, unless an environment may look closer; never smaller."""
    folder = toy_set(tmp_path / "set", count=3, split="train")  # at most 1,003,520 pixels
    config = DataConfig(train=[str(folder)], max_pixels=7056)
    with pytest.raises(UserError, match="was prepared with max_pixels 1003520"):
        load_training_sets(config)
    assert len(load_training_sets(config, may_be_larger=True)) == 3
    with pytest.raises(UserError, match="was prepared with max_pixels"):
        load_training_sets(config.model_copy(update={"max_pixels": 2_000_000}), may_be_larger=True)
