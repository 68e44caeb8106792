"""Compare answers in words: outcomes such as "no solution", ordinal numbers, chemical formulae, plain text."""

from __future__ import annotations

import re

from vlm_rl.grading.decision import Decision
from vlm_rl.grading.number_words import parse_ordinal

_SUBJECT = r"(?:(?:the |this |such an? )?(?:limit|value|answer|solution|expression|function|it|integral|number) )?"
_THERE = r"(?:there (?:are|is|exists?) |(?:it|the equation|the system|this) has )?"
_OF_IT = r"(?: (?:to|for) (?:the|this) (?:equation|system|problem|inequality))?"
_OUTCOME_PATTERNS = {
    "does not exist": rf"dne|d n e|{_SUBJECT}(?:does not|doesn't|doesnt|do not) exist|不存在|极限不存在",
    "no solution": rf"{_THERE}no (?:solutions?|roots?)(?: exists?)?{_OF_IT}|{_SUBJECT}has no (?:solutions?|roots?)"
    r"|\\emptyset|(?:the )?(?:empty|null) set|(?:方程)?(?:无解|没有解)|空集",
    "no real solution": rf"{_THERE}no real (?:solutions?|roots?|values?|numbers?)(?: exists?)?{_OF_IT}"
    r"|(?:方程)?(?:无实数?[解根]|没有实数?[解根])",
    "undefined": rf"{_SUBJECT}(?:is )?(?:undefined|not defined)|无意义|未定义|没有意义",
    "infinitely many": rf"{_THERE}(?:infinitely many|an infinite (?:number|amount) of|infinite(?: number of)?|∞ many)"
    rf"(?: (?:solutions?|roots?|values?|points?))?{_OF_IT}|无穷多个?解?|无数个?解?|有无[穷数]多?个?解?",
}
_OUTCOMES = {name: re.compile(pattern) for name, pattern in _OUTCOME_PATTERNS.items()}
_GROUP = r"(?:(?:[A-Z][a-z]?|\(|\)) ?(?:_ ?\{ ?[0-9]+ ?\}|[0-9]+)? ?)"
_FORMULA = re.compile(rf"{_GROUP}{{2,20}}(?:\^\{{[0-9]?[-+]\}})?|{_GROUP}{{1,20}}(?:\^\{{[0-9]?[-+]\}}|[-+])")
_CHARGE = re.compile(r" ?\^ ?\{? ?([0-9]*) ?(?:\} ?)?([-+])([0-9]?)(?: ?\})?$")
_STATE = re.compile(r" ?\((?:s|l|g|aq)\)")
_ARROW = re.compile(
    r" ?(?:<?-{1,3}>|={1,3}>|\\le ?>|\\(?:x?(?:long)?rightarrow|Rightarrow|to|rightleftharpoons|rightleftarrows"
    r"|(?:long)?leftrightarrow)(?![A-Za-z])"
    r"(?: ?\[[^]]*\])?(?: ?\{[^{}]*\})?|⇌|⟶|=) ?"
)
_PLUS = re.compile(r" \+ |(?<![\^{]) ?\+ ?(?=[0-9]* ?[(\[A-Z])")
_SPECIES = re.compile(
    r"(?:[0-9]+ ?|[0-9]+/[0-9]+ ?)?(?:(?:[A-Z][a-z]?|\(|\)) ?(?:_ ?\{ ?[0-9]+ ?\}|[0-9]+)? ?){1,20}"
    r"(?:\^\{[0-9]?[-+]\})?(?: ?\((?:s|l|g|aq)\))?|e\^\{-\}"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTION_NAMES = frozenset(
    re.findall("[a-z]+", "sin cos tan cot sec csc log ln lg exp sqrt pi max min lim gcd lcm mod det arcsin arccos")
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{[a-z*]+\}(?: ?\{[clr| ]*\})?")
_LEADING_DOTS = re.compile(r"^\\dots(?![A-Za-z])")  # in front of the rest of a sentence
_FROM, _RANGE_SIGN = re.compile(r"^from ", re.IGNORECASE), re.compile(r" (?:to|through) | ?-{1,3} ?")
_MINUS_OF_NAME = re.compile(r"(?<![A-Za-z0-9])([A-Za-z]{1,2})-(?= |$)")  # a mark, a type of blood: A-, AB-
_SHORT_WORDS = frozenset(["no", "yes", "ok"])


def compare_wording(gold: str, answer: str) -> Decision | None:
    """Decide between two outcomes, ordinals or formulae, as `clean` texts; return None if words do not decide."""
    formula = chemical_formula(gold)
    if formula is not None and _same_formula(formula, chemical_formula(answer) or ""):
        return Decision(True, "text")
    reaction = chemical_reaction(gold)
    if reaction is not None and not _STATE.search(gold):
        answer = _STATE.sub("", answer)
    if reaction is not None and (given := chemical_reaction(answer)) is not None:
        return Decision(reaction == given, "text")
    outcomes = stated_outcome(gold), stated_outcome(answer)
    if any(outcomes):
        return Decision(outcomes[0] == outcomes[1], "outcome")
    ordinals = parse_ordinal(gold), parse_ordinal(answer)
    return None if None in ordinals else Decision(ordinals[0] == ordinals[1], "number")


def stated_outcome(text: str) -> str | None:
    """Return the name of the outcome that a `clean` text states, or None if it states none."""
    if len(text) > 80:
        return None
    words = " ".join(_LEADING_DOTS.sub("", text).casefold().replace(".", " ").strip("! ").split())
    return next((name for name, pattern in _OUTCOMES.items() if pattern.fullmatch(words)), None)


def chemical_formula(text: str) -> str | None:
    """Return `H_2O` and `H2O` in one spelling; None for what has no count of atoms or is not a formula."""
    if len(text) > 80:
        return None
    text = _CHARGE.sub(r"^{\1\3\2}", text)
    if not _FORMULA.fullmatch(text) or not re.search(r"[0-9]|[-+]\}?$", text):
        return None
    return re.sub(r"[_{} ]", "", text)


def _same_formula(formula: str, other: str) -> bool:
    """Return whether two formulae are the same, one of which may be as a keyboard has it: Fe3+, NH4+, SO42-."""
    is_plain = "^" not in formula or "^" not in other
    return formula == other or (is_plain and formula.replace("^", "") == other.replace("^", ""))


def chemical_reaction(text: str) -> tuple[list[str], ...] | None:
    """Return the species of each side of `2H_2 + O_2 \\to 2H_2O`, with their coefficients; None for all else."""
    sides = _ARROW.split(text) if len(text) <= 300 else []
    if len(sides) != 2:
        return None
    species = [sorted(map(_species, _PLUS.split(side.strip()))) for side in sides]
    is_chemistry = any(character.isdigit() or character == "^" for character in text)
    return tuple(species) if is_chemistry and all(all(side) for side in species) else None


def _species(text: str) -> str:
    """Return one spelling of a coefficient, a formula, its charge and its state; "" for anything else."""
    text = re.sub(r"\^ ?\{? ?([0-9]*) ?\}? ?([-+])(?: ?\})?", r"^{\1\2}", text.strip())
    return re.sub(r"[_{} ]", "", text) if _SPECIES.fullmatch(text) else ""


def is_prose(text: str) -> bool:
    """Return whether a `clean` text is words, not mathematics. Words must never be read as products of letters.

    A run of four letters is a word. One of three is a word unless its letters follow the alphabet (abc, xyz) or are
    capitals (points of a figure). One of two is a word only if it is a usual short answer.
    """
    for word in _WORD.findall(_ENVIRONMENT.sub(" ", text)):
        lower = word.lower()
        if lower in _FUNCTION_NAMES:
            continue
        ordered = list(lower) == sorted(lower)
        if len(word) > 3 or lower in _SHORT_WORDS or (len(word) == 3 and not ordered and not word.isupper()):
            return not word.isupper() or len(word) > 4
    return False


def same_worded_range(gold: str, answer: str) -> bool:
    """Return whether both are one range in words, such as `Monday to Friday` and `Monday-Friday`."""
    golds, answers = (_RANGE_SIGN.split(_FROM.sub("", text)) for text in (gold, answer))
    is_range = len(golds) == len(answers) == 2 and all(golds)
    return is_range and [*map(normalized_words, golds)] == [*map(normalized_words, answers)]


def normalized_words(text: str) -> str:
    """Return the letters and digits of a text in words: without case, punctuation and a leading article."""
    text = _MINUS_OF_NAME.sub("\\1\u207b", _LEADING_DOTS.sub("", text))
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z ]|$)", "", text)  # p.m.
    text = re.sub(r"(?<=[A-Za-z])[,;:]|[,;:](?= ?[A-Za-z])", " ", text)  # not the comma of 1,2
    # The point of 1.5, the sign of -10 and the factorial of 5! count.
    text = re.sub(r"[\s\\\"']+|\.(?![0-9])|(?<![0-9])\.|(?<![0-9)])!|-(?![0-9])|(?<=\w)-", " ", text)
    text = " ".join(text.split()).casefold()
    text = re.sub(r"^(?:an?|the) (?=[a-z]{2})", "", text)
    return re.sub(r"(?<=[0-9]) (?=[a-z])", "", text)  # 6:30 pm
