"""The page's style sheets and scripts, demo/assets, and where gradio keeps the formula renderer that it ships."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from vlm_rl.report.html import stylesheet

_ROOT = re.compile(r":root \{([^}]*)\}")


def asset(name: str) -> str:
    """Return the text of demo/assets/<name>."""
    return resources.files("vlm_rl.demo").joinpath("assets", name).read_text(encoding="utf-8")


def stylesheet_of_page() -> str:
    """Return the styles of a page that follows the system's colours: the report's cards and the demo's own."""
    return stylesheet("cards") + asset("page.css")


def stylesheet_of_bundle() -> str:
    """Return the same where the `dark` class of the body decides, whatever the system says."""
    light, dark = _ROOT.findall(stylesheet("cards"))
    themes = f"body:not(.dark) {{{light} color-scheme: light; }} body.dark {{{dark} color-scheme: dark; }}"
    return stylesheet("cards") + themes + asset("page.css") + asset("switches.css")


def stylesheet_of_app() -> str:
    """Return the bundle's styles and those of the page under gradio."""
    return stylesheet_of_bundle() + asset("gradio.css") + asset("live.css")


def head() -> str:
    """Return the styles for the page's head: the rules for the switches and for a phone."""
    return f"<style>{asset('switches.css')}{asset('phone.css')}</style>"


def katex_files(frontend: Path) -> tuple[str, str] | None:
    """Return (module, style sheet) below gradio's assets/, whose names carry a hash; None if gradio has none."""
    files = [sorted(frontend.glob(f"assets/katex-*.{kind}")) for kind in ("js", "css")]
    if not all(files):
        return None
    return f"assets/{files[0][0].name}", f"assets/{files[1][0].name}"
