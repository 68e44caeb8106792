"""The kit of every page: templates that escape, the frame, style sheets, images as data.

Report, study, preparation report and demo use it, so that they cannot disagree. Everything that a model, a data set
or a run wrote is escaped by its template; images become data: addresses after our own decoder has opened them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vlm_rl.data.images import decode_image
from vlm_rl.errors import UserError
from vlm_rl.run.run_files import write_atomically
from vlm_rl.templates import END_THINK, THINK
from vlm_rl.untrusted.visible_text import replace_invisible

VERDICT_MARKS = {"correct": "✓ correct", "wrong": "✗ wrong", "no_answer": "– no answer"}
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class PageSection:
    """A heading, how to read what follows, and its body; plain text is escaped, HTML is `Markup`."""

    title: str
    caption: str
    body: str

    @property
    def anchor(self) -> str:
        """Return the id by which links reach the section."""
        return self.title.lower().replace(" ", "-").replace(",", "")


@cache
def environment(package: str) -> Environment:
    """Return the Jinja2 environment of a package's `templates` folder, with the report's templates behind it.

    Every value is escaped, undefined names raise, and characters that hide or reorder text become visible, so that
    no string of a run, a model or a data set can act on the page. HTML made by a template passes through unchanged
    where it is `Markup`.
    """
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("vlm_rl.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def macros(package: str, name: str) -> Any:
    """Return a template's macros as functions that return `Markup`."""
    return environment(package).get_template(name).module


def visible(text: str) -> str:
    """Replace control characters and invisible or direction-changing ones by U+FFFD."""
    return replace_invisible(text, lambda _: "\ufffd", keep="\t\n\r")


def split_response(response: str) -> tuple[str | None, str]:
    """Return a response's reasoning, up to the last </think>, and the rest; an open block is all reasoning."""
    before, closed, after = response.rpartition(END_THINK)
    if closed:
        return before.strip().removeprefix(THINK).strip(), after.strip()
    if response.lstrip().startswith(THINK):
        return response.strip().removeprefix(THINK).strip(), ""
    return None, response.strip()


def data_uri(image: bytes, *, max_side: int = 640) -> str | None:
    """Return the image as a data: address, scaled down to `max_side` pixels; None if it does not open."""
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
    """Return the question for readers: its image markers numbered, or gone where there is one image at most."""
    for number in range(1, question.count("<image>") + 1):
        question = question.replace("<image>", "" if num_images < 2 else f"[image {number}]", 1)
    return question


def asset(name: str) -> str:
    """Return the text of vlm_rl/assets/<name>: a style sheet or a script."""
    return resources.files("vlm_rl").joinpath("assets", name).read_text(encoding="utf-8")


def stylesheet(name: str) -> str:
    """Return one of our own style sheets, vlm_rl/assets/<name>.css."""
    return asset(f"{name}.css")


def demo_command(folders: Sequence[Path]) -> str:
    """Return the command that opens the demo on these folders, quoted for a shell."""
    return f"vlm-rl demo {shlex.join(map(str, folders))}"


def content_policy(scripts: Sequence[str] = ()) -> str:
    """Return the Content-Security-Policy of a page that runs these inline scripts and loads nothing from outside."""
    return f"{_POLICY}; script-src {script_hashes(scripts)}" if scripts else _POLICY


def script_hashes(scripts: Sequence[str]) -> str:
    """Return the sources of a Content-Security-Policy that allow these inline scripts."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def page(
    *,
    title: str,
    header: Markup,
    sections: Sequence[PageSection],
    footer: str,
    key: Markup | str = "",
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
) -> str:
    """Return a whole page in one file.

    Args:
        header: what comes before the sections.
        footer: who wrote the page from what, a sentence.
        key: what the colours of the charts mean, in view beside every section.
        styles: more style sheets of ours.
        scripts: scripts of ours, the only ones that the page's policy lets run.
    """
    template = environment("vlm_rl.report").get_template("page.html")
    return template.render(
        title=title,
        header=header,
        sections=sections,
        footer=footer,
        key=key,
        policy=Markup(content_policy(scripts)),
        styles=[Markup(style) for style in (stylesheet("cards"), stylesheet("report"), *styles)],
        scripts=[Markup(script) for script in scripts],
    )


def write_page(text: str, out: Path) -> Path:
    """Write a page to `out` and return it. Raises UserError if it cannot be written."""
    try:
        write_atomically(out, lambda place: place.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot write the report to {out}: {error.strerror or error}; choose a different --out"
        ) from None
    return out
