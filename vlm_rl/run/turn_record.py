"""An episode as it is stored in a column of text: what each turn said, and what the environment showed.

    [{"text": "", "tokens": 0, "answer": {...}},    what was shown before the first turn, if anything
     {"text": "...", "tokens": 31, "answer": {"tool": "zoom", "text": "", "error": "", "images": ["<base64 JPEG>"]}},
     {"text": "...", "tokens": 12, "ending": "done"}]

Images are small copies for readers. The very pixels that the model saw follow from the problem and the turns.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from pydantic import Base64Bytes, BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from vlm_rl.errors import UserError
from vlm_rl.types import Observation, Rollout, Turn

LARGEST_SIDE = 224  # pixels of a stored copy


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn of an episode, for readers; the first may be what was shown before it, without a token."""

    text: str
    num_tokens: int
    tool: str = ""
    answer: str = ""
    error: str = ""
    images: tuple[bytes, ...] = ()  # JPEG
    ending: str = ""

    @property
    def is_start(self) -> bool:
        """Tell whether nothing was sampled: this is what the environment showed before the first turn."""
        return not self.num_tokens

    @property
    def addresses(self) -> list[str]:
        """Return the images as data: addresses."""
        return [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in self.images]


def turns_column(rollout: Rollout) -> str:
    """Return the episode as JSON, "" for a response of one turn without an environment."""
    if not rollout.turns:
        return ""
    begin = [] if (start := rollout.start) is None else [_stored("", 0, Observation(start.text), start.images)]
    return json.dumps([*begin, *map(_turn, rollout.turns)], ensure_ascii=False)


def read_turns(column: str | None) -> list[StoredTurn]:
    """Return the turns that `turns_column` wrote; none for "" and for files that are older than episodes.

    Raises UserError if the text is not what `turns_column` writes.
    """
    if not column:
        return []
    try:
        return [_read(item) for item in _STORED.validate_json(column)]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(
            f"column turns: {place}: {first['msg']}, but the value is {str(first['input'])[:80]!r}; evaluate again"
        ) from None


def conversation(turns: Sequence[StoredTurn]) -> str:
    """Return an episode as plain text: what the policy said, and in brackets what it was answered."""
    parts = []
    for turn in turns:
        parts += [turn.text] * (not turn.is_start)
        shown = [turn.answer] * bool(turn.answer) + ["an image"] * len(turn.images)
        if shown:
            parts.append(f"[{turn.tool or 'the environment'}: {', '.join(shown)}]")
    return "\n\n".join(parts)


def _turn(turn: Turn) -> dict[str, Any]:
    images = turn.observed.images if turn.observed is not None else ()
    stored = _stored(turn.text, turn.num_tokens, turn.observation, images)
    return stored | ({"ending": turn.ending} if turn.ending else {})


def _stored(text: str, num_tokens: int, seen: Observation | None, images: Sequence[bytes]) -> dict[str, Any]:
    """Return a turn as plain JSON; `images` are those that were seen, on the model's grid."""
    stored: dict[str, Any] = {"text": text, "tokens": num_tokens}
    if seen is not None:
        stored["answer"] = {
            "tool": seen.tool,
            "text": seen.text,
            "error": seen.error,
            "images": [base64.b64encode(_small(data)).decode() for data in images],
        }
    return stored


class _StoredAnswer(BaseModel, strict=True):
    tool: str
    text: str
    error: str
    images: list[Base64Bytes]


class _TurnInFile(BaseModel, strict=True):
    text: str
    tokens: NonNegativeInt
    answer: _StoredAnswer | None = None
    ending: str = ""


_STORED = TypeAdapter(list[_TurnInFile])


def _read(item: _TurnInFile) -> StoredTurn:
    turn = StoredTurn(item.text, item.tokens, ending=item.ending)
    if (seen := item.answer) is None:
        return turn
    return replace(turn, tool=seen.tool, answer=seen.text, error=seen.error, images=tuple(seen.images))


def _small(data: bytes) -> bytes:
    image = Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()
