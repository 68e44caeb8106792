"""Which values do not fit together, by subject: each function yields a message for each pair that does not.

The sections call them (ConfigSection.conflicts). A message names the keys, their values, and what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_rl.config.names import is_server_address
from vlm_rl.errors import near

if TYPE_CHECKING:
    from vlm_rl.config.environments import EnvironmentConfig
    from vlm_rl.config.policy import DataConfig, ModelConfig
    from vlm_rl.config.rollout import RolloutConfig
    from vlm_rl.config.training import Config, TrainConfig

_LONGEST_WAIT = 3600.0  # for servers: half of distributed.COLLECTIVE_TIMEOUT

# -- of the section rollout ----------------------------------------------------------------------


def of_age(rollout: RolloutConfig) -> Iterator[str]:
    """Check what makes tokens old: responses that are carried over, and rollouts ahead of the learner."""
    if rollout.carry_over is not None and rollout.sampler == "server":
        yield (
            f"carry_over is {rollout.carry_over}, and sampler is server, which answers whole groups alone: leave "
            "carry_over out, or use an engine in this process"
        )
    if rollout.ahead and rollout.sampler != "server":
        yield (
            f"ahead is {rollout.ahead}, and sampler is {rollout.sampler}, which samples in the learner's process: "
            "set sampler to server, or leave ahead out"
        )
    if rollout.ahead and rollout.carry_over is not None:
        yield f"ahead is {rollout.ahead}, and carry_over is {rollout.carry_over}: leave one of them out"
    if rollout.max_age is not None and rollout.max_age >= max(rollout.ahead, 1):
        yield (
            f"max_age is {rollout.max_age}, and ahead is {rollout.ahead}: no token is older than ahead; lower "
            "max_age, or leave it out"
        )
    if rollout.carry_over is not None and rollout.tensor_parallel > 1:
        yield (
            f"carry_over is {rollout.carry_over}, and tensor_parallel is {rollout.tensor_parallel}: the ranks of an "
            "engine would stop at different responses; leave one of them out"
        )
    if rollout.carry_over is not None and rollout.replay_routing:
        yield (
            f"carry_over is {rollout.carry_over}, and replay_routing is true, which knows the routing of one "
            "rollout alone: leave one of them out"
        )


def of_servers(rollout: RolloutConfig) -> Iterator[str]:
    """Check the addresses of servers, how long a run waits for them, and what they do not do."""
    if bool(rollout.servers) != (rollout.sampler == "server"):
        yield (
            f"sampler is {rollout.sampler!r} and servers is {rollout.servers!r}: sampler: server needs addresses, "
            "and no other engine uses them"
        )
    if rollout.offload_optimizer and rollout.sampler == "server":
        yield "offload_optimizer is true, and sampler is server: no engine shares the card; leave it out"
    if rollout.replay_routing and rollout.sampler == "server":
        yield "replay_routing is true, and sampler is server: servers do not return their routing; leave it out"
    if isinstance(rollout.servers, list):
        yield from (
            f"servers: {url!r} is not an address such as http://127.0.0.1:8000"
            for url in rollout.servers
            if not is_server_address(url)
        )
    if rollout.server_timeout > _LONGEST_WAIT:
        yield (
            f"server_timeout is {rollout.server_timeout:g}: the ranks wait for each other for two hours, so give at "
            f"most {_LONGEST_WAIT:g} s, and resume the run when servers are there"
        )


def of_engines(rollout: RolloutConfig) -> Iterator[str]:
    """Check what only some engines can do."""
    if rollout.batch_invariant and rollout.sampler not in ("vllm", "server"):
        yield (
            f"batch_invariant is true, and sampler is {rollout.sampler}: the kernels are vLLM's; set sampler to "
            "vllm or server"
        )
    if rollout.tensor_parallel > 1 and rollout.sampler not in ("vllm", "server"):
        yield (
            f"tensor_parallel is {rollout.tensor_parallel}, and sampler is {rollout.sampler}: only vLLM divides a "
            "model; set sampler to vllm or server"
        )
    if rollout.tensor_parallel > 1 and rollout.vllm.get("enable_expert_parallel"):
        yield (
            f"tensor_parallel is {rollout.tensor_parallel}, and vllm.enable_expert_parallel is true: the proof of a "
            "sync knows experts that are divided, not dealt out; leave it out"
        )
    if rollout.quantization and rollout.sampler not in ("vllm", "server"):
        yield (
            f"quantization is {rollout.quantization}, and sampler is {rollout.sampler}: only vLLM rounds weights; "
            "set sampler to vllm or server"
        )
    if rollout.quantization and rollout.max_gap is None:
        yield (
            f"quantization is {rollout.quantization}, and max_gap is null: its default is what rounding to bfloat16 "
            f"explains, and {rollout.quantization} is coarser; set max_gap, to begin with to 0.3, and then to "
            "three times what rollout/logprob_gap shows in the first steps"
        )


def of_drafts(rollout: RolloutConfig) -> Iterator[str]:
    """Check what is sampled with draft tokens."""
    if rollout.vllm.get("speculative_config") is not None:
        begin = "vllm.speculative_config is set, and"
        for key in ("top_k", "replay_routing"):
            if value := getattr(rollout, key):
                yield f"{begin} {key} is {value}, which was not tried with draft tokens: leave one of them out"
        if rollout.sampler == "server":
            yield (
                f"{begin} sampler is server: servers ban tokens by a logit bias, which vLLM does not take beside "
                "draft tokens; leave it out, or set sampler to vllm"
            )


def of_kept_ids(rollout: RolloutConfig) -> Iterator[str]:
    """Check truncated distributions, of which the learner needs the ids that were kept."""
    if rollout.top_p < 1 and not rollout.top_k:
        yield (
            f"top_p is {rollout.top_p}, and top_k is 0: the learner needs the ids that were kept of each token, "
            "which a top_k bounds; set top_k, for example to 64, or top_p to 1"
        )
    if not rollout.top_k:
        return
    begin = f"top_k is {rollout.top_k}, and"
    if rollout.sampler not in ("transformers", "vllm"):
        yield f"{begin} sampler is {rollout.sampler}: only transformers, and vllm on a GPU, tell what they kept"
    for key in ("carry_over", "replay_routing"):
        if value := getattr(rollout, key):
            yield f"{begin} {key} is {value}, which does not bring the kept ids along: leave one of them out"


# -- of a whole configuration ---------------------------------------------------------------------


def of_environment(environment: EnvironmentConfig, rollout: RolloutConfig, data: DataConfig) -> Iterator[str]:
    """Check for what is not built for episodes, and for pixels that the engine would resize again."""
    if environment.name is None:
        return
    unfit = {
        "carry_over": "which continues a response token by token, not turn by turn",
        "ahead": "whose responses may hold tokens of several weights",
        "replay_routing": "which has no routing of observed tokens",
    }
    begin = f"environment.name is {environment.name}, and rollout"
    for key, why in unfit.items():
        if value := getattr(rollout, key):
            yield f"{begin}.{key} is {value}, {why}: leave one of them out"
    if rollout.tensor_parallel > 1 and rollout.sampler != "server":
        yield (
            f"{begin}.tensor_parallel is {rollout.tensor_parallel}: the ranks of an engine would be answered at "
            "different times; use rollout.sampler=server, or one rank"
        )
    if (low := environment.min_pixels or data.min_pixels) > (high := environment.max_pixels or data.max_pixels):
        yield f"environment.min_pixels ({low}) is above its max_pixels ({high}); lower the first or raise the second"
    if low < data.min_pixels or high > data.max_pixels:
        yield (
            f"environment.min_pixels and max_pixels ({low} to {high}) go beyond data.min_pixels and data.max_pixels "
            f"({data.min_pixels} to {data.max_pixels}), which the engine keeps images to: stay inside"
        )


def of_synced_weights(config: Config) -> Iterator[str]:
    """Check what an engine makes of the weights that it gets: adapters beside their base, and rounded ones."""
    lora = config.model.lora
    if lora is not None and lora.sync == "adapter" and config.rollout.sampler not in ("auto", "vllm"):
        yield (
            f"model.lora.sync is adapter, and rollout.sampler is {config.rollout.sampler}, which takes merged "
            "weights alone: use the vllm sampler, or model.lora.sync=merged"
        )
    if lora is not None and lora.sync == "adapter" and config.rollout.quantization:
        yield (
            f"model.lora.sync is adapter, and rollout.quantization is {config.rollout.quantization}: vLLM would "
            "add the adapter to rounded weights, which are not the learner's base; set model.lora.sync=merged"
        )
    if config.rollout.quantization and config.model.dtype == "float32":
        yield (
            f"rollout.quantization is {config.rollout.quantization}, and model.dtype is float32, which vLLM does "
            "not round: set model.dtype=bfloat16"
        )
    if lora is not None and lora.sync == "adapter" and config.rollout.tensor_parallel > 1:
        yield (
            f"model.lora.sync is adapter, and rollout.tensor_parallel is {config.rollout.tensor_parallel}: an "
            "engine on several ranks takes merged weights alone; set model.lora.sync=merged"
        )


def of_4bit(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Check weights of 4 bits, which one stage of ZeRO cannot divide."""
    if model.lora is not None and model.lora.load_in_4bit and train.zero_stage == 3:
        yield (
            "model.lora.load_in_4bit is true, and train.zero_stage is 3, which cannot divide packed weights: use "
            "stage 2"
        )


def of_sequence_parallel(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Check rows whose tokens are divided over ranks, which padded ones cannot be."""
    if train.sequence_parallel > 1 and model.rows == "padded":
        yield (
            f"train.sequence_parallel is {train.sequence_parallel}, and model.rows is padded: only packed rows, "
            "whose attention is ours, are divided; leave one of them out"
        )


def of_evaluated_sets(config: Config) -> Iterator[str]:
    """Check the names of the sets that are evaluated, and how often they are."""
    known = [Path(path).name for path in config.data.eval]
    for name in sorted(config.eval.by_set.keys() - {*known}) if known else ():
        hint = near(name, known, otherwise=f"it has {', '.join(known)}")
        yield f"eval.by_set.{name}: data.eval has no set of this name; {hint}"
    if config.data.eval and "every" not in config.eval.model_fields_set:
        yield (
            f"data.eval names {', '.join(config.data.eval)}, and eval.every is not given, so that nothing would be "
            "evaluated: set eval.every to a number of rollout steps, or to 0 to leave it off"
        )


def of_teacher_servers(config: Config) -> Iterator[str]:
    """Check what a teacher on servers scores."""
    if config.algorithm.distillation.servers:
        if (t := config.rollout.temperature) != 1:
            yield (
                f"rollout.temperature is {t:g}, and algorithm.distillation.servers are given, which score at 1: "
                "set it to 1, or let a teacher in this process score"
            )
        if (size := config.train.sequence_parallel) > 1:
            yield (
                f"train.sequence_parallel is {size}, and algorithm.distillation.servers are given: each rank of "
                "a row would ask for the same scores and might get others; set it to 1, or let a teacher in this "
                "process score"
            )
        if config.environment.name is not None:
            yield (
                f"environment.name is {config.environment.name}, and algorithm.distillation.servers are given, "
                "which score responses without observations: let a teacher in this process score"
            )


def of_token_log_probs(config: Config) -> Iterator[str]:
    """Check that the log-probs of more ids than the sampled one are asked of a head that computes them."""
    if config.rollout.top_k:
        others = {
            "model.fused_head": config.model.fused_head,
            "algorithm.distillation.top_k": config.algorithm.distillation.top_k,
            "environment.name": config.environment.name,
        }
        for key, value in others.items():
            if value:
                yield (
                    f"rollout.top_k is {config.rollout.top_k}, and {key} is {value}: not built for log-probs over "
                    "kept ids; leave one of them out"
                )
    if config.model.fused_head and config.algorithm.distillation.top_k:
        yield (
            f"model.fused_head is true, and algorithm.distillation.top_k is {config.algorithm.distillation.top_k}: "
            "the kernels compute the log-probs of one id a token; leave one of them out"
        )


def of_moved_optimizer(config: Config) -> Iterator[str]:
    """Check an optimizer that leaves the card while responses are sampled."""
    if config.rollout.offload_optimizer:
        if config.train.zero_stage < 2:
            yield (
                f"rollout.offload_optimizer is true, and train.zero_stage is {config.train.zero_stage}: only the "
                "optimizers of ZeRO 2 and 3 can be moved; set train.zero_stage=2, or leave it out"
            )
        for key in ("offload_optimizer", "offload_param"):
            if (device := config.train.offload_device(key)) != "none":
                yield (
                    f"rollout.offload_optimizer is true, and train.deepspeed.zero_optimization.{key}.device is "
                    f"{device}: DeepSpeed keeps it there all the time; leave one of them out"
                )


def of_sampled_log_probs(config: Config) -> Iterator[str]:
    """Check the sampler's log-probs in place of the learner's."""
    if config.train.old_logprobs == "sampler":
        if config.algorithm.rejection is not None:
            yield (
                f"train.old_logprobs is sampler, and algorithm.rejection is {config.algorithm.rejection}: the "
                "learner's own log-probs, which it compares, are not computed; use train.old_logprobs=learner"
            )
        if config.rollout.quantization:
            yield (
                f"train.old_logprobs is sampler, and rollout.quantization is {config.rollout.quantization}: the "
                "truncated importance correction, which stands for the rounding, needs the learner's own "
                "log-probs; use train.old_logprobs=learner"
            )
        for key in ("carry_over", "ahead"):
            if value := getattr(config.rollout, key):
                yield (
                    f"train.old_logprobs is sampler, and rollout.{key} is {value}: the sampler's log-probs of "
                    "older tokens are those of the weights that sampled them, and the ratio would be clipped by "
                    "their age; use train.old_logprobs=learner"
                )


def of_batches_and_rows(config: Config) -> Iterator[str]:
    """Check that mini-batches fit into a step, and responses into rows."""
    prompts, mini = config.rollout.prompts_per_step, config.train.mini_batch_prompts
    if mini > prompts:
        yield (
            f"train.mini_batch_prompts ({mini}) is above rollout.prompts_per_step ({prompts}): "
            "a mini-batch is a part of the rollout batch; lower the first or raise the second"
        )
    row = config.trained_tokens
    if config.train.micro_batch_tokens < row:
        of_what = (
            "rollout.max_tokens + environment.max_observed_tokens" if config.observed_tokens else "rollout.max_tokens"
        )
        yield (
            f"train.micro_batch_tokens ({config.train.micro_batch_tokens}) is below {of_what} ({row}): "
            "a response is never split, so a packed row must hold the longest one"
        )
    if config.reward.overlong_buffer > config.rollout.max_tokens:
        yield (
            f"reward.overlong_buffer ({config.reward.overlong_buffer}) is above rollout.max_tokens "
            f"({config.rollout.max_tokens}): every response would be penalised"
        )
