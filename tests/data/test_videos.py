"""Videos in a prompt: ids, pixels, times and positions are those of the model's own processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from tests.helpers.families import TILED_FAMILIES
from tests.helpers.images import noise_png
from tests.helpers.videos import LONG, SHORT, VIDEO_TYPES, video_problem
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Prompt

PLAIN = TEMPLATES["plain"]
FamilyModel = Callable[[str], Path]


def empty_model(folder: Path) -> Any:
    """Return the model without weights, which is enough to number positions."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))


def own_inputs(folder: Path, prompt: Prompt, *, fps: float, indices: list[list[float]]) -> Any:
    """Return what the processor makes of the prompt's text, images and videos, whose frames have these indices."""
    processor = AutoProcessor.from_pretrained(folder)
    return processor(
        text=[prompt.text],
        images=list(prompt.images),
        videos=[np.stack([np.asarray(frame) for frame in video.frames]) for video in prompt.videos],
        video_metadata=[{"fps": fps, "frames_indices": own, "total_num_frames": len(own)} for own in indices],
        videos_kwargs={"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False},
        images_kwargs={"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}},
        return_tensors="pt",
        add_special_tokens=False,
    )


@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_a_prompt_is_what_the_processor_makes_of_it(model_type: str, family_model: FamilyModel) -> None:
    """Four frames a second, in whose terms the processor knows times: by index and rate."""
    folder = family_model(model_type)
    times = [1.0, 1.25, 1.5, 1.75]
    prompt = PromptBuilder(folder, template=PLAIN).build(video_problem(times, [0.0, 0.25]))
    expected = own_inputs(folder, prompt, fps=4.0, indices=[[4, 5, 6, 7], [0, 1]])
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    assert [frame.size for frame in prompt.pictures[2:]] == [prompt.videos[0].frames[0].size] * 6
    names = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
    assert prompt.vision.keys() == names & expected.keys()
    for name, tensor in prompt.vision.items():
        torch.testing.assert_close(tensor, torch.as_tensor(expected[name]), atol=0, rtol=0)

    owner = empty_model(folder).model  # at these times transformers' own positions are the published ones
    types = expected["mm_token_type_ids"]
    grids = {name: tensor for name, tensor in prompt.vision.items() if "pixel" not in name}
    positions, _ = owner.get_rope_index(expected["input_ids"], mm_token_type_ids=types, **grids)
    assert rope_positions(owner, prompt).tolist() == positions[:, 0].tolist()


def test_qwen3_vl_reads_the_time_of_each_pair_of_frames(family_model: FamilyModel) -> None:
    """The mean of a pair's times; the last frame of an odd number is its own pair."""
    builder = PromptBuilder(family_model("qwen3_vl"), template=PLAIN)
    text = builder.tokenizer.decode(builder.build(video_problem([0, 1, 4, 4.5, 61])).ids)
    parts = text.split(" seconds>")
    assert [part.rpartition("<")[2] for part in parts[:-1]] == ["0.5", "4.2", "61.0"]


def test_what_follows_a_long_video_of_qwen2_5_vl_is_behind_it(family_model: FamilyModel) -> None:
    """Worked by hand: 4 frames over 30 seconds are 2 patches 20 seconds apart, and a second is 4 positions here."""
    folder = family_model("qwen2_5_vl")
    prompt = PromptBuilder(folder, template=PLAIN).build(video_problem(LONG))
    model = empty_model(folder)
    assert model.config.vision_config.tokens_per_second == 4
    positions = rope_positions(model, prompt)
    (video,) = (prompt.ids == model.config.video_token_id).nonzero()
    start = int(positions[0, video[0]])
    assert positions[0, video].unique().tolist() == [start, start + 80]
    after = positions[:, video[-1] + 1 :]
    assert after.tolist() == [list(range(start + 81, start + 81 + after.shape[1]))] * 3


@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_visual_tokens_are_counted_without_reading_a_frame(model_type: str, family_model: FamilyModel) -> None:
    builder = PromptBuilder(family_model(model_type), template=PLAIN)
    problem = video_problem(SHORT, LONG)
    prompt = builder.build(problem)
    grids = [*prompt.vision["image_grid_thw"], *prompt.vision["video_grid_thw"]]
    expanded = sum(int(t * (h * w // 4 - 1)) for t, h, w in grids)
    assert builder.count_unexpanded(replace(problem, images=())) == len(prompt.ids) - expanded


@pytest.mark.parametrize("model_type", [*TILED_FAMILIES, "qwen2_vl", "qwen3"])
def test_a_model_that_takes_no_videos_is_refused(model_type: str, family_model: FamilyModel) -> None:
    builder, problem = PromptBuilder(family_model(model_type), template=PLAIN), video_problem(SHORT)
    message = rf"problem 'video-.*' has a video, and models of type '{model_type}' .* use Qwen2\.5-VL or Qwen3-VL"
    with pytest.raises(UserError, match=message):
        builder.allow_videos([problem])
    with pytest.raises(UserError):
        builder.build(problem)
    assert builder.max_videos == 0


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ("<video> and <video>?", "has 0 <image> markers .* but 1 images, and 2 <video> markers but 1 videos"),
        ("<image><image><image><image>", "has 4 <image> markers .* but 1 images, and 0 <video> markers but 1 videos"),
    ],
)
def test_each_video_has_one_marker(question: str, fault: str, family_model: FamilyModel) -> None:
    with pytest.raises(UserError, match=fault):
        PromptBuilder(family_model("qwen2_5_vl"), template=PLAIN).build(video_problem(SHORT, question=question))


def test_frames_have_one_size(family_model: FamilyModel) -> None:
    problem = video_problem(SHORT)
    problem = replace(problem, images=(*problem.images[:-1], noise_png(200, 60)))
    with pytest.raises(UserError, match="the frames of its video differ in size"):
        PromptBuilder(family_model("qwen2_5_vl"), template=PLAIN).build(problem)


def test_without_a_video_its_marker_is_a_word(family_model: FamilyModel) -> None:
    problem = replace(video_problem(SHORT), question="Is <video> a tag?", images=(), meta={})
    prompt = PromptBuilder(family_model("qwen3"), template=PLAIN).build(problem)
    assert "Is <video> a tag?" in prompt.text
