"""Reflection, backtracking and repetition: cases worked by hand, and marks that change no Markdown."""

from __future__ import annotations

import re
from html import unescape
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.hostile import HOSTILE
from vlm_rl.demo.numbers.reasoning import MAX_TEXT, measure
from vlm_rl.demo.web.markdown import MAX_MARKDOWN
from vlm_rl.demo.web.rendering import markdown_html
from vlm_rl.grading.moves import LABELS, REPEATED, Mark, moves_of, repeated_share, segments
from vlm_rl.report.html import split_response

LONG = "one two three four five six seven eight"  # REPEATED words


@pytest.mark.parametrize(
    ("text", "kind", "marked"),
    [
        ("It is 4. Wait, let me check: 2 + 2. Yes.", "reflection", ["Wait, let me check: 2 + 2."]),
        ("Hmm. Let me verify. Let me count again.", "reflection", ["Hmm.", "Let me verify.", "Let me count again."]),
        ("The waiter checks nothing. We await.", "reflection", []),
        ("No. That's wrong. Alternatively, we add.", "backtracking", ["That's wrong.", "Alternatively, we add."]),
        ("I made a mistake.\nLet me try again.", "backtracking", ["I made a mistake.", "Let me try again."]),
        ("It is actual and unmistaken.", "backtracking", []),
        (f"{LONG}. {LONG}", "repetition", [LONG]),
        (f"{LONG} {LONG} {LONG}", "repetition", [f"{LONG} {LONG}"]),  # one stretch, not a mark for each word
        (f"{LONG} and {LONG.title()}!", "repetition", [f"{LONG.title()}!"]),  # case and signs do not matter
        (" ".join(LONG.split()[1:]) + ". " + " ".join(LONG.split()[1:]), "repetition", []),  # one word short
    ],
)
def test_what_is_marked(text: str, kind: str, marked: list[str]) -> None:
    assert [text[mark.start : mark.end] for mark in moves_of(text) if mark.kind == kind] == marked


@given(st.lists(st.sampled_from("ab"), max_size=40))
def test_repetition_covers_the_words_of_runs_seen_before(words: list[str]) -> None:
    """Against the definition: a word is marked if it is in a run of REPEATED words that also begins earlier."""
    text = " ".join(words)
    runs = [tuple(words[i : i + REPEATED]) for i in range(len(words) - REPEATED + 1)]
    expected = {i + k for i, run in enumerate(runs) if run in runs[:i] for k in range(REPEATED)}
    marks = [mark for mark in moves_of(text) if mark.kind == "repetition"]
    assert {i for i in range(len(words)) if any(mark.start <= 2 * i < mark.end for mark in marks)} == expected
    assert repeated_share(text, marks) == pytest.approx(len(expected) / max(1, len(words)))


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from(list(LABELS))), max_size=6, unique_by=tuple
    )
)
def test_segments_say_at_each_place_which_marks_cover_it(spans: list[tuple[int, int, str]]) -> None:
    marks = [Mark(start, start + size, kind) for start, size, kind in spans]
    found = segments(marks)
    for place in range(32):
        covering = {mark.kind for mark in marks if mark.start <= place < mark.end}
        here = [segment for segment in found if segment.start <= place < segment.end]
        assert {kind for segment in here for kind in segment.kinds} == covering and len(here) <= 1
    assert all(first.end <= second.start for first, second in pairwise(found))


# -- marks in the text ---------------------------------------------------------------------------


def without_marks(html: str) -> str:
    return re.sub(r"</?mark[^>]*>", "", html)


@given(
    st.text(alphabet="ab*_`#>-+|[]()!\\$<>&1. \n\t{}~:", max_size=80),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), max_size=3),
)
def test_marks_never_change_what_markdown_makes_of_a_text(text: str, spans: list[tuple[int, int]]) -> None:
    marks = [Mark(min(start, len(text)), min(start + size, len(text)), "first") for start, size in spans]
    assert without_marks(markdown_html(text, marks)) == markdown_html(text)


def test_a_list_a_formula_and_a_bold_word_are_marked_within() -> None:
    text = "- **Wait**, so $x = 2$.\n- No."
    assert markdown_html(text, [Mark(0, 23, "reflection")]) == (
        '<ul><li><strong><mark class="reflection" data-label="reflection">Wait</mark></strong>'
        '<mark class="reflection">, so </mark><mark class="reflection"><span class="tex">x = 2</span></mark>'
        '<mark class="reflection">.</mark></li><li>No.</li></ul>'
    )


def test_a_text_that_holds_our_sign_or_is_endless_stays_unmarked() -> None:
    mark = Mark(0, 1, "first")
    assert "<mark" not in markdown_html("a\U0001bc9fb", [mark])
    assert "<mark" not in markdown_html("a" * (MAX_MARKDOWN + 1), [mark])


def test_hostile_text_stays_text_where_it_is_marked() -> None:
    response = f"<think>Wait, {HOSTILE}. So 3. Actually {HOSTILE} no.</think>3"
    reasoning, _ = split_response(response)
    assert reasoning is not None
    found = measure(response, "3")
    html = markdown_html(reasoning, found.marks)
    assert {"reflection", "backtracking", "first"} <= set(re.findall(r'<mark class="(\w+)', html))
    assert set(re.findall(r"</?(\w+)", html)) <= {"p", "mark", "br"} and "window.pwned=1" in unescape(html)


@pytest.mark.parametrize(
    "frame", ["<think>\n {} </think>x", " <think>{}", "{}</think>y", "<think>{}</think></think>"]
)
def test_the_marks_are_places_in_the_reasoning_that_is_shown(frame: str) -> None:
    shown, _ = split_response(frame.format("It is 7. Wait, so 3. Then."))
    assert shown is not None
    found = measure(frame.format("It is 7. Wait, so 3. Then."), "3")
    assert {shown[mark.start : mark.end] for mark in found.marks} == {"Wait, so 3."}
    assert {mark.kind for mark in found.marks} == {"first", "reflection"}


def test_an_endless_response_is_not_measured() -> None:
    assert measure("3. " * (MAX_TEXT // 3 + 1), "3").marks == ()
