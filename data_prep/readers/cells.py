"""Read the values of a user's table: nested columns, conversations, images in every usual form.

A conversation is a list of turns: {"role", "content"} as in OpenAI's messages, or {"from", "value"} as in LLaVA's and
ShareGPT's. A content is a text, or a list of parts of which some are images.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from vlm_rl.data_prep.readers.image_files import ImageBytes, ImageRef, ImageStore, image_ref
from vlm_rl.data_prep.readers.row_limit import load_json
from vlm_rl.data_prep.readers.written_values import is_missing, is_written, parse_written
from vlm_rl.data_prep.records import Fields, RowError
from vlm_rl.types import IMAGE_MARKER, times_fault

USER, ASSISTANT = ("user", "human"), ("assistant", "gpt", "model", "chatgpt", "bot")
SYSTEM = ("system", "developer")
_TURN_KEYS = (("role", "content"), ("from", "value"))
_IMAGE_NAME = re.compile(r"(?i).*\.(png|jpe?g|webp|bmp|gif|tiff?)")
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|UklGR)[A-Za-z0-9+/\s]{64,}={0,2}\s*")  # PNG, JPEG, WEBP


def cell(row: Fields, column: str) -> Any:
    """Return the value of a column, None where the row has none; a.b is the key b of the column a."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# -- conversations ---------------------------------------------------------------------------------


def is_conversation(value: Any) -> bool:
    """Say whether a value is a list of turns."""
    return bool(value) and isinstance(value, list) and all(_turn(item) is not None for item in value)


def _turn(item: Any) -> tuple[str, Any] | None:
    for role, content in _TURN_KEYS:
        if isinstance(item, Mapping) and isinstance(item.get(role), str) and content in item:
            return item[role].lower(), item[content]
    return None


def turn_of(conversation: Any, roles: tuple[str, ...]) -> Any:
    """Return the content of the turn of `roles`; turns of the user with no answer between them are one.

    Raises RowError if there is none, if more than one question or answer is there, if the answer comes
    before the question, and for turns of tools: a problem is one question with one answer.
    """
    turns = [turn for item in conversation if (turn := _turn(item)) is not None]
    if others := sorted({role for role, _ in turns} - {*USER, *ASSISTANT, *SYSTEM}):
        raise RowError("other_turns", f"the conversation has a turn of {others[0]!r}, which a problem cannot hold")
    sides = [USER[0] if role in USER else ASSISTANT[0] for role, _ in turns if role not in SYSTEM]
    contents = [content for role, content in turns if role in roles]
    if not contents:
        raise RowError("turn_missing", f"the conversation has 0 turns of {roles[0]}; there must be one")
    changes = sum(first != second for first, second in pairwise(sides))
    if changes > 1 or sides[0] != USER[0] or sides.count(ASSISTANT[0]) > 1:
        spoken = ", ".join(sides)
        raise RowError(
            "several_turns", f"the conversation has the turns {spoken}; it must be a question and its answer"
        )
    return contents[0] if len(contents) == 1 else [part for content in contents for part in _as_parts(content)]


def system_text(row: Fields, column: str) -> str:
    """Return the text of a conversation's system and developer turns and of the row's system column; "" if none."""
    value = cell(row, column)
    turns = [turn for item in value if (turn := _turn(item)) is not None] if is_conversation(value) else []
    texts = [content_text(content) for role, content in turns if role in SYSTEM]
    texts += [row.get(name) for name in ("system", "system_prompt") if column != name]
    said = (text.strip() for text in texts if isinstance(text, str))
    return "\n\n".join(dict.fromkeys(filter(None, said)))


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def content_text(content: Any) -> Any:
    """Return the text of a content, a marker for each of its images; what is not a list of parts stays as it is."""
    if not isinstance(content, list):
        return content
    return "\n".join(
        IMAGE_MARKER if _is_image_part(part) else str(part.get("text") or "") for part in _parts(content)
    )


def content_images(content: Any) -> list[Any]:
    """Return the images that a content's parts hold, in their order."""
    parts = _parts(content) if isinstance(content, list) else []
    images = [part.get("image_url") or part.get("image") for part in parts if _is_image_part(part)]
    return [image.get("url", image) if isinstance(image, Mapping) else image for image in images if image]


def _parts(content: list[Any]) -> Iterator[Mapping[str, Any]]:
    for part in content:
        if not isinstance(part, Mapping):
            raise RowError("bad_type", f"a part of a message must be an object, not {part!r:.60}")
        yield part


def _is_image_part(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


# -- a problem's parts -----------------------------------------------------------------------------


def question_of(row: Fields, column: str) -> Any:
    """Return the question in a column: its value, or what the user says in its conversation."""
    value = cell(row, column)
    return content_text(turn_of(value, USER)) if is_conversation(value) else value


def answer_of(row: Fields, column: str) -> Any:
    """Return the answer in a column: its value, or what the assistant says in its conversation."""
    value = cell(row, column)
    return content_text(turn_of(value, ASSISTANT)) if is_conversation(value) else value


def images_of(row: Fields, columns: list[str], store: ImageStore) -> list[ImageRef]:
    """Return references to the images in the columns, or in the user's turn of a column's conversation."""
    refs: list[ImageRef] = []
    for column in columns:
        value = cell(row, column)
        if is_conversation(value):
            value = content_images(turn_of(value, USER))
        refs += [_image(item, store) for item in images_in(value)]
    return refs


def images_in(value: Any) -> list[Any]:
    """Return the images of a cell: of a list, also one printed as text, or of names between semicolons or commas.

    What is empty is no image: null, NaN, an empty text, or a struct of datasets without bytes and path.
    """
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str) and not is_encoded(value):
        if is_written(value):
            with suppress(ValueError):
                written = parse_written(value)
                items = written if isinstance(written, list) else items
        else:
            parts = [part.strip() for part in re.split(r"[;,|\n]", value) if part.strip()]
            items = parts if len(parts) > 1 and all(map(_IMAGE_NAME.fullmatch, parts)) else items
    return [item for item in items if not is_missing(item) and item != {"bytes": None, "path": None}]


def is_image_name(text: str) -> bool:
    """Say whether a text ends as the names of images do."""
    return _IMAGE_NAME.fullmatch(text) is not None


def video_of(
    row: Fields, frames: str, times: str, *, fps: float | None, store: ImageStore
) -> tuple[list[ImageRef], list[float]]:
    """Return references to the frames of a row's video, and the seconds of each; nothing if it has no video.

    Args:
        row: the row.
        frames: the column of the frames: a list of images, or a folder of images.
        times: the column of their times, a list of seconds; "" if the rate gives them.
        fps: the rate, in frames a second.
        store: the images beside the table.

    Raises RowError for a folder without images, and for times that a video cannot have.
    """
    value = cell(row, frames)
    if value in (None, "", []):
        return [], []
    refs = store.folder(value) if isinstance(value, str) else images_of(row, [frames], store)
    seconds = cell(row, times) if times else [number / (fps or 1.0) for number in range(len(refs))]
    if isinstance(seconds, str):
        try:
            seconds = load_json(seconds)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_video", f"{times} must be a list of seconds: {error}") from None
    if fault := times_fault(seconds):
        raise RowError("bad_video", f"the row {fault}")
    if len(seconds) != len(refs):
        raise RowError("bad_video", f"the row has a video of {len(refs)} frames with {len(seconds)} times")
    return refs, seconds


def _image(value: Any, store: ImageStore) -> ImageRef:
    """Return the reference in a value: what `image_ref` takes, a data URL, base64, or a path as a file URL."""
    if not isinstance(value, str):
        return image_ref(value, store)
    if is_encoded(value):
        try:
            return ImageBytes(base64.b64decode(value.partition(";base64,")[2] or value, validate=False))
        except (binascii.Error, ValueError) as error:
            raise RowError("image_unreadable", f"the image is not base64: {error}") from None
    return image_ref(value.removeprefix("file://"), store)


def is_encoded(value: str) -> bool:
    """Say whether a text is an image as base64, with or without the head of a data URL."""
    return value.startswith("data:image/") or _BASE64.fullmatch(value) is not None
