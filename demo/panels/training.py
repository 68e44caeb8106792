"""The panel of training: the curves of several runs, and what one of them sampled at one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.demo.numbers.library import Library, OpenRun
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.chart_cards import ChartCard, chart_card, color
from vlm_rl.demo.panels.page_state import NUM_SLOTS, choose_slots
from vlm_rl.demo.web.rendering import render
from vlm_rl.errors import UserError
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.html import VERDICT_MARKS
from vlm_rl.report.looks import color_response
from vlm_rl.run.turn_record import read_turns

_COLUMNS = [
    "prompt_id",
    "response_index",
    "text",
    "reward",
    "advantage",
    "verdict",
    "reason",
    "length",
    "stop_reason",
    "turns",
    "tokens",
    "visual_dependence",
]
_MAX_PROMPTS = 64  # of one step in the list
_HEIGHT = 170  # pixels of a chart


@dataclass(frozen=True, slots=True)
class _Metric:
    """A logged metric that gets a chart."""

    name: str
    title: str
    unit: str = ""
    is_share: bool = False
    only_with: str = ""  # runs that logged this one too


_METRICS = (
    _Metric("reward", "Reward of a response"),
    _Metric("rewards/accuracy/mean", "Accuracy reward"),
    _Metric("completions/mean_length", "Length of a response, mean", "tokens"),
    _Metric("length/p90", "Length of a response, p90", "tokens"),
    _Metric("completions/clipped_ratio", "Share cut at the limit", is_share=True),
    _Metric("length/sign_gap", "Length where A > 0 minus where A < 0", "tokens"),
    _Metric("entropy", "Entropy of the policy", "nats per token"),
    _Metric("grad_norm", "Gradient norm"),
    _Metric("clip_ratio/region_mean", "Clipped tokens", is_share=True),
    _Metric("hadw/belief", "HA-DW's belief", is_share=True, only_with="hadw/weight_hard"),
    _Metric("hadw/weight_hard", "HA-DW's weight, prompts below the belief"),
    _Metric("hadw/weight_easy", "HA-DW's weight, other prompts"),
)


def shown_runs(library: Library, url: UrlState) -> list[OpenRun]:
    """Return the runs that the address names, else those of its checkpoints."""
    known = library.checkpoints.get(url.benchmark)
    shown = (run for key in url.keys for run in known[key].runs) if known else library.runs
    names = url.runs or tuple(dict.fromkeys(shown))
    return [library.runs[name] for name in names if name in library.runs]


def run_slots(library: Library, runs: Sequence[OpenRun], known: Mapping[str, int]) -> dict[str, int]:
    """Return a colour for each run: its checkpoint's where one is shown, else one that is free."""
    fresh = choose_slots([run.name for run in runs], list(library.runs))
    taken = {known[run.name] for run in runs if run.name in known}
    free = [slot for slot in (*fresh.values(), *range(NUM_SLOTS)) if slot not in taken]
    slots: dict[str, int] = {}
    for run in runs:
        if run.name in known:
            slots[run.name] = known[run.name]
        else:
            slots[run.name] = next((slot for slot in free if slot not in slots.values()), fresh[run.name])
    return slots


def training_panel(library: Library, url: UrlState, known: Mapping[str, int]) -> Markup:
    """Return the curves of the shown runs, and below them the rollouts of one step.

    `known` holds the colours of the runs whose checkpoints the page shows.
    """
    runs = shown_runs(library, url)
    slots = run_slots(library, runs, known)
    figures = [card for metric in _METRICS for card in _metric_card(metric, runs, slots)]
    if not figures:
        names = ", ".join(run.name for run in runs)
        return _message(
            f"Nothing was logged by {names} yet, or these folders hold evaluations only. Choose runs that were "
            "trained, or open the demo with the training run's folder."
        )
    return render("training_panel", key=_key(runs, slots), figures=figures, rollouts=rollouts_html(runs, url))


def _message(text: str) -> Markup:
    return render("message", text=text, is_error=False)


def _key(runs: Sequence[OpenRun], slots: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the legend; the seeds of a study share a colour and are one entry."""
    groups: dict[tuple[int, str], list[OpenRun]] = {}
    for run in runs:
        parent, _, last = run.name.rpartition("/")
        groups.setdefault((slots[run.name], parent if last.startswith("seed-") else run.name), []).append(run)
    key = []
    for (slot, name), members in groups.items():
        seeds = f"{len(members)} seeds, " if len(members) > 1 else ""
        progress = f"step {min(_last_step(run) for run in members)} of {members[0].num_steps}"
        key.append(
            {
                "slot": slot,
                "title": name if len(members) > 1 else members[0].name,
                "text": f"{members[0].algorithm}, {seeds}{progress}" if members[0].algorithm else "evaluated only",
                "is_alive": any(run.is_alive() for run in members),
            }
        )
    return key


def _last_step(run: OpenRun) -> int:
    metrics = run.curves().metrics
    return int(metrics[-1]["step"]) if metrics else 0


def _metric_card(metric: _Metric, runs: Sequence[OpenRun], slots: Mapping[str, int]) -> list[ChartCard]:
    """Return the chart of one metric; none if nothing but zeros was logged."""
    series = []
    for run in runs:
        curves = run.curves()
        steps, values = curves.metric(metric.name)
        if not metric.only_with or curves.metric_names(metric.only_with):
            series.append(Series(run.name, steps, values, color=color(slots[run.name]), smooth=True))
    if not any(np.nan_to_num(curve.y).any() for curve in series):
        return []
    spec = lines(series, y_title=metric.unit, percent=metric.is_share, height=_HEIGHT)
    return chart_card(metric.title, spec)


# -- rollouts ------------------------------------------------------------------------------------


def rollouts_html(runs: Sequence[OpenRun], url: UrlState) -> Markup:
    """Return the responses to one prompt of one step, of one of the runs that store rollouts."""
    stored = {run.name: run for run in runs if run.directory.rollout_steps()}
    if not stored:
        return _message("No rollouts are stored with these runs.")
    run = stored.get(url.rollouts) or next(iter(stored.values()))
    steps = run.directory.rollout_steps()
    wanted = steps[-1] if url.step is None else url.step
    step = min(steps, key=lambda stored_step: abs(stored_step - wanted))
    try:
        records = run.directory.rollouts(step, _COLUMNS).to_pylist()
        for record in records:
            record["earlier"] = read_turns(record.get("turns"))[:-1]
            record["colored"] = color_response(record) if record.get("visual_dependence") else None
    except (OSError, ValueError, KeyError, UserError) as error:
        return _message(f"The rollouts of step {step} of {run.name} cannot be read: {str(error)[:120]}")
    prompts: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        prompts.setdefault(record["prompt_id"], []).append(record)
    if not prompts:
        return _message(f"Step {step} of {run.name} has no responses.")
    group = min(url.group, len(prompts) - 1)
    name, responses = list(prompts.items())[group]
    return render(
        "rollouts",
        run=run.name,
        runs={name: name for name in stored},
        steps=steps,
        place=steps.index(step),
        prompts=[_prompt(name, of_prompt) for name, of_prompt in list(prompts.items())[:_MAX_PROMPTS]],
        group=group,
        name=name,
        responses=sorted(responses, key=lambda response: response["response_index"]),
        marks=VERDICT_MARKS,
    )


def _prompt(name: str, responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a prompt's button: how many of its responses are right, and what it says when pointed at."""
    right = sum(response["verdict"] == "correct" for response in responses)
    mean = float(np.mean([response["length"] for response in responses]))
    tip = f"{name}: {right} of {len(responses)} right, {mean:.0f} tokens on average"
    return {"right": right, "count": len(responses), "tip": tip}
