r"""MathVision (MathLLMs/MathVision, MIT): by subject and level; its published rule without its evaluation of text.

The authors' evaluate.py takes a letter or a number from the usual closing phrases, else what follows "the
answer is", else the last \boxed{}; strips LaTeX dressing; and accepts the gold letter or its option's value
if the texts, or the values rounded to two digits, are equal. There the text becomes code; here it is parsed
(vlm_rl.evaluation.benchmarks.arithmetic). Rows on which the two may part are marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_rl.evaluation.benchmarks.arithmetic import is_beyond, value_of
from vlm_rl.evaluation.benchmarks.fields import required, text_field, texts_field, type_of_gold
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question

_LETTERS = "ABCDE"
_PHRASES = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_TEXT_LIMIT = 200_000

# What is taken out of an extracted answer, in this order.
_DRESSING: tuple[tuple[str, str], ...] = (
    *((" ", ""), ("\\,", ""), ("∞", "\\infty"), ("+\\infty", "\\infty"), ("\\\\", "\\"), ("\n", "")),
    *(("\\text", ""), ("\\mbox", ""), ("bmatrix", "pmatrix"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("{m}^3", ""), ("m^3", ""), ("{units}", ""), ("units", "")),
    *(("{km}", ""), ("km", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("$", "")),
)
_PERCENT: tuple[tuple[str, str], ...] = (("\\%", ""), (" .", " 0."), ("{.", "{0."))
_BRACED_LETTERS = tuple((form.format(letter), letter) for form in ("({})", "{{{}}}") for letter in "abcde")
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")


def read_question(row: Mapping[str, Any], where: str) -> Question:
    options = texts_field(row, "options", where)
    gold = str(required(row, "answer", where)).strip() if options else str(required(row, "answer", where))
    return Question(
        id=text_field(row, "id", where),
        gold=gold,
        answer_type="choice" if options else type_of_gold(gold),
        choices=options,
        facets={"subject": (str(row.get("subject", "")),), "level": (str(row.get("level", "")),)},
    )


def judge(question: Question, answer: Answer) -> Judgement:
    """The published rule: the gold letter, or the value of its option."""
    found = extract(answer.text[:_TEXT_LIMIT])
    golds = [question.gold]
    place = ord(question.gold[0]) - ord("A") if question.choices and question.gold else -1
    if 0 <= place < len(question.choices):
        golds.append(question.choices[place])
    for gold in golds:
        if is_equal(gold, found):
            return Judgement("correct", found, f"{found[:60]!r} equals {gold[:60]!r}", _doubt(golds, found))
    return Judgement("wrong", found, f"{found[:60]!r} equals none of {golds!r:.120}", _doubt(golds, found))


def _doubt(golds: list[str], found: str) -> str:
    """Why the authors' symbolic reader may see another value than ours; "" in the plain cases."""
    if any(found.strip().lower() == gold.strip().lower() for gold in golds):
        return ""
    odd = [text for text in (found, *golds) if is_beyond(text)]
    has_digit = re.search(r"\d", found) is not None
    return f"may differ: the value of {odd[0]!r:.60} depends on the reader" if odd and has_digit else ""


def extract(response: str) -> str:
    """The answer that the published rule takes out of a response; lower case, without spaces."""
    text = _phrase(response.strip())
    text = _bare(text.lower().replace("{}", ""))
    for old, new in _BRACED_LETTERS:
        text = text.replace(old, new)
    return text.rstrip(".").lstrip(":").strip()


def _phrase(text: str) -> str:
    """The part of a response that holds its answer: a closing letter, a number, a phrase or the last box."""
    for letter in _LETTERS:
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith((f" {letter}.", f" ({letter}).")) or text.startswith(starts):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    if _is_float(tail):
        text = tail
    if "oxed{" in text:
        return "\\boxed{" + text.split("oxed{")[-1] if text.count("oxed{") > 1 else text
    for phrase in _PHRASES:
        for form in (phrase, phrase.replace("the", "The")):
            is_there = form in text
            text = text.split(form)[-1].strip()
            text = text.split("\n")[0].split(". ")[0] if is_there else text
    return text


def _bare(text: str) -> str:
    """The inside of the box (or everything), its last side of an equation, without dressing and units."""
    start, end = text.find("oxed{"), text.rfind("}")
    if start >= 0 and start + 5 <= end:
        text = text[start + 5 : end]
    close, opening = text.find("}"), text.find("{")
    if close != -1 and (opening == -1 or close < opening):
        text = text.split("}")[0]
    text = text.split("=")[-1].split("\\approx")[-1]
    for old, new in _DRESSING:
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0]
    for old, new in _PERCENT:
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    if text.count("\\approx") == 1:  # one that the removals above have put together
        text = text.split("\\approx")[1]
    if "sqrt" in text:
        text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    text = text.replace(" ", "")
    if text == "0.5":
        return r"\frac{1}{2}"
    top, slash, bottom = text.partition("/")
    is_fraction = slash and _WHOLE.fullmatch(top) and _WHOLE.fullmatch(bottom)
    return rf"\frac{{{top}}}{{{bottom}}}" if is_fraction else text


def _braced_roots(text: str) -> str:
    r"""\sqrt3 as \sqrt{3}: the first character behind each root, whatever it is."""
    first, *parts = text.split("\\sqrt")
    return first + "".join(
        rf"\sqrt{part}" if not part or part[0] == "{" else rf"\sqrt{{{part[0]}}}{part[1:]}" for part in parts
    )


def _braced_fractions(text: str) -> str:
    r"""\frac12 as \frac{1}{2}; the text as it is if a fraction has less than two characters behind it."""
    first, *parts = text.split("\\frac")
    found = first
    for part in parts:
        if part.startswith("{"):
            found += rf"\frac{part}"
        elif len(part) < 2:
            return text
        else:
            bottom = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            found += rf"\frac{{{part[0]}}}{bottom}"
    return found


def is_equal(gold: str, found: str) -> bool:
    """Equal as lower-case texts, as tuples of rounded values, or as values rounded to two digits."""
    gold, found = gold.lower(), found.lower()
    if not gold.replace(" ", "") or not found.replace(" ", ""):
        return False
    if gold.strip() == found.strip():
        return True
    gold, found = _evaluated_tuple(gold), _evaluated_tuple(found)
    if gold == found:
        return True
    values = value_of(gold), value_of(found)
    return values[0] is not None and values[1] is not None and round(values[0], 2) == round(values[1], 2)


def _evaluated_tuple(text: str) -> str:
    """`(2*3,1/2)` as `(6,0.5)`, `(6/2,1)` as `(3.0,1)`; the text itself if it is no tuple or a part has no value."""
    parts = text[1:-1].split(",")
    if len(parts) < 2 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    shown = []
    for part in parts:
        if "infty" in part or part in ("a", "-a"):
            shown.append(part)
            continue
        value = value_of(part)
        if value is None:
            return text
        shown.append(str(round(value, 2)))
    return f"{text[0]}{','.join(shown)}{text[-1]}"


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
