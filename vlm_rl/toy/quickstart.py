"""The quickstart: a tiny real Qwen2.5-VL learns to look before it answers, in minutes on a CPU.

    toy images -> tiny model -> warm start on traces -> reinforcement -> evaluation, controls, report

The warm start shows the model several ways to answer, more than half of them guesses. Reinforcement moves it to the
careful scan, because the scan is rewarded. It does not teach the model to see: a control forces the first words of
the scan before any reinforcement, and its accuracy is reported beside the result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlm_rl.config import Config, TrainConfig, parse_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.devices import has_gpu
from vlm_rl.evaluation.evaluate import Asking, Judging, evaluate
from vlm_rl.evaluation.image_controls import ImageMode
from vlm_rl.grading.grader import Grader
from vlm_rl.learner.sft import Example, warm_start
from vlm_rl.report.run_report import write_report
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import make_console
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.first_start import first_start
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.train import train
from vlm_rl.types import Problem

TEMPLATE = TEMPLATES["think_answer"]
MAX_PROMPT_TOKENS, MAX_TOKENS = 160, 72
WEIGHT_STD = 0.08  # about 1 / sqrt(128), the model's width
RL_STEPS = 40


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the traces are learned."""

    passes: int  # over the clean trace of each warm problem
    mixture: int  # traces of all styles, after the clean ones
    batch_size: int  # traces of an optimizer step
    train: TrainConfig

    @classmethod
    def here(cls) -> WarmStart:
        """Choose the size for this machine: on a GPU a step costs launches and not arithmetic, so it takes fewer."""
        return WARM_ON_GPU if has_gpu() else WARM_ON_CPU


WARM_ON_CPU = WarmStart(6, 2000, 8, TrainConfig(lr=1.5e-3, warmup_steps=20, schedule="cosine"))  # 1,118 steps
WARM_ON_GPU = WarmStart(9, 4000, 32, TrainConfig(lr=2e-3, warmup_steps=20, schedule="cosine"))  # 438 steps


@dataclass(frozen=True, slots=True)
class ToyData:
    """What data preparation makes for the quickstart."""

    folder: Path  # holds everything of this quickstart but the run
    train: Path  # a prepared set
    heldout: Path  # a prepared set
    warm_examples: Sequence[Example]
    tokenizer_texts: Sequence[str]
    forced_scan: str  # the first words of the careful scan


def quickstart(toy: ToyData, out: Path, *, seed: int, sampler: str, algorithm: str) -> dict[str, Any]:
    """Train, measure and report. Return the accuracies before and after, and the controls.

    Args:
        toy: the prepared data.
        out: the run directory to make.
        seed: of the model, the training and the sampling.
        sampler: the engine that samples the responses.
        algorithm: a key of algorithms.ALGORITHMS.
    """
    console, begun = make_console(), time.monotonic()
    model = build_tiny_model(
        toy.folder / "tiny-model", seed=seed, tokenizer_texts=toy.tokenizer_texts, weight_std=WEIGHT_STD
    )
    builder, how = PromptBuilder(model, template=TEMPLATE), WarmStart.here()
    config = quickstart_config(toy, model, out, seed=seed, sampler=sampler, algorithm=algorithm)
    with first_start(config, toy.folder / "first-start.yaml"):
        warm = warm_start(
            toy.warm_examples,
            toy.folder / "warm-model",
            model_path=model,
            builder=builder,
            config=how.train,
            batch_size=how.batch_size,
        )
    train(quickstart_config(toy, warm, out, seed=seed, sampler=sampler, algorithm=algorithm))
    run = RunDirectory(out)
    controls = measure_controls(toy, warm=warm, trained=run.checkpoints()[-1][1], seed=seed)
    run.write_controls(controls)
    report = write_report([run], out / "report.html")
    if (best := run.best()) is not None:
        console.print(best.sentence())
    console.print(f"held-out accuracy {controls['untrained']:.3f} before, {controls['trained']:.3f} after")
    console.print(f"forced to scan before any reinforcement: {controls['forced_scan']:.3f}")
    console.print(
        f"after, on blank images {controls['blank_images']:.3f}, on shuffled ones {controls['shuffled_images']:.3f}; "
        f"the best constant guess gets {controls['best_constant']:.3f}"
    )
    console.print(
        "What this shows: reinforcement moved the policy from guessing to a scan that it was already able to do. "
        "It did not teach the policy to see."
    )
    console.print(f"report: {report}   ({time.monotonic() - begun:.0f} s)")
    return controls


def quickstart_config(toy: ToyData, model: Path, out: Path, *, seed: int, sampler: str, algorithm: str) -> Config:
    """Return the configuration of the quickstart's training run.

    Args:
        toy: the prepared data.
        model: the folder of the warm start.
        out: the run directory.
        seed: of the training and the sampling.
        sampler: the engine that samples the responses.
        algorithm: a key of algorithms.ALGORITHMS.
    """
    return parse_config(
        {
            "seed": seed,
            "out": str(out),
            "model": {"path": str(model)},
            "data": {
                "train": [str(toy.train)],
                "eval": [str(toy.heldout)],
                "max_prompt_tokens": MAX_PROMPT_TOKENS,
            },
            "algorithm": {"name": algorithm},
            "reward": {"overlong_buffer": 36},
            "rollout": {"sampler": sampler, "prompts_per_step": 16, "max_tokens": MAX_TOKENS},
            "train": {
                "steps": RL_STEPS,
                "mini_batch_prompts": 8,
                "lr": learning_rate(),
                "schedule": "cosine",  # at a constant rate a run lost points once nearly all groups were right
                "zero_stage": 2,
            },
            "eval": {"every": 10},
            "checkpoint": {"every": 10},
            "log": {"samples_every": 20},
        },
        where="quickstart",
    )


def learning_rate() -> float:
    """Return the rate of the reinforcement: bfloat16, a GPU's dtype, loses a part of the scan at the CPU's rate."""
    return 3e-5 if has_gpu() else 1e-4


def measure_controls(toy: ToyData, *, warm: Path, trained: Path, seed: int) -> dict[str, float]:
    """Return the greedy held-out accuracies that show what the learning curve means (transformers sampler).

    Args:
        toy: the prepared data.
        warm: the folder of the warm start.
        trained: the folder of the trained model.
        seed: of the evaluations.
    """
    problems = load_set(toy.heldout)

    def accuracy(model: Path, images: ImageMode = "real", prefill: str = "") -> float:
        builder = PromptBuilder(model, template=replace(TEMPLATE, prefill=prefill))
        engine = make_sampler(
            "transformers",
            EngineSettings(
                model_path=str(model),
                builder=builder,
                max_model_len=MAX_PROMPT_TOKENS + MAX_TOKENS,
                batch_size=256,
                dtype=torch.float32,
            ),
        )
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, responses=1)
        with Grader() as grader:
            asking = Asking(builder, engine, params, seed=seed, step=0, images=images)
            result = evaluate(problems, asking, Judging(grader))
        engine.close()
        return result.summary["accuracy"]

    return {
        "untrained": accuracy(warm),
        "forced_scan": accuracy(warm, prefill=toy.forced_scan),
        "trained": accuracy(trained),
        "blank_images": accuracy(trained, "blank"),
        "shuffled_images": accuracy(trained, "shuffled"),
        "best_constant": best_constant(problems),
    }


def best_constant(problems: Sequence[Problem]) -> float:
    """Return the accuracy of always giving the most common answer."""
    return Counter(problem.answer for problem in problems).most_common(1)[0][1] / len(problems)


def print_seeds(results: dict[int, dict[str, float]]) -> None:
    """Print a line per seed: held-out accuracies, the controls, and the gain in points."""
    console = make_console()
    columns = {
        "before": "untrained",
        "after": "trained",
        "forced scan before": "forced_scan",
        "after, blank": "blank_images",
        "after, shuffled": "shuffled_images",
        "after, blank crops": "blank_crops",
        "after, no tool": "without_tool",
        "best constant": "best_constant",
    }
    measured = next(iter(results.values()))
    columns = {title: name for title, name in columns.items() if name in measured}
    console.print("seed  " + "  ".join(columns) + "    gain")
    for seed, values in results.items():
        gain = 100 * (values["trained"] - values["untrained"])
        numbers = "  ".join(f"{values[name]:>{len(title)}.3f}" for title, name in columns.items())
        console.print(f"{seed:>4}  {numbers}  {gain:>+6.1f}")
