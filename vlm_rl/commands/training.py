"""Commands that train: sft, train, serve, study, quickstart."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vlm_rl.commands.shared import (
    EXPERIMENTAL,
    EXPERIMENTAL_COMMAND,
    SAMPLER_HELP,
    Commands,
    add_output_options,
    port,
    refuse_bare_srun,
    seed,
)
from vlm_rl.errors import UserError

if TYPE_CHECKING:
    from vlm_rl.config import Config, SftConfig

_Resumed = TypeVar("_Resumed", "Config", "SftConfig")


def add_sft(commands: Commands) -> None:
    sft = commands.add_parser(
        "sft",
        help=f"learn from responses, before training; several GPUs: torchrun -m vlm_rl sft; {EXPERIMENTAL}",
        description=EXPERIMENTAL_COMMAND,
    )
    sft.add_argument("config", type=Path, help="a YAML file, or a run directory to resume")
    _add_run_options(sft)
    sft.set_defaults(command=_sft)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="keys of the YAML file to change")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint that verifies")
    new_run = "a new run with weights and optimizer of this checkpoint, RUN, RUN/60 or RUN/best; needs out=NEW"
    parser.add_argument("--start-from", metavar="RUN/STEP", help=new_run)
    parser.add_argument(
        "--dry-run", action="store_true", help="print whether it fits, hours, memory and tokens; load nothing"
    )
    parser.add_argument("--ranks", type=int, help="with --dry-run: the number of ranks (default: torchrun's, or 1)")
    of_a_card = "with --dry-run: the memory of a card (default: this machine's)"
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help=of_a_card)
    add_output_options(parser)


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the keys that the command line changes."""
    start = [] if options.start_from is None else [f"train.start_from={options.start_from}"]
    return [*options.overrides, *start]


def _where_it_is(config: _Resumed, options: argparse.Namespace) -> _Resumed:
    """Return the configuration of a resume with the folder that the user named: a run may be moved or copied."""
    folder: Path = options.config
    names_other = any(word.startswith("out=") for word in options.overrides)
    if not options.resume or not folder.is_dir() or names_other or Path(config.out).resolve() == folder.resolve():
        return config
    return config.model_copy(update={"out": str(folder)})


def _sft(options: argparse.Namespace) -> None:
    if not options.dry_run:
        refuse_bare_srun()
    from vlm_rl.config import load_sft_config
    from vlm_rl.run.directory import SFT_CONFIG

    path = options.config / SFT_CONFIG if options.config.is_dir() else options.config
    config = _where_it_is(load_sft_config(path, _overrides(options)), options)
    from vlm_rl.session.preflight import preflight_sft, with_planned_model

    if options.dry_run:
        config = with_planned_model(config)
        _dry_run(config, options)
        return
    config = preflight_sft(config, resume=options.resume)
    from vlm_rl.planning.out_of_memory import advised, memory_advice
    from vlm_rl.session.sft import sft

    with advised(partial(memory_advice, config)):
        sft(config, resume=options.resume)


def _dry_run(config: Config | SftConfig, options: argparse.Namespace) -> None:
    """Print what the run needs, and whether that fits on the card that was named, or on this machine."""
    from vlm_rl.planning.dry_run import dry_run
    from vlm_rl.planning.fits import card_of
    from vlm_rl.planning.page import print_dry_run
    from vlm_rl.scaling.hours import hours_line

    dry = dry_run(config, num_ranks=options.ranks, on_gpu=None if options.gpu_memory is None else True)
    card = card_of(options.gpu_memory, dry)
    hours = hours_line(dry, card.total / 1e9) if card is not None else ""
    print_dry_run(dry, card=card, resumes=options.resume, hours=hours, shows_deepspeed=options.output == "verbose")


def add_train(commands: Commands) -> None:
    train = commands.add_parser(
        "train",
        help="train a policy; on several GPUs (experimental): torchrun -m vlm_rl train ...",
        description="Experimental: several GPUs, and the keys that `vlm-rl config` says so of (docs/gpu.md).",
    )
    train.add_argument("config", type=Path, help="a YAML file, or a run directory to resume")
    _add_run_options(train)
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> None:
    if not options.dry_run:
        refuse_bare_srun()
    from vlm_rl.config import load_config
    from vlm_rl.run.directory import RunDirectory
    from vlm_rl.run.terminal import is_main, next_commands

    path = options.config / "config.yaml" if options.config.is_dir() else options.config
    config = _where_it_is(load_config(path, _overrides(options)), options)
    from vlm_rl.session.preflight import preflight, preflight_plan

    if options.dry_run:
        config = preflight_plan(config)
        _dry_run(config, options)
        return
    config = preflight(config, resume=options.resume)
    from vlm_rl.planning.out_of_memory import advised, memory_advice
    from vlm_rl.train import train

    with advised(partial(memory_advice, config)):
        train(config, resume=options.resume)
    if is_main():
        print(next_commands(config.out, config.data.eval, best=RunDirectory(config.out).best()))


def add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help=f"start a vLLM server for the rollouts of a run; {EXPERIMENTAL}",
        description=EXPERIMENTAL_COMMAND,
    )
    serve.add_argument("config", type=Path, help="the run's YAML file")
    serve.add_argument("overrides", nargs="*", metavar="key.path=value", help="keys of the YAML file to change")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; loopback is safe on any network")
    serve.add_argument("--port", type=port, default=8000, help="port to listen on")
    serve.add_argument(
        "--print", action="store_true", dest="only_print", help="print vLLM's own command, start nothing"
    )
    serve.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> None:
    from vlm_rl.config import load_config
    from vlm_rl.session.preflight import preflight_serve

    config = preflight_serve(load_config(options.config, options.overrides))
    from vlm_rl.samplers.remote.serve import serve

    serve(config, host=options.host, port=options.port, only_print=options.only_print)


def add_study(commands: Commands) -> None:
    study = commands.add_parser("study", help="train several algorithms over the same seeds and report on them")
    _add_study_arguments(study)
    study.set_defaults(command=_study)
    old_name = commands.add_parser("compare", prog="vlm-rl study")  # without help: not listed
    _add_study_arguments(old_name)
    old_name.set_defaults(command=_compare)


def _add_study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="a YAML file; docs/studies.md describes it")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="keys of the file to change: base.train.steps=40"
    )
    parser.add_argument("--jobs", type=int, help="runs at a time, which share cores and GPUs (default: 1)")
    parser.add_argument(
        "--ranks", type=int, default=1, help=f"ranks per run, on one machine (default: 1); more: {EXPERIMENTAL}"
    )
    parser.add_argument("--launch", default="", help="a command that starts a run: 'srun --gpus 8 {command}'")
    parser.add_argument("--machines", default="", help="A,B: one run at a time on each, as {machine} of --launch")
    parser.add_argument("--out", type=Path, help="folder of the runs and the report (default: runs/NAME-OF-STUDY)")
    parser.add_argument("--report-only", action="store_true", help="start nothing; report on the runs that exist")


def _study(options: argparse.Namespace) -> None:
    from vlm_rl.study.launch import Launch
    from vlm_rl.study.run import run_study

    out = options.out or Path("runs") / options.study.stem
    machines = tuple(machine for machine in options.machines.split(",") if machine)
    jobs = max(1, len(machines)) if options.jobs is None else options.jobs
    launch = Launch(jobs, options.ranks, options.launch, machines)
    code = run_study(options.study, out, overrides=options.overrides, launch=launch, report_only=options.report_only)
    if code:
        sys.exit(code)


def _compare(options: argparse.Namespace) -> None:
    print("note: `vlm-rl compare` is now called `vlm-rl study`", file=sys.stderr)
    _study(options)


def add_quickstart(commands: Commands) -> None:
    quick = commands.add_parser(
        "quickstart",
        help="train, evaluate and report a tiny policy on toy images",
    )
    quick.add_argument("--seed", type=seed, default=0, help="random seed of data, model and sampling")
    quick.add_argument("--seeds", type=_seeds, help="several seeds, e.g. 0,1,2: a run for each, then a table of all")
    quick.add_argument("--sampler", choices=["auto", "vllm", "transformers"], default="auto", help=SAMPLER_HELP)
    names = "grpo, dr_grpo, dapo, gspo, luspo, ba, rloo, cispo, sapo or vl_norm: docs/algorithms.md"
    quick.add_argument("--algorithm", default="luspo", help=names)
    quick.add_argument(
        "--out", type=Path, help="the run directory to make (runs/quickstart, -tools or -real at its end)"
    )
    task = quick.add_mutually_exclusive_group()
    tools = f"with a tool: zoom into what the resolution hides; {EXPERIMENTAL}; see docs/environments.md"
    task.add_argument("--tools", action="store_true", help=tools)
    real = f"SmolLM2-135M, a pretrained language model, on word problems: docs/quickstart.md; {EXPERIMENTAL}"
    task.add_argument("--real", action="store_true", help=real)
    quick.add_argument("--yes", action="store_true", help="with --real: begin without a GPU too, which takes an hour")
    quick.set_defaults(command=_quickstart)


def _seeds(text: str) -> list[int]:
    """Return the seeds of a list such as 0,1,2, each once."""
    return list(dict.fromkeys(map(seed, text.split(","))))


def _quickstart(options: argparse.Namespace) -> None:
    from vlm_rl.algorithms import resolve_algorithm
    from vlm_rl.config import AlgorithmConfig

    resolve_algorithm(AlgorithmConfig(name=options.algorithm))  # before minutes of warm start
    if options.real:
        _real_quickstart(options)
        return
    seeds, base = (
        options.seeds or [options.seed],
        options.out or Path("runs/quickstart-tools" if options.tools else "runs/quickstart"),
    )
    outs = {n: base / f"seed-{n}" if options.seeds else base for n in seeds}
    folders = {n: out.with_name(f"{out.name}-data") for n, out in outs.items()}
    if there := [str(folder) for n in seeds for folder in (outs[n], folders[n]) if folder.exists()]:
        exist, them = ("exists", "it") if len(there) == 1 else ("exist", "them")
        raise UserError(
            f"{', '.join(there)} {exist} already, from an earlier quickstart: remove {them}, "
            "or choose a different --out (make quickstart OUT=...)"
        )

    from vlm_rl.run.cores import set_threads

    if note := set_threads():
        print(note, flush=True)
    from vlm_rl.data_prep.quickstart_data import make_quickstart_data
    from vlm_rl.data_prep.tools_data import make_tools_data
    from vlm_rl.toy.quickstart import print_seeds, quickstart
    from vlm_rl.toy.tools_quickstart import tools_quickstart

    results = {}
    for number, out in outs.items():
        folder, how = folders[number], {"sampler": options.sampler, "algorithm": options.algorithm}
        if options.tools:
            results[number] = tools_quickstart(make_tools_data(folder, seed=number), out, seed=number, **how)
        else:
            results[number] = quickstart(make_quickstart_data(folder, seed=number), out, seed=number, **how)
    if options.seeds:
        print_seeds(results)


def _real_quickstart(options: argparse.Namespace) -> None:
    if options.seeds:
        raise UserError("--real takes one --seed: give a different --out for each")
    from vlm_rl.run.cores import set_threads

    if note := set_threads():
        print(note, flush=True)
    from vlm_rl.commands.real_quickstart import real_quickstart

    out = options.out or Path("runs/quickstart-real")
    settings = {"seed": options.seed, "sampler": options.sampler, "algorithm": options.algorithm}
    real_quickstart(out, **settings, on_cpu=options.yes)
