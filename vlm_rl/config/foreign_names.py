"""What the settings of other trainers are called here, for error messages and for docs/other_trainers.md.

The names were read in the sources of EasyR1 (examples/config.yaml, verl/workers/actor/config.py), verl
(trainer/config/ppo_trainer.yaml), TRL (GRPOConfig and TrainingArguments) and OpenRLHF (cli/train_ppo_ray.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TRAINERS = ("EasyR1", "verl", "TRL", "OpenRLHF")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its key here, "" where there is none, and its names in TRAINERS, separated by blanks."""

    ours: str
    easyr1: str
    verl: str
    trl: str
    openrlhf: str
    note: str = ""

    @property
    def names(self) -> tuple[tuple[str, list[str]], ...]:
        """Return the names by trainer."""
        theirs = (self.easyr1, self.verl, self.trl, self.openrlhf)
        return tuple((trainer, names.split()) for trainer, names in zip(TRAINERS, theirs, strict=True))


_PASSES = "in rollout steps; a pass over the data is its rows / rollout.prompts_per_step"
_OFFLOAD = "DeepSpeed's own options: zero_optimization.offload_optimizer, offload_param"
_ONCE = "each rollout is trained on once"

SETTINGS = (
    Setting("out", "save_checkpoint_path", "default_local_dir", "output_dir", "save_path ckpt_path"),
    Setting("model.path", "model.model_path", "model.path", "model_name_or_path", "pretrain"),
    Setting("model.dtype", "torch_dtype", "rollout.dtype", "bf16 torch_dtype", "bf16"),
    Setting("model.freeze", "freeze_vision_tower", "", "", "", "true there is [tower, merger] here"),
    Setting(
        "model.gradient_checkpointing",
        "enable_gradient_checkpointing",
        "enable_gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
    ),
    Setting("model.lora.rank", "lora.rank", "lora_rank", "lora_r", "lora_rank"),
    Setting("model.lora.alpha", "lora.alpha", "lora_alpha", "lora_alpha", "lora_alpha"),
    Setting("model.lora.targets", "target_modules", "target_modules", "lora_target_modules", "target_modules"),
    Setting(
        "data.train", "train_files", "train_files", "dataset_name", "prompt_data", "vlm-rl prepare makes the sets"
    ),
    Setting("data.eval", "val_files", "val_files", "", "eval_dataset", "vlm-rl prepare makes the sets"),
    Setting(
        "data.max_prompt_tokens", "max_prompt_length", "max_prompt_length", "max_prompt_length", "prompt_max_len"
    ),
    Setting("data.template", "format_prompt", "", "chat_template_kwargs", "input_template"),
    Setting(
        "",
        "prompt_key answer_key image_key",
        "prompt_key image_key",
        "",
        "input_key label_key",
        "columns are named once, by vlm-rl prepare --question --answer --images",
    ),
    Setting(
        "algorithm.name",
        "adv_estimator loss_type",
        "adv_estimator",
        "loss_type",
        "advantage_estimator policy_loss_type",
        "grpo, dr_grpo, dapo, gspo, luspo, ...: docs/algorithms.md",
    ),
    Setting("algorithm.advantage", "", "norm_adv_by_std_in_grpo", "scale_rewards", "no_advantage_std_norm"),
    Setting("algorithm.ratio", "", "", "importance_sampling_level", ""),
    Setting("algorithm.aggregation", "loss_avg_mode", "loss_agg_mode", "loss_type", ""),
    Setting(
        "algorithm.clip_low and algorithm.clip_high",
        "clip_ratio",
        "clip_ratio",
        "epsilon",
        "eps_clip eps_clip_low_high",
        "each algorithm has its own defaults",
    ),
    Setting("algorithm.clip_low", "clip_ratio_low", "clip_ratio_low", "", ""),
    Setting("algorithm.clip_high", "clip_ratio_high", "clip_ratio_high", "epsilon_high", ""),
    Setting("", "clip_ratio_dual", "clip_ratio_c", "delta", "dual_clip", "there is no dual clip"),
    Setting("algorithm.dynamic_sampling", "online_filtering", "filter_groups.enable", "", "dynamic_filtering"),
    Setting(
        "algorithm.kl_coef",
        "disable_kl use_kl_loss kl_coef",
        "use_kl_loss kl_loss_coef",
        "beta",
        "use_kl_loss init_kl_coef",
        "0 switches the KL term off",
    ),
    Setting("algorithm.entropy_coef", "", "entropy_coeff", "", "entropy_loss_coef"),
    Setting("algorithm.mask_truncated", "", "", "mask_truncated_completions", ""),
    Setting(
        "algorithm.correction_cap",
        "",
        "tis_imp_ratio_cap",
        "vllm_importance_sampling_cap",
        "vllm_is_truncated_threshold",
    ),
    Setting("reward.function", "score_function", "custom_reward_function.path", "reward_funcs", "remote_rm_url"),
    Setting("reward.overlong_buffer", "", "overlong_buffer.len", "", "overlong_buffer_len"),
    Setting("reward.overlong_factor", "", "penalty_factor", "", "overlong_penalty_factor"),
    Setting("rollout.sampler", "rollout.name", "rollout.name", "use_vllm vllm_mode", "vllm_num_engines"),
    Setting(
        "rollout.prompts_per_step",
        "rollout_batch_size",
        "train_batch_size",
        "generation_batch_size steps_per_generation",
        "rollout_batch_size",
        "in prompts; TRL counts responses",
    ),
    Setting("rollout.responses_per_prompt", "rollout.n", "rollout.n", "num_generations", "n_samples_per_prompt"),
    Setting(
        "rollout.max_tokens",
        "max_response_length",
        "max_response_length response_length",
        "max_completion_length",
        "generate_max_len",
    ),
    Setting("rollout.batch_size", "", "max_num_seqs", "", "vllm_generate_batch_size"),
    Setting(
        "rollout.vllm",
        "gpu_memory_utilization enforce_eager",
        "gpu_memory_utilization enforce_eager",
        "vllm_gpu_memory_utilization vllm_max_model_length",
        "vllm_gpu_memory_utilization enforce_eager",
        "vLLM's own options, by their own names: rollout.vllm.gpu_memory_utilization",
    ),
    Setting(
        "rollout.tensor_parallel",
        "tensor_parallel_size",
        "tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    Setting(
        "train.steps",
        "max_steps total_episodes",
        "total_training_steps total_epochs",
        "max_steps num_train_epochs",
        "num_episodes max_samples",
        _PASSES,
    ),
    Setting(
        "train.mini_batch_prompts",
        "global_batch_size",
        "ppo_mini_batch_size",
        "per_device_train_batch_size gradient_accumulation_steps",
        "train_batch_size",
        "in prompts, over all ranks; TRL and OpenRLHF count responses",
    ),
    Setting(
        "train.micro_batch_tokens",
        "micro_batch_size_per_device_for_update",
        "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu",
        "",
        "train_max_tokens_per_gpu micro_train_batch_size",
        "in tokens of a packed row",
    ),
    Setting("", "ppo_epochs", "ppo_epochs", "num_iterations", "max_epochs", _ONCE),
    Setting("train.lr", "optim.lr", "optim.lr", "learning_rate", "actor_learning_rate"),
    Setting(
        "train.warmup_steps",
        "lr_warmup_steps lr_warmup_ratio",
        "lr_warmup_steps lr_warmup_steps_ratio",
        "warmup_ratio",
        "lr_warmup_ratio",
        "in optimizer steps",
    ),
    Setting(
        "train.schedule", "lr_scheduler_type", "lr_scheduler_type warmup_style", "lr_scheduler_type", "lr_scheduler"
    ),
    Setting("train.optimizer", "optim.strategy", "", "optim", ""),
    Setting("train.betas", "optim.betas", "optim.betas", "adam_beta1 adam_beta2", "adam_betas"),
    Setting("train.weight_decay", "optim.weight_decay", "optim.weight_decay", "weight_decay", "l2"),
    Setting("train.grad_clip", "max_grad_norm", "actor.grad_clip", "max_grad_norm", "max_norm"),
    Setting("train.zero_stage", "enable_full_shard", "fsdp_size", "", "zero_stage"),
    Setting(
        "train.deepspeed",
        "offload_optimizer offload_params",
        "optimizer_offload param_offload",
        "deepspeed",
        "adam_offload",
        _OFFLOAD,
    ),
    Setting("eval.every", "val_freq", "test_freq", "eval_steps", "eval_steps"),
    Setting(
        "eval.samples", "val_override_config.n", "val_kwargs.n", "num_generations_eval", "eval_n_samples_per_prompt"
    ),
    Setting("eval.temperature", "val_override_config.temperature", "val_kwargs.temperature", "", "eval_temperature"),
    Setting("checkpoint.every", "save_freq", "save_freq", "save_steps", "save_steps"),
    Setting("checkpoint.keep_last", "save_limit", "max_actor_ckpt_to_keep", "save_total_limit", "max_ckpt_num"),
    Setting("log.trackers", "logger", "logger", "report_to", "use_wandb use_tensorboard"),
    Setting("log.samples_every", "val_generations_to_log", "log_val_generations", "log_completions", ""),
)


def translate(key: str, value: Any = None) -> Iterator[str]:
    """Yield what an unknown key is called here: a sentence for each setting of another trainer that it can be.

    Args:
        key: its path, e.g. algorithm.clip_ratio.
        value: what it was given; of a section, such as verl's actor_rollout_ref, every key is translated.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from translate(f"{key}.{name}", inner)
        return
    for setting in SETTINGS:
        trainers = [trainer for trainer, names in setting.names if any(_is(name, key) for name in names)]
        if trainers and setting.ours != key:
            note = f" ({setting.note})" if setting.note else ""
            ours = f"is {setting.ours} here{note}" if setting.ours else f"is not a key here: {setting.note}"
            yield f"{key} of {' and '.join(trainers)} {ours}"


def _is(name: str, key: str) -> bool:
    """Say whether a key is a setting of this name, whatever sections it is in."""
    return f".{key}".endswith(f".{name}")


def table() -> str:
    """Return the settings as a Markdown table."""

    def cells(setting: Setting) -> list[str]:
        ours = " and ".join(f"`{key}`" for key in setting.ours.split(" and ")) if setting.ours else ""
        theirs = [", ".join(f"`{name}`" for name in names) for _, names in setting.names]
        return [ours, *theirs, setting.note]

    rows = [["here", *TRAINERS, ""], ["---"] * (len(TRAINERS) + 2), *map(cells, SETTINGS)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
