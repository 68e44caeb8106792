r"""Read inequalities in one variable as intervals: `x>2`, `-1<x\le 3`, `|x-1|<2`, `x<1 or x>3`, `\{x \mid x<3\}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_OR = re.compile(r" or |, ?or |\\(?:lor|vee)(?![A-Za-z])|(?<=[0-9}]), ?(?=[a-z] ?[<>])")
_AND = re.compile(r" and |\\(?:land|wedge)(?![A-Za-z])")
_UNION = frozenset(["\\cup"])
_COMMAS = frozenset(",;")


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


def _distance(text: str) -> Intervals | None:
    """Return the points near a centre, `|2x-3| \\le 1`, or far from it, `4 < |x|`; None for anything else."""
    pieces = [piece.strip() for piece in _SIGN.split(text)]
    if len(pieces) == 3 and pieces[2].startswith("|"):
        pieces = [pieces[2], _flipped(pieces[1]), pieces[0]]
    match = _ABSOLUTE.fullmatch(pieces[0]) if len(pieces) == 3 else None
    form = parse_closed_form(match[1]) if match else None
    if match is None or form is None or len(form.symbols) != 1 or not _is_bound(pieces[2]):
        return None
    _, sign, bound = pieces
    (variable,) = form.symbols
    parts = form.linear_parts(variable)
    offset, slope = (part.as_rational() for part in parts) if parts else (None, None)
    if offset is None or slope is None:
        return None
    offset, slope = (-offset, -slope) if slope < 0 else (offset, slope)
    low, high = (rf"\frac{{{end}({bound})-({offset})}}{{{slope}}}" for end in "-+")
    opening, closing = ("(", ")") if sign in "<>" else ("[", "]")
    if sign in ("<", "\\le"):
        return Intervals((f"{opening}{low},{high}{closing}",), variable)
    return Intervals((f"(-\\infty,{low}{closing}", f"{opening}{high},\\infty)"), variable)


def _inequalities(text: str) -> Intervals | None:
    """Return the union of alternatives, each of one or two inequalities: `x<1 or x>3`, `x>1 and x<3`."""
    parts: list[str] = []
    variables: set[str] = set()
    for alternative in _OR.split(text):
        pieces = _AND.split(alternative)
        chains = [chain for piece in pieces if (chain := _chain(piece)) is not None]
        if len(pieces) > 2 or len(chains) < len(pieces):
            return None
        variables |= {chain[0] for chain in chains}
        lows = [chain[1] for chain in chains if chain[1]]
        highs = [chain[2] for chain in chains if chain[2]]
        if len(lows) > 1 or len(highs) > 1:
            return None
        low, high = lows[0] if lows else "(-\\infty", highs[0] if highs else "\\infty)"
        parts.append(f"{low},{high}")
    return Intervals(tuple(parts), variables.pop()) if len(variables) == 1 else None


def _chain(text: str) -> tuple[str, str, str] | None:
    """Return (variable, lower end, upper end) of `a < x \\le b` as (x, "(a", "b]"); an end is "" where unbounded."""
    pieces = [piece.strip() for piece in _SIGN.split(text.strip())]
    if len(pieces) == 5 and pieces[1] in (">", "\\ge"):
        pieces = [pieces[4], _flipped(pieces[3]), pieces[2], _flipped(pieces[1]), pieces[0]]
    if len(pieces) == 3 and not _VARIABLE.fullmatch(pieces[0]):
        pieces = [pieces[2], _flipped(pieces[1]), pieces[0]]
    if len(pieces) == 3:
        variable, sign, bound = pieces
        if not (_VARIABLE.fullmatch(variable) and _is_bound(bound)):
            return None
        if sign in (">", "\\ge"):
            return variable, ("(" if sign == ">" else "[") + clean(bound), ""
        return variable, "", clean(bound) + (")" if sign == "<" else "]")
    if len(pieces) != 5 or {pieces[1], pieces[3]} - {"<", "\\le"}:
        return None
    low, low_sign, variable, high_sign, high = pieces
    if not (_VARIABLE.fullmatch(variable) and _is_bound(low) and _is_bound(high)):
        return None
    return variable, ("(" if low_sign == "<" else "[") + low, high + (")" if high_sign == "<" else "]")


def _flipped(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]


def _is_bound(text: str) -> bool:
    """Return whether a text may be a number: it has no letter but e and those of commands."""
    return bool(text) and all(letter == "e" for letter in _LETTER.findall(_COMMAND.sub(" ", text)))
