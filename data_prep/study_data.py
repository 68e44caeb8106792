"""Make the data of a study of response length: a task's problems, and tiny models warm-started on it.

    python -m vlm_rl.data_prep.study_data runs/study-data                  # counting_shades, the short study
    python -m vlm_rl.data_prep.study_data runs/votes-data --task votes     # counting_votes, the long one

Each start is a random tiny Qwen2.5-VL with its own weights and images, taught by its task's lessons one after the
other. Each is made by a process with a single thread. What exists is kept, lesson by lesson, so the same command
makes what is missing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.quickstart_data import DRAWN, warm_examples
from vlm_rl.learner.sft import Example, warm_start
from vlm_rl.run.terminal import make_console
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_shades import SHADED_SQUARES
from vlm_rl.toy.counting_task import CountingTask
from vlm_rl.toy.counting_votes import MAX_LEAD, VOTES, CountingVotes

STARTS = {"a": 0, "b": 1}  # name -> seed
SETS_SEED = 7
NUM_TRAIN, NUM_HELDOUT = 1024, 256
WARM_BATCH = 8
ONE_ROW = CountingVotes(1, most_start=MAX_LEAD)
WEIGHT_STD = 0.08  # about 1 / sqrt(128), the model's width


@dataclass(frozen=True, slots=True)
class Lesson:
    """A part of a warm start: traces, and how they are learned."""

    task: CountingTask[Any]
    problems: int
    passes: int  # over each problem's clean trace
    sprinkled: int  # mixed traces among the clean ones
    mixture: int  # mixed traces in all; those that are not sprinkled follow the clean ones
    train: TrainConfig


@dataclass(frozen=True, slots=True)
class StudyTask:
    """A task, its tiny model's vocabulary, and the lessons of a warm start."""

    task: CountingTask[Any]
    vocabulary: int
    lessons: Sequence[Lesson]


def _rate(lr: float) -> TrainConfig:
    return TrainConfig(lr=lr, warmup_steps=20, schedule="cosine")


# A lesson ends at a learning rate of almost 0, so the mixture of styles has its own: without it the styles do not
# come out in their proportions.
STUDY_TASKS = {
    "shades": StudyTask(
        SHADED_SQUARES,
        vocabulary=512,
        lessons=[
            Lesson(SHADED_SQUARES, 4096, passes=4, sprinkled=1200, mixture=3600, train=_rate(1.5e-3)),
            Lesson(SHADED_SQUARES, 1024, passes=0, sprinkled=0, mixture=2400, train=_rate(5e-4)),
        ],
    ),
    "votes": StudyTask(
        VOTES,
        vocabulary=1500,
        lessons=[
            Lesson(ONE_ROW, 8000, passes=0, sprinkled=0, mixture=8000, train=_rate(2e-3)),
            Lesson(VOTES, 2400, passes=0, sprinkled=0, mixture=2400, train=_rate(1.5e-3)),
        ],
    ),
}


def make_study_data(out: Path, study: str) -> None:
    """Make what is missing in `out`: train, heldout, and start-NAME for every start, side by side."""
    prepare_sets(out, STUDY_TASKS[study].task)
    missing = [name for name in STARTS if not (out / f"start-{name}").is_dir()]
    make_console().print(f"warm starts to make: {', '.join(missing) or 'none'}")
    command = [sys.executable, "-m", "vlm_rl.data_prep.study_data", str(out), "--task", study, "--start"]
    processes = [subprocess.Popen([*command, name]) for name in missing]
    failed = [name for name, process in zip(missing, processes, strict=True) if process.wait() != 0]
    if failed:
        raise SystemExit(f"these warm starts failed: {', '.join(failed)}; run the same command again")


def prepare_sets(out: Path, task: CountingTask[Any]) -> None:
    """Make the problems that every run trains on, and the held-out ones."""
    if all((out / split).is_dir() for split in ("train", "heldout")):
        return
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as name:
        raw = task.write(Path(name) / "raw", seed=SETS_SEED, train=NUM_TRAIN, heldout=NUM_HELDOUT, warm=1, mixture=0)
        for split in ("train", "heldout"):
            if not (out / split).is_dir():  # else a command that was stopped later on has made it
                prepare("virl39k", raw / split, out / split, DRAWN)


def make_start(out: Path, study: StudyTask, name: str) -> None:
    """Warm-start a tiny model, lesson by lesson; `out`/start-NAME appears when it is complete."""
    import torch

    from vlm_rl.toy.tiny_model import build_tiny_model

    torch.set_num_threads(1)
    seed, work = STARTS[name], out / f"work-{name}"
    texts = study.task.tokenizer_texts()
    shutil.rmtree(work / "tiny", ignore_errors=True)
    model = build_tiny_model(
        work / "tiny", seed=seed, tokenizer_texts=texts, vocabulary=study.vocabulary, weight_std=WEIGHT_STD
    )
    for number, lesson in enumerate(study.lessons):
        folder = work / str(number)
        learned = folder / "model"
        if not learned.is_dir():  # else a command that was stopped later on has learned it
            shutil.rmtree(folder, ignore_errors=True)
            examples = _examples(folder, lesson, seed=number * len(STARTS) + seed)
            builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
            part = folder / "part"
            warm_start(examples, part, model_path=model, builder=builder, config=lesson.train, batch_size=WARM_BATCH)
            part.rename(learned)
        model = learned
    model.rename(out / f"start-{name}")
    shutil.rmtree(work)


def _examples(work: Path, lesson: Lesson, *, seed: int) -> Sequence[Example]:
    raw = lesson.task.write(work / "raw", seed=seed, train=1, heldout=1, warm=lesson.problems, mixture=lesson.mixture)
    prepare("virl39k", raw / "warm", work / "warm", DRAWN)
    return warm_examples(raw / "warm", work / "warm", seed=seed, passes=lesson.passes, sprinkled=lesson.sprinkled)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/study-data"))
    parser.add_argument("--task", choices=STUDY_TASKS, default="shades")
    parser.add_argument("--start", choices=STARTS, help="make this start only")
    arguments = parser.parse_args()
    if arguments.start:
        make_start(arguments.out, STUDY_TASKS[arguments.task], arguments.start)
    else:
        make_study_data(arguments.out, arguments.task)
