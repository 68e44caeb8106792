r"""Find answers that equal the gold only because nothing was done: the operation is left, or the question repeated.

A policy that copies `37\times43` out of its question would otherwise be paid for 1591. Undone are products, sums and
differences of plain numbers, sums, products, integrals, limits and derivatives written out, gcd, mod, max and min,
determinants, sums and products of matrices, an absolute value, floor or ceiling of a constant, unions of more parts
than the gold's, like terms, and sums of squares and cubes (constant_terms). Not undone are fractions, powers, roots,
factorials, binomials, multiples of \pi or e, percentages, mixed numbers, and a chain such as 37\times43=1591 that
ends (or begins) with its value.

Texts are read by their signs; the sums and products in them are never computed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from vlm_rl.grading.closed_form import DIFFERENTIALS, parse_closed_form
from vlm_rl.grading.constant_terms import leaves_like_terms, leaves_small_powers
from vlm_rl.grading.containers import parse_collection
from vlm_rl.grading.equations import EQUALS, value_label
from vlm_rl.grading.inequalities import as_intervals
from vlm_rl.grading.latex import clean, outer_brackets, split_top_level
from vlm_rl.grading.questions import asks_expansion, asks_factors, repeats_ratio
from vlm_rl.grading.rational import NUMBER
from vlm_rl.grading.written_forms import parse_form

MAX_READ = 1_000  # characters of an answer; a longer one is undone if the gold is much shorter
MAX_REPEATED = 300  # characters of an expression that is looked for in the question
# A number, one in brackets, a proper fraction, any other fraction, and what is no plain number: one character each.
_N, _P, _F, _G, _A = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
_PLAIN = f"[{_N}{_P}{_F}{_G}]"
_ATOM = f"[{_N}{_P}{_F}{_G}{_A}]"
_LISTED = frozenset(",;")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})?")
_UNION = frozenset(["\\cup"])
_SET_DESCRIPTION = re.compile(r"[|:<>]|\\(?:cup|cap|setminus|ne|in|le|ge)(?![A-Za-z])")
_WRITTEN_OUT = re.compile(
    r"\\(?:sum|prod|i*nt|oint|lim|gcd|lcm)(?![A-Za-z])|[∑∏∫]|(?<![A-Za-z\\])(?:gcd|lcm)(?![A-Za-z])"
    rf"|{DIFFERENTIALS}|\\frac ?\{{ ?(?:d|\\partial)(?:\^\{{[0-9]\}})? ?\}}"
    r"|(?<![A-Za-z])d(?:\^\{[0-9]\})? ?/ ?d ?[a-z]"
)
_CONSTANT = r"(?:[^A-Za-hj-z\\|]|\\(?:frac|sqrt|pi|div|cdot|times)(?![A-Za-z]))*"
_TO_EVALUATE = re.compile(  # \max(3,5), a determinant, \lfloor 16/3\rfloor
    r"\\(?:det|max|min) ?(?:\(|\\?\{|\\begin)|\\begin ?\{[vV]matrix"
    rf"|\\lfloor(?![A-Za-z]){_CONSTANT}\\rfloor|\\lceil(?![A-Za-z]){_CONSTANT}\\rceil"
)
_NAME_OR_COMMAND = re.compile(r"\\(?:begin|end) ?\{[A-Za-z]+\}(?: ?\{[clr| ]*\})?|\\[A-Za-z]+")
_MATRIX = r"\{(?:[pbB]|small)?(?:matrix|array)\}"
_JOINED = re.compile(  # matrices with nothing but a sign and a number between them
    rf"\\end ?{_MATRIX}(?:[-+0-9./{{}}() ]|\\(?:cdot|times|frac)(?![A-Za-z]))*\\begin ?{_MATRIX}"
)
_ABSOLUTE_VALUE = re.compile(rf"{_CONSTANT}\|{_CONSTANT}[0-9]{_CONSTANT}\|{_CONSTANT}")
_OPERATOR_OF_GOLD = re.compile(rf"{_WRITTEN_OUT.pattern}|\\frac ?\{{[{{ ]*d[ }}]|\\pmod")
_POWER_OF_GOLD = re.compile(r"[0-9)}] ?(?:\^(?! ?\\circ)|!)")  # of a numeral, or a factorial
_REMAINDER = re.compile(r"(.*)\\pmod\{([^{}]*)\}")
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:begin|end) ?\{[a-zA-Z*]+\}(?: ?\{[clr| ]*\})?|\\\\", ","),
        (r"\^\\circ|\\dollar|%|[€£¥₹]", ""),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(?:pm|mp)(?![A-Za-z])", "+"),
        (r"_ ?(?:\{[^{}]*\}|[0-9A-Za-z])", ""),
        (r"(\\sqrt) ?\[[^][]*\]", r"\1"),
    )
)
_FRACTION = re.compile(
    r"\\frac ?\{ ?([0-9]{1,20}) ?\}\{ ?([0-9]{1,20}) ?\}|(?<![\w.}])([0-9]{1,20}) ?/ ?([0-9]{1,20})(?![\w.!^])"
)
_NUMERAL = re.compile(NUMBER)
_GROUP = re.compile(r"\\?\{([^{}()]*)\\?\}|\(([^{}()]*)\)")
_FLAT_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"{_N} ?{_F}", _N),  # 2\frac{1}{3}
        (rf"{_ATOM} ?!+", _A),
        (rf"\\frac ?(?:{_PLAIN}) ?(?:{_PLAIN})", _G),
        (rf"\\(?:frac|binom) ?{_ATOM} ?{_ATOM}", _A),
        (rf"\\sqrt ?{_ATOM}", _A),
        (rf"(?:\\[A-Za-z]+|[A-Za-z]|{_ATOM}) ?\^ ?-?(?:{_ATOM}|[A-Za-z])", _A),
    )
)
_PARTS = re.compile(
    r"[,;=<>|&\[\]]|\\(?:le|ge|ne|to|in|cup|cap|approx|lor|land|vee|wedge|setminus|mid|[lr](?:floor|ceil))(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:or|and|或|和)(?![A-Za-z])"
)
_TERM_SIGN = re.compile(r"(?<=[^-+*/])([-+]+)")
_PLAIN_TERM = re.compile(rf"[-+]*{_PLAIN}(?:/{_PLAIN})*")
_LEADS = re.compile(rf"[-+]*{_PLAIN}")
_ADJACENT = re.compile(rf"(?<![A-Za-z]){_PLAIN}{_P}")
_OPERATION = re.compile(
    r"[+*/^!|]|(?<=[0-9A-Za-z)}]) ?-|\\begin ?\{vmatrix"
    r"|\\(?:frac|sqrt|binom|times|cdot|div|log|ln|sin|cos|tan|pmod|det|max|min|lfloor|lceil)(?![A-Za-z])"
)
# Values in their final form, that a question may well mention: 3/4, 2\sqrt{3}, \frac{\pi}{2}
_QUOTIENT = re.compile(
    r"-?(?:\\frac\{ ?([0-9]*) ?(?:\\pi|e)? ?\}\{ ?([0-9]+) ?\}|([0-9]+) ?/ ?([0-9]+)) ?(?:\\pi|[a-z])?"
)
_SURD = re.compile(r"-?[0-9]* ?\\sqrt\{ ?([0-9]{1,8}) ?\}")
_FORMULA = re.compile(r"\$\$?([^$]{1,300})\$|\\\(([^$]{1,300}?)\\\)|\\\[([^$]{1,300}?)\\\]")
_OPERATORS_AROUND = frozenset("+-*/^_.")
_PRODUCT_OF_SUMS = re.compile(  # x(x+2) and (x+1)^{2}, but neither f(x+2) at the start nor (x+2)
    r"[0-9A-Za-z)}] ?(?:\\cdot|\\times|\*)? ?\([^()]*[A-Za-z][^()]*[-+][^()]*\)|\([^()]*[A-Za-z] ?[-+][^()]*\) ?[\^(]"
)
_FACTOR_SIGNS = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|\*")


def unfinished(gold: str, answer: str, question: str) -> str | None:
    """Return why an answer that equals the gold does not count; None if it counts.

    Args:
        gold: The gold's raw text. What it leaves undone itself, the answer may too.
        answer: The answer's raw text.
        question: The question's raw text, or "" if it is not known.
    """
    gold, answer = clean(gold), clean(answer)
    if gold == answer:
        return None
    if len(answer) > MAX_READ:
        return "undone" if len(answer) > 4 * len(gold) else None
    if question and (repeats_question(question, gold, answer) or repeats_ratio(clean(question), gold, answer)):
        return "repeated"
    if asks_factors(question) and (wanted := _count_factors(gold)) is not None:
        given = _count_factors(answer)
        return "unfactored" if given is None or given < wanted else None
    if asks_expansion(question) and not _is_product(gold) and _is_product(answer):
        return "unexpanded"
    has_it_too = is_undone(gold) or _holds_form(gold) or _OPERATOR_OF_GOLD.search(gold)
    if has_it_too:
        return None
    if _leaves_union(gold, answer):
        return "undone"
    leaves_powers = _POWER_OF_GOLD.search(gold) is None and any(map(leaves_small_powers, _ends(answer)))
    return "undone" if leaves_powers or is_undone(answer) else None


def _leaves_union(gold: str, answer: str) -> bool:
    r"""Return whether a `clean` answer is a union of more parts than the gold: (0,2)\cup(1,3) for (0,3)."""
    given = split_top_level(split_top_level(answer, EQUALS)[-1], _UNION)
    if len(given) == 1:
        return False
    if (intervals := as_intervals(gold)) is not None:
        return len(given) > len(intervals.parts)
    return parse_collection(gold, "expression") is not None and not _SET_DESCRIPTION.search(gold)


def _is_product(text: str) -> bool:
    """Return whether a `clean` text is a product, or holds one of a sum: x(x+2)+1."""
    last = split_top_level(text, EQUALS)[-1]
    return _PRODUCT_OF_SUMS.search(last) is not None or _count_factors(text) is not None


def is_undone(text: str) -> bool:
    """Return whether a `clean` text, or one of its items, still holds an operation to be done."""
    return any(_holds_operation(end) or leaves_like_terms(end) for end in _ends(text))


def _holds_form(text: str) -> bool:
    """Return whether an item of a `clean` text is a score, a range or a size, whose signs mean no operation."""
    outer = outer_brackets(text)
    items = split_top_level(outer[1] if outer and "," in outer[1] else text, _LISTED)
    return any(" to " in item or parse_form(item) is not None for item in items)


def _ends(text: str) -> Iterator[str]:
    """Yield the value that each item of a `clean` text ends with; a chain may begin with its value: 5=2+3."""
    for item in split_top_level(text, _LISTED):
        parts = [part for part in split_top_level(item, EQUALS) if part]
        if value_label(parts):
            parts = parts[1:]
        elif len(parts) > 1 and _VARIABLE.fullmatch(parts[-1]):
            parts = parts[:-1]
        if parts and (len(parts) == 1 or not _is_done(parts[0])):
            yield parts[-1]


def _is_done(text: str) -> bool:
    r"""Return whether a text is a numeral, or another constant in its final form, such as 5\sqrt{2}."""
    if _NUMERAL.fullmatch(text.removeprefix("-")):
        return True
    form = parse_closed_form(text)
    is_constant = form is not None and all(name.isdigit() for name in form.symbols)
    return is_constant and not (_holds_operation(text) or leaves_like_terms(text) or leaves_small_powers(text))


def _holds_operation(text: str) -> bool:
    if _WRITTEN_OUT.search(text) or _TO_EVALUATE.search(text) or _ABSOLUTE_VALUE.fullmatch(text):
        return True
    if _is_remainder(text) or _joins_matrices(text):
        return True
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _NUMERAL.sub(_number, _FRACTION.sub(_fraction, text))
    while match := _GROUP.search(text):  # each round takes one pair of brackets, and the innermost first
        inside = match[1] if match[2] is None else match[2]
        if _is_calculation(inside):
            return True
        is_plain = _PLAIN_TERM.fullmatch(_flat(inside)) is not None
        text = text[: match.start()] + (_P if is_plain else _A) + text[match.end() :]
    return _is_calculation(text)


def _joins_matrices(text: str) -> bool:
    """Return whether a text adds or multiplies matrices of numbers; with a parameter the sum is a line or a plane."""
    return _JOINED.search(text) is not None and not re.search("[A-Za-z]", _NAME_OR_COMMAND.sub("", text))


def _is_remainder(text: str) -> bool:
    r"""Return whether a text is a remainder to be computed: 17 \pmod{5}, but neither 2 \pmod{5} nor a congruence."""
    match = _REMAINDER.search(text)
    if match is None or "\\equiv" in text:
        return False
    number, modulus = match[1].strip(" ("), match[2].strip()
    is_reduced = number.isdecimal() and modulus.isdecimal() and len(number) <= len(modulus) <= 20
    return not (is_reduced and int(number) < int(modulus))


def _fraction(match: re.Match[str]) -> str:
    above, below = (int(match[1] or match[3]), int(match[2] or match[4]))
    return _F if above < below else _G


def _number(match: re.Match[str]) -> str:
    """Return the sign of a whole number, which may begin a mixed number: neither 0 nor 0.5 does."""
    return _N if match[0].strip("0,") and "." not in match[0] else _G


def _flat(text: str) -> str:
    """Return a text without brackets in which each fraction, power, root and factorial is one character."""
    for pattern, replacement in _FLAT_RULES:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", "", text)


def _is_calculation(text: str) -> bool:
    """Return whether a text without brackets adds or multiplies two plain numbers."""
    if not re.search(_PLAIN, text):
        return False
    return any(_adds(part) or any(map(_multiplies, _terms(part)[0])) for part in _PARTS.split(_flat(text)))


def _terms(text: str) -> tuple[list[str], list[str]]:
    """Return (terms, signs between them) of a sum."""
    pieces = _TERM_SIGN.split(text)
    return pieces[::2], pieces[1::2]


def _adds(text: str) -> bool:
    terms, signs = _terms(text)
    plain = [term for term in terms if _PLAIN_TERM.fullmatch(term)]
    is_mixed_number = signs == ["+"] and terms == [_N, _F]
    return len(plain) > 1 and not is_mixed_number


def _multiplies(term: str) -> bool:
    factors = term.split("*")
    return sum(_LEADS.match(factor) is not None for factor in factors) > 1 or _ADJACENT.search(term) is not None


# -- the question --------------------------------------------------------------------------------------


def repeats_question(question: str, gold: str, answer: str) -> bool:
    """Return whether a `clean` answer is an expression of the question, other than the gold, that is not worked out.

    An expression stands between words or at an equals sign: x-1 is none of those in x-1+y.
    """
    without_degrees = answer.replace("^\\circ", "")
    if len(answer) > MAX_REPEATED or not _OPERATION.search(without_degrees) or _is_final(without_degrees):
        return False
    if len(split_top_level(answer, _LISTED)) > 1:
        return False
    if outer_brackets(answer) is not None and "," in answer:
        return False  # a point or an interval
    golds, answers = ({_key(side) for side in split_top_level(text, EQUALS)} for text in (gold, answer))
    sides = [side for side in split_top_level(answer, EQUALS) if side]
    bare = sides[-1] if len(sides) == 2 and value_label(sides) else answer
    if golds & answers or _signs(bare) == _signs(gold):
        return False
    if _signs(bare) in {_signs(clean(part)) for part in _formulas(question)}:
        return True
    squeezed, wanted = re.sub(r"\s+", " ", clean(question)), re.sub(r"\s+", "", answer)
    pattern = " ?".join(map(re.escape, wanted))
    return any(_stands_alone(squeezed, *match.span()) for match in re.finditer(pattern, squeezed))


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Tell whether text[start:end] stands outside any longer expression."""
    before, after = text[:start], text[end:]
    if re.search(r"[0-9A-Za-z\\]$", before) or re.match(r"[0-9A-Za-z]", after):
        return False
    before, after = before.rstrip(), after.lstrip()
    ends_sentence = re.match(r"\.(?![0-9])", after) is not None
    if before[-1:] in _OPERATORS_AROUND - {"."} or (after[:1] in _OPERATORS_AROUND and not ends_sentence and after):
        return False
    if re.match(r"\\(?:times|cdot|div)(?![A-Za-z])|[({]", after) or re.search(r"\\(?:times|cdot|div)$|[)}]$", before):
        return False
    return before[-1:] not in tuple("({[") or after[:1] in tuple(")}]")


def _is_final(text: str) -> bool:
    """Return whether a text is a fraction in lowest terms or a root without a square in it."""
    if match := _QUOTIENT.fullmatch(text):
        above, below = int(match[1] or match[3] or 1), int(match[2] or match[4])
        return math.gcd(above, below) == 1 and below > 1
    if match := _SURD.fullmatch(text):
        number = int(match[1])
        return all(number % divisor**2 for divisor in range(2, math.isqrt(number) + 1))
    return False


def _key(text: str) -> tuple[tuple[str, int], ...]:
    """Return a key that is the same for two spellings of an expression, in any order of terms."""
    return tuple(sorted(Counter(re.sub(r"\\(?:cdot|times)(?![A-Za-z])|[\s*{}]", "", text)).items()))


def _formulas(question: str) -> list[str]:
    """Return the sides of the formulas that a raw question sets between dollar signs or LaTeX's brackets."""
    found = (next(filter(None, match.groups())) for match in _FORMULA.finditer(question))
    return [side for formula in found for side in re.split(r"[=?]|\\equiv(?![A-Za-z])", formula) if side.strip()]


def _signs(text: str) -> tuple[tuple[str, int], ...]:
    r"""Return the signs of a `clean` expression: the same for x^2\cdot x^3, x^3x^2, for (x^2-9)/(x-3) and its \frac.

    Two expressions with the same signs may differ; two of one value hardly do in what is left to do.
    """
    bare = re.sub(r"\\(?:cdot|times|ast|frac|div)(?![A-Za-z])|[\s*/+(){}]", "", text)
    return tuple(sorted(Counter(bare).items()))


def _count_factors(text: str) -> int | None:
    """Return the number of factors of a `clean` product, with their exponents; None for a sum.

    Where there are letters, numbers do not count: 3(x+2) has one factor.
    """
    text = split_top_level(text, EQUALS)[-1]
    while (outer := outer_brackets(text)) is not None and outer[::2] == ("(", ")"):
        text = outer[1]
    text = re.sub(r"\s+", "", _FACTOR_SIGNS.sub("*", text))
    has_letters = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None
    total, position = 0, 0
    factor = re.compile(
        r"\((?P<group>[^()]*(?:\([^()]*\)[^()]*)*)\)|(?P<number>[0-9.]+)|(?P<letter>[A-Za-z]|\\[A-Za-z]+)|[*{}]|^[-+]"
    )
    exponent = re.compile(r"\^\{?([0-9]{1,3})\}?")
    while position < len(text):
        match = factor.match(text, position)
        if match is None:
            return None
        position = match.end()
        power = exponent.match(text, position)
        position = power.end() if power else position
        counts = bool(match["letter"] or (match["group"] and re.search("[A-Za-z]", match["group"])))
        if counts or (not has_letters and (match["number"] or match["group"])):
            total += int(power[1]) if power else 1
    return total
