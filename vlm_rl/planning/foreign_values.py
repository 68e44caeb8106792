"""The settings of other trainers as values of ours, row by row of the table of names, and what they do by default.

    conversion = convert(read_foreign(path), rows=12_000, processes=8)
    conversion.values        # {"rollout.prompts_per_step": (512, "data.rollout_batch_size"), ...}
    conversion.left          # ["worker.ref.offload.offload_params: false", ...]

What another trainer does by default and we do not (its clip, its betas) is a value too, with a comment that says so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vlm_rl.config.foreign_names import settings
from vlm_rl.planning.foreign_files import ForeignFile
from vlm_rl.planning.foreign_rows import CONVERTERS, Conversion, ForeignRow, plain, shown

# What each trainer does where nothing is said, by the names of the table; read in its configuration classes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "EasyR1": {
        "adv_estimator": "grpo",
        "loss_avg_mode": "token",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "clip_ratio_dual": 3.0,
        "kl_coef": 1e-3,
        "enable_gradient_checkpointing": True,
        "lora.alpha": 64,
        "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.01,
    },
    "verl": {
        "loss_agg_mode": "token-mean",
        "clip_ratio": 0.2,
        "clip_ratio_c": 3.0,
        "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.01,
        "use_kl_loss": False,
        "kl_loss_coef": 1e-3,
        "lora_alpha": 16,
    },
    "TRL": {
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "num_generations": 8,
        "max_completion_length": 256,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "beta": 0.0,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "linear",
    },
    "OpenRLHF": {
        "eps_clip": 0.2,
        "adam_betas": [0.9, 0.95],
        "generate_max_len": 1024,
        "train_batch_size": 128,
        "rollout_batch_size": 1024,
        "init_kl_coef": 0.01,
        "lora_alpha": 16,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.03,
    },
    "ms-swift": {
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "num_generations": 8,
        "max_completion_length": 512,
        "temperature": 0.9,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-5,  # ten times that of adapters
        "lr_scheduler_type": "cosine",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "beta": 0.04,
        "train_type": "lora",
        "gradient_checkpointing": True,
        "freeze_vit": True,
        "freeze_aligner": True,
    },
}


def convert(file: ForeignFile, *, rows: int | None, processes: int | None) -> Conversion:
    """Convert the settings of another trainer's file to our keys.

    Args:
        file: of another trainer.
        rows: of the training data; None if it is not known, so that passes over it are no number of steps.
        processes: of the run; None for what the file says, or 1.
    """
    conversion = Conversion(file.trainer)
    others = {key: match[1] for key in file.settings if (match := _OF_ANOTHER_MODEL.search(key))}
    conversion.left += [f"{key}: {shown(file.settings[key])}  ({_OTHERS[whose]})" for key, whose in others.items()]
    file = replace(file, settings={key: value for key, value in file.settings.items() if key not in others})
    found, unknown = _found(file)
    count = processes or _processes(file)
    for setting in sorted(settings(), key=lambda setting: _ORDER.get(setting.ours, 0)):
        if given := found.get(id(setting)):
            values = {name: value for name, (_, value) in given.items()}
            keys = {name: key for name, (key, _) in given.items()}
            row = ForeignRow(setting, values, keys, conversion, rows, count)
            if not setting.ours:
                for name, value in values.items():
                    if name in _COLUMNS and isinstance(value, str):
                        conversion.columns[_COLUMNS[name]] = value
                    else:
                        row.leave(name, setting.note)
            else:
                CONVERTERS.get(setting.ours, plain)(row)
                quiet = [name for name in values if name not in row.told and "default" not in keys[name]]
                conversion.same += [f"{keys[name]}: {shown(values[name])}" for name in quiet]
    conversion.left += [f"{key}: {shown(value)}" for key, value in unknown.items()]
    conversion.left += [f"{key}: {shown}, which is not resolved" for key, shown in file.unread.items()]
    return conversion


def _found(file: ForeignFile) -> tuple[dict[int, dict[str, tuple[str, Any]]], dict[str, Any]]:
    """Return, by the row of the table, its names with key and value; and the settings that no row names."""
    found: dict[int, dict[str, tuple[str, Any]]] = {}
    unknown: dict[str, Any] = {}
    for key, value in file.settings.items():
        named = [
            (len(name), name, setting)
            for setting in settings()
            for name in setting.names[file.trainer]
            if f".{key}".endswith(f".{name}")
        ]
        longest = max((length for length, *_ in named), default=0)
        for length, name, setting in named:
            if length == longest and not (name in found.get(id(setting), {}) and ".ref." in f".{key}"):
                found.setdefault(id(setting), {})[name] = (key, value)
        if not named:
            unknown[key] = value
    for setting in settings():
        mine = found.get(id(setting), {})
        if any(f".{key}".endswith(f".{name}") for key in file.unread for name in setting.names[file.trainer]):
            continue  # it is said, so that a default would be another value
        for name in setting.names[file.trainer]:
            default = _DEFAULTS[file.trainer].get(name)
            others = [f".{other}" for other in _INSTEAD.get(name, ())]
            alone = not any(f".{key}".endswith(other) for key in file.settings for other in others)
            if default is not None and name not in mine and alone:
                found.setdefault(id(setting), {})[name] = (f"{name}, its default", default)
    return found, unknown


_OTHERS = {
    "critic": "a critic's, and there is none here",
    "reward_model": "a reward model's: reward.reward_model, docs/rewards.md",
}
_OF_ANOTHER_MODEL = re.compile(rf"(?:^|\.)({'|'.join(_OTHERS)})\.(?!.*overlong_buffer)")  # verl has the penalty there

_INSTEAD = {  # a default -> what stands in its place
    "clip_ratio_low": ("clip_ratio",),  # of older files, for both
    "clip_ratio_high": ("clip_ratio",),
    "scale_rewards": ("advantage_estimator",),  # which has its own
    "eps_clip": ("eps_clip_low_high",),
    "adam_betas": ("adam.betas",),
    "generate_max_len": ("max_new_tokens",),
    "train_batch_size": ("train.batch_size",),
    "rollout_batch_size": ("rollout.batch_size",),
    "init_kl_coef": ("kl.init_coef",),
    "lr_scheduler": ("actor.lr_scheduler",),
    "lr_warmup_ratio": ("actor.lr_warmup_ratio",),
    "train_type": ("tuner_type", "micro_batch_size", "global_batch_size"),  # Megatron's trains the model itself
}
_COLUMNS = {  # settings that name a column of the data -> the option of vlm-rl prepare
    "prompt_key": "question",
    "input_key": "question",
    "answer_key": "answer",
    "label_key": "answer",
    "image_key": "images",
}
_ORDER = {  # rows that need what others give: after these
    "rollout.responses_per_prompt": -3,
    "rollout.prompts_per_step": -2,
    "rollout.max_tokens": -2,
    "train.mini_batch_prompts": -1,
    "train.sequence_parallel": -1,
    "data.train": -3,
    "model.freeze": 1,
    "train.steps": 1,
    "train.warmup_steps": 2,
    "train.warmup_rollout_steps": 2,
}


def _processes(file: ForeignFile) -> int:
    """Return how many processes the file starts, 1 where it does not say."""

    def number(*names: str) -> int:
        for name in names:
            for key, value in file.settings.items():
                if f".{key}".endswith(f".{name}") and isinstance(value, int):
                    return value
        return 1

    return number("NPROC_PER_NODE", "n_gpus_per_node", "actor.num_gpus_per_node", "actor_num_gpus_per_node") * number(
        "NNODES", "nnodes", "actor.num_nodes", "actor_num_nodes"
    )
