"""Checks of a model folder: does this model train here?"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from vlm_rl.config import ENGINE_SHARE
from vlm_rl.data.images import encode_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device, has_gpu, model_dtype
from vlm_rl.doctor.check import Check, phase
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import PADDED_COST, check_architecture, convolution_width, is_padded
from vlm_rl.learner.attention.linear import missing_kernels
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.learner.sync_probe import RESPONSES, TOKENS, probe_gap
from vlm_rl.model_files.model_folder import check_model_folder, open_config
from vlm_rl.model_files.weights import check_weights, sent_tensors
from vlm_rl.planning.fits import Card, gib, needs
from vlm_rl.planning.memory import Memory
from vlm_rl.run.checkpoint import verify_model
from vlm_rl.run.manifest import Manifest
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import FingerprintBuilder, StaleWeightsError, check_fresh
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import IMAGE_MARKER, Problem, Prompt

_ELSEWHERE = "run this on the machine that will train"
_OTHER_ENGINE = "set rollout.sampler=transformers, or model.layer_patches=false if it is the sampler already"


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

    @cached_property
    def manifest(self) -> Manifest | None:
        """Return the manifest of a checkpoint of ours, once every weight was read and found whole and finite."""
        check_model_folder(self.path)
        phase("reading every weight")
        manifest = verify_model(self.path)
        check_weights(self.path)
        return manifest

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Return a prompt of text, and in front of it one with an image where the model takes images."""
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (168, 224, 3), dtype=np.uint8))
        problems = [Problem("text", "What is 2 + 2?", (), "4", "integer")]
        if self.builder.is_vision:
            problems.insert(0, Problem("image", f"{IMAGE_MARKER}How many?", (encode_png(picture),), "4", "integer"))
        return [self.builder.build(problem) for problem in problems]

    @cached_property
    def policy(self) -> tuple[Policy, float, float]:
        """Return the policy, by how much it differs from the unmodified model, and the limit of that difference."""
        model_type(self)
        weights(self)
        banned = self.builder.banned_ids
        phase("loading the model")
        model = load_model(self.path, dtype=model_dtype(default_device()))
        phase("comparing packed rows with the unmodified model")
        check = SelfCheck(model, self.prompts, banned_ids=banned, temperature=1.0)
        policy = Policy(model, banned_ids=banned, temperature=1.0)
        return policy, check.compare(policy, path=self.path), check.limit

    @cached_property
    def card(self) -> Card:
        """Return the memory of this machine's device, as it was before the model was loaded."""
        return Card.here(1)

    def too_large(self, copies: int) -> str:
        """Return why so many copies of the weights do not fit into this machine's memory, or an empty string."""
        count = 0
        for file in self.path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        size = count * model_dtype(default_device()).itemsize
        memory = Memory(weights=size, engine_weights=size)
        found = needs(memory, self.card, share=ENGINE_SHARE, room=0, samples=copies > 1)
        over = [need for need in found if need.margin < 0]
        return f"it needs {gib(over[0].needed)}, and {gib(self.card.free)} are free" if over else ""


def folder(model: ModelUnderTest) -> Check:
    """Look for files that would run code, and for weights in safetensors."""
    check_model_folder(model.path)
    return Check("folder", "ok", f"{model.path}: safetensors, no code")


def model_type(model: ModelUnderTest) -> Check:
    """Ask whether the learner computes this type of model exactly."""
    check_architecture(model.config, path=model.path)
    cost = f", in padded rows, {PADDED_COST}" if is_padded(model.config, "auto") else ""
    if convolution_width(model.config) is not None and has_gpu() and (missing := missing_kernels()):
        cost += (
            f"; its linear attention is computed by loops in torch, many times slower than by kernels: "
            f"pip install {' '.join(missing)}"
        )
    return Check("model type", "ok", f"{model.config.model_type} is supported{cost}")


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
    notes: dict[str, None] = {}
    for name, template in TEMPLATES.items():
        try:
            builder = PromptBuilder(model.path, template=template)
            builder.check_template()
            notes |= {builder.tags_note: None} if builder.tags_note else {}
        except UserError as error:
            refused[name] = str(error)
    usable = ", ".join(name for name in TEMPLATES if name not in refused)
    if not usable:
        raise UserError(next(iter(refused.values())))
    names = f"data.template can be {usable}"
    refusals = [f"not {name}: {why}" for name, why in refused.items()]
    return Check("chat template", "ok", "; ".join([names, *refusals, *notes]))


def weights(model: ModelUnderTest) -> Check:
    """Read every weight, and compare a checkpoint of ours with its manifest."""
    manifest = model.manifest
    verified = "" if manifest is None else f", and as its manifest says (step {manifest.step})"
    return Check("weights", "ok", f"whole and finite{verified}")


def packed_rows(model: ModelUnderTest) -> Check:
    """Compare the learner's packed rows with the unmodified model on this machine."""
    if why := model.too_large(copies=1):
        return Check("packed rows", "unknown", why, _ELSEWHERE)
    _, gap, limit = model.policy
    return Check("packed rows", "ok", f"log-probs within {gap:.2g} of the unmodified model's (limit {limit:.2g})")


def sampler(model: ModelUnderTest) -> Check:
    """Sync the weights into the sampler that a run would take, prove them, and compare its log-probs."""
    if why := model.too_large(copies=2):
        return Check("sampler", "unknown", why, _ELSEWHERE)
    policy, _, limit = model.policy
    engine = start_sampler(model, policy)
    with closing(engine):
        try:
            gap = sync_and_compare(engine, policy, model.prompts, version=1)
        except StaleWeightsError as error:
            return Check("sampler", "off", str(error), _OTHER_ENGINE)
    detail = f"{engine.name} holds the synced weights, log-probs within {gap:.2g} of the learner's"
    outcome = "ok" if gap <= limit else "off"
    return Check("sampler", outcome, f"{detail} (limit {limit:.2g})", "" if outcome == "ok" else _OTHER_ENGINE)


def start_sampler(
    model: ModelUnderTest,
    policy: Policy,
    *,
    batch_size: int = RESPONSES,
    vllm_options: Mapping[str, Any] | None = None,
) -> Sampler:
    """Start the engine that a run would take, for so many responses side by side."""
    with redirect_stdout(io.StringIO()):  # it names the engine, and so does the answer
        return make_sampler(
            "auto",
            EngineSettings(
                model_path=str(model.path),
                builder=model.builder,
                max_model_len=max(len(prompt.ids) for prompt in model.prompts) + TOKENS,
                batch_size=batch_size,
                dtype=next(policy.parameters()).dtype,
                vllm_options=vllm_options or {},
            ),
            phase=phase,
        )


def sync_and_compare(engine: Sampler, policy: Policy, prompts: Sequence[Prompt], *, version: int) -> float:
    """Bring the policy's weights into the engine, and return the log-prob gap of what it then samples, in nats.

    Args:
        engine: samples RESPONSES responses to each prompt.
        policy: the learner's; its log-probs are compared with the engine's.
        prompts: to sample responses to.
        version: the policy version that the weights get, and the step of the responses.

    Raises StaleWeightsError if other weights arrive.
    """
    phase(f"bringing the weights into {engine.name}, sync {version}")
    builder = FingerprintBuilder(dtype=engine.dtype, quantization=engine.quantization)
    engine.load_weights(builder.watch(sent_tensors(policy.model)), version=version)
    check_fresh(engine, builder.result())
    phase(f"comparing the log-probs of responses by {engine.name}, sync {version}")
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, responses=RESPONSES)
    groups = engine.generate(SampleRequest(prompts, params, seed=0, step=version))
    gaps = [
        probe_gap(partial(log_probs, policy), policy.model, prompt, rollouts)
        for prompt, rollouts in zip(prompts, groups, strict=True)
    ]
    return float(np.max(gaps))  # NaN where one is


def log_probs(policy: Policy, row: PackedRow) -> Tensor:
    """Return the policy's log-probs [K] of the row's response tokens."""
    with torch.no_grad():
        return policy(row.to(next(policy.parameters()).device))[0]


MODEL_CHECKS = (folder, model_type, tokenizer, chat_template, weights, packed_rows, sampler)
