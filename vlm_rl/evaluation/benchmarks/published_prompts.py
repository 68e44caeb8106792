r"""The benchmarks' own prompts, quoted from what their authors publish: `vlm-rl eval --template NAME`.

A published prompt is words around the prepared question (whose options stand as preparation lists them), sent without
a system prompt of ours. It may depend on the kind of answer. With these the official rules find what they look for;
the strict rule wants a box, which only MathVision's asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vlm_rl.templates import TEMPLATES, Template
from vlm_rl.types import Problem


@dataclass(frozen=True, slots=True)
class PublishedPrompt:
    """Words before and after a question; `by_kind` replaces `before` for the kinds of answer that it names."""

    name: str
    source: str  # where it is published, and under which licence
    before: str
    after: str = ""
    by_kind: Mapping[str, str] = field(default_factory=dict)
    after_by_kind: Mapping[str, str] = field(default_factory=dict)  # put in front of `after`

    @property
    def template(self) -> Template:
        """How its responses are read by the strict rule: the last box, wherever it is."""
        return Template(name=self.name, system="", has_reasoning=False, has_answer=None)

    def worded(self, problem: Problem) -> Problem:
        """The problem as it is asked."""
        kind = _kind(problem)
        before, after = self.by_kind.get(kind, self.before), self.after_by_kind.get(kind, "") + self.after
        return replace(problem, question=f"{before}{problem.question}{after}")


def _kind(problem: Problem) -> str:
    """What the words depend on: "choice" (where there are options), "integer", "float", "float 2" (decimals), ..."""
    if problem.choices:
        return "choice"
    if problem.meta.get("answer_type") == "list":  # as MathVista calls what is prepared as an expression
        return "list"
    places = problem.meta.get("precision")
    return problem.answer_type if places is None else f"{problem.answer_type} {places}"


_LETTER = "provide the correct option letter, e.g., A, B, C, D, at the end.\nQuestion: "
_VALUE = "provide the final value, e.g., {}, at the end.\nQuestion: "
_DYNAMATH = """
## Answer Instruction Please provide an answer to the question outlined above. Your response should adhere \
to the following JSON format, which includes two keys: 'solution' and 'short answer'. The 'solution' key can contain \
detailed steps needed to solve the question, and the 'short answer' key should provide a concise response. \
If the problem is a multiple choice problem, just provide the corresponing choice option, \
such as 'A', 'B', 'C', or 'D'. If the answer is a numerical value, format it as a three-digit floating-point number.

Example of expected JSON response format:

{
    "solution": "[Detailed step-by-step explanation]",
    "short answer": "[Concise Answer]"
}"""

PUBLISHED_PROMPTS: dict[str, PublishedPrompt] = {
    prompt.name: prompt
    for prompt in (
        PublishedPrompt(
            "mathvision",
            "mathllm/MATH-V, MIT",
            'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a multiple '
            'choice question, only one letter is allowed in the "\\boxed{}".\n',
        ),
        PublishedPrompt(
            "mathvista",
            "AI4Math/MathVista, column query, CC BY-SA 4.0",
            "Hint: Please answer the question and " + _VALUE.format("1, 2, 3"),
            by_kind={
                "choice": "Hint: Please answer the question and " + _LETTER,
                "integer": "Hint: Please answer the question requiring an integer answer and "
                + _VALUE.format("1, 2, 3"),
                "float 1": "Hint: Please answer the question requiring a floating-point number with one decimal "
                "place and " + _VALUE.format("1.2, 1.3, 1.4"),
                "float 2": "Hint: Please answer the question requiring a floating-point number with two decimal "
                "places and " + _VALUE.format("1.23, 1.34, 1.45"),
                "list": "Hint: Please answer the question requiring a Python list as an answer and provide the final "
                "list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end.\nQuestion: ",
            },
        ),
        PublishedPrompt(
            "mathverse",
            "AI4Math/MathVerse, column query_cot, MIT",
            "Please first conduct reasoning, and then answer the question and " + _VALUE.format("1, 2.5, 300"),
            by_kind={"choice": "Please first conduct reasoning, and then answer the question and " + _LETTER},
        ),
        PublishedPrompt(
            "wemath",
            "We-Math/We-Math, its paper's table of prompts, CC BY-NC 4.0",
            "Now, we require you to solve a multiple-choice math question. Please briefly describe your thought "
            "process and provide the final answer(option).\nQuestion: ",
            after="\nRegarding the format, please answer following the template below, and be sure to include two <> "
            "symbols:\n<Thought process>: <<your thought process>> <Answer>: <<your option>>",
        ),
        PublishedPrompt(
            "dynamath",
            "DynaMath/DynaMath, its script for open models, Apache-2.0",
            "## Question\n",
            after=_DYNAMATH,
            after_by_kind={"float": "Please answer in a floating-point number."},
        ),
    )
}


def eval_template(name: str) -> tuple[Template, PublishedPrompt | None] | None:
    """The template of that name, ours or a published one; None if there is none."""
    if name in PUBLISHED_PROMPTS:
        return PUBLISHED_PROMPTS[name].template, PUBLISHED_PROMPTS[name]
    return (TEMPLATES[name], None) if name in TEMPLATES else None
