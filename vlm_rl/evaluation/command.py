"""`vlm-rl eval`: measure one model on prepared sets and write the records where report and demo read them.

    vlm-rl eval --model runs/x/checkpoints/step-000060 --data data/mathvision data/dynamath --out runs/x-eval
    vlm-rl report runs/x-eval

The results folder has the layout of a run directory. It may hold several checkpoints of a run, each under its step,
and controls (--images blank) under names of their own. After a stop or a kill, the same command resumes where the
evaluation was and keeps finished sets (vlm_rl.evaluation.journal). Sets that the policy was trained on are refused.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlm_rl.config import (
    LARGEST_ENGINE_SHARE,
    Config,
    EnvironmentConfig,
    RolloutConfig,
    check_benchmark_name,
    load_config,
    parse_config,
)
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size, check_runnable, load_set, refuse_contaminated
from vlm_rl.data.sets import read_manifest as read_set_manifest
from vlm_rl.devices import model_dtype
from vlm_rl.distributed import all_gather, barrier, from_main, init_ranks, rank, share
from vlm_rl.environments.host import open_host
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel, open_judge
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.benchmarks.score_command import judge_lines
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.results_folder import num_answered, refuse_another_model, refuse_existing, results_folder
from vlm_rl.evaluation.resume import (
    AnswerSettings,
    answer_settings,
    changed_settings,
    digest,
    evaluate_into,
    journal_path,
)
from vlm_rl.evaluation.scores import score_line
from vlm_rl.evaluation.settings import (
    SetSettings,
    check_options,
    choose_environment,
    choose_settings,
    run_of,
    split_note,
)
from vlm_rl.grading.grader import Grader
from vlm_rl.model_files.hub_models import hub_name
from vlm_rl.model_files.model_folder import check_context, check_divides, check_model_folder, context_of
from vlm_rl.model_files.weights import check_weights
from vlm_rl.rewards.accuracy import AccuracyPart, check_boxes
from vlm_rl.rewards.reward import open_accuracy
from vlm_rl.run.checkpoint import verify_model
from vlm_rl.run.configurations import check_same
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.manifest import MANIFEST, read_manifest
from vlm_rl.run.terminal import make_console, progress
from vlm_rl.samplers.base import Sampler
from vlm_rl.samplers.factory import check_loaded, make_sampler
from vlm_rl.samplers.tags import settle_tags
from vlm_rl.types import Problem


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A prepared set to answer."""

    path: Path
    name: str  # of its folder below eval/
    problems: Sequence[Problem]
    min_pixels: int  # its images were brought between these
    max_pixels: int
    how: SetSettings
    note: str  # on its split


@dataclass(frozen=True, slots=True)
class Origin:
    """What the model's folder says about its training."""

    step: int  # rollout steps of training; 0 for a model that is not a checkpoint of ours
    contaminated: Sequence[str]  # benchmarks that it was trained on
    run: Config | None  # of the training run, where it is a checkpoint of one


def evaluate_sets(options: argparse.Namespace) -> RunDirectory:
    """Answer every set and write eval/<set>/step-<step>.parquet and .json below `options.out`.

    Raises:
        UserError: before anything is written, for wrong options, model, sets or results folder.
        StoppedError: after SIGTERM; the same command continues.
    """
    check_options(options)
    check_model_folder(options.model)
    origin = read_origin(options.model)
    device = init_ranks()
    _check_alike(options)
    sets = _open_sets(options, origin)
    judge_model = _judge_model(options, sets)
    environment, shown_pixels = choose_environment(options.environment, origin.run)
    builder = PromptBuilder(
        options.model,
        template=next((item.how.template for item in sets if item.how.template.tags), sets[0].how.template),
        min_pixels=min(eval_set.min_pixels for eval_set in sets),
        max_pixels=min(shown_pixels, max(eval_set.max_pixels for eval_set in sets)),
        tags="auto" if origin.run is None else origin.run.data.tags,
    )
    if origin.run is not None:
        builder.spell_tags_as(options.model)
    if (host := open_host(environment, builder, Grader())) is not None:
        host.close()  # it can be opened; its words are in the prompts from here on
    for eval_set in sets:
        builder.with_template(eval_set.how.template).check_template()
    check_patch_size([eval_set.path for eval_set in sets], builder.patch_size)
    builder.allow_videos(problem for eval_set in sets for problem in eval_set.problems)
    engine = RolloutConfig(sampler="vllm", tensor_parallel=options.tensor_parallel)
    check_divides(builder.config, engine, setting="--tensor-parallel")
    observed = environment.max_observed_tokens if environment.name else 0
    sets = _fitted(sets, builder, options.max_prompt_tokens + observed)
    context = check_context(
        builder.config,
        prompt_tokens=options.max_prompt_tokens,
        response_tokens=max(eval_set.how.params.max_tokens for eval_set in sets) + observed,
        settings="--max-prompt-tokens + --max-tokens",
    )
    from_main(lambda: verify_model(options.model))
    from_main(lambda: check_weights(options.model))
    folder = results_folder(_configuration(options), contaminated=origin.contaminated)
    with (
        folder as results,
        Grader() as grader,
        ExitStack() as opened,
        _stopping(options.out, sum(len(item.problems) for item in sets)),
    ):
        judgings = {
            item.name: Judging(
                grader, item.how.mode, judge_model, _open_accuracy(item, options, origin, builder, opened)
            )
            for item in sets
        }
        sampler = make_sampler(
            options.sampler,
            model_path=str(options.model),
            builder=builder,
            max_model_len=context,
            batch_size=options.batch_size,
            dtype=model_dtype(device),
            vllm_options={"gpu_memory_utilization": LARGEST_ENGINE_SHARE} if device.type == "cuda" else None,
            tensor_parallel=options.tensor_parallel,
            seed=options.seed,
        )
        with closing(sampler):
            check_loaded(sampler, str(options.model))
            settle_tags(builder, sampler, context=context, seed=options.seed)
            if builder.tags_note:
                make_console().print(builder.tags_note, soft_wrap=True)
            asked = {
                item.name: _with_host(_asking(item, options, origin, builder, sampler), environment, grader, opened)
                for item in sets
            }
            settings_of = [_settings(item, options, asked[item.name], judgings[item.name]) for item in sets]
            for eval_set, settings in _unanswered(results, sets, settings_of, origin):
                make_console().print(eval_set.how.line(eval_set.name))
                if eval_set.note:
                    make_console().print(f"{eval_set.name}: {eval_set.note}")
                if part := settings["accuracy_part"]:
                    make_console().print(f"{eval_set.name}: reward.{part['name']} decides what is right")
                how = asked[eval_set.name], judgings[eval_set.name]
                summary = _answer(eval_set, *how, options, results, settings)
                make_console().print(score_line(eval_set.name, summary))
                for line in judge_lines(summary):
                    make_console().print(line)
    barrier()
    make_console().print(f"records: {results.path / 'eval'}   page: vlm-rl report {results.path}")
    return results


def _check_alike(options: argparse.Namespace) -> None:
    """Raise UserError where a rank, such as one on a second node, is asked for something else than rank 0.

    The newest revision of a model of the hub may be a different one there.
    """
    words = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(options).items() if name != "command"}
    words["--model"] = hub_name(options.model) or words["--model"]
    check_same(all_gather(words), what="command")


def _asking(
    eval_set: EvalSet, options: argparse.Namespace, origin: Origin, builder: PromptBuilder, sampler: Sampler
) -> Asking:
    how = eval_set.how
    return Asking(
        builder.with_template(how.template),
        sampler,
        how.params,
        seed=options.seed,
        step=origin.step,
        images=options.images,
        prompt=how.prompt,
    )


def _with_host(asking: Asking, environment: EnvironmentConfig, grader: Grader, opened: ExitStack) -> Asking:
    """Return how a set is asked, with what answers between turns, if anything does."""
    host = open_host(environment, asking.builder, grader)
    if host is None:
        return asking
    opened.callback(host.close)
    return replace(asking, host=host)


def _answer(
    eval_set: EvalSet,
    asking: Asking,
    judging: Judging,
    options: argparse.Namespace,
    results: RunDirectory,
    settings: AnswerSettings,
) -> dict[str, Any]:
    """Answer one set with a progress bar, write its result and return its summary."""
    with progress(f"evaluating {eval_set.name}", total=len(share(eval_set.problems))) as advance:
        return evaluate_into(
            results,
            eval_set.name,
            eval_set.problems,
            asking,
            judging,
            settings=settings,
            about={"protocol": eval_set.how.sources, "split_note": eval_set.note},
            batch_size=max(1, options.batch_size // asking.params.responses),
            advance=advance,
        )


def _open_accuracy(
    eval_set: EvalSet, options: argparse.Namespace, origin: Origin, builder: PromptBuilder, opened: ExitStack
) -> AccuracyPart | None:
    """Open the part that decides what is right on one set: of --reward, or of the run whose checkpoint is measured.

    Raises UserError where there is none and the set's answers are boxes, or where it cannot be used.
    """
    remedy = "name a run's configuration whose reward has a part in the role accuracy, such as iou: --reward FILE"
    config = load_config(options.reward).reward if options.reward else origin.run.reward if origin.run else None
    if eval_set.how.mode == "official" or benchmark_of(eval_set.problems) is not None:
        return None
    try:
        part = config and open_accuracy(
            config,
            template=eval_set.how.template,
            model_type=builder.config.model_type,
            judge_cache=options.judge_cache or options.out / "judge_cache",
        )
    except UserError as error:
        raise UserError(f"{error}; for another part of the reward, or none: --reward FILE") from None
    if part is not None:
        opened.callback(part.close)
    check_boxes(eval_set.problems, part, remedy=remedy)
    return part


def _settings(eval_set: EvalSet, options: argparse.Namespace, asking: Asking, judging: Judging) -> AnswerSettings:
    """Return everything that decides the answers, for the summary and for a resume."""
    how = eval_set.how
    return {
        "model": str(options.model),
        "model_files": digest(json.dumps(_file_stamps(options.model)).encode()),
        "set": str(eval_set.path),
        "images": options.images,
        "mode": how.mode,
        "template_words": asdict(how.prompt) if how.prompt else None,
        "max_prompt_tokens": options.max_prompt_tokens,
        "tensor_parallel": options.tensor_parallel if options.tensor_parallel > 1 else None,  # as before
        "judge_model": judging.judge_model.name if judging.judge_model else None,
    } | answer_settings(eval_set.problems, asking, judging)


def _file_stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the model's files: enough to notice a different model of the same name."""
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def read_origin(model: Path) -> Origin:
    """Read what a checkpoint's manifest and its run say about its training. Raises UserError for a damaged one."""
    stamped = RunDirectory(model.resolve().parent.parent).contaminated()
    run = run_of(model)
    config = run.config() if run is not None else None
    if not (model / MANIFEST).is_file():
        return Origin(step=0, contaminated=stamped, run=config)
    manifest = read_manifest(model)
    contaminated = sorted({*stamped, *manifest.info.get("contaminated", ())})
    return Origin(step=manifest.step, contaminated=contaminated, run=config)


def _judge_model(options: argparse.Namespace, sets: Sequence[EvalSet]) -> JudgeModel | None:
    """Return the judge of --judge, if there is one."""
    known = [benchmark for item in sets if (benchmark := benchmark_of(item.problems)) is not None]
    return open_judge(
        options.judge,
        name=options.judge_model,
        key_env=options.judge_key_env,
        cache=options.judge_cache or options.out / "judge_cache",
        mode=sets[0].how.mode,
        benchmarks=known,
    )


def _fitted(sets: Sequence[EvalSet], builder: PromptBuilder, prompt_tokens: int) -> list[EvalSet]:
    """Return the sets; where a default of the longest response is too long for the model, with what fits."""
    room = context_of(builder.config) - prompt_tokens
    return [replace(item, how=item.how.fitted(room)) for item in sets]


def _open_set(path: Path, options: argparse.Namespace, origin: Origin) -> EvalSet:
    problems = load_set(path)
    if not problems:
        raise UserError(f"{path}: the set is empty; prepare it again")
    check_runnable(path, problems)
    recorded = read_set_manifest(path)
    name = check_benchmark_name(path.resolve().name)
    benchmark = benchmark_of(problems)
    note = ""
    if benchmark is not None:
        note = split_note(benchmark.protocol, recorded.get("options", {}).get("split") or benchmark.files.splits[0])
    return EvalSet(
        path=path,
        name=name if options.images == "real" else f"{name}-{options.images}",
        problems=problems,
        min_pixels=recorded.get("min_pixels", 3136),
        max_pixels=recorded.get("max_pixels", 1_003_520),
        how=choose_settings(options, benchmark, origin.run),
        note=note,
    )


def _open_sets(options: argparse.Namespace, origin: Origin) -> list[EvalSet]:
    """Open the sets to answer. Raises UserError for sets that cannot be answered, or not by this model."""
    sets = [_open_set(path, options, origin) for path in options.data]
    names = [eval_set.name for eval_set in sets]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"--data names two sets called {repeated[0]!r}: their results would overwrite each other; rename one"
        )
    for eval_set in sets:
        refuse_contaminated(eval_set.path, eval_set.problems, origin.contaminated)
        if eval_set.how.mode == "official" and benchmark_of(eval_set.problems) is None:
            raise UserError(
                f"{eval_set.path}: --mode official needs problems of one known benchmark; use --mode strict"
            )
    refuse_existing(options.out, names, origin.step)
    refuse_another_model(options.out, options.model, origin.run)
    return sets


def _unanswered(
    results: RunDirectory, sets: Sequence[EvalSet], asked: Sequence[AnswerSettings], origin: Origin
) -> list[tuple[EvalSet, AnswerSettings]]:
    """Return the sets without a result; those that a stopped run of the same command finished are kept and printed.

    Raises UserError where there is a result of different settings.
    """
    left = []
    for eval_set, settings in zip(sets, asked, strict=True):
        result = next((result for result in results.evals(eval_set.name) if result.step == origin.step), None)
        if result is None:
            left.append((eval_set, settings))
            continue
        if changed := changed_settings(result.summary, settings):
            raise UserError(
                f"{results.path} has a result of {eval_set.name} at step {origin.step} with a different "
                f"{', '.join(changed)}: choose a different --out, or remove that result"
            )
        make_console().print(f"kept: {score_line(eval_set.name, result.summary)}")
        journal_path(results, eval_set.name, origin.step).unlink(missing_ok=True)
    barrier()  # no rank writes before all have looked
    return left


@contextmanager
def _stopping(out: Path, num_problems: int) -> Iterator[None]:
    """End on SIGTERM with errors.EXIT_STOPPED, with everything closed, and say on Ctrl-C too what is kept.

    Args:
        out: the results folder, whose journals hold the finished problems.
        num_problems: of all sets.
    """

    def stop(*_: object) -> None:
        print("stopped by SIGTERM; the same command continues where it was", flush=True)
        raise StoppedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if rank() == 0:
            print(_kept_text(out, num_problems), flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _kept_text(out: Path, num_problems: int) -> str:
    kept = num_answered(out)
    if not kept:
        return f"stopped by Ctrl-C; none of {num_problems:,} problems was answered yet: the same command begins anew"
    return (
        f"stopped by Ctrl-C; {kept:,} answered of {num_problems:,} problems are kept in {out / 'eval'}: the same "
        "command continues with the others"
    )


def _configuration(options: argparse.Namespace) -> Config:
    """Return the config.yaml of a results folder: that of the run whose checkpoint the model is, if any."""
    if (run := run_of(options.model)) is not None:
        return run.config().model_copy(update={"out": str(options.out)})
    sets = [str(path) for path in options.data]
    tree = {"model": {"path": str(options.model)}, "data": {"train": sets, "eval": sets}, "eval": {"every": 0}}
    return parse_config({"out": str(options.out), **tree}, where="eval")
