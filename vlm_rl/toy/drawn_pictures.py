"""Drawn pictures with questions in plain language, and traces that say what is seen before they answer.

    How many red circles are in the picture?
    I see 2 blue triangles and 3 red circles. The question is about red circles. So the answer is 3.

There are four kinds: the shape, the colour, a count, and a number in a bar chart. A picture has 112 x 112 pixels, 16
visual tokens of 28 x 28 pixels. For a study of length there are traces in other styles, as of word problems: a guess,
what is seen with a second look, and a control that tells the question twice and looks once.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlm_rl.toy.counting_task import keyed_rng, respond

SIDE = 112  # pixels
SMOOTH = 4  # pictures are drawn larger by this factor, so that their edges are smooth
COLOURS: dict[str, tuple[int, int, int]] = {
    "black": (20, 20, 20),
    "blue": (30, 60, 220),
    "brown": (130, 75, 25),
    "gray": (128, 128, 128),
    "green": (20, 150, 50),
    "red": (220, 30, 30),
    "teal": (0, 150, 150),
    "yellow": (225, 200, 0),
}
SHAPES = ("circle", "rectangle", "triangle")
BARS = "ABCD"
MAX_COUNT = 4  # of one shape in one colour

PictureStyle = Literal["guess", "seen", "checked", "retold"]
PICTURE_RIGHT_SHARE: dict[PictureStyle, float] = {"guess": 0.2, "seen": 0.85, "checked": 0.97, "retold": 0.85}
PICTURE_TRACE_SHARE: dict[PictureStyle, float] = {"guess": 0.4, "seen": 0.2, "checked": 0.2, "retold": 0.2}
"""Style -> its share of the traces of a study, as word_problems.STUDY_SHARE."""


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    """A picture and what its traces say."""

    id: str
    png: bytes
    question: str
    answer: str
    choices: tuple[str, ...]  # the answers that such a question can have
    seen: str  # what the picture shows, in sentences
    again: str  # the same after a second look, in other words

    @property
    def trace(self) -> str:
        """Return a response in the template think_answer that says what is seen, and is right."""
        return respond(f"{self.seen} So the answer is {self.answer}.", self.answer)


_Drawn = tuple[Image.Image, str, str, tuple[str, ...], str, str]  # the picture, then as in PictureQuestion


def styled_trace(item: PictureQuestion, style: PictureStyle, rng: np.random.Generator) -> str:
    """Return a response of this style in the template think_answer; PICTURE_RIGHT_SHARE of them are right."""
    answer = item.answer
    if rng.random() >= PICTURE_RIGHT_SHARE[style]:
        wrong = [choice for choice in item.choices if choice != answer]
        answer = wrong[int(rng.integers(len(wrong)))]
    if style == "guess":
        return respond(f"It looks like {answer}.", answer)
    if style == "seen":
        text = item.seen
    elif style == "retold":
        text = (
            f"Let me read the question again: {item.question} I read it once more, slowly, so no word is lost: "
            f"{item.question} That is all that it asks. {item.seen}"
        )
    else:
        text = f"Let me look closely. {item.seen} Let me check that with a second look: {item.again}. It is the same."
    return respond(f"{text} So the answer is {answer}.", answer)


def make_styled_traces(questions: Sequence[PictureQuestion], *, seed: int) -> list[str]:
    """Return a response to each question, its style sampled with the probabilities of PICTURE_TRACE_SHARE."""
    rng, styles = keyed_rng(seed, "picture traces"), list(PICTURE_TRACE_SHARE)
    chosen = rng.choice(len(styles), size=len(questions), p=list(PICTURE_TRACE_SHARE.values()))
    return [styled_trace(item, styles[int(style)], rng) for item, style in zip(questions, chosen, strict=True)]


def picture_style_of(response: str) -> PictureStyle:
    """Tell the style of a response, that of a model too: where nothing is said to be seen it is a guess."""
    text = response.lower()
    if not any(words in text for words in ("i see ", "the picture shows", "i read the bars")):
        return "guess"
    if "check" in text:
        return "checked"
    return "retold" if "read the question again" in text else "seen"


def make_questions(count: int, *, seed: int, split: str) -> list[PictureQuestion]:
    """Draw `count` pictures with a question each, a function of the arguments; the kinds take turns.

    The charts of the split "heldout" are in no other split, whatever the seeds and sizes. Places and grounds make
    equal pictures of the other kinds unlikely.
    """
    rng = keyed_rng(seed, "pictures", split)
    kinds = (_shape, _colour, _count, partial(_chart, held_out=split == "heldout"))
    return [_make_question(kinds[number % len(kinds)], rng, f"drawn-{split}-{number}") for number in range(count)]


def _make_question(
    kind: Callable[[np.random.Generator], _Drawn], rng: np.random.Generator, name: str
) -> PictureQuestion:
    picture, question, answer, choices, seen, again = kind(rng)
    file = io.BytesIO()
    picture.reduce(SMOOTH).save(file, "PNG")
    return PictureQuestion(name, file.getvalue(), question, answer, choices, seen, again)


def _shape(rng: np.random.Generator) -> _Drawn:
    picture, colour, shape = _one_shape(rng)
    return picture, "Which shape is in the picture?", shape, SHAPES, *_one_seen(colour, shape)


def _colour(rng: np.random.Generator) -> _Drawn:
    picture, colour, shape = _one_shape(rng)
    return picture, f"Which colour is the {shape}?", colour, tuple(COLOURS), *_one_seen(colour, shape)


def _count(rng: np.random.Generator) -> _Drawn:
    """Draw some of one thing and some of another, and ask for the number of one of them."""
    (colour, shape), (other_colour, other_shape) = (_pick_thing(rng) for _ in range(2))
    while (other_colour, other_shape) == (colour, shape):
        other_colour, other_shape = _pick_thing(rng)
    counts = [int(rng.integers(1, MAX_COUNT, endpoint=True)) for _ in range(2)]
    picture = _ground(rng)
    places = rng.permutation(9)[: sum(counts)]
    things = [(colour, shape)] * counts[0] + [(other_colour, other_shape)] * counts[1]
    for place, (paint, form) in zip(places.tolist(), things, strict=True):
        row, column = divmod(place, 3)
        _draw_shape(picture, form, paint, (18 + 38 * column, 18 + 38 * row), 13)
    question = f"How many {colour} {shape}s are in the picture?"
    asked, other = _number(counts[0], colour, shape), _number(counts[1], other_colour, other_shape)
    seen = f"I see {other} and {asked}. The question is about {colour} {shape}s."
    again = f"first the {colour} ones, {asked}, then {other}, {sum(counts)} things in all"
    return picture, question, str(counts[0]), tuple(str(n) for n in range(1, MAX_COUNT + 1)), seen, again


def _chart(rng: np.random.Generator, *, held_out: bool) -> _Drawn:
    """Draw bars with their numbers, and ask for a number or for the tallest bar."""
    values = _pick_values(rng)
    while (int(keyed_rng(0, "charts", *values).integers(8)) == 0) != held_out:  # an eighth of all charts
        values = _pick_values(rng)
    picture = _canvas((255, 255, 255))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(16 * SMOOTH)
    for index, (name, value) in enumerate(zip(BARS, values, strict=True)):
        left, top = 4 + 27 * index, 92 - 7 * value
        draw.rectangle(_scaled(left, top, left + 20, 92), fill=COLOURS["blue"])
        draw.text(_point(left + 10, top - 1), str(value), fill="black", font=font, anchor="mb")
        draw.text(_point(left + 10, 94), name, fill="black", font=font, anchor="mt")
    read = [f"{name} is {value}" for name, value in zip(BARS, values, strict=True)]
    again = f"from the right, {', '.join(reversed(read))}"
    if rng.random() < 0.5:
        at = int(rng.integers(len(BARS)))
        seen = f"I read the bars: {', '.join(read)}. The question is about bar {BARS[at]}."
        return picture, f"Which number does bar {BARS[at]} have?", str(values[at]), tuple("123456789"), seen, again
    at = int(np.argmax(values))
    seen = f"I read the bars: {', '.join(read)}. The largest number is {values[at]}."
    return picture, "Which bar is the tallest?", BARS[at], tuple(BARS), seen, again


def _pick_values(rng: np.random.Generator) -> list[int]:
    return rng.choice(np.arange(1, 10), size=len(BARS), replace=False).tolist()


def _one_shape(rng: np.random.Generator) -> tuple[Image.Image, str, str]:
    colour, shape = _pick_thing(rng)
    picture, radius = _ground(rng), int(rng.integers(14, 40))
    x, y = (int(at) for at in rng.integers(radius + 2, SIDE - radius - 2, size=2))
    _draw_shape(picture, shape, colour, (x, y), radius)
    return picture, colour, shape


def _one_seen(colour: str, shape: str) -> tuple[str, str]:
    return f"The picture shows a {colour} {shape}.", f"the thing in it is a {shape}, and it is {colour}"


def _pick_thing(rng: np.random.Generator) -> tuple[str, str]:
    return list(COLOURS)[int(rng.integers(len(COLOURS)))], SHAPES[int(rng.integers(len(SHAPES)))]


def _ground(rng: np.random.Generator) -> Image.Image:
    """Return a light ground, a little different each time."""
    red, green, blue = (int(level) for level in rng.integers(225, 256, size=3))
    return _canvas((red, green, blue))


def _canvas(ground: tuple[int, int, int]) -> Image.Image:
    return Image.new("RGB", (SIDE * SMOOTH, SIDE * SMOOTH), ground)


def _point(x: int, y: int) -> tuple[int, int]:
    return SMOOTH * x, SMOOTH * y


def _scaled(*pixels: int) -> list[int]:
    return [SMOOTH * at for at in pixels]


def _draw_shape(picture: Image.Image, shape: str, colour: str, centre: tuple[int, int], radius: int) -> None:
    draw, (x, y) = ImageDraw.Draw(picture), centre
    if shape == "circle":
        draw.ellipse(_scaled(x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    elif shape == "rectangle":
        height = radius * 2 // 3
        draw.rectangle(_scaled(x - radius, y - height, x + radius, y + height), fill=COLOURS[colour])
    else:
        draw.polygon(_scaled(x, y - radius, x - radius, y + radius, x + radius, y + radius), fill=COLOURS[colour])


def _number(count: int, colour: str, shape: str) -> str:
    return f"{count} {colour} {shape}{'s' * (count > 1)}"
