"""`vlm-rl quickstart --real`: a pretrained language model learns to work word problems out before it answers.

    word problems -> SmolLM2-135M -> cold start on traces in three styles -> reinforcement -> report

Half of the traces guess. Reinforcement rewards the right answer and the form, and the lines between its steps show
which style takes over. Every part is resumed by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlm_rl.config import Config, SftConfig, parse_config, parse_tree
from vlm_rl.data_prep.word_sets import NUM_HELDOUT, NUM_TRACES, NUM_TRAIN, StyledSets, make_word_sets
from vlm_rl.devices import has_gpu
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.report.run_report import write_report
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.terminal import make_console
from vlm_rl.session.preflight import preflight, preflight_sft
from vlm_rl.session.sft import sft
from vlm_rl.toy.smollm import gguf_file, make_smollm
from vlm_rl.toy.word_problems import TRACE_SHARE, Style, style_of
from vlm_rl.train import train

SLOW = (
    "no GPU is here: on two idle CPU cores the cold start takes 20 minutes and the reinforcement 20 to 40 more. "
    "`vlm-rl quickstart` without --real trains a toy policy in minutes. With --yes this run begins, and the same "
    "command resumes it"
)


@dataclass(frozen=True, slots=True)
class RealSizes:
    """How much is made, learned and sampled."""

    traces: int = NUM_TRACES
    train: int = NUM_TRAIN
    heldout: int = NUM_HELDOUT
    cold_steps: int = 45
    cold_batch: int = 32  # traces of a step
    steps: int = 12
    prompts: int = 16  # of a step, with 8 responses each
    max_tokens: int = 256


SIZES = RealSizes()


@dataclass(slots=True)
class StyleShare:
    """The responses of one style."""

    count: int = 0
    right: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepStyles:
    """The sampled responses of a step by style."""

    shares: Mapping[Style, StyleShare] = field(default_factory=lambda: {style: StyleShare() for style in TRACE_SHARE})

    @property
    def count(self) -> int:
        """Return the number of responses."""
        return sum(share.count for share in self.shares.values())

    @property
    def accuracy(self) -> float:
        """Return the share of right responses."""
        return sum(share.right for share in self.shares.values()) / self.count

    @property
    def mean_length(self) -> float:
        """Return the mean length in tokens."""
        return sum(share.tokens for share in self.shares.values()) / self.count

    def line(self) -> str:
        """Say which share of the responses each style has, and which share of these is right."""
        parts = [
            f"{style} {share.count / self.count:.0%}"
            + (f", {share.right / share.count:.0%} right" if share.count else "")
            for style, share in self.shares.items()
        ]
        return "; ".join(parts)


def count_styles(rows: Sequence[Mapping[str, Any]]) -> StepStyles:
    """Count the styles of rollout rows, of which `text`, `verdict` and `length` are read; at least one row."""
    styles = StepStyles()
    for row in rows:
        style = style_of(row["text"])
        share = styles.shares[style if style in styles.shares else "equations"]  # one that the cold start has not
        share.count += 1
        share.right += row["verdict"] == "correct"
        share.tokens += row["length"]
    return styles


def styles_of(run: RunDirectory, step: int) -> StepStyles:
    """Count the styles of a step's sampled responses."""
    return count_styles(run.rollouts(step, ["text", "verdict", "length"]).to_pylist())


def real_quickstart(
    out: Path, *, seed: int, sampler: str, algorithm: str, on_cpu: bool = False, sizes: RealSizes | None = None
) -> None:
    """Make the data and the model, train, and report. What an earlier call has finished is kept.

    Args:
        out: the run directory; OUT-data holds the sets, the model and the cold start.
        seed: of the problems, the training and the sampling.
        sampler: the engine that samples the responses.
        algorithm: a key of algorithms.ALGORITHMS.
        on_cpu: begin although there is no GPU.
        sizes: of the data and the runs; None for SIZES.

    Raises:
        UserError: where the model is not installed, without a GPU unless `on_cpu`, and where an earlier call had
            other settings.
        StoppedError: after SIGTERM or Ctrl-C, once the state is saved.
    """
    gguf_file()
    if not has_gpu() and not on_cpu:
        raise UserError(SLOW)
    begun, data, sizes = time.monotonic(), out.with_name(f"{out.name}-data"), sizes or SIZES
    try:
        print("problems, model and cold start: " + str(data), flush=True)
        sets = make_word_sets(
            data / "words", seed=seed, traces=sizes.traces, train=sizes.train, heldout=sizes.heldout
        )
        model = make_smollm(data / "SmolLM2-135M-Instruct")
        started = cold_start(sft_config(sets, model, data / "cold-start", seed=seed, sizes=sizes))
        run = RunDirectory(out)
        _reinforce(run, rl_config(sets, started, out, seed=seed, sampler=sampler, algorithm=algorithm, sizes=sizes))
    except StoppedError:
        make_console().print("the command that began the quickstart resumes all of it")
        raise
    _summarize(run, seconds=time.monotonic() - begun)


def sft_config(sets: StyledSets, model: Path, out: Path, *, seed: int, sizes: RealSizes) -> SftConfig:
    """Return the configuration of the cold start."""
    return parse_tree(
        SftConfig,
        {
            "seed": seed,
            "out": str(out),
            "model": {"path": str(model)},
            "data": {"train": [str(sets.traces)], "max_prompt_tokens": 256, "max_response_tokens": 256},
            "train": {
                "steps": sizes.cold_steps,
                "mini_batch_prompts": sizes.cold_batch,
                "lr": 3e-4,
                "schedule": "cosine",
                "warmup_steps": min(4, sizes.cold_steps - 1),
                **row_size(),
            },
            "checkpoint": {"every": 10, "keep_last": 1},
        },
        "quickstart --real",
    )


def rl_config(
    sets: StyledSets, model: Path, out: Path, *, seed: int, sampler: str, algorithm: str, sizes: RealSizes
) -> Config:
    """Return the configuration of the reinforcement."""
    return parse_config(
        {
            "seed": seed,
            "out": str(out),
            "model": {"path": str(model)},
            "data": {"train": [str(sets.train)], "eval": [str(sets.heldout)], "max_prompt_tokens": 256},
            "algorithm": {"name": algorithm},
            "reward": {"overlong_buffer": min(32, sizes.max_tokens)},
            "rollout": {"sampler": sampler, "prompts_per_step": sizes.prompts, "max_tokens": sizes.max_tokens},
            "train": {"steps": sizes.steps, "mini_batch_prompts": sizes.prompts, "lr": 1e-5, **row_size()},
            "eval": {"every": sizes.steps},
            "checkpoint": {"every": 4, "keep_last": 1},
            "log": {"samples_every": max(sizes.steps - 1, 1)},
        },
        where="quickstart --real",
    )


def row_size() -> dict[str, int]:
    """Return train.micro_batch_tokens: on a CPU little is gained by long rows, whose logits take gigabytes."""
    return {} if has_gpu() else {"micro_batch_tokens": 2048}


def cold_start(config: SftConfig) -> Path:
    """Train on the traces, or resume that, and return the folder of the last checkpoint."""
    run = RunDirectory(config.out, config_file=SFT_CONFIG)
    resume = _is_begun(run)
    config = preflight_sft(config, resume=resume)
    if not _is_done(run, config.train.steps):
        sft(config, resume=resume)
    return run.checkpoints()[-1][1]


def _reinforce(run: RunDirectory, config: Config) -> None:
    """Train the policy of the cold start, or resume that, with a line about the styles after each step."""
    resume = _is_begun(run)
    config = preflight(config, resume=resume)
    if not _is_done(run, config.train.steps):
        train(config, resume=resume, remark=lambda step: styles_of(run, step).line())


def _is_begun(run: RunDirectory) -> bool:
    return (run.path / run.config_file).is_file()


def _is_done(run: RunDirectory, steps: int) -> bool:
    return any(step >= steps for step, _ in run.checkpoints())


def _summarize(run: RunDirectory, *, seconds: float) -> None:
    """Print both accuracies before and after, the styles, and where the report is."""
    say, steps, evals = partial(make_console().print, soft_wrap=True), run.rollout_steps(), run.evals()
    first, last = styles_of(run, steps[0]), styles_of(run, steps[-1])
    before, after = evals[0].summary, evals[-1].summary
    say(
        f"sampled accuracy, {last.count} responses to new problems: {first.accuracy:.3f} in step {steps[0]}, "
        f"{last.accuracy:.3f} in step {steps[-1]}; "
        f"mean length {first.mean_length:.0f} and {last.mean_length:.0f} tokens"
    )
    say(
        f"greedy accuracy on {before['num_problems']} held-out problems: {before['accuracy']:.3f} before, "
        f"{after['accuracy']:.3f} after"
    )
    say(f"first step: {first.line()}\nlast step:  {last.line()}")
    say(
        "The model has 135 million parameters and has learned three styles of solving one sort of problem: "
        "docs/quickstart.md says what that shows and what it does not."
    )
    say(f"report: {write_report([run], run.path / 'report.html')}   (this call took {seconds:.0f} s)")
