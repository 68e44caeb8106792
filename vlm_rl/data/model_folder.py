"""Refuse a model folder that would run code when it is loaded, and open what prompts need of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".bin.index.json")


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


def check_context(model_config: Any, *, prompt_tokens: int, response_tokens: int, settings: str) -> int:
    """Return the tokens of the longest prompt and response together.

    Args:
        model_config: the transformers configuration of the model.
        prompt_tokens: of the longest prompt.
        response_tokens: of the longest response.
        settings: the names of the two settings that give these numbers, for the message.

    Raises UserError where that is more than the model's context.
    """
    context = model_config.get_text_config().max_position_embeddings
    wanted = prompt_tokens + response_tokens
    if wanted > context:
        raise UserError(f"{settings} is {wanted}, above the model's context of {context}: lower one of them")
    return wanted


def _check_config(file: Path) -> None:
    if "auto_map" in _keys(_read_json(file)):
        raise UserError(
            f"model.path: {file} has an auto_map, which asks to run code that comes with the model: "
            "use a model whose classes are in transformers, or remove the entry"
        )


def _check_index(file: Path) -> None:
    for shard in _read_json(file).get("weight_map", {}).values():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"model.path: {file} points at {shard!r}: shards must be *.safetensors files beside it")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"model.path: {file} is not readable JSON ({error}): get the model again") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"model.path: {file} must hold a JSON object, not a {type(tree).__name__}: get the model again"
        )
    return tree


def open_config(model_path: str) -> Any:
    """Return the model's configuration. Raises UserError if it cannot be used."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path {model_path}: no model could be opened there: {reason}") from None
    if getattr(config, "auto_map", None):
        raise UserError(
            f"model.path {model_path}: its config asks to run code that comes with the model (auto_map): "
            "use a model whose classes are in transformers, or remove the entry"
        )
    if getattr(config, "vision_config", None) is not None and not hasattr(config, "image_token_id"):
        raise UserError(
            f"model.path {model_path}: vision-language models of type {config.model_type} are not supported: "
            "use one whose config has an image_token_id, such as Qwen2.5-VL"
        )
    return config


def open_tokenizer(model_path: str, *, is_vision: bool) -> tuple[Any, Any]:
    """Return (processor, tokenizer); the processor of a text-only model is None. Raises UserError."""
    from transformers import AutoProcessor, AutoTokenizer

    try:
        if not is_vision:
            return None, AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path {model_path}: its tokenizer or processor cannot be opened: {reason}") from None
    return processor, processor.tokenizer


def declared_eos_ids(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids that generation config, tokenizer and model config name, in this order."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # the file is optional
        generation = None
    ids: list[int] = []
    for source in (generation, tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    return list(dict.fromkeys(ids))


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
