"""The sections `model` and `data`: what is trained, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.templates import TemplateConfig, TemplateName
from vlm_rl.errors import near
from vlm_rl.templates import TEMPLATES, Template

LayerPatches = Literal["auto", "liger"] | bool
RowFormat = Literal["auto", "padded"]
Checkpointing = Literal["auto", "mlp"] | bool
ModelPart = Literal["tower", "merger", "language_model"]
_TEMPLATES_ARE = f"known: {', '.join(TEMPLATES)}, or a file of your own, whose name ends in .yaml"


def part_of_target(target: str) -> ModelPart:
    """Return the part of the model in which an entry of model.lora.targets gives adapters."""
    return next((part for part in get_args(ModelPart) if part == target), "language_model")


class LoraConfig(ConfigSection):
    """Low-rank adapters: the model stays as it is, and (alpha / rank) B A is trained beside its matrices."""

    rank: PositiveInt = 16
    """Rows of A and columns of B. A matrix [out, in] gets rank * (in + out) parameters to train."""
    rank_by_part: dict[ModelPart, PositiveInt] = {}
    """Ranks of single parts, named as in model.freeze; the others have rank. Products of all parts are multiplied by
    the same alpha / rank."""
    alpha: PositiveInt = 32
    """The adapter's product is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["language_model"], min_length=1)
    """Which linear layers get an adapter: all of a part (language_model, tower, merger), or those of the language
    model with this name, such as q_proj. The output head and the embeddings get none."""
    dropout: NonNegativeFloat = 0.0
    """Must be 0: the sampler has no dropout, so that its distribution would differ from the learner's."""
    load_in_4bit: bool = False
    """QLoRA: keep the linear layers of the language model in 4 bits (NF4). On GPUs, with bitsandbytes.
    Experimental on GPUs."""
    sync: Literal["merged", "adapter"] = "merged"
    """What reaches the engine after an update: the merged weights, or the adapter alone beside the base model that it
    keeps. adapter needs the vllm sampler, which takes adapters in towers and mergers of some types alone."""

    def rank_of(self, part: ModelPart) -> int:
        """Return the rank of the adapters in a part of the model."""
        return self.rank_by_part.get(part, self.rank)

    @property
    def ranks(self) -> str:
        """Return the ranks in words, such as `16 (tower 8)`."""
        others = ", ".join(f"{part} {rank}" for part, rank in sorted(self.rank_by_part.items()))
        return f"{self.rank} ({others})" if others else str(self.rank)

    @property
    def parts(self) -> set[ModelPart]:
        """Return the parts in which something gets an adapter."""
        return {part_of_target(target) for target in self.targets}

    def conflicts(self) -> Iterator[str]:
        if idle := sorted({*self.rank_by_part} - self.parts):
            yield (
                f"rank_by_part names {', '.join(idle)}, where targets gives no adapters: add it to targets, or "
                "remove it from there"
            )
        if self.dropout:
            yield (
                f"dropout is {self.dropout}, and the sampler has none: its distribution would differ from the "
                "learner's; leave it at 0"
            )
        if self.sync == "adapter" and self.load_in_4bit:
            yield (
                "sync is adapter, and load_in_4bit is true: the engine's base model has 16 bits, and the learner's "
                "has 4; use sync=merged"
            )


class ModelConfig(ConfigSection):
    """The policy: which model, and how it uses memory."""

    path: str
    """The model, of a family that docs/models.md lists: a Hugging Face folder, a run's checkpoint (RUN, RUN/60,
    RUN/best), or a name of the hub, ORG/NAME or ORG/NAME@REVISION. The run keeps the revision that it began with.
    Types other than qwen2_5_vl, and videos, are experimental on GPUs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on an accelerator, float32 on a CPU."""
    freeze: list[ModelPart] = []
    """Parts that are not trained: tower (the vision tower), merger (what maps its output to the language model), or
    language_model (all else, output head included)."""
    gradient_checkpointing: Checkpointing = False
    """Keep only the inputs of the layers and recompute the rest in the backward pass. mlp recomputes the MLPs alone,
    most of a layer's memory for less of its time. auto recomputes only as much as is needed to fit on the card:
    nothing, the MLPs, or all; `--dry-run --gpu-memory GB` and the run say which. auto is experimental on
    GPUs."""
    offload_activations: bool = False
    """Keep those inputs in host memory. On a CPU they are there anyway. Experimental on GPUs."""
    rows: RowFormat = "auto"
    """How the learner computes the responses to a prompt. auto: after one copy of the prompt where that is exact for
    the model, else padded. padded: each response in a separate row, after its own copy of the prompt, through
    transformers' own attention. That is exact for every causal text model, and computes the prompt again for each
    response."""
    layer_patches: LayerPatches = "auto"
    """Compute RMSNorm, SiLU-gated MLP and the vision tower's patch embedding and attention by our own code: the same
    numbers with less memory and fewer calls. auto: true on a CPU; on a GPU the tower's attention alone. liger: norms,
    gated MLPs and rotary positions by Liger's kernels in place of ours, on a GPU with liger-kernel installed; a model
    that they do not compute exactly is refused."""
    fused_head: bool = False
    """Compute log-probs, entropies and their gradient by Triton kernels that keep no copy of the logits: the same
    numbers in fewer passes. Needs a GPU."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and freeze everything else; null trains the model itself. See docs/lora.md."""

    def conflicts(self) -> Iterator[str]:
        if self.lora is not None and (both := sorted(self.lora.parts & {*self.freeze})):
            yield (
                f"freeze names {', '.join(both)}, and lora.targets gives adapters there: leave out the one or the "
                "other; a part without adapters stays as it is"
            )
        if self.offload_activations and self.gradient_checkpointing is not True:
            yield (
                "offload_activations needs gradient_checkpointing=true: it moves the inputs that this keeps; "
                "without checkpointing it would also move the weights that every layer keeps for its backward pass"
            )


class DataConfig(ConfigSection):
    """What is trained and evaluated on, and how a prompt is rendered."""

    train: list[str] = Field(min_length=1)
    """Prepared sets (folders written by `vlm-rl prepare`)."""
    eval: list[str] = []
    """Prepared sets to evaluate on during training."""
    max_prompt_tokens: PositiveInt = 4096
    """Longest prompt, image tokens included. Longer ones are left out of training and counted; none is ever cut."""
    min_pixels: PositiveInt = 3136
    """Fewest pixels of an image; those of the sets' preparation."""
    max_pixels: PositiveInt = 1_003_520
    """Images are resized once to between min_pixels and max_pixels, on the pixel grid of the model's processor."""
    template: TemplateName | TemplateConfig = "think_answer"
    """How the prompt asks for the answer, where the answer is, and what format is rewarded: tags, a box after tags, a
    program in a fenced block after tags, or neither. Or a file of your own, whose name ends in .yaml, relative to the
    folder of the file that names it. The run keeps its text."""
    tags: Literal["auto", "token", "plain"] = "auto"
    """How tags such as <think> enter prompts where the tokenizer has a token for each. token: as that token. plain:
    as text, for models that were never trained on these tokens, such as Qwen3-VL-Instruct. auto: plain where their
    embeddings are too short to be trained, or where, before step 1, answers begin with <think> in this spelling
    alone. Rewards read both. A checkpoint's tokenizer keeps the spelling."""
    allow_test_rows: bool = False
    """Allow training on rows of a benchmark. It stamps the run and its checkpoints CONTAMINATED."""

    @field_validator("template", mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        if not isinstance(value, dict | TemplateConfig) and value not in TEMPLATES:
            raise ValueError(f"it is {value!r}: {near(str(value), TEMPLATES, otherwise=_TEMPLATES_ARE)}")
        return value

    @property
    def prompt_template(self) -> Template:
        """Return the shipped template of that name, or your own."""
        return self.template.record if isinstance(self.template, TemplateConfig) else TEMPLATES[self.template]
