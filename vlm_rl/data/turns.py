"""What stands between two turns of an episode: an observation as token ids, made by the model's own chat template.

    writer = TurnWriter(builder, min_pixels=50_176, max_pixels=401_408)
    observed = writer.write(Observation("It is 7.", images=(png,)), after=turn_ids)

Sampled tokens are never decoded and encoded again. What is appended to them is encoded here, once: the end of the
turn where the policy did not sample it, the tool's or user's message, and the beginning of the next turn. Its images
are expanded here once, for the learner; the sampler gets one placeholder for each, as in a prompt.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image

from vlm_rl.data.images import TEST_LIMITS, decode_image, open_packed
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.types import Observation, ObservedTokens, Prompt

TOOL_TOKENS = ("<tool_call>", "</tool_call>")  # of a model that was trained to call tools in JSON between them
_RESPONSE, _END_RESPONSE = "<tool_response>\n", "\n</tool_response>"
_QUESTION, _ANSWER, _TEXT = "[[question]]", "[[answer]]", "[[observation]]"


class TurnError(Exception):
    """Raised where an observation cannot be shown to the model; the message ends a sentence that names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """The images of an observation, on the model's grid."""

    images: tuple[Image.Image, ...]  # RGB
    packed: tuple[bytes, ...]  # the same pixels as PNG
    expansions: list[list[int]]  # the ids that the placeholder of each expands to


class TurnWriter:
    """Encodes observations for one model.

    Attributes:
        role: whose message an observation is: "tool" where the chat template has a place for a tool's response,
            otherwise "user".
        calls: how the model calls a tool: "tool_call", JSON between <tool_call> and </tool_call>, where these are
            tokens of its own, otherwise "fenced".
    """

    def __init__(
        self, builder: PromptBuilder, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Find out where the chat template puts an observation.

        Args:
            builder: the prompt builder of the model.
            min_pixels, max_pixels: the range of an observed image's pixels, inside the builder's own; None: its own.

        Raises UserError for a chat template without a place for an observation.
        """
        self._builder = builder
        self._limits = {
            "min_pixels": builder.min_pixels if min_pixels is None else min_pixels,
            "max_pixels": builder.max_pixels if max_pixels is None else max_pixels,
        }
        for name, value in self._limits.items():
            if not builder.min_pixels <= value <= builder.max_pixels:
                raise UserError(
                    f"environment.{name} is {value}, outside of what the prompts' images may have "
                    f"({builder.min_pixels} to {builder.max_pixels} pixels), which engine and processor keep to"
                )
        self.calls = "tool_call" if all(map(self._is_writable, TOOL_TOKENS)) else "fenced"
        self.role = self._find_role()
        self._skeleton(0, has_text=True)

    def write(self, observation: Observation, *, after: np.ndarray) -> ObservedTokens:
        """Return the tokens of an observation behind a turn: both of the next two methods."""
        return self.encode(observation.text, self.fit(observation.images), after=after)

    def fit(self, images: Sequence[bytes]) -> Shown:
        """Return the images of an observation as the model sees them. May run in any thread.

        Args:
            images: encoded, as the environment gives them.

        Raises TurnError for one that cannot be used.
        """
        fitted = tuple(self._fitted(data, number) for number, data in enumerate(images))
        return Shown(fitted, tuple(map(_packed, fitted)), self._builder.expansions(fitted))

    def encode(self, text: str, shown: Shown, *, after: np.ndarray) -> ObservedTokens:
        """Return the tokens of an observation behind a turn.

        Args:
            text: of the observation.
            shown: its images.
            after: int32, the ids of the turn that it answers.

        Raises TurnError for a text that cannot be encoded.
        """
        builder = self._builder
        skeleton = self._skeleton(len(shown.images), has_text=bool(text))
        ids = builder.encode_chat(skeleton, {_TEXT: text} if text else {})
        if ids is None:
            raise TurnError("holds a control token of the model in its text")
        if int(after[-1]) == ids[0]:  # the policy has ended its turn as the template does
            ids = ids[1:]
        return ObservedTokens(
            ids=builder.expand(ids, shown.expansions),
            sampler_ids=np.array(ids, dtype=np.int32),
            images=shown.packed,
        )

    def _fitted(self, data: bytes, number: int) -> Image.Image:
        """Return an image of an observation, on the model's grid."""
        family = self._builder.family
        if family is None:
            raise TurnError("has an image, which a text-only model cannot see")
        try:
            image = decode_image(data, where=f"image {number}", limits=TEST_LIMITS)
            return family.fit(image, processor=self._builder.processor, **self._limits)
        except UserError as error:
            raise TurnError(f"cannot be shown: {error}") from None

    def _is_writable(self, token: str) -> bool:
        """Tell whether the model can sample this text as one token, and its decoded response shows it."""
        index = self._builder.tokenizer.get_vocab().get(token)
        return index is not None and index not in self._builder.banned_ids and self._builder.decode([index]) == token

    def _find_role(self) -> str:
        """Return tool where the chat template marks a tool's response as one, and shows its images."""
        try:
            shown = self._rendered("tool", 1 if self._builder.is_vision else 0, has_text=True)
        except UserError:  # the template refuses the role
            return "user"
        has_place = _RESPONSE.strip() in shown and shown.count(_TEXT) == 1
        token = getattr(self._builder.processor, "image_token", None)
        return "tool" if has_place and (not self._builder.is_vision or (token and token in shown)) else "user"

    def _skeleton(self, num_images: int, *, has_text: bool) -> str:
        """Return the text between two turns, with a placeholder for the message. Raises UserError if it is lost."""
        shown = self._rendered(self.role, num_images, has_text=has_text)
        if shown.count(_TEXT) != has_text:
            raise UserError(
                f"{self._builder.model_path}: its chat template does not show a second message of the user, so an "
                "environment cannot answer; use a model for chats"
            )
        return shown + self._builder.template.prefill

    def _rendered(self, role: str, num_images: int, *, has_text: bool) -> str:
        """Return the chat template's text after an answer that is followed by a message of this role."""
        is_plain = role == "user" and self.calls == "tool_call"  # the words that the model knows a response by
        before, after = (_RESPONSE, _END_RESPONSE) if is_plain else ("", "")
        text = _TEXT if has_text else ""
        answer = {"role": "assistant", "content": self._builder.as_content(_ANSWER)}
        messages = [self._message("user", _QUESTION), answer]
        messages.append(self._message(role, before + text, num_images, after))
        try:
            shown = self._builder.render(messages)
        except TemplateError as error:
            raise UserError(f"{self._builder.model_path}: {error}") from None
        return shown.rpartition(_ANSWER)[2]

    def _message(self, role: str, text: str, num_images: int = 0, after: str = "") -> dict[str, Any]:
        if not self._builder.is_vision:
            return {"role": role, "content": text + after}
        parts = [{"type": "text", "text": text}, *([{"type": "image"}] * num_images), {"type": "text", "text": after}]
        return {"role": role, "content": [part for part in parts if part != {"type": "text", "text": ""}]}


def as_prompt(builder: PromptBuilder, observed: ObservedTokens) -> Prompt:
    """Return observed tokens as a prompt has them: with images, and with `vision` for the learner."""
    images = open_images(observed)
    return Prompt("", "", "", observed.ids, observed.sampler_ids, images, builder.vision_of(images))


def open_images(observed: ObservedTokens) -> tuple[Image.Image, ...]:
    """Return the images as the sampler gets them."""
    return open_packed(observed.images)


def _packed(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
