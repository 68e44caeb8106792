"""A small Qwen2.5-VL whose language model is SmolLM2: on text it computes what SmolLM2 computes.

A Llama is a Qwen2 whose biases are zero, and at text the three-dimensional rotary positions are equal. Five unused
control tokens of SmolLM2 get the names of Qwen's vision tokens, so that no row of the vocabulary is new. The vision
tower and its merger are random: they are to be trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vlm_rl.devices import tell_deepspeed_of_the_cpu
from vlm_rl.errors import UserError
from vlm_rl.templates import CONTROL_TOKENS
from vlm_rl.toy.tiny_model import save_processor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig

RENAMED = dict(
    zip(
        ("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"),
        (token for token in CONTROL_TOKENS if "vision" in token or "_pad" in token),
        strict=True,
    )
)
"""Control tokens of SmolLM2 that mark source files, and the vision tokens that they become."""


def make_small_vlm(smollm: Path, out: Path, *, seed: int = 0, max_pixels: int = 50_176, **vision: Any) -> Path:
    """Write the model folder `out`, whole or not at all, and return it.

    Args:
        smollm: the folder of SmolLM2 (`smollm.make_smollm`).
        out: a new folder; UserError if it exists.
        seed: of the vision tower's random weights.
        max_pixels: larger images are scaled down; 50,176 are 64 visual tokens.
        vision: overrides values of the vision tower's configuration.
    """
    if out.exists():
        raise UserError(f"{out}: already exists; choose a different folder or remove it")
    import torch
    from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tell_deepspeed_of_the_cpu()  # saving imports it
    language = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name, torch.random.fork_rng(devices=[]):
        work = Path(name) / "model"
        tokenizer = _tokenizer(smollm, Path(name) / "tokenizer")
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(_config(language.config, tokenizer, vision))
        weights = language.model.state_dict()
        missing, unexpected = model.model.language_model.load_state_dict(weights, strict=False)
        assert not unexpected and all(name.endswith("_proj.bias") for name in missing), (missing, unexpected)
        with torch.no_grad():
            for key, parameter in model.model.language_model.named_parameters():
                if key in missing:
                    parameter.zero_()
        model.save_pretrained(work)
        save_processor(tokenizer, work, max_pixels=max_pixels)
        work.rename(out)
    return out


def _tokenizer(smollm: Path, work: Path) -> PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer with the vision tokens of RENAMED."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    AutoTokenizer.from_pretrained(smollm).save_pretrained(work)
    file = work / "tokenizer.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    for token in tree["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    vocabulary = tree["model"]["vocab"]
    tree["model"]["vocab"] = {RENAMED.get(token, token): number for token, number in vocabulary.items()}
    file.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )


def _config(
    language: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, vision: dict[str, Any]
) -> Qwen2_5_VLConfig:
    from transformers import Qwen2_5_VLConfig

    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in CONTROL_TOKENS}
    frequencies = language.head_dim // 2  # of a head, divided among time, height and width
    time = frequencies // 4
    height = (frequencies - time) // 2
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    also = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    text = {name: getattr(language, name) for name in (*same, *also)} | {
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": language.rope_parameters["rope_theta"],
            "mrope_section": [time, height, frequencies - time - height],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    tower = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_heads": 4,
        "fullatt_block_indexes": [1, 3],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**tower, "out_hidden_size": language.hidden_size, **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )
