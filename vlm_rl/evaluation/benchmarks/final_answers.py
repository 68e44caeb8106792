"""Find by rules what a judge model would be asked for: the letter of a response, its final value, or its number.

Used where a benchmark's published rule needs such a model. The result is called emulated, because a different
extractor finds different answers in the same text.
"""

from __future__ import annotations

import math
import re

from vlm_rl.templates import END_THINK, boxes

_TAIL = 2_000  # characters from the end in which a closing phrase is looked for
_CLOSING = re.compile(
    r"(?i)\b(?:final |correct |right )?(?:answer|option|choice)s?\b(?: is| are|:| =|\*\*:)+\s*([^\n]*)"
)
_NOT = r"(?!\s+(?:is|are)(?:\s+not\b|n't\b))"
_LETTER = r"[(\[*]*[A-I](?![A-Za-z'])[)\]*.:]*"
_LETTERS = re.compile(
    r"(?![AI]\s+(?!and\b)[a-z])"  # "A circle" and "I am" name none
    rf"(?>{_LETTER}(?:\s*(?:,|and|&)\s*{_LETTER})*){_NOT}"
)
_OR = re.compile(r"\s*or\s+[(\[*]*[A-I](?![A-Za-z'])")
_ONE_LETTER = re.compile(r"(?<![A-Za-z])([A-I])(?![A-Za-z'])")
_MARKED = re.compile(rf"\(([A-I])\){_NOT}")
_OPENING = re.compile(rf"\W*([A-I])\s?[).:](?![\w.]){_NOT}")
_OPTION_LINE = re.compile(r"(?m)^\W*([A-I])\s?[).:](?![\w.])")
_LAST_WORD = re.compile(r"(?:\b(?i:is|be|option|choice|answer|choose|pick|select|go with|it's) )([A-I])\W*$")
# "Therefore, B is the answer", but neither "A or B is" nor "A is not"
_AFFIRMED = re.compile(
    r"(?<![A-Za-z])(?<!or )(?<!or \()\(?([A-I])\)? is (?:(?:the )?(?:correct|right|best|only) ?|the )"
    r"(?:(?:final )?answer|option|choice)?(?![a-z])"
)
_CHINESE_LETTERS = r"\s*[(（]?[A-I](?![A-Za-z])[)）]?(?:\s*(?:[、,，和]\s*)?[(（]?[A-I](?![A-Za-z])[)）]?)*"
_CHINESE_CLOSING = re.compile(
    rf"(?:(?<!不)选择?|答案(?:应?该?[选是为])?|(?:正确|应选的?)选项(?:应?该?[是为]))[】]?[是为]?\s*[：:]?({_CHINESE_LETTERS})"
    r"(?!\s*(?:选?项)?\s*(?:或|还是|错|不))"
)
_CHINESE_AFFIRMED = re.compile(
    r"(?<![A-Za-z或])([A-I])\s*(?:选?项)?\s*(?:是|为)?(?:正确|对)(?:的|答案|选项|。|，|,|$)"
)

_PLAIN_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_STATEMENT = re.compile(
    r".*\b(?:is|are|was|equals|becomes|get|gives|have|has)\b(?: equal)?(?: to)?:?"
    r"(?: (?:approximately|about|roughly|exactly|therefore|also))?\s+((?!not\b).+)",
    re.DOTALL,
)
_NAMING = re.compile(r"(?i)^(?:the )?(?:final |correct |right )?(?:answer|option|choice)(?: is)?:?\s+(?=\S)")
_ANSWER_TAG = re.compile(r"(?is)<answer>(.*?)</answer>")
_MARKUP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?i)</?(?:answer|b|i|u|em|strong|p|span)>", ""),
        (
            r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|boldsymbol|bm|underline)\s*\{([^{}]*)\}",
            r"\1",
        ),
        (r"(?<!\\)\$|\\[()\[\]]|\\(?:left|right|displaystyle|bf|rm)(?![A-Za-z])", ""),
        (r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " "),
    )
)
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_RAISED, _LINED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"
_HIGH = re.compile(f"[{_RAISED}]+")
_VULGAR = str.maketrans({sign: f" {name}" for sign, name in (
    ("½", r"\frac{1}{2}"), ("⅓", r"\frac{1}{3}"), ("⅔", r"\frac{2}{3}"), ("¼", r"\frac{1}{4}"), ("¾", r"\frac{3}{4}"),
)})  # fmt: skip
_NO_NUMBERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=[0-9])(?:,|\{,\})(?=[0-9]{3}(?![0-9]))", ""),  # 1,234
        (
            r"(?<![0-9.,])([0-9]{1,3})[ '\u00a0\u2009\u202f]([0-9]{3})(?: ([0-9]{3}))?(?![0-9]|\s*/)",
            r"\1\2\3",
        ),  # 1 234
        (r"(?<![0-9./])([0-9]+) (?:and )?([0-9]+) ?/ ?([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}"),  # 3 1/2
        (r"\(([0-9]+ ?/ ?[0-9]+)\)(?= ?(?:\\pi|π|\\sqrt|√))", r"\1 "),  # (1/2)\pi
        (r"(?<=[0-9]) ?[xX] ?(?=10 ?\^)", r" \\times "),
        (r"\^\s*\{?\s*\\circ\s*\}?", " "),
        (r"_\s*(?:\{[^{}]*\}|[0-9A-Za-z])", " "),  # x_1
        (r"\\(times|cdot)(?=[0-9])", r"\\\1 "),  # 2\times10^3
        (r"(?<=[0-9])[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z])", r" \\times 10^{\1}"),
        (r"(?<=[A-Za-z])(?<!\\pi)\s*\^\s*(?:\{[^{}]*\}|\(?-?[0-9]+\)?)", " "),  # cm^2
        (r"(?<=[0-9])\s*\([^()]*[A-Za-z]{3,}[^()]*\)\W*$", ""),  # 12 (to 2 decimal places)
    )
)
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_FACTOR = re.compile(
    rf"\\[dtc]?frac\s*(?:{_BRACED}\s*{_BRACED}|([0-9])\s*([0-9]))"
    rf"|(?:\\sqrt\s*(?:\[\s*([0-9]{{1,2}})\s*\])?\s*(?:{_BRACED}|([0-9]))|√\(?({_DECIMAL})\)?)"
    r"|((?:\\pi(?![A-Za-z])|π)(?: ?\^ ?\{?[0-9]\}?)?)"
    rf"|(?<![0-9A-Za-z.])({_DECIMAL})(?:\s*\^\s*\{{?\(?(-?[0-9]{{1,3}})\)?\}}?)?(?:\s*/\s*({_DECIMAL})(?!\s*/))?"
)
_TIMES = re.compile(r"\s*(?:\\times|\\cdot|×|·|\*)\s*")
_MAX_VALUE = 1e300


def final_answer(response: str) -> str:
    """Return the last box after the reasoning, else what follows the last closing phrase, else the last line."""
    text = response.rpartition(END_THINK)[2].strip()
    contents = [box.strip() for box in boxes(text) or [] if box.strip()]
    if contents:
        return _innermost(contents[-1])
    if tagged := [content.strip() for content in _ANSWER_TAG.findall(text) if content.strip()]:
        text = tagged[-1]
    closing = list(_CLOSING.finditer(text[-_TAIL:]))
    line = closing[-1][1] if closing else text[-_TAIL:].rpartition("\n")[2]
    return line.strip().strip("*$").rstrip(".").strip()


def _innermost(content: str) -> str:
    r"""Return the last box inside of a box, as in \boxed{\boxed{B}}; without one the content itself."""
    for _ in range(8):
        inside = [box.strip() for box in boxes(content) or [] if box.strip()]
        if not inside:
            break
        content = inside[-1]
    return content


def stated_value(answer: str) -> str:
    """Return the value that a sentence states: 22.3 meters for "the distance d is approximately 22.3 meters".

    Only a value with a digit or a command of LaTeX is taken; any other text stays.
    """
    match = _STATEMENT.fullmatch(answer) if len(_PLAIN_WORD.findall(answer)) > 3 else None
    value = match[1].strip().rstrip(".") if match else ""
    return value if re.search(r"[0-9]|\\[A-Za-z]", value) else answer


def final_letters(response: str) -> tuple[str, ...]:
    """Return the option letters A to I that a response names in the end, sorted; () if it names none clearly.

    The final answer begins with them, or 故选 or 答案 comes before them. Else a letter is the last word ("would be
    B."), or the only one that is said to be right ("B is the answer"), or the only one in brackets, or the response
    opens with it ("C) ... is correct.") and no other line begins with another option's letter.
    """
    answer = _NAMING.sub("", without_markup(final_answer(response)))
    if closing := _CHINESE_CLOSING.findall(answer):
        return tuple(sorted(set(re.findall("[A-I]", closing[-1]))))
    if match := _LETTERS.match(answer):
        is_guess = _OR.match(answer, match.end()) is not None
        return () if is_guess else tuple(sorted(set(_ONE_LETTER.findall(match[0]))))
    text = without_markup(response.rpartition(END_THINK)[2])
    if closing := _CHINESE_CLOSING.findall(text):
        return tuple(sorted(set(re.findall("[A-I]", closing[-1]))))
    if match := _LAST_WORD.search(text):
        return (match[1],)
    if len(affirmed := set(_AFFIRMED.findall(text) or _CHINESE_AFFIRMED.findall(text))) == 1:
        return tuple(affirmed)
    marked = set(_MARKED.findall(text))
    if len(marked) != 1 and _OPENING.match(text):
        marked = set(_OPTION_LINE.findall(text))
    return tuple(marked) if len(marked) == 1 else ()


def without_markup(text: str) -> str:
    r"""Return a text without tags, \text{} and other fonts, dollar signs and spacing commands: B for \text{B}."""
    for _ in range(3):  # fonts may be nested
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
    return text.strip()


def final_number(text: str) -> str:
    r"""Return the last number of a final answer as a decimal, or "" if there is none.

    A fraction, a root, a power and a multiple of \pi are computed: their parts are no answer. Exponents of units, the
    indices of names and digits inside words are no numbers.
    """
    text = without_markup(text.translate(_VULGAR))
    text = _HIGH.sub(lambda run: "^{" + run[0].translate(str.maketrans(_RAISED, _LINED)) + "}", text)
    for pattern, replacement in _NO_NUMBERS:
        text = pattern.sub(replacement, text.replace("−", "-"))
    value: float | None = None
    shown, end, was_computed = "", 0, False
    for match in _FACTOR.finditer(text):
        factor, is_computed = _value(match), match[10] is None or match[11] is not None or match[12] is not None
        gap, before = text[end : match.start()], text[: match.start()].rstrip(" ")
        if factor is None:
            value, shown = None, ""
        elif value is not None and (_TIMES.fullmatch(gap) or (not gap.strip() and match[10] is None)):
            is_fraction = (match[1] or match[3]) is not None and "pi" not in match[0]
            is_mixed = not gap.strip() and shown.lstrip("-").isdigit() and is_fraction
            sign = -1 if shown.startswith("-") else 1
            value = value + sign * factor if is_mixed else value * factor
            shown = ""
        elif (
            value is not None and factor and gap.strip() == "/" and (was_computed or (is_computed and not match[12]))
        ):
            value, shown = value / factor, ""
        elif value is not None and gap.strip() in ("+", "-") and (is_computed or was_computed):
            value, shown = value + (-factor if gap.strip() == "-" else factor), ""
        else:
            is_negative = before.endswith("-") and re.search(r"[0-9A-Za-z)}]\s*-$", before) is None
            value = -factor if is_negative else factor
            shown = "" if is_computed else f"{'-' * is_negative}{match[10]}"
        end, was_computed = match.end(), is_computed or not shown
    if shown or value is None or not abs(value) < _MAX_VALUE:
        return shown
    return str(round(value)) if abs(value - round(value)) < 1e-9 else repr(round(value, 10))


def _value(match: re.Match[str]) -> float | None:
    """Return the value of a factor, or None if it has none."""
    try:
        if match[1] is not None or match[3] is not None:
            above, below = (final_number(part) for part in (match[1] or match[3], match[2] or match[4]))
            return float(above) / float(below)
        if match[6] is not None or match[7] is not None or match[8] is not None:
            return float(final_number(match[6] or match[7] or match[8])) ** (1 / int(match[5] or 2))
        if match[9] is not None:
            exponent = re.search(r"[0-9]", match[9])
            return math.pi ** int(exponent[0] if exponent else 1)
        value = float(match[10]) ** int(match[11] or 1)
        return value if match[12] is None else value / float(match[12])
    except (ValueError, OverflowError, ZeroDivisionError, TypeError):
        return None
