"""Cut a tokenizer to what some texts use: a vocabulary of 50,000 tokens has megabytes, and a few responses use few.

In byte-pair encoding each merge that is applied to a text is part of one of the tokens that the text becomes. So the
merges whose result lies inside no such token are never applied to it, and without them the text becomes the same
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from vlm_rl.templates import END_THINK

Tree = dict[str, Any]  # a tokenizer.json


def cut_tokenizer(tree: Tree, texts: Sequence[str]) -> Tree:
    """Return the tokenizer with the part of its vocabulary that the texts and their reasoning use.

    Token ids stay what they are. What is no byte-pair encoding, or would give other tokens, is returned whole.
    """
    if tree["model"].get("type") != "BPE":
        return tree
    parts = [*texts, *(text.partition(END_THINK)[0] + END_THINK for text in texts if END_THINK in text)]
    whole = Tokenizer.from_str(json.dumps(tree))
    ids = [encoding.ids for encoding in whole.encode_batch(parts, add_special_tokens=False)]
    used = {token for number in {number for row in ids for number in row} if (token := whole.id_to_token(number))}
    inside = {
        token[start:end] for token in used for start in range(len(token)) for end in range(start + 1, len(token) + 1)
    }
    merges = [merge for merge in tree["model"]["merges"] if "".join(_pair(merge)) in inside]
    kept = used | {part for merge in merges for part in (*_pair(merge), "".join(_pair(merge)))}
    vocabulary = {
        token: number for token, number in tree["model"]["vocab"].items() if token in kept or len(token) == 1
    }
    cut = {**tree, "model": {**tree["model"], "merges": merges, "vocab": vocabulary}}
    again = Tokenizer.from_str(json.dumps(cut)).encode_batch(parts, add_special_tokens=False)
    return cut if [encoding.ids for encoding in again] == ids else tree


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    """Return both parts of a merge, which older files write as one text."""
    return merge.split(" ") if isinstance(merge, str) else merge
