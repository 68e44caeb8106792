"""The command that makes a paper's table: paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_rl.commands.shared import EXPERIMENTAL, Commands
from vlm_rl.errors import UserError

if TYPE_CHECKING:
    from vlm_rl.config import Config
    from vlm_rl.papers.command import Setup, Stage


def add_paper(commands: Commands) -> None:
    paper = commands.add_parser("paper", help="make a paper's table: print or run its commands in order, and resume")
    paper.add_argument("paper", help="luspo-vl, luspo-text, luspo-mix, ba, hadw or hadw-ablations")
    paper.add_argument("--plan", action="store_true", help="print what is missing and every command (the default)")
    paper.add_argument("--prepare", action="store_true", help="prepare the data sets that are missing")
    paper.add_argument("--train", action="store_true", help="train the runs that are missing, one after the other")
    paper.add_argument("--eval", action="store_true", help="measure the models and the trained runs")
    paper.add_argument("--table", action="store_true", help="write the table: published and ours")
    paper.add_argument("--tiny", action="store_true", help="toy data and tiny models: minutes on a CPU")
    paper.add_argument(
        "--ranks", type=int, help=f"ranks per command on this machine (default: 8; tiny: 1); {EXPERIMENTAL}"
    )
    paper.add_argument("--configs", type=Path, default=Path("configs"), help="the folder of shipped configurations")
    paper.add_argument("--data", type=Path, default=Path("data"), help="the folder of prepared sets")
    paper.add_argument("--out", type=Path, help="folder of the table (default: runs/papers/NAME-table)")
    paper.set_defaults(command=_paper)


def _paper(options: argparse.Namespace) -> None:
    from vlm_rl.papers.command import STAGES, Setup, make_paper, paper_of

    paper_of(options.paper)
    stages: list[Stage] = [stage for stage in STAGES if getattr(options, stage)]
    if options.plan and stages:
        raise UserError(f"--plan prints and --{stages[0]} runs: give one of them")
    if options.ranks is not None and options.ranks < 1:
        raise UserError(f"--ranks is {options.ranks}; give 1 or more")
    out = options.out or Path("runs") / "papers" / f"{options.paper}-{'tiny' if options.tiny else 'table'}"
    if options.tiny:
        setup = _tiny_setup(out, options)
    else:
        ranks = {} if options.ranks is None else {"ranks": options.ranks}
        setup = Setup(out=out, configs=options.configs, data=options.data, changes=_moved_sets(options.data), **ranks)
    setup = replace(setup, options=_given(options))
    if code := make_paper(options.paper, stages=stages, setup=setup):
        sys.exit(code)


def _given(options: argparse.Namespace) -> list[str]:
    """Return the options besides the stages, as they were given."""
    words = ["--tiny"] if options.tiny else []
    for name, default in (("ranks", None), ("configs", Path("configs")), ("data", Path("data")), ("out", None)):
        if (value := getattr(options, name)) != default:
            words += [f"--{name}", str(value)]
    return words


def _moved_sets(data: Path) -> Callable[[int, Config], list[str]]:
    """Return a function whose changes have the runs take their sets from `data`, where --prepare puts them."""

    def changes(_: int, config: Config) -> list[str]:
        if data == Path("data"):  # where the shipped configurations have them
            return []
        moved = {
            f"data.{split}": [str(data / Path(name).name) for name in names]
            for split, names in (("train", config.data.train), ("eval", config.data.eval))
            if names
        }
        return [f"{key}=[{','.join(names)}]" for key, names in moved.items()]

    return changes


def _tiny_setup(out: Path, options: argparse.Namespace) -> Setup:
    """Return a setup whose runs keep the paper's algorithms and rewards, on toy data and a tiny model below `out`.

    Each run has a number of steps of its own, and each set a number of problems: a table whose rows or columns were
    exchanged would show it.
    """
    from vlm_rl.data_prep.quickstart_data import make_tiny_sets
    from vlm_rl.papers.command import Setup
    from vlm_rl.study.launch import visible_cards
    from vlm_rl.toy.tiny_model import build_tiny_model

    model, data, ranks = out / "tiny-model", out / "data", options.ranks or 1

    def changes(place: int, config: Config) -> list[str]:
        tiny = {
            "out": out / Path(config.out).name,
            "model.path": model,
            "model.gradient_checkpointing": "false",
            "data.train": f"[{data / 'train'}]",
            "data.eval": "[]",
            "data.max_prompt_tokens": 512,  # LiveCodeBench's words around a question are 400 of the tiny tokenizer's
            "reward.overlong_buffer": min(8, config.reward.overlong_buffer),
            "rollout.sampler": "transformers",
            "rollout.prompts_per_step": 4,
            "rollout.responses_per_prompt": 4,
            "rollout.max_tokens": 14,
            "rollout.tensor_parallel": 1,
            "train.steps": 2 + place,
            "train.mini_batch_prompts": 2,
            "train.micro_batch_tokens": 600,
            "train.zero_stage": 2,
            "eval.every": 0,
            "eval.by_set": "{}",
            "checkpoint.every": 2,
        }
        return [f"{key}={value}" for key, value in tiny.items()]

    def prepare(names: Sequence[str]) -> None:
        texts = make_tiny_sets(data, names)
        if not (model / "config.json").is_file():
            build_tiny_model(model, seed=0, tokenizer_texts=texts)

    return Setup(
        out=out,
        configs=options.configs,
        data=data,
        ranks=ranks,
        jobs=min(2, max(1, len(visible_cards()) // ranks)) if visible_cards() else 2,
        changes=changes,
        eval_words=["--sampler", "transformers", "-q"],
        prepare=prepare,
        note="Toy data and a tiny untrained model: our numbers here say nothing about the paper",
    )
