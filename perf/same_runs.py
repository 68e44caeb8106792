"""The probe `runs` of same_results.py: files that one commit wrote, opened by another.

The base commit writes them once, by its commands: prepared sets, a supervised run, three training runs with a
checkpoint after each step (GRPO with a reference model, HA-DW with groups in progress, LoRA with asynchronous saves),
and two evaluations. Both commits then get the same copy. Each reports, shows, evaluates, compares and exports what is
there, and resumes every run for two more steps. The probe compares how each command ends, and every file that it
writes:

    .json .jsonl .yaml   each value, except times and the version of the code
    .parquet             each value of each row
    .safetensors         the SHA-256 of each tensor
    .pt                  by the manifest of its checkpoint, which holds its SHA-256
    .html                the data of each chart, and how often each number is in the text
    data/*.js            what the static demo shows

A commit that refuses what the base wrote must name the version that wrote it. The probe says where it does not.

Two idle cores take two minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from PIL import Image, ImageDraw

COLORS = {"red": (206, 66, 60), "blue": (64, 104, 190), "green": (70, 150, 92)}
QUESTION = "How many squares are red?"
TOKENIZER_TEXTS = (
    QUESTION,
    "Think about the problem first, step by step, inside <think> </think>. Then give the final answer in \\boxed{}.",
    "<think>about 0 1 2 3 4</think><answer>\\boxed{0}</answer>",
)
SFT = {
    "out": "sft",
    "seed": 1,
    "model": {"path": "tiny"},
    "data": {"train": ["train"], "max_prompt_tokens": 256, "max_response_tokens": 32},
    "train": {"steps": 40, "mini_batch_prompts": 8, "micro_batch_tokens": 1000, "lr": 3e-3, "schedule": "cosine"},
    "checkpoint": {"every": 20},
}
RUN = {
    "out": "grpo",
    "seed": 2,
    "model": {"path": "sft"},
    "data": {"train": ["train"], "eval": ["train-held-out"], "max_prompt_tokens": 256},
    "algorithm": {"name": "grpo", "kl_coef": 0.01},
    "reward": {"overlong_buffer": 4},
    "rollout": {"sampler": "transformers", "prompts_per_step": 4, "responses_per_prompt": 4, "max_tokens": 20},
    "train": {"steps": 2, "mini_batch_prompts": 2, "micro_batch_tokens": 1000, "lr": 1e-3, "schedule": "cosine"},
    "eval": {"every": 1, "samples": 2, "temperature": 1.0},
    "checkpoint": {"every": 1},
}
OTHER = "algorithm.kl_coef=0 eval.every=0"  # than GRPO's
CARRIED = f"algorithm.name=luspo algorithm.hadw.enabled=true rollout.carry_over=0.34 train.zero_stage=0 {OTHER}"
LORA = f"algorithm.name=dapo model.lora.rank=4 model.lora.alpha=8 checkpoint.async_save=true {OTHER}"
PREPARE = "prepare source/rows.jsonl --keep-duplicates --response response"
EVAL = "eval --sampler transformers --max-prompt-tokens 256"
SAMPLED = "--temperature 1 --samples 2"

# Rounds of commands. Those of a round run side by side.
WRITING = (
    (f"{PREPARE} --hold-out 0.25 --out train",),
    ("sft sft.yaml",),
    ("train run.yaml", f"train run.yaml out=carried {CARRIED}", f"train run.yaml out=lora {LORA}"),
    (
        f"{EVAL} --model grpo --data train-held-out --out eval-grpo",
        f"{EVAL} --model lora/1 --data train-held-out {SAMPLED} --out eval-lora",
    ),
)
OPENING = (
    (
        f"{EVAL} --model carried/1 --data train-held-out train --out eval-carried",
        f"{EVAL} --model lora --data train-held-out {SAMPLED} --out eval-lora-2",
        "export grpo --out exported",
        "export lora/1 --out adapter",
        "export lora --merge --out merged",
        "report grpo --out report.html",
        "report grpo carried lora --out reports.html",
        "demo grpo eval-grpo eval-lora --bundle site",
        "eval compare eval-grpo eval-lora --json compared.json",
        f"{PREPARE} --hold-out 0.25 --out again",
        f"{PREPARE} --against train train-held-out --keep-overlap --out overlapping",
    ),
    (
        "train grpo train.steps=4 --resume",
        "train carried train.steps=4 --resume",
        "train lora train.steps=4 --resume",
        "sft sft train.steps=42 --resume",
        "eval compare eval-grpo eval-carried --json compared-carried.json",
        "eval compare eval-lora eval-lora-2 --json compared-lora.json",
    ),
)
TIMES = ("timing/", "step_time", "verifier/", "speed/")  # these differ from run to run
UNCOMPARED = (*TIMES, "versions/code", "config_sha256")
Results = dict[str, Any]  # name of a value -> the value


def probe_runs(tree: Path, work: Path, samples: Path) -> Results:
    """Let a commit open what the first one that was asked wrote. Raises SystemExit where that one cannot."""
    written, copy = work / "written", work / "runs"
    is_base = not written.exists()
    if is_base:
        write(tree, copy)
        copy.rename(written)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(written, copy)  # at the place where it was written: adapters name their base by its whole path
    ends = carry_out(tree, copy, OPENING)
    if is_base:
        raise_failed(ends)
    results: Results = dict(ends)
    for path in changed_files(copy, written):
        name = path.relative_to(copy).as_posix()
        results |= {f"{name}{key}": value for key, value in values_of(path) if not any(u in key for u in UNCOMPARED)}
    return results


# --- what is written --------------------------------------------------------------------------------


def write(tree: Path, folder: Path) -> None:
    """Write everything with a commit's code into a new folder. Raises SystemExit where a command fails."""
    draw_source(folder / "source")
    (folder / "sft.yaml").write_text(yaml.safe_dump(SFT), encoding="utf-8")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")
    module = next(tree.glob("vlm_rl/**/tiny_model.py")).relative_to(tree).with_suffix("")
    code = (
        f"import json, sys; from pathlib import Path; from {'.'.join(module.parts)} import build_tiny_model\n"
        "build_tiny_model(Path('tiny'), tokenizer_texts=json.loads(sys.argv[1]), weight_std=0.08)\n"
    )
    done = python(tree, "-c", code, json.dumps(TOKENIZER_TEXTS), folder=folder)
    raise_failed({"build_tiny_model": end_of(done)} | carry_out(tree, folder, WRITING))


def draw_source(folder: Path) -> None:
    """Write 40 problems with images of four squares, and responses in the right format that guess."""
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(40):
        names = rng.choices(list(COLORS), k=4)
        image = Image.new("RGB", (56, 56), "white")
        for square, name in enumerate(names):
            x, y = 28 * (square % 2) + rng.randint(2, 6), 28 * (square // 2) + rng.randint(2, 6)
            ImageDraw.Draw(image).rectangle((x, y, x + 20, y + 20), fill=COLORS[name])
        image.save(folder / "images" / f"{number}.png")
        reasoning, guess = "about " * rng.randint(1, 8), rng.randint(0, 2)
        response = f"<think>{reasoning}{guess}</think><answer>\\boxed{{{guess}}}</answer>"
        row = {"image": f"images/{number}.png", "question": QUESTION, "answer": str(names.count("red"))}
        rows.append(json.dumps(row | {"response": response}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")


# --- commands ---------------------------------------------------------------------------------------


def python(tree: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a commit's code in a folder, on one thread."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def carry_out(tree: Path, folder: Path, rounds: Sequence[Sequence[str]]) -> dict[str, str]:
    """Run the commands, and return how each has ended; "" is well."""

    def one(command: str) -> str:
        return end_of(python(tree, "-m", "vlm_rl.cli", *shlex.split(command), folder=folder))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {
            command: end
            for commands in rounds
            for command, end in zip(commands, pool.map(one, commands), strict=True)
        }


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return "", or what a process that failed said last; a refusal that names no version is marked."""
    if done.returncode == 0:
        return ""
    is_marked = done.returncode == 2 and not re.search(r"vlm-rl \d+\.\d+", done.stderr)
    mark = " WITHOUT NAMING A VERSION" if is_marked else ""
    return f"ended with {done.returncode}{mark}: {done.stderr[-1500:].strip()}"


def raise_failed(ends: Mapping[str, str]) -> None:
    """Raise SystemExit for the first command that the base failed in: nothing can be compared with that."""
    for command, end in ends.items():
        if end:
            raise SystemExit(f"the base: {command}: {end}")


# --- values of files --------------------------------------------------------------------------------


def changed_files(copy: Path, written: Path) -> Iterator[Path]:
    """Yield the files that are new in a copy, or were written again."""
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        before = written / path.relative_to(copy)
        if not before.exists() or before.stat().st_mtime_ns != path.stat().st_mtime_ns:
            yield path


def values_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name in the file, value) of a file that holds values; nothing of any other."""
    read = READERS.get(path.name) or READERS.get(path.suffix)
    if read and (path.suffix != ".js" or path.parent.name == "data"):
        yield from read(path)


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of every value in nested JSON."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from flat(value, f"{path}/{index}")
    else:
        yield path, tree


def of_json(path: Path) -> Iterator[tuple[str, Any]]:
    tree = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "MANIFEST.json":
        del tree["sha256"]  # of the whole text, versions included
    yield from flat(tree)


def of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    yield from flat([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def of_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    yield from flat(yaml.safe_load(path.read_text(encoding="utf-8")))


def of_table(path: Path) -> Iterator[tuple[str, Any]]:
    yield from flat(pq.read_table(path).to_pylist())


def of_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield f"/{name}", (entry["dtype"], hashlib.sha256(data[start + begin : start + end]).hexdigest())


def of_page(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8")
    for number, chart in enumerate(re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)):
        yield from flat(json.loads(chart).get("datasets"), f"/chart {number}")
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
    for number, count in Counter(re.findall(r"\d[\d.,]*", words)).items():
        yield f"/how often {number}", count


def of_script(path: Path) -> Iterator[tuple[str, Any]]:
    """A call of one function with JSON."""
    text = path.read_text(encoding="utf-8")
    yield from flat(json.loads(f"[{text[text.index('(') + 1 : text.rindex(')')]}]"))


def of_bytes(path: Path) -> Iterator[tuple[str, Any]]:
    yield "", hashlib.sha256(path.read_bytes()).hexdigest()


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {  # by name or suffix
    "tokenizer.json": of_bytes,
    ".png": of_bytes,
    ".json": of_json,
    ".jsonl": of_lines,
    ".yaml": of_yaml,
    ".parquet": of_table,
    ".safetensors": of_tensors,
    ".html": of_page,
    ".js": of_script,
}
