"""A model's Markdown as HTML: what is understood, what stays text, and that nothing of it vanishes or acts."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.hostile import HOSTILE
from vlm_rl.demo.web.markdown import MAX_MARKDOWN
from vlm_rl.demo.web.rendering import markdown_html

ELEMENTS = {"p", "br", "hr", "ul", "ol", "li", "blockquote", "strong", "code", "pre", "span"}


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** c", "<p>a <strong>b</strong> c</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("3. a\n7. b", '<ol><li value="3">a</li><li value="7">b</li></ol>'),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("## So", '<p class="heading">So</p>'),
        ("```py\nx < 1\n```", "<pre><code>py\nx &lt; 1\n</code></pre>"),
        (r"so $x_1*2*3$ is", '<p>so <span class="tex">x_1*2*3</span> is</p>'),
        ("\\[\nx\n- 2\n\\]\nthen", '<span class="tex display">\nx\n- 2\n</span><p>then</p>'),
        (r"</think>\boxed{3}", '<p><span class="tag">&lt;/think&gt;</span><span class="tex">\\boxed{3}</span></p>'),
        ("2*3*4 and a**2 + b**2 and *x*", "<p>2*3*4 and a**2 + b**2 and *x*</p>"),
        ("[x](http://e) ![y](http://z) &amp; \\*", "<p>[x](http://e) ![y](http://z) &amp;amp; \\*</p>"),
        ("    indented\n---", "<p>indented</p><hr>"),
    ],
)
def test_what_is_understood_and_what_stays_text(text, html):
    assert markdown_html(text) == html


def letters(text: str) -> list[str]:
    return [letter for letter in text if letter.isascii() and letter.isalpha()]


@given(st.text(alphabet="ab*_`#>-+|[]()!\\$<>&1. \n\t{}~:", max_size=80))
def test_no_letter_vanishes_and_no_other_element_appears(text):
    html = markdown_html(text)
    assert set(re.findall(r"</?(\w+)", html)) <= ELEMENTS
    assert letters(unescape(re.sub(r"<[^>]*>", "", html))) == letters(text)


def test_hostile_and_endless_texts_stay_text():
    html = markdown_html(HOSTILE)
    assert set(re.findall(r"<(\w+)", html)) <= ELEMENTS and " onerror" in unescape(html)
    assert markdown_html("*" * (MAX_MARKDOWN + 1)).startswith('<p class="long">*')
