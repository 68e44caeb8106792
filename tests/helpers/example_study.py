"""A small study with its runs as they are on disk, written through the product's own writers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vlm_rl.run.directory import RunDirectory
from vlm_rl.study.runs import StudyRun

# metrics of a step: (entry, step) -> name -> value
Metrics = Callable[[StudyRun, int], Mapping[str, float]]


def study_tree(**changes: Any) -> dict[str, Any]:
    """Return a study of three rules and two starts; changes replace top-level keys."""
    return {
        "base": {
            "data": {"train": ["data/toy-train"], "eval": ["data/toy-test"]},
            "rollout": {"prompts_per_step": 8, "max_tokens": 64},
            "reward": {"overlong_buffer": 16},
            "train": {"steps": 20, "mini_batch_prompts": 4, "micro_batch_tokens": 2048},
            "eval": {"every": 10},
        },
        "starts": {"a": "models/warm-0", "b": "models/warm-1"},
        "seeds": [0, 1, 2],
        "rules": {
            "luspo+hadw": {"algorithm.name": "luspo", "algorithm.hadw.enabled": True},
            "grpo": {"algorithm.name": "grpo"},
            "grpo-token": {"algorithm": {"name": "grpo", "aggregation": "token"}},
        },
        "baseline": "grpo",
    } | changes


def write_study(path: Path, tree: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False))
    return path


def write_run(
    entry: StudyRun,
    metrics: Metrics,
    *,
    steps: int | None = None,
    evals: Mapping[int, tuple[Sequence[bool], Sequence[int]]] | None = None,
) -> RunDirectory:
    """Write a run of `steps` steps (all of them if None); `evals` is step -> (which are correct, their lengths)."""
    run = RunDirectory(entry.out).create(entry.config)
    for step in range(1, (steps or entry.config.train.steps) + 1):
        run.append_metrics(step, 1, metrics(entry, step))
    for step, (correct, lengths) in (evals or {}).items():
        run.write_eval("toy-test", step, [_row(*one) for one in zip(correct, lengths, strict=True)], {})
    return run


def _row(correct: bool, length: int) -> dict[str, Any]:
    return {
        "problem_id": "p",
        "sample_index": 0,
        "prompt_text": "",
        "response": "",
        "length": length,
        "stop_reason": "stop",
        "extracted": None,
        "gold": "",
        "verdict": "correct" if correct else "wrong",
        "path": "",
        "reason": "",
        "has_box": True,
        "category": "",
        "image_sha256": [],
        "image_sizes": [],
        "turns": None,
        "cluster": None,
        "image": None,
        "question": "",
    }


def lively(entry: StudyRun, step: int) -> dict[str, float]:
    """Return curves with a shape, different for every rule and seed; what a real run logs."""
    name = sum(map(ord, entry.rule))
    rng = np.random.default_rng([name, entry.seed, step])
    pace = 4 + name % 5 + np.random.default_rng([name, entry.seed]).normal()
    done = 1 / (1 + math.exp(-pace * (step / entry.config.train.steps - 0.45)))
    noise = rng.normal(0, 1, 12)
    length = 18 + (20 + name % 17) * done + noise[0]
    gap = 3 - 6 * done + 0.6 * noise[1]
    accuracy = 0.12 + 0.75 * done + 0.03 * noise[2]
    values = {
        "reward": accuracy + 0.45,
        "rewards/accuracy/mean": accuracy,
        "completions/mean_length": length,
        "length/correct_mean": length + gap / 2 if step > 1 else math.nan,
        "length/wrong_mean": length - gap / 2,
        "length/group_cv": 0.22 + 0.18 * done + 0.01 * noise[3],
        "length/sign_gap": gap,
        "length_pull/total": 0.4 * (1 - done) + 0.05 * noise[4],
        "entropy": 0.9 - 0.6 * done + 0.02 * noise[5],
        "grad_norm": (30 if "luspo" in entry.rule else 1.4) * math.exp(0.2 * noise[6]) * (1.2 - done),
        "clip_ratio/low_mean": abs(0.01 + 0.004 * noise[7]) * (12 if "spo" in entry.rule else 1),
        "clip_ratio/high_mean": abs(0.012 + 0.004 * noise[8]) * (12 if "spo" in entry.rule else 1),
        "step_time": 1.9 + 0.1 * noise[9],
    }
    shape = np.arange(1, 11) ** (0.3 + name % 3 / 2 + done)
    for sign, mass in (("positive", 0.55), ("negative", 0.45)):
        for decile, share in enumerate(mass * shape / shape.sum(), 1):
            values[f"gradient_mass/{sign}/decile_{decile}"] = float(share)
    return values


def lively_evals(entry: StudyRun, *, count: int = 40) -> dict[int, tuple[list[bool], list[int]]]:
    """Return an evaluation at the beginning, in the middle and at the end."""
    steps = entry.config.train.steps
    found = {}
    for step in range(0, steps + 1, entry.config.eval.every):
        values = lively(entry, max(step, 2))
        rng = np.random.default_rng([sum(map(ord, entry.rule)), entry.seed, step, 7])
        correct = rng.random(count) < values["rewards/accuracy/mean"]
        found[step] = (correct.tolist(), rng.normal(values["completions/mean_length"], 2, count).astype(int).tolist())
    return found
