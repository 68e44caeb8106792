r"""Text forms of an answer: one spelling for many notations, top-level splitting.

`clean` removes what never changes a value (delimiters, spacing, \left, \text{}, fraction sizes);
`canonical` also drops the insignificant spaces and is what two answers are compared by.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html import unescape

from vlm_rl.grading.unicode_text import to_latex

_FONTS = r"text(?:rm|bf|it|sf|tt|sc|up|normal)?|math(?:rm|bf|it|sf|tt|cal|normal)|boldsymbol|bm"
_TEXT = re.compile(
    rf"\\(?:{_FONTS}|operatorname\*?|[mhf]box|framebox|ensuremath|unit|si|underline|emph)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_PUNCTUATION = re.compile(r"(?<![_^])(?:\\(?:text|math(?:ord|punct|bin|rel))\s*)?\{\s*([-+,:.])\s*\}")  # 1{,}0
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});")
_HTML = re.compile(r"<(b|i|u|em|strong|p|span)>([^<>]*)</\1>")
_GREEK = r"\\(?:pi|alpha|beta|gamma|theta|lambda|mu|phi|omega)(?![A-Za-z])"
_ARGUMENT = rf"([0-9A-Za-z]|{_GREEK})"  # of \frac without braces
_FUNCTIONS = r"arc(?:sin|cos|tan)|sin|cos|tan|cot|csc|ln|log|exp"
_LARGER = r"degrees?|days?|hours?|hrs?|h|minutes?|mins?|feet|foot|ft|pounds?|lbs?|dollars?|meters?|metres?|m"
_SMALLER = (
    r"hours?|hrs?|minutes?|mins?|seconds?|secs?|s|inch(?:es)?|in|ounces?|oz|cents?|centimeters?|centimetres?|cm"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"^[ $]*~(?= ?-?\.?[0-9])", r"\\sim "),  # ~5 is about 5; further on the mark is a space
        (r"\\boxed ?(?=\{)", ""),
        (r"(?<!\\)\\\$", r" \\dollar "),
        (r"\$|(?<!\\)\\[()\[\]]", " "),
        (
            r"\\(?:(?:display|text|script)style|rm|bf|it|sf|tt|cal|normalsize|[lL]arge|LARGE|[hH]uge|small"
            rf"|{_FONTS})(?![A-Za-z])",
            " ",
        ),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z])|enspace(?![A-Za-z]))|~", " "),
        (r"\\(?:SI|qty)\{([^{}]*)\}\{([^{}]*)\}", r"\1 \2"),
        (r"\\(?:(?:text)?color|colorbox|[hv]?phantom|[hv]space\*?|label|tag) ?\{[^{}]*\}", ""),
        (r"\\(?:begin|end) ?\{(?:align(?:ed|at)?|gathered|split|equation|math)\*?\}", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?![0-9]))?", ""),
        (r"\\(?:[dtc]|s|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]{0,200})\\over(?![A-Za-z])([^{}]{0,200})\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]{0,200})\\choose(?![A-Za-z])([^{}]{0,200})\}", r"\\binom{\1}{\2}"),
        (r"\\bigcup(?![A-Za-z])", r"\\cup"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\geq(?:slant|q)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\leq(?:slant|q)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\neq(?![A-Za-z])|!=|\\not ?=", r"\\ne "),
        (r", ?&(?!#|[a-z]+;)", "&"),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\ce ?\{([^{}]*)\}", r"\1"),
        (
            r"\( ?\\?mod ?\{?([0-9A-Za-z]+)\}? ?\)|\\(?:p|b)?mod ?(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]+))",
            r"\\pmod{\1\2\3}",
        ),
        (r"\\colon(?![A-Za-z])", ":"),
        (r":=", "="),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\textdollar(?![A-Za-z])", r"\\dollar "),
        (r"\\\\ ?\[ ?[0-9.]+ ?(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (r"\\%", "%"),
        (r"(?<=[0-9A-Za-z])\{\s*\}(?!\{)", " "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\(?:text)?degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<=[0-9)}])\s*\^\s*(?:\{\s*o\s*\}|o(?![A-Za-z]))", r"^\\circ "),
        (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![A-Za-z])", "'"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[-+0-9A-Za-z({])", "^"),
        (r"\*\*", ""),
        (r"(?<=[0-9]) ?(?:[xX*] ?|\\times\s*)(?=\{?10\}? ?\^)", r"\\times "),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"^ *(?i:the |all |set of ){0,3}(?i:reals|real numbers)[ .]*$", r"\\mathbb{R}"),
        (r"^ *(?i:the )?(?i:empty set)[ .]*$", r"\\emptyset "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])(?i:infinity)(?![A-Za-z])", r"\\infty "),
        (r"^[ (]*(?i:negative|minus) \\infty", r"-\\infty"),
        (r"^[ (]*(?i:positive|plus) \\infty", r"\\infty"),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"\.([0-9]*)\\dot ?\{?([0-9])\}?([0-9]*)\\dot ?\{?([0-9])\}?", r".\1\\overline{\2\3\4}"),
        (r"([0-9]\.[0-9]*) ?\\(?:bar|dot|overline) ?(?:\{ ?([0-9]+) ?\}|([0-9]))", r"\1\\overline{\2\3}"),
        (r"([0-9]\.[0-9]*)\(([0-9]+)\)", r"\1\\overline{\2}"),  # 0.1(6) is 0.1666...
        (r"\\(vec|hat|bar|overline) +([0-9A-Za-z])", r"\\\1{\2}"),
        (r"(?:\\|(?<![A-Za-z\\]))sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<=[0-9]) ?(?:\^ ?)?\{? ?(st|nd|rd|th)(?![A-Za-z]) ?\}?", r"\1"),  # 57^{th}
        (r"\^\s*(-?[0-9]*\.[0-9]+|-?[0-9]+|[A-Za-z])", r"^{\1}"),
        (r"_\s*([0-9A-Za-z])", r"_{\1}"),
        (rf"\\(frac|binom)(?![A-Za-z])\s*{_ARGUMENT}\s*{_ARGUMENT}", r"\\\1{\2}{\3}"),
        (rf"\\(frac|binom)(?![A-Za-z])\s*{_ARGUMENT}\s*\{{", r"\\\1{\2}{"),
        (rf"(\\(?:frac|binom)\s*\{{[^{{}}]*\}})\s*([0-9]|{_GREEK})", r"\1{\2}"),
        (r"\\(frac|binom|sqrt)\s+(?=[{\[])", r"\\\1"),
        (r"(\\frac\s*\{[^{}]*\})\s+(?=\{)", r"\1"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\sqrt\s*(\[[0-9A-Za-z]\])?\s*([0-9]+|[A-Za-z])", r"\\sqrt\1{\2}"),
        (r"(?<![0-9A-Za-z])sq\. ?(?=[a-z])", "sq "),
        (r"(?<=[0-9 ])\{ *([A-Za-z]{1,5}) *\}$", r" \1"),
        (r"(?<![0-9A-Za-z_{}])\(?([0-9]+)\)? ?_\{ ?10 ?\}", r"\1"),  # base ten
        (r"\(([0-9A-F]+)\) ?_(?=\{)", r"\1_"),
        (r"(?<=[0-9A-F]_)\{ ?\( ?([0-9]{1,2}) ?\) ?\}", r"{\1}"),
        (rf"(?<=[0-9]) ?({_LARGER}),? and (?=[0-9]+ ?(?:{_SMALLER})[ .]*$)", r" \1 "),  # 3 hours and 20 minutes
        (r"\s+", " "),
        (r" (?=\^)", ""),
    )
)
_OPEN, _CLOSE = frozenset(["(", "[", "{", "\\{"]), frozenset([")", "]", "}", "\\}"])
_SYSTEM = re.compile(
    r"\\begin ?\{cases\} ?((?:[^&]|&(?==)){1,400}?) ?\\end ?\{cases\}"
    r"|\\\{ ?\\begin ?\{array\} ?\{l+\} ?((?:[^&]|&(?==)){1,400}?) ?\\end ?\{array\}(?! ?\\\})"
)
_QUOTED = re.compile(r"^([`*_'\"]{1,3})([^`*_'\"]*)\1$")
_ENDS = r"([^][(),;]*[0-9A-Za-z][^][(),;]*[,;][^][(),;]*[0-9A-Za-z][^][(),;]*)"
_REVERSED_END = re.compile(r"^\]|\[$|\[ ?\\cup|\\cup ?\]")
_REVERSED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\]{_ENDS}\[", r"(\1)"),
        (rf"\]{_ENDS}\]", r"(\1]"),
        (rf"\[{_ENDS}\[", r"[\1)"),
    )
)
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
MAX_REMEMBERED = 300  # characters


def clean(text: str) -> str:
    r"""One spelling for what looks the same: no math delimiters, spacing macros, \left or \text."""
    return _remembered(text) if len(text) <= MAX_REMEMBERED else _cleaned(text)


@lru_cache(8192)
def _remembered(text: str) -> str:
    """Gold and options come again with every response to their problem, and each rule asks for its own texts."""
    return _cleaned(text)


def _cleaned(text: str) -> str:
    text = to_latex(_HTML.sub(r"\2", _ENTITY.sub(lambda match: unescape(match.group()), text)))
    text = _PUNCTUATION.sub(r"\1", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return degrees_in_functions(_round_ends(_strip(_SYSTEM.sub(_as_list, text))))


def _as_list(system: re.Match[str]) -> str:
    """The equations of a system, one a line, with commas between them."""
    return ", ".join(
        row.strip(" ,;.") for row in (system[1] or system[2]).replace("&=", "=").split("\\\\") if row.strip()
    )


def _round_ends(text: str) -> str:
    """`]0,1[`, as open ends are written in some countries, as `(0,1)`."""
    if not _REVERSED_END.search(text):
        return text
    for pattern, replacement in _REVERSED:
        text = pattern.sub(replacement, text)
    return text


def _strip(text: str) -> str:
    for _ in range(12):  # bounded: hostile text may nest thousands of groups
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";", ":", "\\\\")) and not text.endswith(".."):
            text = text[: -2 if text.endswith("\\\\") else -1]
        text = _QUOTED.sub(r"\2", text.lstrip(":="))
        if _is_one_group(text):
            text = text[1:-1]
        if text == before:
            break
    return text


def _is_one_group(text: str) -> bool:
    """True for `{...}` whose first brace closes at the very end."""
    if not (text.startswith("{") and text.endswith("}") and not text.endswith("\\}")):
        return False
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if depth == 0:
            return piece.end() == len(text)
    return False


def canonical(text: str) -> str:
    """`clean` text without the spaces that mean nothing; a space between two words or numbers stays."""
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


def split_top(text: str, separators: frozenset[str]) -> list[str]:
    r"""Split at separators outside all brackets. A separator is one character or a command (`\cup`)."""
    parts, start, depth = [], 0, 0
    for piece in _PIECE.finditer(text):
        token = piece.group()
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : piece.start()].strip())
            start = piece.end()
    return [*parts, text[start:].strip()]


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) if one pair of brackets spans the whole text; `(a]` counts as a pair."""
    depth, opening = 0, ""
    for piece in _PIECE.finditer(text):
        token = piece.group()
        if piece.start() == 0:
            if token not in _OPEN:
                return None
            opening = token
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0:
            if piece.end() != len(text):
                return None
            return opening, text[len(opening) : piece.start()].strip(), token
    return None


_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{-?[0-9]\})?) ?(?:\( ?([0-9.]+) ?\^\\circ ?\)|\{ ?([0-9.]+) ?\^\\circ ?\}"
    r"|([0-9.]+) ?\^\\circ)"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_NAMES = frozenset(
    re.findall("[a-z]+", "sin cos tan cot sec csc log ln lg exp sqrt pi max min lim gcd lcm mod det arcsin arccos")
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{[a-z*]+\}(?: ?\{[clr| ]*\})?")
_SHORT_WORDS = frozenset(["no", "yes", "ok"])


def degrees_in_functions(text: str) -> str:
    r"""\sin 60^\circ as \sin(\frac{60\pi}{180}): elsewhere a degree sign changes no value."""
    return _DEGREES.sub(lambda m: rf"{m[1]}(\frac{{{m[2] or m[3] or m[4]}\pi}}{{180}})", text)


def is_prose(text: str) -> bool:
    """Whether `clean` text is words, not mathematics: words must never be read as products of letters.

    A run of four letters is a word; of three, unless they stand in the alphabet's order (abc, xyz) or
    are capitals (points of a figure); of two, only the few short words of answers.
    """
    for word in _WORD.findall(_ENVIRONMENT.sub(" ", text)):
        lower = word.lower()
        if lower in _NAMES:
            continue
        ordered = list(lower) == sorted(lower)
        if len(word) > 3 or lower in _SHORT_WORDS or (len(word) == 3 and not ordered and not word.isupper()):
            return not word.isupper() or len(word) > 4
    return False


_MATRIX = re.compile(
    r"^[(\[]? ?\\begin ?\{(?:(?:[pbB]|small)?(?:matrix|array)|cases)\}(?: ?\{[clr| ]*\})? ?(.*?) ?"
    r"\\end ?\{[a-zB]+\} ?[)\]]?$"
)
_ROWS, _CELLS = frozenset(["\\\\"]), frozenset("&")


def matrix(text: str) -> list[list[str]] | None:
    """The rows of a matrix or column in any brackets; None for anything else, determinants included."""
    found = _MATRIX.match(text)
    if found is None or "\\begin" in found.group(1):
        return None
    rows = [split_top(row, _CELLS) for row in split_top(found.group(1), _ROWS)]
    return rows[:-1] if len(rows) > 1 and rows[-1] == [""] else rows
