"""What each row of the table of other trainers' names becomes here: a function where it is more than a value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vlm_rl.config.foreign_names import Setting

_TRACKERS = {"tensorboard", "wandb", "trackio", "mlflow", "swanlab"}


@dataclass(slots=True)
class Conversion:
    """What became of a file's settings."""

    trainer: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # our key -> value, and what it was there
    left: list[str] = field(default_factory=list)  # what has no value here, each with the reason
    same: list[str] = field(default_factory=list)  # what needs no key here: what is off there, or is so here anyway
    data: dict[str, list[str]] = field(default_factory=dict)  # train and eval: their data sets
    columns: dict[str, str] = field(default_factory=dict)  # question, answer, images: of those
    passes: tuple[str, float] | None = None  # key and number of forward passes that a batch of TRL's is sampled for

    def value(self, key: str, otherwise: Any) -> Any:
        """Return the value of one of our keys, or another one."""
        return self.values[key][0] if key in self.values else otherwise


@dataclass(slots=True)
class ForeignRow:
    """What a file says of one row of the table, and where to put the conversion."""

    setting: Setting
    given: dict[str, Any]  # by the table's name
    keys: dict[str, str]  # by the table's name: the key in the file; of a default "NAME, their default"
    out: Conversion
    rows: int | None  # of the training data
    processes: int
    told: set[str] = field(default_factory=set)  # names that a value or a reason accounts for

    @property
    def is_trls(self) -> bool:
        """Tell whether the trainer is TRL's, as ms-swift's is."""
        return self.out.trainer in ("TRL", "ms-swift")

    def put(self, value: Any, key: str = "", *, name: str = "") -> None:
        """Give one of our keys a value, the row's own key by default, and name what it was there."""
        self.told |= {name} if name else {*self.given}
        there = self.keys[name] if name else ", ".join(self.keys.values())
        self.out.values[key or self.setting.ours] = (value, there)

    def leave(self, name: str, why: str) -> None:
        """Say that a setting of theirs has no value here; a default of theirs is not worth a line."""
        self.told.add(name)
        if "default" not in self.keys[name]:
            self.out.left.append(f"{self.keys[name]}: {shown(self.given[name])}  ({why})")

    def number(self, *names: str) -> tuple[str, float] | None:
        """Return the first of these settings that is a number, with its name."""
        for name in names:
            value = self.given.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return name, value
        return None


def shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return {"True": "true", "False": "false", "None": "null"}.get(str(value), str(value))


def _updates(row: ForeignRow) -> int:
    """Return the optimizer steps of a rollout step."""
    prompts, mini = (row.out.value(key, 1) for key in ("rollout.prompts_per_step", "train.mini_batch_prompts"))
    return max(1, -(-prompts // mini))


def _rollout_steps(row: ForeignRow, steps: float) -> int:
    """Return the trainer's steps as rollout steps; TRL counts optimizer steps."""
    return max(1, int(steps) // (_updates(row) if row.is_trls else 1))


# -- one function for each row that is more than the same value ------------------------------------------


def plain(row: ForeignRow) -> None:
    """Take the first value as it is."""
    name, value = next(iter(row.given.items()))
    if value is None:
        return
    row.put(value, name=name)


def _float(row: ForeignRow) -> None:
    if (found := row.number(*row.given)) is not None:
        row.put(float(found[1]), name=found[0])
        return
    for name, value in row.given.items():
        if isinstance(value, list):
            row.leave(name, "one number here")


def _bool(row: ForeignRow) -> None:
    row.put(any(value is True for value in row.given.values()))


def _out(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    if isinstance(value, str):
        row.put(value.replace("$", ""), name=name)


def _dtype(row: ForeignRow) -> None:
    for name, value in row.given.items():
        text = "bfloat16" if value is True else str(value)
        known = {"bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32", "fp32": "float32"}
        if text in known:
            row.put(known[text], name=name)
        elif value not in (None, False, "auto", "null"):
            row.leave(name, "model.dtype is bfloat16 or float32")


def _freeze(row: ForeignRow) -> None:
    parts = {"freeze_vit": ["tower"], "freeze_aligner": ["merger"]}
    has_images = re.search("vl|vision|llava", str(row.out.value("model.path", "")), re.IGNORECASE)
    if any("default" in key for key in row.keys.values()) and ("model.lora.rank" in row.out.values or not has_images):
        return  # nothing of these is trained anyway
    frozen = [part for name, on in row.given.items() if on is True for part in parts.get(name, ["tower", "merger"])]
    if frozen:
        row.put(list(dict.fromkeys(frozen)))


def _lora_rank(row: ForeignRow) -> None:
    """Put the rank where adapters are trained: TRL and ms-swift say that apart, verl and others by a rank."""
    kind = row.given.get("tuner_type", row.given.get("train_type"))
    rank = row.number("lora.rank", "lora_rank", "lora_r")
    if row.out.trainer == "ms-swift" and kind not in ("lora", None):
        for name in ("tuner_type", "train_type"):
            if kind != "full" and name in row.given:
                row.leave(name, "adapters here are LoRA's")
    elif row.out.trainer == "TRL" and row.given.get("use_peft") is not True:
        if rank is not None:
            row.leave(rank[0], "without use_peft: true the model itself is trained there")
    elif rank is not None and rank[1] > 0:
        row.put(int(rank[1]), name=rank[0])
    elif rank is None and row.is_trls:
        row.put(8 if row.out.trainer == "ms-swift" else 16)


def _lora_alpha(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is not None and "model.lora.rank" in row.out.values:
        row.put(int(found[1]), name=found[0])


def _lora_targets(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    listed = [value] if isinstance(value, str) else value
    if "model.lora.rank" not in row.out.values or not isinstance(listed, list):
        return
    if listed == ["all-linear"]:
        row.put(["language_model"], name=name)
    else:
        row.put([str(item) for item in listed], name=name)


def _data(kind: str) -> Callable[[ForeignRow], None]:
    def converter(row: ForeignRow) -> None:
        split = row.given.get("dataset_train_split")
        named = {name: value for name, value in row.given.items() if name != "dataset_train_split"}
        if split is not None and not named:
            row.leave("dataset_train_split", "no dataset_name goes with it")
        for value in named.values():
            if value is not None:
                listed = [str(item) for item in (value if isinstance(value, list) else [value])]
                row.out.data.setdefault(kind, []).extend(f"{item}@{split}" if split else item for item in listed)
        row.told |= {*row.given}

    return converter


def _template(row: ForeignRow) -> None:
    for name, value in row.given.items():
        if value is not None:
            row.leave(name, "the prompts here: vlm-rl config data.template")


def _max_prompt(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is None:
        return
    name, tokens = found
    if name.rpartition(".")[2] == "max_len":  # OpenRLHF: of prompt and response together
        tokens -= row.out.value("rollout.max_tokens", 0)
    if tokens > 0:
        row.put(int(tokens), name=name)


def _algorithm(row: ForeignRow) -> None:
    said = {name: str(value) for name, value in row.given.items()}
    loss = said.get("loss_type", said.get("loss_mode", said.get("policy_loss_type", "")))
    estimator = next((said[name] for name in said if "estimator" in name), "")
    by_loss = {"gspo": "gspo", "gspo_token": "gspo", "cispo": "cispo", "sapo": "sapo", "luspo": "luspo"}
    names = by_loss | {"dr_grpo": "dr_grpo", "grpo": "grpo", "bnpo": "grpo", "dapo": "grpo", "dapo_loss": "grpo"}
    by_estimator = {"grpo": "grpo", "group_norm": "grpo", "rloo": "rloo", "dr_grpo": "dr_grpo"}
    by_estimator |= {"grpo_passk": "", "rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
    name = names.get(loss) or by_estimator.get(estimator, "")
    if by_estimator.get(estimator) in ("rloo", "dr_grpo"):
        name = by_estimator[estimator]
    if not name and (estimator or loss not in ("", "default", "vanilla", "ppo")):
        row.out.values["algorithm.name"] = ("grpo", "the nearest")
        for each in row.given:
            row.leave(each, "no rule of that name here: docs/algorithms.md")
        return
    row.put(name or "grpo")
    is_token_mean = row.is_trls and loss in ("bnpo", "dapo")
    if is_token_mean or (row.out.trainer == "OpenRLHF" and name in ("", "grpo", "dr_grpo")):
        row.put("token", "algorithm.aggregation")


def _advantage(row: ForeignRow) -> None:
    for name, value in row.given.items():
        centred = value is True if name.startswith("no_") else value in (False, "none", "False")
        scaled = value in (True, "group", "True") if name == "scale_rewards" else value == "grpo"
        if name == "advantage_estimator" and value == "rloo":
            row.put("leave_one_out", name=name)
        elif centred:
            row.put("group_center", name=name)
        elif scaled:
            if row.out.value("algorithm.name", "") == "dr_grpo" and "algorithm.advantage" not in row.out.values:
                row.put("group_norm", name=name)  # their dr_grpo is an aggregation alone
        elif name == "advantage_estimator":
            row.leave(name, "docs/algorithms/advantages.md lists ours")
        elif name == "scale_rewards":
            row.leave(name, "the scale is the group's standard deviation here, or none")


def _ratio(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    if value in ("token", "sequence"):
        row.put(value, name=name)
    else:
        row.leave(name, "token or sequence here")


def _aggregation(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    known = {"token": "token", "token-mean": "token", "seq": "sequence", "seq-mean-token-mean": "sequence"}
    known |= {"seq-mean-token-sum-norm": "constant", "seq-mean-token-sum": "constant"}
    if row.out.value("algorithm.name", "") in ("gspo", "luspo", "sapo", "dr_grpo") or name == "loss_type":
        return  # the rule has its own
    if value in known:
        row.put(known[value], name=name)
    else:
        row.leave(name, "docs/algorithms.md lists the aggregations")


def _clips(row: ForeignRow) -> None:
    for name, value in row.given.items():
        if row.out.value("algorithm.name", "") in ("gspo", "luspo", "cispo") and "default" in row.keys[name]:
            continue  # theirs for another rule: ours has its own
        if isinstance(value, list) and len(value) == 2:
            row.put(float(value[0]), "algorithm.clip_low", name=name)
            row.put(float(value[1]), "algorithm.clip_high", name=name)
        elif isinstance(value, int | float) and _has_a_largest_weight(row):
            row.leave(name, "a weight of cispo has no least there, and epsilon_high is its largest")
        elif isinstance(value, int | float):
            for key in ("algorithm.clip_low", "algorithm.clip_high"):
                row.put(float(value), key, name=name)


def _clip(row: ForeignRow) -> None:
    found = row.number(*row.given)
    of_another = row.out.value("algorithm.name", "") in ("gspo", "luspo", "cispo")
    if found is None or (of_another and "default" in row.keys[found[0]]):
        return
    if not _has_a_largest_weight(row):
        row.put(float(found[1]), name=found[0])
    elif found[1] >= 1:
        row.put(float(found[1]) - 1, name=found[0])
    else:
        row.leave(found[0], "the largest weight of cispo there; it is 1 + algorithm.clip_high, so at least 1, here")


def _has_a_largest_weight(row: ForeignRow) -> bool:
    """Tell whether a clip is the largest ratio itself, as TRL's and ms-swift's epsilon_high is for cispo."""
    return row.is_trls and row.out.value("algorithm.name", "") == "cispo"


def _clip_dual(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is not None and row.out.value("algorithm.name", "") not in ("cispo", "sapo"):
        row.put(float(found[1]), name=found[0])


def _kl(row: ForeignRow) -> None:
    """KL in the loss only: a penalty in the reward has no counterpart."""
    coefficient = row.number("kl_coef", "kl_loss_coef", "beta", "init_kl_coef", "kl.init_coef")
    switches = [row.given[name] for name in ("use_kl_loss", "kl.use_loss") if name in row.given]
    needs_switch = row.out.trainer in ("EasyR1", "OpenRLHF", "verl")
    is_off = row.given.get("disable_kl") is True or (needs_switch and not any(switches))
    if coefficient is not None and not is_off:
        row.put(float(coefficient[1]), name=coefficient[0])
        return
    row.put(0.0)
    if coefficient is None or not coefficient[1] or row.given.get("disable_kl") is True:
        return
    if row.out.trainer == "verl":
        row.leave(coefficient[0], "without use_kl_loss: true there is no KL term there")
        return
    row.told.add(coefficient[0])  # said of a default too: the run has no KL at all
    row.out.left.append(
        f"{row.keys[coefficient[0]]}: {shown(coefficient[1])}  (a penalty in the reward, not converted; "
        "algorithm.kl_coef is a term of the loss, 0 here)"
    )


def _function(row: ForeignRow) -> None:
    for name, value in row.given.items():
        listed = value if isinstance(value, list) else [value]
        others = [str(item) for item in listed if item not in ("accuracy", "format", "soft_overlong", None)]
        if "accuracy" in listed or "format" in listed:
            row.put(1.0 if "format" in listed else 0.0, "reward.format", name=name)
        if others:
            row.leave(
                name, "the grader judges answers; a function of yours: reward.functions.NAME.path, docs/rewards.md"
            )


def _overlong(row: ForeignRow) -> None:
    found = row.number("overlong_buffer.len", "overlong_buffer_len", "soft_cache_length")
    if row.given.get("overlong_buffer.enable") is False:
        row.put(0)
    elif found is not None:
        row.put(int(found[1]), name=found[0])


def _sampler(row: ForeignRow) -> None:
    for name, value in row.given.items():
        if value == "vllm" or (name in ("use_vllm", "vllm_num_engines", "vllm.num_engines") and value):
            row.put("vllm", name=name)
        elif name == "use_vllm":
            row.put("transformers", name=name)
        elif value == "server":
            row.leave(name, "vlm-rl serve, then rollout.sampler=server: docs/scaling.md")
        elif value not in ("colocate", "vllm") and name.endswith("name"):
            row.leave(name, "vllm or transformers here")


def _prompts(row: ForeignRow) -> None:
    """Put the prompts of a step. TRL and ms-swift count responses, over all processes."""
    found = row.number("rollout_batch_size", "rollout.batch_size", "train_batch_size")
    if found is not None:
        row.put(int(found[1]), name=found[0])
        return
    group = row.out.value("rollout.responses_per_prompt", 8)
    if (passes := row.number("steps_per_generation")) is not None:
        row.out.passes = row.keys[passes[0]], passes[1]
        row.told.add(passes[0])
    whole = row.number("generation_batch_size")
    if whole is not None:
        row.put(max(1, int(whole[1]) // group), name=whole[0])


def _mini_batch(row: ForeignRow) -> None:
    """Put the prompts of an update. OpenRLHF counts responses, TRL and ms-swift those of a device and pass."""
    group = row.out.value("rollout.responses_per_prompt", 8)
    found = row.number("global_batch_size", "ppo_mini_batch_size")
    if found is not None:
        row.put(int(found[1]), name=found[0])
        return
    found = row.number("train_batch_size", "train.batch_size")
    if found is not None:
        row.put(max(1, int(found[1]) // group), name=found[0])
        return
    if (device := row.number("per_device_train_batch_size")) is None:
        for name in row.given:
            row.leave(name, "without a number of per_device_train_batch_size these are no prompts")
        return
    accumulated = row.number("gradient_accumulation_steps") or ("", 1)
    prompts = max(1, int(device[1] * accumulated[1]) * row.processes // group)
    row.put(prompts)
    if "rollout.prompts_per_step" not in row.out.values:  # one update for each batch, unless they say how many
        key, passes = row.out.passes or ("", accumulated[1])
        row.put(max(1, int(device[1] * passes) * row.processes // group), "rollout.prompts_per_step")
        value, there = row.out.values["rollout.prompts_per_step"]
        row.out.values["rollout.prompts_per_step"] = (value, f"{there}, {key}" if key else there)


def _micro_batch(row: ForeignRow) -> None:
    found = row.number("ppo_max_token_len_per_gpu", "train_max_tokens_per_gpu", "train.max_tokens_per_gpu")
    if found is not None:  # verl's are those of a rank, ours those of a row that ranks may share
        row.put(int(found[1]) * row.out.value("train.sequence_parallel", 1), name=found[0])
    for name in row.given:
        if found is None or name != found[0]:
            row.leave(name, "rows of train.micro_batch_tokens tokens")


def _vllm(row: ForeignRow) -> None:
    for name, value in row.given.items():
        option = name.removeprefix("vllm.").removeprefix("vllm_")
        if option in ("max_model_length", "max_model_len"):
            row.leave(name, "prompt and response say it")
        elif value is not None:
            row.put(value, f"rollout.vllm.{option}", name=name)


def _offload(row: ForeignRow) -> None:
    for name, value in row.given.items():
        if "optimizer" in name:
            if value is True:
                row.put(True, name=name)
        elif value is True:
            row.leave(name, "the engine sleeps during the update; the weights stay on the card")


def _lr(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is not None:
        of_adapters = "default" in row.keys[found[0]] and "model.lora.rank" in row.out.values
        row.put(10 * found[1] if of_adapters else float(found[1]), name=found[0])  # ms-swift's alone is written out


def _steps(row: ForeignRow) -> None:
    found = row.number("max_steps", "total_training_steps")
    if found is not None and found[1] > 0:
        row.put(_rollout_steps(row, found[1]), name=found[0])
        return
    passes = row.number("total_epochs", "total_episodes", "num_train_epochs", "num_episodes", "train.num_episodes")
    if passes is None:
        return
    name, number = passes
    prompts, most = row.out.value("rollout.prompts_per_step", 128), row.given.get("max_samples")
    if row.rows is None:
        row.leave(name, f"train.steps is {shown(number)} x rows / {prompts}; with --data it is computed")
        if most is not None:
            row.leave("max_samples", "these are the rows of a pass, where the data has more")
    elif most is None:
        row.put(max(1, math.ceil(number * row.rows / prompts)), name=name)
    else:
        row.put(max(1, math.ceil(number * min(row.rows, most) / prompts)))  # of both settings


def _warmup(row: ForeignRow) -> None:
    steps = row.number("lr_warmup_steps", "warmup_steps")
    share = row.number("lr_warmup_ratio", "lr_warmup_steps_ratio", "warmup_ratio", "actor.lr_warmup_ratio")
    if steps is not None and 0 < steps[1] < 1:  # a share too, of transformers 5
        steps, share = None, steps
    least = 1 if row.is_trls else 0  # TRL's 0 says nothing, and the share counts
    if steps is not None and steps[1] >= least:
        row.put(int(steps[1]), name=steps[0])
        return
    if share is None or share[1] == 0:
        return
    if "train.steps" not in row.out.values:
        row.leave(share[0], f"{row.setting.ours} is this share of the steps")
        return
    updates = 1 if "rollout" in row.setting.ours else _updates(row)
    row.put(int(share[1] * row.out.value("train.steps", 0) * updates), name=share[0])


def _schedule(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    if "constant" in str(value):
        row.put("constant", name=name)
    elif "cosine" in str(value):
        row.put("cosine", name=name)
        if value != "cosine":
            row.leave(name, "ours falls to 0")
    else:
        row.put("constant", name=name)
        row.leave(name, "constant or cosine here: constant")


def _optimizer(row: ForeignRow) -> None:
    name, value = next(iter(row.given.items()))
    if "adamw" in str(value):
        row.put("adamw", name=name)
    else:
        row.leave(name, "adamw or sgd here")


def _betas(row: ForeignRow) -> None:
    listed = next((value for value in row.given.values() if isinstance(value, list)), None)
    betas = listed or [row.given.get("adam_beta1", 0.9), row.given.get("adam_beta2", 0.999)]
    row.put([float(beta) for beta in betas])


def _zero(row: ForeignRow) -> None:
    for name, value in row.given.items():
        stage = re.search(r"(?:zero|stage)[-_.]?([0-3])", str(value)) if isinstance(value, str) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3 and "stage" in name:
            row.put(value, name=name)
        elif stage:
            row.put(int(stage[1]), name=name)
            moved = ["optimizer", "param"][: int(stage[1]) - 1] if "offload" in str(value) else []
            for part in moved if not row.out.value("rollout.offload_optimizer", False) else []:
                row.put("cpu", f"train.deepspeed.zero_optimization.offload_{part}.device", name=name)
        elif value is True or name == "fsdp_size":
            row.put(3, name=name)
        elif value is not False:
            row.leave(name, "train.zero_stage, and DeepSpeed's own options in train.deepspeed")


def _adam_offload(row: ForeignRow) -> None:
    if any(value is True for value in row.given.values()):
        row.put("cpu", "train.deepspeed.zero_optimization.offload_optimizer.device")


def _every(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is None:
        return
    if 0 < found[1] < 1:
        row.leave(found[0], f"a share of the steps; {row.setting.ours} is a number of rollout steps")
    elif found[1] > 0:
        row.put(_rollout_steps(row, found[1]), name=found[0])
    elif row.setting.ours == "eval.every":
        row.put(0, name=found[0])


def _keep(row: ForeignRow) -> None:
    found = row.number(*row.given)
    if found is not None and found[1] > 0:
        row.put(int(found[1]), name=found[0])
    elif found is not None:
        row.leave(found[0], "checkpoint.keep_every keeps steps permanently")


def _trackers(row: ForeignRow) -> None:
    for name, value in row.given.items():
        if name.startswith("use_"):
            listed = [name.removeprefix("use_")] if value else []
        else:
            listed = [str(item) for item in (value if isinstance(value, list) else [value])]
        if known := [item for item in listed if item in _TRACKERS]:
            row.put(known, name=name)
        if set(listed) - _TRACKERS - {"console", "none", "None", "all"}:
            row.leave(name, f"known are {', '.join(sorted(_TRACKERS))}")


def _samples(row: ForeignRow) -> None:
    for name, value in row.given.items():
        row.put(10 if value else 0, name=name)


def _truncation(row: ForeignRow) -> None:
    for name, value in row.given.items():
        off = (1, 1.0) if "top_p" in name else (0, -1, None)
        if value not in off:
            row.leave(name, "rollout.top_p needs a rollout.top_k, and a sampler that tells what it kept")


CONVERTERS: dict[str, Callable[[ForeignRow], None]] = {
    "out": _out,
    "model.dtype": _dtype,
    "model.freeze": _freeze,
    "model.gradient_checkpointing": _bool,
    "model.lora.rank": _lora_rank,
    "model.lora.alpha": _lora_alpha,
    "model.lora.targets": _lora_targets,
    "data.train": _data("train"),
    "data.eval": _data("eval"),
    "data.max_prompt_tokens": _max_prompt,
    "data.template": _template,
    "algorithm.name": _algorithm,
    "algorithm.advantage": _advantage,
    "algorithm.ratio": _ratio,
    "algorithm.aggregation": _aggregation,
    "algorithm.clip_low and algorithm.clip_high": _clips,
    "algorithm.clip_low": _clip,
    "algorithm.clip_high": _clip,
    "algorithm.clip_dual": _clip_dual,
    "algorithm.sapo_temperature_pos": _float,
    "algorithm.sapo_temperature_neg": _float,
    "algorithm.dynamic_sampling": _bool,
    "algorithm.kl_coef": _kl,
    "algorithm.entropy_coef": _float,
    "algorithm.mask_truncated": _bool,
    "algorithm.correction_cap": _float,
    "reward.function": _function,
    "reward.overlong_buffer": _overlong,
    "reward.overlong_factor": _float,
    "rollout.sampler": _sampler,
    "rollout.prompts_per_step": _prompts,
    "rollout.temperature": _float,
    "rollout.top_p": _truncation,
    "rollout.vllm": _vllm,
    "rollout.offload_optimizer": _offload,
    "train.steps": _steps,
    "train.mini_batch_prompts": _mini_batch,
    "train.micro_batch_tokens": _micro_batch,
    "train.lr": _lr,
    "train.warmup_steps": _warmup,
    "train.warmup_rollout_steps": _warmup,
    "train.schedule": _schedule,
    "train.optimizer": _optimizer,
    "train.betas": _betas,
    "train.weight_decay": _float,
    "train.grad_clip": _float,
    "train.zero_stage": _zero,
    "train.deepspeed": _adam_offload,
    "eval.every": _every,
    "eval.temperature": _float,
    "eval.top_p": _float,
    "checkpoint.every": _every,
    "checkpoint.keep_last": _keep,
    "log.trackers": _trackers,
    "log.samples_every": _samples,
}
