"""A tokenizer cut to some texts: these become the same tokens, and little else is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vlm_rl.demo.files.small_tokenizer import cut_tokenizer

WORDS = [
    "the",
    "question",
    "asks",
    "how",
    "many",
    "marbles",
    "Tom",
    "has",
    "now",
    "so",
    "let",
    "me",
    "check",
    "that",
    "step",
    "again",
    "17",
    "plus",
    "25",
    "is",
    "42",
]


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """Return a byte-level BPE of 400 merges, as SmolLM2's and Qwen's are made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = [" ".join(WORDS[start:] + WORDS[:start]) + f" {start * 37}" for start in range(len(WORDS))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=660, special_tokens=["<|im_end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*lines, *(word * 2 for word in WORDS)], trainer)
    return json.loads(tokenizer.to_str())


def ids(tree: dict[str, Any], text: str) -> list[int]:
    return Tokenizer.from_str(json.dumps(tree)).encode(text).ids


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from([*" ".join(WORDS), "é", "\n"])) | st.sampled_from(WORDS), min_size=1))
def test_the_texts_become_the_same_tokens(tree: dict[str, Any], words: list[str]) -> None:
    texts = [" ".join(words), f"<think> {' '.join(words)}</think>so{words[0]}<|im_end|>"]
    cut = cut_tokenizer(tree, texts)
    for text in (*texts, texts[1].partition("so")[0]):
        assert ids(cut, text) == ids(tree, text)


def test_what_they_do_not_use_is_gone(tree: dict[str, Any]) -> None:
    cut = cut_tokenizer(tree, ["the question"])
    merges = tree["model"]["merges"]
    assert 0 < len(cut["model"]["merges"]) < len(merges) / 4
    assert cut["model"]["vocab"].items() < tree["model"]["vocab"].items()
    assert cut["added_tokens"] == tree["added_tokens"]
    assert len(ids(cut, "marbles")) > len(ids(tree, "marbles"))


def test_a_vocabulary_of_words_stays_whole() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tree = json.loads(tokenizer.to_str())
    assert cut_tokenizer(tree, ["a"]) is tree
