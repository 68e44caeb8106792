"""Where templates of one's own find an answer, and what form they reward; every verdict worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlm_rl.grading.grader import Grader
from vlm_rl.templates import Template, states_answer

LAST_LINE = Template("mine", answer="last_line")
IN_TAGS = Template("mine", reasoning_block=True, answer_block=True, answer="text")
PATTERN = Template("mine", answer=r"(?i)answer\s*[:：]\s*(?P<answer>.*)", example="{reasoning} Answer: {answer}")
THINKS = Template(
    "mine", reasoning_block=True, answer=r"#### (?P<answer>.*)", example="<think>{reasoning}</think>#### {answer}"
)
FORM = Template("mine", answer="last_line", form=r"STEP 1.*\n\d+", example="STEP 1 {reasoning}\n{answer}")


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as grader:
        yield grader


@pytest.mark.parametrize(
    ("template", "response", "extracted", "well_formed"),
    [
        (LAST_LINE, "3 + 2\n5", "5", False),
        (LAST_LINE, "5\n3", "3", False),
        (LAST_LINE, "so\nthe answer is $\\boxed{5}$ \n\n", "5", False),  # a box in the place is the answer
        (LAST_LINE, "5\n\\boxed{", None, False),
        (LAST_LINE, "<think>5\n5", None, False),  # the reasoning is never closed
        (LAST_LINE, "", None, False),
        (IN_TAGS, "<think>a</think><answer> 5 </answer>", "5", True),
        (IN_TAGS, "<think>a</think><answer>\\boxed{5}</answer>", "5", True),
        (IN_TAGS, "<think>a</think><answer></answer>", None, False),
        (IN_TAGS, "<think>a</think>5", None, False),
        (IN_TAGS, "<think>a</think><answer>3</answer><answer>5</answer>", "3</answer><answer>5", False),
        (IN_TAGS, "<think>a<answer>5</answer></think>", None, False),
        (PATTERN, "Answer: 3, no. ANSWER : 5", "5", False),  # the last one counts
        (PATTERN, "答案 answer：５", "5", False),  # full-width colon and digit
        (PATTERN, "It is 5", None, False),
        (PATTERN, "Answer:  ", None, False),
        (THINKS, "<think>#### 3</think>\n#### 5", "5", True),
        (THINKS, "<think>#### 5</think>\nnone", None, False),
        (FORM, "STEP 1 and\nmore\n5", "5", True),
        (FORM, "\nSTEP 1\n5\n", "5", True),  # white space around it is not part of the form
        (FORM, "STEP 1\n5.", "5.", False),
        (FORM, "so STEP 1\n5", "5", False),
    ],
)
def test_where_the_answer_is(
    grader: Grader, template: Template, response: str, extracted: str | None, well_formed: bool
) -> None:
    assert not [*template.faults()]
    grade = grader.grade(response, gold="5", answer_type="integer", template=template)
    assert grade.extracted == extracted
    right = extracted is not None and extracted.strip(".") == "5"
    assert grade.verdict == ("correct" if right else "no_answer" if extracted is None else "wrong")
    assert template.is_well_formed(response) == well_formed


def test_an_answer_that_is_no_text_of_unicode_is_read(grader: Grader) -> None:
    """Half of a surrogate pair, which JSON may hold, is no character that RE2 could read."""
    assert PATTERN.answer_region("\ud800 Answer: 5") == "5"
    assert not FORM.is_well_formed("\ud800")


def test_responses_are_counted_as_answers_where_the_template_looks() -> None:
    assert states_answer("Answer: 5", PATTERN, is_program=False)
    assert not states_answer("\\boxed{5}", PATTERN, is_program=False)
    assert states_answer("<think>\\boxed{5}", Template("boxes", reasoning_block=True), is_program=False)


def test_an_episode_s_earlier_turns_keep_the_reasoning_block_alone() -> None:
    """A form is of a whole response, so it says nothing of a turn that an environment answers."""
    assert FORM.is_well_formed_turn("look closer")
    assert THINKS.is_well_formed_turn("<think>a</think><tool_call>{}</tool_call>")
    assert not THINKS.is_well_formed_turn("look closer") and not LAST_LINE.is_well_formed_turn("look closer")
