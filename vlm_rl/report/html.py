"""The kit of every page: an environment of templates that escape, the frame, style sheets, images as data.

Report, study, preparation report and demo use it, so that they cannot disagree. Everything that a model, a data set
or a run wrote is escaped; images become data: addresses after our own decoder has opened them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vlm_rl.data.images import decode_image
from vlm_rl.errors import UserError
from vlm_rl.templates import END_THINK, THINK
from vlm_rl.visible_text import replace_invisible

VERDICT_MARKS = {"correct": "✓ correct", "wrong": "✗ wrong", "no_answer": "– no answer"}
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, one sentence on how to read it, and its body."""

    title: str
    caption: str
    body: str

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-").replace(",", "")


def environment(package: str) -> Environment:
    """Return the Jinja2 environment of a package's `templates` folder.

    Every value is escaped, undefined names raise, and characters that hide or reorder text become visible, so that
    no string of a run, a model or a data set can act on the page. HTML made by a template passes through unchanged
    where it is `Markup`.
    """
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def visible(text: str) -> str:
    """Replace control characters and invisible or direction-changing ones by U+FFFD."""
    return replace_invisible(text, lambda _: "\ufffd", keep="\t\n\r")


def escape(text: str) -> str:
    """Return text for HTML: markup inert, characters that hide or reorder others made visible."""
    return html.escape(visible(text), quote=True)


def split_response(response: str) -> tuple[str | None, str]:
    """(reasoning, the rest): the text up to the last </think>; an open block is all reasoning."""
    before, closed, after = response.rpartition(END_THINK)
    if closed:
        return before.strip().removeprefix(THINK).strip(), after.strip()
    if response.lstrip().startswith(THINK):
        return response.strip().removeprefix(THINK).strip(), ""
    return None, response.strip()


def data_uri(image: bytes, *, max_side: int = 640) -> str | None:
    """The image as a data: address, scaled down to `max_side` pixels; None if it does not open."""
    try:
        picture = decode_image(image, where="an evaluation record")
    except UserError:
        return None
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small = picture.width * picture.height <= 256 * 256
    picture.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 88}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def name_images(question: str, num_images: int) -> str:
    """The question for readers: its markers numbered, or gone where there is one image at most."""
    for number in range(1, question.count("<image>") + 1):
        question = question.replace("<image>", "" if num_images < 2 else f"[image {number}]", 1)
    return question


def asset(name: str) -> str:
    """Return the text of vlm_rl/assets/<name>: a style sheet or a script."""
    return resources.files("vlm_rl").joinpath("assets", name).read_text(encoding="utf-8")


def stylesheet(name: str) -> str:
    """Return one of our own style sheets, vlm_rl/assets/<name>.css."""
    return asset(f"{name}.css")


def content_policy(scripts: Sequence[str] = ()) -> str:
    """Return the Content-Security-Policy of a page that runs these inline scripts and loads nothing from outside."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = "".join(f" 'sha256-{digest}'" for digest in digests)
    return f"{_POLICY}; script-src{allowed}" if scripts else _POLICY


def page_html(
    *,
    title: str,
    header: str,
    sections: Sequence[Section],
    footer: str,
    key: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """A whole page; `title` and `footer` are plain text, `header` and the `key` of the charts are HTML."""
    links = "".join(f"<a href='#{s.anchor}'>{escape(s.title)}</a>" for s in sections)
    bodies = "".join(
        f"<section id='{s.anchor}'><h2>{escape(s.title)}</h2><p class='caption'>{s.caption}</p>{s.body}</section>"
        for s in sections
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts)}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title>"
        f"<style>{stylesheet('cards')}{stylesheet('report')}</style></head><body>"
        f"<header>{header}<nav>{links}</nav></header>{key}"
        f"<main>{bodies}</main><footer>{escape(footer)} Colours follow the "
        "system's light or dark setting.</footer>"
        + "".join(f"<script type='module'>{script}</script>" for script in scripts)
        + "</body></html>"
    )
