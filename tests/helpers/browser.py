"""A headless Chromium for the tests of web pages, with a record of every request it makes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


class Visit:
    """One open page with what happened on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []  # data: addresses aside
        self.failures: list[str] = []  # script errors, errors on the console, answers from 400 up
        page.on("request", lambda request: self._note(request.url))
        page.on("pageerror", lambda error: self.failures.append(str(error)))
        page.on("console", lambda line: self.failures.append(line.text) if line.type == "error" else None)
        page.on("response", lambda answer: self.failures.append(answer.url) if answer.status >= 400 else None)

    def _note(self, url: str) -> None:
        if not url.startswith("data:"):
            self.requests.append(url)


@contextmanager
def open_browser() -> Iterator[Any]:
    """Open one Chromium for several pages; skip the test where none is installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine: install chromium to run the tests of the web pages")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    url: str,
    *,
    scheme: str = "light",
    width: int = 1280,
    height: int = 900,
    browser: Any = None,
    touch: bool = False,
    without_policy: bool = False,
) -> Iterator[Visit]:
    """Visit `url` in a fresh profile, in a new browser where none is given.

    `touch` is a phone, which has no pointer to hover with.
    `without_policy` lets the browser ignore the page's Content-Security-Policy.
    """
    with ExitStack() as stack:
        own = browser or stack.enter_context(open_browser())
        context = own.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            bypass_csp=without_policy,
            has_touch=touch,
            is_mobile=touch,
        )
        stack.callback(context.close)
        page = context.new_page()
        page.set_default_timeout(60_000)
        visit = Visit(page)
        page.goto(url, timeout=60_000)
        yield visit


_CUT = """
() => {
  const found = [];
  for (const box of document.querySelectorAll('body *')) {
    const style = getComputedStyle(box), isHidden = !box.clientWidth || box.closest('details:not([open]), svg, pre');
    if (!isHidden && style.overflowX !== 'visible' && box.scrollWidth > box.clientWidth + 1)
      found.push(`cut at the right: ${box.innerText.slice(0, 80)}`);
  }
  for (const axis of document.querySelectorAll('svg .role-axis-label')) {
    const labels = [...axis.querySelectorAll('text')].filter((text) => text.getAttribute('opacity') !== '0');
    const boxes = labels.map((text) => text.getBoundingClientRect()).sort((a, b) => a.left - b.left);
    const isRow = boxes.every((box) => Math.abs(box.top - boxes[0].top) < 2);
    for (let i = 1; isRow && i < boxes.length; i++)
      if (boxes[i].left - boxes[i - 1].right < 3)
        found.push(`labels collide: ${axis.closest('.chart').getAttribute('aria-label')}`);
  }
  return [...new Set(found)];
}
"""


def cut_on_a_phone(page: Any) -> list[str]:
    """Return a line for each element that scrolls sideways, and for each chart whose horizontal labels touch."""
    return page.evaluate(_CUT)


def axe_faults(page: Any, *rules: str) -> list[str]:
    """Return what axe-core finds by these rules, or by all of them, a line for each element.

    The marks of charts are left out: axe takes minutes for thousands of them, and can only read a chart's name.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the dev extra is not installed")
    options: dict[str, Any] = {"preload": False}  # it would fetch the style sheets
    options |= {"runOnly": list(rules)} if rules else {}
    found = axe.Axe().run(page, context={"exclude": ["svg > *"]}, options=options).response["violations"]
    return [f"{fault['id']}: {node['html'][:200]}" for fault in found for node in fault["nodes"]]
