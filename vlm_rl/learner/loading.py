"""From folders to what a run works with: the prompt builder, and the policy, compared with the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from vlm_rl.config import Config, DataConfig, ModelConfig, SftConfig
from vlm_rl.data.prompts import PromptBuilder, StartError, refuse_failing_resets
from vlm_rl.data.sets import check_patch_size
from vlm_rl.devices import model_dtype
from vlm_rl.distributed import from_main, rank
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import PADDED_COST, naming_untested
from vlm_rl.learner.attention import patches as layer_patches
from vlm_rl.learner.deepspeed import check_deepspeed_options, check_zero_stage
from vlm_rl.learner.lora import describe
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.learner.sequence_parallel import group_of_ranks
from vlm_rl.model_files.adapters import BaseModel, base_of
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.model_files.weights import check_weights, weights_sha256
from vlm_rl.run.checkpoint import verify_model
from vlm_rl.run.terminal import make_console
from vlm_rl.types import Problem, Prompt


def make_prompt_builder(config: DataConfig, model_path: Path) -> PromptBuilder:
    """Return the prompt builder of the model in a folder.

    Raises UserError for a damaged folder, for one that holds an adapter, for a chat template under which a right
    answer loses reward, and for sets whose images were prepared for a different patch size.
    """
    check_model_folder(model_path)
    if base_of(model_path) is not None:
        raise UserError(
            f"model.path: {model_path} holds an adapter, and training starts from a whole model: merge it first, "
            f"with vlm-rl export {model_path} --merge --out FOLDER"
        )
    builder = PromptBuilder(
        model_path,
        template=config.prompt_template,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        tags=config.tags,
    )
    builder.check_template()
    check_patch_size([*config.train, *config.eval], builder.patch_size)
    return builder


def check_a_prompt_fits(build: Callable[[Problem], Prompt], problems: Sequence[Problem], config: DataConfig) -> None:
    """Raise UserError if every training prompt is too long, or has no start: taking prompts would never end."""
    lengths: dict[str, int] = {}
    faults: list[str] = []
    for problem in problems:
        try:
            lengths[problem.id] = len(build(problem).ids)
        except StartError as error:
            faults.append(str(error))
            refuse_failing_resets(faults)
            continue
        faults.clear()
        if lengths[problem.id] <= config.max_prompt_tokens:
            return
    if not lengths:
        raise UserError(f"no prompt of {', '.join(config.train)} can begin: {faults[-1]}")
    shortest = min(lengths, key=lengths.__getitem__)
    raise UserError(
        f"no prompt of {', '.join(config.train)} fits data.max_prompt_tokens {config.max_prompt_tokens}: the "
        f"shortest, {shortest!r}, has {lengths[shortest]} tokens; raise it, "
        "or lower data.max_pixels and prepare again"
    )


def prompts_to_check(
    build: Callable[[Problem], Prompt], problems: Sequence[Problem], config: DataConfig
) -> list[Prompt]:
    """Return the first prompts with a video, with only images and with neither that fit, or those there are."""
    chosen: dict[tuple[bool, bool], Prompt] = {}
    for problem in problems:
        if (kind := (bool(problem.images), bool(problem.videos))) not in chosen:
            with suppress(StartError):
                prompt = build(problem)
                if len(prompt.ids) <= config.max_prompt_tokens:
                    chosen[kind] = prompt
        if len(chosen) == 3:
            break
    return list(chosen.values())


def load_policy(
    path: Path,
    config: Config | SftConfig,
    device: torch.device,
    prompts: Sequence[Prompt],
    *,
    banned_ids: Sequence[int],
    temperature: float,
) -> tuple[Policy, SelfCheck]:
    """Return the policy with what `config.model` asks for, and the comparison with the unmodified model.

    Args:
        path: the model's folder.
        config: of the run.
        device: this rank's.
        prompts: to compare on.
        banned_ids: ids at log-prob -inf.
        temperature: divides the logits.

    Raises UserError for a damaged folder, for a model that is computed wrongly, and for what DeepSpeed refuses.
    """
    assert config.model.gradient_checkpointing != "auto", "the session decides it by the plan"
    check_deepspeed_options(config.train)
    settings, dtype = config.model, model_dtype(device, config.model.dtype)
    check_zero_stage(config.train.zero_stage, dtype)
    from_main(lambda: check_whole(path))
    in_4bit = settings.lora is not None and settings.lora.load_in_4bit
    with naming_untested(AutoConfig.from_pretrained(path, trust_remote_code=False)):
        model = load_model(
            path,
            dtype=dtype,
            device=device,
            rows=settings.rows,
            shard_for=None if in_4bit else config.train,
            in_4bit=in_4bit,
        )
        check = SelfCheck(model, prompts, banned_ids=banned_ids, temperature=temperature)
    policy = policy_of(model, settings, banned_ids=banned_ids, temperature=temperature)
    policy.share_rows(group_of_ranks(config.train.sequence_parallel))
    if settings.lora is not None:
        base = BaseModel(str(path.resolve()), from_main(lambda: weights_sha256(path)))
        policy.add_adapters(settings.lora, base=base, seed=config.seed)
    with naming_untested(model.config):
        check.compare(policy, path=path)  # new adapters change nothing
    if rank() == 0:
        console = make_console()
        console.print(layer_patches.describe(policy.replaced_layers), soft_wrap=True)
        if settings.lora is not None:
            console.print(describe(policy.model, settings.lora), soft_wrap=True)
        if policy.ranks.size > 1:
            console.print(f"rows: each is computed by {policy.ranks.size} ranks together", soft_wrap=True)
        if policy.is_padded:
            console.print(f"rows: padded, through transformers' own attention, {PADDED_COST}", soft_wrap=True)
    policy.freeze(settings.freeze)
    if settings.offload_activations or settings.gradient_checkpointing:
        policy.enable_checkpointing(
            offload=settings.offload_activations,
            zero_stage=config.train.zero_stage,
            only_mlps=settings.gradient_checkpointing == "mlp",
        )
    return policy, check


def policy_of(
    model: PreTrainedModel, settings: ModelConfig, *, banned_ids: Sequence[int], temperature: float
) -> Policy:
    """Return the model as a policy.

    Args:
        model: as it was loaded; it is changed in place.
        settings: `model` of the run's configuration: its rows, layer patches and output head.
        banned_ids: ids at log-prob -inf.
        temperature: divides the logits.
    """
    return Policy(
        model,
        banned_ids=banned_ids,
        temperature=temperature,
        layer_patches=settings.layer_patches,
        rows=settings.rows,
        fused_head=settings.fused_head,
    )


def check_whole(model_path: Path) -> None:
    """Raise UserError for a checkpoint that differs from its manifest, and for weights of less than a whole model."""
    verify_model(model_path)
    check_weights(model_path)
