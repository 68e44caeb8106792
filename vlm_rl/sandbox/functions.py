"""Call a function of a program that nobody has read, and get its outputs as data.

    answers = call_function(sandbox, "def f(x): return x + 1", "f", [[1], [2]], seconds=1.0)
    trees, fault = answers.read()  # [2, 3], ""

Only inputs go into the sandbox. Outputs come back as plain data of Python's own types, so that comparing them calls
nothing of the program: no `__eq__`, no `__hash__`, no `__bool__`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_rl.sandbox.calls import decode, encode
from vlm_rl.sandbox.program import Program, ProgramLimits
from vlm_rl.sandbox.programs import Sandbox

__all__ = ["Answers", "call_function", "decode", "encode"]

_LONGEST_RUN = 60.0  # seconds of all calls together


@dataclass(frozen=True, slots=True)
class Answers:
    """What a function returned, as it was written: a line of JSON for each call.

    Once it is read, a megabyte may take 30, and a set that was chosen for it is built in quadratic time.
    """

    text: bytes
    num_calls: int
    ending: str = ""  # why no more came, where some are missing

    def read(self) -> tuple[list[Any], str]:
        """Return the values of the first calls, as `encode` makes them, and why there are no more; "" for all."""
        trees: list[Any] = []
        for line in self.text.split(b"\n")[:-1]:
            try:
                answer = json.loads(line)
                if "error" in answer:
                    return trees, str(answer["error"])
                trees.append(answer["value"])
            except (ValueError, TypeError, KeyError, RecursionError):
                return trees, "what it returned cannot be read"
        if len(trees) > self.num_calls:
            return [], f"{len(trees)} answers to {self.num_calls} calls"
        return trees, "" if len(trees) == self.num_calls else f"it ended before it returned ({self.ending})"


def call_function(
    sandbox: Sandbox,
    source: str,
    function: str,
    calls: Sequence[Sequence[Any]],
    *,
    seconds: float,
    memory: int = 1 << 30,
    output: int = 16 << 20,
) -> Answers:
    """Call `function` of a program, or of its class `Solution`, once for each list of arguments.

    Args:
        sandbox: where the program runs.
        source: the program.
        function: the name of the function.
        calls: the arguments of each call, plain data; a call gets its own copies.
        seconds: of one call; all together have a minute.
        memory: bytes of the program.
        output: bytes of all values together, as JSON.

    Raises what `Sandbox.run` does.
    """
    request = {"function": function, "calls": [encode(list(call)) for call in calls], "seconds": seconds}
    total = min(_LONGEST_RUN, seconds * len(calls) + 2)
    limits = ProgramLimits(seconds=2 * total, cpu_seconds=math.ceil(total), memory=memory, output=output)
    run = sandbox.run(Program(_caller(), json.dumps(request).encode(), limits, {"program.py": source}))
    return Answers(run.stdout, len(calls), run.reason)


@functools.cache
def _caller() -> str:
    return Path(__file__).with_name("calls.py").read_text(encoding="utf-8")
