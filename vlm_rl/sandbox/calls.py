"""What calls a function of a program: it is the main program inside the walls, and `functions` starts it there.

It reads one JSON object from its standard input, imports the program (program.py beside it), and writes one line of
JSON per call. The program may tamper with all of that: what comes out counts as the program's own answer, and what it
is compared with is not here. Standard library alone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

_FEW_KEYS = 1000
_MOST_PAIRS = 10**7  # of keys with one hash: a second. The powers of 2 up to the 10,000th have 1.6 million
_EXACT = 2**53  # integers up to here are the same in every reader of JSON


class Opaque:
    """A value that is not plain data, such as a generator. It equals nothing but itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def encode(value: Any) -> Any:
    """Return plain data as JSON that keeps the types apart; subclasses become the type that they extend."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -_EXACT <= number <= _EXACT else {"int": hex(number)}
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    return {"opaque": type(value).__name__[:80]}


def decode(tree: Any) -> Any:
    """Return the data of `encode`. Raises ValueError, TypeError, KeyError or OverflowError for anything else."""
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in _SEQUENCES:
        items = [decode(item) for item in content]
        return _SEQUENCES[kind](items if kind == "tuple" else spread(items))
    if kind == "dict":
        keys = spread([decode(key) for key, _ in content])
        return dict(zip(keys, (decode(item) for _, item in content), strict=True))
    if kind == "complex":
        return complex(*map(decode, content))
    readers = {"int": lambda text: int(text, 16), "float": float, "bytes": bytes.fromhex, "opaque": Opaque}
    return readers[kind](content)


def spread(keys: list[Any]) -> list[Any]:
    """Return the keys of a set or dict. Raises ValueError if many share a hash: it would take long to make."""
    shared = Counter(map(hash, keys)).values() if len(keys) > _FEW_KEYS else ()
    if sum(count * (count - 1) for count in shared) > _MOST_PAIRS:
        raise ValueError("too many keys share a hash")
    return keys


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):  # what the program prints is not an answer
        os.dup2(nothing, descriptor)
    try:
        function = find(request["function"])
        for call in request["calls"]:
            arguments, begun = decode(call), monotonic()
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            value = function(*arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if monotonic() - begun > request["seconds"]:  # a program may catch what the alarm raises
                out_of_time()
            write(answers, {"value": encode(value)})
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(answers, {"error": f"{type(error).__name__}: {error}"[:300]})


class OutOfTime(BaseException):
    """What ends a call that takes too long: no Exception, which programs catch."""


def find(name: str) -> Any:
    """Return the function, or the method of the class `Solution`, of the program."""
    signal.signal(signal.SIGALRM, out_of_time)
    sys.path.insert(0, str(Path(__file__).parent))
    program = importlib.import_module("program")
    solution = getattr(program, "Solution", None)
    return getattr(solution() if solution is not None else program, name)


def out_of_time(*_: object) -> None:
    raise OutOfTime("the time of one call is over")


def write(descriptor: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
