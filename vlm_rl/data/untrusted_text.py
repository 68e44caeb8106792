"""Encode text from data so that it never becomes a control token, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlm_rl.data.tokenizer_trial import naming_panics

_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


class UntrustedTextEncoder:
    """Encodes rendered chats whose skeleton may hold control tokens and whose texts from data may not.

    Attribute `control_tokens`: text -> id of all that the tokenizer calls special, and of every vision placeholder.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.control_tokens = {
            token.content: index
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content in _VISION_TOKENS
        }
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode_chat(self, skeleton: str, texts: Mapping[str, str]) -> list[int] | None:
        """Return the ids of a skeleton whose sentinels, the keys of `texts` in order, are replaced by their texts.

        Returns None if a text would still add a control token to those of the skeleton.
        """
        pieces, rest = [""], skeleton
        for sentinel, text in texts.items():
            before, _, rest = rest.partition(sentinel)
            head, *tail = self._cut(text)
            pieces[-1] += before + head
            pieces += tail
        pieces[-1] += rest
        ids = self._encode_pieces(pieces)
        is_same = self._control_ids(ids) == self._control_ids(self._encode_pieces([skeleton]))
        return ids if is_same else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text from data."""
        return self._encode_pieces(self._cut(text))

    def _control_ids(self, ids: Iterable[int]) -> list[int]:
        control = set(self.control_tokens.values())
        return [i for i in ids if i in control]

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        with naming_panics(self._tokenizer.name_or_path):
            return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _cut(self, text: str) -> list[str]:
        """Split after the first character of every control token, so that none is left whole."""
        pieces = []
        while (match := self._pattern.search(text)) is not None:
            pieces.append(text[: match.start() + 1])
            text = text[match.start() + 1 :]
        return [*pieces, text]


def make_sentinels(texts: Sequence[str]) -> list[str]:
    """Return a stand-in for each text that occurs in none of them."""
    salt = 0
    while any(f"[[text-{salt}-" in text for text in texts):
        salt += 1
    return [f"[[text-{salt}-{index}]]" for index in range(len(texts))]
