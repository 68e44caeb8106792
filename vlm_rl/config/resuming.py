"""Which keys a resume may change. Any other change would make it a different run, and is refused."""

from __future__ import annotations

_ZERO = "train.deepspeed.zero_optimization"
GRADIENT_KEEPING_KEYS = (  # where and in which parts the same gradient is computed
    "train.micro_batch_tokens",
    "train.sequence_parallel",
    "train.zero_stage",
    *(f"{_ZERO}.{key}" for key in ("offload_optimizer", "offload_param", "stage3_max_live_parameters")),
    "model.fused_head",
    "model.gradient_checkpointing",
    "model.layer_patches",
    "model.offload_activations",
    "algorithm.distillation.offload",
)
ENGINE_KEYS = (  # a change gives different responses, from the same distribution
    "model.lora.sync",
    "rollout.batch_invariant",
    "rollout.batch_size",
    "rollout.sampler",
    "rollout.tensor_parallel",
    *(
        f"rollout.vllm.{key}"
        for key in (
            "compilation_config",
            "cudagraph_capture_sizes",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
            "mm_processor_cache_gb",
            "speculative_config",
        )
    ),
)
MUTABLE_KEYS = (
    "out",  # the run is in the folder that it is resumed in, wherever that was before
    "train.steps",
    "checkpoint.",
    "log.",
    "eval.",
    "rollout.max_gap",
    "rollout.offload_optimizer",
    "rollout.server",  # where the servers are, their token, and how long to wait for them
    "train.max_skipped_in_a_row",
    "reward.function_timeout",
    "reward.max_undecided",
    *(
        f"reward.{part}.{key}"
        for part in ("judge", "reward_model")
        for key in ("url", "api_key_env", "concurrency", "timeout", "retries", "cache")
    ),
    *GRADIENT_KEEPING_KEYS,
    *ENGINE_KEYS,
)
