"""The bias that HA-DW corrects: the baseline of a group that is neither all right nor all wrong.

    python perf/hadw_theory.py                              # the tables
    python perf/hadw_theory.py --out docs/hadw_bias.png     # and the picture
    vlm-rl eval --model M --data SET --samples 128 --temperature 1 --template plain --max-tokens 4096 --out RUN
    python perf/hadw_theory.py --run RUN                    # the same of real responses, as in figures 1b and 6

A prompt that the policy solves with probability p gets G responses, each right (1) or wrong (0). The baseline is the
pass rate p_hat = k/G with k ~ Binomial(G, p). Groups with k = 0 or k = G have advantage 0 and teach nothing, so what
training sees is conditioned on S = {0 < k < G}, which has probability

    P(S) = 1 - (1 - p)^G - p^G.

**The baseline.** E[k] = G p over all groups; k = 0 adds nothing to it and k = G adds G p^G. What is left of G p
belongs to S:

    E[p_hat | S] = (p - p^G) / P(S) = p (1 - p^(G-1)) / (1 - (1 - p)^G - p^G).

Its distance from p is p q (q^(G-1) - p^(G-1)) / P(S) with q = 1 - p: above p where p < 1/2, below p where p > 1/2,
mirrored by swapping right and wrong. It tends to 1/G for p -> 0.

**The advantage.** Take r_i - p as the advantage that a known p would give and r_i - p_hat as the estimate. Their
difference is p - p_hat, so a hard prompt's advantages come out E[p_hat | S] - p too low on average, an easy one's too
high. E[r_i - p_hat | S] itself is 0: the G deviations add up to 0 in every group and the responses are exchangeable.
The mean advantage therefore shows nothing; the baseline does.

**The two probabilities.** In a single group the advantage is too low exactly where p_hat > p, and

    P(p_hat > p | S, p) = (1 / P(S)) sum over k with G p < k < G of C(G, k) p^k (1 - p)^(G - k).

The paper (arXiv 2601.08521) gives 63 % for hard prompts and 78 % for harder ones. These are bounds on the averages of
that probability over p uniform on (0, 1/2) and on (0, 1/4),

    2 * integral from 0 to 1/2 dp P(p_hat > p | S, p),    4 * integral from 0 to 1/4.

With G = 8 they are .64095 and .78113; with G = 9 they are .61682 and .73829, and the bounds hold no more. Below
p = 1/G the probability is 1, since the least k of S is 1. The integrand jumps where p passes a multiple of 1/G and is
smooth between, so Gauss-Legendre quadrature on each piece gives it to rounding. The third column is corollary 2: over
p uniform on (0, 2/G) the average is above 78 % from G = 6 on, by the paper, and from G = 5 on by this quadrature.

**What lambda corrects (theorem 3).** HA-DW makes lambda w (r - p_hat) of the advantage r - p_hat, with
w = exp(-sgn(r - p_hat) (p_hat - C)). As the paper does, take the reward r as given and p_hat as drawn from S. With
a = r - p, b = r - E[p_hat | S] and m = E[w (r - p_hat) | S] the weighted advantage is nearer to a on average than the
plain one exactly where

    |lambda m - a| < |b - a|,   so for lambda between (a - |b - a|) / m and (a + |b - a|) / m.

Each interval is that of one reward. The paper joins them by a union; a lambda that serves right and wrong responses
alike must be in both, and for p around 1/2 there is none.

**Bounded rewards (theorem 4).** Let rewards in [0, 1] have distribution F, density f and mean p, and let a group
teach where its largest and smallest reward differ by more than sigma. With u+ = min(1, u + sigma),
q(u) = F(u+) - F(u) and q m = integral of x f(x) from u to u+,

    P(not S) = G integral f q^(G-1) du
    E[p_hat; not S] = integral (u + (G-1) m) f q^(G-1) du
    E[p_hat | S] = (p - E[p_hat; not S]) / P(S).

The example is the paper's: a normal distribution of standard deviation .1, truncated to [0, 1], and sigma = .1.

**Real responses.** Of K stored responses to a problem, k are right. A group of G of them, drawn without replacement,
has j right ones with probability C(k, j) C(K - k, G - j) / C(K, G). So the mean baseline of the groups in S, and the
share of groups whose baseline is above that of all K, are sums over j; nothing is drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy import stats

from vlm_rl.advantages import compute_advantages
from vlm_rl.errors import UserError
from vlm_rl.report import vega
from vlm_rl.report.charts.frame import CONFIG, MUTED, PALETTE
from vlm_rl.report.vega import Spec
from vlm_rl.run.directory import RunDirectory

CLAIMS = {0.5: 0.63, 0.25: 0.78}  # prompts with p below the key: the paper's probability
SIZES = (2, 4, 8, 16, 32)
SPREAD = 0.1  # sigma of bounded rewards, and the standard deviation before truncation
CENTERS = (-0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the distribution that is truncated
SIMULATED_P = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
ORDER = 40  # of the quadrature on each piece
BANDS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a problem's pass rate

_SHADES = ("#b9cde8", "#8fb0db", "#3a6fb7", "#27508a", "#16315a")  # one per size, the larger the darker


class Simulation(NamedTuple):
    mean: float  # of the baseline over the groups of S
    error: float  # its standard error
    groups: int  # how many of the sampled groups were in S


def mean_baseline(p: np.ndarray | float, size: int) -> np.ndarray:
    """Return E[p_hat | S] for groups of ``size`` responses, 0 < p < 1."""
    p = np.asarray(p, dtype=np.float64)
    return p * (1 - p ** (size - 1)) / (1 - (1 - p) ** size - p**size)


def probability_too_high(p: float, size: int) -> float:
    """Return P(p_hat > p | S, p): how often a group's baseline is too high, and its advantages too low."""
    mass = [comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size)]
    return sum(m for k, m in enumerate(mass, start=1) if k > size * p) / sum(mass)


def average_probability(size: int, below: float) -> float:
    """Return the mean of ``probability_too_high`` over p uniform on (0, below)."""
    cuts = np.array([0.0, *(k / size for k in range(1, size) if k / size < below), below])
    points, weights = _quadrature(cuts[:-1], cuts[1:])
    return (
        sum(
            weight * probability_too_high(p, size)
            for p, weight in zip(points.ravel().tolist(), weights.ravel().tolist(), strict=True)
        )
        / below
    )


def helpful_scales(p: float, reward: float, size: int, belief: float) -> tuple[float, float]:
    """Return the lambdas with which HA-DW brings the mean advantage of a response nearer to r - p (theorem 3).

    Args:
        p: the prompt's chance of a right response, not 1/2.
        reward: of the response, 0 or 1.
        size: G.
        belief: C.
    """
    rates = np.arange(1, size) / size
    chances = np.array([comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size)])
    chances /= chances.sum()
    plain = reward - rates
    weighted = float(chances @ (plain * np.exp(-np.sign(plain) * (rates - belief))))
    wanted = reward - p
    distance = abs(float(chances @ plain) - wanted)
    low, high = sorted(((wanted - distance) / weighted, (wanted + distance) / weighted))
    return low, high


def mean_baseline_of(rewards: Any, size: int, spread: float) -> tuple[float, float]:
    """Return E[p_hat | S] and P(S) for rewards in [0, 1] of a continuous distribution (theorem 4).

    Args:
        rewards: a frozen distribution of scipy.stats, whose density is smooth on [0, 1].
        size: G.
        spread: sigma, which the largest and the smallest reward of a group in S differ by at least.
    """
    cuts = np.concatenate(
        [np.linspace(0, 1 - spread, 31), np.linspace(1 - spread, 1, 11)[1:]]
    )  # u+ has its kink there
    u, of_u = _quadrature(cuts[:-1], cuts[1:])
    u, of_u = u.ravel(), of_u.ravel()
    x, of_x = _quadrature(u, np.minimum(1, u + spread))
    mass = rewards.pdf(x) * of_x
    q, q_mean = mass.sum(axis=1), (mass * x).sum(axis=1)
    density = rewards.pdf(u) * of_u
    outside = size * float(density @ q ** (size - 1))
    baseline_outside = float(density @ (u * q ** (size - 1) + (size - 1) * q_mean * q ** (size - 2)))
    return (float(rewards.mean()) - baseline_outside) / (1 - outside), 1 - outside


def _quadrature(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gauss-Legendre quadrature on each interval, [intervals, ORDER]."""
    nodes, weights = np.polynomial.legendre.leggauss(ORDER)
    middle, half = (low + high)[:, None] / 2, (high - low)[:, None] / 2
    return middle + half * nodes, half * weights


def truncated_normal(center: float) -> Any:
    """Return the normal distribution of standard deviation SPREAD around `center`, truncated to [0, 1]."""
    return stats.truncnorm(-center / SPREAD, (1 - center) / SPREAD, loc=center, scale=SPREAD)


def simulate(p: float, size: int, *, groups: int, seed: int) -> Simulation:
    """Return the mean baseline of sampled groups, read back from the advantages that training would compute.

    ``group_center`` is r - baseline, and exactly 0 for all of a group outside S.
    """
    rewards_PG = (np.random.default_rng([seed, size, round(1e6 * p)]).random((groups, size)) < p).astype(np.float64)
    advantages_PG = compute_advantages("group_center", rewards_PG)
    informative_P = advantages_PG.any(axis=1)
    baseline_P = (rewards_PG - advantages_PG)[informative_P, 0]
    assert len(baseline_P) > 1, f"{groups} groups are too few: none is neither all right nor all wrong"
    error = float(baseline_P.std(ddof=1)) / len(baseline_P) ** 0.5
    return Simulation(float(baseline_P.mean()), error, len(baseline_P))


class Baselines(NamedTuple):
    """Of one problem's K stored responses, 0 < k < K of them right."""

    whole: float  # k / K
    groups: float  # mean baseline of the groups of G in S
    too_high: float  # probability that the baseline of a group in S is above k / K
    formula: float  # E[p_hat | S] at p = k / K


def baselines(right: int, stored: int, size: int) -> Baselines:
    """Return the baseline of all responses beside those of their groups of ``size``."""
    chances = [comb(right, j) * comb(stored - right, size - j) / comb(stored, size) for j in range(1, size)]
    mean = sum(j / size * chance for j, chance in enumerate(chances, start=1)) / sum(chances)
    above = sum(chance for j, chance in enumerate(chances, start=1) if j * stored > right * size) / sum(chances)
    return Baselines(right / stored, mean, above, float(mean_baseline(right / stored, size)))


def extreme_share(rights: Sequence[int], stored: int, size: int) -> float:
    """Return which share of the groups of ``size`` with one right response are of problems below that pass rate.

    Figure 6 of the paper: a group with one of 8 right says p_hat = 1/8, and fewer than 16 of 128 right say p < 1/8.

    Args:
        rights: right responses of each problem, out of ``stored``.
        stored: responses to each problem.
        size: of a group.

    Returns NaN where no group has one right response.
    """
    chances = [right * comb(stored - right, size - 1) for right in rights]  # groups with one right, of each problem
    below = sum(chance for right, chance in zip(rights, chances, strict=True) if right * size < stored)
    return below / sum(chances) if sum(chances) else math.nan


def print_run(run: Path, *, size: int) -> None:
    """Print the table of an evaluation with several samples, the last one of each benchmark.

    Raises UserError if no evaluation has at least twice ``size`` samples of each problem.
    """
    latest = {result.benchmark: result for result in RunDirectory(run).open().evals()}
    shown = 0
    for name, result in latest.items():
        counts: dict[str, list[bool]] = {}
        for row in result.rows(["problem_id", "verdict"]).to_pylist():
            counts.setdefault(row["problem_id"], []).append(row["verdict"] == "correct")
        stored = min(map(len, counts.values()), default=0)
        if stored < 2 * size:
            continue
        shown += 1
        problems = [
            baselines(sum(given[:stored]), stored, size)
            for given in counts.values()
            if 0 < sum(given[:stored]) < stored
        ]
        print(f"\n{name}, step {result.step}: {len(counts)} problems, {stored} responses to each, groups of {size}")
        print(f"| pass rate | problems | of all {stored} | of groups in S | formula | too high |")
        print("|---|---|---|---|---|---|")
        for low, high in pairwise(BANDS):
            band = [problem for problem in problems if low <= problem.whole < high]
            cells = [f"{np.mean(values):.3f}" for values in zip(*band, strict=True)] or [""] * 4
            whole, groups, too_high, formula = cells
            print(f"| {low:g} to {high:g} | {len(band)} | {whole} | {groups} | {formula} | {too_high} |")
        rights = [sum(given[:stored]) for given in counts.values()]
        limit = -(-stored // size)
        for name_of, counted in (("right", rights), ("wrong", [stored - right for right in rights])):
            share = extreme_share(counted, stored, size)
            print(
                f"of the groups of {size} with one {name_of}, {100 * share:.0f} % are of problems with fewer than "
                f"{limit} {name_of} of {stored}"
            )
    if not shown:
        raise UserError(
            f"{run} has no evaluation with {2 * size} or more samples of each problem; make one with "
            f"`vlm-rl eval --samples {16 * size} --temperature 1`, or give a smaller --size"
        )


def print_tables(*, groups: int, seed: int) -> None:
    print("E[p_hat | S] - p, and in brackets a simulation's distance from it in standard errors")
    print("   p   " + "".join(f"{f'G = {size}':>19}" for size in SIZES))
    for p in SIMULATED_P:
        cells = []
        for size in SIZES:
            sampled, exact = simulate(p, size, groups=groups, seed=seed), float(mean_baseline(p, size))
            cells.append(f"{exact - p:+.6f} ({_distance(sampled, exact):+.1f})")
        print(f"{p:>6.2f} " + "".join(f"{cell:>19}" for cell in cells))
    print("\nP(p_hat > p | S), averaged over uniform p; * marks where the paper's number does not hold")
    print(f"{'G':>4}" + "".join(f"{name:>20}" for name in ("p < 0.5 (> 63%)", "p < 0.25 (> 78%)", "p < 2/G (> 78%)")))
    for size in range(2, 33):
        bounds = [*CLAIMS.items(), (2 / size, 0.78)]
        averages = [(average_probability(size, below), claim) for below, claim in bounds]
        print(
            f"{size:>4}"
            + "".join(f"{average:>19.5f}{' ' if average > claim else '*'}" for average, claim in averages)
        )
    print("\nlambda that brings the mean advantage nearer to r - p, G = 8, C = 0.5; * where 1.3 does")
    print(f"{'p':>6}{'right':>20}{'wrong':>20}{'both':>20}")
    for p in SIMULATED_P:
        if p == 0.5:  # no bias to correct
            continue
        right, wrong = (helpful_scales(p, reward, 8, 0.5) for reward in (1.0, 0.0))
        both = max(right[0], wrong[0]), min(right[1], wrong[1])
        print(f"{p:>6.2f}" + "".join(f"{_interval(*scales):>20}" for scales in (right, wrong, both)))
    print(f"\nE[p_hat | S] - p of bounded rewards: normal, {SPREAD} wide, truncated; S: more than {SPREAD} apart")
    print(f"{'p':>6}" + "".join(f"{f'G = {size}':>12}{'P(S)':>8}" for size in (4, 8)))
    for center in CENTERS:
        rewards = truncated_normal(center)
        exact = [mean_baseline_of(rewards, size, SPREAD) for size in (4, 8)]
        p = float(rewards.mean())
        print(f"{p:>6.3f}" + "".join(f"{baseline - p:>+12.6f}{chance:>8.3f}" for baseline, chance in exact))


def _interval(low: float, high: float) -> str:
    if low >= high:
        return "none "
    return f"{max(low, 0):.3f} to {high:.3f}{'*' if low < 1.3 < high else ' '}"


def _distance(sampled: Simulation, exact: float) -> float:
    return (sampled.mean - exact) / sampled.error if sampled.error else 0.0


def write_picture(out: Path, *, groups: int, seed: int) -> None:
    """Draw four panels: bias against p, probabilities against G, the lambdas that help, and bounded rewards."""
    panels = [_bias(groups=groups, seed=seed), _claims(), _scales(), _bounded()]
    spec = {"concat": panels, "columns": 2, "spacing": 60, "config": CONFIG}
    spec["resolve"] = {"scale": dict.fromkeys(("color", "fill", "stroke"), "independent")}
    with Image.open(BytesIO(vega.png(vega.in_light_theme(spec)))) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)


def _bias(*, groups: int, seed: int) -> Spec:
    names = [f"G = {size}" for size in SIZES]
    curves, points = [], []
    grid = np.linspace(1e-4, 1 - 1e-4, 300)
    for size, name in zip(SIZES, names, strict=True):
        bias = mean_baseline(grid, size) - grid
        curves += [{"G": name, "p": p, "bias": b} for p, b in zip(grid.tolist(), bias.tolist(), strict=True)]
        for p in SIMULATED_P:
            points.append({"G": name, "p": p, "bias": simulate(p, size, groups=groups, seed=seed).mean - p})
    color = {"field": "G", "type": "nominal", "scale": {"domain": names, "range": list(_SHADES)}}
    color["legend"] = {"title": None, "symbolOpacity": 1}
    y = {**_axis("bias", "E[p̂ | not all equal] − p", low=-0.53, high=0.53), "axis": {"format": "+.1f"}}
    note = {"text": ["hard: baseline too high,", "advantages too low"], "p": 0.03, "bias": -0.34}
    return {
        "title": "How far a group's baseline is off (dots: simulated)",
        "width": 400,
        "height": 300,
        "encoding": {"x": _axis("p", "p, the policy's chance to solve the prompt", low=0, high=1), "y": y},
        "layer": [
            {"data": {"values": [{"bias": 0}]}, "mark": "rule", "encoding": {"x": None}},
            {"data": {"values": curves}, "mark": {"type": "line", "strokeWidth": 2}, "encoding": {"color": color}},
            {
                "data": {"values": points},
                "mark": _DOT | {"size": 45, "stroke": "white"},
                "encoding": {"fill": color | {"legend": None}},
            },
            {
                "data": {"values": [note]},
                "mark": {"type": "text", "align": "left", "color": MUTED},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }


def _claims() -> Spec:
    points: list[Spec] = []
    claims: list[Spec] = []
    for (below, claim), shade in zip(CLAIMS.items(), PALETTE, strict=False):
        name = f"p uniform below {below:g}"
        claims.append({"name": name, "P": claim, "G": 32, "text": f"paper: {claim:.0%}", "color": shade})
        for size in range(2, 33):
            value = average_probability(size, below)
            points.append({"name": name, "G": size, "P": value, "holds": value > claim})
    color: Spec = {"field": "name", "type": "nominal"}
    color["scale"] = {"domain": [c["name"] for c in claims], "range": [c["color"] for c in claims]}
    drawn = color | {"legend": {"title": None, "symbolOpacity": 1}}
    fill = {"condition": {"test": "!datum.holds", "value": "white"}, **color, "legend": None}
    x: Spec = {"field": "G", "type": "quantitative", "title": "G, responses per prompt"}
    x |= {
        "scale": {"type": "log", "base": 2, "domain": [1.9, 34], "nice": False},
        "axis": {"values": [2, 4, 8, 16, 32]},
    }
    y = {**_axis("P", "P(p̂ > p | not all equal)", low=0.48, high=1.02), "axis": {"format": "%"}}
    return {
        "title": "Hard prompts with too high a baseline (hollow: below the paper's number)",
        "width": 400,
        "height": 300,
        "encoding": {"x": x, "y": y},
        "layer": [
            {
                "data": {"values": claims},
                "mark": {"type": "rule", "strokeDash": [5, 4]},
                "encoding": {"x": None, "color": drawn},
            },
            {
                "data": {"values": claims},
                "mark": {"type": "text", "align": "right", "dy": -8},
                "encoding": {"text": {"field": "text"}, "color": drawn},
            },
            {"data": {"values": points}, "mark": {"type": "line", "opacity": 0.5}, "encoding": {"color": drawn}},
            {
                "data": {"values": points},
                "mark": _DOT | {"size": 50},
                "encoding": {"stroke": color | {"legend": None}, "fill": fill},
            },
        ],
    }


def _scales() -> Spec:
    grid = [p for p in np.linspace(0.01, 0.99, 99).tolist() if abs(p - 0.5) > 0.005]
    names = {"right responses": 1.0, "wrong responses": 0.0}
    values = []
    for name, reward in names.items():
        for p in grid:
            low, high = helpful_scales(p, reward, 8, 0.5)
            values.append({"name": name, "p": p, "low": max(low, 0), "high": high})
    color = {"field": "name", "type": "nominal", "scale": {"domain": list(names), "range": list(PALETTE[:2])}}
    y = {**_axis("low", "lambda", low=0, high=1.5), "axis": {"format": ".1f"}}
    note: Spec = {"text": "paper: 1.3", "p": 0.5, "low": 1.3}
    return {
        "title": "Lambdas that bring the mean advantage nearer to r − p (G = 8, C = 0.5)",
        "width": 400,
        "height": 300,
        "encoding": {"x": _axis("p", "p, the policy's chance to solve the prompt", low=0, high=1), "y": y},
        "layer": [
            {
                "data": {"values": values},
                "mark": {"type": "area", "opacity": 0.45},
                "encoding": {"y2": {"field": "high"}, "color": color | {"legend": {"title": None}}},
            },
            {"data": {"values": [note]}, "mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": {"x": None}},
            {
                "data": {"values": [note]},
                "mark": {"type": "text", "dy": -8},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }


def _bounded() -> Spec:
    values = []
    for size in (4, 8):
        for center in np.linspace(-0.2, 1.2, 57).tolist():
            rewards = truncated_normal(center)
            p = float(rewards.mean())
            values.append({"G": f"G = {size}", "p": p, "bias": mean_baseline_of(rewards, size, SPREAD)[0] - p})
    color = {"field": "G", "type": "nominal", "scale": {"range": list(_SHADES[1:3])}, "legend": {"title": None}}
    y = {**_axis("bias", "E[p̂ | S] − p", low=-0.03, high=0.03), "axis": {"format": "+.2f"}}
    return {
        "title": "The baseline of rewards in [0, 1]: normal, 0.1 wide, truncated",
        "width": 400,
        "height": 300,
        "encoding": {"x": _axis("p", "p, the mean reward", low=0, high=1), "y": y},
        "layer": [
            {"data": {"values": [{"bias": 0}]}, "mark": "rule", "encoding": {"x": None}},
            {
                "data": {"values": values},
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {"color": color, "order": {"field": "p"}},
            },
        ],
    }


_DOT: Spec = {"type": "point", "filled": True, "opacity": 1, "strokeWidth": 1.4}


def _axis(field: str, title: str, *, low: float, high: float) -> Spec:
    scale = {"domain": [low, high], "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the picture here (PNG)")
    parser.add_argument("--groups", type=int, default=20_000, help="sampled for each simulated point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="a folder of vlm-rl eval with --samples: its table alone")
    parser.add_argument("--size", type=int, default=8, help="G of --run")
    options = parser.parse_args()
    if options.run:
        try:
            print_run(options.run, size=options.size)
        except UserError as error:
            parser.error(str(error))
        return
    print_tables(groups=options.groups, seed=options.seed)
    if options.out:
        write_picture(options.out, groups=options.groups, seed=options.seed)


if __name__ == "__main__":
    main()
