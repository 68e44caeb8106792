r"""Serve symbolic comparisons: a separate program that reads queries and prints replies.

    python -P symbolic_server.py '{"workers": 2, "cpu_seconds": 5.0, "path": [...], ...}'

vlm_rl.grading.symbolic_client starts it with a clean environment. It imports neither torch nor the rest of the
package. Each line of stdin is a JSON list of queries, `["equal", gold, answer]` or `["value", text]`. Each line of
stdout is the list of their replies, `[status, value]`, in the same order. pebble runs the queries in workers that can
be killed, with limits of CPU time and memory. CPU time decides (status "timeout") and the wall clock is only a
backstop (status "error"), so a busy machine gives the same verdicts as an idle one.

Model text reaches only math-verify's LaTeX grammar, never its expression extraction (parse_expr).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
from concurrent.futures import TimeoutError as WallClockError
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])|(?<![0-9.])([0-9]+)\.(?![0-9.])")
# Without parentheses the grammar would read \sin x \cdot y as the sine of the product.
_ARGUMENT = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log)(?:\^\{[0-9]\})?) ?([A-Za-z]|\\(?:theta|alpha|beta|phi))"
    r"(?= ?\\(?:cdot|times))"
)
# Numerators of the point where two expressions are compared; math-verify decides what this leaves open.
_PRIMES = (17, 23, *(n for n in range(29, 800) if all(n % prime for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23))))
_WARM_UP = (
    r"\frac{x+1}{2}", r"2\sqrt{3}", r"\frac{5}{10}x^{2}y", r"(1,2)", r"[0, \infty)", r"\{1,2\}", "y=2x+3",
    r"e^{-2t} \sin(2 \pi t)", r"x \le 3", r"(x-1)^{2}+(y-3)^{2}=36", r"a_{1} \cdot 3!", "f(x)=x", r"n(n-1)/2",
)  # fmt: skip
_DIGITS = 60  # significant digits of numeric comparison: a decimal approximation is a different number
_TOLERANCE = 1e-40  # relative


def serve(options: dict[str, Any], replies: BinaryIO) -> None:
    """Answer a batch per line of stdin until stdin closes or the parent process is gone."""
    from pebble import ProcessPool

    load_grammar()
    parent = os.getppid()
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPool(
        max_workers=options["workers"],
        max_tasks=options["queries_per_worker"],
        initializer=limit_worker,
        initargs=(options["memory_bytes"], os.getpid()),
        context=context,
    )
    with pool:
        _write(replies, "ready")
        while (line := _next_line(parent)) is not None:
            _write(replies, _run(pool, json.loads(line), options))
        pool.stop()


def _next_line(parent: int) -> bytes | None:
    """Return the next line of stdin, or None at its end or when the parent process is gone."""
    while not select.select([sys.stdin.buffer], [], [], 2.0)[0]:
        if os.getppid() != parent:
            return None
    return sys.stdin.buffer.readline() or None


def _write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _run(pool: Any, queries: list[list[str]], options: dict[str, Any]) -> list[tuple[str, Any]]:
    futures = [
        pool.schedule(answer_query, args=(query, options["cpu_seconds"]), timeout=options["wall_seconds"])
        for query in queries
    ]
    return [_reply(future, options) for future in futures]


def _reply(future: Any, options: dict[str, Any]) -> tuple[str, Any]:
    """Return ("ok", bool or str or None) or ("timeout" or "error", a sentence)."""
    from pebble import ProcessExpired

    try:
        return "ok", future.result()
    except WallClockError:
        return "error", f"the comparison took more than {options['wall_seconds']:g} s of wall-clock time"
    except ProcessExpired as died:
        if died.exitcode == -signal.SIGPROF:
            return "timeout", f"the comparison took more than {options['cpu_seconds']:g} s of CPU time"
        return "error", f"the worker of the comparison died with exit code {died.exitcode}"
    except MemoryError:
        return "error", f"the comparison needed more than {options['memory_bytes'] >> 20} MiB of memory"
    except Exception as error:
        return "error", f"the comparison failed with {type(error).__name__}"


def limit_worker(memory_bytes: int, server: int) -> None:
    """Limit a worker, before its first query: it writes no files, has bounded memory and dies with the server.

    Args:
        memory_bytes: Memory that a query may take besides what the worker has now.
        server: Process id of the server.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        # A replaced worker starts with more than a first one, since the server has threads by then.
        limit = memory_bytes + _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != server:
            os._exit(1)


def _address_space() -> int:
    """Return the bytes of virtual memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def answer_query(query: list[str], cpu_seconds: float) -> bool | str | None:
    """Answer a query in a worker; the kernel kills the process when its CPU time is used up."""
    kind, *texts = query
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return are_equal(*texts) if kind == "equal" else decimal_value(*texts)
    except RecursionError:  # sympy goes round in circles, as with the sum of a matrix and a number
        return False if kind == "equal" else None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@cache
def load_grammar() -> None:
    """Import everything heavy before the fork, so that a killed worker is replaced in milliseconds.

    The grammar's parser caches what it learns from the texts it reads, and the workers inherit that cache, as does a
    server that is forked: a second call does nothing.
    """
    import math_verify.grader  # noqa: F401

    logging.disable(logging.CRITICAL)  # math-verify would log model text
    for text in _WARM_UP:
        are_equal(text, "x+1")


def are_equal(gold: str, answer: str) -> bool:
    """Return whether two LaTeX texts mean the same; a text that the grammar cannot read equals nothing.

    The letter i may also be the imaginary unit: equality in either reading counts.
    """
    import sympy
    from math_verify.grader import should_treat_as_complex

    is_real = not (should_treat_as_complex(gold) or should_treat_as_complex(answer))
    parsed = [_parse(text, is_real=is_real) for text in (gold, answer)]
    if parsed[0] is None or parsed[1] is None:
        return False
    if _parsed_equal(*parsed):
        return True
    letters = {symbol for side in parsed for symbol in getattr(side, "free_symbols", ()) if symbol.name == "i"}
    imaginary = dict.fromkeys(letters, sympy.I)
    return (
        bool(letters)
        and all(isinstance(side, sympy.Expr) for side in parsed)
        and _parsed_equal(*(side.subs(imaginary) for side in parsed))
    )


def _parsed_equal(gold: Any, answer: Any) -> bool:
    import math_verify
    import sympy

    differ = _differ_at_a_point(gold, answer)  # much cheaper than simplifying a wrong answer's difference
    if differ:
        return False
    if math_verify.verify(gold, answer, numeric_precision=_DIGITS, timeout_seconds=None):
        return True
    # math-verify compares a lone symbol by its text, and leaves some functions unevaluated.
    return differ is False and (bool(sympy.simplify((gold - answer).doit()) == 0) or _equal_where_real(gold, answer))


def _equal_where_real(gold: Any, answer: Any) -> bool:
    r"""Return whether two expressions are equal wherever one of them is real: \sqrt{1/n} is 1/\sqrt{n}, not for -1.

    They are equal at a point of positive numbers already.
    """
    import sympy

    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not 0 < len(symbols) <= 3:
        return False
    positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in symbols}
    if sympy.simplify((gold - answer).subs(positive)) != 0:
        return False
    for signs in itertools.product((1, -1), repeat=len(symbols)):
        coordinates = [sign * sympy.Rational(prime, 13) for sign, prime in zip(signs, _PRIMES, strict=False)]
        point = dict(zip(symbols, coordinates, strict=True))
        left, right = (complex_parts(side.subs(point).evalf(_DIGITS)) for side in (gold, answer))
        if left is None or right is None:
            return False
        are_real = [abs(imaginary) <= _TOLERANCE for _, imaginary in (left, right)]
        if any(are_real) and (not all(are_real) or abs(left[0] - right[0]) > _TOLERANCE * abs(left[0])):
            return False
    return True


def decimal_value(text: str) -> str | None:
    """Return a real number as a decimal of 30 digits, or None if the text is not one."""
    import sympy

    parsed = _parse(text, is_real=True)
    if not isinstance(parsed, sympy.Expr) or parsed.free_symbols:
        return None
    number = parsed.doit().evalf(30)
    return str(number) if number.is_Float and number.is_finite else str(number) if number.is_Integer else None


def _parse(text: str, *, is_real: bool) -> Any:
    """Return the sympy object of a LaTeX text, with decimals as exact fractions; None if it cannot be read."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        return latex2sympy(
            _DECIMAL.sub(_as_fraction, _ARGUMENT.sub(r"\1(\2)", text)),
            is_real=is_real,
            convert_degrees=False,
            normalization_config=config,
            conversion_config=ConversionConfig(lowercase_symbols=False),  # n and N are two variables
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None


def _as_fraction(match: re.Match[str]) -> str:
    whole, decimals = match.group(1) or match.group(3) or "", match.group(2) or ""
    return rf"\frac{{{int(whole + decimals or '0')}}}{{{10 ** len(decimals)}}}"


def _differ_at_a_point(gold: Any, answer: Any) -> bool | None:
    """Return whether two expressions differ at a rational point, or None if that cannot be told.

    The comparison is relative: math-verify takes 1/2^98 for 1/2^99, since both are nearly 0.
    """
    import sympy

    if not all(isinstance(side, sympy.Expr) for side in (gold, answer)):
        return None
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if len(symbols) > len(_PRIMES) or any(len(symbol.name) > 1 and symbol.name.isalpha() for symbol in symbols):
        return None  # words: math-verify reads them as products of letters or as one symbol
    point = {symbol: sympy.Rational(prime, 13) for symbol, prime in zip(symbols, _PRIMES, strict=False)}
    try:
        if any(_has_integrals_over_intervals(side) for side in (gold, answer)):
            # Numeric integration is much cheaper than an antiderivative, but gives fewer digits.
            rough = [complex_parts(side.subs(point).evalf(15)) for side in (gold, answer)]
            if rough[0] is not None and rough[1] is not None and _are_apart(rough[0], rough[1], 1e-3):
                return True
        left, right = (complex_parts(side.subs(point).doit().evalf(_DIGITS)) for side in (gold, answer))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None
    if left is None or right is None:
        return None
    return _are_apart(left, right, _TOLERANCE)


def _has_integrals_over_intervals(side: Any) -> bool:
    """Return whether an expression has integrals, each from one number to another."""
    import sympy

    integrals = side.atoms(sympy.Integral)
    ends = [end for integral in integrals for _, *limits in integral.limits for end in limits or [sympy.oo]]
    return bool(integrals) and all(end.is_number and end.is_finite for end in ends)


def _are_apart(left: tuple[Any, Any], right: tuple[Any, Any], tolerance: float) -> bool:
    """Return whether two complex numbers differ by more than a share of the largest of their parts."""
    scale = max(abs(part) for part in (*left, *right))
    return any(abs(a - b) > tolerance * scale for a, b in zip(left, right, strict=True))


def complex_parts(number: Any) -> tuple[Any, Any] | None:
    """Return real and imaginary part of a finite sympy number, or None for anything else."""
    parts = number.as_real_imag()
    return parts if all(part.is_Number and part.is_finite for part in parts) else None


def main() -> None:
    """Answer the queries of the parent process; the options are the first argument, as JSON."""
    # Libraries may print: stdout is for the replies alone, and what else is printed goes to stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    sys.path[:] = options["path"]
    try:
        serve(options, replies)
    except ImportError as error:
        _write(replies, f"cannot import {error.name}")


if __name__ == "__main__":
    main()
