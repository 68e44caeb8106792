"""Commands before a run: prepare, init, config, plan, doctor."""

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
    init.add_argument("--model", help=help_model)
    init.add_argument("--data", type=Path, nargs="+", default=[], metavar="SET", help="prepared sets to train on")
    init.add_argument("--eval", type=Path, nargs="+", default=[], metavar="SET", help="prepared sets to evaluate on")
    init.add_argument("--gpus", type=int, metavar="N", help="cards of the run (default: those of this machine)")
    init.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that they are divided among")
    init.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="memory of a card (default: this machine's, or 80)"
    )
    init.add_argument("--lora", action="store_true", help="train low-rank adapters, which takes less memory")
    of_another = "a file of EasyR1, verl, TRL, OpenRLHF or ms-swift (YAML, or the script that starts it): convert it"
    init.add_argument("--from", type=Path, metavar="FILE", dest="source", help=of_another)
    init.add_argument("--out", type=Path, metavar="FILE", help="the recipe (default: SET_MODEL.yaml)")
    init.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> None:
    from vlm_rl.session.preflight import preflight_sets

    if options.source is not None:
        preflight_sets([*options.data, *options.eval])
        from vlm_rl.planning.foreign_recipe import init_from

        init_from(options)
        return
    if missing := [name for name in ("model", "data") if not getattr(options, name)]:
        raise UserError(
            f"--{' and --'.join(missing)} missing: vlm-rl init --model M --data SET, or --from FILE alone"
        )
    preflight_sets([*options.data, *options.eval])
    from vlm_rl.planning.init import init

    init(options)


def add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="explain a key of the configuration, a section, or all")
    config.add_argument("key", nargs="?", default="", help="e.g. train.lr, rollout, or another trainer's name")
    config.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> None:
    from vlm_rl.config.key_reference import find_keys

    print("\n".join(map(str, find_keys(options.key))))


def add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan", help="simulate a run on several numbers of GPUs: how many for the learner, how many for servers?"
    )
    plan.add_argument("config", type=Path, help="a YAML file of train")
    plan.add_argument("overrides", nargs="*", metavar="key.path=value", help="keys of the YAML file to change")
    plan.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128], metavar="N", help="numbers of cards")
    plan.add_argument(
        "--ahead", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="values of rollout.ahead, for servers"
    )
    plan.add_argument("--gpu-memory", type=float, default=80.0, metavar="GB", help="memory of a card")
    plan.add_argument("--run", type=Path, help="a run whose seconds and lengths are taken")
    plan.add_argument("--run-gpus", type=int, metavar="N", help="with --run: cards of its learner")
    of_lengths = "a run's lengths, or the mean of made-up ones (default: those of --run, else rollout.max_tokens / 4)"
    plan.add_argument("--lengths", metavar="RUN|TOKENS", help=of_lengths)
    plan.add_argument(
        "--bandwidth", type=float, metavar="TB/S", help="bandwidth of a card's memory (default: 3.35, assumed)"
    )
    plan.add_argument(
        "--operations",
        type=float,
        metavar="TFLOP/S",
        help="speed of a card's matrix products (default: 400, assumed)",
    )
    plan.add_argument(
        "--sync-seconds", type=float, metavar="S", help="seconds of a sync (default: --run's, else 3, assumed)"
    )
    plan.add_argument(
        "--decode-tokens-per-second", type=float, metavar="X", help="tokens that a full engine on one card samples"
    )
    plan.add_argument(
        "--learner-tokens-per-second", type=float, metavar="X", help="tokens that one card trains on, prompts too"
    )
    plan.add_argument("--steps", type=int, default=12, metavar="N", help="simulated steps that count")
    plan.add_argument("--seed", type=int, default=0, help="random seed of the lengths")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="write a plot: .png, or .html")
    plan.add_argument("--json", type=Path, metavar="FILE", help="also write every division to this file")
    plan.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> None:
    from vlm_rl.config import load_config
    from vlm_rl.session.preflight import preflight_plan

    _check_plan(options)
    config = preflight_plan(load_config(options.config, options.overrides))
    if options.run is not None:
        from vlm_rl.run.directory import RunDirectory
        from vlm_rl.scaling.lengths import check_measures

        check_measures(RunDirectory(options.run).open().config())
    from vlm_rl.scaling.command import plan

    plan(options, config)


def _check_plan(options: argparse.Namespace) -> None:
    """Raise UserError for an option of plan that cannot be, before torch is imported; read --lengths."""
    least = {"steps": 1, "gpu_memory": 1, "bandwidth": 1e-6, "operations": 1e-6, "sync_seconds": 0, "run_gpus": 1}
    least |= {"decode_tokens_per_second": 1e-6, "learner_tokens_per_second": 1e-6, "seed": 0}
    values = [(name, getattr(options, name), bound) for name, bound in least.items()]
    values += [("gpus", count, 1) for count in options.gpus] + [("ahead", count, 0) for count in options.ahead]
    for name, value, bound in values:
        if value is not None and not bound <= value < float("inf"):
            least_words = f"at least {bound}" if bound == int(bound) else "above 0"
            raise UserError(f"--{name.replace('_', '-')} is {value:g}: it must be {least_words}")
    if (options.run is None) != (options.run_gpus is None):
        raise UserError("--run and --run-gpus go together: a run does not store how many cards its learner had")
    if options.plot is not None and options.plot.suffix not in (".png", ".html"):
        raise UserError(f"--plot {options.plot}: name a file that ends in .png or .html")
    if options.lengths is not None:
        options.lengths = _run_or_mean(options.lengths)


def _run_or_mean(text: str) -> Path | float:
    """Return the run that --lengths names, or the mean number of tokens. Raises UserError for neither."""
    try:
        mean = float(text)
    except ValueError:
        from vlm_rl.run.directory import RunDirectory

        return RunDirectory(text).open().path
    if not 1 <= mean < float("inf"):
        raise UserError(f"--lengths is {mean:g}: give a mean of at least 1 token, or a run")
    return mean


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
    if options.config is not None and not options.config.exists():
        raise UserError(f"--config {options.config} is not there: correct the path")
    if options.model is not None:
        from vlm_rl.run.checkpoint_names import resolve_model

        if not resolve_model(options.model).exists():
            raise UserError(f"--model {options.model} is not there: give a folder, a run, or ORG/NAME of the hub")
    from vlm_rl.doctor.command import doctor

    if code := doctor(options):
        sys.exit(code)
