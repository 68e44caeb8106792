"""Commands before a run: prepare, init, config, doctor."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vlm_rl.commands.shared import Commands
from vlm_rl.errors import UserError


def add_prepare(commands: Commands) -> None:
    from vlm_rl.data_prep.command import add_arguments

    prepare = commands.add_parser("prepare", help="turn a data set's own files into a prepared set")
    add_arguments(prepare)
    prepare.set_defaults(command=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    from vlm_rl.data_prep.command import run

    run(options)


def add_init(commands: Commands) -> None:
    init = commands.add_parser("init", help="write a recipe for a model and a prepared set that fits your cards")
    help_model = "a Hugging Face folder, where you will download one to, or ORG/NAME[@REVISION] of the hub"
    init.add_argument("--model", required=True, help=help_model)
    init.add_argument("--data", type=Path, nargs="+", required=True, metavar="SET", help="prepared sets to train on")
    init.add_argument("--eval", type=Path, nargs="+", default=[], metavar="SET", help="prepared sets to evaluate on")
    init.add_argument("--gpus", type=int, metavar="N", help="cards of the run (default: those of this machine)")
    init.add_argument("--gpu-memory", type=float, metavar="GB", help="of a card (default: this machine's, or 80)")
    init.add_argument("--lora", action="store_true", help="train low-rank adapters, which takes less memory")
    init.add_argument("--out", type=Path, metavar="FILE", help="the recipe (default: SET_MODEL.yaml)")
    init.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> None:
    from vlm_rl.preflight import preflight_sets

    preflight_sets([*options.data, *options.eval])
    from vlm_rl.recipe.command import init

    init(options)


def add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="explain a key of the configuration, a section, or all")
    config.add_argument("key", nargs="?", default="", help="e.g. train.lr, rollout, or another trainer's name")
    config.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> None:
    from vlm_rl.recipe.reference import find_keys

    print("\n".join(map(str, find_keys(options.key))))


def add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="check whether this machine, or a model, computes the right thing")
    doctor.add_argument("--model", type=Path, help="a folder, run or name of the hub: check whether it trains here")
    doctor.add_argument(
        "--config", type=Path, help="a YAML file of train: check whether its plan fits on this machine"
    )
    doctor.add_argument("--ranks", type=int, help="with --config: the number of ranks here (default: one a GPU)")
    doctor.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs, whose disk is checked")
    doctor.add_argument("--json", type=Path, help="also write the answers to this file")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> None:
    for path in (options.model, options.config):
        if path is not None and not path.exists():
            raise UserError(f"{path} is not there: correct the path")
    from vlm_rl.doctor.command import doctor

    if code := doctor(options):
        sys.exit(code)
