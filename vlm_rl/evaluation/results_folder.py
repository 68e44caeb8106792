"""The folder that `vlm-rl eval` writes into: what it must not hold already, and who may write there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vlm_rl.config import Config, save_config
from vlm_rl.distributed import barrier, from_main, rank
from vlm_rl.errors import UserError
from vlm_rl.evaluation.settings import run_of
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.lock import RunLock
from vlm_rl.run.run_files import write_atomically
from vlm_rl.untrusted.plain_files import check_plain_tree

ENDPOINT_CACHE, JUDGE_CACHE = "endpoint_cache", "judge_cache"  # folders of replies, made with the first one


def refuse_existing(out: Path, names: Sequence[str], step: int) -> None:
    """Raise UserError for a folder of other things, and for one that has results of all these sets at this step."""
    if out.exists() and not (out / "config.yaml").exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is neither an empty folder nor a results folder; choose a different --out")
    check_plain_tree(out)
    if all(any(result.step == step for result in RunDirectory(out).evals(name)) for name in names):
        raise UserError(
            f"{out} has a result of {', '.join(names)} at step {step} already: choose a different --out, or remove it"
        )


def refuse_another_model(out: Path, model: Path, run: Config | None) -> None:
    """Raise UserError if `out` has results of a different model: pages show one model, step by step.

    The checkpoints of a run belong together, with the model that the run began with.

    Args:
        out: the results folder.
        model: the model to measure.
        run: the configuration of the run whose checkpoint it is, if it is one.
    """
    ours = {_run_or_model(model), *([Path(run.model.path).resolve()] if run else [])}
    for result in RunDirectory(out).evals():
        theirs = _run_or_model(Path(result.summary.get("model", model)))
        if theirs not in ours and _run_or_model(model) != _begun_with(theirs):
            raise UserError(
                f"{out} has results of {theirs}: those of {model} would be shown as if they were of the same model; "
                "choose a different --out"
            )


def _run_or_model(model: Path) -> Path:
    """Return the run whose checkpoint a model is, else the model itself."""
    run = run_of(model)
    return model.resolve() if run is None else run.path


def _begun_with(run: Path) -> Path | None:
    """Return the model that a run began with; None if the run is not there, or is none."""
    return Path(RunDirectory(run).config().model.path).resolve() if (run / "config.yaml").is_file() else None


@contextmanager
def results_folder(config: Config, *, contaminated: Sequence[str]) -> Iterator[RunDirectory]:
    """Open the folder for the results; a new one is removed again if it gets neither results, answers nor replies.

    Args:
        config: what a new folder records, and one without a finished set; its `out` is the folder.
        contaminated: benchmarks that the model was trained on.

    Raises UserError if another process writes there.
    """
    results = RunDirectory(config.out)
    is_new = not (results.path / "config.yaml").exists()
    barrier()  # no rank writes before all have looked

    def open_folder(lock: RunLock) -> None:
        if is_new:
            results.create(config)
        lock.acquire()
        if not is_new and _was_given_up(results):
            write_atomically(results.path / results.config_file, partial(save_config, config))
        if contaminated:
            results.stamp_contaminated(contaminated)

    with RunLock(results.path) as lock:
        from_main(partial(open_folder, lock))
        try:
            yield results
        except BaseException:
            replies = [name for name in (ENDPOINT_CACHE, JUDGE_CACHE) if (results.path / name).exists()]
            if rank() == 0 and is_new and not (results.evals() or num_answered(results.path) or replies):
                shutil.rmtree(results.path)
            raise


def _was_given_up(results: RunDirectory) -> bool:
    """Tell whether an evaluation of a model alone began here and finished no set: what it recorded holds no more."""
    if results.evals() or results.metrics():
        return False
    config = results.config()
    return not config.eval.every and config.data.eval == config.data.train


def num_answered(out: Path, journals: str = ".*.jsonl") -> int:
    """Return how many problems the journals there hold, each a line after the first: the same command keeps them."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in (out / "eval").glob(journals))
