r"""Measure the grader: verdicts a second, the share decided without math-verify, and latency.

    python perf/grader.py [--responses 2000] [--seed 0]

Three runs: a realistic mix, the same with a hostile answer in every tenth response, and math-verify called directly
in this process on such a mix, in turns with the grader. The last line is their ratio.

The mix, half of it right, in responses of about 1,500 characters: 45 % option letters and texts, 25 % integers, 12 %
decimals and fractions, 6 % units, percent signs and degrees, 4 % words, 4 % sets, tuples and intervals, 2 % roots and
multiples of pi, 2 % logarithms and trigonometry. Every response is to a problem of its own; responses to the same
problem, as in training, share the work on the gold and the options.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable

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
    """Return a random response of the mix with its gold."""
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


def measure(name: str, tasks: list[GradeTask], single_tasks: list[GradeTask]) -> None:
    """Print the verdicts a second of a batch, and the latency of single calls.

    The single calls get tasks of their own, since the grader caches texts.
    """
    with started_grader() as grader:
        begun = time.perf_counter()
        grades = grader.grade_many(tasks)
        rate = len(tasks) / (time.perf_counter() - begun)
        seconds = [seconds_of(lambda task=task: grader.grade_many([task])) for task in single_tasks]
    exact = sum(grade.path not in ("math_verify", "rounded") for grade in grades) / len(grades)
    verdicts = dict(Counter(grade.verdict for grade in grades))
    print(
        f"{name}: {rate:,.0f} verdicts/s in a batch, {exact:.1%} without math-verify, {latency(seconds)}; {verdicts}"
    )


def measure_against_math_verify(tasks: list[GradeTask], turn: int = 200) -> None:
    """Print the verdicts a second of both, which take turns: a busy machine slows both down, and the ratio stays."""
    ours: list[float] = []
    theirs: list[float] = []
    with started_grader() as grader:
        for start in range(0, len(tasks), turn):
            batch = tasks[start : start + turn]
            ours.append(seconds_of(lambda batch=batch: grader.grade_many(batch)))
            theirs += [seconds_of(lambda task=task: verify_directly(task)) for task in batch]
    print(f"math-verify directly: {len(tasks) / sum(theirs):,.0f} verdicts/s, {latency(theirs)}")
    print(f"verdicts a second of the grader to those of math-verify, in turns: {sum(theirs) / sum(ours):.1f}")


def verify_directly(task: GradeTask) -> bool:
    """Compare the box of a response by math-verify's own parser and defaults, in this process."""
    from math_verify import LatexExtractionConfig, parse, verify

    texts, _ = extract_boxes(task.response, TEMPLATE)
    golds = [task.gold] if isinstance(task.gold, str) else task.gold
    gold, answer = (parse(f"${text}$", extraction_config=[LatexExtractionConfig()]) for text in (golds[0], texts[-1]))
    return verify(gold, answer)


def started_grader() -> Grader:
    grader = Grader(workers=2, timeout=5.0)
    grader.grade(r"\boxed{\ln 4}", gold=r"2\ln 2", answer_type="expression", template=TEMPLATE)
    return grader


def seconds_of(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def latency(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"one at a time p50 {1e3 * cuts[49]:.2f} ms, p99 {1e3 * cuts[98]:.2f} ms, max {max(seconds):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--responses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    plain = [[task(rng) for _ in range(options.responses)] for _ in range(4)]
    measure("realistic mix", *plain[:2])
    measure("every tenth hostile", *(with_hostile(rng, tasks) for tasks in plain[2:]))
    verify_directly(plain[0][0])  # imports it
    measure_against_math_verify([task(rng) for _ in range(options.responses)])  # no text is cached yet


def with_hostile(rng: random.Random, tasks: list[GradeTask]) -> list[GradeTask]:
    return [
        response(rng, r"\frac{x+1}{y}", HOSTILE[index // 10 % len(HOSTILE)], "expression")
        if index % 10 == 9
        else plain
        for index, plain in enumerate(tasks)
    ]


if __name__ == "__main__":
    main()
