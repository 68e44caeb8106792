"""Images and videos in Qwen's vision-language models, and images in GLM-4.xV: on a grid of patches.

There is one placeholder for each merged token.

A patch of a video spans two frames. Qwen2.5-VL gives it a position by its time, from one rate for the whole video.
Qwen3-VL writes the time in front of each pair of frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.images import check_pixel_range, fit_to_grid
from vlm_rl.data.vision.tower import TowerSize
from vlm_rl.types import Video

_WITH_VIDEOS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_AS_GIVEN = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}  # frames are fitted


class QwenVL:
    """A VisionFamily. We resize images and frames to the grid, and the processor does not."""

    has_mrope = True
    first_layer = "patch_embed"

    def size(self, processor: Any, min_pixels: int, max_pixels: int) -> dict[str, int]:
        """Return the image processor's bounds, which leave fitted images as they are."""
        return {"shortest_edge": min_pixels, "longest_edge": max_pixels}

    def takes_videos(self, config: Any) -> bool:
        return config.model_type in _WITH_VIDEOS

    def placeholder_id(self, config: Any) -> int:
        return config.image_token_id

    def joined(self, ids: Sequence[int], tokenizer: Any) -> list[int]:
        return list(ids)

    def row_masks(self, config: Any, embeds_NLH: Tensor, ids_NL: Tensor) -> dict[str, Any] | None:
        return None

    def patch_size(self, processor: Any) -> int | None:
        return processor.image_processor.patch_size

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        check_pixel_range(min_pixels, max_pixels, factor=_factor(processor))

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        return fit_to_grid(image, min_pixels=min_pixels, max_pixels=max_pixels, factor=_factor(processor))

    def encode(
        self, fitted: Sequence[Image.Image | Video], *, processor: Any, min_pixels: int, max_pixels: int
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        images = [item for item in fitted if not isinstance(item, Video)]
        size = self.size(processor, min_pixels, max_pixels)
        vision, of_images = _encode_images(images, processor, size) if images else ({}, [])
        videos = [_encode_video(item, processor) for item in fitted if isinstance(item, Video)]
        for key in videos[0][0] if videos else ():
            vision[key] = torch.cat([encoded[key] for encoded, _ in videos])
        rest = {False: iter(of_images), True: (ids for _, ids in videos)}
        return vision, [next(rest[isinstance(item, Video)]) for item in fitted]

    def engine_options(self, processor: Any, *, min_pixels: int, max_pixels: int, max_videos: int) -> dict[str, Any]:
        settings: dict[str, Any] = {"size": self.size(processor, min_pixels, max_pixels)}
        if max_videos:
            settings["videos_kwargs"] = _AS_GIVEN
        return {"mm_processor_kwargs": settings, "limit_mm_per_prompt": {"video": max_videos}}

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.spatial_merge_size
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(side**2, size), "image_grid_thw": torch.tensor([[1, side, side]])}

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> list[Tensor]:
        # In one call for images and videos: under ZeRO all rows must call the tower as often.
        names = [("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")]
        pairs = [(vision[pixels], vision[grid]) for pixels, grid in names if grid in vision]
        output = model.model.get_image_features(*(torch.cat(tensors) for tensors in zip(*pairs, strict=True)))
        return [torch.cat(images) for images in (output.pooler_output, *getattr(output, "deepstack_features", []))]

    def precomputed(self, features: Sequence[Tensor], config: Any, ids_T: Tensor) -> dict[str, Any]:
        num_images = int((ids_T == config.image_token_id).sum())
        outputs = {"image": _output([level_FH[:num_images] for level_FH in features])}
        if len(features[0]) > num_images:
            outputs["video"] = _output([level_FH[num_images:] for level_FH in features])
        return outputs

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(vision)

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        types_T = (ids_T == config.image_token_id).int() + 2 * (ids_T == config.video_token_id).int()
        return {"mm_token_type_ids": types_T[None]}

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        vision = config.vision_config
        is_qwen2_vl = vision.model_type.startswith("qwen2_vl")  # whose hidden_size is the language model's
        hidden = vision.embed_dim if is_qwen2_vl else vision.hidden_size
        mlp = int(hidden * vision.mlp_ratio) if is_qwen2_vl else vision.intermediate_size
        return TowerSize(
            hidden=hidden,
            mlp=mlp,
            heads=vision.num_heads,
            layers=vision.depth,
            patches=max_pixels // vision.patch_size**2,
            patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )


class GlmVL(QwenVL):
    """GLM-4.xV, whose processor counts the pixels of both copies of an image that a patch spans."""

    def size(self, processor: Any, min_pixels: int, max_pixels: int) -> dict[str, int]:
        frames = processor.image_processor.temporal_patch_size
        return {"shortest_edge": frames * min_pixels, "longest_edge": frames * max_pixels}


def video_metadata(video: Video) -> dict[str, Any]:
    """Return a video's metadata as processors take it.

    They know a time as a frame's index over the video's frames a second. Ours is a clock of one tick a second, so an
    index is a time. Qwen2.5-VL's rate is the number of our frames over that of all frames, which gives the mean rate.
    """
    num_frames, seconds = len(video.frames), video.seconds
    ticks = num_frames * (seconds[-1] - seconds[0]) / (num_frames - 1)
    return {"fps": 1.0, "frames_indices": list(seconds), "total_num_frames": ticks}


def _encode_video(video: Video, processor: Any) -> tuple[dict[str, Tensor], list[int]]:
    """Return the model's inputs of one video, and the ids that its placeholder expands to."""
    encoded = processor(
        text=[processor.video_token],
        videos=[video.pixels()],
        video_metadata=[video_metadata(video)],
        add_special_tokens=False,
        return_tensors="pt",
        videos_kwargs=_AS_GIVEN,
    )
    names = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    vision = {name: torch.as_tensor(encoded[name]) for name in names if name in encoded}
    return vision, encoded["input_ids"][0].tolist()


def _encode_images(
    fitted: Sequence[Image.Image], processor: Any, size: Mapping[str, int]
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Return the model's inputs of all images, and the ids that each one's placeholder expands to."""
    from qwen_vl_utils import process_vision_info

    own = processor.image_processor
    content = [
        {"type": "image", "image": image, "resized_height": image.height, "resized_width": image.width}
        for image in fitted
    ]
    messages = [{"role": "user", "content": content}]
    images: Any = process_vision_info(messages, image_patch_size=own.patch_size)[0]
    assert [image.size for image in images] == [image.size for image in fitted]
    encoded = own(images=images, size=dict(size), return_tensors="pt")
    grid, side = encoded["image_grid_thw"], own.patch_size
    assert grid.tolist() == [[1, image.height // side, image.width // side] for image in fitted], grid
    counts = (grid.prod(1) // own.merge_size**2).tolist()
    vision = {"pixel_values": encoded["pixel_values"], "image_grid_thw": grid}
    return vision, [[processor.image_token_id] * count for count in counts]


def _output(features: Sequence[Tensor]) -> Any:
    merged_FH, *deepstack = features
    return SimpleNamespace(pooler_output=[merged_FH], deepstack_features=[[level_FH] for level_FH in deepstack])


def _factor(processor: Any) -> int:
    """Return the pixels of a merged visual token's side."""
    return processor.image_processor.patch_size * processor.image_processor.merge_size
