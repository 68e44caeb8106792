r"""Find the answer of a response: the contents of each \boxed{} in the part where the template wants the answer."""

from __future__ import annotations

import re

from vlm_rl.grading.latex import fold_unicode
from vlm_rl.templates import Template, boxes

# What a question leaves blank: spaces, underscores, dots and invisible text.
_BLANK = re.compile(
    r"(?:[\s_~?.{}$]|\\[_,;:!> ]|\\(?:q?quad|[lc]?dots)(?![A-Za-z])|\\(?:text|mathrm|mbox|underline)\s*(?=\{)"
    r"|\\(?:[hv]?phantom|[hv]space\*?)\s*\{(?:[^{}]|\{[^{}]*\})*\})*+"
)
_TAG = re.compile(r"< {0,2}(/?) {0,2}(think|answer) {0,2}>", re.IGNORECASE)


def extract_boxes(response: str, template: Template) -> tuple[list[str], str]:
    """Return (the texts of the boxes that count, ""), or ([], the reason why there are none).

    A box that holds only a blank, such as one that restates the question, does not count. Of a template that asks for
    no box the only text is what it finds. Its pattern reads the response as it is, full-width forms and all.
    """
    shown = response if template.has_pattern else fold_unicode(response)
    region = template.answer_region(_TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", shown))
    if region is None:
        blocks = "the reasoning block, or the answer block after it, is missing or not closed"
        return [], blocks if template.answer == "box" else f"{blocks}, or nothing is where the template looks"
    contents = boxes(region) if template.has_program else template.answers(region)
    if contents is None:
        return [], "a \\boxed{ is not closed"
    texts = [content.strip() for content in map(fold_unicode, contents) if not _BLANK.fullmatch(content)]
    what = "answer" if template.answer in ("text", "last_line") or template.has_pattern else "\\boxed{}"
    return texts, "" if texts else f"no {what} with content where the answer belongs"
