"""What a run will need: parameters, memory per rank and tokens per step, before anything is loaded.

    plan = dry_run(load_config("configs/virl39k_luspo_7b.yaml"), num_ranks=8)
    print_dry_run(plan)

The model is built on the meta device, which holds shapes and no numbers, from the local folder's config.json,
or else from the copy of it that we ship for a few published models. Bytes per parameter follow the ZeRO paper
(arXiv 1910.02054, section 3) for DeepSpeed's optimizers. Activations are counted from what a decoder layer
keeps for its backward pass. Allocator overhead and communication buffers are not included: leave a tenth of
the card free.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config, ModelPart, TrainConfig
from vlm_rl.data.model_folder import SHIPPED, check_context, read_model_config
from vlm_rl.distributed import model_dtype
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import (
    PADDED_COST,
    active_window,
    check_architecture,
    check_parts,
    family_of,
    is_padded,
)
from vlm_rl.learner.deepspeed import check_zero_stage, deepspeed_block
from vlm_rl.learner.layer_patches import is_patched
from vlm_rl.learner.lora import num_adapter_parameters, target_layers
from vlm_rl.learner.policy import MAX_LOGITS
from vlm_rl.run.terminal import make_console

_GIB = 2**30
LOGIT_COPIES = 4  # float32: the scaled logits, the masked ones, their log-softmax, its gradient
_LIVE_PARAMETERS = 1e9  # DeepSpeed's default of stage3_max_live_parameters
_RANKS_SHOWN = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank's device."""

    weights: int
    gradients: int  # with the float32 copy of this rank's part that the optimizer step makes
    optimizer: int  # moments and float32 master weights
    activations: int  # of one full packed row, images and output head included
    engine_weights: int  # the rollout engine's own copy
    kv_cache: int  # of all responses side by side, each at its longest
    is_served: bool = False  # engine and cache are on rollout servers, not on this device

    @property
    def update(self) -> int:
        """Return the bytes while the learner trains and the engine sleeps."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def rollout(self) -> int:
        """Return the bytes while the engine samples, before its first key-value block."""
        return self.weights + self.optimizer + (0 if self.is_served else self.engine_weights)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one configuration needs on a number of ranks."""

    config: Config
    num_ranks: int
    model_source: str
    dtype: torch.dtype
    is_patched: bool  # layers of ours in place of transformers' own
    num_parameters: int
    num_trainable: int
    num_parameters_of: Mapping[ModelPart, int]
    is_padded: bool  # each response behind a copy of its prompt
    num_adapted: int  # linear layers with an adapter
    memory: Memory
    memory_by_ranks: Mapping[int, Memory]
    responses_side_by_side: int  # on one rank
    kv_bytes_per_token: int
    responses_per_step: int
    max_prompt_tokens_per_step: int
    max_response_tokens_per_step: int
    updates_per_step: int
    optimizer_steps: int
    deepspeed: Mapping[str, Any]


def dry_run(config: Config, *, num_ranks: int | None = None) -> DryRun:
    """Compute what the run needs on ``num_ranks`` ranks; None is torchrun's WORLD_SIZE, or 1.

    A model of which only the configuration is here is assumed to be trained on an accelerator.

    Raises UserError for an unknown algorithm, a model that is neither local nor shipped, and for combinations
    that training would refuse.
    """
    resolve_algorithm(config.algorithm)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if num_ranks is None else num_ranks
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; it must be at least 1")
    source, raw = read_model_config(config.model.path)
    model = _build(raw, source)
    check_context(
        model.config,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.max_tokens,
        settings="data.max_prompt_tokens + rollout.max_tokens",
    )
    check_architecture(model.config, path=source, rows=config.model.rows)
    check_parts(model.config, freeze=config.model.freeze, lr_by_part=config.train.lr_by_part)
    on_gpu = source.startswith(str(SHIPPED)) or torch.cuda.is_available()
    dtype = model_dtype(torch.device("cuda" if on_gpu else "cpu"), config.model.dtype)
    check_zero_stage(config.train.zero_stage, dtype)
    patched = is_patched(config.model.layer_patches, on_gpu=on_gpu)
    r, t = config.rollout, config.train
    updates = -(-r.prompts_per_step // t.mini_batch_prompts)
    total, trainable = _parameters(config, model)
    lora = config.model.lora
    padded = is_padded(model.config, config.model.rows)
    copies = r.responses_per_prompt if padded else 1  # of a prompt
    return DryRun(
        config=config,
        num_ranks=ranks,
        model_source=source,
        dtype=dtype,
        is_patched=patched,
        num_parameters=total,
        num_trainable=trainable,
        num_parameters_of=_parameters_by_part(model),
        is_padded=padded,
        num_adapted=len(target_layers(model, lora.targets)) if lora else 0,
        memory=_memory(config, model, dtype, ranks, patched=patched),
        memory_by_ranks={
            n: _memory(config, model, dtype, n, patched=patched) for n in sorted({*_RANKS_SHOWN, ranks})
        },
        responses_side_by_side=_side_by_side(config, ranks),
        kv_bytes_per_token=cache_bytes(model.config, 1, dtype) - cache_bytes(model.config, 0, dtype),
        responses_per_step=r.prompts_per_step * r.responses_per_prompt,
        max_prompt_tokens_per_step=r.prompts_per_step * config.data.max_prompt_tokens * copies,
        max_response_tokens_per_step=r.prompts_per_step * r.responses_per_prompt * r.max_tokens,
        updates_per_step=updates,
        optimizer_steps=updates * t.steps,
        deepspeed=deepspeed_block(t, dtype),
    )


# -- the model ------------------------------------------------------------------------------------


def _build(raw: Mapping[str, Any], source: str) -> PreTrainedModel:
    """Return the model on the meta device."""
    if "auto_map" in raw:
        raise UserError(f"model.path: {source} has an auto_map, which asks to run code that comes with the model")
    try:
        config = AutoConfig.for_model(**raw)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the values in the file lead to
        reason = " ".join(str(error).split())
        raise UserError(f"model.path: no model can be built from {source}: {reason:.300}") from None


def _is_vision(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "vision_config")


def _parameters_by_part(model: PreTrainedModel) -> dict[ModelPart, int]:
    """Return the number of parameters of each part that the model has."""
    family = family_of(model.config)
    counts = dict.fromkeys(family.parts, 0)
    for name, parameter in model.named_parameters():
        counts[family.part_of(name)] += parameter.numel()
    return counts


def _parameters(config: Config, model: PreTrainedModel) -> tuple[int, int]:
    """Return how many parameters the learner has, and how many of them it trains."""
    by_part = _parameters_by_part(model)
    total = sum(by_part.values())
    if config.model.lora is not None:
        adapters = num_adapter_parameters(model, config.model.lora)
        return total + adapters, adapters
    return total, sum(count for part, count in by_part.items() if part not in config.model.freeze)


def _trains_tower(config: Config) -> bool:
    """Return whether the backward pass goes through the vision tower."""
    lora = config.model.lora
    return "tower" in lora.targets if lora is not None else "tower" not in config.model.freeze


# -- memory ---------------------------------------------------------------------------------------


def _memory(config: Config, model: PreTrainedModel, dtype: torch.dtype, ranks: int, *, patched: bool) -> Memory:
    stage = config.train.zero_stage
    total, trainable = _parameters(config, model)
    part = -(-trainable // ranks)  # of one rank, where something is divided
    moments = 8 if config.train.optimizer == "adamw" else 0
    if stage == 0:
        optimizer = moments * trainable
        gradients = dtype.itemsize * trainable
    else:
        optimizer = (moments + 4) * part
        gradients = dtype.itemsize * (part if stage >= 2 else trainable)
        gradients += 4 * part if dtype != torch.float32 else 0
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    return Memory(
        weights=dtype.itemsize * int(min(-(-total // ranks) if stage == 3 else total, _most_resident(config.train))),
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(config, model, dtype, patched=patched),
        engine_weights=dtype.itemsize * sum(p.numel() for p in model.parameters()),
        kv_cache=_side_by_side(config, ranks) * cache_bytes(model.config, longest, dtype),
        is_served=config.rollout.sampler == "server",
    )


def _most_resident(config: TrainConfig) -> float:
    """Return how many parameters are on the device at most; those that ZeRO 3 offloads come layer by layer."""
    zero = config.deepspeed.get("zero_optimization", {})
    if config.zero_stage < 3 or zero.get("offload_param", {}).get("device", "none") == "none":
        return math.inf
    return zero.get("stage3_max_live_parameters", _LIVE_PARAMETERS)


def _side_by_side(config: Config, ranks: int) -> int:
    r = config.rollout
    engines = 1 if r.sampler == "server" else ranks  # one server may get them all
    return min(r.batch_size, -(-r.prompts_per_step // engines) * r.responses_per_prompt)


def cache_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the cache of one sequence of so many tokens.

    A layer keeps keys and values of all tokens, or of those in its window. Linear attention keeps a state in
    float32, and the last inputs of its convolution.
    """
    text = config.get_text_config()
    window = active_window(config) or tokens
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    kept = {"full_attention": tokens, "sliding_attention": min(window, tokens), "linear_attention": 0}
    size = 2 * _kv_heads(text) * _head_width(text) * dtype.itemsize * sum(kept.get(kind, tokens) for kind in kinds)
    if (num_linear := kinds.count("linear_attention")) and hasattr(text, "linear_num_key_heads"):
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        convolution = (2 * keys + values) * text.linear_conv_kernel_dim * dtype.itemsize
        size += num_linear * (values * text.linear_key_head_dim * torch.float32.itemsize + convolution)
    return size


def _kv_heads(text: Any) -> int:
    """Return the heads of keys and values, which an older type does not share."""
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _head_width(text: Any) -> int:
    """Return the width of an attention head; Qwen3's is wider than its share of the hidden size."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _mlp_width(text: Any) -> int:
    """Return the width of a layer's MLP, or of the experts that a token is given to, all together."""
    if not (experts := getattr(text, "num_experts_per_tok", None)):
        return getattr(text, "intermediate_size", 4 * text.hidden_size)
    width = getattr(text, "moe_intermediate_size", text.intermediate_size)
    return experts * width + (getattr(text, "shared_expert_intermediate_size", None) or 0)


def _activations(config: Config, model: PreTrainedModel, dtype: torch.dtype, *, patched: bool) -> int:
    """Return the bytes that the forward pass of one full row keeps: text, one image of max_pixels, output head.

    A layer of linear attention is counted as one that attends.
    """
    text = model.config.get_text_config()
    tokens = max(config.train.micro_batch_tokens, config.data.max_prompt_tokens + config.rollout.max_tokens)
    stack_bytes = partial(
        stack_bytes_per_token,
        dtype=dtype,
        patched=patched,
        checkpointed=config.model.gradient_checkpointing,
        offloaded=config.model.offload_activations,
    )
    head = _head_width(text)
    size = tokens * stack_bytes(
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        query=head * text.num_attention_heads,
        kv=head * _kv_heads(text),
        mlp=_mlp_width(text),
        layers=text.num_hidden_layers,
        has_head_norms=any("q_norm" in name for name, _ in model.named_parameters()),
    )
    if _is_vision(model) and _trains_tower(config):
        vision = model.config.vision_config
        is_qwen2_vl = vision.model_type.startswith("qwen2_vl")  # whose hidden_size is the language model's
        width = vision.embed_dim if is_qwen2_vl else vision.hidden_size
        mlp = int(width * vision.mlp_ratio) if is_qwen2_vl else vision.intermediate_size
        patches = config.data.max_pixels // vision.patch_size**2
        size += patches * stack_bytes(
            hidden=width, heads=vision.num_heads, query=width, kv=width, mlp=mlp, layers=vision.depth
        )
    return size + LOGIT_COPIES * 4 * min(tokens * text.vocab_size, MAX_LOGITS)


def stack_bytes_per_token(
    *,
    hidden: int,
    heads: int,
    query: int,
    kv: int,
    mlp: int,
    layers: int,
    dtype: torch.dtype,
    patched: bool,
    checkpointed: bool,
    offloaded: bool = False,
    has_head_norms: bool = False,
) -> int:
    """Return the bytes per token that a stack of decoder layers keeps for its backward pass.

    A layer has two RMS norms, grouped attention and a gated MLP. Patched (vlm_rl.learner.lean_layers) it keeps:

    - per norm, the input and the output;
    - of attention, the rotated query, the output, which the projection behind it takes as it is, keys, values and
      a float32 log-sum-exp for each head. No mask. Its backward pass makes further tensors, most of them copies for
      the responses: the gradient of the output, query and output copied, their gradients twice and a float32 sum, at
      most 6 hidden + 2 kv elements and 4 hidden bytes. The MLP's tensors are freed by then and were larger;
    - of the MLP, three tensors of its width.

    transformers' own norm also keeps the normalized input, and in bfloat16 a float32 copy of the input instead
    of the input itself; its own MLP also keeps the gate's SiLU. With checkpointing every layer keeps its input
    only, which may be offloaded to the host, and one layer at a time is whole.

    Args:
        hidden: the layers' width.
        heads: the attention's heads of queries.
        query: the width of the queries, all heads together.
        kv: the width of the keys, and of the values.
        mlp: the MLP's width.
        layers: how many there are.
        dtype: of weights and activations.
        patched: whether norms and MLPs are ours.
        checkpointed: whether gradient checkpointing is on.
        offloaded: whether the inputs that it keeps are in host memory.
        has_head_norms: whether queries and keys are normalized too, as in Qwen3; their outputs are not kept.
    """
    if not layers:
        return 0
    norm = 2 if patched else 3 if dtype == torch.float32 else 4  # a float32 copy counts two
    width = 2 * norm * hidden + 2 * query + 2 * kv + (3 if patched else 4) * mlp
    statistics = 4 * heads  # bytes: attention's log-sum-exp, and the rate of each norm of a head
    if has_head_norms:
        width += (norm - 1) * (query + kv)
        statistics += 4 * (heads + heads * kv // query)
    layer = width * dtype.itemsize + statistics
    if not checkpointed:
        return layers * layer
    return layer if offloaded else layers * hidden * dtype.itemsize + layer


# -- printing -------------------------------------------------------------------------------------


def print_dry_run(plan: DryRun) -> None:
    """Print the plan as tables, and the DeepSpeed block as JSON."""
    console = make_console()
    config, t, r = plan.config, plan.config.train, plan.config.rollout
    dtype = str(plan.dtype).removeprefix("torch.")
    console.print(f"model      {Path(config.model.path).name}, {_billions(plan.num_parameters)} parameters, {dtype}")
    lora = config.model.lora
    for part, count in plan.num_parameters_of.items():
        rate = f"lr {t.lr_by_part.get(part, t.lr):g}"
        is_frozen = lora is not None or part in config.model.freeze
        console.print(f"           {part} {_billions(count)} ({'frozen' if is_frozen else rate})")
    if lora is not None:
        adapters = f"rank {lora.rank} on {plan.num_adapted} linear layers"
        console.print(f"           LoRA: {_billions(plan.num_trainable)} parameters trained, {adapters}")
    console.print(f"           built on the meta device from {plan.model_source}")
    batch = f"{r.prompts_per_step} prompts x {r.responses_per_prompt} responses"
    if plan.is_padded:
        console.print(f"rows       padded, {PADDED_COST}")
    console.print(f"algorithm  {config.algorithm.name}, {batch} a step")
    console.print(_memory_table(plan))
    totals = ", ".join(f"{n}: {_gib(m.update)}" for n, m in plan.memory_by_ranks.items())
    console.print(f"update phase by number of ranks, GiB: {totals}")
    console.print(_tokens_table(plan))
    console.print(
        f"optimizer  {plan.updates_per_step} steps per rollout step, {plan.optimizer_steps:,} in all "
        f"({t.optimizer}, lr {t.lr:g}, {t.warmup_steps} warm-up, {t.schedule})"
    )
    console.print("DeepSpeed block:")
    console.print(json.dumps(plan.deepspeed, indent=2))


def _memory_table(plan: DryRun) -> Table:
    m, stage, checkpointing = plan.memory, plan.config.train.zero_stage, plan.config.model.gradient_checkpointing
    many = "rank" if plan.num_ranks == 1 else "ranks"
    table = Table(title=f"memory per rank, ZeRO {stage} on {plan.num_ranks} {many}", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("what it is")
    row = max(
        plan.config.train.micro_batch_tokens, plan.config.data.max_prompt_tokens + plan.config.rollout.max_tokens
    )
    where = "divided" if stage == 3 else "whole on every rank"
    if _most_resident(plan.config.train) < math.inf:
        where = "those in use; ZeRO 3 keeps the others in host memory"
    table.add_row("weights", _gib(m.weights), where)
    table.add_row("gradients", _gib(m.gradients), "divided" if stage >= 2 else "whole on every rank")
    table.add_row("optimizer", _gib(m.optimizer), "divided" if stage >= 1 else "whole on every rank")
    table.add_row(
        "activations",
        _gib(m.activations),
        f"estimate: a row of {row:,} tokens, {'with' if checkpointing else 'without'} gradient checkpointing, "
        f"{'patched' if plan.is_patched else 'unpatched'} layers",
    )
    update = "the sum so far" if m.is_served else "the sum so far; the engine sleeps"
    table.add_row("update phase", _gib(m.update), update, style="bold", end_section=True)
    engine = "on each rollout server, not here" if m.is_served else "the rollout engine's own, dropped in the update"
    table.add_row("engine weights", _gib(m.engine_weights), engine)
    table.add_row("rollout phase", _gib(m.rollout), "with the learner's weights and optimizer", style="bold")
    table.add_row(
        "key-value cache",
        _gib(m.kv_cache),
        f"at most, {'on each server' if m.is_served else 'on top'}: "
        f"{plan.responses_side_by_side} responses side by side at full length, "
        f"{plan.kv_bytes_per_token / 1024:g} KiB a token; with less, some of them wait",
    )
    return table


def _tokens_table(plan: DryRun) -> Table:
    table = Table(title="tokens per rollout step, at most", title_justify="left")
    table.add_column("part")
    table.add_column("tokens", justify="right")
    table.add_column("what it is")
    c, r = plan.config, plan.config.rollout
    prompts, responses = plan.max_prompt_tokens_per_step, plan.max_response_tokens_per_step
    times = f"{r.responses_per_prompt} times, with padded rows" if plan.is_padded else "once per group"
    table.add_row("prompts", f"{prompts:,}", f"{r.prompts_per_step} x {c.data.max_prompt_tokens:,}, {times}")
    table.add_row("responses", f"{responses:,}", f"{plan.responses_per_step:,} x {r.max_tokens:,}")
    table.add_row("per rank", f"{(prompts + responses) // plan.num_ranks:,}", f"of {plan.num_ranks}")
    return table


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size >= 0.01 * _GIB or size == 0 else f"{size / _GIB:.1g}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
