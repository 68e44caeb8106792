"""Say in one sentence why an answer is correct or wrong, by the rule that decided."""

from __future__ import annotations

# rule: (what makes the answer correct, what makes it wrong)
_BY_RULE = {
    "text": ("the same text", "different texts"),
    "outcome": ("the same outcome", "different outcomes, such as no solution and a value"),
    "family": ("the same family of solutions", "different families of solutions"),
    "approximate": ("equal", "only an approximation"),
    "equation": ("the same equation", "not the same equation"),
    "ratio": ("the same ratio", "different ratios"),
    "relation": ("the same range", "different ranges"),
    "union": ("equal part by part", "different parts"),
    "matrix": ("equal entry by entry", "different shapes or entries"),
    "set": ("the same elements", "different elements"),
    "tuple": ("equal entry by entry", "different entries, or in a different order"),
    "bracket": ("equal entry by entry", "different entries or ends"),
    "interval": ("the same interval", "different intervals"),
    "bare": ("equal item by item", "different items, or in a different order"),
    "guess_list": ("equal", "the answer offers several values, the gold is one"),
    "unit": ("the same measure", "different units or measures"),
    "number": ("equal as exact numbers", "different numbers"),
    "rounded": ("within the margin that the problem allows", "outside the margin that the problem allows"),
    "closed_form": ("the same exact value", "different exact values"),
    "math_verify": ("equal by math-verify", "not equal by math-verify"),
    "number_base": ("equal", "written in different number bases"),
    "figure": ("the same figure", "different figures, or corners in a different order"),
    "choice_letter": (
        "the letter of the right option",
        "not the right option, or a letter with a different option's text",
    ),
    "choice_letters": ("the same options", "different options"),
    "choice_text": ("the text of the right option", "the text of a different option"),
    "choice_value": ("the value of the right option", "not the value of the right option alone"),
}


def explain(answer: str, gold: str, rule: str, *, equal: bool) -> str:
    """Return the reason for a verdict of `correct` or `wrong`.

    Args:
        answer: The text of the last box.
        gold: The gold that the answer met, or all alternatives if it met none.
        rule: The rule that decided.
        equal: Whether the answer is correct.
    """
    correct, wrong = _BY_RULE.get(rule, ("equal", "not equal"))
    return f"the last box holds {shorten(answer)}; the gold is {shorten(gold)}; {correct if equal else wrong}"


def shorten(text: str) -> str:
    """Return a text of at most 80 characters, cut with three dots."""
    return text if len(text) <= 80 else f"{text[:77]}..."
