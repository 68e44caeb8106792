"""Measure the speed and memory of data preparation, on made-up files of the size of ViRL39K and DAPO-Math-17k.

    python perf/prepare.py                                # 38,870 rows with pictures, 1,791,700 rows of text
    python perf/prepare.py --rows 2000 --dapo-rows 100000

Images are diagrams (PNG) and photographs (JPEG), in sizes spread like those of school problems. The files
of the first set are two hundred different ones, linked under many names. The first table shows the cost of
each stage; then the whole command runs with worker processes. Memory is read while it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFilter

from vlm_rl.data.images import decode, encode_jpeg, encode_png, fit_to_grid
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import read_manifest
from vlm_rl.data_prep.filters import cached
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.prepared_images import perceptual_hash, prepare_image
from vlm_rl.data_prep.prepared_set import SetWriter, schema, sha256, to_row
from vlm_rl.data_prep.readers.image_files import ImageFile
from vlm_rl.grading.grader import Grader
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.toy.virl_layout import VIRL_COLUMNS
from vlm_rl.types import Problem

POOL = 200  # different images
TEXT = (
    "the triangle circle radius length angle find value number students total price hours square chart shows "
    "what is how many of in with and between figure point line area perimeter sum difference percent each"
)
WORDS = TEXT.split()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed and memory of data preparation.")
    parser.add_argument("--rows", type=int, default=38_870)
    parser.add_argument("--dapo-rows", type=int, default=1_791_700)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/perf-prepare"), help="scratch folder, removed at the end"
    )
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    try:
        model = build_tiny_model(options.folder / "model", tokenizer_texts=[*SQUARES.tokenizer_texts(), TEXT])
        if options.rows:
            measure_images(options.folder, options.rows, options.workers, model)
        if options.dapo_rows:
            measure_text(options.folder, options.dapo_rows)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


# -- rows with images ------------------------------------------------------------------------------


def measure_images(folder: Path, rows: int, workers: int, model: Path) -> None:
    """Print the cost of each stage, and then the speed and memory of the command on `rows` rows."""
    source = make_virl(folder / "virl", rows)
    files = sorted((source / "pool").iterdir())
    size = sum(file.stat().st_size for file in files) / len(files)
    print(f"\n{rows:,} rows with an image each, {size / 1e3:.0f} kB on average")
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    decode_seconds = measure_stages(files, folder, builder)
    usage = Usage.of("virl39k", source, folder / "set", "--strict", "--tokenizer", model, "--workers", workers)
    kept = read_manifest(folder / "set")["kept"]
    assert kept == rows, kept
    processes = f"{workers} worker{'s' * (workers > 1)}"
    print(f"\nwhole path, {processes}: {rows / usage.seconds:.0f} rows/s ({usage.seconds:.0f} s on the clock)")
    print(
        f"{usage.cpu_seconds:.0f} CPU seconds: {rows / usage.cpu_seconds:.0f} rows per CPU second, "
        f"{usage.cpu_seconds / rows / decode_seconds:.1f} times the pure decoding"
    )
    print(f"memory of all processes: {usage.memory()}")


def measure_stages(files: list[Path], folder: Path, builder: PromptBuilder) -> float:
    """Print rows per CPU second of each stage; returns the CPU seconds of decoding an image."""
    grid, arrow_schema = Options().grid, schema()
    encoded = [file.read_bytes() for file in files]
    decoded = [decode(data, where="x") for data in encoded]
    limits = {"min_pixels": grid.min_pixels, "max_pixels": grid.max_pixels}
    fitted = [fit_to_grid(item.image, **limits) for item in decoded]
    images = [prepare_image(ImageFile(f.parent, f.name), where="x", grid=grid, test_only=False) for f in files]
    problems = [make_problem(number, (image.data,)) for number, image in enumerate(images)]
    rows = [to_row(problem, [image]) for problem, image in zip(problems, images, strict=True)]
    encoders = [encode_jpeg if item.format == "JPEG" else encode_png for item in decoded]

    def write() -> None:
        with SetWriter(folder / "stage.parquet", arrow_schema) as writer:
            writer.add_rows(rows)
        sha256(folder / "stage.parquet")

    with Grader() as grader:
        check = cached(grader.verifies_itself)
        grader.verifies_itself(problems[0])
        work: dict[str, Callable[[], object]] = {
            "read": lambda: [file.read_bytes() for file in files],
            "decode": lambda: [Image.open(io.BytesIO(data)).load() for data in encoded],
            "check": lambda: [decode(data, where="x") for data in encoded],
            "resize": lambda: [fit_to_grid(item.image, **limits) for item in decoded],
            "encode": lambda: [encode(image) for encode, image in zip(encoders, fitted, strict=True)],
            "hash": lambda: [(digest(d), perceptual_hash(f)) for d, f in zip(encoded, fitted, strict=True)],
            "gold": lambda: [check(p) for p in problems],  # without the judges: other processes, once per gold
            "tokenise": lambda: [builder.count_unexpanded(problem) for problem in problems],
            "write": write,
        }
        times = {name: cpu_time_of(run) / len(files) for name, run in work.items()}
    times["check"] = max(0.0, times["check"] - times["decode"])  # limits, orientation, RGB, a copy without metadata
    total = sum(times.values())
    print("stage     rows per CPU second   ms/row   share")
    for name, seconds in [*times.items(), ("all", total)]:
        rate = f"{1 / seconds:.0f}" if seconds > 1e-6 else "-"
        print(f"{name:<9}{rate:>20}{1e3 * seconds:>9.2f}{100 * seconds / total:>6.0f} %")
    most = max(times, key=times.__getitem__)
    print(f"all is {total / times['decode']:.1f} times the pure decoding; the most goes to {most}")
    return times["decode"]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def cpu_time_of(run: Callable[[], object]) -> float:
    """Return the smaller CPU time of two runs: the first also pays for new memory."""
    times = []
    for _ in range(2):
        before = time.process_time()
        run()
        times.append(time.process_time() - before)
    return min(times)


def make_virl(folder: Path, rows: int) -> Path:
    """Write a data set in ViRL39K's layout."""
    rng = np.random.default_rng(0)
    (folder / "pool").mkdir(parents=True)
    (folder / "images").mkdir()
    pool = []
    for number in range(min(POOL, rows)):
        is_photo = number % 2 == 0
        width, height = (int(np.clip(rng.lognormal(np.log(side), 0.55), 60, 2400)) for side in (520, 400))
        image = photograph(width, height, rng) if is_photo else diagram(width, height, rng)
        file = folder / "pool" / f"{number}.{'jpg' if is_photo else 'png'}"
        image.save(file, quality=88)  # PNG has none
        pool.append(file)
    golds = ["A", "B", "C", "D", r"\frac{3}{4}", r"17^\circ", "2.5", r"2\sqrt{3}", "5 cm"]
    table = []
    for number in range(rows):
        file = pool[number % len(pool)]
        name = f"images/{number}{file.suffix}"
        os.link(file, folder / name)
        gold = golds[number % len(golds)] if number % 3 else str(rng.integers(1, 500))
        table.append(
            {
                "question": f"<image>{sentence(rng, 30)} ({number})?",
                "answer": rf"\boxed{{{gold}}}",
                "PassRate_32BTrained": float(rng.random()),
                "PassRate_7BBase": -1.0,
                "category": "Tables/Diagrams/Charts",
                "source": "made",
                "qid": f"made-{number}",
                "image": [name],
            }
        )
    pq.write_table(pa.Table.from_pylist(table, schema=VIRL_COLUMNS), folder / "39Krelease.parquet")
    return folder


def photograph(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw colours at several scales with grain, which compress like a photograph."""
    sizes = (4, 16, 64)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((width, height)) for n in sizes]
    mixed = np.zeros((height, width, 3))
    for layer, share in zip(layers, (0.5, 0.3, 0.2), strict=True):
        mixed += np.asarray(layer, dtype=np.float32) * share
    return Image.fromarray(np.clip(mixed + rng.normal(0, 4, mixed.shape), 0, 255).astype(np.uint8))


def diagram(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw lines, circles and labels on white, smoothed as a scan is."""
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(25):
        x, y, u, v = (int(value) for value in rng.integers(0, [width, height, width, height]))
        pen.line((x, y, u, v), fill=tuple(int(c) for c in rng.integers(0, 160, 3)), width=2)
        pen.ellipse((min(x, u), min(y, v), max(x, u), max(y, v)), outline="black", width=2)
        pen.text((x, y), f"{u} cm", fill="black")
    return image.filter(ImageFilter.GaussianBlur(0.6))


def make_problem(number: int, images: tuple[bytes, ...]) -> Problem:
    rng = np.random.default_rng(number)
    gold = ["B", "12", r"\frac{3}{4}", "2.5"][number % 4]
    kind = ("choice", "integer", "expression", "float")[number % 4]
    return Problem(
        id=str(number), question=f"<image>{sentence(rng, 30)}", images=images, answer=gold, answer_type=kind
    )


def sentence(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), words))


# -- text ------------------------------------------------------------------------------------------


def measure_text(folder: Path, rows: int) -> None:
    """Print the speed and memory of the command on a file like DAPO's, whose copies are counted."""
    problems = max(rows // 100, 1)
    file = make_dapo(folder / "dapo.parquet", rows, problems)
    print(f"\n{rows:,} rows of text, {problems:,} different problems, {file.stat().st_size / 1e6:.0f} MB")
    usage = Usage.of("dapo", file, folder / "dapo-set")
    facts = read_manifest(folder / "dapo-set")
    assert (facts["rows_in"], facts["kept"]) == (rows, problems), facts
    print(f"prepared in {usage.seconds:.1f} s on the clock, {usage.cpu_seconds:.1f} CPU seconds")
    print(f"memory of all processes: {usage.memory()}")


def make_dapo(file: Path, rows: int, problems: int) -> Path:
    """Write a Parquet file in DAPO's schema in which every problem occurs about 100 times, in random order."""
    rng = np.random.default_rng(0)
    head = (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    tail = '\n\nRemember to put your answer on its own line after "Answer:".'
    prompts = [[{"content": f"{head}{sentence(rng, 40)} {n}?{tail}", "role": "user"}] for n in range(problems)]
    golds = [{"ground_truth": str(n % 1000), "style": "rule-lighteval/MATH_v2"} for n in range(problems)]
    extra = [{"index": f"{n:08x}-0000-4000-8000-000000000000"} for n in range(problems)]
    unique = pa.table({"prompt": prompts, "reward_model": golds, "extra_info": extra})
    order = rng.permutation(np.arange(rows) % problems)
    with pq.ParquetWriter(file, unique.schema) as writer:
        for start in range(0, rows, 50_000):
            writer.write_table(unique.take(pa.array(order[start : start + 50_000])))
    return file


# -- memory and time -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Time and memory of a `vlm-rl prepare`, its start and its worker processes included.

    CPU time does not depend on what else runs on the machine. Memory is sampled twice a second; pages that
    several processes share count once (proportional set size).
    """

    seconds: float
    cpu_seconds: float
    samples_mb: list[float]

    @classmethod
    def of(cls, source: str, path: Path, out: Path, *options: object) -> Usage:
        """Run the command; an error ends the measurement."""
        command = ["prepare", source, "--source", path, "--out", out, *options]
        start, before, samples = time.perf_counter(), ended_cpu_seconds(), []
        with psutil.Popen([sys.executable, "-m", "vlm_rl", *map(str, command)], stdout=subprocess.DEVNULL) as run:
            while True:
                try:
                    code = run.wait(timeout=0.5)
                    break
                except psutil.TimeoutExpired:
                    samples.append(memory_mb([run, *run.children(recursive=True)]))
        if code:
            raise SystemExit(f"vlm-rl {' '.join(map(str, command))} failed")
        return cls(time.perf_counter() - start, ended_cpu_seconds() - before, samples)

    def memory(self) -> str:
        parts = [max(part) for part in np.array_split(self.samples_mb, 8) if len(part)]
        most = max(self.samples_mb)
        return f"at most {most:.0f} MB; in each eighth of the run {', '.join(f'{part:.0f}' for part in parts)} MB"


def memory_mb(processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with suppress(psutil.Error):  # it has just ended
            total += process.memory_full_info().pss
    return total / 1e6


def ended_cpu_seconds() -> float:
    """Return the CPU time of the children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
