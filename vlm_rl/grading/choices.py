r"""Decide multiple choice: which option an answer names by its letter, its text or its value.

An answer may be the letter in any usual form (`B`, `(B)`, `B.`, `\text{B}`, `Option B`), the letter with the text of
its own option (`B: 5 cm`), or the text or value of exactly one option. An answer that names two options names none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlm_rl.grading.decision import AskSymbolic, Decision, SymbolicQuery
from vlm_rl.grading.equality import AnswerComparison, without_introduction
from vlm_rl.grading.latex import canonical, clean, outer_brackets

# "The correct answer is", "Option", and the same in other languages, in front of a letter.
_INTRODUCTION = (
    r"(?:(?:(?i:the )?(?i:correct |right |final |best )?(?i:options?|choices?|answers?|ans\.?|letters?)(?i: is| are)?"
    r"|(?i:réponse|antwort|respuesta|risposta|ответ)|(?:正确)?(?:答案|选项)[是为]?|选) ?:? ?)"
)
_AFFIRMED = r"(?: is (?:correct|right|the (?:(?:correct|right|best|final) )?(?:answer|option|choice)))?"
_LETTER = re.compile(rf"{_INTRODUCTION}?[(\[<]?([A-Za-z])[)\]>.:,!]*项?{_AFFIRMED}")
_LETTER_AND_TEXT = re.compile(rf"{_INTRODUCTION}?[(\[]?([A-Za-z])(?:[)\].:,]+ ?|(?<=[A-Z]) (?:- )?)(.+)")
_MARKED = re.compile(rf"{_INTRODUCTION}?(?:[(\[](?=[A-Za-z][)\]]))?([A-Za-z])[)\].:]+ ?(.+)")
# "No solution" and "Not enough information" are texts of options; "no, it is" and "not this" take the letter back.
_DOUBT = re.compile(
    r"(?<![A-Za-z\\])(?:[A-J]|[a-j](?=[).])|or|wrong|incorrect|maybe|perhaps)(?![A-Za-z'])|[?或错]"
    r"|^(?i:no ?[,;:] ?[a-z]|not (?:this|that|it|so)(?![a-z]))"
)
_REASON = re.compile(r"[,;.]? (?:because|since) .*$", re.DOTALL)
_TEXT_AND_LETTER = re.compile(r"(.+?) ?[(\[]([A-Z])[)\]]")
_SEPARATOR = re.compile(r"[,;/+&\s\\]+|(?<=\))(?=\()")
_LETTER_IN_LIST = re.compile(r"[(\[]?([A-Za-z])[)\].]?")
_LABELLED = re.compile(r"\(?([A-Z])[).:] ?(.+)", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


def compare_choice(gold: str, answer: str, choices: Sequence[str], ask: AskSymbolic) -> Decision:
    """Decide whether a raw answer names the gold's option, or its several options.

    Args:
        gold: A letter, a list of letters, or the text or value of an option.
        answer: The raw text of the answer.
        choices: The texts of options A, B, ...; empty if they are not known, so that any letter may be named.
        ask: Asks for symbolic comparisons, as in vlm_rl.grading.equality.
    """
    choices = _unlabelled(choices)
    gold_text, answer_text = clean(gold), without_introduction(clean(answer))
    several = frozenset() if _same_text(gold_text, choices) else _letter_list(gold_text)
    if several:
        return Decision(_letter_list(answer_text) == several, "choice_letters")
    wanted = _gold_options(gold_text, choices)
    if wanted is None and not choices:
        return AnswerComparison("expression", ask).compare(gold, answer)
    if wanted is None:  # neither letter nor text: an option of the gold's value, or a gold that no answer can meet
        wanted = _by_value(gold_text, choices, ask)
    named, path = _named_options(answer_text, choices, ask)
    if named == frozenset() and (shorter := _REASON.sub("", answer_text)) != answer_text:
        named, path = _named_options(shorter, choices, ask)
    if wanted is None or named is None:
        return Decision(None, path)
    return Decision(bool(named) and named <= wanted, path)


def _unlabelled(choices: Sequence[str]) -> Sequence[str]:
    """Return the options' texts without "(A)", "(B)", ... in front, if all of them are labelled so."""
    matches = [_LABELLED.fullmatch(choice.strip()) for choice in choices]
    texts = [match[2] for index, match in enumerate(matches) if match and ord(match[1]) - ord("A") == index]
    return texts if len(texts) == len(choices) else choices


def _letter_list(text: str) -> frozenset[str]:
    """Return the letters of `A, C`, `B and D` or `AC`; none if the text is anything else."""
    outer = outer_brackets(text)
    text = re.sub(f"^{_INTRODUCTION}", "", outer[1] if outer else text)
    if re.fullmatch(r"[A-Z]{2,9}\.?", text) and len(set(text)) == len(text):
        return frozenset(text) - {"."}
    words = [word for word in _SEPARATOR.split(text.strip()) if word and word != "and"]
    letters = [match[1].upper() for word in words if (match := _LETTER_IN_LIST.fullmatch(word))]
    return frozenset(letters) if 1 < len(letters) == len(words) else frozenset()


def _gold_options(gold: str, choices: Sequence[str]) -> frozenset[int] | None:
    """Return the indices of the right option and its duplicates, or None if the gold names no option."""
    letter = _index(_LETTER.fullmatch(gold), choices)
    texts = _same_text(gold, choices)
    bare = re.fullmatch(r"[A-Z]", gold) is not None
    if letter is not None and (bare or not texts):
        return frozenset({letter}) | (_same_text(clean(choices[letter]), choices) if choices else frozenset())
    return texts or None


def _named_options(answer: str, choices: Sequence[str], ask: AskSymbolic) -> tuple[frozenset[int] | None, str]:
    """Return (indices of the options that the answer names, rule); None for the indices while they are not known."""
    letter = _index(_LETTER.fullmatch(answer), choices)
    texts = _same_text(answer, choices)
    if letter is not None:
        bare = re.fullmatch(r"[A-Z]", answer) is not None
        conflict = bool(texts) and letter not in texts and not bare
        return (frozenset() if conflict else frozenset({letter})), "choice_letter"
    if texts:
        return texts, "choice_text"
    for pattern, text_group in ((_LETTER_AND_TEXT, 2), (_TEXT_AND_LETTER, 1)):
        match = pattern.fullmatch(answer)
        letter = _index(match, choices, group=3 - text_group)
        if match is not None and letter is not None and choices:
            same = _same_value(choices[letter], _without_parentheses(match[text_group]), ask)
            if same is not False:
                return (frozenset({letter}) if same else None), "choice_letter"
    marked = None if choices else _MARKED.fullmatch(answer)
    if marked is not None and not _DOUBT.search(marked[2]):  # `B) 12 cm`, of options that are not known
        return frozenset({ord(marked[1].upper()) - ord("A")}), "choice_letter"
    return _by_value(answer, choices, ask), "choice_value"


def _by_value(text: str, choices: Sequence[str], ask: AskSymbolic) -> frozenset[int] | None:
    """Return the only option of this value and its duplicates, or no option; None while that is not known."""
    verdicts = [_same_value(choice, text, ask) for choice in choices]
    if None in verdicts:
        return None
    named = frozenset(index for index, same in enumerate(verdicts) if same)
    # Two options of equal value but different text: the text does not say which.
    is_unique = bool(named) and _same_text(clean(choices[min(named)]), choices) == named
    return named if is_unique else frozenset()


def _without_parentheses(text: str) -> str:
    outer = outer_brackets(text)
    return outer[1] if outer and outer[::2] == ("(", ")") else text


def _index(match: re.Match[str] | None, choices: Sequence[str], *, group: int = 1) -> int | None:
    """Return the index of the option whose letter a match holds, or None if there is no such option."""
    if match is None:
        return None
    index = ord(match.group(group).upper()) - ord("A")
    return index if index < (len(choices) or 26) else None


def _same_text(text: str, choices: Sequence[str]) -> frozenset[int]:
    """Return the indices of the options of this text, whatever its case."""
    return frozenset(index for index, choice in enumerate(choices) if _folded(clean(choice)) == _folded(text))


def _folded(text: str) -> str:
    return canonical(text).casefold()


def _same_value(choice: str, answer: str, ask: AskSymbolic) -> bool | None:
    """Return whether an option and an answer are equal; None while that is not known."""
    if _folded(clean(choice)) == _folded(clean(answer)):
        return True
    has_words = _WORD.search(clean(choice)) or _WORD.search(clean(answer))
    return AnswerComparison("expression", _ask_nothing if has_words else ask).compare(choice, answer).equal


def _ask_nothing(query: SymbolicQuery) -> bool | str:
    """Answer a query about prose: nothing is equal and nothing has a value.

    math-verify is never asked, because it would read words as products of letters.
    """
    return "" if query[0] == "value" else False
