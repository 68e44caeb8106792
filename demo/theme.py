"""The page's style sheets, and where gradio keeps the formula renderer that it ships."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from vlm_rl.report.html import stylesheet

_ROOT = re.compile(r":root \{([^}]*)\}")


def stylesheet_of_page() -> str:
    """For a page that follows the system's colours: the cards' and the demo's own marks."""
    return stylesheet("cards") + stylesheet("demo")


def stylesheet_of_app() -> str:
    """The same under gradio, whose `dark` class on the body decides, whatever the system says."""
    light, dark = _ROOT.findall(stylesheet("cards"))
    themes = f"body:not(.dark) {{{light} color-scheme: light; }} body.dark {{{dark} color-scheme: dark; }}"
    return stylesheet("cards") + themes + stylesheet("demo") + stylesheet("demo_gradio") + stylesheet("live")


def head() -> str:
    """What stands in the page's head: the rules for a phone."""
    return f"<style>{stylesheet('demo_phone')}</style>"


def script() -> str:
    """The page's own script, demo/assets/demo.js."""
    return resources.files("vlm_rl.demo").joinpath("assets", "demo.js").read_text(encoding="utf-8")


def katex_files(frontend: Path) -> tuple[str, str] | None:
    """(module, style sheet) below gradio's assets/, whose names carry a hash; None if it ships them no more."""
    found = [sorted(frontend.glob(f"assets/katex-*.{kind}")) for kind in ("js", "css")]
    if not all(found):
        return None
    return f"assets/{found[0][0].name}", f"assets/{found[1][0].name}"
