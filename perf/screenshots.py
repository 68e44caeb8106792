"""Take pictures of every page that the project draws: the demo, its bundle and its login, reports, studies, sets.

    python -m perf.screenshots                           # the pictures of the documentation, into docs
    python -m perf.screenshots demo_phone                # this one
    python -m perf.screenshots --pages pages             # every page, from top to bottom, as on a desk and a phone
    python -m perf.screenshots --runs runs/a runs/b      # of these runs instead of the recorded ones
    python -m perf.screenshots --reduce docs/study.png   # a picture that a different command draws, in fewer colours

The runs are the demo's recorded ones, in their first view, so the same command takes the pictures anew when they
change. The study is `--study FOLDER`, the folder of a `vlm-rl study`, or an invented one. The prepared set is drawn.
A picture of the documentation has less than 150 kB, a sheet of pages 400. Needs Chromium and playwright (the dev
extra).
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tests.helpers.browser import open_browser, open_page
from tests.helpers.chat_server import chat_server
from tests.helpers.demo_process import demo_process
from tests.helpers.example_study import lively, lively_evals, study_tree, write_run, write_study
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.demo.default_runs import RECORDED, first_view
from vlm_rl.demo.files.bundle import write_bundle
from vlm_rl.demo.numbers.library import find_runs
from vlm_rl.report.run_report import write_report
from vlm_rl.run.directory import RunDirectory
from vlm_rl.study.run import run_study
from vlm_rl.study.runs import load_study
from vlm_rl.toy.counting_squares import SQUARES

MAX_BYTES, MAX_SHEET = 150_000, 400_000  # of a picture, and of a sheet of pages
DESK, PHONE = (1440, 1000), (390, 844)  # pixels of a window
_MARGIN = 12  # pixels below the last element of a picture


@dataclass(frozen=True)
class View:
    """A page: which place, its address there, and the element that it is complete with."""

    place: str
    address: str
    ready: str
    act: Callable[[Any], None] = lambda page: None  # what a visitor does first


def _ask(page: Any) -> None:
    """Ask the live panel's first example."""
    page.get_by_label("Start from").click()
    page.get_by_role("option").first.click()
    page.wait_for_load_state("networkidle")  # the example's picture, if it has one
    page.get_by_label("Models to ask").click()
    page.get_by_role("option").first.click()
    page.keyboard.press("Escape")
    page.click("#live-ask")


VIEWS = {
    "overview": View("demo", "&tab=overview", "#overview svg >> nth=2"),
    "problems": View("demo", "&tab=problems", "#problem .ckpt"),
    "table": View("demo", "&tab=table", "#table tbody th"),
    "lengths": View("demo", "&tab=lengths", "#lengths svg >> nth=3"),
    "reasoning": View("demo", "&tab=reasoning", "#reasoning .moves"),
    "training": View("demo", "&tab=training", "#training svg"),
    "live": View("demo", "&tab=live", ".live-status b:text-is('done')", _ask),
    "export": View("demo", "&tab=export", ".export"),
    "login": View("login", "", "form"),
    "bundle": View("files", "bundle/index.html", "[data-panel=overview] svg >> nth=2"),
    "report": View("files", "report.html", ".chart svg"),
    "report_of_several": View("files", "report_of_several.html", ".chart svg"),
    "study": View("files", "study/comparison.html", ".chart svg"),
    "prepared_set": View("files", "set/report.html", ".sheet img"),
}


@dataclass(frozen=True)
class Picture:
    """A picture of the documentation: a view as in a window, or down to the end of an element."""

    view: str
    window: tuple[int, int]
    until: str = ""


PICTURES = {
    "demo_overview": Picture("overview", DESK),
    "demo_problem": Picture("problems", DESK),
    "demo_lengths": Picture("lengths", DESK, until="#lengths .chart-card >> nth=3"),
    "demo_phone": Picture("problems", PHONE),
}
_PANELS = [name for name, view in VIEWS.items() if view.place == "demo"]
_OTHERS = [name for name in VIEWS if name not in _PANELS]
SHEETS = {  # views, small, side by side
    "pages_demo_desk": (_PANELS, DESK),
    "pages_demo_phone": (_PANELS, PHONE),
    "pages_desk": (_OTHERS, DESK),
    "pages_phone": (_OTHERS, PHONE),
}
NAMES = (*PICTURES, *SHEETS)
DOCS = Path(__file__).resolve().parents[1] / "docs"


class Places:
    """Where the views are while the context is open, and a browser to visit them with."""

    def __init__(self, addresses: Mapping[str, str], browser: Any) -> None:
        self._addresses = addresses
        self._browser = browser

    @contextmanager
    def open(self, view: View, window: tuple[int, int]) -> Iterator[Any]:
        """Open a view in a window of this size and yield its page once it is drawn."""
        width, height = window
        address = self._addresses[view.place] + view.address
        with open_page(address, browser=self._browser, width=width, height=height) as visit:
            view.act(visit.page)
            visit.page.wait_for_selector(view.ready)
            visit.page.evaluate("scrollTo(0, 0)")
            visit.page.wait_for_timeout(1500)  # fonts, and what moves when it is first drawn
            yield visit.page

    def shot(self, name: str, window: tuple[int, int], *, until: str = "", whole: bool = False) -> bytes:
        """Return a PNG of a view: the window, the page down to the end of `until`, or the whole page."""
        with self.open(VIEWS[name], window) as page:
            if not until:
                return page.screenshot(full_page=whole)
            box = page.locator(until).bounding_box()
            area = {"x": 0, "y": 0, "width": window[0], "height": box["y"] + box["height"] + _MARGIN}
            return page.screenshot(full_page=True, clip=area)


@contextmanager
def places(runs: Sequence[Path], study: Path | None) -> Iterator[Places]:
    """Serve the demo of some runs and write every other page, until the context is left.

    `runs` are folders that the demo opens; `study` is the folder of a study with its page, or None.
    """
    with TemporaryDirectory() as name, open_browser() as browser:
        folder = Path(name)
        query = first_view(runs)
        _write_pages(folder, runs, query, study)
        (token := folder / "token").write_text("0123456789abcdef")
        (guard := folder / "guarded").mkdir()
        with (
            chat_server() as server,
            demo_process(folder, "--endpoint", f"a server={server.url('good')},m", run=folder / "runs") as demo,
            demo_process(guard, "--token-file", str(token), run=folder / "runs") as guarded,
        ):
            addresses = {
                "demo": f"{demo.url}/?{query}",
                "login": guarded.url,
                "files": f"{folder.as_uri()}/",
            }
            yield Places(addresses, browser)


def _write_pages(folder: Path, runs: Sequence[Path], query: str, study: Path | None) -> None:
    """Write every page but the demo into a folder, from within it: pages show the paths that they were given.

    Args:
        folder: gets the pages, and links to the runs below `runs`.
        runs: folders that the demo opens.
        query: the view of the bundle.
        study: the folder of a study with its page; None for an invented one.
    """
    found = [path.resolve() for one in runs for path in find_runs(one)]
    whole = study and study.resolve()
    with chdir(folder):
        links = [Path("runs", path.parent.name, path.name) for path in found]
        for link, path in zip(links, found, strict=True):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        directories = [RunDirectory(link) for link in links]
        write_report(directories[:1], Path("report.html"))
        write_report(directories, Path("report_of_several.html"))
        write_bundle([Path("runs")], Path("bundle"), view=query)
        raw = SQUARES.write(Path("raw"), seed=0, train=400, heldout=1, warm=1, mixture=1)
        prepare("virl39k", raw / "train", Path("set"))
        if whole:
            Path("study").symlink_to(whole)
            return
        path = write_study(Path("study.yaml"), study_tree())
        for entry in load_study(path).runs(Path("study")):
            write_run(entry, lively, evals=lively_evals(entry))
        run_study(path, Path("study"), report_only=True)


def take_documented(
    runs: Sequence[Path], study: Path | None = None, *, names: Sequence[str] = NAMES, out: Path = DOCS
) -> None:
    """Take pictures of the documentation, reduced.

    Args:
        runs: folders that the demo opens.
        study: the folder of a study with its page; None for an invented one.
        names: of PICTURES and SHEETS.
        out: where they go.
    """
    with places(runs, study) as found:
        for name in names:
            if name in SHEETS:
                write_reduced(out / f"{name}.png", _sheet(found, *SHEETS[name]), most=MAX_SHEET)
            else:
                picture = PICTURES[name]
                write_reduced(out / f"{name}.png", found.shot(picture.view, picture.window, until=picture.until))


def take_pages(names: Sequence[str], out: Path, runs: Sequence[Path], study: Path | None) -> None:
    """Take views from top to bottom, as on a desk and as on a phone.

    Args:
        names: of VIEWS.
        out: where the pictures go.
        runs: folders that the demo opens.
        study: the folder of a study with its page; None for an invented one.
    """
    with places(runs, study) as found:
        for name in names:
            for window in (DESK, PHONE):
                _write(out / f"{name}_{window[0]}.png", found.shot(name, window, whole=True))


def _sheet(found: Places, names: Sequence[str], window: tuple[int, int]) -> bytes:
    """Return views in a window of this size, small, with the name of each above it."""
    columns, width = (2, 640) if window == DESK else (len(names), 215)
    height, title, gap = round(width * window[1] / window[0]), 30, 16
    rows = -(-len(names) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (title + height + gap) + gap), "#d9dee6")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for place, name in enumerate(names):
        x, y = gap + place % columns * (width + gap), gap + place // columns * (title + height + gap)
        shot = Image.open(io.BytesIO(found.shot(name, window))).convert("RGB")
        pen.text((x, y), name.replace("_", " "), "#1d2430", font)
        sheet.paste(shot.resize((width, height), Image.Resampling.LANCZOS), (x, y + title))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def reduced(picture: bytes, *, most: int = MAX_BYTES) -> bytes:
    """Return a PNG of at most so many bytes, in as many of 256 colours as that allows; it has no transparency."""
    pixels = Image.open(io.BytesIO(picture)).convert("RGB")
    content = b""
    for colors in (256, 128, 64, 32, 16):
        file = io.BytesIO()
        pixels.quantize(colors, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        content = file.getvalue()
        if len(content) < most:
            break
    return content


def write_reduced(path: Path, picture: bytes, *, most: int = MAX_BYTES) -> None:
    """Write a picture of the documentation and say how large it is."""
    _write(path, reduced(picture, most=most))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{path}: {len(content) / 1000:.0f} kB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; with --pages, of {', '.join(VIEWS)}")
    parser.add_argument("--out", type=Path, default=DOCS, help="where pictures of the documentation go")
    parser.add_argument("--pages", type=Path, metavar="DIR", help="take every page, whole, into this folder instead")
    parser.add_argument("--runs", type=Path, nargs="+", default=[RECORDED], help="what the demo opens")
    parser.add_argument("--study", type=Path, help="the folder of a study, with its comparison.html")
    parser.add_argument("--reduce", type=Path, nargs="+", default=[], help="pictures to reduce where they are")
    options = parser.parse_args()
    known = tuple(VIEWS) if options.pages else NAMES
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for path in options.reduce:
        write_reduced(path, path.read_bytes())
    if options.reduce:
        return
    names = options.names or known
    if options.pages:
        take_pages(names, options.pages, options.runs, options.study)
    else:
        take_documented(options.runs, options.study, names=names, out=options.out)


if __name__ == "__main__":
    main()
