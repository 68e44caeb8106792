"""The quickstart with a tool: a tiny real Qwen2.5-VL learns to zoom before it answers, in minutes on a CPU.

    toy images -> tiny model -> warm start on episodes -> reinforcement -> evaluation, controls, report

What is asked stands on a board that the prompt's resolution makes grey (vlm_rl.toy.small_board). The warm start shows
guesses, looks elsewhere, and looks at the board; reinforcement finds out which of them pays. Three controls say what
the result means: the trained model made to guess without its tool, the trained model with a tool that shows a blank
crop, and the model before reinforcement, made to look.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlm_rl.config import Config, EnvironmentConfig, TrainConfig, parse_config
from vlm_rl.data.prompts import PromptBuilder, PromptCache
from vlm_rl.data.sets import load_set
from vlm_rl.data.turns import TOOL_TOKENS
from vlm_rl.environments.host import open_host
from vlm_rl.environments.script import play
from vlm_rl.evaluation.evaluate import Asking, Judging, evaluate
from vlm_rl.grading.grader import Grader
from vlm_rl.learner.sft import Example, warm_start
from vlm_rl.report.run_report import write_report
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import make_console, progress
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.toy.quickstart import TEMPLATE, WEIGHT_STD, best_constant, learning_rate
from vlm_rl.toy.small_board import BOARD, INSTRUCTIONS, SHOWN, SIDE, TOOL, tokenizer_texts
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.train import train
from vlm_rl.types import Problem, Rollout

MAX_PROMPT_TOKENS, MAX_TOKENS = 128, 112
RL_STEPS = 40
WARM = TrainConfig(lr=1.5e-3, warmup_steps=20, schedule="cosine")
ENVIRONMENT: dict[str, Any] = {
    "name": "zoom",
    "options": {"tool": TOOL, "min_side": BOARD * SHOWN // SIDE},
    "instructions": INSTRUCTIONS,
    "max_turns": 3,
    "max_observed_tokens": 64,
    "max_images": 2,
    "min_pixels": SHOWN**2,
}
LOOK, GUESS = "<think> a1", "<think> guess"  # the first words of a look at the board, in both turns, and of a guess


@dataclass(frozen=True, slots=True)
class Script:
    """A trace of the warm start: what the policy says in each turn."""

    problem: Problem
    turns: Sequence[str]


@dataclass(frozen=True, slots=True)
class ToolsData:
    """What data preparation makes for this quickstart."""

    folder: Path  # holds everything of this quickstart but the run
    train: Path  # a prepared set
    heldout: Path  # a prepared set
    scripts: Sequence[Script]  # in training order


def tools_quickstart(toy: ToolsData, out: Path, *, seed: int, sampler: str, algorithm: str) -> dict[str, float]:
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
        toy.folder / "tiny-model",
        seed=seed,
        tokenizer_texts=tokenizer_texts(),
        visible=TOOL_TOKENS,
        weight_std=WEIGHT_STD,
    )
    builder = PromptBuilder(model, template=TEMPLATE, max_pixels=SHOWN**2)
    warm = warm_start(
        played(toy.scripts, builder),
        toy.folder / "warm-model",
        model_path=model,
        builder=builder,
        config=WARM,
        batch_size=8,
    )
    train(tools_config(toy, warm, out, seed=seed, sampler=sampler, algorithm=algorithm))
    run = RunDirectory(out)
    controls = measure_controls(toy, warm=warm, trained=run.checkpoints()[-1][1], seed=seed)
    run.write_controls(controls)
    report = write_report([run], out / "report.html")
    if (best := run.best()) is not None:
        console.print(best.sentence())
    console.print(f"held-out accuracy {controls['untrained']:.3f} before, {controls['trained']:.3f} after")
    console.print(f"made to look before any reinforcement: {controls['forced_scan']:.3f}")
    console.print(
        f"after, with blank crops {controls['blank_crops']:.3f}, made to guess without a look "
        f"{controls['without_tool']:.3f}; the best constant guess gets {controls['best_constant']:.3f}"
    )
    console.print(f"report: {report}   ({time.monotonic() - begun:.0f} s)")
    return controls


def played(scripts: Sequence[Script], builder: PromptBuilder) -> list[Example]:
    """Return the traces as episodes: the real tool answers what they call. Equal traces are played once."""
    prompts, episodes = PromptCache(builder), dict[tuple[str, ...], Rollout]()
    examples = []
    with Grader() as grader, progress("playing the traces", total=len(scripts)) as advance:
        host = open_host(EnvironmentConfig(**ENVIRONMENT), builder, grader)
        assert host is not None
        for script in scripts:
            key = (script.problem.id, *script.turns)
            if key not in episodes:
                episodes[key] = play(host, builder, script.problem, prompts[script.problem], script.turns)
            examples.append(Example(script.problem, script.turns[-1], episodes[key]))
            advance()
        host.close()
    return examples


def tools_config(toy: ToolsData, model: Path, out: Path, *, seed: int, sampler: str, algorithm: str) -> Config:
    """Return the configuration of the training run. The arguments are those of `tools_quickstart`, and the model."""
    return parse_config(
        {
            "seed": seed,
            "out": str(out),
            "model": {"path": str(model)},
            "data": {
                "train": [str(toy.train)],
                "eval": [str(toy.heldout)],
                "max_prompt_tokens": MAX_PROMPT_TOKENS,
                "max_pixels": SHOWN**2,
            },
            "algorithm": {"name": algorithm},
            "reward": {"overlong_buffer": 0},
            "rollout": {"sampler": sampler, "prompts_per_step": 16, "max_tokens": MAX_TOKENS},
            "environment": ENVIRONMENT,
            "train": {
                "steps": RL_STEPS,
                "mini_batch_prompts": 8,
                "lr": learning_rate(),
                "schedule": "cosine",
                "zero_stage": 2,
            },
            "eval": {"every": 10},
            "checkpoint": {"every": 10},
            "log": {"samples_every": 20},
        },
        where="quickstart",
    )


def measure_controls(toy: ToolsData, *, warm: Path, trained: Path, seed: int) -> dict[str, float]:
    """Return the greedy held-out accuracies that show what the learning curve means (transformers sampler).

    Args:
        toy: the prepared data.
        warm: the folder of the warm start.
        trained: the folder of the trained model.
        seed: of the evaluations.
    """
    problems = load_set(toy.heldout)

    def accuracy(model: Path, *, prefill: str = "", blank: bool = False) -> float:
        builder = PromptBuilder(model, template=replace(TEMPLATE, prefill=prefill), max_pixels=SHOWN**2)
        options = ENVIRONMENT["options"] | {"blank": blank}
        settings = EnvironmentConfig(**ENVIRONMENT | {"options": options})
        with Grader() as grader:
            host = open_host(settings, builder, grader)
            assert host is not None
            engine = make_sampler(
                "transformers",
                EngineSettings(
                    model_path=str(model),
                    builder=builder,
                    max_model_len=MAX_PROMPT_TOKENS + MAX_TOKENS + settings.max_observed_tokens,
                    batch_size=256,
                    dtype=torch.float32,
                ),
            )
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, responses=1)
            result = evaluate(
                problems, Asking(builder, engine, params, seed=seed, step=0, host=host), Judging(grader)
            )
            engine.close()
            host.close()
        return result.summary["accuracy"]

    return {
        "untrained": accuracy(warm),
        "forced_scan": accuracy(warm, prefill=LOOK),
        "trained": accuracy(trained),
        "blank_crops": accuracy(trained, blank=True),
        "without_tool": accuracy(trained, prefill=GUESS),
        "best_constant": best_constant(problems),
    }
