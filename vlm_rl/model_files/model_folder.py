"""Refuse a model folder that would run code or is damaged, and open what prompts need of a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_rl.config import RolloutConfig
from vlm_rl.errors import UserError
from vlm_rl.json_object import read_object
from vlm_rl.model_files.adapters import ADAPTER_WEIGHTS, base_of
from vlm_rl.model_files.finite_weights import non_finite_tensor
from vlm_rl.model_files.hub_models import short_name

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".bin.index.json")
_HASH_THREADS = 4
SHIPPED = Path(__file__).parents[1] / "assets" / "models"  # configurations of published models, for plans
OLDEST_TRANSFORMERS = (5, 18)
TILED_FAMILIES = ("idefics3", "internvl")  # model types whose images are cut into tiles (data/vision)


def check_transformers() -> None:
    """Raise UserError for a transformers that would drop the images of packed rows without a word.

    From OLDEST_TRANSFORMERS on, the models of vision-language families take the features of images as
    mm_encoder_outputs. Older ones ignore an argument of that name.
    """
    installed = version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise UserError(
            f"transformers {installed} is too old, its models would ignore images: install transformers>={oldest}"
        )


def check_model_folder(path: str | Path) -> None:
    """Raise UserError unless this is a local model folder that loads without running code of its own.

    Weights must be safetensors, and no configuration may name code (`auto_map`). Folders inside are not checked,
    since no loader opens them. Only resume opens learner/ of our checkpoints, which holds DeepSpeed's pickles: after
    the checkpoint's manifest was verified, and without running code.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"model.path: no model folder at {folder}: download the model there first, or fix the path")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json: give a Hugging Face model folder")
    files = sorted(file for file in folder.iterdir() if not file.is_dir())
    for file in files:
        if file.name.lower().endswith(_PICKLES):
            raise UserError(
                f"model.path: {file} is a pickle, and loading one can run any code: "
                "convert the weights to safetensors and remove it"
            )
        if file.name.endswith("config.json"):
            _check_config(file)
        if file.name.endswith(".safetensors.index.json"):
            _check_index(file)
    if not any(file.suffix == ".safetensors" for file in files):
        raise UserError(
            f"model.path: {folder} holds no *.safetensors weights: convert the model to safetensors first"
        )
    if (base := base_of(folder)) is not None:
        if not Path(base.path).is_dir():
            raise UserError(
                f"model.path: {folder} holds an adapter of the model in {base.path}, which is not there: put it back"
            )
        check_model_folder(base.path)


def read_model_config(path: str) -> tuple[str, dict[str, Any]]:
    """Return the file of the model's configuration and its content: the local folder's, else our copy of it.

    Raises UserError where there is neither.
    """
    local, shipped = Path(path) / "config.json", _shipped(path)
    for file in (local, shipped):
        if file.is_file():
            return str(file), _read_json(file)
    names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
    raise UserError(
        f"model.path: no model folder at {path}, and its name is none of those whose configuration is shipped "
        f"({names}): download the model there first, or correct the path"
    )


def is_shipped(path: str | Path) -> bool:
    """Tell whether we ship the configuration of a model of this name."""
    return _shipped(path).is_file()


def _shipped(path: str | Path) -> Path:
    return SHIPPED / f"{short_name(path)}.json"


def context_of(model_config: Any) -> int:
    """Return the most tokens of a prompt and its response together, by the transformers configuration of a model.

    Raises UserError for a model without a context, such as Mamba.
    """
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        raise UserError(
            f"models of type {model_config.model_type!r} are not supported: their configuration has no "
            "max_position_embeddings; use a model that states it"
        )
    return context


def check_context(model_config: Any, *, prompt_tokens: int, response_tokens: int, settings: str) -> int:
    """Return the tokens of the longest prompt and response together.

    Args:
        model_config: the transformers configuration of the model.
        prompt_tokens: of the longest prompt.
        response_tokens: of the longest response.
        settings: the names of the two settings that give these numbers, for the message.

    Raises UserError where that is more than the model's context, and for a model without a context.
    """
    context = context_of(model_config)
    wanted = prompt_tokens + response_tokens
    if wanted > context:
        raise UserError(f"{settings} is {wanted}, above the model's context of {context}: lower one of them")
    return wanted


def check_divides(model_config: Any, rollout: RolloutConfig, setting: str = "rollout.tensor_parallel") -> None:
    """Raise UserError for a model whose heads or MLPs vLLM cannot divide among rollout.tensor_parallel ranks.

    Messages call that number `setting`.
    """
    ranks = rollout.tensor_parallel
    parts = {"text": model_config.get_text_config()}
    if rollout.vllm.get("mm_encoder_tp_mode") != "data":  # otherwise each rank has the whole tower
        parts["vision"] = getattr(model_config, "vision_config", None)
    for part, settings in parts.items():
        for key in ("num_attention_heads", "num_heads", "intermediate_size", "moe_intermediate_size"):
            if (size := getattr(settings, key, None)) and size % ranks:
                raise UserError(
                    f"{setting} is {ranks}, which does not divide {key} of the {part} model, {size}: "
                    "use a number that does"
                )
    heads = getattr(parts["text"], "num_key_value_heads", None) or ranks
    if heads % ranks and ranks % heads:
        raise UserError(
            f"{setting} is {ranks}, and the model has {heads} heads of keys and values: use a number "
            "that divides them, or a multiple of them"
        )


def _check_config(file: Path) -> None:
    if "auto_map" in _keys(_read_json(file)):
        raise UserError(
            f"model.path: {file} has an auto_map, which asks to run code that comes with the model: "
            "use a model whose classes are in transformers, or remove the entry"
        )


def _check_index(file: Path) -> None:
    for shard in _shards(file):
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"model.path: {file} points at {shard!r}: shards must be *.safetensors files beside it")


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index of weights points at."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"model.path: {index} has no weight_map: get the model again")
    return list(weight_map.values())


# -- weights ---------------------------------------------------------------------------------------


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
    files = _weight_files(Path(path))
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
        raise UserError(
            f"model.path: the adapter in {adapter} was trained on the weights {trained_on.weights_sha256[:12]} of "
            f"{trained_on.path}, and those in {base} are {now[:12]}: put the weights back that it was trained on"
        )


def weights_sha256(path: str | Path) -> str:
    """Return one SHA-256, as hex, of the names and the content of the weights' files in a model folder."""

    def digest(file: Path) -> bytes:
        with file.open("rb") as opened:
            return f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode()

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing releases the interpreter's lock
        return hashlib.sha256(b"".join(pool.map(digest, _weight_files(Path(path))))).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load, which are named by their index where there is one."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors")))
        raise UserError(
            f"model.path: {folder} holds {others}, which no loader reads without an index: name the weights "
            "model.safetensors, or get the model again"
        )
    files = [folder / shard for shard in sorted(set(_shards(index)))]
    for file in files:
        if not file.is_file():
            raise UserError(f"model.path: {file} is missing, and {index.name} names it: get the model again")
    return files


def _differences(path: str, shapes: dict[str, Any]) -> list[str]:
    """Return how these tensors, by name and on the meta device, differ from those of the folder's model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.utils import logging

    config = open_config(path)
    is_vision = getattr(config, "vision_config", None) is not None
    models: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_vision else MODEL_FOR_CAUSAL_LM_MAPPING
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the message says it; transformers would print a table as well
    logging.disable_progress_bar()
    try:
        _, info = models[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=shapes,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # whatever the values in config.json lead to
        raise UserError(f"model.path: no model can be built from {path}/config.json: {_reason(error)}") from None
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


# -- configuration and tokenizer -------------------------------------------------------------------


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"model.path: {file} is not readable JSON ({error}): get the model again") from None


def open_config(model_path: str) -> Any:
    """Return the model's configuration. Raises UserError if it cannot be used."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # whatever the values in the file lead to
        raise UserError(f"model.path {model_path}: no model could be opened there: {_reason(error)}") from None
    if getattr(config, "auto_map", None):
        raise UserError(
            f"model.path {model_path}: its config asks to run code that comes with the model (auto_map): "
            "use a model whose classes are in transformers, or remove the entry"
        )
    if getattr(config, "vision_config", None) is not None and vision_family(config) is None:
        raise UserError(
            f"model.path {model_path}: vision-language models of type {config.model_type!r} are not supported: "
            f"use one of Qwen's, such as Qwen2.5-VL, or one of type {', '.join(TILED_FAMILIES)}"
        )
    return config


def vision_family(config: Any) -> str | None:
    """Return how a configuration's images are encoded: "qwen" or a tiled family; None for a text or unknown model."""
    vision = getattr(config, "vision_config", None)
    if vision is not None and config.model_type in TILED_FAMILIES:
        return config.model_type
    return "qwen" if hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size") else None


def own_attention(config: Any) -> str:
    """Return which of transformers' attentions computes a configuration's text layers as they were trained."""
    text = config.get_text_config()
    # sdpa drops a soft cap without a word, and knows nothing of the sinks of gpt-oss.
    has_more = getattr(text, "attn_logit_softcapping", None) or text.model_type == "gpt_oss"
    return "eager" if has_more else "sdpa"


def open_tokenizer(model_path: str, *, is_vision: bool) -> tuple[Any, Any]:
    """Return (processor, tokenizer); the processor of a text-only model is None. Raises UserError."""
    from transformers import AutoProcessor, AutoTokenizer

    try:
        if not is_vision:
            return None, AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise UserError(
            f"model.path {model_path}: its tokenizer or processor cannot be opened: {_reason(error)}"
        ) from None
    return processor, processor.tokenizer


def declared_eos_ids(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids that generation config, tokenizer and model config name, in this order."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # the file is optional
        generation = None
    except Exception as error:
        raise UserError(f"model.path {model_path}: its generation_config.json: {_reason(error)}") from None
    ids: list[int] = []
    for source in (generation, tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    if wrong := [value for value in ids if not isinstance(value, int)]:
        raise UserError(f"model.path {model_path}: the end-of-sequence id {wrong[0]!r} is not a number")
    return list(dict.fromkeys(ids))


def _reason(error: Exception) -> str:
    """Return an exception's text on one line, or its class where it has none."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def _keys(tree: Any) -> Iterator[str]:
    """Yield every key, however deep."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
