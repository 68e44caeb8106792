"""What `vlm-rl plan` says: tables, a sentence of advice for each number of cards, a plot, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.errors import UserError
from vlm_rl.report import vega
from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.figures import card
from vlm_rl.report.html import PageSection, macros, page, write_page
from vlm_rl.run.run_files import write_atomically
from vlm_rl.scaling.divisions import Division, best_of

_PARTS = macros("vlm_rl.report", "parts.html")
HEAD = (
    "learner",
    "servers",
    "ahead",
    "a step, s",
    "responses/s",
    "learner waits",
    "engines wait",
    "packing",
    "age",
    "",
)
FULL = 0.7  # of an update; with less, the advice names a larger mini-batch
FASTER, SLOWER = 0.8, 1.25  # times the decoding seconds, for a look at how firm the advice is


def shown(divisions: Sequence[Division]) -> list[Division]:
    """Choose a table's rows: colocated, the best division with servers for each ahead, and what does not fit."""
    chosen = [division for division in divisions if division.is_colocated]
    for ahead in sorted({division.ahead for division in divisions}):
        best = best_of([each for each in divisions if each.ahead == ahead and not each.is_colocated])
        chosen += [best] if best is not None else []
    return chosen + [division for division in divisions if division.misfits and not division.is_colocated]


def cells(division: Division, best: Division | None) -> list[str]:
    """Return a row of the table; its columns are HEAD."""
    learner = f"{division.learner_cards}"
    servers = "the same" if division.is_colocated else f"{division.server_cards}"
    if division.pace is None:
        return [learner, servers, "", "does not fit", "", "", "", "", "", division.misfits[0]]
    pace = division.pace
    return [
        learner,
        servers,
        "" if division.is_colocated else f"{division.ahead}",
        f"{pace.seconds:.1f}",
        f"{division.responses_per_second:.1f}",
        f"{pace.learner_waits:.0%}",
        f"{pace.engines_wait:.0%}",
        f"{division.efficiency:.0%}",
        f"{pace.age:.2f}",
        "best" if division is best else "",
    ]


def table(divisions: Sequence[Division]) -> str:
    """Return the table of one number of cards, as Markdown whose columns are aligned in a terminal too."""
    best = best_of(divisions)
    rows = [list(HEAD), *(cells(division, best) for division in shown(divisions))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    *numbers, words = widths
    rule = [*("-" * (width - 1) + ":" for width in numbers), "-" * max(3, words)]
    shown_rows = [[cell.rjust(width) for cell, width in zip(row, numbers, strict=False)] for row in rows]
    text = [[*padded, row[-1].ljust(words)] for padded, row in zip(shown_rows, rows, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (text[0], rule, *text[1:]))


def advice(divisions: Sequence[Division], otherwise: Mapping[str, Sequence[Division]], basis: str) -> str:
    """Return a sentence or two: the best division, by how much, and what that rests on.

    Args:
        divisions: the divisions of one number of cards.
        otherwise: those of the same cards if decoding took more or less time, by "1.25 times the time".
        basis: where the rates are from.
    """
    gpus, best = divisions[0].gpus, best_of(divisions)
    if best is None:
        return f"{gpus} GPUs: nothing fits; vlm-rl train CONFIG --dry-run --gpu-memory GB names settings that would"
    others = [each for each in divisions if each.is_colocated != best.is_colocated]
    rival = best_of(others)
    text = f"{gpus} GPUs: {_named(best)}, {best.responses_per_second:.1f} responses a second"
    if rival is None:
        text += f"; {'no split fits' if best.is_colocated else 'colocated does not fit'}" if others else ""
    else:
        text += f", {best.responses_per_second / rival.responses_per_second:.2f} times {_named(rival)}"
    on_policy = best_of([each for each in divisions if each.ahead == 0])
    if best.ahead and best.pace is not None:
        text += (
            f". Its tokens are {best.pace.age:.1f} steps old on average; what that does to learning is not counted"
        )
        if on_policy is not None and on_policy is not rival:
            share = best.responses_per_second / on_policy.responses_per_second
            text += f". It is {share:.2f} times {_named(on_policy)}, the best on policy"
    changed = {how: best_then for how, those in otherwise.items() if (best_then := best_of(those))}
    if best.efficiency < FULL:
        text += (
            f". Ranks compute for {best.efficiency:.0%} of an update, and wait or repeat prompts otherwise: a larger "
            "train.mini_batch_prompts fills them"
        )
    differs = {how: each for how, each in changed.items() if _key(each) != _key(best)}
    if not differs:
        firm = f"It stays the best if decoding takes {' or '.join(changed)}"
    else:
        firm = "; ".join(f"if decoding takes {how}, {_named(each)} is the best" for how, each in differs.items())
        firm = firm[0].upper() + firm[1:]
    return f"{text}. {firm}. {basis}"


def _key(division: Division) -> tuple[int, int, int]:
    return division.learner_cards, division.server_cards, division.ahead


def _named(division: Division) -> str:
    if division.is_colocated:
        return "colocated"
    return (
        f"{division.learner_cards} cards for the learner and {division.server_cards} for servers, "
        f"rollout.ahead {division.ahead}"
    )


def as_json(
    answers: Mapping[int, Sequence[Division]], advised: Mapping[int, str], basis: Sequence[tuple[str, str]]
) -> Any:
    """Return everything as plain values."""
    return {
        "basis": [{"what": what, "taken_as": text} for what, text in basis],
        "gpus": [
            {"gpus": gpus, "advice": advised[gpus], "divisions": [asdict(division) for division in divisions]}
            for gpus, divisions in answers.items()
        ],
    }


def write_plot(
    answers: Mapping[int, Sequence[Division]], advised: Mapping[int, str], basis: Sequence[tuple[str, str]], out: Path
) -> Path:
    """Write a chart for each number of cards, and return the file's path.

    Args:
        answers: the divisions of each number of cards.
        advised: the advice on each.
        basis: (what, taken as) of everything that the numbers rest on.
        out: a .png, or else a page of HTML.

    Raises UserError if it cannot be written.
    """
    charts = {f"{gpus} GPUs": _chart(divisions) for gpus, divisions in answers.items()}
    drawn = {title: spec for title, spec in charts.items() if spec is not None}
    if out.suffix == ".png":
        if not drawn:
            raise UserError(f"--plot {out}: nothing fits on any number of cards, so there is nothing to draw")
        stills = [vega.still(spec, width=230, title=title) for title, spec in drawn.items()]
        picture = vega.png(vega.joined(stills, columns=3), scale=1.5)
        write_atomically(out, lambda place: place.write_bytes(picture))
        return out
    sections = [
        PageSection(
            f"{gpus} GPUs",
            advised[gpus],
            _drawn(charts[f"{gpus} GPUs"], gpus)
            + _PARTS.table(HEAD, [cells(each, best_of(divisions)) for each in divisions], 0),
        )
        for gpus, divisions in answers.items()
    ]
    text = page(
        title="How to divide the cards · vlm-rl",
        header=Markup("<h1>How to divide the cards</h1>") + _PARTS.table(("what", "taken as"), basis),
        sections=sections,
        footer="Computed by vlm-rl plan; nothing was run.",
        scripts=vega.scripts(),
    )
    return write_page(text, out)


def _drawn(spec: vega.Spec | None, gpus: int) -> Markup:
    """Return a chart under its title; nothing if nothing fits."""
    title = f"Responses a second on {gpus} GPUs"
    return card(title, vega.embed(spec, title)) if spec is not None else Markup()


def _chart(divisions: Sequence[Division]) -> vega.Spec | None:
    """Return responses a second over the servers' cards: a curve for each ahead, and colocated as a level."""
    series = []
    together = next((each for each in divisions if each.is_colocated and each.pace), None)
    aheads = sorted({each.ahead for each in divisions if not each.is_colocated})
    for place, ahead in enumerate(aheads):
        split = [each for each in divisions if each.ahead == ahead and not each.is_colocated]
        x = np.array([each.server_cards for each in split], dtype=float)
        y = np.array([each.responses_per_second if each.pace else np.nan for each in split])
        series.append(Series(f"ahead {ahead}", x, y, PALETTE[(place + 1) % len(PALETTE)], points=True))
    if together is not None:
        ends = np.array([1.0, max(1.0, divisions[0].gpus - 1.0)])
        level = np.full(2, together.responses_per_second)
        series.insert(0, Series("colocated", ends, level, PALETTE[0], dashed=True))
    return lines(series, x_title="cards of the servers", y_title="responses a second", from_zero=True)
