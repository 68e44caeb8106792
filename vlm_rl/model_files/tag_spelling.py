"""Tags such as <think> that are single tokens of a tokenizer: were they trained, and how to spell them as plain text.

Some models have tokens for tags that their training never used: Qwen3-VL-Instruct has those of the models that
reason. Such a model cannot read a prompt that asks for these tokens, nor write them. As plain text it can do both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import base_of

UNTRAINED = 0.25
"""Below this share of the median norm of ordinary tokens' embeddings, a tag's has not been trained. In a small
vocabulary most tokens may be those that never occur, which a shared output head lengthens: a warm-started toy has its
tags at half."""
_COMPARED = 512  # ordinary tokens


def single_tokens(tokenizer: Any, tags: Collection[str]) -> dict[str, int]:
    """Return the ids of those tags that the tokenizer encodes as one added token each."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    return {tag: added[tag] for tag in tags if tag in added}


def spell_plainly(tokenizer: Any, tags: Collection[str]) -> None:
    """Let a tokenizer encode these added tokens as plain text, in place. It still decodes their ids.

    They become entries of the vocabulary that no merge leads to. `save_pretrained` keeps this.

    Raises UserError for a tokenizer that is no byte-pair encoding.
    """
    from tokenizers import Tokenizer

    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    if tree["model"]["type"] != "BPE" or tree["model"].get("ignore_merges"):
        raise UserError(
            f"data.tags: this tokenizer, a {tree['model']['type']} model, cannot spell {', '.join(tags)} as text; "
            "use data.tags=token"
        )
    before = tokenizer.get_vocab()
    # All added tokens, since the others would get new ids otherwise.
    tree["model"]["vocab"] |= {token["content"]: token["id"] for token in tree["added_tokens"]}
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in tags]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(tree))
    assert tokenizer.get_vocab() == before


def is_spelled_plainly(folder: Path, tag: str) -> bool:
    """Tell whether `spell_plainly` has changed the tokenizer that a folder holds."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return False
    tree = json.loads(file.read_text(encoding="utf-8"))
    return tag in tree["model"]["vocab"] and all(token["content"] != tag for token in tree["added_tokens"])


def are_untrained(folder: str | Path, ids: Mapping[str, int]) -> bool:
    """Tell whether the input embedding of one of these tokens is much shorter than those of ordinary tokens.

    Weight decay shortens the embeddings of tokens that never occur (arXiv 2405.05417). The norms of embeddings that
    the output head shares say less: False means that they do not tell.

    Args:
        folder: of the model; without weights nothing is known.
        ids: of the tokens.
    """
    if (base := base_of(folder)) is not None:
        folder = base.path
    norms = dict(_norms(Path(folder), sorted(ids.values())))
    ordinary = sorted(norm for index, norm in norms.items() if index not in ids.values())
    return bool(ordinary) and any(norms[i] < UNTRAINED * ordinary[len(ordinary) // 2] for i in ids.values())


def _norms(folder: Path, ids: list[int]) -> Iterator[tuple[int, float]]:
    """Yield the norms of the input embeddings of these tokens, and of others below the first of them."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is not a mapping)
                if name.endswith("embed_tokens.weight"):
                    table = weights.get_slice(name)
                    if ids[-1] >= table.get_shape()[0]:
                        return
                    for index in [*range(0, ids[0], max(1, ids[0] // _COMPARED)), *ids]:
                        yield index, float(table[index : index + 1].float().norm())
                    return
