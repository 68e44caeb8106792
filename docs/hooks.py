"""Let the site show the files of the repository that the pages link to.

On GitHub a link from docs/algorithms.md to ../vlm_rl/losses.py opens that file. The site holds nothing outside docs/,
so each linked file becomes a page of its own, and the link points there. CONTRIBUTING.md and CHANGELOG.md become
pages too. A link to a file that does not exist stays as it is, which stops a strict build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # file of the repository -> page
LINK = re.compile(r"(\]\()\s*(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    linked: set[str] = set()
    for file in list(files.documentation_pages()):
        _with_links(file.content_string, _source_of(file.src_uri), lambda path: linked.add(path) or path)
    for path in sorted(linked):
        place = ROOT / path
        if not path.startswith("docs/") and path not in PAGES and place.exists():
            files.append(File.generated(config, _page_of(path), content=_shown(place, path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point each link at the page that shows its file."""
    here = posixpath.dirname(page.file.src_uri) or "."
    return _with_links(markdown, _source_of(page.file.src_uri), lambda path: posixpath.relpath(_page_of(path), here))


def _with_links(markdown: str, source: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the target of each relative link, as a path from the root of the repository."""
    if source.startswith("source/"):
        return markdown

    def changed(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        return link[1] + change(path) if (ROOT / path).exists() else link[0]

    return LINK.sub(changed, markdown)


def _source_of(page: str) -> str:
    """Return the file of the repository that a page is made from."""
    made = {target: source for source, target in PAGES.items()}
    return made.get(page) or (page if page.startswith("source/") else f"docs/{page}")


def _page_of(path: str) -> str:
    """Return the page, or the picture, that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.md")


def _shown(place: Path, path: str) -> str:
    if place.is_dir():
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in sorted(item.name for item in place.iterdir()))
    language = {".py": "python", ".yaml": "yaml", ".js": "javascript"}.get(PurePosixPath(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{place.read_text(encoding='utf-8')}\n````\n"
