"""Take the pictures of the demo that the documentation shows, of its recorded runs, each below 150 kB.

    python -m perf.screenshots                          # all of them, into docs
    python -m perf.screenshots demo_phone               # this one
    python -m perf.screenshots --reduce docs/study.png  # a picture that a different command draws, in fewer colours

Needs Chromium and playwright (the dev extra).
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from tests.helpers.browser import open_browser, open_page
from tests.helpers.demo_process import demo_process
from vlm_rl.demo.default_runs import FIRST_VIEW

MAX_BYTES = 150_000  # of a picture


@dataclass(frozen=True)
class Picture:
    """A view of the demo as it is when `ready` can be seen."""

    query: str
    ready: str
    width: int
    height: int


PICTURES = {
    "demo_problem": Picture(FIRST_VIEW, ".ckpt .katex", 1440, 1000),
    "demo_lengths": Picture(f"{FIRST_VIEW}&tab=lengths", "#lengths svg >> nth=3", 1440, 1000),
    "demo_phone": Picture(FIRST_VIEW, ".ckpt .katex", 390, 844),
}


def take(names: Sequence[str], out: Path) -> None:
    """Take these pictures and print the size of each."""
    with TemporaryDirectory() as folder, demo_process(Path(folder)) as demo, open_browser() as browser:
        for name in names:
            path = out / f"{name}.png"
            path.write_bytes(reduced(_shot(browser, PICTURES[name], demo.url)))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _shot(browser: Any, picture: Picture, url: str) -> bytes:
    address = f"{url}/?{picture.query}"
    with open_page(address, browser=browser, width=picture.width, height=picture.height) as visit:
        visit.page.wait_for_selector(picture.ready)
        visit.page.wait_for_timeout(1500)  # fonts, and what moves when it is first drawn
        return visit.page.screenshot()


def reduced(picture: bytes) -> bytes:
    """Return a PNG with as many of 256 colours as its limit of bytes allows; it has no transparency."""
    pixels = Image.open(io.BytesIO(picture)).convert("RGB")
    content = b""
    for colors in (256, 128, 64, 32):
        file = io.BytesIO()
        pixels.quantize(colors, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        content = file.getvalue()
        if len(content) < MAX_BYTES:
            break
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--reduce", type=Path, nargs="+", default=[], help="pictures to reduce where they are")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for path in options.reduce:
        path.write_bytes(reduced(path.read_bytes()))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    if not options.reduce:
        take(options.names or list(PICTURES), options.out)


if __name__ == "__main__":
    main()
