"""Bytes that a rank needs on its device, by formula.

Bytes per parameter follow the ZeRO paper (arXiv 1910.02054, section 3) for DeepSpeed's optimizers. Activations are
counted from what a decoder layer keeps for its backward pass; attention needs no mask, and what its own backward pass
makes is less than the MLP's tensors that are freed by then. Not included: what the allocator wastes, NCCL's buffers.
The engine's CUDA graphs are part of its share, and stay while it sleeps. Leave a tenth of the card free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from vlm_rl.config import Checkpointing, Config, ModelPart, TrainConfig
from vlm_rl.data.vision.family import vision_of
from vlm_rl.learner.architectures import active_window, family_of
from vlm_rl.learner.attention.linear import CHUNK
from vlm_rl.learner.checkpoint_size import checkpoint_bytes
from vlm_rl.learner.head import bytes_per_logit, chunk_rows
from vlm_rl.learner.lora import num_adapter_parameters, target_layers
from vlm_rl.learner.quantization import BITS_PER_WEIGHT
from vlm_rl.learner.row_sums import are_summed_here
from vlm_rl.model_files.fp8 import is_in_fp8
from vlm_rl.model_files.model_folder import layer_configs
from vlm_rl.model_files.routers import chosen_experts

MERGER_COPIES = 5  # of a patch's hidden state: its norm in and out, the two sides of the activation, the output

# DeepSpeed's defaults of stage3_max_live_parameters and reduce_bucket_size, in elements.
_LIVE_PARAMETERS, _BUCKET = 1e9, 5e8


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank's device, and in host memory."""

    weights: int = 0
    gradients: int = 0  # with the float32 sums of what this rank holds of them
    optimizer: int = 0  # moments and float32 master weights; 0 if they are in host memory
    activations: int = 0  # of one full packed row, or this rank's share of it, with all of its images
    head: int = 0  # chunks of logits; the head's weight gradient in float32, and one product for it
    buckets: int = 0  # what DeepSpeed collects gradients in before it sums them over the ranks
    frozen: int = 0  # weights of the KL term's reference and of a teacher, as far as they stay on the device
    scoring: int = 0  # weights of the larger one of those that come from host memory to score
    engine_weights: int = 0  # the rollout engine's own copy, or this rank's part of it
    kv_cache: int = 0  # of all responses side by side, each at its longest
    between: int = 0  # of gradients and buckets, what DeepSpeed holds between two updates too
    is_served: bool = False  # engine and cache are on rollout servers, not on this device
    is_portable: bool = False  # the engine is transformers', which takes no share of a card and lets nothing wait
    is_moved: bool = False  # the optimizer is in host memory while responses are sampled
    loading: int = 0  # in host memory, while the model is loaded
    host_optimizer: int = 0  # what offloading keeps in host memory, all the time or while responses are sampled
    host_weights: int = 0  # this rank's shards where DeepSpeed offloads them
    host_frozen: int = 0  # weights of reference and teacher that wait there
    host_engine: int = 0  # what a sleeping engine keeps: transformers' its model, vLLM's the base of adapters
    checkpoint_copies: int = 0  # in host memory of all ranks together, while an asynchronous save is written

    def parts(self) -> dict[str, int]:
        """Return the bytes of the update phase by what they are for."""
        names = ("weights", "gradients", "optimizer", "activations", "head", "buckets", "frozen")
        return {name: getattr(self, name) for name in names}

    @property
    def update(self) -> int:
        """Return the bytes while the learner trains and the engine sleeps."""
        return sum(self.parts().values())

    @property
    def scored(self) -> int:
        """Return the bytes while reference or teacher score, before the update: no activations are kept then."""
        return self.weights + self.between + self.optimizer + self.head + self.frozen + self.scoring

    @property
    def rollout(self) -> int:
        """Return the bytes while the engine samples, before its first key-value block."""
        return self.kept + (0 if self.is_served else self.engine_weights)

    @property
    def host(self) -> int:
        """Return the bytes in host memory once the model is loaded, without a save's copies."""
        return self.host_optimizer + self.host_weights + self.host_engine + self.host_frozen

    @property
    def kept(self) -> int:
        """Return the bytes that the learner keeps while the engine samples."""
        return self.weights + self.between + (0 if self.is_moved else self.optimizer) + self.frozen


class ModelSizes:
    """What a plan counts of a model, each once. Its weights may be on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Count nothing yet."""
        self.model, self.config = model, model.config

    @cached_property
    def by_part(self) -> Mapping[ModelPart, int]:
        """Return the number of parameters of each part that the model has."""
        family = family_of(self.config)
        counts = dict.fromkeys(family.parts, 0)
        for name, parameter in self.model.named_parameters():
            counts[family.part_of(name)] += parameter.numel()
        return counts

    @cached_property
    def total(self) -> int:
        """Return the number of parameters, without adapters."""
        return sum(self.by_part.values())

    @cached_property
    def saved_by_fp8(self) -> int:
        """Return the bytes by which an engine's copy in bfloat16 shrinks where it rounds to FP8."""
        matrices = [matrix for name, matrix in self.model.named_parameters() if is_in_fp8(name)]
        return sum(matrix.numel() - 4 * len(matrix) for matrix in matrices)  # a float32 scale for each row

    @cached_property
    def largest(self) -> int:
        """Return the number of elements of the largest tensor."""
        return max(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def head(self) -> int:
        """Return the number of parameters of the output head."""
        head: Any = self.model.get_output_embeddings()
        return sum(parameter.numel() for parameter in head.parameters())

    @cached_property
    def has_head_norms(self) -> bool:
        """Tell whether queries and keys are normalized, as in Qwen3."""
        return any("q_norm" in name for name, _ in self.model.named_parameters())

    def count(self, config: Config) -> tuple[int, int]:
        """Return how many parameters the learner has, and how many of them it trains."""
        if config.model.lora is not None:
            adapters = num_adapter_parameters(self.model, config.model.lora)
            return self.total + adapters, adapters
        return self.total, sum(n for part, n in self.by_part.items() if part not in config.model.freeze)


def _trains(part: ModelPart, config: Config) -> bool:
    """Return whether weights of this part of the model, or adapters in it, are trained."""
    lora = config.model.lora
    return part in lora.targets if lora is not None else part not in config.model.freeze


def memory_of_rank(
    config: Config,
    sizes: ModelSizes,
    dtype: torch.dtype,
    ranks: int,
    *,
    patched: bool,
    on_gpu: bool,
    teacher: int = 0,
) -> Memory:
    """Return the plan of a rank's memory.

    Args:
        config: of the run.
        sizes: of its model.
        dtype: of the weights.
        ranks: of the run.
        patched: whether layer patches are used.
        on_gpu: whether the device is a GPU, which holds buckets of gradients whole.
        teacher: parameters of a teacher that is no part of the model.
    """
    stage = config.train.zero_stage
    total, trainable = sizes.count(config)
    lora = config.model.lora
    part = -(-trainable // ranks)  # of one rank, where something is divided
    moments = 8 if config.train.optimizer == "adamw" else 0
    if stage == 0:
        optimizer = moments * trainable
        gradients = dtype.itemsize * trainable
    else:
        optimizer = (moments + 4) * part
        held = part if stage >= 2 else trainable  # by ZeRO 1 until the step ends, when they are summed over the ranks
        gradients = (dtype.itemsize + (4 if dtype != torch.float32 else 0)) * held
    longest = config.data.max_prompt_tokens + config.trained_tokens
    activations, head = _activations(config, sizes, dtype, patched=patched), _head(config, sizes, dtype)
    buckets = _buckets(config.train, dtype, trainable)
    if are_summed_here(config.train, dtype, ranks):
        of_one = dtype.itemsize * sizes.largest if lora is None else 0  # an adapter's is small
        gradients, buckets = 4 * trainable + of_one, 0
    if not on_gpu:  # it takes only the pages that are filled, while activations are freed
        buckets = max(0, min(buckets, dtype.itemsize * trainable) - activations - head)
    loaded = min(total, -(-total // ranks) + sizes.largest) if stage == 3 else total
    saved = sizes.saved_by_fp8 if config.rollout.quantization is not None else 0
    engine = (dtype.itemsize * sizes.total - saved) // config.rollout.tensor_parallel
    is_portable = config.rollout.sampler == "transformers"
    is_offloaded = optimizer_is_offloaded(config.train)
    host_optimizer = optimizer if config.rollout.offload_optimizer else 0
    if is_offloaded:
        # The step is taken there on float32 gradients, which ZeRO 3 also sums there and not on the device.
        host_optimizer = optimizer + (8 if stage == 3 else 4) * part
        gradients = 0 if stage == 3 else gradients
    between = 0
    if stage == 1 and dtype == torch.bfloat16:
        between = 4 * trainable  # its float32 sums
    elif stage == 3:
        between = (0 if is_offloaded else 4 * part) + buckets
    return Memory(
        weights=dtype.itemsize * int(min(-(-total // ranks) if stage == 3 else total, most_resident(config.train)))
        - _saved_by_4bit(config, sizes, dtype),
        gradients=gradients,
        optimizer=0 if is_offloaded else optimizer,
        activations=activations,
        head=head,
        buckets=buckets,
        engine_weights=engine,
        kv_cache=side_by_side(config, ranks)
        * cache_bytes(sizes.config, longest, dtype, ranks=config.rollout.tensor_parallel),
        between=between,
        **_frozen(config, dtype, ranks, [0 if lora is not None else total, teacher], on_gpu=on_gpu),
        is_served=config.rollout.sampler == "server",
        is_portable=is_portable,
        is_moved=config.rollout.offload_optimizer,
        loading=dtype.itemsize * loaded,
        host_optimizer=host_optimizer,
        host_weights=dtype.itemsize * -(-total // ranks) if most_resident(config.train) < math.inf else 0,
        host_engine=engine if on_gpu and (is_portable or (lora is not None and lora.sync == "adapter")) else 0,
        checkpoint_copies=checkpoint_bytes(
            config.train, dtype, total=total, trainable=trainable, lora=lora is not None, on_gpu=on_gpu
        )
        if config.checkpoint.async_save
        else 0,
    )


def _frozen(
    config: Config, dtype: torch.dtype, ranks: int, parameters: Sequence[int], *, on_gpu: bool
) -> dict[str, int]:
    """Return the bytes of the KL term's reference and of the teacher, where the run has them, by field of Memory."""
    algorithm = config.algorithm
    is_there = algorithm.kl_coef > 0, algorithm.distillation.teacher is not None
    reference, teacher = (dtype.itemsize * n * there for n, there in zip(parameters, is_there, strict=True))
    if config.train.zero_stage == 3:
        return {"frozen": -(-reference // ranks) + -(-teacher // ranks)}
    staying = 0 if algorithm.distillation.offload else teacher
    if not on_gpu:  # the device is the host's memory
        return {"frozen": reference + teacher}
    waiting = (reference, teacher - staying)
    return {"frozen": staying, "scoring": max(waiting), "host_frozen": sum(waiting)}


def _buckets(config: TrainConfig, dtype: torch.dtype, trainable: int) -> int:
    """Return the bytes of DeepSpeed's bucket of gradients, whole in ZeRO 1 to 3; ZeRO 1 sums in float32."""
    size = int(_zero_number(config, "reduce_bucket_size", _BUCKET))
    if config.zero_stage == 0:
        return dtype.itemsize * min(size, trainable)
    return (torch.float32 if config.zero_stage == 1 else dtype).itemsize * size


def _head(config: Config, sizes: ModelSizes, dtype: torch.dtype) -> int:
    """Return the bytes of the output head: its chunks of logits, and what the gradient of its weight takes."""
    text = sizes.config.get_text_config()
    way: Any = {
        "fused": config.model.fused_head,
        "soft_cap": getattr(text, "final_logit_softcapping", None) is not None,
    }
    # Those of a row's tokens that predict a response may be on one rank of those that share it.
    rows = min(share_tokens(config), chunk_rows(text.vocab_size, dtype, **way))
    chunks = rows * text.vocab_size * bytes_per_logit(dtype, **way)
    # Ids of a teacher or of what was kept are int64, with four float32: log-probs, a gradient, an exponential.
    most = max(config.algorithm.distillation.top_k, config.rollout.top_k)
    chunks += row_tokens(config) * most * (8 + 4 * 4)  # of the whole row on each rank
    if config.model.lora is not None or "language_model" in config.model.freeze:
        return chunks
    return chunks + (4 + dtype.itemsize) * sizes.head  # the product, then a copy in its place


def row_tokens(config: Config) -> int:
    """Return the tokens of a full row."""
    return max(config.train.micro_batch_tokens, config.data.max_prompt_tokens + config.trained_tokens)


def share_tokens(config: Config) -> int:
    """Return the tokens of a full row that one rank has, where ranks share it."""
    return -(-row_tokens(config) // config.train.sequence_parallel)


def row_images(config: Config) -> int:
    """Return how many images of data.max_pixels are planned for a row: one for each prompt of full length."""
    return row_tokens(config) // config.data.max_prompt_tokens


def _saved_by_4bit(config: Config, sizes: ModelSizes, dtype: torch.dtype) -> int:
    """Return the bytes by which the language model's linear layers shrink where they are kept in 4 bits."""
    if config.model.lora is None or not config.model.lora.load_in_4bit:
        return 0
    layers = map(sizes.model.get_submodule, target_layers(sizes.model, ["language_model"]))
    count = sum(layer.get_parameter("weight").numel() for layer in layers)
    return int(count * (dtype.itemsize - BITS_PER_WEIGHT / 8))


def most_resident(config: TrainConfig) -> float:
    """Return how many parameters are on the device at most; those that ZeRO 3 offloads come layer by layer."""
    if config.zero_stage < 3 or config.offload_device("offload_param") == "none":
        return math.inf
    return _zero_number(config, "stage3_max_live_parameters", _LIVE_PARAMETERS)


def _zero_number(config: TrainConfig, key: str, default: float) -> float:
    """Return a number of DeepSpeed's zero_optimization; auto is DeepSpeed's default."""
    value = config.deepspeed.get("zero_optimization", {}).get(key, "auto")
    return default if value == "auto" else value


def optimizer_is_offloaded(config: TrainConfig) -> bool:
    """Tell whether DeepSpeed keeps masters and moments in host memory and takes the step there."""
    return config.offload_device("offload_optimizer") != "none"


def side_by_side(config: Config, ranks: int) -> int:
    """Return how many responses one engine samples at the same time."""
    r = config.rollout
    engines = 1 if r.sampler == "server" else max(1, ranks // r.tensor_parallel)  # one server may get them all
    return min(r.batch_size, -(-r.prompts_per_step // engines) * r.responses_per_prompt)


def cache_bytes(config: Any, tokens: int, dtype: torch.dtype, *, ranks: int = 1) -> int:
    """Return the bytes of the cache of one sequence of so many tokens, on each of the ranks that share an engine.

    A layer keeps keys and values of all tokens, or of those in its window. Linear attention keeps a state in
    float32, and the last inputs of its convolution.

    Args:
        config: the model's, of transformers.
        tokens: of the sequence.
        dtype: of keys and values.
        ranks: that share the engine.
    """
    text = config.get_text_config()
    window = active_window(config) or tokens
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    kept = {"full_attention": tokens, "sliding_attention": min(window, tokens), "linear_attention": 0}
    layers = layer_configs(text)
    distinct = {id(layer): layer for layer in layers}  # most types have one, and its attributes are slow to read
    heads = {key: _kv_heads(layer) for key, layer in distinct.items()}
    widths = {key: heads[key] * _head_width(layer) for key, layer in distinct.items()}
    numbers = zip((widths[id(layer)] for layer in layers), kinds, strict=True)
    size = 2 * dtype.itemsize * sum(width * kept.get(kind, tokens) for width, kind in numbers)
    if num_linear := num_linear_layers(text):
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        convolution = (2 * keys + values) * text.linear_conv_kernel_dim * dtype.itemsize
        size += num_linear * (values * text.linear_key_head_dim * torch.float32.itemsize + convolution)
    return size // min(ranks, *heads.values())  # each rank has whole heads


def _kv_heads(text: Any) -> int:
    """Return the heads of keys and values, which an older type does not share."""
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _head_width(text: Any) -> int:
    """Return the width of an attention head; Qwen3's is wider than its share of the hidden size."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _mlp_width(text: Any) -> int:
    """Return the width of a layer's MLP, or of the experts that a token is given to, all together."""
    dense = getattr(text, "intermediate_size", 4 * text.hidden_size)
    if not (chosen := chosen_experts(text)):
        return dense
    width = getattr(text, "moe_intermediate_size", dense)
    shared = getattr(text, "shared_expert_intermediate_size", None) or getattr(text, "n_shared_experts", 0) * width
    beside = dense if getattr(text, "enable_moe_block", False) else 0  # Gemma 4 has experts and an MLP
    return chosen * width + shared + beside


def _activations(config: Config, sizes: ModelSizes, dtype: torch.dtype, *, patched: bool) -> int:
    """Return the bytes that the forward pass of one full row keeps: text, its pixels, its images in tower and merger.

    Of the text where ranks share a row, this rank's part; each of them computes all images.
    """
    text = sizes.config.get_text_config()
    ranks = config.train.sequence_parallel
    stack_bytes = partial(
        stack_bytes_per_token,
        dtype=dtype,
        patched=patched,
        checkpointed=config.model.gradient_checkpointing,
        offloaded=config.model.offload_activations,
    )
    widest = max(layer_configs(text), key=_head_width)
    head = _head_width(widest)
    size = share_tokens(config) * stack_bytes(
        hidden=widest.hidden_size,
        heads=widest.num_attention_heads,
        query=head * widest.num_attention_heads,
        kv=head * max(_kv_heads(widest), ranks),  # a rank has one head of keys at least, of all tokens
        exchanged=ranks > 1,
        mlp=_mlp_width(widest),
        layers=text.num_hidden_layers,
        linear_layers=num_linear_layers(text),
        linear=linear_bytes_per_token(text, dtype),
        has_head_norms=sizes.has_head_norms,
    )
    family = vision_of(sizes.config)
    if family is None:
        return size
    tower = family.tower_size(sizes.config, max_pixels=config.data.max_pixels)
    patches = row_images(config) * tower.patches
    size += patches * tower.patch_values * dtype.itemsize
    if _trains("tower", config) or _trains("merger", config):
        size += patches * MERGER_COPIES * tower.hidden * dtype.itemsize
    if _trains("tower", config):
        size += patches * stack_bytes(
            hidden=tower.hidden,
            heads=tower.heads,
            query=tower.hidden,
            kv=tower.hidden,
            mlp=tower.mlp,
            layers=tower.layers,
        )
    return size


def num_linear_layers(text: Any) -> int:
    """Return how many layers of a language model have linear attention of transformers' GatedDeltaNet."""
    has_sizes = hasattr(text, "linear_num_key_heads")
    return (getattr(text, "layer_types", None) or ()).count("linear_attention") if has_sizes else 0


def linear_bytes_per_token(text: Any, dtype: torch.dtype) -> int:
    """Return the bytes per token that linear attention keeps for its backward pass; 0 for a model without any.

    Counted from transformers' layer and the kernels of flash-linear-attention and causal-conv1d, which no GPU has run
    here; the loops in torch that stand in for them keep more. A layer keeps:

    - the inputs of the convolution, which computes its activation again;
    - of the delta rule queries and keys, of as many heads as the values have, and the values, copied into batches of
      prompts and responses (what fills these up is not counted); for each head a row of a chunk's matrix, its
      share, two float32 norms, and the float32 decay, also before its softplus;
    - of the gated norm, which is transformers' own, its input, the normalized input, that times the weight, the gate
      and its SiLU. In bfloat16 the input, the gate and the SiLU are float32 copies;
    - the input of the last projection.
    """
    if not num_linear_layers(text):
        return 0
    heads = text.linear_num_value_heads
    values = heads * text.linear_value_head_dim
    convolution = 2 * text.linear_num_key_heads * text.linear_key_head_dim + values
    rule = 2 * heads * text.linear_key_head_dim + values + heads * (CHUNK + 1)
    norm = 5 * values if dtype == torch.float32 else 8 * values  # a float32 copy counts two
    statistics = 4 * 5 * heads  # bytes: two norms and two decays of the rule's, one rate of the gated norm's
    return (convolution + rule + norm + values) * dtype.itemsize + statistics


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
    checkpointed: Checkpointing,
    linear_layers: int = 0,
    linear: int = 0,
    offloaded: bool = False,
    has_head_norms: bool = False,
    exchanged: bool = False,
) -> int:
    """Return the bytes per token that a stack of decoder layers keeps for its backward pass.

    A layer has two RMS norms, grouped attention and a gated MLP. Patched (learner/attention/lean_layers) it keeps:

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
        linear_layers: how many of them have linear attention in place of grouped attention.
        linear: bytes per token that its linear attention keeps, see linear_bytes_per_token.
        dtype: of weights and activations.
        patched: whether norms and MLPs are ours.
        checkpointed: model.gradient_checkpointing. Of auto the most is counted that it recomputes: where nothing is
            known of the card, whether a run fits does not depend on more.
        offloaded: whether the inputs that it keeps are in host memory.
        has_head_norms: whether queries and keys are normalized too, as in Qwen3; their outputs are not kept.
        exchanged: whether ranks share a row: attention keeps its output, and the projection behind it what the
            exchange makes of that.
    """
    if not layers:
        return 0
    norm = 2 if patched else 3 if dtype == torch.float32 else 4  # a float32 copy counts two
    mlps = (3 if patched else 4) * mlp * dtype.itemsize
    attention = ((3 if exchanged else 2) * query + 2 * kv) * dtype.itemsize
    attention += 4 * heads  # its log-sum-exp
    if has_head_norms:
        attention += (norm - 1) * (query + kv) * dtype.itemsize
        attention += 4 * (heads + heads * kv // query)  # the rate of each norm of a head
    beside = 2 * norm * hidden * dtype.itemsize + mlps
    whole = layers * beside + (layers - linear_layers) * attention + linear_layers * linear
    largest = beside + max(attention if linear_layers < layers else 0, linear if linear_layers else 0)
    if not checkpointed:
        return whole
    if checkpointed == "mlp":
        return whole - (layers - 1) * mlps
    return largest if offloaded else layers * hidden * dtype.itemsize + largest
