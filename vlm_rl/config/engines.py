"""What train.deepspeed and rollout.vllm may not set: what has a key of its own, or would change what is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LEARNERS = "the learner's sums, whose scale is fixed"
_WHOLE = "the learner, which computes the unmodified model on the problems that the run takes"
DEEPSPEED = {
    "train_batch_size": "rollout.prompts_per_step and train.mini_batch_prompts",
    "train_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.mini_batch_prompts",
    "gradient_clipping": "train.grad_clip",
    "optimizer": "train.optimizer",
    "scheduler": "train.schedule and train.warmup_steps",
    **dict.fromkeys(("bf16", "fp16", "amp", "torch_autocast"), "model.dtype"),
    **dict.fromkeys(("managed_gradient_accumulation", "prescale_gradients"), _LEARNERS),
    **dict.fromkeys(("gradient_predivide_factor", "gradient_allreduce_op"), _LEARNERS),
    **dict.fromkeys(("tensor_parallel", "expert_parallel", "pipeline", "hybrid_engine", "elasticity"), _WHOLE),
    **dict.fromkeys(("compression_training", "quantize_training", "weight_quantization"), _WHOLE),
    **dict.fromkeys(("sparse_attention", "sparse_gradients", "progressive_layer_drop"), _WHOLE),
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), _WHOLE),
}
"""Keys of DeepSpeed's configuration, and what decides them instead."""

_CONTRACT = "the learner's needs"
VLLM = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.batch_size",
    "seed": "seed",
    **dict.fromkeys(("generation_config", "logprobs_mode", "override_generation_config"), _CONTRACT),
    "logits_processors": _CONTRACT,
    **dict.fromkeys(("quantization", "quantization_config"), "rollout.quantization"),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "rollout.vllm.speculative_config"),
    **dict.fromkeys(("trust_remote_code", "mm_processor_kwargs"), "safety and data.max_pixels"),
    "tensor_parallel_size": "rollout.tensor_parallel",
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), "torchrun and rollout.tensor_parallel"),
    "enable_return_routed_experts": "rollout.replay_routing",
    **dict.fromkeys(("runner", "convert", "max_logprobs", "skip_tokenizer_init", "tokenizer"), _CONTRACT),
    **dict.fromkeys(("language_model_only", "mm_encoder_only"), "the images of data.train and data.eval"),
    "enable_lora": "model.lora.sync",
}
"""Options of vllm.LLM, and what decides them instead."""

_OLDER = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "offload_optimizer: {device: cpu, pin_memory: true}",
}
"""Names of ZeRO's options that DeepSpeed still reads, and those that took their place."""

_EXAMPLE = "zero_optimization: {offload_optimizer: {device: cpu}}"


def owned(block: str, options: Mapping[str, Any], owners: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each option of this block that another key decides."""
    for key in options:
        if key in owners:
            yield f"{block}.{key} cannot be set: it is decided by {owners[key]}; remove it"


def vllm_conflicts(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each key of rollout.vllm that may not be set, or not to this."""
    yield from owned("vllm", options, VLLM)
    speculative = options.get("speculative_config")
    if speculative is not None and (not isinstance(speculative, dict) or speculative.get("method") != "ngram"):
        yield (
            f"vllm.speculative_config is {speculative!r}: draft tokens may come from n-grams alone, since no "
            "checksum covers the weights of a draft model: set {method: ngram, num_speculative_tokens: 4, "
            "prompt_lookup_max: 4}, or leave it out"
        )
    share = options.get("gpu_memory_utilization", 1)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        yield f"vllm.gpu_memory_utilization is {share!r}: it must be a share of a card, above 0 and at most 1"


def deepspeed_conflicts(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each key of train.deepspeed that may not be set, or does not hold keys."""
    yield from owned("deepspeed", options, DEEPSPEED)
    zero = options.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"deepspeed.zero_optimization is {zero!r}: it must hold DeepSpeed's keys, as in {_EXAMPLE}"
        return
    yield from owned("deepspeed.zero_optimization", zero, {"stage": "train.zero_stage"})
    for key in zero:
        if key in _OLDER:
            yield f"deepspeed.zero_optimization.{key} is an older name: set {_OLDER[key]}"
    for key in ("reduce_bucket_size", "stage3_max_live_parameters"):
        if not isinstance(value := zero.get(key, "auto"), int | float) and value != "auto":
            yield f"deepspeed.zero_optimization.{key} is {value!r}: it must be a number, or auto"
    for key in ("offload_optimizer", "offload_param"):
        if not isinstance(zero.get(key), dict | None):
            yield f"deepspeed.zero_optimization.{key} is {zero[key]!r}: it must hold keys, as in {_EXAMPLE}"
