"""Answers in words that are no numbers: that there is no value, or no end of them; and chemical formulae."""

from __future__ import annotations

import re

from vlm_rl.grading.number_words import ordinal

_SUBJECT = r"(?:(?:the |this |such an? )?(?:limit|value|answer|solution|expression|function|it|integral|number) )?"
_THERE = r"(?:there (?:are|is|exists?) |(?:it|the equation|the system|this) has )?"
_OF_IT = r"(?: (?:to|for) (?:the|this) (?:equation|system|problem|inequality))?"
_WORDS = {
    "does not exist": rf"dne|d n e|{_SUBJECT}(?:does not|doesn't|doesnt|do not) exist|不存在|极限不存在",
    "no solution": rf"{_THERE}no (?:solutions?|roots?)(?: exists?)?{_OF_IT}|{_SUBJECT}has no (?:solutions?|roots?)"
    r"|\\emptyset|(?:the )?(?:empty|null) set|(?:方程)?(?:无解|没有解)|空集",
    "no real solution": rf"{_THERE}no real (?:solutions?|roots?|values?|numbers?)(?: exists?)?{_OF_IT}"
    r"|(?:方程)?(?:无实数?[解根]|没有实数?[解根])",
    "undefined": rf"{_SUBJECT}(?:is )?(?:undefined|not defined)|无意义|未定义|没有意义",
    "infinitely many": rf"{_THERE}(?:infinitely many|an infinite (?:number|amount) of|infinite(?: number of)?|∞ many)"
    rf"(?: (?:solutions?|roots?|values?|points?))?{_OF_IT}|无穷多个?解?|无数个?解?|有无[穷数]多?个?解?",
}
_OUTCOMES = {name: re.compile(pattern) for name, pattern in _WORDS.items()}


def by_words(gold: str, answer: str) -> tuple[str, bool] | None:
    """(rule, verdict) for two formulae, outcomes or ordinals of `clean` texts; None where words do not decide."""
    if (wanted := formula(gold)) is not None and wanted == formula(answer):
        return "text", True
    outcomes = outcome(gold), outcome(answer)
    if any(outcomes):
        return "outcome", outcomes[0] == outcomes[1]
    ordinals = ordinal(gold), ordinal(answer)
    return None if None in ordinals else ("number", ordinals[0] == ordinals[1])


def outcome(text: str) -> str | None:
    """The name of the outcome that `clean` text states, or None if it is an answer of another kind."""
    if len(text) > 80:
        return None
    words = " ".join(text.casefold().replace(".", " ").strip("! ").split())
    return next((name for name, pattern in _OUTCOMES.items() if pattern.fullmatch(words)), None)


_FORMULA = re.compile(r"(?:(?:[A-Z][a-z]?|\(|\)) ?(?:_ ?\{ ?[0-9]+ ?\}|[0-9]+)? ?){2,20}(?:\^ ?\{ ?[0-9]?[-+] ?\})?")


def formula(text: str) -> str | None:
    """`H_2O` and `H2O` in one spelling; None for what has no count of atoms, or is no formula."""
    if len(text) > 80 or not _FORMULA.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    return "".join(character for character in text if character not in "_{} ")


def words(text: str) -> str:
    """Letters and digits of a text in words: no case, no marks, no article in front."""
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z ]|$)", "", text)  # p.m.
    text = re.sub(r"[\s\\\"'.!-]+", " ", text).strip().casefold()
    text = re.sub(r"^(?:an?|the) (?=[a-z]{2})", "", text)
    return re.sub(r"(?<=[0-9]) (?=[a-z])", "", text)  # 6:30 pm
