"""Refuse a model folder that would run code or is damaged, and open what prompts need of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_rl.config import RolloutConfig
from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import ADAPTER_CONFIG, base_of
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.model_files.tokenizer_growth import check_growth
from vlm_rl.untrusted.json_object import read_object
from vlm_rl.untrusted.plain_files import check_plain_tree

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".bin.index.json")
_TEMPLATES = "additional_chat_templates"  # the one folder inside a model's that transformers reads
SHIPPED = Path(__file__).parents[1] / "assets" / "models"  # configurations of published models, for plans
OLDEST_TRANSFORMERS = (5, 18)
# Model types whose images are cut into tiles (data/vision).
TILED_FAMILIES = ("idefics3", "internvl", "llava_onevision", "smolvlm")


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

    Weights must be safetensors, and no configuration may name code (`auto_map`), or a file that is read in place of
    a checked one. Folders inside are not checked but for chat templates, since no loader opens them. Only resume
    opens learner/ of our checkpoints, which holds DeepSpeed's pickles: after the checkpoint's manifest was verified,
    and without running code.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"model.path: no model folder at {folder}: download the model there first, or fix the path")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json: give a Hugging Face model folder")
    entries = (*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*"))
    files = sorted(file for file in entries if not file.is_dir())
    for file in files:
        if not file.is_file():
            raise UserError(f"model.path: {file} is no file (a pipe, a device, or a link to nothing): remove it")
        if file.name.lower().endswith(_PICKLES):
            raise UserError(
                f"model.path: {file} is a pickle, and loading one can run any code: "
                "convert the weights to safetensors and remove it"
            )
        if file.name == "hf_quant_config.json":
            raise UserError(f"model.path: {folder} has {file.name}, {_QUANTIZED}, and remove it")
        if file.name.endswith("config.json"):
            _check_config(file)
        if file.name.endswith(".safetensors.index.json"):
            _check_index(file)
        if file.name == "tokenizer.json":
            check_growth(file)
    if not any(file.suffix == ".safetensors" for file in files):
        raise UserError(
            f"model.path: {folder} holds no *.safetensors weights: convert the model to safetensors first"
        )
    if (base := base_of(folder)) is None:
        weight_files(folder)
    else:
        if any(file.name.startswith("model") and file.suffix == ".safetensors" for file in files):
            raise UserError(
                f"model.path: {folder} holds an adapter and whole weights, and loaders differ in what they make of "
                f"both: remove {ADAPTER_CONFIG}, or the weights"
            )
        if not Path(base.path).is_dir():
            raise UserError(
                f"model.path: {folder} holds an adapter of the model in {base.path}, which is not there: put it back"
            )
        if (Path(base.path) / ADAPTER_CONFIG).exists():
            raise UserError(
                f"model.path: {folder} holds an adapter of {base.path}, which holds an adapter itself: merge that "
                "one into its base model first"
            )
        check_model_folder(base.path)


def read_model_config(path: str) -> tuple[str, dict[str, Any]]:
    """Return the file of the model's configuration and its content: the local folder's, else our copy of it.

    Raises UserError if there is neither.
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


def is_same_folder(path: str | Path, other: str | Path) -> bool:
    """Tell whether two paths name one folder."""
    return Path(path).resolve() == Path(other).resolve()


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

    Raises UserError if that is more than the model's context, and for a model without a context.
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
    for heads in {getattr(layer, "num_key_value_heads", None) or ranks for layer in layer_configs(parts["text"])}:
        if heads % ranks and ranks % heads:
            raise UserError(
                f"{setting} is {ranks}, and the model has {heads} heads of keys and values: use a number "
                "that divides them, or a multiple of them"
            )


def layer_configs(text: Any) -> list[Any]:
    """Return the configuration of each layer of a language model; Gemma 4's have heads of different widths."""
    numbers = range(getattr(text, "num_hidden_layers", 1))
    if not getattr(text, "is_heterogeneous", False):
        return [text for _ in numbers]
    return [text.per_layer_config[number] for number in numbers]


_QUANTIZED = (
    "which lets loaders change the weights, each in its way: use the model in its full precision "
    "(model.lora.load_in_4bit is how a run keeps it in 4 bits)"
)
_REFUSED_KEYS = {
    "auto_map": "an auto_map, which asks to run code that comes with the model: use a model whose classes are in "
    "transformers, or remove the entry",
    "transformers_weights": "transformers_weights, which names a file of weights that vLLM does not read: name the "
    "weights model.safetensors, or model.safetensors.index.json with its shards, and remove the entry",
    "configuration_files": "configuration_files, which name a file that transformers reads in place of config.json: "
    "give that file this name, and remove the entry",
    "fast_tokenizer_files": "fast_tokenizer_files, which name a file that transformers reads in place of "
    "tokenizer.json: give that file this name, and remove the entry",
    "audio_tokenizer": "an audio_tokenizer, which names a second model to load: models that read audio are not "
    "supported",
    "backbone": "a backbone, which names a second model that transformers looks for on a hub: such models are not "
    "supported, remove the entry",
    "speculators_config": "a speculators_config, for which vLLM loads another model in place of this one: use the "
    "model that it names, or remove the entry",
    "quantization_config": f"a quantization_config, {_QUANTIZED}",
    "compression_config": f"a compression_config, {_QUANTIZED}",
}
_DEEPEST = 100  # values within values; transformers copies a configuration by recursion


def _check_config(file: Path) -> None:
    tree = _read_json(file)
    if _depth(tree) > _DEEPEST:
        raise UserError(f"model.path: {file} is nested more than {_DEEPEST} deep: get the model again")
    for key, value in _items(tree):
        if key in _REFUSED_KEYS and value is not None:
            raise UserError(f"model.path: {file} has {_REFUSED_KEYS[key]}")
        if "_implementation" in key and "/" in str(value):
            raise UserError(
                f"model.path: {file} has {key} {value!r}, which asks to run a kernel from a hub: remove the entry"
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


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a model's weights, which are those that transformers and vLLM load.

    Raises UserError if the two would load different files: transformers prefers model.safetensors to an index,
    and vLLM takes every *.safetensors unless there is an index.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() and index.is_file():
        raise UserError(
            f"model.path: {folder} holds {whole.name} and {index.name}, and loaders differ in which they read: "
            "remove the one that is left over"
        )
    if whole.is_file():
        if others := sorted(file.name for file in folder.glob("*.safetensors") if file != whole):
            raise UserError(
                f"model.path: {folder} holds {', '.join(others)} beside {whole.name}: vLLM would load these as well, "
                "and transformers would not: remove what is left over"
            )
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


# -- configuration and tokenizer -------------------------------------------------------------------


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"model.path: {file} is not readable JSON ({error}): get the model again") from None


def open_config(model_path: str) -> Any:
    """Return the model's configuration.

    Raises UserError if it cannot be used, and for a folder that holds a pipe or a device, before anything is opened.
    """
    from transformers import AutoConfig

    check_plain_tree(model_path)
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # whatever the values in the file lead to
        raise UserError(f"model.path {model_path}: no model could be opened there: {reason_of(error)}") from None
    if getattr(config, "auto_map", None):
        raise UserError(
            f"model.path {model_path}: its config asks to run code that comes with the model (auto_map): "
            "use a model whose classes are in transformers, or remove the entry"
        )
    if any(getattr(config, name, None) is not None for name in ("audio_config", "thinker_config")):
        raise UserError(
            f"model.path {model_path}: models of type {config.model_type!r} read audio, which is not supported: use "
            "a model of text, images or videos"
        )
    check_vision(config, path=model_path)
    return config


def check_vision(config: Any, *, path: object) -> None:
    """Raise UserError for a vision-language model whose images no file of data/vision encodes.

    Args:
        config: of transformers.
        path: the model's folder, for the message.
    """
    if (vision := getattr(config, "vision_config", None)) is not None and vision_family(config) is None:
        tower = f" with a tower of type {vision.model_type!r}" if config.model_type == "llava" else ""
        raise UserError(
            f"model.path {path}: vision-language models of type {config.model_type!r}{tower} are not "
            "supported: use one of Qwen's, such as Qwen2.5-VL, Pixtral (llava with a tower of type 'pixtral'), or "
            f"one of type {', '.join(['gemma3', 'gemma4', 'glm4v', 'mistral3', *TILED_FAMILIES])}"
        )


def vision_family(config: Any) -> str | None:
    """Return how a configuration's images are encoded, a key of data/vision; None for a text or unknown model."""
    vision = getattr(config, "vision_config", None)
    if vision is not None and config.model_type in ("gemma3", "gemma4", *TILED_FAMILIES):
        return config.model_type
    if vision is not None and config.model_type in ("llava", "mistral3"):
        return "pixtral" if vision.model_type == "pixtral" else None
    if not (hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size")):
        return None
    return "glm" if config.model_type.startswith("glm") else "qwen"


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
            # False: the tokenizer.json that was checked, also where a tekken.json of Mistral's is beside it.
            return None, AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, mistral_format=False)
        processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=False)
        return processor, processor.tokenizer  # a folder may name a class without one
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain Exceptions, and its panics are not even those
        raise UserError(
            f"model.path {model_path}: its tokenizer or processor cannot be opened: {reason_of(error)}"
        ) from None


def declared_eos_ids(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids that generation config, tokenizer and model config name, in this order."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # the file is optional
        generation = None
    except Exception as error:
        raise UserError(f"model.path {model_path}: its generation_config.json: {reason_of(error)}") from None
    ids: list[int] = []
    for source in (generation, tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    if wrong := [value for value in ids if not isinstance(value, int)]:
        raise UserError(f"model.path {model_path}: the end-of-sequence id {wrong[0]!r} is not a number")
    return list(dict.fromkeys(ids))


def reason_of(error: BaseException) -> str:
    """Return an exception's text on one line, or its class where it has none."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, however deep."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from node.items()
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _depth(tree: Any) -> int:
    """Return how many values lie within each other, without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [
            value
            for node in level
            if isinstance(node, dict | list)
            for value in (node.values() if isinstance(node, dict) else node)
        ]
    return depth
