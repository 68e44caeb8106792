"""The tests of a problem whose answer is a program: what goes into the program, and what has to come out.

    tests = CodeTests(inputs=["1 2\\n"], outputs=["3"])                                  # stdin, stdout
    tests = CodeTests(function="add", inputs=[[1, 2]], outputs=[3], rule="equal")        # arguments, value
    problem.meta["tests"] = tests.packed()

A prepared set keeps them as text (zlib, base64), because the tests of a contest's problem can have many megabytes.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.grading.code_rules import RULES, VIEWS
from vlm_rl.sandbox.functions import decode, encode

__all__ = ["VIEWS", "CodeTests", "unpacked"]

_LARGEST = 1 << 29  # bytes of a problem's tests, unpacked
_MOST_VALUES = 1 << 23  # of them; each may take 100 bytes
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.S)  # of JSON


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of one problem. Raises UserError if they make no sense."""

    inputs: list[Any]  # texts for stdin; or, with a function, the lists of its arguments
    outputs: list[Any] | None = None  # texts or values; None: those of `reference`
    function: str = ""  # the function, or method of the class Solution, that is called; "": the program reads stdin
    reference: str = ""  # a program that is right
    header: str = ""  # comes before each program, as the benchmark's own imports do
    rule: str = "lines"  # a key of code_rules.RULES
    atol: float | list[float] = 0.0  # of floats, for EvalPlus' rules and asserts; a list has one for each test
    views: list[str] = field(default_factory=list)  # keys of code_rules.VIEWS or "", one for each test of an assert
    seconds: float = 6.0  # of one test: CPU time where the program reads stdin, else by the clock
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        is_stdin = not self.function
        outputs = self.outputs
        faults = {
            "there is no test": not self.inputs,
            f"there are {len(self.inputs)} inputs and {len(outputs or ())} outputs": outputs is not None
            and len(outputs) != len(self.inputs),
            "atol is no list of a tolerance for each test": isinstance(self.atol, list)
            and len(self.atol) != len(self.inputs),
            f"views are not one of {', '.join(VIEWS)} for each test": bool(self.views)
            and (len(self.views) != len(self.inputs) or not {*self.views} <= {"", *VIEWS}),
            "there are neither outputs nor a reference": outputs is None and not self.reference,
            "a reference for outputs needs a function": is_stdin and outputs is None,
            f"the rule is {self.rule!r}; known: {', '.join(RULES)}": self.rule not in RULES,
            "the rule `lines` is of programs that read stdin, the others of functions": is_stdin
            != (self.rule == "lines"),
            "inputs and outputs of a program that reads stdin are texts": is_stdin
            and not all(isinstance(text, str) for text in [*self.inputs, *(outputs or ())]),
            "the inputs of a function are lists of arguments": not is_stdin
            and not all(isinstance(call, list | tuple) for call in self.inputs),
            f"seconds is {self.seconds}, memory_mib {self.memory_mib}": not 0 < self.seconds <= 600
            or not 16 <= self.memory_mib <= 1 << 16,
        }
        for fault, is_there in faults.items():
            if is_there:
                raise UserError(f"bad tests of a program: {fault}")

    @property
    def gold(self) -> str:
        """Return in words what a right answer is."""
        return f"a program that passes {len(self.inputs)} tests"

    def packed(self) -> str:
        """Return the tests as one text."""
        tree = {each.name: getattr(self, each.name) for each in fields(self)}
        tree |= {"inputs": encode(self.inputs), "outputs": encode(self.outputs)}
        return base64.b64encode(zlib.compress(json.dumps(tree).encode(), 6)).decode()

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> CodeTests:
        """Return the tests of a problem's meta. Raises UserError if there are none, or not in this form."""
        text = meta.get("tests")
        if not isinstance(text, str):
            raise UserError("the problem has no tests in its meta: a program is judged by tests")
        try:
            data = unpacked(text)
            if _most_values(data) > _MOST_VALUES and _most_values(_STRING.sub(b"", data)) > _MOST_VALUES:
                raise ValueError(f"more than {_MOST_VALUES} values")
            tree = json.loads(data)
            known = {each.name: tree[each.name] for each in fields(cls) if each.name in tree}
            known |= {name: decode(known[name]) for name in ("inputs", "outputs")}
            return cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"bad tests of a program: they cannot be unpacked ({error})") from None


def _most_values(data: bytes) -> int:
    """Return at least how many values a text of JSON holds; commas inside of strings count, too."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def unpacked(text: str) -> bytes:
    """Decode base64 and decompress. Raises ValueError if the data are not that, or too large."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(text, validate=True), _LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if unpacking.unconsumed_tail:
        raise ValueError(f"more than {_LARGEST >> 20} MiB")
    return data
