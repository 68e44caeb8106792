r"""What a response must look like: one `Template` per way of asking for reasoning.

A template owns the system prompt, the prefill, the format rule and the answer region. The text that is judged always
starts with the prefill: the caller puts it back in front of the sampled text.

An answer counts only inside the answer region. The region starts after the last `</think>`; where the template asks
for `<answer>`, it is what that tag encloses. A reasoning block that is never closed leaves no region. Without any
block the whole response is the region, though its format is wrong. Model text is hostile input: everything here takes
time linear in its length and executes nothing. This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"
_TAGS = (THINK, END_THINK, ANSWER, END_ANSWER)
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's special tokens, in the order of their ids; skipped when decoding."""
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Template:
    r"""One way of asking for reasoning and reading the answer back."""

    name: str
    system: str  # the system prompt; "" leaves the chat template's own in place
    prefill: str = ""  # written into the prompt after the chat template's generation prompt
    has_reasoning: bool = True  # a <think> block comes first
    has_answer: bool | None = False  # the box is inside <answer> </answer>; None: either way
    has_program: bool = False  # the answer is a program in a fenced block, and not in a box

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that a response needs."""
        return _TAGS if self.has_answer else _TAGS[:2] if self.has_reasoning else ()

    def wrap(self, reasoning: str, answer: str) -> str:
        r"""Return a perfect response, prefill included; `answer` is the text inside \boxed{}.

        Raises ValueError if `reasoning` or `answer` holds a tag of the template.
        """
        for tag in _TAGS:
            if tag in reasoning or tag in answer:
                raise ValueError(f"the text to wrap already contains {tag}: remove it first")
        box = fenced(answer) if self.has_program else rf"\boxed{{{answer}}}"
        if self.has_answer:
            box = f"{ANSWER}{box}{END_ANSWER}"
        return f"{THINK}{reasoning}{END_THINK}{box}" if self.has_reasoning else f"{reasoning}\n{box}"

    def is_well_formed(self, response: str) -> bool:
        """Check the format: one reasoning block, then one box, inside the answer block where the template has one.

        Where the answer is a program, it is one fenced block in place of the box.

        Only white space may be outside the blocks. A template without a reasoning block gives False.
        """
        text = response.strip()
        if not self.has_reasoning or not text.startswith(THINK):
            return False
        if any(text.count(tag) != (bool(self.has_answer) or tag in (THINK, END_THINK)) for tag in _TAGS):
            return False
        reasoning, _, rest = text.removeprefix(THINK).partition(END_THINK)
        rest = rest.strip()
        if self.has_answer:
            if not (rest.startswith(ANSWER) and rest.endswith(END_ANSWER)):
                return False
            rest = rest.removeprefix(ANSWER).removesuffix(END_ANSWER)
        contents = self.answers(rest)
        return bool(reasoning.strip()) and contents is not None and len(contents) == 1 and bool(contents[0].strip())

    def is_well_formed_turn(self, text: str) -> bool:
        """Check an earlier turn of an episode: one reasoning block, and no answer block that is not a whole answer.

        What follows the reasoning is the environment's to read. A template without a reasoning block gives False.
        """
        text = text.strip()
        if not self.has_reasoning or not text.startswith(THINK):
            return False
        if any(text.count(tag) != 1 for tag in (THINK, END_THINK)):
            return False
        reasoning, _, rest = text.removeprefix(THINK).partition(END_THINK)
        is_answer = any(tag in rest for tag in (ANSWER, END_ANSWER))
        return bool(reasoning.strip()) and (not is_answer or self.is_well_formed(text))

    def answers(self, region: str) -> list[str] | None:
        """Return the programs or the contents of the boxes in a text; None where a box is never closed."""
        return programs(region) if self.has_program else boxes(region)

    def answer_region(self, response: str) -> str | None:
        """Return the part of the response in which the answer is looked for, or None if there is none."""
        has_block = THINK in response or END_THINK in response
        tail = response
        if has_block:
            _, closed, tail = response.rpartition(END_THINK)
            if not closed or THINK in tail:
                return None
        is_tagged = ANSWER in tail or END_ANSWER in tail
        if self.has_answer is False or (not is_tagged and not (self.has_answer and has_block)):
            return tail
        # From the first opening to the last closing tag: answers in several blocks must all agree.
        _, opened, inside = tail.partition(ANSWER)
        inside, closed, rest = inside.rpartition(END_ANSWER)
        if self.has_answer is None and not closed:
            return rest if opened else tail
        return inside if opened and closed else None

    def reasoning(self, response: str) -> str | None:
        """Return the text of the reasoning block, which may be unclosed; None if there is no block."""
        if THINK not in response and END_THINK not in response:
            return None
        if END_THINK in response:
            response = response.rpartition(END_THINK)[0]
        return response.partition(THINK)[2] if THINK in response else response


def boxes(text: str) -> list[str] | None:
    r"""Return the contents of every outermost `\boxed{...}` in order; None if one is never closed.

    Escaped braces (`\{`) do not count as braces.
    """
    contents: list[str] = []
    position = 0
    while (start := _BOX.search(text, position)) is not None:
        depth = 1
        for brace in _BRACE.finditer(text, start.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                contents.append(text[start.end() : brace.start()])
                position = brace.end()
                break
        else:
            return None
    return contents


def fenced(program: str) -> str:
    """Return a program in a fenced block."""
    return f"```python\n{program}\n```"


def programs(text: str) -> list[str]:
    """Return the text between each two lines that hold ```, in order; a last block that is not closed is left out."""
    lines, fences = _fences(text)
    pairs = zip(fences[::2], fences[1::2], strict=False)
    return ["\n".join(lines[start + 1 : end]) for start, end in pairs]


def last_program(text: str) -> str | None:
    """Return the text between the last two lines that hold ```, as LiveCodeBench does; None without two."""
    lines, fences = _fences(text)
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else None


def _fences(text: str) -> tuple[list[str], list[int]]:
    """Return the lines of a text, and the numbers of those that hold ```."""
    lines = text.split("\n")
    return lines, [number for number, line in enumerate(lines) if "```" in line]


def states_answer(response: str, *, is_program: bool) -> bool:
    r"""Tell whether a response has a \boxed{}, or a fenced block where the answer is a program."""
    return bool(last_program(response)) if is_program else bool(boxes(response))


TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(
            name="think_answer",
            system=(
                "Think about the problem first, step by step, inside <think> </think>. Then give the "
                "final answer in \\boxed{} inside <answer> </answer>, like this: "
                "<think>your reasoning</think><answer>\\boxed{your answer}</answer>"
            ),
            has_answer=True,
        ),
        Template(
            name="think_box",
            system=(
                "Think about the problem first, step by step, inside <think> </think>. Then give the "
                "final answer in \\boxed{}, like this: <think>your reasoning</think>\\boxed{your answer}"
            ),
        ),
        Template(
            name="think_code",
            system=(
                "Think about the problem first, step by step, inside <think> </think>. Then give the whole program "
                "in one fenced block, like this: <think>your reasoning</think>\n```python\nyour program\n```"
            ),
            has_program=True,
        ),
        Template(
            name="plain",
            system="Solve the problem step by step and put the final answer in \\boxed{}.",
            has_reasoning=False,
            has_answer=None,
        ),
    )
}
