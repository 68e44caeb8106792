r"""Verdicts a second of the grader, the share decided without math-verify, and latency.

    python perf/grader.py [--responses 2000] [--seed 0]

The mix, half of it right: 45 % option letters and texts, 25 % integers, 12 % decimals and fractions, 6 %
units, percent and degrees, 4 % words, 4 % sets, tuples and intervals, 2 % roots and multiples of pi, 2 %
logarithms and trigonometry; each in a response of about 1,500 characters. Then the same with every tenth
answer hostile, and math-verify called directly in this process on the boxes of the first mix. Every response
is to a problem of its own; the responses of one problem, as in training, share the work on gold and options.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter

from vlm_rl.grading.extraction import extract_boxes
from vlm_rl.grading.grader import Grader, GradeTask
from vlm_rl.templates import TEMPLATES

TEMPLATE = TEMPLATES["think_answer"]
HOSTILE = (
    "9^{9^{9^9}}",
    "(10^9)!",
    r"\binom{10^8}{5*10^7}",
    "(x+y+z+w)^{200}",
    "(" * 3000 + "x" + ")" * 3000,
    r"\{" + ",".join(map(str, range(5000))) + r"\}",
    r"\prod_{k=1}^{10^6} k",
    "+".join(f"x^{k}" for k in range(4000)),
    "7" * 50_000,
    "__import__('os').system('true')",
)


def task(rng: random.Random) -> GradeTask:
    """One response of the mix."""
    right, kind = rng.random() < 0.5, rng.random()
    number = rng.randint(2, 999)
    other = number if right else number + rng.randint(1, 9)
    if kind < 0.45:
        letter = "B" if right else rng.choice("ACD")
        options = tuple(f"{number + step} cm" for step in range(4))
        answer = rng.choice([letter, f"({letter})", rf"\text{{{letter}}}", options["ABCD".index(letter)]])
        return response(rng, "B", answer, "choice", options)
    if kind < 0.70:
        return response(rng, str(number), rng.choice([str(other), f"{other}.0", f"x={other}"]), "integer")
    if kind < 0.82:
        answer = rng.choice(
            [rf"\frac{{{other}}}{{8}}", f"{other / 8}", f"{other}/8", rf"\dfrac{{{2 * other}}}{{16}}"]
        )
        return response(rng, rf"\frac{{{number}}}{{8}}", answer, "expression")
    if kind < 0.88:
        unit = rng.choice([r"\text{ cm}^2", r"^\circ", r"\%"])
        return response(rng, f"{number}{unit}", f"{other}{unit}", "expression")
    if kind < 0.92:
        return response(rng, "Monday", "monday" if right else "Tuesday", "text")
    if kind < 0.96:
        gold, answer = rng.choice(
            [(r"\{1,%d\}", r"\{%d,1\}"), ("(1,%d]", r"\left(1,%d\right]"), ("(1,%d)", "(1,%d)")]
        )
        return response(rng, gold % number, answer % other, "expression")
    if kind < 0.98:
        return response(rng, rf"{number}\sqrt{{8}}\pi", rf"{2 * other}\sqrt{{2}}\pi", "expression")
    return response(rng, rf"\ln {number}^2+\sin x", rf"2\ln {other}+\sin(x)", "expression")


def response(rng: random.Random, gold: str, answer: str, kind: str, choices: tuple[str, ...] = ()) -> GradeTask:
    reasoning = " ".join(rng.choice(["so", "then", r"\frac{1}{2}", "the", "angle", "is", "42"]) for _ in range(320))
    return GradeTask(TEMPLATE.wrap(reasoning, answer), gold, kind, TEMPLATE, choices)  # type: ignore[arg-type]


def measure(name: str, tasks: list[GradeTask], others: list[GradeTask]) -> None:
    """Throughput of one batch and who decided; latency of single calls with others, as texts are remembered."""
    with Grader(workers=2, timeout=5.0) as grader:
        grader.grade(
            r"\boxed{\ln 4}", gold=r"2\ln 2", answer_type="expression", template=TEMPLATE
        )  # starts the workers
        begun = time.perf_counter()
        grades = grader.grade_many(tasks)
        batch = time.perf_counter() - begun
        seconds = []
        for one in others:
            begun = time.perf_counter()
            grader.grade_many([one])
            seconds.append(time.perf_counter() - begun)
    exact = sum(grade.path not in ("math_verify", "rounded") for grade in grades) / len(grades)
    cuts = statistics.quantiles(seconds, n=100)
    print(
        f"{name}: {len(tasks) / batch:,.0f} verdicts/s in a batch, {exact:.1%} without math-verify, "
        f"one at a time p50 {1e3 * cuts[49]:.2f} ms, p99 {1e3 * cuts[98]:.2f} ms, max {max(seconds):.2f} s; "
        f"{dict(Counter(grade.verdict for grade in grades))}"
    )


def measure_directly(tasks: list[GradeTask]) -> None:
    """math-verify in this process: its LaTeX extraction of the box, its comparison, its defaults."""
    from math_verify import LatexExtractionConfig, parse, verify

    seconds = []
    for one in tasks:
        texts, _ = extract_boxes(one.response, TEMPLATE)
        gold = one.gold if isinstance(one.gold, str) else one.gold[0]
        begun = time.perf_counter()
        sides = [parse(f"${text}$", extraction_config=[LatexExtractionConfig()]) for text in (gold, texts[-1])]
        verify(*sides)
        seconds.append(time.perf_counter() - begun)
    cuts = statistics.quantiles(seconds, n=100)
    print(
        f"math-verify directly: {len(tasks) / sum(seconds):,.0f} verdicts/s, "
        f"p50 {1e3 * cuts[49]:.2f} ms, p99 {1e3 * cuts[98]:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--responses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    plain = [[task(rng) for _ in range(options.responses)] for _ in range(4)]
    measure("realistic mix", *plain[:2])
    measure("every tenth hostile", *(with_hostile(rng, tasks) for tasks in plain[2:]))
    measure_directly(plain[0])


def with_hostile(rng: random.Random, tasks: list[GradeTask]) -> list[GradeTask]:
    return [
        response(rng, r"\frac{x+1}{y}", HOSTILE[index // 10 % len(HOSTILE)], "expression") if index % 10 == 9 else one
        for index, one in enumerate(tasks)
    ]


if __name__ == "__main__":
    main()
