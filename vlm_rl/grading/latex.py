r"""Rewrite an answer in one spelling of LaTeX, and split it at its brackets.

`clean` replaces Unicode symbols and removes what never changes a value: delimiters, spacing, \left, \text{}, fraction
sizes. `canonical` also drops the spaces that mean nothing: two answers of equal canonical text are equal. The time of
every function is linear in the length of its text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from html import unescape

# -- Unicode -------------------------------------------------------------------------------------------

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_HIGH = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOW = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": "\\times ", "✕": "\\times ", "·": "\\cdot ",
    "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": "\\pi ", "Π": "\\Pi ", "∞": "\\infty ",
    "∪": "\\cup ", "⋃": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "≤": "\\le ", "≦": "\\le ", "⩽": "\\le ",
    "≥": "\\ge ", "≧": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≃": "\\approx ", "∈": "\\in ",
    "±": "\\pm ", "∓": "\\mp ", "°": "^\\circ ", "º": "^\\circ ", "˚": "^\\circ ", "℃": "^\\circ C",
    "℉": "^\\circ F", "½": " \\frac{1}{2}", "⅓": " \\frac{1}{3}", "⅔": " \\frac{2}{3}", "¼": " \\frac{1}{4}",
    "¾": " \\frac{3}{4}", "⅕": " \\frac{1}{5}", "⅛": " \\frac{1}{8}", "⅜": " \\frac{3}{8}", "⅝": " \\frac{5}{8}",
    "⅞": " \\frac{7}{8}", "⅙": " \\frac{1}{6}", "⅚": " \\frac{5}{6}", "θ": "\\theta ", "α": "\\alpha ",
    "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi ", "ω": "\\omega ", "\u2126": "\\Omega ",
    "μ": "\\mu ", "µ": "\\mu ", "Δ": "\\Delta ", "△": "\\triangle ", "∆": "\\triangle ",
    "∠": "\\angle ", "√": "\\sqrt ", "∛": "\\sqrt[3] ", "′": "'", "″": "''", "’": "'", "‘": "'", "“": '"',
    "”": '"', "。": ".", "、": ",", "،": ",", "؛": ";", "٪": "%", "→": "\\to ", "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "∨": "\\lor ", "∧": "\\land ",
    "【": "[", "】": "]", "Ω": "\\Omega ", "⟨": "\\langle ", "⟩": "\\rangle ", "∣": "|", "⌊": "\\lfloor ",
    "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∶": ":", "㎟": " mm^2", "㎠": " cm^2", "㎡": " m^2",
    "㎢": " km^2", "㎣": " mm^3", "㎤": " cm^3", "㎥": " m^3", "㎦": " km^3",
}  # fmt: skip


def _folding_table() -> dict[int, str | None]:
    """Return a table from full-width forms to ASCII, all scripts' digits to 0-9 and invisible marks to nothing."""
    table: dict[int, str | None] = {0x2000 + offset: " " for offset in range(11)}
    table |= {0x00A0: " ", 0x202F: " ", 0x205F: " ", 0x3000: " ", 0x066B: ".", 0x066C: ","}
    table |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    table |= dict.fromkeys(range(0xFE00, 0xFE10))  # variation selectors
    for code in (*range(0x80, 0x20000), *range(0xE0000, 0xE0080)):
        category = unicodedata.category(chr(code))
        if category == "Cf":
            table[code] = None
        elif category == "Nd":
            table[code] = str(unicodedata.decimal(chr(code)))
    return table


_FOLDING = _folding_table()
_SYMBOL_TABLE = str.maketrans(_SYMBOLS)


def fold_unicode(text: str) -> str:
    """Return the text with full-width forms and foreign digits as ASCII, without zero-width and direction marks."""
    return text if text.isascii() else text.translate(_FOLDING)


def _unicode_to_latex(text: str) -> str:
    """Return the folded text with superscripts, fractions, operators and Greek letters as LaTeX."""
    if text.isascii():
        return text
    text = text.translate(_FOLDING)
    text = _HIGH.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run.group())) + "}", text)
    text = _LOW.sub(lambda run: "_{" + "".join(map(_SUBSCRIPTS.__getitem__, run.group())) + "}", text)
    return unicodedata.normalize("NFKC", text.translate(_SYMBOL_TABLE))


# -- LaTeX ---------------------------------------------------------------------------------------------

_FONTS = r"text(?:rm|bf|it|sf|tt|sc|up|normal)?|math(?:rm|bf|it|sf|tt|cal|normal)|boldsymbol|bm"
_TEXT = re.compile(
    rf"\\(?:{_FONTS}|operatorname\*?|[mhf]box|framebox|ensuremath|unit|si|underline|emph)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
# 3,\!250 and 3{,}250, whose comma is not a comma of a list
_THOUSANDS = re.compile(
    r"(?<=[0-9])\s*(?:(?:\\!\s*)*,\s*(?:\\!\s*)+|\\!\s*,|\{,\}\s*(?:\\!)?)\s*(?=[0-9]{3}(?![0-9]))"
)
_PUNCTUATION = re.compile(r"(?<![_^])(?:\\(?:text|math(?:ord|punct|bin|rel))\s*)?\{\s*([-+,:.])\s*\}")  # 1{,}0
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});")
_HTML = re.compile(r"<(b|i|u|em|strong|p|span)>([^<>]*)</\1>")
_GREEK = r"\\(?:pi|alpha|beta|gamma|theta|lambda|mu|phi|omega)(?![A-Za-z])"
_ARGUMENT = rf"([0-9A-Za-z]|{_GREEK})"  # of \frac without braces
_FUNCTIONS = r"arc(?:sin|cos|tan)|sin|cos|tan|cot|csc|ln|log|exp"
_LARGER_UNIT = r"degrees?|days?|hours?|hrs?|h|minutes?|mins?|feet|foot|ft|pounds?|lbs?|dollars?|meters?|metres?|m"
_SMALLER_UNIT = (
    r"hours?|hrs?|minutes?|mins?|seconds?|secs?|s|inch(?:es)?|in|ounces?|oz|cents?|centimeters?|centimetres?|cm"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"^[ $]*~(?= ?-?\.?[0-9])", r"\\sim "),  # a leading ~ means "about"
        (r"(?<=[0-9%]) ?~ ?(?![0-9]{3}(?![0-9]))(?=[0-9])", "-"),  # 10~20; elsewhere ~ is a space: 1~000
        (r"\\boxed ?(?=\{)", ""),
        (r"(?<!\\)\\\$", r" \\dollar "),
        (r"\$|(?<!\\)\\[()\[\]]", " "),
        (
            r"\\(?:(?:display|text|script)style|rm|bf|it|sf|tt|cal|normalsize|[lL]arge|LARGE|[hH]uge|small"
            rf"|{_FONTS})(?![A-Za-z])",
            " ",
        ),
        (r"(?<!\\)\\!", ""),
        (
            r"(?<!\\)\\(?:[,;:>/ ]|(?:q?quad|(?:neg)?(?:thin|med|thick)space|enspace|enskip|space|nobreakspace|hfill?"
            r"|(?:no|allow)break|null|strut|relax)(?![A-Za-z]))|~",
            " ",
        ),
        (r"\\[hm]?(?:skip|kern) ?-?[0-9.]+ ?(?:pt|em|ex|mm|cm|mu)", " "),
        (r"(?<!\\)\\ *$", ""),  # of a control space at the end of the box, whose space is gone
        (r"(?<=[0-9A-Za-z)}\]]) ?(?:或者?|或是) ?(?=[-0-9A-Za-z(\\√±])", " or "),
        (r"(?<=[0-9A-Za-z)}\]]) ?(?:以及|并且|[和与及且]) ?(?=[-0-9A-Za-z(\\√±])", " and "),
        (r"(?<=[0-9)}]),? (?:as well as|along with|together with) (?=[-0-9A-Za-z(\\])", " and "),
        (r"^([^&\\]*[0-9]) ?& ?(?=-?[0-9][^&\\]*$)", r"\1 and "),
        (r"\+ ?/ ?-|(?:^|(?<==)) ?\+ ?-(?=[0-9\\])|(?<![A-Za-z])plus(?: or |-)minus(?![A-Za-z])", r"\\pm "),
        (r"^ ?(?i:both|either) (?=.*[0-9)}] (?:and|or) )", ""),
        (r"\\(?:SI|qty)\{([^{}]*)\}\{([^{}]*)\}", r"\1 \2"),
        (r"\\(?:(?:text)?color|colorbox|[hv]?phantom|[hv]space\*?|label|tag) ?\{[^{}]*\}", ""),
        (r"\\(?:begin|end) ?\{(?:align(?:ed|at)?|gathered|split|equation|math)\*?\}", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?![0-9]))?", ""),
        (r"\\(?:[dtc]|s|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]{0,200})\\over(?![A-Za-z])([^{}]{0,200})\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]{0,200})\\choose(?![A-Za-z])([^{}]{0,200})\}", r"\\binom{\1}{\2}"),
        (r"^([^{}\\+*/=]{1,20})\\choose(?![A-Za-z])([^{}\\+*/=]{1,20})$", r"\\binom{\1}{\2}"),
        (r"\\bigcup(?![A-Za-z])", r"\\cup"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\geq(?:slant|q)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\leq(?:slant|q)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\neq(?![A-Za-z])|!=|\\not ?=", r"\\ne "),
        (r", ?&(?!#|[a-z]+;)", "&"),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\ce ?\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1"),
        (
            r"\(\s*\\?mod\s*\{?([0-9A-Za-z]+)\}?\s*\)"
            r"|(?:\\[pb]?mod|(?<=[0-9] )mod(?= ?\{?[0-9]))\s*(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z]+))",
            r"\\pmod{\1\2\3}",
        ),
        (r"\\colon(?![A-Za-z])", ":"),
        (r":=", "="),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"^ *<([^<>=]*[^<>= ,][^<>=]*,[^<>=]*)> *$", r"(\1)"),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\textdollar(?![A-Za-z])", r"\\dollar "),
        (r"\\\\ ?\[ ?[0-9.]+ ?(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (r"\\%", "%"),
        (r"(?<=[0-9A-Za-z])\{\s*\}(?!\{)", " "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\(?:text)?degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<=[0-9)}])\s*\^\s*(?:\{\s*o\s*\}|o(?![A-Za-z]))", r"^\\circ "),
        (r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
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
        (r"\\(vec|hat|bar|overline|dd?ot|tilde) +([0-9A-Za-z])", r"\\\1{\2}"),
        (r"(?:\\|(?<![A-Za-z\\]))sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<=[0-9]) ?(?:\^ ?)?\{? ?(st|nd|rd|th)(?![A-Za-z]) ?\}?", r"\1"),  # 57^{th}
        (r"(?<=[0-9)}])( ?[cdkm]m| (?:m|ft|in|yd|mi))([23])(?=/|[ .]*$)", r"\1^\2"),  # 12 cm2, typed on a keyboard
        (r"([0-9)}] ?[cdkm]?m/s)2(?=[ .]*$)", r"\1^2"),
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
        (r"(?<=[0-9 ])\{ *(\^\\circ|[A-Za-z][A-Za-z ]{0,30}(?:\^\{[0-9]\})?) *\}(?=\^\{[0-9]\}$|$)", r" \1"),
        (r"(?<![0-9A-Za-z_{}])\(?([0-9]+)\)? ?_\{ ?10 ?\}", r"\1"),  # base ten
        (r"\(([0-9A-F]+)\) ?_(?=\{)", r"\1_"),
        (r"(?<=[0-9A-F]_)\{ ?\( ?([0-9]{1,2}) ?\) ?\}", r"{\1}"),
        (
            rf"(?<=[0-9]) ?({_LARGER_UNIT}),? and (?=[0-9]+ ?(?:{_SMALLER_UNIT})[ .]*$)",
            r" \1 ",
        ),  # 3 hours and 20 minutes
        (r"or(?<=[0-9)} ]or) ?(?=[-+0-9(\\]|[a-z] ?=)", " or "),  # 2or3
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
# Each part may end in one place only: a part that leaves it open makes a bracket without a partner very expensive.
_END = r"[^][(),;0-9A-Za-z]*[0-9A-Za-z][^][(),;]*"
_ENDS = f"({_END}[,;]{_END})"
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
_MAX_CACHED_LENGTH = 300
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[A-Z]")  # numbers and letters, half of all texts: nothing to change


def clean(text: str) -> str:
    r"""Return a text in one spelling: without math delimiters, spacing macros, \left, \text and the like."""
    return _clean_cached(text) if len(text) <= _MAX_CACHED_LENGTH else _clean(text)


@lru_cache(8192)
def _clean_cached(text: str) -> str:
    """Return `_clean` from a cache: the gold and the options come again with every response to their problem."""
    return _clean(text)


def _clean(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    text = _WIDE_TILDE.sub("-", text)
    text = _unicode_to_latex(_HTML.sub(r"\2", _ENTITY.sub(lambda match: unescape(match.group()), text)))
    if "," in text:
        text = _THOUSANDS.sub("", text)
    text = _PUNCTUATION.sub(r"\1", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    if "dots" in text or "..." in text:
        text = _REPEATED.sub(_with_overline, _DOTS.sub(r"\\dots ", text))
    return _degrees_as_radians(_open_ends(_strip(_SYSTEM.sub(_system_as_list, text))))


def _system_as_list(system: re.Match[str]) -> str:
    """Return the equations of a system, which has one on each line, with commas between them."""
    return ", ".join(
        row.strip(" ,;.") for row in (system[1] or system[2]).replace("&=", "=").split("\\\\") if row.strip()
    )


def _open_ends(text: str) -> str:
    """Return `]0,1[`, as some countries write an open interval, as `(0,1)`."""
    if not _REVERSED_END.search(text):
        return text
    for pattern, replacement in _REVERSED:
        text = pattern.sub(replacement, text)
    return text


def _strip(text: str) -> str:
    """Return the text without spaces, final punctuation, quotation marks and braces around it."""
    for _ in range(12):  # bounded: hostile text may nest thousands of groups
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";", ":", "\\\\")) and not text.endswith(".."):
            text = text[: -2 if text.endswith("\\\\") else -1]
        text = _QUOTED.sub(r"\2", text.lstrip(":="))
        if is_one_group(text):
            text = text[1:-1]
        if text == before:
            break
    return text


def is_one_group(text: str) -> bool:
    """Return whether the text is `{...}` and its first brace closes at the very end."""
    if not (text.startswith("{") and text.endswith("}") and not text.endswith("\\}")):
        return False
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if depth == 0:
            return piece.end() == len(text)
    return False


def canonical(text: str) -> str:
    """Return a `clean` text without the spaces that mean nothing: one between two words or numbers stays."""
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


def split_top_level(text: str, separators: frozenset[str]) -> list[str]:
    r"""Split a text at the separators outside all brackets. Each is one character or a command (`\cup`)."""
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


def outer_brackets(text: str) -> tuple[str, str, str] | None:
    """Return (opening, inside, closing) if one pair of brackets spans the whole text, else None. `(a]` is a pair."""
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


_WIDE_TILDE = re.compile("(?<=[0-9A-Za-z%°℃\u4e00-\u9fff]) ?[～〜∼] ?(?=[-0-9])")  # of a range
_DOTS = re.compile(r"\\[lc]?dots[bcimo]?(?![A-Za-z]) ?|(?:^|(?<=[-0-9,+= ]))\.{3}(?!\.) ?")
_REPEATED = re.compile(r"(?<![0-9.])([0-9]{0,20})\.([0-9]{2,40}) ?\\dots(?! ?[0-9,])")


def _with_overline(match: re.Match[str]) -> str:
    r"""Return 0.1666\dots as 0.1\overline{6}; without digits that are repeated before the dots it stays."""
    whole, decimals = match.groups()
    for size in range(1, len(decimals) // 2 + 1):
        cycle = decimals[-size:]
        if decimals.endswith(2 * cycle):
            start = decimals
            while start.endswith(cycle):
                start = start[:-size]
            return rf"{whole}.{start}\overline{{{cycle}}}"
    return match[0]


_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{-?[0-9]\})?) ?(?:\( ?([0-9.]+) ?\^\\circ ?\)|\{ ?([0-9.]+) ?\^\\circ ?\}"
    r"|([0-9.]+) ?\^\\circ)"
)


def _degrees_as_radians(text: str) -> str:
    r"""Return \sin 60^\circ as \sin(\frac{60\pi}{180}). Elsewhere a degree sign changes no value."""
    return _DEGREES.sub(lambda match: rf"{match[1]}(\frac{{{match[2] or match[3] or match[4]}\pi}}{{180}})", text)
