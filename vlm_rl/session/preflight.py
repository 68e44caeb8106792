"""Check what a run names before anything is imported that takes seconds: folders, libraries, the run directory.

A mistake then answers at once. What needs the model or the rows themselves is checked while the session is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config, SftConfig
from vlm_rl.data.sets import check_is_set
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import is_hub_name, pinned
from vlm_rl.model_files.model_folder import check_model_folder, check_transformers, is_shipped, read_model_config
from vlm_rl.run.checkpoint_names import find_checkpoint, resolve_model
from vlm_rl.run.configurations import check_unchanged
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.trackers.registry import check_trackers
from vlm_rl.samplers.missing_vllm import check_vllm_is_there

_AnyConfig = TypeVar("_AnyConfig", Config, SftConfig)


def preflight(config: Config, *, resume: bool) -> Config:
    """Return the configuration with model.path resolved to a folder.

    Raises UserError with a line for each mistake. Nothing is written.
    """
    run = RunDirectory(config.out)
    sets = [*config.data.train, *(config.data.eval if config.eval.every else [])]
    algorithm = partial(resolve_algorithm, config.algorithm)
    if not resume and is_hub_name(config.model.path):  # nothing is downloaded for a run that cannot start
        _raise_all([algorithm, *_checks(config, sets, run)])
    config = _with_start(_with_model_folder(config, run if resume else None), resume=resume)
    unchanged = partial(check_resumable, run, config) if resume else None
    _raise_all([algorithm, *_checks(config, sets, run, unchanged)])
    return config


def preflight_sft(config: SftConfig, *, resume: bool) -> SftConfig:
    """Do what `preflight` does, for supervised fine-tuning."""
    run = RunDirectory(config.out, config_file=SFT_CONFIG)
    sets = [*config.data.train, *(config.data.eval if config.eval.every else [])]
    if not resume and is_hub_name(config.model.path):
        _raise_all(_checks(config, sets, run))
    config = _with_start(_with_model_folder(config, run if resume else None), resume=resume)
    unchanged = partial(check_resumable, run, config) if resume else None
    _raise_all(_checks(config, sets, run, unchanged))
    return config


def preflight_plan(config: Config) -> Config:
    """Do what `preflight` does, for a plan: neither weights nor data have to be there, and no weights are fetched."""
    config = with_planned_model(config)
    algorithm = partial(resolve_algorithm, config.algorithm)
    _raise_all([algorithm, partial(_check_groups, config), partial(read_model_config, config.model.path)])
    return config


def preflight_serve(config: Config) -> Config:
    """Do what `preflight` does, for a server: the weights are needed, the data are not."""
    config = _with_model_folder(config, None)
    _raise_all([partial(resolve_algorithm, config.algorithm), partial(check_model_folder, config.model.path)])
    return config


def preflight_sets(sets: Iterable[Path]) -> None:
    """Raise UserError with a line for each folder that is not a prepared set."""
    _raise_all(partial(check_is_set, name) for name in sets)


def preflight_eval(model: Path, sets: Iterable[Path], *, sampler: str, tensor_parallel: int) -> Path:
    """Return the folder of the model to evaluate. Raises UserError with a line for each mistake.

    Args:
        model: a folder, a run or its checkpoint, or a name of the hub.
        sets: folders of prepared sets.
        sampler: the engine.
        tensor_parallel: how many neighbouring ranks form one engine.
    """
    setting = "--tensor-parallel"
    if tensor_parallel < 1:
        raise UserError(f"{setting} is {tensor_parallel}; it must be at least 1")
    if tensor_parallel > 1 and sampler != "vllm":
        raise UserError(
            f"{setting} is {tensor_parallel}, and --sampler is {sampler}: only vLLM divides a model among ranks; "
            "add --sampler vllm"
        )
    folder = resolve_model(model)
    _raise_all(
        [
            check_transformers,
            partial(check_model_folder, folder),
            *(partial(check_is_set, name) for name in sets),
            partial(_check_ranks_form_engines, tensor_parallel, setting),
        ]
    )
    return folder


def _raise_all(checks: Iterable[Callable[[], Any]]) -> None:
    faults = []
    for check in checks:
        try:
            check()
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(dict.fromkeys(faults)))


def with_planned_model(config: _AnyConfig) -> _AnyConfig:
    """Find the model for a plan: of the hub without its weights, or not at all where we ship its configuration."""
    path = config.model.path
    return config if is_hub_name(path) and is_shipped(path) else _with_model_folder(config, None, weights=False)


def _with_model_folder(config: _AnyConfig, begun: RunDirectory | None, *, weights: bool = True) -> _AnyConfig:
    """Put the model's folder in the place of RUN, RUN/60 or a name of the hub; `begun` is the run of a resume."""
    path = config.model.path
    if begun is not None and is_hub_name(path) and (begun.path / begun.config_file).is_file():
        path = pinned(path, begun.any_config().model.path)
    if (folder := resolve_model(path, weights=weights)) == Path(config.model.path):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _with_start(config: _AnyConfig, *, resume: bool) -> _AnyConfig:
    """Put the folder of a checkpoint in the place of train.start_from; a resume may no longer need it.

    Raises UserError if there is no such checkpoint, and if it is of the run itself.
    """
    if (start := config.train.start_from) is None:
        return config
    try:
        begun, folder = find_checkpoint(Path(start))
    except UserError as error:
        if resume:
            return config
        raise UserError(f"--start-from {start}: {error}") from None
    if begun.path.resolve() == Path(config.out).resolve():
        raise UserError(
            f"--start-from {start} is a checkpoint of {config.out} itself: name the new run's folder, out=NEW, or "
            "resume the run with --resume"
        )
    train = config.train.model_copy(update={"start_from": str(folder)})
    return config.model_copy(update={"train": train})


def _checks(
    config: Config | SftConfig, sets: Iterable[str], run: RunDirectory, unchanged: Callable[[], Any] | None = None
) -> Iterator[Callable[[], Any]]:
    """Yield the checks of a run; `unchanged` is that of a resume, None for a new run."""
    yield check_transformers
    if unchanged is None and not is_hub_name(config.model.path):  # a resume may have a checkpoint in its place
        yield partial(check_model_folder, config.model.path)
    for name in sets:
        yield partial(check_is_set, name)
    yield partial(check_trackers, config.log.trackers)
    if isinstance(config, Config):
        yield partial(_check_groups, config)
    if isinstance(config, Config) and config.rollout.sampler == "vllm":
        yield check_vllm_is_there
        yield partial(_check_ranks_form_engines, config.rollout.tensor_parallel)
    yield partial(_check_ranks_share_rows, config.train.sequence_parallel)
    yield unchanged or run.check_new


def _check_groups(config: Config) -> None:
    """Raise UserError if no step could teach anything."""
    if config.rollout.responses_per_prompt == 1:
        raise UserError(
            "rollout.responses_per_prompt is 1: a response is compared with the others to its prompt, so every "
            "advantage would be 0 and nothing learned; set 2 or more"
        )
    if config.reward.pays_nothing:
        raise UserError(
            "reward: the weight of every part is 0, so that all responses get the same reward and every advantage "
            "would be 0; give one a weight, such as reward.accuracy=1"
        )


def _check_ranks_form_engines(size: int, setting: str = "rollout.tensor_parallel") -> None:
    """Raise UserError if torchrun's ranks on this machine are not a multiple of the size of an engine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks % size:
        raise UserError(
            f"{setting} is {size}, and this machine has {ranks} rank{'s' * (ranks > 1)}: neighbouring "
            "ranks of one machine form an engine, so start a multiple with torchrun --nproc-per-node"
        )


def _check_ranks_share_rows(size: int) -> None:
    """Raise UserError if torchrun's ranks do not form groups of train.sequence_parallel."""
    if size > 1:
        from vlm_rl.learner.sequence_parallel import check_ranks  # takes seconds, as all of the learner

        check_ranks(size, int(os.environ.get("WORLD_SIZE", "1")))


def check_resumable(run: RunDirectory, config: Config | SftConfig) -> None:
    """Raise UserError if there is no run, or one whose configuration differs in a key that a resume keeps."""
    check_unchanged(run.path, run.open().any_config(), config)
