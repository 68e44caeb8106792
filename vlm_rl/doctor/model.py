"""Checks of a model folder: does this model train here?"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from vlm_rl.config import DataConfig, RolloutConfig
from vlm_rl.data.model_folder import check_model_folder, check_weights, open_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.doctor.check import Check
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED, check_architecture
from vlm_rl.run.checkpoint import verify_model
from vlm_rl.templates import TEMPLATES


class ModelUnderTest:
    """A model folder, and what several checks need of it, each opened once."""

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self.path = path

    @cached_property
    def config(self) -> Any:
        """Return the transformers configuration."""
        check_model_folder(self.path)
        return open_config(str(self.path))

    @cached_property
    def builder(self) -> PromptBuilder:
        """Return a prompt builder with the plainest template, which asks the chat template for least."""
        check_model_folder(self.path)
        return PromptBuilder(self.path, template=TEMPLATES["plain"])


def folder(model: ModelUnderTest) -> Check:
    """Look for files that would run code, and for weights in safetensors."""
    check_model_folder(model.path)
    return Check("folder", "ok", f"{model.path}: safetensors, no code")


def model_type(model: ModelUnderTest) -> Check:
    """Ask whether the learner computes this type of model exactly, at the default lengths."""
    longest = DataConfig.model_fields["max_prompt_tokens"].default + RolloutConfig().max_tokens
    check_architecture(model.config, path=model.path, longest=longest)
    kind = model.config.model_type
    return Check("model type", "ok", f"{kind}, up to {longest:,} tokens; tested: {SUPPORTED[kind]}")


def tokenizer(model: ModelUnderTest) -> Check:
    """Open tokenizer and processor, and compare the vocabulary with the model's."""
    builder = model.builder
    processor = type(builder.processor).__name__ if builder.is_vision else "no processor: a text-only model"
    ends = ", ".join(repr(builder.tokenizer.convert_ids_to_tokens(i)) for i in builder.eos_ids)
    return Check("tokenizer", "ok", f"{len(builder.tokenizer)} entries, {processor}, a response ends with {ends}")


def chat_template(model: ModelUnderTest) -> Check:
    """Send a perfect answer through the chat template under each value of data.template."""
    model.builder  # noqa: B018 (what is off in the tokenizer is that check's answer)
    refused: dict[str, str] = {}
    for name, template in TEMPLATES.items():
        try:
            PromptBuilder(model.path, template=template).check_template()
        except UserError as error:
            refused[name] = str(error)
    usable = ", ".join(name for name in TEMPLATES if name not in refused)
    if not usable:
        raise UserError(next(iter(refused.values())))
    names = f"data.template can be {usable}"
    return Check("chat template", "ok", "; ".join([names, *(f"not {name}: {why}" for name, why in refused.items())]))


def weights(model: ModelUnderTest) -> Check:
    """Read every weight, and compare a checkpoint of ours with its manifest."""
    check_model_folder(model.path)
    manifest = verify_model(model.path)
    check_weights(model.path)
    verified = "" if manifest is None else f", and as its manifest says (step {manifest.step})"
    return Check("weights", "ok", f"whole and finite{verified}")


MODEL_CHECKS = (folder, model_type, tokenizer, chat_template, weights)
