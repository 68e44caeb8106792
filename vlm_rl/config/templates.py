"""The section `data.template`, where the prompt template is not a shipped one: what a file of your own holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from vlm_rl.config.base import ConfigSection
from vlm_rl.templates import TEMPLATES, Template

TemplateName = Literal["think_answer", "think_box", "think_code", "plain"]


class TemplateConfig(ConfigSection):
    """A prompt template of your own, the same record as a shipped one; see docs/rewards.md."""

    name: str
    """What it is called; the name of its file, without the ending, where the file does not say."""
    system: str = ""
    """The system prompt; "" leaves the chat template's own in place."""
    suffix: str = ""
    """What is written right after each question."""
    prefill: str = ""
    """The beginning of every response, which the model continues."""
    reasoning_block: bool = False
    """A response begins with its reasoning in <think> </think>."""
    answer_block: bool | None = None
    """The answer is inside <answer> </answer> (true), not looked for by these tags (false), or either (null).
    With a regular expression, which may name tags itself, null means false."""
    answer: str = "box"
    """The answer's place there: box, program (in a fenced block), text (all of it), last_line, or a regular
    expression of RE2 whose last match holds it as (?P<answer>...)."""
    form: str = ""
    """A regular expression of RE2 for a whole response in the form that is rewarded; "" rewards the blocks above, if
    reasoning_block is true."""
    example: str = ""
    """A perfect response, with {reasoning} and {answer} in their places, by which regular expressions are checked."""

    @property
    def record(self) -> Template:
        """Return the template."""
        return Template(**self.model_dump())

    def conflicts(self) -> Iterator[str]:
        if self.name in TEMPLATES:
            yield f"name is {self.name!r}, which a shipped template has: call it, or its file, something else"
        elif not re.fullmatch(r"\w[\w.-]{0,39}", self.name):
            yield f"name is {self.name!r}: it may have 40 letters, digits, _, - and dots"
        yield from self.record.faults()
