"""A whole training step against TRL's: generate, grade, update, new weights into the sampler.

    uv pip install trl==1.16        # a development dependency of this comparison alone
    OMP_NUM_THREADS=1 python perf/versus_trl_step.py

The same tiny Qwen2.5-VL, problems, reward function, G, longest response and one optimizer step per
rollout. TRL's side is GRPOTrainer.train() with its default generation (transformers), its micro-batch
tried at each of MICRO_BATCHES and the fastest taken; ours is the product's own training step, with
transformers and, where it is installed, with vllm. Each side runs in a process of its own; they take
turns step by step. Both sample their responses themselves, so lengths differ a little: the times are
divided by the generated tokens. The first step of each is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from versus_trl import LR, Worker, now, peak_mib, trl_settings, unwind_when_terminated

MICRO_BATCHES = (1, 8)  # rows of TRL's
ROUNDS = 3
PATCH = 28  # pixels of a visual token's side


@dataclass(frozen=True)
class StepPoint:
    """One comparison: `side` visual tokens along each side of the image, `text` characters of the question."""

    side: int
    text: int
    prompts: int
    responses: int
    tokens: int


POINTS = (StepPoint(16, 60, 4, 8, 100), StepPoint(27, 400, 2, 8, 300))


def parity(problem: Any, response: str, grade: Any, tokens: int) -> float:
    """Return a reward that differs within a group and costs nothing; it is the same on both sides."""
    return float(len(response) % 2)


# --- the parent: it never imports torch --------------------------------------------------------------


def compare(point: StepPoint, folder: Path) -> dict[str, Worker]:
    """Return every side's worker after its steps, TRL's at its fastest micro-batch; they have ended."""
    names = ["ours, transformers"] + ["ours, vllm"] * (importlib.util.find_spec("vllm") is not None)
    sides = {name: Worker(name, point, folder, script=__file__) for name in names}
    trials = {rows: Worker(f"trl-{rows}", point, folder, script=__file__) for rows in MICRO_BATCHES}
    try:
        for worker in [*sides.values(), *trials.values()]:
            worker.step()
        best = min(trials, key=lambda rows: per_token(trials[rows].steps[-1], "cpu"))
        sides[f"TRL, {best} rows"] = trials[best]
        for _ in range(ROUNDS):
            for worker in sides.values():
                worker.step()
        return sides
    finally:
        for worker in [*sides.values(), *trials.values()]:
            worker.close()


def per_token(step: dict[str, float], key: str) -> float:
    return step[key] / step["tokens"]


def show(point: StepPoint, sides: dict[str, Worker]) -> None:
    medians = {
        name: [statistics.median(per_token(step, key) for step in worker.steps[1:]) for key in ("cpu", "wall")]
        for name, worker in sides.items()
    }
    cpu, wall = list(medians.values())[-1]  # TRL's
    for name, worker in sides.items():
        last, (ours, clock) = worker.steps[-1], medians[name]
        tokens = statistics.fmean(step["tokens"] for step in worker.steps[1:])
        print(
            f"| {point.prompts} prompts of {last['prompt']:.0f}, {point.responses} x {point.tokens} | {name} "
            f"| {tokens:.0f} | {1e3 * ours:.2f} | {cpu / ours:.1f} | {wall / clock:.1f} | {last['memory']:.0f} |",
            flush=True,
        )


# --- the workers ------------------------------------------------------------------------------------


def write_problems(folder: Path, point: StepPoint) -> None:
    """Write a set in ViRL39K's layout with images of noise, and prepare it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    from vlm_rl.data_prep.preparation import prepare

    rng = np.random.default_rng(0)
    (folder / "raw" / "images").mkdir(parents=True)
    rows = []
    for index in range(64):
        pixels = rng.integers(0, 256, (point.side * PATCH, point.side * PATCH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "raw" / "images" / f"{index}.png")
        question = "".join(rng.choice(list("abcdefgh "), point.text))
        row = {"question": f"<image>{index} {question}", "answer": r"\boxed{7}", "image": [f"images/{index}.png"]}
        rows.append({**row, "PassRate_32BTrained": -1.0, "PassRate_7BBase": -1.0, "category": "", "source": ""})
        rows[-1]["qid"] = str(index)
    pq.write_table(pa.Table.from_pylist(rows), folder / "raw" / "39Krelease.parquet")
    prepare("virl39k", folder / "raw", folder / "data")


def work_ours(point: StepPoint, folder: Path, *, sampler: str) -> None:
    """Make a training step of the product for each line of standard input."""
    from vlm_rl.config import parse_config
    from vlm_rl.session.run import Run
    from vlm_rl.session.session import Session
    from vlm_rl.train import train_step

    config = {
        "out": str(folder / f"run-{sampler}"),
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "data")], "max_prompt_tokens": 2000},
        "algorithm": {"name": "grpo"},
        "reward": {"function": "versus_trl_step.parity", "allow_function": True, "overlong_buffer": 0},
        "rollout": {
            "sampler": sampler,
            "prompts_per_step": point.prompts,
            "responses_per_prompt": point.responses,
            "max_tokens": point.tokens,
        },
        "train": {"steps": 100, "mini_batch_prompts": point.prompts, "lr": LR, "zero_stage": 0},
        "log": {"samples_every": 0},
        "checkpoint": {"every": 100},
    }
    before = peak_mib()
    whole = parse_config(config, where="versus_trl_step.py")
    with Run(whole, resume=False) as run, Session(whole, run) as session:
        session.sync_weights()
        while sys.stdin.readline():
            begun = now()
            train_step(session)
            ended = now()
            metrics = run.directory.metrics()[-1]
            asked = set(run.directory.rollouts(session.step, ["prompt_id"])["prompt_id"].to_pylist())
            prompts = [session.builder.build(problem) for problem in session.problems if problem.id in asked]
            prompt = statistics.fmean(len(built.ids) for built in prompts)
            report(begun, ended, tokens=metrics["num_tokens"], prompt=prompt, memory=peak_mib() - before)


def report(begun: tuple[float, float], ended: tuple[float, float], **values: float) -> None:
    wall, cpu = (b - a for a, b in zip(begun, ended, strict=True))
    print(json.dumps({"wall": wall, "cpu": cpu, **values}), flush=True)


def work_trl(point: StepPoint, folder: Path, *, micro_batch: int) -> None:
    """Make a step of GRPOTrainer.train for each line of standard input."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # unused here; to TRL it is not installed
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOTrainer

    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.templates import TEMPLATES

    path = folder / "model"
    template = TEMPLATES["think_answer"]
    banned = PromptBuilder(path, template=template, min_pixels=3136, max_pixels=2**20).banned_ids
    rows = load_dataset("parquet", data_files=str(folder / "data" / "*.parquet"), split="train")

    def messages(row: dict[str, Any]) -> dict[str, Any]:
        question = {"role": "user", "content": row["question"].replace("<image>", "")}
        return {"prompt": [{"role": "system", "content": template.system}, question]}

    problems = rows.map(messages).select_columns(["prompt", "images"])

    class Turns(TrainerCallback):
        begun = ended = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit
            self.begun = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended = now()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                count = point.prompts * point.responses
                tokens = logs["completions/mean_length"] * count
                prompt = (logs["num_tokens"] - self.seen - tokens) / count
                self.seen = logs["num_tokens"]
                report(self.begun, self.ended, tokens=tokens, prompt=prompt, memory=peak_mib() - before)

        seen = 0.0

    settings = trl_settings(
        output_dir=str(folder / f"trl-{micro_batch}"),
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=point.prompts * point.responses // micro_batch,
        num_generations=point.responses,
        max_completion_length=point.tokens,
        generation_kwargs={"suppress_tokens": list(banned)},  # an image's placeholder in a response stops it
        loss_type="grpo",
    )
    before = peak_mib()
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=lambda completions, **_: [
            parity(None, messages[0]["content"], None, 0) for messages in completions
        ],
        args=settings,
        train_dataset=problems,
        processing_class=AutoProcessor.from_pretrained(path),
        callbacks=[Turns()],
    )
    trainer.train()


def build(folder: Path, point: StepPoint) -> None:
    """Build the model and the problems."""
    from vlm_rl.toy.tiny_model import build_tiny_model

    build_tiny_model(folder / "model")
    write_problems(folder, point)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for hidden in ("--worker", "--point", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        point, folder = StepPoint(**json.loads(options.point)), Path(options.folder)
        if options.worker == "build":
            return build(folder, point)
        side, _, rows = options.worker.partition("-")
        if side == "trl":
            return work_trl(point, folder, micro_batch=int(rows))
        return work_ours(point, folder, sampler=options.worker.split(", ")[1])
    unwind_when_terminated()
    print("| a step | side | tokens generated | CPU ms a token | times | wall, times | memory, MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for point in POINTS:
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, __file__, "--worker", "build", "--folder", name]
            subprocess.run([*command, "--point", json.dumps(asdict(point))], check=True, stdout=subprocess.DEVNULL)
            show(point, compare(point, Path(name)))
    return None


if __name__ == "__main__":
    main()
