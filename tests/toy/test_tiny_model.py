"""The tiny model is a real Qwen2.5-VL folder with consistent ids."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from tests.helpers import disks
from vlm_rl.errors import UserError
from vlm_rl.templates import CONTROL_TOKENS
from vlm_rl.toy.tiny_model import VISIBLE_TOKENS, build_tiny_model, train_tokenizer


@pytest.fixture(scope="module")
def processor(tiny_model: Path):
    return AutoProcessor.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def model(tiny_model: Path):
    return AutoModelForImageTextToText.from_pretrained(tiny_model).eval()


def test_the_classes_are_the_published_models(processor, model):
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert type(processor.image_processor).__name__ == "Qwen2VLImageProcessor"
    assert 0.85e6 < model.num_parameters() < 0.95e6
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_ids_agree_between_tokenizer_and_configs(tiny_model, processor):
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in CONTROL_TOKENS}
    config = AutoConfig.from_pretrained(tiny_model)
    generation = GenerationConfig.from_pretrained(tiny_model)
    assert config.image_token_id == ids["<|image_pad|>"] == processor.image_token_id
    assert config.video_token_id == ids["<|video_pad|>"]
    assert config.vision_start_token_id == ids["<|vision_start|>"]
    assert config.vision_end_token_id == ids["<|vision_end|>"]
    assert config.text_config.vocab_size == len(processor.tokenizer)
    assert processor.tokenizer.eos_token == "<|im_end|>"
    assert processor.tokenizer.pad_token == "<|endoftext|>"
    assert generation.eos_token_id == [ids["<|im_end|>"], ids["<|endoftext|>"]]
    assert generation.pad_token_id == config.text_config.pad_token_id == ids["<|endoftext|>"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text):
    ids = _TOKENIZER(text).input_ids
    assert _TOKENIZER.decode(ids) == text


_TOKENIZER = train_tokenizer(["only a few words"], vocabulary=300)


@pytest.mark.parametrize("token", VISIBLE_TOKENS)
def test_tags_are_one_token_and_stay_visible(processor, token):
    tokenizer = processor.tokenizer
    ids = tokenizer(f"x{token}y").input_ids
    assert tokenizer.convert_tokens_to_ids(token) == ids[1]
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"x{token}y"


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_control_tokens_are_skipped_when_decoding(processor, token):
    ids = processor.tokenizer(f"x{token}y").input_ids
    assert len(ids) == 3
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == "xy"


PICTURE = {"type": "image"}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            [{"role": "user", "content": [PICTURE, {"type": "text", "text": "How many?"}]}],
            {"add_generation_prompt": True},
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            "<|vision_start|><|image_pad|><|vision_end|>How many?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [
                {"role": "system", "content": "Count."},
                {"role": "user", "content": "1 + 1"},
                {"role": "assistant", "content": "2"},
            ],
            {},
            "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n",
        ),
        (
            [{"role": "system", "content": ""}, {"role": "user", "content": [PICTURE, PICTURE]}],
            {"add_vision_id": True},
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n"
            "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"
            "Picture 2: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n",
        ),
    ],
    ids=["picture", "system", "numbered"],
)
def test_chat_layout(processor, messages, options, expected):
    assert processor.apply_chat_template(messages, tokenize=False, **options) == expected


def ask(processor, images):
    content = [*[PICTURE] * len(images), {"type": "text", "text": "How many?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return processor(text=[text], images=images, return_tensors="pt")


def test_placeholders_equal_visual_tokens(processor):
    # 84x84 is 3x3 merged tokens, 112x56 is 4x2.
    inputs = ask(processor, [Image.new("RGB", (84, 84)), Image.new("RGB", (112, 56))])
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == 9 + 8
    assert int(inputs["mm_token_type_ids"].sum()) == 17
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 6], [1, 4, 8]]


def test_the_model_sees_its_picture_and_generates(processor, model):
    logits = []
    for colour in ("red", "blue"):
        inputs = ask(processor, [Image.new("RGB", (84, 84), colour)])
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
            tokens = model.generate(**inputs, do_sample=False, max_new_tokens=4)
        assert tokens.shape[1] <= inputs["input_ids"].shape[1] + 4
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_weights_are_a_function_of_the_seed(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_tiny_model(tmp_path / "a", seed=1, layers=1)
    assert torch.equal(torch.rand(3), expected)  # the caller's random state is untouched
    assert digest(build_tiny_model(tmp_path / "b", seed=1, layers=1)) == digest(first)
    assert digest(build_tiny_model(tmp_path / "c", seed=2, layers=1)) != digest(first)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="no size 'depth'"):
        build_tiny_model(tmp_path / "a", depth=3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="already exists"):
        build_tiny_model(tmp_path)


def test_a_full_disk_is_a_message_with_the_folder(tmp_path):
    """Safetensors hides the number of the error."""
    try:
        with (
            disks.small_disk(tmp_path / "small", kilobytes=64) as disk,
            pytest.raises(UserError, match=f"{disk / 'model'} could not be written: .*No space left"),
        ):
            build_tiny_model(disk / "model")
    except disks.CannotMountError as error:
        pytest.skip(str(error))


def test_weight_std_reaches_text_and_vision(tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(build_tiny_model(tmp_path / "wide", weight_std=0.08))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # thousands of normal draws each: their spread is within a few percent
            assert parameter.std().item() == pytest.approx(0.08, rel=0.05), name
