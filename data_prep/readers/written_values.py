"""Read values that were stored in a form of their own: lists that were printed as text, and numbers of every kind.

    ["a", "b"]    ['a', 'b']    ('a', 'b')    ['a' 'b']    array(['a', 'b'], dtype=object)

Files hold all of these where a table could not hold a list: JSON, Python's repr and NumPy's.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from contextlib import suppress
from decimal import Decimal
from typing import Any

from vlm_rl.data.golds import plain_number
from vlm_rl.data_prep.readers.row_limit import load_json
from vlm_rl.data_prep.records import RowError

_ARRAY = re.compile(r"(?:np\.|numpy\.)?array\((.*?)(?:,\s*dtype=[^()]*)?\)", re.S)
_OPENING = re.compile(r"\s*(?:[\[{]|\(\s*['\"]|(?:np\.|numpy\.)?array\()")
_MOST_PRINTED = 1 << 20  # characters of a list as Python or NumPy prints it, whose parser needs many times as much
_VALUES = (tokenize.STRING, tokenize.NUMBER, tokenize.NAME)


def is_written(text: str) -> bool:
    """Say whether a text begins as a printed list, tuple, array or object does."""
    return _OPENING.match(text) is not None


def parse_written(text: str) -> Any:
    """Return the list or object that a text prints. Raises ValueError if it is none, or was cut with dots."""
    try:
        return load_json(text)
    except RowError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        pass
    if len(text) > _MOST_PRINTED:
        raise ValueError(f"not JSON, and too long ({len(text)} characters) to be read as what Python prints")
    text = array[1] if (array := _ARRAY.fullmatch(text.strip())) else text.strip()
    try:
        value = ast.literal_eval(_with_commas(text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise ValueError(f"neither JSON nor Python nor NumPy: {error}") from None
    value = list(value) if isinstance(value, tuple) else value
    if not isinstance(value, list | dict) or (isinstance(value, list) and ... in value):
        raise ValueError("its items were left out when it was printed, or it is no list")
    return value


def unwritten(value: Any) -> Any:
    """Return the list or object that a text prints, and any other value as it is."""
    if isinstance(value, str) and is_written(value):
        with suppress(ValueError):
            return parse_written(value)
    return value


def _with_commas(text: str) -> str:
    """Return the text with a comma between neighbours: NumPy writes none, and Python would join the texts."""
    pieces: list[str] = []
    last: tokenize.TokenInfo | None = None
    for token in tokenize.generate_tokens(io.StringIO(text.replace("\n", " ")).readline):
        ends = last is not None and (last.type in _VALUES or last.string in ("]", ")"))
        begins = token.type in _VALUES or token.string in ("[", "(", "-")
        if ends and begins and not (token.string == "-" and last is not None and last.end == token.start):
            pieces.append(", ")
        pieces.append(token.string)
        last = token
    return "".join(pieces)


def is_missing(value: Any) -> bool:
    """Say whether a cell is empty: null, an empty text, or the NaN that pandas puts there."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def plain_text(value: Any) -> str | None:
    """Return a text, a number or a truth value as people write it; None for anything else.

    27.0 is "27", 2.50 as a decimal is "2.5", and 0.10000000149011612, the float32 nearest to 0.1, is "0.1".
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, float):
        return plain_number(short_float(value)) if math.isfinite(value) else None
    return None


def short_float(value: float) -> float:
    """Return the number that a float32 stood for, where a number of 16 digits or more is exactly a float32."""
    import numpy as np

    if len(repr(value).partition("e")[0].replace(".", "").lstrip("-0")) < 16 or abs(value) > 3e38:
        return value
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value
