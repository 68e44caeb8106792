"""Commands that measure and grade: eval with compare and export, score, grade."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_rl.commands.shared import (
    EXPERIMENTAL,
    EXPERIMENTAL_COMMAND,
    SAMPLER_HELP,
    Commands,
    add_judge_options,
    add_output_options,
    refuse_bare_srun,
    seed,
)
from vlm_rl.errors import UserError


def add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="measure a checkpoint on prepared sets (experimental on GPUs); also: eval compare A B, eval export, "
        "eval protocols",
        description=EXPERIMENTAL_COMMAND,
        usage="vlm-rl eval --model FOLDER --data SET [SET ...] --out FOLDER [options]\n"
        "       vlm-rl eval --endpoint URL --data SET [SET ...] --out FOLDER [options]\n"
        "       vlm-rl eval compare RESULTS [RESULTS ...] [options]\n"
        "       vlm-rl eval export RECORDS --to FORMAT --out FILE\n"
        "       vlm-rl eval protocols",
    )
    help_model = "a Hugging Face folder, ORG/NAME[@REVISION] of the hub, or a run: RUN, RUN/60, RUN/best, RUN/latest"
    evaluate.add_argument("--model", type=Path, help=help_model)
    evaluate.add_argument("--data", type=Path, nargs="+", help="prepared sets")
    evaluate.add_argument("--out", type=Path, help="folder for records and summaries")
    evaluate.add_argument("--sampler", choices=["auto", "vllm", "transformers"], default="auto", help=SAMPLER_HELP)
    evaluate.add_argument(
        "--template",
        help="a prompt of ours, a YAML file of your own, or a benchmark's, e.g. mathvision (default: the run's; of "
        "other models think_answer, with --mode official the benchmark's own); a set of programs takes only one that "
        "asks for a program",
    )
    evaluate.add_argument(
        "--mode", choices=["strict", "official"], help="how answers are judged (default: the protocol's)"
    )
    evaluate.add_argument(
        "--temperature", type=float, help="0 is greedy (default: the benchmark's protocol, see eval protocols)"
    )
    evaluate.add_argument(
        "--samples", type=int, help="responses per problem: the k of avg@k (default: the protocol's)"
    )
    evaluate.add_argument("--top-p", type=float, help="1 samples from all tokens (default: the protocol's)")
    evaluate.add_argument(
        "--max-tokens", type=int, help="most tokens of a response (default: the run's, else the protocol's)"
    )
    evaluate.add_argument(
        "--max-prompt-tokens", type=int, default=4096, help="most tokens of a prompt, its images included"
    )
    evaluate.add_argument("--batch-size", type=int, default=64, help="responses generated or asked for at a time")
    help_tensor_parallel = (
        "how many neighbouring ranks of torchrun form one vLLM engine, for a model beyond one card; "
        f"more than 1: {EXPERIMENTAL}"
    )
    evaluate.add_argument("--tensor-parallel", type=int, default=1, help=help_tensor_parallel)
    evaluate.add_argument(
        "--images",
        choices=["real", "blank", "shuffled"],
        default="real",
        help="blank or shuffled images show whether the score needs them",
    )
    help_environment = "zoom, python, answer_check, none, or a run's .yaml with one (default: the checkpoint's run's)"
    evaluate.add_argument("--environment", metavar="NAME", help=help_environment)
    evaluate.add_argument("--seed", type=seed, default=0, help="random seed of the sampling")
    help_reward = (
        "a run's configuration, whose part of the reward in the role accuracy decides what is right on sets of no "
        "known benchmark (default: that of the model's own run)"
    )
    evaluate.add_argument("--reward", type=Path, metavar="FILE", help=help_reward)
    add_judge_options(evaluate)
    _add_endpoint_options(evaluate)
    add_output_options(evaluate)
    evaluate.set_defaults(command=_eval)
    actions = evaluate.add_subparsers(prog="vlm-rl eval", title="on results that exist", metavar="ACTION")
    _add_eval_compare(actions)
    _add_eval_export(actions)
    protocols = actions.add_parser("protocols", help="print how each benchmark is measured by default, with sources")
    protocols.set_defaults(command=_eval_protocols)


def _add_endpoint_options(evaluate: argparse.ArgumentParser) -> None:
    endpoint = evaluate.add_argument_group("a served or closed model, in the place of --model")
    help_endpoint = "measure what this OpenAI-compatible endpoint (up to /v1) serves"
    endpoint.add_argument("--endpoint", metavar="URL", help=help_endpoint)
    help_name = "its name there; not needed where there is only one"
    endpoint.add_argument("--endpoint-model", metavar="NAME", default="", help=help_name)
    help_key = "the environment variable that holds the API key"
    endpoint.add_argument("--endpoint-key-env", metavar="VARIABLE", default="", help=help_key)
    help_extra = 'more for each request, such as \'{"reasoning_effort": "high"}\'; null takes one of ours out'
    endpoint.add_argument("--endpoint-extra", metavar="JSON", default="", help=help_extra)
    endpoint.add_argument("--endpoint-timeout", type=float, default=600.0, help="seconds of a request")


def _eval(options: argparse.Namespace) -> None:
    refuse_bare_srun()
    if options.endpoint is not None:
        _eval_served(options)
        return
    from vlm_rl.session.preflight import preflight_eval

    for name in ("model", "data", "out"):  # the parser cannot require them: compare and export go without
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; vlm-rl eval needs --model, --data and --out")
    options.model = preflight_eval(
        options.model, options.data, sampler=options.sampler, tensor_parallel=options.tensor_parallel
    )
    from vlm_rl.evaluation.command import evaluate_sets
    from vlm_rl.planning.out_of_memory import advised, eval_memory_advice

    with advised(eval_memory_advice):
        evaluate_sets(options)


def _eval_served(options: argparse.Namespace) -> None:
    from vlm_rl.evaluation.served import evaluate_served

    for name in ("data", "out"):
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; vlm-rl eval --endpoint needs --data and --out")
    evaluate_served(options)


def _add_eval_compare(actions: Commands) -> None:
    compare = actions.add_parser("compare", help="compare evaluations problem by problem")
    compare.add_argument("results", type=Path, nargs="+", help="results folders, Parquet records or JSON of score")
    help_rates = "split by this result's pass rates, e.g. those of the model before training: hard, medium and easy"
    compare.add_argument("--by-pass-rate", type=Path, metavar="RESULTS", help=help_rates)
    help_by = "split by this facet of the benchmark's problems, e.g. level, which --data holds"
    compare.add_argument("--by", metavar="FACET", help=help_by)
    compare.add_argument("--data", type=Path, nargs="+", default=[], help="prepared sets, for --by")
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


def _eval_protocols(_: argparse.Namespace) -> None:
    from vlm_rl.evaluation.benchmarks.registry import describe_protocols

    print(describe_protocols())


def add_score(commands: Commands) -> None:
    score = commands.add_parser("score", help="grade saved responses by a benchmark's own rules, or strictly")
    names = (
        "mathvista, mathvision, mathverse, logicvista, wemath, dynamath, math500, aime24, aime25, amc23, minerva, "
        "olympiadbench, humaneval_plus, mbpp_plus or livecodebench: docs/evaluation.md"
    )
    score.add_argument("--benchmark", required=True, help=names)
    score.add_argument("--annotations", type=Path, nargs="+", help="the authors' file (DynaMath: one per trial)")
    score.add_argument(
        "--responses", type=Path, nargs="+", required=True, help="JSON, JSON Lines, CSV or our Parquet"
    )
    score.add_argument("--mode", choices=["strict", "official"], default="strict", help="how answers are judged")
    score.add_argument(
        "--template", help="where the strict rule looks for the answer (default: the records' own, else plain)"
    )
    add_judge_options(score)
    score.add_argument("--json", type=Path, help="write the scores, and every row behind them, to this file")
    score.set_defaults(command=_score)


def _score(options: argparse.Namespace) -> None:
    from vlm_rl.evaluation.benchmarks.score_command import describe, score_files

    print(describe(score_files(options)))


def add_grade(commands: Commands) -> None:
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
