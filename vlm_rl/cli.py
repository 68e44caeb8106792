"""The command line: vlm-rl prepare, init, config, train, eval, score, grade, study, report, demo, ...

A UserError is printed as its message and exits with 2, and so does a full disk; any other exception is our fault and
keeps its traceback. Heavy imports happen inside the function that runs a command, never before the arguments are
parsed.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import vlm_rl
from vlm_rl.errors import UserError

# What no code of ours can help: a full disk, a quota, a limit on a file's size, a file system mounted read-only.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
_SAMPLER_HELP = "auto: vllm where it is installed, else transformers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without arguments, those of the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if (
        rest
        and options.command in (_train, _sft, _serve)
        and all("=" in word and not word.startswith("-") for word in rest)
    ):
        options.overrides += rest  # key=value after an option: argparse no longer expects a positional argument there
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if output := getattr(options, "output", None):
        os.environ["VLM_RL_OUTPUT"] = output  # read by run/terminal.py, and before libraries are imported
    try:
        options.command(options)
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
    except BrokenPipeError:  # `vlm-rl ... | head`: the reader has left
        _discard_output()
        return 141  # what a shell reports for a process ended by SIGPIPE
    except UserError as error:
        print(f"vlm-rl: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _discard_output()  # it may be what could not be written
        print(f"vlm-rl: {error}: free some space, or make the place writable, and try again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vlm-rl: interrupted", file=sys.stderr)
        return 130
    return 0


def _refuse_bare_srun() -> None:
    """Raise UserError where srun has started several tasks without torchrun: each would be a run of its own.

    The step's number of tasks is what counts. SLURM_NTASKS is set in a batch script too, which is one process.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "RANK" in os.environ:
        return
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    command = f"torchrun --nproc-per-node {-(-tasks // nodes)} --shutdown-timeout 1800"
    if nodes > 1:
        first_node = '"$(scontrol show hostnames | head -n 1):29500"'
        command += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {first_node}"
    raise UserError(
        f"srun has started {tasks} tasks, and each would be a run of its own: let it start one a node, and torchrun "
        f"the ranks: srun --ntasks {nodes} --ntasks-per-node 1 {command} -m vlm_rl {shlex.join(sys.argv[1:])}"
    )


def _discard_output() -> None:
    """Let what is still to be printed go nowhere: another failure at the interpreter's exit would hide the first."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of an option, where it has one and the help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_said = "default" in (action.help or "") or action.default in (None, False, "", [], argparse.SUPPRESS)
        return action.help if is_said else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """A parser, and those of its commands, whose help shows defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **options})


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each command is added below, beside the function that runs it."""
    parser = _Parser(prog="vlm-rl", description="Reinforcement learning with verifiable rewards.")
    parser.add_argument("--version", action="version", version=f"vlm-rl {vlm_rl.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_prepare,
        _add_init,
        _add_config,
        _add_sft,
        _add_train,
        _add_serve,
        _add_eval,
        _add_score,
        _add_grade,
        _add_study,
        _add_report,
        _add_demo,
        _add_export,
        _add_quickstart,
        _add_doctor,
    ):
        add(commands)
    return parser


def _add_output_options(command: argparse.ArgumentParser) -> None:
    amount = command.add_mutually_exclusive_group()
    amount.add_argument(
        "-q",
        "--quiet",
        action="store_const",
        dest="output",
        const="quiet",
        help="print no stages, steps and progress",
    )
    amount.add_argument(
        "-v",
        "--verbose",
        action="store_const",
        dest="output",
        const="verbose",
        help="print what vLLM and DeepSpeed say",
    )


def _add_prepare(commands: Commands) -> None:
    from vlm_rl.data_prep.command import add_arguments

    prepare = commands.add_parser("prepare", help="turn a data set's own files into a prepared set")
    add_arguments(prepare)
    prepare.set_defaults(command=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    from vlm_rl.data_prep.command import run

    run(options)


def _add_init(commands: Commands) -> None:
    init = commands.add_parser("init", help="write a recipe for a model and a prepared set that fits your cards")
    init.add_argument("--model", required=True, help="a Hugging Face folder, or where you will download one to")
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


def _add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="explain a key of the configuration, a section, or all")
    config.add_argument("key", nargs="?", default="", help="e.g. train.lr, rollout, or another trainer's name")
    config.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> None:
    from vlm_rl.recipe.reference import find_keys

    print("\n".join(map(str, find_keys(options.key))))


def _add_sft(commands: Commands) -> None:
    sft = commands.add_parser(
        "sft", help="learn from responses, before training; several GPUs: torchrun -m vlm_rl sft"
    )
    sft.add_argument("config", type=Path, help="a YAML file, or a run directory to resume")
    _add_run_options(sft)
    sft.set_defaults(command=_sft)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="keys of the YAML file to change")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint that verifies")
    parser.add_argument("--dry-run", action="store_true", help="print memory and tokens per step, and load nothing")
    parser.add_argument("--ranks", type=int, help="with --dry-run: the number of ranks (default: torchrun's, or 1)")
    _add_output_options(parser)


def _sft(options: argparse.Namespace) -> None:
    if not options.dry_run:
        _refuse_bare_srun()
    from vlm_rl.config import load_sft_config
    from vlm_rl.run.directory import SFT_CONFIG

    path = options.config / SFT_CONFIG if options.config.is_dir() else options.config
    config = load_sft_config(path, options.overrides)
    from vlm_rl.preflight import preflight_sft, with_model_folder

    if options.dry_run:
        config = with_model_folder(config)
        from vlm_rl.learner.dry_run import dry_run, print_dry_run, without_sampling

        print_dry_run(dry_run(without_sampling(config), num_ranks=options.ranks), samples=False)
        return
    config = preflight_sft(config, resume=options.resume)
    from vlm_rl.learner.sft_run import sft

    sft(config, resume=options.resume)


def _add_train(commands: Commands) -> None:
    train = commands.add_parser("train", help="train a policy; on several GPUs: torchrun -m vlm_rl train ...")
    train.add_argument("config", type=Path, help="a YAML file, or a run directory to resume")
    _add_run_options(train)
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> None:
    if not options.dry_run:
        _refuse_bare_srun()
    from vlm_rl.config import load_config
    from vlm_rl.run.terminal import is_main, next_commands, resume_command

    path = options.config / "config.yaml" if options.config.is_dir() else options.config
    config = load_config(path, options.overrides)
    from vlm_rl.preflight import preflight, preflight_plan

    if options.dry_run:
        config = preflight_plan(config)
        from vlm_rl.learner.dry_run import dry_run, print_dry_run

        print_dry_run(dry_run(config, num_ranks=options.ranks))
        return
    config = preflight(config, resume=options.resume)
    from vlm_rl.train import train

    try:
        train(config, resume=options.resume)
        if is_main():
            print(next_commands(config.out, config.data.eval))
    except KeyboardInterrupt:
        if is_main() and (Path(config.out) / "config.yaml").is_file():
            command = resume_command(config.out)
            print(f"to resume from the newest checkpoint: {command}", file=sys.stderr)
        raise
    except RuntimeError as error:
        from vlm_rl.learner.out_of_memory import is_out_of_memory, memory_advice

        if is_out_of_memory(error):
            raise UserError(memory_advice(config, error, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))) from error
        raise


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="start a vLLM server for the rollouts of a run")
    serve.add_argument("config", type=Path, help="the run's YAML file")
    serve.add_argument("overrides", nargs="*", metavar="key.path=value", help="keys of the YAML file to change")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; loopback is safe on any network")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on")
    serve.add_argument(
        "--print", action="store_true", dest="only_print", help="print vLLM's own command, start nothing"
    )
    serve.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> None:
    from vlm_rl.config import load_config
    from vlm_rl.preflight import preflight_plan

    config = preflight_plan(load_config(options.config, options.overrides))
    from vlm_rl.samplers.serve import serve

    serve(config, host=options.host, port=options.port, only_print=options.only_print)


def _add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="measure a checkpoint on prepared sets; also: eval compare A B, eval export",
        usage="vlm-rl eval --model FOLDER --data SET [SET ...] --out FOLDER [options]\n"
        "       vlm-rl eval compare RESULTS [RESULTS ...] [options]\n"
        "       vlm-rl eval export RECORDS --to FORMAT --out FILE",
    )
    evaluate.add_argument("--model", type=Path, help="a Hugging Face folder, or a run: RUN, RUN/60, RUN/latest")
    evaluate.add_argument("--data", type=Path, nargs="+", help="prepared sets")
    evaluate.add_argument("--out", type=Path, help="folder for records and summaries")
    evaluate.add_argument("--sampler", choices=["auto", "vllm", "transformers"], default="auto", help=_SAMPLER_HELP)
    evaluate.add_argument(
        "--template", default="think_answer", help="a prompt of ours, or a benchmark's own, e.g. mathvision"
    )
    evaluate.add_argument("--mode", choices=["strict", "official"], default="strict", help="how answers are judged")
    evaluate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    evaluate.add_argument("--samples", type=int, default=1, help="responses per problem: the k of avg@k")
    evaluate.add_argument("--top-p", type=float, default=1.0, help="1 samples from all tokens")
    evaluate.add_argument("--max-tokens", type=int, default=2048, help="most tokens of a response")
    evaluate.add_argument(
        "--max-prompt-tokens", type=int, default=4096, help="most tokens of a prompt, its images included"
    )
    evaluate.add_argument("--batch-size", type=int, default=64, help="responses generated at a time")
    evaluate.add_argument(
        "--images",
        choices=["real", "blank", "shuffled"],
        default="real",
        help="blank, shuffled: is the image needed?",
    )
    evaluate.add_argument("--seed", type=int, default=0, help="of the sampling")
    _add_output_options(evaluate)
    evaluate.set_defaults(command=_eval)
    actions = evaluate.add_subparsers(prog="vlm-rl eval", title="on results that exist", metavar="ACTION")
    _add_eval_compare(actions)
    _add_eval_export(actions)


def _eval(options: argparse.Namespace) -> None:
    _refuse_bare_srun()
    from vlm_rl.preflight import preflight_eval

    for name in ("model", "data", "out"):  # the parser cannot require them: compare and export go without
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; vlm-rl eval needs --model, --data and --out")
    options.model = preflight_eval(options.model, options.data)
    from vlm_rl.evaluation.command import evaluate_sets

    evaluate_sets(options)


def _add_eval_compare(actions: Commands) -> None:
    compare = actions.add_parser("compare", help="compare evaluations problem by problem")
    compare.add_argument("results", type=Path, nargs="+", help="results folders, Parquet records or JSON of score")
    compare.add_argument("--json", type=Path, help="also write the comparison to this file")
    compare.set_defaults(command=_eval_compare)


def _eval_compare(options: argparse.Namespace) -> None:
    from vlm_rl.evaluation.compare import compare_evaluations

    compare_evaluations(options)


def _add_eval_export(actions: Commands) -> None:
    export = actions.add_parser("export", help="write records in the format of VLMEvalKit or lmms-eval")
    export.add_argument(
        "records", type=Path, help="a Parquet file of vlm-rl eval: RESULTS/eval/SET/step-000000.parquet"
    )
    export.add_argument("--to", choices=["vlmevalkit", "lmms-eval"], required=True, help="the format")
    export.add_argument("--out", type=Path, required=True, help="a new .tsv (VLMEvalKit) or .jsonl (lmms-eval)")
    export.set_defaults(command=_eval_export)


def _eval_export(options: argparse.Namespace) -> None:
    from vlm_rl.evaluation.export import export_records

    export_records(options)


def _add_score(commands: Commands) -> None:
    score = commands.add_parser("score", help="grade saved responses by a benchmark's own rules, or strictly")
    score.add_argument("--benchmark", required=True, help="mathvista, mathvision, ...; docs/evaluation.md lists them")
    score.add_argument("--annotations", type=Path, nargs="+", help="the authors' file (DynaMath: one per trial)")
    score.add_argument(
        "--responses", type=Path, nargs="+", required=True, help="JSON, JSON Lines, CSV or our Parquet"
    )
    score.add_argument("--mode", choices=["strict", "official"], default="strict", help="how answers are judged")
    score.add_argument(
        "--template", help="where the strict rule looks for the answer (default: the records' own, else plain)"
    )
    score.add_argument("--json", type=Path, help="write the scores, and every row behind them, to this file")
    score.set_defaults(command=_score)


def _score(options: argparse.Namespace) -> None:
    from vlm_rl.evaluation.benchmarks.score_command import describe, score_files

    print(describe(score_files(options)))


def _add_grade(commands: Commands) -> None:
    grade = commands.add_parser("grade", help="grade one response, or a JSON Lines file of them")
    grade.add_argument("--gold", action="append", help="the right answer; repeat it for alternatives")
    grade.add_argument("--response", help="the whole response")
    grade.add_argument(
        "--file", type=Path, help="JSON Lines: {id?, gold, response, answer_type?, choices?, tolerance?, question?}"
    )
    grade.add_argument("--out", type=Path, help="with --file: the same lines with verdict, extracted, path, reason")
    grade.add_argument(
        "--type", "--answer-type", dest="answer_type", help="the kind of answer (default: by the form of the gold)"
    )
    grade.add_argument(
        "--template", default="plain", help="plain, or think_answer or think_box, which require their tags"
    )
    grade.add_argument("--choices", nargs="*", help="the texts of a multiple choice's options")
    grade.add_argument("--tolerance", type=float, help="largest accepted difference of a float")
    grade.add_argument("--question", help="the problem's text: where it asks for a percentage, 50%% is 50")
    grade.set_defaults(command=_grade)


def _grade(options: argparse.Namespace) -> None:
    from vlm_rl.data.golds import infer_answer_type
    from vlm_rl.grading.command import grade_file, grade_one

    names = ("gold", "response", "answer_type", "choices", "tolerance", "question")
    row = {name: value for name in names if (value := getattr(options, name)) is not None}
    if (options.file is None) != (options.out is None) or (options.file is None) == (not row):
        raise UserError("grade takes either --gold and --response, or --file and --out")
    if options.file is None:
        grade_one(row, template=options.template, infer_type=infer_answer_type)
    else:
        grade_file(options.file, options.out, template=options.template, infer_type=infer_answer_type)


def _add_study(commands: Commands) -> None:
    study = commands.add_parser("study", help="train several algorithms over the same seeds and report on them")
    _add_study_arguments(study)
    study.set_defaults(command=_study)
    old_name = commands.add_parser("compare", prog="vlm-rl study")  # without help: not listed
    _add_study_arguments(old_name)
    old_name.set_defaults(command=_compare)


def _add_study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="a YAML file; docs/studies.md describes it")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the machine's cores")
    parser.add_argument("--out", type=Path, help="folder of the runs and the report (default: runs/NAME-OF-STUDY)")
    parser.add_argument("--report-only", action="store_true", help="start nothing; report on the runs that exist")


def _study(options: argparse.Namespace) -> None:
    from vlm_rl.study.run import run_study

    out = options.out or Path("runs") / options.study.stem
    code = run_study(options.study, out, jobs=options.jobs, report_only=options.report_only)
    if code:
        sys.exit(code)


def _compare(options: argparse.Namespace) -> None:
    print("note: `vlm-rl compare` is now called `vlm-rl study`", file=sys.stderr)
    _study(options)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser("report", help="write one self-contained HTML page about runs")
    report.add_argument("runs", type=Path, nargs="+", help="run directories")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    report.add_argument("--figure", type=Path, help="also write a wide PNG of the first run")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> None:
    from vlm_rl.report.readme_figure import write_readme_figure
    from vlm_rl.report.run_report import write_report
    from vlm_rl.run.directory import RunDirectory

    runs = [RunDirectory(path).open() for path in options.runs]
    print(write_report(runs, options.out))
    if options.figure:
        print(write_readme_figure(runs[0], options.figure))


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser("demo", help="compare checkpoints' reasoning in the browser")
    demo.add_argument(
        "runs",
        type=Path,
        nargs="*",
        help="run directories, results of eval, folders of study (default: runs/quickstart, else recorded runs)",
    )
    demo.add_argument("--host", default="127.0.0.1", help="address to serve on")
    demo.add_argument("--port", type=int, default=7860, help="port to serve on")
    demo.add_argument("--open-wider", action="store_true", help="allow a host that other machines can reach")
    demo.add_argument("--token-file", type=Path, help="file with the token that visitors must know")
    demo.add_argument("--public-url", default="", metavar="URL", help="address of a reverse proxy before the demo")
    demo.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL[,MODEL]",
        help="an OpenAI-compatible server that the live panel may ask, e.g. remote=http://127.0.0.1:8000/v1",
    )
    demo.add_argument(
        "--endpoint-key",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="the environment variable that holds an endpoint's key",
    )
    demo.add_argument(
        "--live-engine",
        choices=["auto", "vllm", "transformers"],
        default="transformers",
        help="engine that answers in the live panel",
    )
    demo.add_argument("--live-models", type=int, default=2, help="checkpoints that the live panel may keep in memory")
    demo.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> None:
    from vlm_rl.demo.library import find_runs

    for folder in options.runs:
        find_runs(folder)
    from vlm_rl.demo.default_runs import default_folders
    from vlm_rl.demo.endpoints import parse_endpoints

    if options.live_models < 1:
        raise UserError(f"--live-models is {options.live_models}; it must be at least 1")
    endpoints = parse_endpoints(options.endpoint, options.endpoint_key)
    from vlm_rl.demo.live import LiveOptions
    from vlm_rl.demo.server import launch

    live = LiveOptions(endpoints, engine=options.live_engine, max_loaded=options.live_models)
    folders = options.runs or default_folders()
    launch(
        folders,
        host=options.host,
        port=options.port,
        open_wider=options.open_wider,
        public_url=options.public_url,
        token_file=options.token_file,
        live=live,
    )


def _add_export(commands: Commands) -> None:
    export = commands.add_parser("export", help="write a checkpoint as a model folder to use or publish")
    export.add_argument("checkpoint", type=Path, help="RUN/STEP, a checkpoint's folder, or RUN for its last one")
    export.add_argument("--out", type=Path, required=True, help="the folder to make")
    export.add_argument("--merge", action="store_true", help="merge a LoRA adapter with its base model")
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from vlm_rl.report.model_export import export

    export(options)


def _add_quickstart(commands: Commands) -> None:
    quick = commands.add_parser("quickstart", help="train, evaluate and report a tiny policy on toy images")
    quick.add_argument("--seed", type=int, default=0, help="of data, model and sampling")
    quick.add_argument("--seeds", type=_seeds, help="several seeds, e.g. 0,1,2: a run for each, then a table of all")
    quick.add_argument("--sampler", choices=["auto", "vllm", "transformers"], default="auto", help=_SAMPLER_HELP)
    quick.add_argument("--algorithm", default="luspo", help="a name in vlm_rl/algorithms.py")
    quick.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="the run directory to make")
    quick.set_defaults(command=_quickstart)


def _seeds(text: str) -> list[int]:
    """Return the seeds of a list such as 0,1,2, each once."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers; write e.g. 0,1,2") from None
    return list(dict.fromkeys(seeds))


def _quickstart(options: argparse.Namespace) -> None:
    from vlm_rl.algorithms import resolve_algorithm
    from vlm_rl.config import AlgorithmConfig

    resolve_algorithm(AlgorithmConfig(name=options.algorithm))  # before minutes of warm start
    seeds = options.seeds or [options.seed]
    outs = {seed: options.out / f"seed-{seed}" if options.seeds else options.out for seed in seeds}
    for out in outs.values():
        if out.exists():
            raise UserError(f"{out} exists already; remove it or choose a different --out (make quickstart OUT=...)")

    from vlm_rl.run.cores import set_threads

    if note := set_threads():
        print(note, flush=True)
    from vlm_rl.data_prep.quickstart_data import make_quickstart_data
    from vlm_rl.toy.quickstart import print_seeds, quickstart

    results = {}
    for seed, out in outs.items():
        toy = make_quickstart_data(out.with_name(f"{out.name}-data"), seed=seed)
        results[seed] = quickstart(toy, out, seed=seed, sampler=options.sampler, algorithm=options.algorithm)
    if options.seeds:
        print_seeds(results)


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="check whether this machine, or a model, computes the right thing")
    doctor.add_argument("--model", type=Path, help="a Hugging Face folder: check whether it trains here")
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


if __name__ == "__main__":
    sys.exit(main())
