"""The policy: the model, and log-probs and entropies of a packed row's response tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

from vlm_rl.config import LayerPatches, LoraConfig, ModelPart, RowFormat, TrainConfig
from vlm_rl.data.vision.family import vision_of
from vlm_rl.devices import default_device, has_gpu
from vlm_rl.errors import UserError
from vlm_rl.learner import lora
from vlm_rl.learner.architectures import active_window, convolution_width, family_of, is_padded
from vlm_rl.learner.attention import linear, patches
from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.learner.deepspeed import register_reads, sharded_loading
from vlm_rl.learner.head import Head
from vlm_rl.learner.packing import PackedRow, PaddedRows, RowLayout, move, padded_rows, windowed_runs
from vlm_rl.learner.quantization import quantized_loading
from vlm_rl.learner.routing import RouterWatch
from vlm_rl.learner.sequence_parallel import RankGroup, RowShare, check_heads
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.model_files.checkpoint_layout import use_published_layout
from vlm_rl.model_files.model_folder import check_transformers, own_attention
from vlm_rl.model_files.weights import is_used


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    rows: RowFormat = "auto",
    shard_for: TrainConfig | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Load a Hugging Face folder, vision-language or text-only, with the attention that its rows need.

    Every weight and buffer of the returned model is on the device: the self-check computes before DeepSpeed moves
    the model, and DeepSpeed never moves the buffers of a model in shards.

    Args:
        path: the folder.
        dtype: of the weights.
        device: where the model goes; None for this process's GPU, or the CPU without one.
        rows: model.rows; Policy is given the same.
        shard_for: a training whose ZeRO stage 3 shards the model over the ranks as they load it together.
        in_4bit: put the linear layers of the language model in 4 bits.

    Raises UserError for a transformers that is too old.
    """
    device = device or default_device()
    check_transformers()
    if dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # on by default: patches are embedded by a convolution
    disable_progress_bar()  # a bar for every load would bury the run's lines
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_vision = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    vision = "flash_attention_2" if dtype == torch.bfloat16 and is_flash_attn_2_available() else "sdpa"
    text = own_attention(config) if is_padded(config, rows) else attention.NAME
    implementation = {"text_config": text, "vision_config": vision} if is_vision else text
    extra = quantized_loading(_whole_layers(auto, config), dtype, device) if in_4bit else {}
    with sharded_loading(shard_for, dtype):
        model = auto.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=implementation,
            trust_remote_code=False,
            use_safetensors=True,
            **extra,
        )
    use_published_layout(model)
    if not in_4bit:  # loading in 4 bits puts it there
        model.to(device)  # pyright: ignore[reportArgumentType]
    return model


def _whole_layers(auto: Any, config: PreTrainedConfig) -> list[str]:
    """Return the linear layers that are not in 4 bits: the output head, and those outside the language model."""
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=False)
    packed = lora.target_layers(model, ["language_model"])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return sorted({*linear} - {*packed})


class Policy(nn.Module):
    """A causal model that maps a packed row to log-probs and entropies of its response tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        banned_ids: Sequence[int],
        temperature: float,
        layer_patches: LayerPatches = "auto",
        rows: RowFormat = "auto",
        fused_head: bool = False,
    ) -> None:
        """Take the model over, and change it in place.

        Args:
            model: what load_model returned.
            banned_ids: ids that no response contains, at log-prob -inf.
            temperature: the sampler's.
            layer_patches: whether layers of the model are replaced by ours, as in the configuration.
            rows: model.rows.
            fused_head: model.fused_head.

        Raises UserError for an output head that is more than a matrix, or that the fused kernels cannot compute.
        """
        super().__init__()
        self.model = model.train()  # transformers loads in eval mode, which skips checkpointing
        text = model.config.get_text_config()
        self.head = Head(
            model.get_output_embeddings(),
            banned_ids=banned_ids,
            temperature=temperature,
            soft_cap=getattr(text, "final_logit_softcapping", None),
            fused=fused_head,
        )
        for name, parameter in model.named_parameters():
            if not is_used(model.config, name):  # weight decay would still change it
                parameter.requires_grad_(False)
        self.vision = vision_of(model.config)
        register_reads(self, model.base_model.parameters(recurse=False))  # LLaVA-OneVision's features have one
        self.family = family_of(model.config)
        self.window = active_window(model.config)
        self.convolution = convolution_width(model.config)
        self.is_padded = is_padded(model.config, rows)
        if self.is_padded:
            model.get_decoder().register_forward_pre_hook(_pad, with_kwargs=True)
        elif self.convolution is not None:
            linear.install(model)
        self.ranks = RankGroup()  # that compute a row together
        self.offloads = False
        self.base: BaseModel | None = None  # of the adapters, if there are any
        self.routers = RouterWatch(model)
        self._kept: list[tuple[Tensor, Tensor]] = []  # mass and ids that were kept, of rows since `take_kept`
        model.config.use_cache = False
        self.replaced_layers = patches.install(model, layer_patches, on_gpu=has_gpu())

    def freeze(self, parts: Collection[ModelPart]) -> None:
        """Do not train these parts; parts that the model lacks are ignored."""
        for name, parameter in self.model.named_parameters():
            if self.family.part_of(name) in parts:
                parameter.requires_grad_(False)

    def add_adapters(self, config: LoraConfig, *, base: BaseModel, seed: int) -> None:
        """Train adapters and freeze the model itself.

        Args:
            config: the adapters.
            base: where the model comes from, for the checkpoints.
            seed: of the adapters' random half.
        """
        lora.add_adapters(self.model, config, seed=seed)
        self.base = base
        self.register_state_dict_post_hook(_keep_trained)

    def share_rows(self, ranks: RankGroup) -> None:
        """Compute each row on this group of ranks together: all get the same row, and all return the whole result.

        Raises UserError for a model whose rows cannot be divided.
        """
        check_heads(self.model.config, ranks.size, is_padded=self.is_padded)
        self.ranks = self.routers.ranks = ranks
        if ranks.size > 1:
            self.model.get_decoder().register_forward_pre_hook(_take_share, with_kwargs=True)

    @property
    def has_frozen_vision(self) -> bool:
        """Tell whether the model has a vision tower of which nothing is trained."""
        named = self.model.named_parameters()
        return self.vision is not None and not any(
            p.requires_grad for name, p in named if self.family.part_of(name) != "language_model"
        )

    def enable_checkpointing(self, *, offload: bool = False, zero_stage: int = 0, only_mlps: bool = False) -> None:
        """Keep only the layers' inputs for the backward pass, and compute the rest again in it.

        Freeze parts first: a tower that is frozen keeps nothing.

        Args:
            offload: keep the inputs in host memory.
            zero_stage: of the training.
            only_mlps: keep all but what is inside the layers' MLPs.

        Raises UserError if only MLPs are asked for, and the layers have none.
        """
        self.offloads = offload
        if not only_mlps:
            self.model.gradient_checkpointing_enable()
        # ZeRO 3 frees parameters between forward and recomputation, which the non-reentrant variant takes for a
        # change of shape.
        reentrant = zero_stage == 3
        recomputed = partial(_recomputed, reentrant=reentrant, paused=self.routers.paused)
        mlps = _mlps(self.model) if only_mlps else []
        for mlp in mlps:
            mlp.forward = partial(recomputed, mlp.forward)
        for module in self.model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = recomputed  # type: ignore[assignment]
        inputs = [self.model.get_input_embeddings()]
        named = self.model.named_parameters()
        if self.vision is not None:
            tower: Any = self.model.get_submodule(self.family.tower.removesuffix("."))
            if any(p.requires_grad for name, p in named if self.family.part_of(name) == "tower"):
                inputs.append(tower.get_submodule(self.vision.first_layer))
            else:
                tower.gradient_checkpointing_disable()
        if self.base is not None and reentrant:
            # That variant gives gradients to what is inside a layer only if the layer's input has one.
            for module in inputs:
                module.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())

    def forward(
        self,
        row: PackedRow,
        *,
        only_features: bool = False,
        with_entropy: bool = True,
        ids_Kk: Tensor | None = None,
        top_k: int = 0,
    ) -> Any:
        """Return log-probs [K] and entropies [K] of the response tokens, both differentiable, float32.

        Without ``with_entropy`` the entropies are None, which saves passes over the logits. With ``ids_Kk``
        their log-probs [K, k] follow, with ``top_k`` the most likely ids and their log-probs (`Head.forward`).
        With ``only_features``, return what the mergers make of the row's images instead, [visual tokens, mergers, H]:
        one merger, and Qwen3-VL's deepstack mergers behind it. A row whose `vision` is {"image_features": that
        output} skips the tower.
        """
        if only_features:
            return torch.stack(tuple(self._image_features(row)), dim=1)
        padded = padded_rows(row.spans, row.sampled).to(row.ids_T.device) if self.is_padded else None
        predictor_K = row.predictor_K if padded is None else padded.predictor_K
        if (share := self.ranks.share_of(len(row.ids_T))) is None:
            hidden_KH = self.hidden_states(row, padded).index_select(0, predictor_K)
            return self._scores(row, hidden_KH, with_entropy=with_entropy, ids_Kk=ids_Kk, top_k=top_k)
        mine_k, predictor_k = share.predictions(predictor_K)
        hidden_kH = self.hidden_states(row, share=share).index_select(0, predictor_k)
        kept_kk, ids_kk = (None if ids is None else ids[mine_k] for ids in (row.kept_Kk, ids_Kk))
        mine = replace(row, target_K=row.target_K[mine_k], kept_Kk=kept_kk)
        scores = self._scores(mine, hidden_kH, with_entropy=with_entropy, ids_Kk=ids_kk, top_k=top_k)
        return tuple(share.gathered(scores, mine_k, len(predictor_K)))

    def _scores(
        self, row: PackedRow, hidden_KH: Tensor, *, with_entropy: bool, ids_Kk: Tensor | None, top_k: int
    ) -> tuple[Tensor | None, ...]:
        """Return the outputs of `forward` from the hidden states that predict the row's targets."""
        if row.kept_Kk is None:
            return self.head(hidden_KH, row.target_K, with_entropy=with_entropy, ids_Kk=ids_Kk, top_k=top_k)
        assert ids_Kk is None and not top_k, "the configuration refuses it"
        logp_K, _, kept_logp_Kk = self.head(
            hidden_KH, row.target_K, with_entropy=False, ids_Kk=row.kept_Kk.clamp(min=0)
        )
        logp_K, entropy_K, mass_K = over_kept(logp_K, kept_logp_Kk, row.kept_Kk)
        if torch.is_grad_enabled() and not row.is_padding:
            self._kept.append((mass_K.detach().sum(), (row.kept_Kk >= 0).sum()))
        return logp_K, entropy_K if with_entropy else None

    def take_kept(self) -> dict[str, Tensor]:
        """Return sums over the tokens since the last call: the probability of what was kept, and its ids."""
        if not self._kept:
            return {}
        mass, count = (torch.stack(parts).sum() for parts in zip(*self._kept, strict=True))
        self._kept.clear()
        return {"kept_mass": mass, "kept_ids": count}

    def _layout(self, row: PackedRow) -> RowLayout:
        """Return the row's layout, with that of windowed layers if a sequence of the row exceeds their window."""
        if self.window is None:
            return row.layout
        windowed = windowed_runs(row.spans, self.window)
        return replace(row.layout, windowed=windowed and windowed.to(row.ids_T.device))

    def hidden_states(
        self, row: PackedRow, padded: PaddedRows | None = None, *, share: RowShare | None = None
    ) -> Tensor:
        """Return the last layer's outputs [T, H], of the row's tokens or of all tokens of its padded rows.

        With a share of the row, those of its tokens.
        """
        if padded is None:
            text_arguments: dict[str, Any] = {"layout": self._layout(row)}
            if self.convolution is not None:
                runs = linear.state_runs(row.spans, self.convolution)
                text_arguments["row_states"] = runs.to(row.ids_T.device)
            if share is not None:
                text_arguments["share"] = share
            self.routers.replayed = row.experts_TLK
            if share is not None and row.experts_TLK is not None:
                self.routers.replayed = row.experts_TLK[share.own]
        else:
            text_arguments = {"padded_tokens": padded.tokens_NL}
            if self.vision is not None:
                masks = partial(self.vision.row_masks, self.model.config, ids_NL=row.ids_T[padded.tokens_NL])
                text_arguments["row_masks"] = masks
            self.routers.counted = padded.real_R
            self.routers.replayed = None if row.experts_TLK is None else row.experts_TLK[padded.tokens_NL.flatten()]
        positions = row.positions_3T[0][None]
        vision: dict[str, Any] = {}
        if self.vision is not None:
            if self.vision.has_mrope:
                positions = row.positions_3T[:, None]
            stored = row.vision.get("image_features")
            features = self._image_features(row) if stored is None else stored.unbind(1)
            vision = {"mm_encoder_outputs": self.vision.precomputed(features, self.model.config, row.ids_T)}
        with save_on_cpu(pin_memory=row.ids_T.is_cuda) if self.offloads else nullcontext():
            output = self.model.base_model(
                input_ids=row.ids_T[None],
                position_ids=positions,
                use_cache=False,
                **text_arguments,
                **vision,
            )
        return output.last_hidden_state.flatten(0, 1)

    def _image_features(self, row: PackedRow) -> Sequence[Tensor]:
        """Return each merger's features of the row's images, [visual tokens, H].

        A row without images computes the smallest image and takes none of it. Under ZeRO every rank must reach the
        same parameters in the same order in each micro-batch, or the collectives that gather and reduce them wait
        forever. So a row of text runs the same modules as a row with images, and their gradients are zero.
        """
        assert self.vision is not None
        if row.vision:
            return self.vision.features(self.model, row.vision)
        unused = self.vision.unused_image(self.model.config)
        features = self.vision.features(self.model, move(unused, row.ids_T.device))
        return [features_FH[:0] for features_FH in features]


def over_kept(logp_K: Tensor, kept_logp_Kk: Tensor, kept_Kk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs [K] and entropies [K] of the distribution over the kept ids, and their mass [K] before.

        lp' = lp - log sum_{v kept} p_v

    Args:
        logp_K: of the sampled ids, over the vocabulary.
        kept_logp_Kk: of the kept ids.
        kept_Kk: these ids; -1 is none.
    """
    is_there_Kk = kept_Kk >= 0
    mass_K = kept_logp_Kk.masked_fill(~is_there_Kk, float("-inf")).logsumexp(1)
    over_Kk = (kept_logp_Kk - mass_K[:, None]).masked_fill(~is_there_Kk, 0.0)
    entropy_K = -(over_Kk.exp() * over_Kk).sum(1)  # what is not there adds exp(0) * 0
    return logp_K - mass_K, entropy_K, mass_K.exp()


def _mlps(model: nn.Module) -> list[nn.Module]:
    """Return the MLP, or the experts, of each layer that may be recomputed."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    found = [layer.get_submodule("mlp") for layer in layers if hasattr(layer, "mlp")]
    if not found:
        raise UserError("model.gradient_checkpointing is mlp, and this model's layers have no MLP: set it to true")
    return found


def _recomputed(
    function: Callable[..., Any],
    *args: Any,
    reentrant: bool,
    paused: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Call the function of a layer now, and again in the backward pass; only once if no gradient is wanted.

    Args:
        function: the layer.
        args: of the function.
        reentrant: whether the backward pass starts a nested one for the layer.
        paused: entered while the layer is computed again.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if reentrant:
        # It would warn, and give no gradient to anything inside.
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return function(*args)
        return checkpoint(function, *args, use_reentrant=True)
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), paused()))


def _pad(_: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give the decoder, in place of a packed row, a row for each response after a copy of its prompt.

    Images are in their places in the packed row by then, and their features are computed once. Padding is behind
    each row's end, where no causal layer sees it: no mask is needed. A text model numbers its own positions.
    """
    if "padded_tokens" not in arguments:  # a call that is not the policy's
        return None
    tokens_NL = arguments.pop("padded_tokens")
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][0][tokens_NL]
    masks = arguments.pop("row_masks", None)  # what is there is of the packed row
    arguments["attention_mask"] = None if masks is None else masks(arguments["inputs_embeds"])
    positions = arguments["position_ids"]
    arguments["position_ids"] = positions[:, 0][:, tokens_NL] if positions.ndim == 3 else None
    return args, arguments


def _take_share(_: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give the decoder this rank's tokens of a packed row, with its images in their places by then.

    Masks and features of Qwen3-VL's deepstack mergers are those of the share too. Rotary positions are numbered by
    the row, so a share takes its part of them.
    """
    if "share" not in arguments:  # a call that is not the policy's
        return None
    own = arguments["share"].own
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][:, own].clone()  # a view would keep the whole row's in memory
    arguments["position_ids"] = arguments["position_ids"][..., own]
    if (is_visual_1T := arguments.get("visual_pos_masks")) is not None:
        before, here = (int(is_visual_1T[:, part].sum()) for part in (slice(own.start), own))
        arguments["visual_pos_masks"] = is_visual_1T[:, own]
        features = arguments["deepstack_visual_embeds"]
        arguments["deepstack_visual_embeds"] = [features_FH[before : before + here] for features_FH in features]
    return args, arguments


def _keep_trained(policy: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Drop all but the adapters from a state dict; its names of tied weights are more than named_parameters()."""
    for name in [name for name in state if ".lora_" not in name]:
        del state[name]
