"""The images of each family: token ids and pixels of a prompt are those of the model's own processor."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from tests.helpers.families import GLM_FAMILIES, PIXTRAL_FAMILIES, TILED_FAMILIES
from tests.helpers.images import noise_png
from tests.helpers.pixtral_families import own_patches
from tests.helpers.tiled_families import SIDE, own_tiles
from vlm_rl.data.images import decode_image
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.vision.family import BlindImage, blinded, vision_of
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

SHAPES = [(100, 300), (56, 56), (40, 30)]
MANY = 1_003_520


def problem_with(pictures: list[bytes]) -> Problem:
    return Problem("p", "<image>" * len(pictures) + "How many dots?", tuple(pictures), "4", "integer")


@pytest.mark.parametrize("template", ["plain", "think_answer"])
@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", *PIXTRAL_FAMILIES, *TILED_FAMILIES])
def test_a_prompt_is_what_the_processor_makes_of_it(
    model_type: str, template: str, family_model: Callable[[str], Path]
) -> None:
    """With a system message and without; images that are cut into several tiles, and small ones that are not."""
    folder, own = family_model(model_type), TEMPLATES[template]
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [noise_png(width, height, n) for n, (width, height) in enumerate(SHAPES)]
    builder = PromptBuilder(folder, template=own, max_pixels=MANY)
    prompt = builder.build(problem_with(pictures))

    images = [decode_image(data, where="") for data in pictures]
    if model_type in PIXTRAL_FAMILIES:  # of whole visual tokens
        smallest = {"llava": (70, 56), "mistral3": (84, 56)}[model_type]  # 40 : 30 with the least pixels: 64 : 48
        assert [image.size for image in prompt.images] == [(112, 308), (56, 56), smallest]
        images = list(prompt.images)
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "How many dots?"}]
    says = own.system if model_type == "llava" else [{"type": "text", "text": own.system}]
    system = [{"role": "system", "content": says}] if own.system else []
    messages = [*system, {"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + own.prefill
    assert not own.system or own.system in text
    expected = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    cut = {"gemma4": itemgetter("pixel_values"), **dict.fromkeys(PIXTRAL_FAMILIES, own_patches)}.get(
        model_type, own_tiles
    )
    torch.testing.assert_close(prompt.vision["pixel_values"], cut(expected))
    if model_type in PIXTRAL_FAMILIES:
        inputs = vision_of(builder.config).vision_inputs(prompt.vision)
        torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"])
    assert [*map(list, prompt.vision.get("image_sizes", []))] == [*map(list, expected.get("image_sizes", []))]


@pytest.mark.parametrize("template", ["plain", "think_answer"])
@pytest.mark.parametrize("model_type", GLM_FAMILIES)
def test_a_glm_prompt_is_what_its_processor_makes_of_fitted_images(
    model_type: str, template: str, family_model: Callable[[str], Path]
) -> None:
    """Its chat template takes a system's message as a string alone, and ends a turn with the next one's token."""
    folder, own = family_model(model_type), TEMPLATES[template]
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [noise_png(width, height, n) for n, (width, height) in enumerate(SHAPES)]
    builder = PromptBuilder(folder, template=own, max_pixels=MANY)
    builder.check_template()
    assert builder.tokenizer.convert_ids_to_tokens(builder.eos_ids[0]) == "<|user|>"
    prompt = builder.build(problem_with(pictures))
    system = [{"role": "system", "content": own.system}]
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "How many dots?"}]
    text = processor.apply_chat_template([*system, {"role": "user", "content": content}], add_generation_prompt=True)
    bounds = builder.engine_options["mm_processor_kwargs"]  # those that vLLM gets
    expected = processor(
        text=[text], images=[*prompt.images], return_tensors="pt", add_special_tokens=False, **bounds
    )
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    assert prompt.vision["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    torch.testing.assert_close(prompt.vision["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("model_type", TILED_FAMILIES)
def test_max_pixels_bounds_the_tiles_of_an_image(model_type: str, family_model: Callable[[str], Path]) -> None:
    """The tiles that cover an image, without the small copy of the whole; a single tile needs none, but for LLaVA."""
    folder = family_model(model_type)
    for most, tiles in ((1, 2 if model_type == "llava_onevision" else 1), (4, 5)):
        builder = PromptBuilder(folder, template=TEMPLATES["plain"], min_pixels=1, max_pixels=most * SIDE**2)
        vision = builder.build(problem_with([noise_png(300, 300, 1)])).vision
        assert len(vision["pixel_values"]) == tiles
    with pytest.raises(UserError, match=rf"in tiles of {SIDE} x {SIDE} pixels, so max_pixels must be at least 3136"):
        PromptBuilder(folder, template=TEMPLATES["plain"], min_pixels=1, max_pixels=SIDE**2 - 1)


def test_max_pixels_bounds_the_longer_side_of_an_image_of_mistral(family_model: Callable[[str], Path]) -> None:
    builder = PromptBuilder(family_model("mistral3"), template=TEMPLATES["plain"], max_pixels=112**2)
    prompt = builder.build(problem_with([noise_png(300, 100, 1)]))  # 300 : 100 are 112 : 37, in tokens of 28 pixels
    assert [image.size for image in prompt.images] == [(112, 56)]
    assert (prompt.ids == builder.image_token_id).sum() == 4 * 2


@pytest.mark.parametrize("model_type", TILED_FAMILIES)
def test_a_set_on_any_grid_suits_a_model_that_cuts_tiles(
    model_type: str, family_model: Callable[[str], Path]
) -> None:
    builder = PromptBuilder(family_model(model_type), template=TEMPLATES["plain"])
    assert builder.patch_size is None and vision_of(builder.config) is builder.family


@pytest.mark.parametrize("shape", [(8, 12), (2, 3, 40, 56)])
@pytest.mark.parametrize("kind", ["noise", "masked"])
def test_a_blinded_image_does_not_depend_on_what_a_row_holds(kind: BlindImage, shape: tuple[int, ...]) -> None:
    """Each prompt's images by themselves are those of the row; another seed gives others; sizes and grids stay."""
    pixels = {seed: 5 + torch.randn(seed * shape[0], *shape[1:]) for seed in (1, 2, 3)}
    row = {"pixel_values": torch.cat([*pixels.values()]), "image_grid_thw": torch.ones(3, 3)}
    whole = blinded(row, kind, [(seed, {"pixel_values": len(part)}) for seed, part in pixels.items()])
    assert torch.equal(whole["image_grid_thw"], row["image_grid_thw"])
    parts = whole["pixel_values"].split([len(part) for part in pixels.values()])
    for (seed, part), found in zip(pixels.items(), parts, strict=True):
        alone = {"pixel_values": part}
        assert torch.equal(blinded(alone, kind, [(seed, {"pixel_values": len(part)})])["pixel_values"], found)
        assert not torch.equal(blinded(alone, kind, [(seed + 9, {"pixel_values": len(part)})])["pixel_values"], found)
    if kind == "noise":
        assert abs(float(whole["pixel_values"].mean())) < 0.5, "nothing of the pixels, which are around 5"
        return
    is_hidden = whole["pixel_values"] == torch.full((), 0.01)
    assert torch.equal(whole["pixel_values"][~is_hidden], row["pixel_values"][~is_hidden])
    assert 0.2 < float(is_hidden.float().mean()) < 0.8
    if len(shape) == 2:  # whole visual tokens, of four patches each
        assert all(len(block.unique()) == 1 for block in is_hidden.reshape(-1, 4 * shape[1]))
    else:
        assert all(len(square.unique()) == 1 for square in is_hidden[:, :, :28, :28].flatten(1))
