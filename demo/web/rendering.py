"""The demo's templates: every piece of HTML on the page, and in the page it exports, comes from `render`.

The environment escapes every value (vlm_rl.report.html.environment). Its filters:

    formulas   a text with its formulas marked for the page's script
    markdown   a text with its Markdown as elements, its formulas marked, and labels where marks are given
    value      a short value such as an answer, which may be a formula as a whole
    number     1,200; 0.25; 12
    share      a share as 12.3 %
    signed     a change as +1.5 or −2.0
    query      a mapping as the query of an address: the patch that a click hands over
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from vlm_rl.demo.numbers.url_state import UNFILTERED
from vlm_rl.demo.web.formulas import TextSpan, spans_of, value_spans
from vlm_rl.demo.web.markdown import marked_pieces_of
from vlm_rl.grading.moves import Mark, segments
from vlm_rl.report.html import environment


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of demo/templates/<template>.html with these values, each of them escaped.

    Half of a surrogate pair, which a server can reply and no answer of ours can hold, becomes a question mark.
    """
    html = _ENVIRONMENT.get_template(f"{template}.html").render(values)
    return Markup(html.encode(errors="replace").decode())


def number(value: float) -> str:
    """Return a number for readers: 1,200; 0.25; 12; a dash if there is none."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def share_text(value: float) -> str:
    """Return a share as 12.3 %, 1.5 %, 0.78 % or 100 %; a dash if there is none."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.2g} %" if abs(value) < 0.01 else f"{100 * value:.3g} %"


def signed(value: float) -> str:
    """Return a change with its sign and one decimal: +1.5, −2.0."""
    return f"{value:+,.1f}".replace("-", "−")


def formulas_html(text: str) -> Markup:
    """Return a text as HTML with its formulas and template tags marked."""
    return _spans_html(spans_of(text))


def value_html(text: str) -> Markup:
    """Return a short value, an answer, as HTML."""
    return _spans_html(value_spans(text))


def markdown_html(text: str, marks: Sequence[Mark] = ()) -> Markup:
    """Return a model's text as HTML: Markdown as elements, formulas and tags marked, and `marks` labelled."""
    return render("markdown", pieces=marked_pieces_of(text, segments(marks)))


def _spans_html(spans: list[TextSpan]) -> Markup:
    return render("formulas", spans=spans)


_ENVIRONMENT = environment("vlm_rl.demo")
_ENVIRONMENT.filters |= {
    "formulas": formulas_html,
    "markdown": markdown_html,
    "value": value_html,
    "number": number,
    "share": share_text,
    "signed": signed,
    "query": urlencode,
}
_ENVIRONMENT.globals["unfiltered"] = UNFILTERED  # the patch behind every "Clear filters"
