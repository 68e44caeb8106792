"""Regular expressions of a model folder's tokenizer: those that have no end are refused, with the file's name."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from vlm_rl.data import tokenizer_trial
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.tokenizer_trial import check_expressions
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    # Llama 3, and with single digits Qwen2
    *(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
)


def tokenizer_in(folder: Path, **parts: Any) -> Path:
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    for name, part in parts.items():
        setattr(made, name, part)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("expression", PUBLISHED, ids=["gpt2", "llama3", "qwen2"])
def test_published_expressions_pass(expression: str, tmp_path: Path) -> None:
    check_expressions(tokenizer_in(tmp_path, pre_tokenizer=pre_tokenizers.Split(Regex(expression), "isolated")))


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("expression", ["(a+)+b", r"(?=(\n+)+b)\n", r"(0|00)+$"])
def test_an_expression_without_an_end_is_refused(part: str, expression: str, tmp_path: Path) -> None:
    made = {
        "pre_tokenizer": pre_tokenizers.Split(Regex(expression), "isolated"),
        "normalizer": normalizers.Replace(Regex(expression), "x"),
    }
    with pytest.raises(UserError, match=r"tokenizer\.json: with texts of 80,000 equal characters it failed: Panic"):
        check_expressions(tokenizer_in(tmp_path, **{part: made[part]}))


def test_an_equal_file_is_not_tried_again_and_named_by_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checkpoint of a run has one; a file that was changed is tried."""
    tried: list[Path] = []

    def try_it(file: Path) -> str:
        tried.append(file)
        return trial(file)

    trial = tokenizer_trial._try
    monkeypatch.setattr(tokenizer_trial, "_try", try_it)
    monkeypatch.setattr(tokenizer_trial, "_faults", {})
    folders = [tmp_path / name for name in ("first", "second")]
    for expression, is_refused in ((r"\p{N}", False), ("(A+)+b", True)):
        for folder in folders:
            folder.mkdir(exist_ok=True)
            tokenizer_in(folder, pre_tokenizer=pre_tokenizers.Split(Regex(expression), "isolated"))
            with pytest.raises(UserError, match=f"{folder}/tokenizer") if is_refused else nullcontext():
                check_expressions(folder)
    assert tried == [folders[0] / "tokenizer.json"] * 2


def test_a_folder_without_a_tokenizer_or_expressions_is_not_tried(tmp_path: Path) -> None:
    check_expressions(tmp_path)
    check_expressions(tokenizer_in(tmp_path, pre_tokenizer=pre_tokenizers.Whitespace()))
    (tmp_path / "tokenizer.json").write_text('{"Regex": 1}')
    with pytest.raises(UserError, match=r"tokenizer\.json: .*it failed: "):
        check_expressions(tmp_path)


def test_a_text_at_which_a_tokenizer_panics_is_told_with_the_file(tiny_model: Path, tmp_path: Path) -> None:
    """The trial has no such text, so the model opens; encoding and decoding it raise what is no Exception."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tree = json.loads((model / "tokenizer.json").read_text())
    never = {"Regex": "(z+)+y"}
    split = {"type": "Split", "pattern": never, "behavior": "Isolated", "invert": False}
    tree["pre_tokenizer"]["pretokenizers"].insert(0, split)
    tree["decoder"] = {
        "type": "Sequence",
        "decoders": [tree["decoder"], {"type": "Replace", "pattern": never, "content": ""}],
    }
    plain = PromptBuilder(tiny_model, template=TEMPLATES["plain"])
    (model / "tokenizer.json").write_text(json.dumps(tree))
    builder = PromptBuilder(model, template=TEMPLATES["plain"])
    asked = Problem("p", "z" * 40, (), "3", "integer")
    told = rf"model\.path: {model}/tokenizer\.json gave up on a text \(Onig: .*retry-limit"
    for work in (lambda: builder.build(asked), lambda: builder.decode(np.repeat(plain.encode_response("z")[:1], 40))):
        with pytest.raises(UserError, match=told):
            work()
