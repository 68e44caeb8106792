"""Say in a sentence why an answer is correct or wrong, by the rule that decided."""

from __future__ import annotations

# rule: (what makes an answer correct, what makes it wrong)
PHRASES = {
    "text": ("the same text", "not the same text"),
    "outcome": ("the same outcome", "not the same outcome"),
    "written_form": ("the same numerals in the same form", "not the same numerals in the same form"),
    "family": ("the same family of solutions", "not the same family of solutions"),
    "approximate": ("equal", "only an approximation"),
    "equation": ("a true equation with the gold's value", "not the same equation, or not a true one"),
    "time": ("the same time", "not the same time"),
    "ratio": ("the same ratio", "not the same ratio"),
    "relation": ("the same range", "not the same range"),
    "union": ("equal part by part", "not the same parts"),
    "matrix": ("equal entry by entry", "not the same shape and entries"),
    "set": ("the same elements", "not the same elements"),
    "tuple": ("equal entry by entry", "not the same entries in the same order"),
    "bracket": ("equal entry by entry", "not the same entries in the same brackets"),
    "interval": ("the same interval", "not the same interval"),
    "bare": ("equal item by item", "not the same items, or not in the same order"),
    "guess_list": ("equal", "several values where the gold is a single one"),
    "unit": ("the same measure", "not the same unit or measure"),
    "number": ("equal as exact numbers", "not the same number"),
    "percent": ("equal, one of them in percent", "not equal, and only one of them is in percent"),
    "rounded": ("within the margin that the problem allows", "not within the margin that the problem allows"),
    "closed_form": ("the same exact value", "not the same exact value"),
    "math_verify": ("equal by math-verify", "not equal by math-verify"),
    "number_base": ("equal", "not in the same number base"),
    "figure": ("the same figure", "not the same figure, or its corners in a different order"),
    "undone": ("equal", "equal, but the operation is left undone"),
    "repeated": ("equal", "equal, but only an expression of the question"),
    "unfactored": ("equal", "equal, but not factored"),
    "unexpanded": ("equal", "equal, but not multiplied out"),
    "choice_letter": ("the letter of the right option", "a different option, or two at once"),
    "choice_letters": ("the same options", "not the same options"),
    "choice_text": ("the text of the right option", "the text of a different option"),
    "choice_value": ("the value of the right option", "the value of a different option, of several or of none"),
}


def explain(answer: str, gold: str, rule: str, *, equal: bool) -> str:
    """Return the reason for a verdict of `correct` or `wrong`.

    Args:
        answer: The text of the last box.
        gold: The gold that the answer met, or all alternatives if it met none.
        rule: The rule that decided.
        equal: Whether the answer is correct.
    """
    correct, wrong = PHRASES.get(rule, ("equal", "not equal"))
    return f"the last box holds {shorten(answer)}; the gold is {shorten(gold)}; {correct if equal else wrong}"


def shorten(text: str) -> str:
    """Return a text of at most 80 characters, cut with three dots."""
    return text if len(text) <= 80 else f"{text[:77]}..."
