"""The frame of every page that we write: one file, no script, no outside request."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_rl.cards import escape, stylesheet
from vlm_rl.sections import Section

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page_html(*, title: str, header: str, sections: Sequence[Section], footer: str, key: str = "") -> str:
    """A whole page; `title` and `footer` are plain text, `header` and the `key` of the charts are HTML."""
    links = "".join(f"<a href='#{s.anchor}'>{escape(s.title)}</a>" for s in sections)
    bodies = "".join(
        f"<section id='{s.anchor}'><h2>{escape(s.title)}</h2><p class='caption'>{s.caption}</p>{s.body}</section>"
        for s in sections
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title>"
        f"<style>{stylesheet('cards')}{stylesheet('report')}</style></head><body>"
        f"<header>{header}<nav>{links}</nav></header>{key}"
        f"<main>{bodies}</main><footer>{escape(footer)} Colours follow the "
        "system's light or dark setting.</footer></body></html>"
    )
