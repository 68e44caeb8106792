"""A small run directory, written through the product's own writers, for the tests of its readers.

The policy in it moves from guessing to scanning, so that every curve has a shape: 84x84 images of
3x3 coloured squares, and the question how many of them are red.
"""

from __future__ import annotations

import hashlib
import io
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vlm_rl.config import parse_config
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.run.rollout_row import RolloutRow
from vlm_rl.stats import score_interval

COLORS = {"red": (206, 66, 60), "blue": (64, 104, 190), "green": (70, 150, 92), "yellow": (226, 184, 70)}
CELLS = [f"{row}{column}" for row in "abc" for column in "123"]
MAX_TOKENS = 64


def square_image(names: list[str]) -> bytes:
    """Return the PNG of a 3x3 grid of squares."""
    image = Image.new("RGB", (84, 84), (244, 243, 240))
    draw = ImageDraw.Draw(image)
    for index, name in enumerate(names):
        x, y = 28 * (index % 3), 28 * (index // 3)
        draw.rectangle((x + 4, y + 4, x + 23, y + 23), fill=COLORS[name])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def guess(rng: np.random.Generator) -> tuple[str, int, int]:
    """Return (response, answer, tokens) of a guess."""
    answer = int(rng.integers(0, 9))
    return rf"<think>about {answer}</think><answer>\boxed{{{answer}}}</answer>", answer, 7 + int(rng.integers(0, 4))


def scan(names: list[str], rng: np.random.Generator, *, check: bool) -> tuple[str, int, int]:
    """Return (response, answer, tokens): cell by cell, at times with a slip, at times counted twice."""
    count, words = 0, []
    for cell, name in zip(CELLS, names, strict=True):
        seen = name if rng.random() > 0.01 else "blue"
        count += seen == "red"
        words.append(f"{cell} {seen} {count}")
    reasoning = " ".join(words) + (f" check {count}" if check else "")
    length = 36 + int(rng.integers(0, 5)) + 22 * check
    return rf"<think>{reasoning}</think><answer>\boxed{{{count}}}</answer>", count, length


def build_run(
    path: Path,
    *,
    steps: int = 40,
    seed: int = 0,
    algorithm: str = "luspo",
    eval_steps: tuple[int, ...] | None = None,
    num_problems: int = 24,
    metrics: bool = True,
    question: str = "<image>\nCount the red squares.",
    response: str | None = None,
) -> RunDirectory:
    """Write a run; `response` replaces every evaluated response (to try hostile ones)."""
    config = {
        "out": str(path),
        "seed": seed,
        "model": {"path": "models/tiny"},
        "data": {"train": ["data/toy-train"], "eval": ["data/toy-test"]},
        "algorithm": {"name": algorithm},
        "rollout": {"prompts_per_step": 8, "responses_per_prompt": 8, "max_tokens": MAX_TOKENS},
        "reward": {"overlong_buffer": 16},
        "train": {"steps": max(steps, 1), "mini_batch_prompts": 4, "micro_batch_tokens": 2048},
        "eval": {"every": 0},
    }
    run = RunDirectory(path).create(parse_config(config))
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        rows = [_rollout(step, index, _scan_share(step, steps), rng) for index in range(64)]
        run.write_rollouts(step, 1, rows)
        if metrics:
            run.append_metrics(step, 1, _metrics(rows, step, steps, rng))
    for step in (0, steps // 2, steps) if eval_steps is None else eval_steps:
        rows = _evaluation(step, steps, num_problems, question, response)
        correct = np.array([row.verdict == "correct" for row in rows])
        summary = {
            "accuracy": float(correct.mean()),
            "interval": list(score_interval(correct)),
            "num_problems": len(rows),
        }
        run.write_eval("toy-test", step, rows, summary)
    return run


def _scan_share(step: int, steps: int) -> float:
    return 0.08 + 0.9 / (1 + math.exp(-12 * (step / steps - 0.4)))


def _answer(names: list[str], share: float, rng: np.random.Generator) -> tuple[str, int, int]:
    if rng.random() < share:
        return scan(names, rng, check=rng.random() < 0.3)
    return guess(rng)


def _rollout(step: int, index: int, share: float, rng: np.random.Generator) -> RolloutRow:
    names = [str(name) for name in rng.choice(list(COLORS), 9)]
    text, answer, length = _answer(names, share, rng)
    right = answer == names.count("red")
    overlong = min(0.0, (MAX_TOKENS - 16 - length) / 16 * 0.3)
    return RolloutRow(
        step=step,
        attempt=1,
        prompt_id=f"toy-{step}-{index // 8}",
        response_index=index % 8,
        text=text,
        token_ids=rng.integers(0, 370, length).tolist(),
        logprobs=(-rng.random(length)).tolist(),
        reward=right + 0.5 + overlong,
        reward_accuracy=float(right),
        reward_format=0.5,
        reward_overlong=overlong,
        advantage=float(right) - 0.5,
        verdict="correct" if right else "wrong",
        extracted=str(answer),
        path="integer",
        reason=f"{answer} {'equals' if right else 'is not'} {names.count('red')}",
        length=min(length, MAX_TOKENS),
        stop_reason="stop" if length < MAX_TOKENS else "length",
        policy_version=step - 1,
    )


def _metrics(rows: list[RolloutRow], step: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    share = _scan_share(step, steps)
    values = {
        "reward": float(np.mean([row.reward for row in rows])),
        "completions/mean_length": float(np.mean([row.length for row in rows])),
        "entropy": 0.9 - 0.6 * share + 0.02 * rng.random(),
        "clip_ratio/low_mean": 0.01 + 0.01 * rng.random(),
        "clip_ratio/high_mean": 0.015 + 0.01 * rng.random(),
        "rollout/logprob_gap": 3e-7 * (1 + rng.random()),
        "grad_norm": 1.5 * math.exp(rng.normal(0, 0.3)) * (1.2 - share),
        "steps/skipped": float(step > steps // 2),
        "step_time": 1.9 + 0.2 * rng.random(),
        "timing/rollout": 0.8 + 0.1 * rng.random(),
        "timing/reward": 0.05 + 0.01 * rng.random(),
        "timing/old_logprobs": 0.2 + 0.02 * rng.random(),
        "timing/update": 0.7 + 0.1 * rng.random(),
        "timing/sync": 0.06,
    }
    values["clip_ratio/region_mean"] = values["clip_ratio/low_mean"] + values["clip_ratio/high_mean"]
    for part in ("accuracy", "format", "overlong"):
        values[f"rewards/{part}/mean"] = float(np.mean([getattr(row, f"reward_{part}") for row in rows]))
    shape = np.arange(1, 11) ** (0.4 + share)
    for sign, mass in (("positive", 0.55), ("negative", 0.45)):
        for decile, value in enumerate(mass * shape / shape.sum(), 1):
            values[f"gradient_mass/{sign}/decile_{decile}"] = float(value)
    return values


def _evaluation(step: int, steps: int, num_problems: int, question: str, response: str | None) -> list[EvalRecord]:
    rows = []
    for index in range(num_problems):
        names = [str(name) for name in np.random.default_rng([7, index]).choice(list(COLORS), 9)]
        text, answer, length = _answer(names, _scan_share(step, steps), np.random.default_rng([step, index]))
        right = answer == names.count("red")
        image = square_image(names)
        rows.append(
            EvalRecord(
                problem_id=f"toy-test-{index:04d}",
                sample_index=0,
                prompt_text=f"<|im_start|>user\n{question}<|im_end|>",
                response=text if response is None else response,
                length=length,
                stop_reason="stop",
                extracted=str(answer),
                gold=str(names.count("red")),
                verdict="correct" if right else "wrong",
                path="integer",
                reason=f"{answer} {'equals' if right else 'is not'} {names.count('red')}",
                has_box=True,
                category="count",
                image_sha256=[hashlib.sha256(image).hexdigest()],
                image=[image],
                question=question,
            )
        )
    return rows
