"""The small VLM: the language model of SmolLM2 behind Qwen2.5-VL's classes."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from perf import small_vlm
from tests.helpers.images import noise_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data_prep.picture_sets import PictureCounts
from vlm_rl.templates import CONTROL_TOKENS, TEMPLATES
from vlm_rl.toy.small_vlm import RENAMED, make_small_vlm
from vlm_rl.types import Problem

TEXTS = (
    "Tom has 3 boxes with 7 pens each and loses 4 pens. How many pens are left? Let me read the question again.",
    "The capital of France is Paris, and 12 * 12 = 144.",
)


@pytest.fixture(scope="module")
def vlm(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_vlm(smollm, tmp_path_factory.mktemp("vlm") / "small-vlm")


def test_its_log_probs_of_text_are_those_of_smollm2(vlm: Path, smollm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    ours = AutoModelForImageTextToText.from_pretrained(vlm, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids.tolist() == AutoTokenizer.from_pretrained(vlm)(text, return_tensors="pt").input_ids.tolist()
        with torch.no_grad():
            logp, expected = (model(input_ids=ids).logits.log_softmax(-1) for model in (ours, reference))
        torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)


def test_a_picture_becomes_visual_tokens_of_a_prompt(vlm: Path) -> None:
    builder = PromptBuilder(vlm, template=TEMPLATES["think_answer"])
    problem = Problem("p", "<image>How many are there?", (noise_png(84, 112, 1),), "4", "integer")
    prompt = builder.build(problem)
    ids = builder.tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS))
    assert len(RENAMED) == 5 and len(set(ids)) == 8 and max(ids) < 17
    image = builder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int(np.sum(prompt.ids == image)) == (84 // 28) * (112 // 28)
    assert "How many are there?" in builder.tokenizer.decode(prompt.ids)


def test_it_learns_from_pictures_in_two_parts(
    smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the tower alone changes, then all; the losses are those of held-out traces."""
    counts = PictureCounts(drawn=16, published=16, heldout=4, test=3)
    monkeypatch.setitem(small_vlm.SIZES, True, small_vlm.VlmSizes(counts, steps=2, batch=4))
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(smollm)
    small_vlm.main([str(tmp_path), "--tiny"])
    printed = capsys.readouterr().out
    losses = {name: re.findall(r"\d\.\d+", line) for name, line in re.findall(r"(tower|all): (loss .*)", printed)}
    assert [len(found) for found in losses.values()] == [2, 2] and float(losses["all"][1]) < float(losses["tower"][0])
    assert re.search(r"easy-VQA, 3 test questions: accuracy [01]\.\d{3}", printed)
    folders = tmp_path / "untrained", *(tmp_path / part / "checkpoints" / "step-000002" for part in ("tower", "all"))
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    changed = [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairwise(weights)]
    assert changed[0] and all("visual" in name for name in changed[0])
    assert any("visual" in name for name in changed[1]) and any("visual" not in name for name in changed[1])
