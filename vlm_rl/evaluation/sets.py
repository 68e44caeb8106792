"""The sets of one `vlm-rl eval`: opened and checked, answered one after the other, and kept where it is stopped."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_rl.config import Config, check_benchmark_name
from vlm_rl.data.sets import check_runnable, load_set, refuse_contaminated
from vlm_rl.data.sets import read_manifest as read_set_manifest
from vlm_rl.distributed import barrier, rank, share
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel, open_judge
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.results_folder import JUDGE_CACHE, num_answered, refuse_existing
from vlm_rl.evaluation.resume import AnswerSettings, changed_settings, evaluate_into, journal_path
from vlm_rl.evaluation.scores import score_line
from vlm_rl.evaluation.settings import SetSettings, choose_settings, split_note
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import make_console, progress
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


def open_sets(options: argparse.Namespace, origin: Origin) -> list[EvalSet]:
    """Open the sets to answer. Raises UserError for sets that cannot be answered, or not by this model."""
    sets = [open_set(path, options, origin) for path in options.data]
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
    return sets


def open_set(path: Path, options: argparse.Namespace, origin: Origin) -> EvalSet:
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


def open_judge_of(options: argparse.Namespace, sets: Sequence[EvalSet]) -> JudgeModel | None:
    """Return the judge of --judge, if there is one."""
    known = [benchmark for item in sets if (benchmark := benchmark_of(item.problems)) is not None]
    return open_judge(
        options.judge,
        name=options.judge_model,
        key_env=options.judge_key_env,
        cache=options.judge_cache or options.out / JUDGE_CACHE,
        mode=sets[0].how.mode,
        benchmarks=known,
    )


def unanswered(
    results: RunDirectory, sets: Sequence[EvalSet], asked: Sequence[AnswerSettings], origin: Origin
) -> list[tuple[EvalSet, AnswerSettings]]:
    """Return the sets without a result; those that a stopped run of the same command finished are kept and printed.

    Raises UserError if there is a result of different settings.
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


def answer_set(
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


@contextmanager
def stopping(out: Path, num_problems: Mapping[str, int], *, step: int) -> Iterator[None]:
    """End on SIGTERM with errors.EXIT_STOPPED, with everything closed, and say on Ctrl-C too what is kept.

    Args:
        out: the results folder, with the finished sets, and journals of the finished problems of others.
        num_problems: of each set.
        step: of the results.
    """

    def on_sigterm(*_: object) -> None:
        print("stopped by SIGTERM; the same command continues where it was", flush=True)
        raise StoppedError

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = (_kept_text(out, num_problems, step),)  # it is said: cli.main prints no other line
        if rank() == 0:
            print(stop.args[0], flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _kept_text(out: Path, num_problems: Mapping[str, int], step: int) -> str:
    finished = {result.benchmark for result in RunDirectory(out).evals() if result.step == step}
    kept = sum(
        number if name in finished else num_answered(out, f".{name}-{step:06d}-*.jsonl")
        for name, number in num_problems.items()
    )
    total = sum(num_problems.values())
    if not kept:
        return f"stopped by Ctrl-C; none of {total:,} problems was answered yet: the same command starts over"
    return (
        f"stopped by Ctrl-C; {kept:,} answered of {total:,} problems are kept in {out / 'eval'}: the same "
        "command continues with the others"
    )
