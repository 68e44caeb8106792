"""Take the pictures of the demo that the documentation shows, of its recorded runs, each below 150 kB.

    python -m perf.screenshots                          # all of them, into docs
    python -m perf.screenshots demo_phone               # this one
    python -m perf.screenshots --reduce docs/study.png  # a picture that a different command draws, in fewer colours

Needs Chromium and playwright (the dev extra).
"""

from __future__ import annotations

import argparse
import io
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from PIL import Image

from vlm_rl.demo.default_runs import FIRST_VIEW, RECORDED

MAX_BYTES = 150_000  # of a picture
SECONDS = 180  # for the server to start, and for a page to be drawn


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


@contextmanager
def serving() -> Iterator[str]:
    """Serve the demo of the recorded runs until the end of the block, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "vlm_rl", "demo", str(RECORDED), "--port", str(port)])
    try:
        url, end = f"http://127.0.0.1:{port}/", time.monotonic() + SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the demo did not start")
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def take(names: Sequence[str], out: Path) -> None:
    """Take these pictures and print the size of each."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name in names:
            path = out / f"{name}.png"
            path.write_bytes(reduced(_shot(browser, PICTURES[name], url)))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def _shot(browser: Any, picture: Picture, url: str) -> bytes:
    page = browser.new_page(viewport={"width": picture.width, "height": picture.height})
    page.set_default_timeout(1000 * SECONDS)
    page.goto(f"{url}?{picture.query}")
    page.wait_for_selector(picture.ready)
    page.wait_for_timeout(1500)  # fonts, and what moves when it is first drawn
    content = page.screenshot()
    page.close()
    return content


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
