"""The weights in a model folder: whole, finite, those that an adapter was trained on, and as a learner names them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import ADAPTER_WEIGHTS, base_of
from vlm_rl.model_files.finite_weights import non_finite_tensor
from vlm_rl.model_files.model_folder import open_config, reason_of, weight_files

if TYPE_CHECKING:
    import torch

_HASH_THREADS = 4
# What no output of a model of this type depends on: it reads the outputs of a layer before them.
_UNUSED = {"llava_onevision": ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")}
# Buffers that engines keep as parameters. A sync brings them, since vLLM loads the whole of a layer or none of it.
_SENT_BUFFERS = ("e_score_correction_bias",)


def check_weights(path: str | Path) -> None:
    """Raise UserError unless the weights in a model folder are the whole model's, and finite.

    Tensors that are missing, unknown or of a different shape are found by transformers itself, on tensors without
    numbers: it knows the older names of a model's tensors and which are tied. Every weight is read once. Of a folder
    with an adapter these are the weights of its base model, which must be those that the adapter was trained on.
    """
    if (base := base_of(path)) is not None:
        check_base_weights(path, base.path)
        _finite_shapes([Path(path) / ADAPTER_WEIGHTS])
        path = base.path
    files = weight_files(Path(path))
    if faults := _differences(str(path), _finite_shapes(files)):
        place = files[0] if len(files) == 1 else Path(path)
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise UserError(f"model.path: {place}: {faults[0]}{more}: get the model again")


def _finite_shapes(files: Iterable[Path]) -> dict[str, Any]:
    """Return the tensors in the files by name, on the meta device. Raises UserError for one that is not finite."""
    import torch
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Any] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (it is not a mapping)
                    if name in shapes:
                        raise UserError(
                            f"model.path: {file}: tensor {name!r} is in an earlier file as well: get the model again"
                        )
                    shapes[name] = torch.empty(weights.get_slice(name).get_shape(), device="meta")
            bad = non_finite_tensor(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"model.path: {file} is cut or damaged ({error}): get the model again") from None
        if bad:
            raise UserError(f"model.path: {file}: tensor {bad!r} holds NaN or infinity: get the model again")
    return shapes


def check_base_weights(adapter: str | Path, base: str | Path) -> None:
    """Raise UserError unless the weights in the folder `base` are those that this folder's adapter was trained on."""
    trained_on = base_of(adapter)
    assert trained_on is not None, adapter
    if (now := weights_sha256(base)) != trained_on.weights_sha256:
        is_other = Path(base).resolve() != Path(trained_on.path).resolve()
        remedy = f"give model.path={trained_on.path}" if is_other else "put the weights back that it was trained on"
        raise UserError(
            f"model.path: the adapter in {adapter} was trained on the weights {trained_on.weights_sha256[:12]} of "
            f"{trained_on.path}, and those in {base} are {now[:12]}: {remedy}"
        )


def weights_sha256(path: str | Path) -> str:
    """Return one SHA-256, as hex, of the names and the content of the weights' files in a model folder."""

    def digest(file: Path) -> bytes:
        with file.open("rb") as opened:
            return f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode()

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing releases the interpreter's lock
        return hashlib.sha256(b"".join(pool.map(digest, weight_files(Path(path))))).hexdigest()


def _differences(path: str, shapes: dict[str, Any]) -> list[str]:
    """Return how these tensors, by name and on the meta device, differ from those of the folder's model."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the message says it; transformers would print a table as well
    logging.disable_progress_bar()
    try:
        _, info = _model_of(path, shapes, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True)
    except UserError:
        raise
    except Exception as error:  # whatever the values in config.json lead to
        raise UserError(f"model.path: no model can be built from {path}/config.json: {reason_of(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    return [
        *(f"tensor {name!r} is missing" for name in sorted(info["missing_keys"])),
        *(
            f"tensor {name!r} has the shape {list(has)}, and the model needs {list(needs)}"
            for name, has, needs in sorted(info["mismatched_keys"])
        ),
        *(f"tensor {name!r} is not one of the model's" for name in sorted(info["unexpected_keys"])),
    ]


def stored_tensors(path: str | Path, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's sent_tensors as a learner names them, from the very files that check_weights has checked.

    Args:
        path: the model's folder; one with an adapter is refused.
        dtype: of the tensors.
    """
    from safetensors.torch import load_file

    assert base_of(path) is None, path
    tensors: dict[str, Any] = {}
    for file in weight_files(Path(path)):
        tensors |= load_file(file)  # mapped, and read when they are used
    yield from sent_tensors(_model_of(str(path), tensors, dtype=dtype))


def is_used(config: Any, name: str) -> bool:
    """Tell whether an output of a model of this configuration depends on a parameter. vLLM keeps no other."""
    return not name.startswith(_UNUSED.get(config.model_type, ()))


def used_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield a transformers model's parameters by name, without those that no output depends on."""
    yield from ((name, parameter) for name, parameter in model.named_parameters() if is_used(model.config, name))


def stored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield by name the buffers that a checkpoint holds, such as a scale of each layer. No training changes them."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def sent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield by name the buffers that a sync brings, because engines keep them as parameters."""
    yield from ((name, buffer) for name, buffer in stored_buffers(model) if name.endswith(_SENT_BUFFERS))


def sent_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield by name what a sync brings of a transformers model: used_parameters and sent_buffers."""
    yield from used_parameters(model)
    yield from sent_buffers(model)


def _model_of(path: str, tensors: dict[str, Any], **options: Any) -> Any:
    """Let transformers put these tensors into a model of the folder's configuration; its loader reads no file."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = open_config(path)
    is_vision = getattr(config, "vision_config", None) is not None
    models: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_vision else MODEL_FOR_CAUSAL_LM_MAPPING
    return models[type(config)].from_pretrained(None, config=config, state_dict=tensors, **options)
