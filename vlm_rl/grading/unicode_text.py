"""One spelling for characters that look alike: full-width forms, foreign digits, invisible marks.

Every function is linear in the length of its text.
"""

from __future__ import annotations

import re
import unicodedata

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
    "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi ", "ω": "\\omega ",     "\u2126": "\\Omega ",
    "μ": "\\mu ", "µ": "\\mu ", "Δ": "\\Delta ", "△": "\\triangle ", "∆": "\\triangle ",
    "∠": "\\angle ", "√": "\\sqrt ", "∛": "\\sqrt[3] ", "′": "'", "″": "''", "’": "'", "‘": "'", "“": '"',
    "”": '"', "。": ".", "、": ",", "،": ",", "؛": ";", "٪": "%", "→": "\\to ", "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "∨": "\\lor ", "∧": "\\land ",
    "【": "[", "】": "]", "Ω": "\\Omega ", "⟨": "\\langle ", "⟩": "\\rangle ", "∣": "|", "⌊": "\\lfloor ",
    "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ",
}  # fmt: skip


def _folding() -> dict[int, str | None]:
    """Full-width ASCII to ASCII, every script's digits to 0-9, invisible format characters to nothing."""
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


_FOLDING = _folding()
_SYMBOL_TABLE = str.maketrans(_SYMBOLS)


def fold(text: str) -> str:
    """ASCII for full-width forms and foreign digits; zero-width and direction marks are gone."""
    return text if text.isascii() else text.translate(_FOLDING)


def to_latex(text: str) -> str:
    """`fold`, and mathematical symbols as LaTeX: superscripts, fractions, operators, letters."""
    if text.isascii():
        return text
    text = text.translate(_FOLDING)
    text = _HIGH.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run.group())) + "}", text)
    text = _LOW.sub(lambda run: "_{" + "".join(map(_SUBSCRIPTS.__getitem__, run.group())) + "}", text)
    return unicodedata.normalize("NFKC", text.translate(_SYMBOL_TABLE))
