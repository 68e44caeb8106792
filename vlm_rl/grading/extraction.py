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

    A box that holds only a blank, such as one that restates the question, does not count.
    """
    region = template.answer_region(_TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", fold_unicode(response)))
    if region is None:
        return [], "the reasoning block, or the answer block after it, is missing or not closed"
    contents = boxes(region)
    if contents is None:
        return [], "a \\boxed{ is not closed"
    texts = [content.strip() for content in contents if not _BLANK.fullmatch(content)]
    return texts, "" if texts else "no \\boxed{} with content where the answer belongs"
