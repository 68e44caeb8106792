r"""Read inequalities in one variable as intervals: `x>2`, `-1<2x\le 3`, `|x-1|<2`, `x<1 or x>3`, `\{x \mid x<3\}`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.latex import clean, outer_brackets, split_top_level

_SIGN = re.compile(r"(?P<sign><|>|\\(?:le|ge)(?![A-Za-z]))")
_UNEQUAL = re.compile(r"(?P<variable>[A-Za-z](?:_\{[A-Za-z0-9]\})?) ?\\ne(?![A-Za-z])(?P<bound>[^,;=<>]+)")  # x \ne 2
# \mathbb{R} \setminus \{2\}
_WITHOUT = re.compile(r"\\mathbb\{R\} ?(?:\\setminus ?|- ?)\\\{(?P<bound>[^,;{}]+)\\\}")
# x \in \mathbb{R} \mid x > 2, as between the braces of a set
_BUILDER = re.compile(r"^([A-Za-z])(?: ?\\in ?\\mathbb\{R\})? ?(?:\||:|\\mid(?![A-Za-z])|\\vert(?![A-Za-z])) ?(.*)$")
_MEMBER = re.compile(r"^([a-z]) ?\\in(?![A-Za-z]) ?")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{[A-Za-z0-9]\})?|\\(?:alpha|beta|theta|lambda|phi)")
_ABSOLUTE = re.compile(r"\|([^|]+)\|")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_OR = re.compile(r" or |, ?or |\\(?:lor|vee)(?![A-Za-z])")
_AND = re.compile(r"(?: |, ?)and |\\(?:land|wedge)(?![A-Za-z])")
_COMMA = re.compile(r", ?(?=[^,<>\\]{0,40}(?:[<>]|\\[lg]e(?![A-Za-z])))")  # between two inequalities
_JOINT = re.compile(r" ?, ?(?:and )?| and |\\(?:land|wedge)(?![A-Za-z])")  # of a range and what it leaves out
_LESS = ("<", "\\le")
_UNION = frozenset(["\\cup"])
_COMMAS = frozenset(",;")
_UNBOUNDED = ("(-\\infty", "\\infty)")
_MAX_LISTED = 24  # inequalities between commas, of which each pair is compared


@dataclass(frozen=True, slots=True)
class Intervals:
    """A union of intervals, each as a text such as `(1,2]`."""

    parts: tuple[str, ...]
    variable: str = ""  # of the inequality; "" if the text was a union of intervals


def has_relation(text: str) -> bool:
    """Return whether a `clean` text holds <, >, \\le, \\ge or `x \\ne`, or is `\\mathbb{R}\\setminus\\{2\\}`."""
    return bool(_SIGN.search(text) or _UNEQUAL.search(text) or _WITHOUT.fullmatch(text))


def as_intervals(text: str) -> Intervals | None:
    """Return the set that a `clean` text describes by inequalities in one variable or by intervals, or None."""
    text = _MEMBER.sub("", text)
    if (punctured := _without_points(text)) is not None:
        return punctured
    if match := _UNEQUAL.fullmatch(text) or _WITHOUT.fullmatch(text):
        bound = match["bound"].strip()
        parts = (f"(-\\infty,{bound})", f"({bound},\\infty)")
        return Intervals(parts, match.groupdict().get("variable") or "") if _is_bound(bound) else None
    if text == "\\mathbb{R}":
        return Intervals(("(-\\infty,\\infty)",))
    if (outer := outer_brackets(text)) is not None and outer[0] == "\\{":
        builder = _BUILDER.match(outer[1])
        inner = as_intervals(builder.group(2)) if builder else None
        return inner if inner and builder and inner.variable == builder.group(1) else None
    if has_relation(text):
        return _distance(text) or _inequalities(text)
    parts = split_top_level(text, _UNION)
    return Intervals(tuple(parts)) if all(map(_is_interval, parts)) else None


def _is_interval(text: str) -> bool:
    outer = outer_brackets(text)
    return outer is not None and outer[0] in "([" and len(split_top_level(outer[1], _COMMAS)) == 2


def _without_points(text: str) -> Intervals | None:
    r"""Return `x \ge 3, x \ne 4` as [3,4) and (4,\infty), `x \ne \pm 1` as three parts; None for anything else."""
    pieces = [piece.strip() for piece in _JOINT.split(text)] if "\\ne" in text and not _OR.search(text) else []
    matches = [_UNEQUAL.fullmatch(piece) for piece in pieces]
    variables = {match["variable"] for match in matches if match}
    points: dict[str, Fraction | float] = {}
    for bound in (match["bound"].strip() for match in matches if match):
        for value in (bound[3:].strip(), f"-{bound[3:].strip()}") if bound.startswith("\\pm") else (bound,):
            if not _is_bound(value) or (size := _size(value)) is None:
                return None
            points[value] = size
    if len(variables) != 1 or not 1 < max(len(points), len(pieces)) <= _MAX_LISTED:
        return None
    ranges = [piece for piece, match in zip(pieces, matches, strict=True) if not match]
    whole = as_intervals(" and ".join(ranges)) if ranges else Intervals((",".join(_UNBOUNDED),), *variables)
    outer = outer_brackets(whole.parts[0]) if whole and len(whole.parts) == 1 else None
    ends = split_top_level(outer[1], _COMMAS) if outer else []
    if whole is None or outer is None or len(ends) != 2 or {whole.variable} != variables:
        return None
    low, high = outer[0] + ends[0], ends[1] + outer[2]
    inside = sorted(points, key=points.__getitem__)
    limits = ("" if low == _UNBOUNDED[0] else low, "" if high == _UNBOUNDED[1] else high)
    if not _leaves_room(limits[0], f"{inside[0]})") or not _leaves_room(f"({inside[-1]}", limits[1]):
        return None
    starts, stops = [low, *(f"({point}" for point in inside)], [*(f"{point})" for point in inside), high]
    return Intervals(tuple(f"{start},{stop}" for start, stop in zip(starts, stops, strict=True)), whole.variable)


def _distance(text: str) -> Intervals | None:
    """Return the points near a centre, `|2x-3| \\le 1`, or far from it, `4 < |x|`; None for anything else."""
    pieces = [piece.strip() for piece in _SIGN.split(text)]
    if len(pieces) == 3 and pieces[2].startswith("|"):
        pieces = [pieces[2], _flipped(pieces[1]), pieces[0]]
    match = _ABSOLUTE.fullmatch(pieces[0]) if len(pieces) == 3 else None
    linear = _Linear.of(match[1]) if match else None
    if linear is None or not _is_bound(pieces[2]):
        return None
    _, sign, bound = pieces
    ends = linear.solved(f"-({bound})"), linear.solved(bound)
    low, high = ends if linear.slope > 0 else ends[::-1]
    variable = linear.variable
    opening, closing = ("(", ")") if sign in "<>" else ("[", "]")
    if sign in _LESS:
        return Intervals((f"{opening}{low},{high}{closing}",), variable)
    return Intervals((f"(-\\infty,{low}{closing}", f"{opening}{high},\\infty)"), variable)


def _inequalities(text: str) -> Intervals | None:
    """Return the union of alternatives, each of one or two inequalities: `x<1 or x>3`, `x>1 and x<3`.

    A comma is an "and" between two half-lines that overlap, `x>1, x<3`, and an "or" between disjoint parts.
    """
    parts: list[str] = []
    variables: set[str] = set()
    for alternative in _OR.split(text):
        pieces = _AND.split(alternative)
        is_listed = len(pieces) == 1
        if is_listed:
            pieces = _COMMA.split(alternative)
        chains = [chain for piece in pieces if (chain := _chain(piece)) is not None]
        if len(chains) < len(pieces) or len(pieces) > (_MAX_LISTED if is_listed else 2):
            return None
        variables |= {chain[0] for chain in chains}
        ends = [(low, high) for _, low, high in chains]
        overlaps = [_overlap(*pair) for pair in combinations(ends, 2)] if is_listed else []
        if None in overlaps:
            return None
        if is_listed and not any(overlaps):
            parts += [f"{low or _UNBOUNDED[0]},{high or _UNBOUNDED[1]}" for low, high in ends]
            continue
        lows, highs = ([end for end in side if end] for side in zip(*ends, strict=True))
        if len(lows) > 1 or len(highs) > 1:
            return None
        low, high = [*lows, _UNBOUNDED[0]][0], [*highs, _UNBOUNDED[1]][0]
        parts.append(f"{low},{high}")
    return Intervals(tuple(parts), variables.pop()) if len(variables) == 1 else None


def _overlap(first: tuple[str, str], second: tuple[str, str]) -> bool | None:
    """Return whether two ranges, as (lower end, upper end), have a number in common; None if that is not known."""
    verdicts = [_leaves_room(low, high) for low, high in ((first[0], second[1]), (second[0], first[1]))]
    return False if False in verdicts else None if None in verdicts else True


def _leaves_room(low: str, high: str) -> bool | None:
    """Return whether a number is above `(1` and below `3]`; None if the bounds cannot be compared."""
    if not low or not high:
        return True
    left, right = _size(low[1:]), _size(high[:-1])
    if left is None or right is None:
        return None
    return left < right or (left == right and low[0] + high[-1] == "[]")


def _size(text: str) -> Fraction | float | None:
    r"""Return a bound to compare: exact if it is rational, else the float of a number such as 2\sqrt{3}."""
    form = parse_closed_form(text)
    if form is None:
        return None
    if (exact := form.as_rational()) is not None:
        return exact
    try:
        above, below = (
            sum(
                float(factor) * math.prod(_float_of(name) ** power for name, power in monomial)
                for monomial, factor in terms.items()
            )
            for terms in (form.numerator, form.denominator)
        )
        return above / below if math.isfinite(above) and math.isfinite(below) else None
    except (ValueError, ArithmeticError):
        return None


def _float_of(symbol: str) -> float:
    r"""Return the value of \pi, e or the root of a prime. Raises ValueError for other symbols."""
    return {"\\pi": math.pi, "e": math.e}.get(symbol) or math.sqrt(int(symbol))


def _chain(text: str) -> tuple[str, str, str] | None:
    """Return (variable, lower end, upper end) of `a < x \\le b` as (x, "(a", "b]"); an end is "" where unbounded."""
    pieces = [piece.strip() for piece in _SIGN.split(text.strip())]
    if len(pieces) == 3:
        if _Linear.of(pieces[0]) is None:
            pieces = _turned(pieces)
        middle, sign, bound = pieces
        low, high = (("", ""), (sign, bound)) if sign in _LESS else ((_flipped(sign), bound), ("", ""))
    elif len(pieces) == 5:
        pieces = pieces if pieces[1] in _LESS else _turned(pieces)
        middle = pieces[2]
        low, high = (pieces[1], pieces[0]), (pieces[3], pieces[4])
    else:
        return None
    linear = _Linear.of(middle)
    ends = [end for end in (low, high) if end[0]]
    if linear is None or not all(sign in _LESS and _is_bound(bound) for sign, bound in ends):
        return None
    if linear.slope < 0:
        low, high = high, low
    lower = ("(" if low[0] == "<" else "[") + linear.solved(low[1]) if low[0] else ""
    upper = linear.solved(high[1]) + (")" if high[0] == "<" else "]") if high[0] else ""
    return linear.variable, lower, upper


@dataclass(frozen=True, slots=True)
class _Linear:
    """One side of an inequality, `offset + slope * variable`."""

    variable: str
    offset: Fraction
    slope: Fraction  # not 0

    @classmethod
    def of(cls, text: str) -> _Linear | None:
        """Read a variable or an expression that is linear in the only letter it has; None for anything else."""
        if _VARIABLE.fullmatch(text):
            return cls(text, Fraction(0), Fraction(1))
        form = parse_closed_form(text)
        if form is None or len(form.symbols) != 1:
            return None
        (variable,) = form.symbols
        parts = form.linear_parts(variable)
        offset, slope = (part.as_rational() for part in parts) if parts else (None, None)
        is_number = variable == "e" or variable.isdigit()  # of \sqrt{2}
        return None if is_number or offset is None or slope is None else cls(variable, offset, slope)

    def solved(self, bound: str) -> str:
        """Solve for the variable where this side equals the bound."""
        if (self.offset, self.slope) == (0, 1):
            return clean(bound)
        return rf"\frac{{({bound})-({self.offset})}}{{{self.slope}}}"


def _turned(pieces: list[str]) -> list[str]:
    """Return `2 > x` as `x < 2`."""
    return [_flipped(piece) if index % 2 else piece for index, piece in enumerate(reversed(pieces))]


def _flipped(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]


def _is_bound(text: str) -> bool:
    """Return whether a text may be a number: it has no letter but e and those of commands."""
    return bool(text) and all(letter == "e" for letter in _LETTER.findall(_COMMAND.sub(" ", text)))
