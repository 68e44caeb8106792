"""The only prompt builder: a Problem becomes token ids, pixels and the text around them.

    builder = PromptBuilder(model_path, template=TEMPLATES["think_answer"])
    builder.check_template()        # refuse models whose chat template cannot score full marks
    prompt = builder.build(problem)

Training, evaluation and the demo all come through here. Text from data is data: a `<|image_pad|>` or
`<|im_start|>` written in a question is encoded as the characters it is made of, never as the token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image
from torch import nn

from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image, fit_to_grid
from vlm_rl.errors import UserError
from vlm_rl.templates import THINK, Template, boxes
from vlm_rl.types import IMAGE_MARKER, Problem, Prompt

# qwen-vl-utils sizes an image again unless it lies between these many merged visual tokens.
_UTILS_MIN_TOKENS, _UTILS_MAX_TOKENS = 4, 16_384
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


class PromptBuilder:
    """Renders problems for one model.

    Attributes: tokenizer; processor (None for a text-only model); is_vision; template; prefill (what
    the chat template and the template write into the response's start); eos_ids (the end of an
    assistant's turn first); pad_id; image_token_id (None for text-only); banned_ids (control tokens
    that no response may contain; sampler and learner put them at minus infinity).
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        template: Template,
        min_pixels: int = 3136,
        max_pixels: int = 1_003_520,
    ) -> None:
        """Open tokenizer and processor. Raises UserError if the folder does not hold a usable model."""
        self.model_path = str(model_path)
        self.template = template
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.config = _open_config(self.model_path)
        self.is_vision = getattr(self.config, "vision_config", None) is not None
        self.processor, self.tokenizer = _open_tokenizer(self.model_path, is_vision=self.is_vision)
        self.image_token_id: int | None = self.config.image_token_id if self.is_vision else None
        self._text = _SafeText(self.tokenizer)
        if self.is_vision:
            _check_pixels(self.processor.image_processor, min_pixels, max_pixels)
        generation_tail, turn_tail = self._probe_chat_template()
        self.prefill = generation_tail + template.prefill
        self.eos_ids = self._find_eos(turn_tail)
        pad = self.tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else pad
        self.banned_ids = self._find_banned()

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side; Qwen2.5-VL's for a text-only model, which has none."""
        return self.processor.image_processor.patch_size if self.is_vision else 14

    def build(self, problem: Problem) -> Prompt:
        """Render one problem. Raises UserError naming the problem if text or images cannot be used."""
        num_markers = problem.question.count(IMAGE_MARKER)
        images = self._images(problem, num_markers=num_markers)
        text, sampler_ids, messages = self._unexpanded(problem, images)
        vision = self._vision(messages, images) if images else {}
        return Prompt(
            problem_id=problem.id,
            text=text,
            prefill=self.prefill,
            ids=self._expand(sampler_ids, vision, len(images)),
            sampler_ids=np.array(sampler_ids, dtype=np.int32),
            images=tuple(images),
            vision=vision,
        )

    def count_unexpanded(self, problem: Problem) -> int:
        """Tokens of the problem's prompt with each image as one, for a problem whose pictures are not read yet."""
        stand_ins = [Image.new("1", (1, 1))] * problem.question.count(IMAGE_MARKER)
        return len(self._unexpanded(problem, stand_ins)[1])

    def _unexpanded(
        self, problem: Problem, images: Sequence[Image.Image]
    ) -> tuple[str, list[int], list[dict[str, Any]]]:
        """(rendered text, ids with one placeholder per image, messages)."""
        texts = problem.question.split(IMAGE_MARKER)
        sentinels = _sentinels(texts)
        messages = [*self._system(), self._user(sentinels, images)]
        skeleton = self._render(messages) + self.template.prefill
        text = skeleton
        for sentinel, original in zip(sentinels, texts, strict=True):
            if text.count(sentinel) != 1:
                raise UserError(f"{self.model_path}: the chat template drops or repeats the user's text")
            text = text.replace(sentinel, original)
        ids = self._text.encode(skeleton, dict(zip(sentinels, texts, strict=True)))
        if ids is None:
            raise UserError(f"problem {problem.id!r}: its text forms a control token of the model; remove the row")
        return text, ids, messages

    def encode_response(self, text: str) -> np.ndarray:
        """Ids (int32) of a whole response, the end of the turn included and the prefill left out.

        `text` is what a grader would see, prefill included. Raises UserError if it starts otherwise.
        """
        for start in (self.prefill, self.prefill.rstrip()):
            if text.startswith(start):
                ids = self._text.encode_data(text.removeprefix(start))
                return np.array([*ids, self.eos_ids[0]], dtype=np.int32)
        raise UserError(
            f"{self.model_path} starts every response with {self.prefill!r}, but this one is {text[:80]!r}"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of generated tokens, special ones left out; the prompt's prefill is not in it."""
        plain = [int(i) for i in ids]
        return self.tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_template(self) -> None:
        """Send a perfect answer through the real chat template. Raises UserError if it would lose marks."""
        problem = Problem(
            id="template-check", question="What is 2 + 2?", images=(), answer="4", answer_type="integer"
        )
        where = f"{self.model_path} with data.template {self.template.name!r}"
        perfect = self.template.wrap("Two and two make four.", "4")
        if not perfect.startswith(self.prefill.rstrip()):
            raise UserError(
                f"{where}: the chat template starts every response with {self.prefill!r}, so that none could get the "
                "format reward; use another template, or a model whose chat template leaves the reasoning open"
            )
        if control := [token for token in self._text.special if token in perfect]:
            raise UserError(
                f"{where}: {control} are control tokens of this model, which are never sampled nor shown; "
                "use another template, or a tokenizer where they are ordinary tokens"
            )
        ids = self.encode_response(perfect)
        graded = self.build(problem).prefill + self.decode(ids)
        if self.template.has_reasoning and not self.template.is_well_formed(graded):
            raise UserError(
                f"{where}: with the chat template's own text in front a perfect response reads {graded!r} and gets "
                "no format reward; use another template, or a model whose chat template leaves the reasoning open"
            )
        region = self.template.answer_region(graded)
        if region is None or boxes(region) != ["4"]:
            raise UserError(f"{where}: no answer is found in the perfect response {graded!r}; use another template")

    def _images(self, problem: Problem, *, num_markers: int) -> list[Image.Image]:
        """Decoded and on the grid. Both sides get these very pixels."""
        if num_markers != len(problem.images):
            raise UserError(
                f"problem {problem.id!r}: {num_markers} {IMAGE_MARKER} markers in the question but "
                f"{len(problem.images)} images; each image needs one marker"
            )
        if not problem.images:
            return []
        if not self.is_vision:
            raise UserError(f"problem {problem.id!r} has images, but {self.model_path} is a text-only model")
        limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
        factor = _grid_factor(self.processor.image_processor)
        images = []
        for index, data in enumerate(problem.images):
            image = decode_image(data, where=f"problem {problem.id!r} image {index}", limits=limits)
            images.append(fit_to_grid(image, min_pixels=self.min_pixels, max_pixels=self.max_pixels, factor=factor))
        return images

    def _system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.template.system}] if self.template.system else []

    def _user(self, texts: Sequence[str], images: Sequence[Image.Image]) -> dict[str, Any]:
        """Qwen's user message: text, image, text, ..., text. A text-only model gets a plain string."""
        if not self.is_vision:
            return {"role": "user", "content": "".join(texts)}
        content: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
        for image, text in zip(images, texts[1:], strict=True):
            width, height = image.size
            content.append({"type": "image", "image": image, "resized_height": height, "resized_width": width})
            content.append({"type": "text", "text": text})
        return {"role": "user", "content": content}

    def _render(self, messages: list[dict[str, Any]], *, generation: bool = True) -> str:
        renderer = self.processor if self.is_vision else self.tokenizer
        try:
            return renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        except (ValueError, KeyError, TypeError, TemplateError) as error:
            raise UserError(f"{self.model_path}: its chat template cannot be used: {error}") from None

    def _vision(self, messages: list[dict[str, Any]], fitted: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Model inputs made of the fitted images: pixel_values, image_grid_thw [images, 3]."""
        from qwen_vl_utils import process_vision_info

        processor = self.processor.image_processor
        images: Any = process_vision_info(messages, image_patch_size=processor.patch_size)[0]
        assert [image.size for image in images] == [image.size for image in fitted]
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        encoded = processor(images=images, size=size, return_tensors="pt")
        grid = encoded["image_grid_thw"]
        patch = processor.patch_size
        assert grid.tolist() == [[1, image.height // patch, image.width // patch] for image in fitted], grid
        return {"pixel_values": encoded["pixel_values"], "image_grid_thw": grid}

    def _expand(self, sampler_ids: Sequence[int], vision: dict[str, torch.Tensor], num_images: int) -> np.ndarray:
        """One placeholder per merged visual token, int32 [P_tokens]."""
        ids = np.array(sampler_ids, dtype=np.int32)
        if not vision:
            assert self.image_token_id not in sampler_ids
            return ids
        merge = self.processor.image_processor.merge_size
        counts = vision["image_grid_thw"].prod(1).numpy() // merge**2
        is_image = ids == self.image_token_id
        assert is_image.sum() == num_images == len(counts), (is_image.sum(), num_images, len(counts))
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[is_image] = counts
        expanded = np.repeat(ids, repeats)
        assert (expanded == self.image_token_id).sum() == counts.sum()
        return expanded

    def _probe_chat_template(self) -> tuple[str, str]:
        """What the chat template writes at a response's start ("" or from <think> on), and after its end."""
        question, answer = "[[question]]", "[[answer]]"
        user = [*self._system(), self._user([question], [])]
        content = [{"type": "text", "text": answer}] if self.is_vision else answer
        tail = self._render(user).rpartition(question)[2]
        turn = [*user, {"role": "assistant", "content": content}]
        _, found, after = self._render(turn, generation=False).rpartition(answer)
        if not found:
            raise UserError(f"{self.model_path}: the chat template does not show the assistant's answer")
        start = tail.find(THINK)
        return tail[start:] if start >= 0 else "", after

    def _find_eos(self, turn_tail: str) -> tuple[int, ...]:
        """All ids that end a response; the one that the chat template ends a turn with comes first."""
        declared = _declared_eos(self.model_path, self.config, self.tokenizer)
        after = self.tokenizer.encode(turn_tail, add_special_tokens=False)
        if not after or after[0] not in {*self._text.special.values(), *declared}:
            raise UserError(
                f"{self.model_path}: the chat template ends an assistant's turn with {turn_tail!r}, which is no "
                "special token, so a response could not end; use a model with an end-of-turn token"
            )
        return tuple(dict.fromkeys([after[0], *declared]))

    def _find_banned(self) -> tuple[int, ...]:
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        placeholders = {getattr(self.config, name, None) for name in names}
        banned = {*self._text.special.values(), *placeholders} - {None} - set(self.eos_ids)
        return tuple(sorted(i for i in banned if i < self.config.get_text_config().vocab_size))


class PromptCache:
    """The prompts of one training step, each built once. It ends with its step: an epoch's pixels fill the memory."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._prompts: dict[str, Prompt] = {}

    def __getitem__(self, problem: Problem) -> Prompt:
        if problem.id not in self._prompts:
            self._prompts[problem.id] = self._builder.build(problem)
        return self._prompts[problem.id]


class _SafeText:
    """Encodes rendered chats in which some stretches are data and must not become control tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special = _special_tokens(tokenizer)  # text -> id
        longest_first = sorted(self.special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, skeleton: str, texts: Mapping[str, str]) -> list[int] | None:
        """Ids of `skeleton` with each sentinel (in order) replaced by its text.

        None if a text would add a control token to those of the skeleton all the same.
        """
        pieces, rest = [""], skeleton
        for sentinel, text in texts.items():
            before, _, rest = rest.partition(sentinel)
            head, *tail = self._cut(text)
            pieces[-1] += before + head
            pieces += tail
        pieces[-1] += rest
        ids = self._encode_pieces(pieces)
        special = set(self.special.values())
        ours = self._encode_pieces([skeleton])
        same = [i for i in ids if i in special] == [i for i in ours if i in special]
        return ids if same else None

    def encode_data(self, text: str) -> list[int]:
        """Ids of a text that holds no control token, whatever it says."""
        return self._encode_pieces(self._cut(text))

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _cut(self, text: str) -> list[str]:
        """Split after the first character of every control token, so that none is left whole."""
        pieces = []
        while (found := self._pattern.search(text)) is not None:
            pieces.append(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return [*pieces, text]


def rope_positions(model: nn.Module, prompt: Prompt) -> torch.Tensor:
    """Positions of a prompt's tokens, int64 [3, P_tokens]: time, height, width (all equal for text).

    With images they come from the model's own `get_rope_index`, called for this prompt alone. A
    response goes on from `positions.max() + 1`, which with images is not the prompt's length.
    """
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    if not prompt.vision:
        return torch.arange(len(ids)).expand(3, -1).clone()
    owner: Any = next(module for module in model.modules() if hasattr(module, "get_rope_index"))
    positions, _ = owner.get_rope_index(
        ids[None],
        mm_token_type_ids=(ids[None] == owner.config.image_token_id).int(),
        image_grid_thw=prompt.vision["image_grid_thw"],
    )
    return positions[:, 0]


def _grid_factor(image_processor: Any) -> int:
    """Pixels of a merged visual token's side."""
    return image_processor.patch_size * image_processor.merge_size


def _check_pixels(image_processor: Any, min_pixels: int, max_pixels: int) -> None:
    area = _grid_factor(image_processor) ** 2
    low, high = _UTILS_MIN_TOKENS * area, _UTILS_MAX_TOKENS * area
    if not low <= min_pixels <= max_pixels <= high:
        raise UserError(
            f"data.min_pixels {min_pixels} and data.max_pixels {max_pixels}: "
            f"need {low} <= min_pixels <= max_pixels <= {high}"
        )


def _open_config(model_path: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path {model_path}: no model could be opened there: {reason}") from None
    if getattr(config, "auto_map", None):
        raise UserError(
            f"model.path {model_path}: its config wants to run code of its own (auto_map); that is refused"
        )
    if getattr(config, "vision_config", None) is not None and not hasattr(config, "image_token_id"):
        raise UserError(f"model.path {model_path}: {config.model_type} is not a vision-language model that we know")
    return config


def _open_tokenizer(model_path: str, *, is_vision: bool) -> tuple[Any, Any]:
    """(processor or None, tokenizer)."""
    from transformers import AutoProcessor, AutoTokenizer

    try:
        if not is_vision:
            return None, AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path {model_path}: its tokenizer or processor cannot be opened: {reason}") from None
    return processor, processor.tokenizer


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Control tokens by text: all that the tokenizer calls special, and every vision placeholder."""
    added = tokenizer.added_tokens_decoder
    return {
        token.content: index for index, token in added.items() if token.special or token.content in _VISION_TOKENS
    }


def _declared_eos(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """The end-of-sequence ids that generation config, tokenizer and model config name, in this order."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # the file is optional
        generation = None
    ids: list[int] = []
    for source in (generation, tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    return list(dict.fromkeys(ids))


def _sentinels(texts: Sequence[str]) -> list[str]:
    """A stand-in for each text that occurs in none of them."""
    salt = 0
    while any(f"[[text-{salt}-" in text for text in texts):
        salt += 1
    return [f"[[text-{salt}-{index}]]" for index in range(len(texts))]
