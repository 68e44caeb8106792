"""LoRA adapters on disk: the base model of such a folder, and the model that both make together.

A folder with an adapter holds what PEFT and vLLM open (adapter_config.json and adapter_model.safetensors), the
configuration and tokenizer of its base model, and base_model.json, which says where that model was and what its
weights were.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_rl.errors import UserError
from vlm_rl.untrusted.json_object import read_object

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_MODEL = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
PREFIX = "base_model.model."  # of every tensor's name in adapter_model.safetensors


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that an adapter was trained on."""

    path: str
    weights_sha256: str  # see vlm_rl.model_files.weights.weights_sha256


def base_of(folder: str | Path) -> BaseModel | None:
    """Return the base model of an adapter's folder; None for every other folder.

    Raises UserError for an adapter that does not say what its base model is.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    try:
        said = read_object((folder / BASE_MODEL).read_bytes())
        return BaseModel(path=str(said["path"]), weights_sha256=str(said["weights_sha256"]))
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"model.path: {folder} holds an adapter without a readable {BASE_MODEL}, which names its base model: "
            "use a checkpoint of vlm-rl, or merge the adapter with its base model first"
        ) from None


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return W + scaling B A in the dtype of W, computed in float32 and rounded once.

    Every merge is computed here, so that learner, sampler and export have the same bits.

    Args:
        weight: W [out, in].
        a: A [rank, in].
        b: B [out, rank].
        scaling: alpha / rank.
    """
    import torch

    # Copies: the bits of a product may depend on where in memory its factors begin.
    factors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True) for tensor in (b, a)]
    return torch.addmm(weight.to(factors[0].dtype), *factors, alpha=scaling).to(weight.dtype)


def load_merged(folder: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """Return the transformers model of an adapter's folder, merged, on the CPU.

    Args:
        folder: holds the adapter.
        dtype: of the model; None takes the adapter's, which is the one that it was trained in.

    Raises UserError for an adapter that does not fit its base model.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from vlm_rl.model_files.checkpoint_layout import use_published_layout

    base = base_of(folder)
    assert base is not None, folder
    settings = read_object((Path(folder) / ADAPTER_CONFIG).read_bytes())
    tensors = load_file(Path(folder) / ADAPTER_WEIGHTS)
    config = AutoConfig.from_pretrained(base.path, trust_remote_code=False)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: Any = auto.from_pretrained(
        base.path,
        dtype=dtype or next(iter(tensors.values())).dtype,
        trust_remote_code=False,
        use_safetensors=True,
    )
    use_published_layout(model)
    names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    with torch.no_grad():
        for name in sorted(names):
            try:
                weight = model.get_submodule(name).weight
                a, b = (tensors[f"{PREFIX}{name}.lora_{factor}.weight"] for factor in "AB")
                weight.copy_(merge(weight, a, b, settings["lora_alpha"] / settings["r"]))
            except (AttributeError, KeyError, RuntimeError, TypeError, ZeroDivisionError) as error:
                raise UserError(
                    f"model.path: the adapter in {folder} does not fit its base model {base.path} at {name!r} "
                    f"({' '.join(str(error).split())}): use a different checkpoint"
                ) from None
    return model
