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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path

from vlm_rl.config import (
    Config,
    EnvironmentConfig,
    RolloutConfig,
    load_config,
    parse_config,
)
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size
from vlm_rl.devices import model_dtype
from vlm_rl.distributed import all_gather, barrier, from_main, init_ranks
from vlm_rl.environments.host import EpisodeHost, open_host
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.benchmarks.score_command import judge_lines
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.results_folder import JUDGE_CACHE, refuse_another_model, results_folder
from vlm_rl.evaluation.resume import (
    AnswerSettings,
    answer_settings,
    digest,
)
from vlm_rl.evaluation.scores import score_line
from vlm_rl.evaluation.sets import EvalSet, Origin, answer_set, open_judge_of, open_sets, stopping, unanswered
from vlm_rl.evaluation.settings import (
    check_options,
    choose_environment,
    run_of,
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
from vlm_rl.run.terminal import make_console
from vlm_rl.samplers.base import Sampler
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import check_loaded, make_sampler
from vlm_rl.samplers.tags import settle_tags
from vlm_rl.samplers.vllm.options import whole_card


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
    sets = open_sets(options, origin)
    refuse_another_model(options.out, options.model, origin.run)
    judge_model = open_judge_of(options, sets)
    environment, shown_pixels = choose_environment(options.environment, origin.run)
    builder = _open_builder(options, sets, origin, environment, shown_pixels)
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
        stopping(options.out, {item.name: len(item.problems) for item in sets}, step=origin.step),
    ):
        judgings = {
            item.name: Judging(
                grader, item.how.mode, judge_model, _open_accuracy(item, options, origin, builder, opened)
            )
            for item in sets
        }
        sampler = make_sampler(
            options.sampler,
            EngineSettings(
                model_path=str(options.model),
                builder=builder,
                max_model_len=context,
                batch_size=options.batch_size,
                dtype=model_dtype(device),
                vllm_options=whole_card(on_cpu=device.type == "cpu"),
                tensor_parallel=options.tensor_parallel,
                seed=options.seed,
            ),
        )
        with closing(sampler):
            check_loaded(sampler, str(options.model))
            settle_tags(builder, sampler, context=context, seed=options.seed)
            if builder.tags_note:
                make_console().print(builder.tags_note, soft_wrap=True)
            asked: dict[str, Asking] = {}
            for item in sets:
                own = builder.with_template(item.how.template)
                # Those of the set alone, whose result does not depend on the other sets.
                own.min_pixels, own.max_pixels = item.min_pixels, min(builder.max_pixels, item.max_pixels)
                host = _open_host(environment, own, grader, opened)
                asked[item.name] = _asking(item, options, origin, own, sampler, host)
            settings_of = [_settings(item, options, asked[item.name], judgings[item.name]) for item in sets]
            for eval_set, settings in unanswered(results, sets, settings_of, origin):
                _answer(eval_set, asked[eval_set.name], judgings[eval_set.name], options, results, settings)
    barrier()
    make_console().print(f"records: {results.path / 'eval'}   page: vlm-rl report {results.path}")
    return results


def _check_alike(options: argparse.Namespace) -> None:
    """Raise UserError if a rank, such as one on a second node, is asked for something else than rank 0.

    The newest revision of a model of the hub may be a different one there.
    """
    words = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(options).items() if name != "command"}
    words["--model"] = hub_name(options.model) or words["--model"]
    check_same(all_gather(words), what="command")


def _open_builder(
    options: argparse.Namespace,
    sets: Sequence[EvalSet],
    origin: Origin,
    environment: EnvironmentConfig,
    shown_pixels: int,
) -> PromptBuilder:
    """Open the prompt builder of the model, for all sets. Raises UserError if the prompts of one cannot be built."""
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
    return builder


def _answer(
    eval_set: EvalSet,
    asking: Asking,
    judging: Judging,
    options: argparse.Namespace,
    results: RunDirectory,
    settings: AnswerSettings,
) -> None:
    """Answer one set, and print how and with what score."""
    console = make_console()
    console.print(eval_set.how.line(eval_set.name))
    if eval_set.note:
        console.print(f"{eval_set.name}: {eval_set.note}")
    if part := settings["accuracy_part"]:
        console.print(f"{eval_set.name}: reward.{part['name']} decides what is right")
    summary = answer_set(eval_set, asking, judging, options, results, settings)
    for line in (score_line(eval_set.name, summary), *judge_lines(summary)):
        console.print(line)


def _asking(
    eval_set: EvalSet,
    options: argparse.Namespace,
    origin: Origin,
    builder: PromptBuilder,
    sampler: Sampler,
    host: EpisodeHost | None,
) -> Asking:
    how = eval_set.how
    return Asking(
        builder,
        sampler,
        how.params,
        seed=options.seed,
        step=origin.step,
        images=options.images,
        prompt=how.prompt,
        host=host,
    )


def _open_host(
    environment: EnvironmentConfig, builder: PromptBuilder, grader: Grader, opened: ExitStack
) -> EpisodeHost | None:
    """Open what answers between the turns of a set, if anything does."""
    host = open_host(environment, builder, grader)
    if host is not None:
        opened.callback(host.close)
    return host


def _open_accuracy(
    eval_set: EvalSet, options: argparse.Namespace, origin: Origin, builder: PromptBuilder, opened: ExitStack
) -> AccuracyPart | None:
    """Open the part that decides what is right on one set: of --reward, or of the run whose checkpoint is measured.

    Raises UserError if there is none and the set's answers are boxes, or if it cannot be used.
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
            judge_cache=options.judge_cache or options.out / JUDGE_CACHE,
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


def _fitted(sets: Sequence[EvalSet], builder: PromptBuilder, prompt_tokens: int) -> list[EvalSet]:
    """Return the sets; where a default of the longest response is too long for the model, with what fits."""
    room = context_of(builder.config) - prompt_tokens
    return [replace(item, how=item.how.fitted(room)) for item in sets]


def _configuration(options: argparse.Namespace) -> Config:
    """Return the config.yaml of a results folder: that of the run whose checkpoint the model is, if any."""
    if (run := run_of(options.model)) is not None:
        return run.config().model_copy(update={"out": str(options.out)})
    sets = [str(path) for path in options.data]
    tree = {"model": {"path": str(options.model)}, "data": {"train": sets, "eval": sets}, "eval": {"every": 0}}
    return parse_config({"out": str(options.out), **tree}, where="eval")
