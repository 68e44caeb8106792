"""The panel of lengths, as HTML with inline SVG. The numbers are demo/lengths.py's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from urllib.parse import urlencode

import numpy as np

from vlm_rl.demo import svg
from vlm_rl.demo.lengths import (
    DifficultyPoint,
    LengthCurve,
    Pair,
    Spread,
    bin_edges,
    by_difficulty,
    ecdf,
    gradient_mass,
    histogram,
    length_curve,
    pairs,
    spread,
)
from vlm_rl.demo.page_state import Scene
from vlm_rl.demo.svg import Frame, percent
from vlm_rl.demo.table import DIFFICULTIES
from vlm_rl.demo.url_state import PARTS
from vlm_rl.report.html import escape
from vlm_rl.stats import estimate

CLICK_HINT = "Each bar leads to its problems."
TO_PROBLEMS = {"tab": "problems", "at": ""}


def lengths_html(scene: Scene) -> str:
    """All charts of the panel for the kept problems."""
    lengths = part_lengths(scene)
    if lengths is None:
        return missing(
            "Reasoning and answer apart need the model's tokenizer, and no tokenizer.json lies in the checkpoints of "
            "one of these runs. Choose “whole response”."
        )
    if scene.emptiness:
        return missing(scene.emptiness)
    cards = [
        figure(
            "Share of responses with at most so many tokens",
            ecdf_chart(scene, lengths),
            "lengths-ecdf",
            cut_line(scene),
        ),
        figure(
            "How many tokens a response has",
            histogram_chart(scene, lengths),
            "lengths-histogram",
            CLICK_HINT,
        ),
        figure(
            "Right against wrong answers",
            verdict_chart(scene, lengths),
            "lengths-verdict",
            "Line: p10 to p90, box: the middle half, dot: median. Filled: right, hollow: not right.",
        ),
        figure(
            "Change per problem against the baseline",
            pairs_chart(scene),
            "lengths-pairs",
            "One dot per problem: filled where its verdict became right, hollow where it became wrong. "
            "Diamond: mean with its 95 % interval.",
        ),
        figure(
            f"Does length pay? By difficulty {scene.table.base_when}",
            difficulty_chart(scene),
            "lengths-difficulty",
            f"Each point: the problems of one pass rate {escape(scene.table.base_when)}, "
            "from hardest (small) to easiest (large).",
        ),
        training_figure(scene),
    ]
    return f"<div class='figures'>{''.join(cards)}</div>{mass_html(scene)}"


def part_lengths(scene: Scene) -> list[np.ndarray] | None:
    """Per checkpoint the lengths of its responses to the kept problems; None if they cannot be split."""
    found = []
    for index, checkpoint in enumerate(scene.table.checkpoints):
        inside = scene.table.inside(index, scene.keep_P)
        responses = checkpoint.responses
        if not scene.view.part:
            found.append(responses.length_R[inside])
            continue
        counter = checkpoint.counter
        if counter is None:
            return None
        split = responses.split_R(counter, checkpoint.prefill)
        found.append((split.reasoning_R if scene.view.part == "reasoning" else split.answer_R)[inside])
    return found


def figure(title: str, drawing: str, name: str, caption: str = "") -> str:
    """A card with a chart, its caption, and a button that saves it as PNG."""
    if not drawing:
        return ""
    save = f"<button class='save' data-png='{escape(name)}' title='save as PNG'>PNG</button>"
    note = f"<p class='quiet'>{caption}</p>" if caption else ""
    return f"<figure class='card chart'><figcaption>{escape(title)}{save}</figcaption>{drawing}{note}</figure>"


def missing(text: str) -> str:
    return f"<p class='missing'>{escape(text)}</p>"


def cut_line(scene: Scene) -> str:
    """The share of cut responses beside the lengths that they falsify."""
    cut = [(label, one.cut) for label, one in zip(scene.labels, scene.summaries, strict=True) if one.cut > 0]
    if not cut:
        return "No response was cut at the token limit. Dots: the problem shown."
    said = ", ".join(f"{escape(label)} {percent(share)}" for label, share in cut)
    return f"Cut at the limit, so longer than shown: {said}. Dots: the problem shown."


# -- distributions -------------------------------------------------------------------------------


def ecdf_chart(scene: Scene, lengths: Sequence[np.ndarray]) -> str:
    """A staircase per checkpoint, with a dot at the length of the problem shown."""
    top = max((int(one.max()) for one in lengths if len(one)), default=1)
    frame = Frame((0, top * 1.06), (0, 1.02))
    body = [svg.axes(frame, x_title=_tokens(scene), y_ticks=[0, 0.25, 0.5, 0.75, 1], y_text=percent)]
    body.append(svg.rule(frame.left, frame.y(0.5), frame.width - frame.right, frame.y(0.5), "half"))
    for index, (slot, one) in enumerate(zip(scene.colors, lengths, strict=True)):
        if len(one):
            body.append(svg.group(slot, svg.steps(frame, *ecdf(one), kind=f"line dash{index}")))
    if scene.problem_id is not None and not scene.view.part:
        for index, (slot, one) in enumerate(zip(scene.colors, lengths, strict=True)):
            here = scene.table.length_CP[index, scene.order[scene.position]]
            share = float((one <= here).mean()) if len(one) else 0
            tip = f"{scene.labels[index]}: {svg.number(here)} tokens on {scene.problem_id}"
            body.append(svg.group(slot, svg.dot(frame.x(here), frame.y(share), radius=5, kind="dot ringed", tip=tip)))
    return svg.drawing(frame, "".join(body), "Cumulative distribution of response lengths")


def histogram_chart(scene: Scene, lengths: Sequence[np.ndarray]) -> str:
    """Overlaid bars on common bins, each a little right of the one before, so that equal ones can be told apart.

    The lower bar of a bin lies in front: each can be clicked.
    """
    edges = bin_edges(lengths)
    shares = [histogram(one, edges) for one in lengths]
    top = max(float(one.max(initial=0)) for one in shares) or 1
    frame = Frame((float(edges[0]), float(edges[-1])), (0, top * 1.08))
    body = [svg.axes(frame, x_title=_tokens(scene), y_title="of responses", y_text=percent)]
    for place in range(len(edges) - 1):
        for index in sorted(range(len(shares)), key=lambda i: -shares[i][place]):
            share = float(shares[index][place])
            if share:
                low, high = int(edges[place]), int(edges[place + 1]) - 1
                go = (
                    {}
                    if scene.view.part
                    else {"low": low, "high": high, "focus": scene.view.keys[index], **TO_PROBLEMS}
                )
                tip = f"{scene.labels[index]}: {percent(share)} have {low}–{high} tokens"
                x, y = frame.x(edges[place]), frame.y(share)
                width = frame.x(edges[place + 1]) - x
                shift = min(3.0, 0.4 * width / max(1, len(shares) - 1)) if len(shares) > 1 else 0
                whole = width - 2 - shift * (len(shares) - 1)
                mark = svg.bar(x + 1 + shift * index, y, whole, frame.floor - y, tip=tip, go=urlencode(go))
                body.append(svg.group(scene.colors[index], mark))
    return svg.drawing(frame, "".join(body), "Histogram of response lengths")


def verdict_chart(scene: Scene, lengths: Sequence[np.ndarray]) -> str:
    """Two quantile bars per checkpoint: right, and all other responses."""
    rows: list[tuple[int, bool, Spread]] = []
    for index, one in enumerate(lengths):
        right = scene.table.checkpoints[index].responses.correct_R[scene.table.inside(index, scene.keep_P)]
        rows += [(index, True, spread(one[right])), (index, False, spread(one[~right]))]
    top = max((one.p90 for _, _, one in rows if one.num), default=1)
    frame = Frame((0, max(top, 1) * 1.06), (0, 1), height=14 + 54 * len(lengths) + 40, left=12, top=4)
    body = [svg.axes(frame, x_title=_tokens(scene), y_ticks=[])]
    for index, right, one in rows:
        y = frame.top + 54 * index + (27 if right else 42)
        if right:
            body.append(svg.words(frame.left, y - 12, scene.labels[index], kind="row"))
        go = {"verdict": "correct" if right else "wrong", "focus": scene.view.keys[index], **TO_PROBLEMS}
        body.append(svg.group(scene.colors[index], _quantile_bar(frame, y, one, hollow=not right, go=urlencode(go))))
    return svg.drawing(frame, "".join(body), "Lengths of right and of wrong responses")


def _quantile_bar(frame: Frame, y: float, one: Spread, *, hollow: bool, go: str) -> str:
    what = "not right" if hollow else "right"
    if not one.num:
        return svg.words(frame.x(0), y + 4, f"none {what}", kind="none")
    tip = f"{one.num:,} responses {what}: median {one.median:.0f}, p10 {one.p10:.0f}, p90 {one.p90:.0f} tokens"
    kind = "box hollow" if hollow else "box"
    x = frame.x(one.p25)
    box = svg.bar(x, y - 5, frame.x(one.p75) - x, 10, kind=kind, tip=tip, go=go) if one.p75 > one.p25 else ""
    dot = "median" if box or hollow else "dot"  # without a box the dot alone says whether they are right
    median = svg.dot(frame.x(one.median), y, radius=4, kind=dot, tip=tip, go=go, key=not box)
    return svg.rule(frame.x(one.p10), y, frame.x(one.p90), y) + box + median


# -- pairs, difficulty ---------------------------------------------------------------------------


def pairs_chart(scene: Scene) -> str:
    """A row of dots per checkpoint, at the change in length of each problem; the mean with its interval."""
    found = [pairs(scene.table, index, scene.keep_P) for index in range(1, len(scene.table.checkpoints))]
    changes = [pair.change for row in found for pair in row]
    if not changes:
        return ""
    low, high = min(*changes, 0.0), max(*changes, 0.0)
    pad = 0.05 * (high - low) or 1
    frame = Frame((low - pad, high + pad), (0, 1), height=30 + 74 * len(found) + 24, left=12, top=4)
    body = [
        svg.axes(frame, x_title="more or fewer tokens than the baseline, per problem", y_ticks=[], x_text=_signed)
    ]
    body.append(svg.rule(frame.x(0), frame.top, frame.x(0), frame.floor, "zero"))
    for row, points in enumerate(found):
        top = frame.top + 74 * row
        body.append(svg.words(frame.left, top + 13, scene.labels[row + 1], kind="row"))
        body.append(svg.group(scene.colors[row + 1], _pair_row(scene, frame, row + 1, points, top + 44)))
    return svg.drawing(frame, "".join(body), "Change in tokens per problem")


def _pair_row(scene: Scene, frame: Frame, index: int, points: Sequence[Pair], y: float) -> str:
    marks = []
    for pair in sorted(points, key=lambda one: abs(one.moved)):  # the ones that moved lie in front
        jitter = zlib.crc32(pair.problem_id.encode()) % 1000 / 1000 - 0.5
        kind = {1: "point up", -1: "point down", 0: "point"}[pair.moved]
        tip = f"{pair.problem_id}: {svg.number(pair.before)} → {svg.number(pair.after)} tokens"
        tip += {1: ", became right", -1: ", became wrong", 0: ""}[pair.moved]
        go = urlencode({"tab": "problems", "at": pair.problem_id})
        marks.append(svg.dot(frame.x(pair.change), y + 34 * jitter, radius=3, kind=kind, tip=tip, go=go))
    whole = estimate((scene.table.length_CP[index] - scene.table.length_CP[0])[scene.keep_P])
    x = frame.x(whole.mean)
    if whole.has_interval:
        marks.append(svg.rule(frame.x(whole.low), y, frame.x(whole.high), y, "interval"))
    said = f"mean {_signed(whole.mean)}"
    if whole.has_interval:
        said += f" [{_signed(whole.low)}, {_signed(whole.high)}]"
    marks.append(f"<path class='mean' d='M{x - 6:.1f} {y}L{x:.1f} {y - 6}L{x + 6:.1f} {y}L{x:.1f} {y + 6}Z'/>")
    marks.append(svg.words(frame.width - frame.right, y - 31, said, anchor="end", kind="said"))
    return "".join(marks)


def difficulty_chart(scene: Scene) -> str:
    """Accuracy over mean length, one point per difficulty class and checkpoint, joined by checkpoint."""
    rows = [by_difficulty(scene.table, index, scene.keep_P) for index in range(len(scene.table.checkpoints))]
    points = [point for row in rows for point in row]
    if not points:
        return ""
    top = max(point.length for point in points)
    low = min(point.length for point in points)
    pad = max(0.12 * (top - low), 1)
    frame = Frame((max(0, low - pad), top + pad), (-0.04, 1.06))
    body = [
        svg.axes(frame, x_title="mean tokens", y_title="accuracy", y_ticks=[0, 0.25, 0.5, 0.75, 1], y_text=percent)
    ]
    for index, row in enumerate(rows):
        x, y = (np.array([getattr(p, name) for p in row]) for name in ("length", "accuracy"))
        marks = [svg.line(frame, x, y, "thread")]
        marks += [_difficulty_point(scene, frame, index, point) for point in row]
        body.append(svg.group(scene.colors[index], "".join(marks)))
    return svg.drawing(frame, "".join(body), "Length against accuracy by difficulty")


def _difficulty_point(scene: Scene, frame: Frame, index: int, point: DifficultyPoint) -> str:
    radius = 4.5 + 1.4 * list(DIFFICULTIES).index(point.difficulty)
    tip = (
        f"{scene.labels[index]}, {DIFFICULTIES[point.difficulty][1]} {scene.table.base_when} "
        f"({point.num_problems} problems): {point.length:.0f} tokens, {percent(point.accuracy)} right, "
        f"{percent(point.cut)} cut"
    )
    go = urlencode({"difficulty": point.difficulty, **TO_PROBLEMS})
    place = frame.x(point.length), frame.y(point.accuracy)
    return svg.dot(*place, radius=radius, kind="dot ringed", tip=tip, go=go, key=True)


# -- over training -------------------------------------------------------------------------------


def training_figure(scene: Scene) -> str:
    """Median with the middle half as a band and p90 dashed, of the runs that the checkpoints come from."""
    curves, slots = {}, {}
    for title, slot, names in scene.run_groups():
        curve = length_curve([scene.library.runs[name] for name in names], scene.view.benchmark)
        if curve is not None and len(curve.steps) > 1:
            curves[title], slots[title] = curve, slot
    if not curves:
        return ""
    what = "training responses" if all(one.sampled for one in curves.values()) else "stored evaluations"
    cut = max(float(one.cut.max()) for one in curves.values())
    smooth = ", as a running mean" if any(one.sampled and len(one.steps) >= 20 for one in curves.values()) else ""
    caption = (
        f"Of all {what} of a step{smooth}. Line: median, band: the middle half, dashed: p90. "
        f"At most {percent(cut)} of a step were cut."
    )
    return figure("Length over training", training_chart(curves, slots), "lengths-training", caption)


def training_chart(curves: dict[str, LengthCurve], slots: dict[str, int]) -> str:
    last = max(float(one.steps[-1]) for one in curves.values())
    first = min(float(one.steps[0]) for one in curves.values())
    top = max(float(one.p90.max()) for one in curves.values())
    frame = Frame((first, last), (0, max(top, 1) * 1.08))
    whole = svg.ticks(first, last, count=6, whole=True)
    body = [svg.axes(frame, x_title="step", y_title="tokens", x_ticks=whole)]
    for name, one in curves.items():
        marks = svg.band(frame, one.steps, one.p25, one.p75)
        marks += svg.line(frame, one.steps, one.p90, "line dashed") + svg.line(frame, one.steps, one.median)
        body.append(svg.group(slots[name], marks))
    return svg.drawing(frame, "".join(body), "Median and p90 of the lengths over training")


def mass_html(scene: Scene) -> str:
    """One map per run: which tenth of the responses, by length, the gradient listens to, over training."""
    maps = []
    for name, slot, names in scene.run_groups():
        runs = [scene.library.runs[one] for one in names]
        found = gradient_mass([run.curves() for run in runs])
        if found is not None:
            title = f"{runs[0].algorithm} · {name}" if len(scene.library.runs) > 1 else runs[0].algorithm
            maps.append(figure(title, mass_chart(*found, slot), f"gradient-mass-{len(maps) + 1}"))
    if not maps:
        return ""
    return (
        "<h2>Gradient mass by length</h2>"
        "<p class='quiet'>The share of the summed |token weight × advantage| that "
        "falls on each tenth of a step's responses by length: the stronger the colour, the more the update listens. "
        "Were all responses weighed alike, every cell would hold 10 %.</p>"
        f"<div class='figures three'>{''.join(maps)}</div>"
    )


def mass_chart(steps: np.ndarray, mass: np.ndarray, slot: int) -> str:
    """A map of [10, columns]; opacity is the share, full at 30 %."""
    frame = Frame((0, mass.shape[1]), (0.5, 10.5), width=420, height=220, left=44)
    x_ticks = svg.ticks(0, mass.shape[1] - 1, count=5, whole=True)
    body = [
        svg.axes(
            frame,
            x_title="step",
            y_title="tenth by length",
            x_ticks=[tick + 0.5 for tick in x_ticks],
            x_text=lambda at: f"{steps[int(at)]:.0f}",
            y_ticks=[1, 5, 10],
            y_text=lambda at: {1: "short", 5: "5", 10: "long"}[int(at)],
        )
    ]
    width, height = frame.x(1) - frame.x(0), frame.y(1) - frame.y(2)
    cells = []
    for decile in range(10):
        for column in range(mass.shape[1]):
            share = float(mass[decile, column])
            tip = f"from step {steps[column]:.0f}: {percent(share)} on tenth {decile + 1}"
            place = f"x='{frame.x(column):.1f}' y='{frame.y(decile + 1.5):.1f}'"
            cells.append(
                f"<rect class='cell' {place} width='{width - 0.6:.1f}' height='{height - 0.6:.1f}' "
                f"fill-opacity='{min(1, 0.04 + share / 0.3):.2f}'><title>{tip}</title></rect>"
            )
    body.append(svg.group(slot, "".join(cells)))
    return svg.drawing(frame, "".join(body), "Gradient mass by length decile over training")


def _tokens(scene: Scene) -> str:
    return "tokens" if not scene.view.part else f"tokens, {PARTS[scene.view.part]}"


def _signed(value: float) -> str:
    return f"{value:+,.1f}".replace("-", "−").removesuffix(".0") if value else "0"
