"""The choice of the engine that samples the responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device, has_gpu
from vlm_rl.distributed import from_main, rank
from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import base_of, load_merged
from vlm_rl.model_files.weights import sent_tensors, stored_tensors
from vlm_rl.samplers.base import InProcessSampler, Sampler
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.fingerprint import Fingerprint, FingerprintBuilder, check_fresh, fingerprint
from vlm_rl.samplers.missing_vllm import missing_vllm


def make_sampler(
    name: Literal["auto", "vllm", "transformers"],
    settings: EngineSettings,
    *,
    phase: Callable[[str], Any] = lambda text: None,
) -> InProcessSampler:
    """Start an engine.

    Args:
        name: the engine; `auto` takes vLLM where it can be imported and runs the model, else transformers, and prints
            which.
        settings: the model, and how it samples.
        phase: called with what the start is doing, several times where that takes long.

    Raises UserError if vLLM is asked for and cannot be imported or run the model, and for an option that it may not
    get.
    """
    folder, base = settings.model_path, base_of(settings.model_path)
    if base is not None:
        settings = replace(settings, model_path=base.path)
    phase("vLLM is imported")
    problem = None if name == "transformers" else _vllm_problem()
    if name == "vllm" and problem is not None:
        raise missing_vllm(problem)
    if problem is None and name != "transformers" and (problem := _unsupported(settings.builder)) and name == "vllm":
        raise UserError(f"{folder}: {problem}; use the transformers sampler")
    if settings.adapter is not None and problem is not None:
        raise UserError(
            f"model.lora.sync is adapter, which needs the vllm sampler, but {problem}: install it, or set "
            "model.lora.sync=merged"
        )
    if name == "auto" and rank() == 0:
        print("sampler: vllm" if problem is None else f"sampler: transformers ({problem})", flush=True)
    if name == "transformers" or problem is not None:
        from vlm_rl.samplers.transformers import TransformersSampler

        sampler: InProcessSampler = TransformersSampler(settings)
    else:
        from vlm_rl.samplers.vllm.engine import VllmSampler

        sampler = VllmSampler(settings, phase=phase)
    if base is not None:
        _load_adapter(sampler, folder)
    return sampler


def _load_adapter(sampler: Sampler, folder: str) -> None:
    """Replace the base model's weights in the engine by the merged ones."""
    sent = FingerprintBuilder(dtype=sampler.dtype, quantization=sampler.quantization)
    merged = load_merged(folder, dtype=sampler.dtype)
    sampler.load_weights(sent.watch(sent_tensors(merged)), version=0)
    check_fresh(sampler, sent.result())


def check_loaded(sampler: Sampler, folder: str) -> None:
    """Raise UserError unless an engine that was started on a model's folder holds what the checked files there hold.

    All ranks call it together. Every loader chooses by itself which files it reads and how; an engine with an
    adapter was given merged weights, and these were proved then.
    """
    if base_of(folder) is not None:
        return
    device = default_device()

    def stored() -> Fingerprint:
        tensors = stored_tensors(folder, dtype=sampler.dtype)
        on_device = ((name, tensor.to(device)) for name, tensor in tensors)
        return fingerprint(on_device, dtype=sampler.dtype, quantization=sampler.quantization)

    expected = from_main(stored)
    if sampler.fingerprint(expected.layout) != expected:
        raise UserError(
            f"{folder}: the weights that {sampler.name} loaded are not those in the folder's files, which were "
            "checked: something in the folder leads its loader elsewhere; get the model again, or use another sampler"
        )


_UNKNOWN_TO_VLLM = ("glm46v",)  # it would run transformers' own, whose weights it names differently


def vllm_version() -> str:
    """Return the version of the installed vLLM, whichever package brought it."""
    from vlm_rl.samplers.vllm.engine import import_vllm

    return import_vllm().__version__


def _unsupported(builder: PromptBuilder) -> str | None:
    """Return why vLLM cannot run the model on this machine, or None."""
    layers = getattr(builder.config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" in layers and not has_gpu():
        return "on a CPU vLLM computes layers of linear attention only in bfloat16, and packs their weights"
    if builder.config.model_type in ("gemma3", "gemma4") and not has_gpu():
        return "on a CPU vLLM's attention is causal among the tokens of an image, and Gemma's is not"
    if builder.config.model_type in _UNKNOWN_TO_VLLM:
        return f"vLLM has no class of its own for models of type {builder.config.model_type!r}"
    return None


def _vllm_problem() -> str | None:
    """Return why vLLM cannot be used, or None."""
    try:
        from vlm_rl.samplers.vllm.engine import import_vllm

        import_vllm()
    except ImportError as error:
        return f"vllm cannot be imported: {str(error).splitlines()[0]}"
    return None
