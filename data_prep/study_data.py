"""Make the data of the study of response length: the shades task and two warm-started tiny models.

    python -m vlm_rl.data_prep.study_data runs/study-data

Each start is a random tiny Qwen2.5-VL with its own weights and images. It has learned to scan and was then shown
every style of response (vlm_rl.data_prep.counting_shades). Each is made by a process with a single thread. What
exists is kept, so the same command makes what is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data_prep.counting_shades import SHADED_SQUARES
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.quickstart_data import DRAWN, warm_examples
from vlm_rl.learner.sft import Example, warm_start
from vlm_rl.run.terminal import make_console
from vlm_rl.templates import TEMPLATES

STARTS = {"a": 0, "b": 1}  # name -> seed
SETS_SEED = 7
NUM_TRAIN, NUM_HELDOUT = 1024, 256
SCAN_PROBLEMS, SCAN_PASSES, SCAN_SPRINKLED, SCAN_MIXTURE = 4096, 4, 1200, 3600
SHOWN_PROBLEMS, SHOWN_MIXTURE = 1024, 2400
WARM_BATCH = 8
WEIGHT_STD = 0.08  # about 1 / sqrt(128), the model's width
SCAN = TrainConfig(lr=1.5e-3, warmup_steps=20, schedule="cosine", zero_stage=0)
SHOW = TrainConfig(lr=5e-4, warmup_steps=20, schedule="cosine", zero_stage=0)
"""The first phase ends at a learning rate of almost 0, so the mixture has its own phase: without it the
styles do not come out in their proportions."""


def make_study_data(out: Path) -> None:
    """Make what is missing in `out`: train, heldout, and start-NAME for every start, side by side."""
    prepare_sets(out)
    missing = [name for name in STARTS if not (out / f"start-{name}").is_dir()]
    make_console().print(f"warm starts to make: {', '.join(missing) or 'none'}")
    command = [sys.executable, "-m", "vlm_rl.data_prep.study_data", str(out)]
    processes = [subprocess.Popen([*command, name]) for name in missing]
    failed = [name for name, process in zip(missing, processes, strict=True) if process.wait() != 0]
    if failed:
        raise SystemExit(f"these warm starts failed: {', '.join(failed)}; run the same command again")


def prepare_sets(out: Path) -> None:
    """Make the problems that every run trains on, and the held-out ones."""
    if all((out / split).is_dir() for split in ("train", "heldout")):
        return
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as name:
        raw = SHADED_SQUARES.write(
            Path(name) / "raw", seed=SETS_SEED, train=NUM_TRAIN, heldout=NUM_HELDOUT, warm=1, mixture=0
        )
        for split in ("train", "heldout"):
            prepare("virl39k", raw / split, out / split, DRAWN)


def make_start(out: Path, name: str) -> None:
    """Warm-start a tiny model in two phases; `out`/start-NAME appears when it is complete."""
    import torch

    from vlm_rl.toy.tiny_model import build_tiny_model

    torch.set_num_threads(1)
    seed, work = STARTS[name], out / f"work-{name}"
    shutil.rmtree(work, ignore_errors=True)
    texts = SHADED_SQUARES.tokenizer_texts()
    tiny = build_tiny_model(work / "tiny", seed=seed, tokenizer_texts=texts, weight_std=WEIGHT_STD)
    scan = _examples(
        work / "scan", seed, SCAN_PROBLEMS, passes=SCAN_PASSES, sprinkled=SCAN_SPRINKLED, mixture=SCAN_MIXTURE
    )
    scans = _learn(scan, work / "scans", tiny, SCAN)
    show = _examples(work / "show", len(STARTS) + seed, SHOWN_PROBLEMS, passes=0, sprinkled=0, mixture=SHOWN_MIXTURE)
    _learn(show, work / "model", scans, SHOW).rename(out / f"start-{name}")
    shutil.rmtree(work)


def _examples(
    work: Path, seed: int, problems: int, *, passes: int, sprinkled: int, mixture: int
) -> Sequence[Example]:
    raw = SHADED_SQUARES.write(work / "raw", seed=seed, train=1, heldout=1, warm=problems, mixture=mixture)
    prepare("virl39k", raw / "warm", work / "warm", DRAWN)
    return warm_examples(raw / "warm", work / "warm", seed=seed, passes=passes, sprinkled=sprinkled)


def _learn(examples: Sequence[Example], out: Path, model: Path, config: TrainConfig) -> Path:
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    return warm_start(examples, out, model_path=model, builder=builder, config=config, batch_size=WARM_BATCH)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/study-data")
    if len(sys.argv) > 2:
        make_start(folder, sys.argv[2])
    else:
        make_study_data(folder)
