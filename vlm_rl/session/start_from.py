"""A new run that begins with weights and optimizer of another run's checkpoint: `--start-from RUN/60`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vlm_rl.config import Config, ModelPart, SftConfig
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import family_of
from vlm_rl.learner.saving import ResumePoint
from vlm_rl.model_files.adapters import base_of
from vlm_rl.model_files.model_folder import open_config
from vlm_rl.run.checkpoint import verify
from vlm_rl.run.checkpoint_names import find_checkpoint

_OTHER_STATE = "the optimizer's state is of other parameters"
_OTHER_SCALE = "the adapters would be scaled differently"


def check_start(config: Config | SftConfig) -> ResumePoint:
    """Return the checkpoint of train.start_from, and what its manifest holds.

    Raises UserError if it is damaged, and if its optimizer does not fit the model of this run.
    """
    assert config.train.start_from is not None
    try:
        run, folder = find_checkpoint(Path(config.train.start_from))
    except UserError as error:
        raise UserError(
            f"train.start_from is {config.train.start_from}, which is gone, and {config.out} has no checkpoint of "
            f"its own yet: {error}: put it back, or start a new run from what is left: --start-from RUN/STEP out=NEW"
        ) from None
    manifest = verify(folder)
    where = f"--start-from {folder}"
    adapter = base_of(folder)
    if (adapter is not None) != (config.model.lora is not None):
        if adapter is None:
            advice = f"leave model.lora out, or begin with the weights alone, by model.path={folder}"
            raise UserError(f"{where}: it holds a whole model, and model.lora is set: {advice}")
        advice = f"set it, or begin with the merged weights: vlm-rl export {folder} --merge --out MODEL"
        raise UserError(f"{where}: it holds adapters, and model.lora is not set: {advice}")
    if adapter is None and (difference := _different_shape(folder, Path(config.model.path))):
        raise UserError(f"{where} is a different model than model.path {config.model.path}: {difference}")
    there = run.any_config()
    lora, own_lora = there.model.lora, config.model.lora
    weights = (
        f"the weights alone, by model.path={folder}"
        if adapter is None
        else f"the merged weights: vlm-rl export {folder} --merge --out MODEL"
    )
    for key, own, other, effect in (
        ("train.optimizer", there.train.optimizer, config.train.optimizer, _OTHER_STATE),
        ("model.freeze", sorted(there.model.freeze), sorted(config.model.freeze), _OTHER_STATE),
        ("model.lora.rank", lora and lora.rank, own_lora and own_lora.rank, _OTHER_STATE),
        ("model.lora.rank_by_part", lora and lora.rank_by_part, own_lora and own_lora.rank_by_part, _OTHER_STATE),
        ("model.lora.targets", lora and sorted(lora.targets), own_lora and sorted(own_lora.targets), _OTHER_STATE),
        ("model.lora.alpha", lora and lora.alpha, own_lora and own_lora.alpha, _OTHER_SCALE),
        ("train.lr_by_part", sorted(there.train.lr_by_part), sorted(config.train.lr_by_part), _OTHER_STATE),
    ):
        if own != other:
            raise UserError(
                f"{where}: {key} is {own!r} there and {other!r} here, so that {effect}: give it that value, or begin "
                f"with {weights}"
            )
    parts = family_of(open_config(config.model.path)).parts
    groups, own_groups = _parts_by_rate(there, parts), _parts_by_rate(config, parts)
    if groups != own_groups:
        raise UserError(
            f"{where}: by train.lr and train.lr_by_part the parts {_in_words(groups)} have one rate each there, and "
            f"{_in_words(own_groups)} here, so that the optimizer's state is grouped differently: give parts of one "
            f"rate the same rate, and others different ones, or begin with {weights}"
        )
    return folder, manifest.info


def _parts_by_rate(config: Config | SftConfig, parts: Iterable[str]) -> list[list[str]]:
    """Return the trained parts of the model, those with the same learning rate together: a group of the optimizer."""
    model, train = config.model, config.train
    trained = {*get_args(ModelPart)} - {*model.freeze} if model.lora is None else model.lora.parts
    by_rate: dict[float, list[str]] = {}
    for part in sorted(trained & {*parts}):
        by_rate.setdefault(train.lr_by_part.get(part, train.lr), []).append(part)
    return list(by_rate.values())


def _in_words(groups: Sequence[Sequence[str]]) -> str:
    return " | ".join(" + ".join(group) for group in groups)


def _different_shape(one: Path, other: Path) -> str | None:
    """Say in which parameter two models differ; None if they have the same names and shapes."""
    shapes, others = _shapes(one), _shapes(other)
    for name in [*shapes, *others]:
        if (size := shapes.get(name)) != (its := others.get(name)):
            return f"{name} is {size or 'missing'} in the first and {its or 'missing'} in the second"
    return None


def _shapes(folder: Path) -> dict[str, list[int]]:
    config = open_config(str(folder))
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=False)
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
