r"""What a response must look like: one `Template` per way of asking for reasoning.

A template owns the words of the prompt, the prefill, the format rule and the answer region. The shipped ones are
`TEMPLATES`; a user's own is the same record, read from YAML (vlm_rl.config.templates). The text that is judged always
starts with the prefill: the caller puts it back in front of the sampled text.

An answer counts only inside the answer region. The region starts after the last `</think>`; where the template asks
for `<answer>`, it is what that tag encloses; where it asks for the last line or has a pattern, it is that line or
what the pattern finds there. A reasoning block that is never closed leaves no region. Without any block the whole
response is looked at, though its format is wrong.

Model text is hostile input: everything here takes time linear in its length and executes nothing. So patterns are
those of RE2 (https://github.com/google/re2/wiki/Syntax), which never goes back in the text: it has neither
look-around nor references to groups, and its size is bounded, so that no pattern hangs. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
PLACES = ("box", "program", "text", "last_line")  # of an answer in its region
_GROUP = "(?P<answer>"  # of a pattern that finds it
_REASONING, _RIGHT = "Two and two make four.", "4"  # of the response by which a template is checked
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Template:
    r"""One way of asking for reasoning and reading the answer back. `faults` says what cannot be used of it."""

    name: str
    system: str = ""  # the system prompt; "" leaves the chat template's own in place
    suffix: str = ""  # written right after the question
    prefill: str = ""  # written into the prompt after the chat template's generation prompt
    reasoning_block: bool = False  # a <think> block comes first
    answer_block: bool | None = (
        None  # the answer is inside <answer> </answer>; None: either way, or as a pattern says
    )
    answer: str = "box"  # one of PLACES, or a pattern whose last match's group `answer` it is
    form: str = ""  # a pattern of a whole response in the right format; "": the blocks say it
    example: str = ""  # a perfect response with {reasoning} and {answer}; "": the blocks say it

    @property
    def has_program(self) -> bool:
        """Tell whether the answer is a program in a fenced block."""
        return self.answer == "program"

    @property
    def has_pattern(self) -> bool:
        """Tell whether a pattern finds the answer."""
        return _GROUP in self.answer

    @property
    def has_form(self) -> bool:
        """Tell whether there is a format to keep."""
        return self.reasoning_block or bool(self.form)

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that a response needs."""
        return _TAGS if self.answer_block else _TAGS[:2] if self.reasoning_block else ()

    def faults(self) -> Iterator[str]:
        """Yield what cannot be used of this template: key, value and next step. A perfect response must be one."""
        patterns = {"answer": self.answer if self.has_pattern else "", "form": self.form}
        invalid = {key: why for key, pattern in patterns.items() if pattern and (why := _why_invalid(pattern))}
        yield from (f"{key} is {patterns[key]!r}: {why}" for key, why in invalid.items())
        if self.answer not in PLACES and not self.has_pattern:
            yield (
                f"answer is {self.answer!r}: write {', '.join(PLACES)}, or a regular expression that holds the "
                f"answer as {_GROUP}...), such as 'Answer: {_GROUP}.*)'"
            )
            return
        if self.example and self.example.count("{answer}") != 1:
            yield f"example is {self.example!r}: it must hold {{answer}} once, where the answer is"
        elif (self.has_pattern or self.form) and not self.example:
            yield (
                "example is missing: beside a regular expression, give a perfect response by which it is checked, "
                "with {reasoning} and {answer} in their places"
            )
        elif not invalid:
            yield from self._faults_of_example()

    def _faults_of_example(self) -> Iterator[str]:
        perfect = self.wrap(_REASONING, _RIGHT)
        shown = f"the perfect response {perfect!r}"
        if not perfect.startswith(self.prefill.rstrip()):
            yield f"prefill is {self.prefill!r}, and {shown} does not begin so: write an example that does"
        if self.has_form and not self.is_well_formed(perfect):
            where = f"form is {self.form!r}" if self.form else "reasoning_block is true"
            yield f"{where}, and {shown} does not have that form: change the example or the rule"
        region = self.answer_region(perfect)
        found = (region is not None and self.answers(region)) or "nothing"
        if found != [_RIGHT]:
            yield (
                f"answer is {self.answer!r}, and finds {found} in {shown} in place of {[_RIGHT]}: change the example "
                "or the rule"
            )

    def wrap(self, reasoning: str, answer: str) -> str:
        r"""Return a perfect response, prefill included; `answer` is the text inside \boxed{} where it is in a box.

        Raises ValueError if `reasoning` or `answer` holds a tag of the template.
        """
        for tag in _TAGS:
            if tag in reasoning or tag in answer:
                raise ValueError(f"the text to wrap already contains {tag}: remove it first")
        if self.example:
            texts = {"{reasoning}": reasoning, "{answer}": answer}
            return re.sub(r"\{(?:reasoning|answer)\}", lambda place: texts[place.group()], self.example)
        shown = fenced(answer) if self.has_program else rf"\boxed{{{answer}}}" if self.answer == "box" else answer
        if self.answer_block:
            shown = f"{ANSWER}{shown}{END_ANSWER}"
        return f"{THINK}{reasoning}{END_THINK}{shown}" if self.reasoning_block else f"{reasoning}\n{shown}"

    def is_well_formed(self, response: str) -> bool:
        """Check the format: one reasoning block, then one box, inside the answer block where the template has one.

        Where the answer is a program, it is one fenced block in place of the box; of other answers there must be one.
        Only white space may be outside the blocks. A template with a pattern as its `form` asks that instead; one
        without a reasoning block and a form gives False.
        """
        text = response.strip()
        if self.form:
            return _matches_whole(self.form, text)
        if not self.reasoning_block or not text.startswith(THINK):
            return False
        if any(text.count(tag) != (bool(self.answer_block) or tag in (THINK, END_THINK)) for tag in _TAGS):
            return False
        reasoning, _, rest = text.removeprefix(THINK).partition(END_THINK)
        rest = rest.strip()
        if self.answer_block:
            if not (rest.startswith(ANSWER) and rest.endswith(END_ANSWER)):
                return False
            rest = rest.removeprefix(ANSWER).removesuffix(END_ANSWER)
        region = self._place_in(rest)
        contents = None if region is None else self.answers(region)
        return bool(reasoning.strip()) and contents is not None and len(contents) == 1 and bool(contents[0].strip())

    def is_well_formed_turn(self, text: str) -> bool:
        """Check an earlier turn of an episode: one reasoning block, and no answer block that is not a whole answer.

        What follows the reasoning is the environment's to read. A template without a reasoning block gives False, and
        True where it has a `form`, which is of whole responses.
        """
        text = text.strip()
        if not self.reasoning_block:
            return bool(self.form)
        if not text.startswith(THINK):
            return False
        if any(text.count(tag) != 1 for tag in (THINK, END_THINK)):
            return False
        reasoning, _, rest = text.removeprefix(THINK).partition(END_THINK)
        is_answer = any(tag in rest for tag in (ANSWER, END_ANSWER))
        return bool(reasoning.strip()) and (not is_answer or self.is_well_formed(text))

    def answers(self, region: str) -> list[str] | None:
        r"""Return the programs or the contents of the boxes in a region; None if a box is never closed.

        Of a template that asks for neither, the region is the answer, and what is in its boxes if it has some.
        """
        if self.has_program:
            return programs(region)
        found = boxes(region)
        return found if found is None or found or self.answer == "box" else [region.strip()]

    def answer_region(self, response: str) -> str | None:
        """Return the part of the response in which the answer is looked for, or None if there is none."""
        tail = self._after_reasoning(response)
        return None if tail is None else self._place_in(tail)

    def _place_in(self, text: str) -> str | None:
        """Return the last line, or what the pattern finds, where the template asks for that; else the text."""
        if self.answer == "last_line":
            return text.strip().rpartition("\n")[2] or None
        return _last_match(self.answer, text) if self.has_pattern else text

    def _after_reasoning(self, response: str) -> str | None:
        has_block = THINK in response or END_THINK in response
        tail = response
        if has_block:
            _, closed, tail = response.rpartition(END_THINK)
            if not closed or THINK in tail:
                return None
        is_tagged = ANSWER in tail or END_ANSWER in tail
        reads_tags = self.answer_block or (self.answer_block is None and not self.has_pattern)
        if not reads_tags or (not is_tagged and not (self.answer_block and has_block)):
            return tail
        # From the first opening to the last closing tag: answers in several blocks must all agree.
        _, opened, inside = tail.partition(ANSWER)
        inside, closed, rest = inside.rpartition(END_ANSWER)
        if self.answer_block is None and not closed:
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


def states_answer(response: str, template: Template, *, is_program: bool) -> bool:
    r"""Tell whether a response has a \boxed{}, or a fenced block where the answer is a program.

    Of a template that asks for neither: whether it has an answer where that is looked for.
    """
    if is_program:
        return bool(last_program(response))
    if template.answer in ("box", "program"):
        return bool(boxes(response))
    return bool(template.answer_region(response))


def _why_invalid(pattern: str) -> str:
    """Return why a pattern cannot be used, with the next step; "" if it can."""
    pa, compute = _arrow()
    try:
        compute.match_substring_regex(pa.array([""]), pattern=pattern)
        if _GROUP in pattern:
            _last_match(pattern, "")
    except pa.ArrowInvalid as error:
        if "unnamed groups" in str(error):
            return "all of its groups but (?P<answer>...) must be of the kind (?:...)"
        said = str(error).removeprefix("Invalid regular expression: ")
        return f"{said}; write it as RE2 reads it, without look-around and references to groups"
    return ""


def _last_match(pattern: str, text: str) -> str | None:
    """Return the group `answer` of a pattern's last match in a text; None without one."""
    _, compute = _arrow()
    found = compute.extract_regex(_as_array(text), pattern=f"(?s:.*)(?:{pattern})")[0].as_py()
    return None if found is None else found["answer"]


def _matches_whole(pattern: str, text: str) -> bool:
    """Tell whether a pattern, whose dot is any character, matches a whole text."""
    _, compute = _arrow()
    return compute.match_substring_regex(_as_array(text), pattern=rf"(?s)\A(?:{pattern})\z")[0].as_py()


def _arrow() -> tuple[Any, Any]:
    """Return pyarrow, which has RE2, and its functions: a fifth of a second, which only patterns take."""
    import pyarrow as pa
    from pyarrow import compute

    return pa, compute


def _as_array(text: str) -> Any:
    pa, _ = _arrow()
    return pa.array([text.encode("utf-8", "replace").decode()])  # half a surrogate pair is no UTF-8


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
            reasoning_block=True,
            answer_block=True,
        ),
        Template(
            name="think_box",
            system=(
                "Think about the problem first, step by step, inside <think> </think>. Then give the "
                "final answer in \\boxed{}, like this: <think>your reasoning</think>\\boxed{your answer}"
            ),
            reasoning_block=True,
            answer_block=False,
        ),
        Template(
            name="think_code",
            system=(
                "Think about the problem first, step by step, inside <think> </think>. Then give the whole program "
                "in one fenced block, like this: <think>your reasoning</think>\n```python\nyour program\n```"
            ),
            reasoning_block=True,
            answer_block=False,
            answer="program",
        ),
        Template(
            name="plain",
            system="Solve the problem step by step and put the final answer in \\boxed{}.",
        ),
    )
}
