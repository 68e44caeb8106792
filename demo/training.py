"""The panel of training: the curves of several runs, and what they sampled at one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np

from vlm_rl.demo import svg
from vlm_rl.demo.length_charts import figure, missing
from vlm_rl.demo.library import Library, OpenRun
from vlm_rl.demo.mathtext import math_html
from vlm_rl.demo.page_state import choose_slots
from vlm_rl.demo.panels import select_html
from vlm_rl.demo.url_state import View
from vlm_rl.errors import UserError
from vlm_rl.report.html import VERDICT_MARKS, escape
from vlm_rl.stats import running_mean

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
]
_MAX_PROMPTS = 64  # of one step in the list


@dataclass(frozen=True, slots=True)
class Curve:
    """One chart: which logged metric, under which title."""

    metric: str
    title: str
    unit: str = ""
    share: bool = False


CURVES = (
    Curve("reward", "Reward of a response"),
    Curve("rewards/accuracy/mean", "Accuracy reward"),
    Curve("completions/mean_length", "Length of a response, mean", "tokens"),
    Curve("length/p90", "Length of a response, p90", "tokens"),
    Curve("completions/clipped_ratio", "Share cut at the limit", share=True),
    Curve("length/sign_gap", "Length where A > 0 minus where A < 0", "tokens"),
    Curve("entropy", "Entropy of the policy", "nats per token"),
    Curve("grad_norm", "Gradient norm"),
    Curve("clip_ratio/region_mean", "Clipped tokens", share=True),
)


def shown_runs(library: Library, view: View) -> list[OpenRun]:
    """The runs that the view names, else those of its checkpoints; only runs that logged something have curves."""
    known = library.checkpoints.get(view.benchmark)
    shown = (run for key in view.keys for run in known[key].runs) if known else library.runs
    names = view.runs or tuple(dict.fromkeys(shown))
    return [library.runs[name] for name in names if name in library.runs]


def run_slots(library: Library, runs: Sequence[OpenRun], known: Mapping[str, int]) -> dict[str, int]:
    """A colour for each run: its checkpoint's where one is shown, else one that is free."""
    names = list(library.runs)
    fresh = choose_slots([run.name for run in runs], names)
    taken = {known[run.name] for run in runs if run.name in known}
    free = [slot for slot in fresh.values() if slot not in taken] + [s for s in range(6) if s not in taken]
    slots: dict[str, int] = {}
    for run in runs:
        if run.name in known:
            slots[run.name] = known[run.name]
        else:
            slots[run.name] = next((s for s in free if s not in slots.values()), fresh[run.name])
    return slots


def training_html(library: Library, view: View, known: Mapping[str, int]) -> str:
    """Curves, and below them the rollouts of one step."""
    runs = shown_runs(library, view)
    slots = run_slots(library, runs, known)
    charts = [html for curve in CURVES if (html := _chart(curve, runs, slots))]
    if not charts:
        names = ", ".join(run.name for run in runs)
        return missing(
            f"Nothing was logged by {names} yet, or these folders hold evaluations only. Choose runs that were "
            "trained, or open the demo with the training run's folder."
        )
    return f"{_key(runs, slots)}<div class='figures three'>{''.join(charts)}</div>{rollouts_html(runs, view)}"


def _key(runs: Sequence[OpenRun], slots: Mapping[str, int]) -> str:
    """What each colour is; the seeds of a comparison, which share one, stand together."""
    groups: dict[tuple[int, str], list[OpenRun]] = {}
    for run in runs:
        parent, _, last = run.name.rpartition("/")
        groups.setdefault((slots[run.name], parent if last.startswith("seed-") else run.name), []).append(run)
    items = []
    for (slot, name), members in groups.items():
        done = min(_last_step(run) for run in members)
        title = name if len(members) > 1 else members[0].name
        several = f"{len(members)} seeds, " if len(members) > 1 else ""
        live = " <b class='live'>training now</b>" if any(run.alive() for run in members) else ""
        items.append(
            f"<span class='k{slot}'><i class='swatch'></i>{escape(title)} <span class='quiet'>"
            f"{escape(members[0].algorithm)}, {several}step {done} of {members[0].num_steps}</span>{live}</span>"
        )
    return f"<div class='key'>{''.join(items)}</div>"


def _last_step(run: OpenRun) -> int:
    metrics = run.curves().metrics
    return int(metrics[-1]["step"]) if metrics else 0


def _chart(curve: Curve, runs: Sequence[OpenRun], slots: Mapping[str, int]) -> str:
    found = {}
    for run in runs:
        steps, values = run.curves().metric(curve.metric)
        if np.isfinite(values).any():
            found[run.name] = (steps, values)
    everything = (
        np.concatenate([values[np.isfinite(values)] for _, values in found.values()]) if found else np.zeros(0)
    )
    if not everything.any():
        return ""
    first, last = (edge([steps for steps, _ in found.values()]) for edge in (_first, _last))
    low, high = float(everything.min()), float(everything.max())
    pad = 0.06 * (high - low) or 0.5
    low = 0.0 if 0 <= low < 0.5 * high else low - pad
    frame = svg.Frame((first, max(last, first + 1)), (low, high + pad), width=440, height=230, left=50)
    text = svg.percent if curve.share else svg.number
    whole = svg.ticks(first, max(last, first + 1), count=5, whole=True)
    body = [svg.axes(frame, x_title="step", y_title=curve.unit, x_ticks=whole, y_text=text)]
    for name, (steps, values) in found.items():
        smooth = running_mean(values, max(3, len(values) // 20) | 1) if len(values) >= 12 else values
        marks = svg.line(frame, steps, values, "line thin") if len(found) <= 6 and smooth is not values else ""
        marks += svg.line(frame, steps, smooth, "line" if len(found) <= 6 else "line many")
        body.append(svg.group(slots[name], marks))
    drawing = svg.drawing(frame, "".join(body), curve.title)
    return figure(curve.title, drawing, f"training-{curve.metric.replace('/', '-')}")


def _first(steps: Sequence[np.ndarray]) -> float:
    return min(float(one[0]) for one in steps)


def _last(steps: Sequence[np.ndarray]) -> float:
    return max(float(one[-1]) for one in steps)


# -- rollouts ------------------------------------------------------------------------------------


def rollouts_html(runs: Sequence[OpenRun], view: View) -> str:
    """The responses to one prompt of one step, of one of the runs that store rollouts."""
    stored = {run.name: run for run in runs if run.directory.rollout_steps()}
    if not stored:
        return missing("No rollouts are stored with these runs.")
    run = stored.get(view.rollouts) or next(iter(stored.values()))
    choice = select_html("rollouts", "of", {name: name for name in stored}, run.name) if len(stored) > 1 else ""
    return _rollouts(run, run.directory.rollout_steps(), view, choice)


def _rollouts(run: OpenRun, steps: Sequence[int], view: View, choice: str) -> str:
    step = min(steps, key=lambda one: abs(one - (steps[-1] if view.step is None else view.step)))
    try:
        records = run.directory.rollouts(step, _COLUMNS).to_pylist()
    except (OSError, ValueError, KeyError, UserError) as error:
        return missing(f"The rollouts of step {step} of {run.name} cannot be read: {str(error)[:120]}")
    prompts: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        prompts.setdefault(record["prompt_id"], []).append(record)
    if not prompts:
        return missing(f"Step {step} of {run.name} has no responses.")
    group = min(view.group, len(prompts) - 1)
    name, responses = list(prompts.items())[group]
    cards = "".join(_response(one) for one in sorted(responses, key=lambda one: one["response_index"]))
    place, last = steps.index(step), len(steps) - 1
    values = ",".join(map(str, steps))
    return (
        f"<h2>Rollouts of {escape(run.name)}, step {step}</h2>"
        "<div class='walk'>"
        f"{_button('← step', {'step': steps[max(0, place - 1)], 'group': ''}, enabled=place > 0)}"
        f"<input type='range' min='0' max='{last}' value='{place}' data-values='{values}' "
        f"data-name='step' aria-label='step'>"
        f"{_button('step →', {'step': steps[min(last, place + 1)], 'group': ''}, enabled=place < last)}"
        f"{choice}</div>"
        f"<div class='prompts'>{_prompts(prompts, group)}</div>"
        f"<p class='quiet'>prompt {escape(name)}: {len(responses)} responses</p><div class='rollouts'>{cards}</div>"
    )


def _button(text: str, patch: Mapping[str, Any], *, enabled: bool) -> str:
    return f"<button data-go='{escape(urlencode(patch))}'{'' if enabled else ' disabled'}>{text}</button>"


def _prompts(prompts: Mapping[str, Sequence[Mapping[str, Any]]], chosen: int) -> str:
    cells = []
    for index, (name, responses) in enumerate(list(prompts.items())[:_MAX_PROMPTS]):
        right = sum(one["verdict"] == "correct" for one in responses)
        here = " here" if index == chosen else ""
        mean = float(np.mean([one["length"] for one in responses]))
        tip = f"{name}: {right} of {len(responses)} right, {mean:.0f} tokens on average"
        share = right / len(responses)
        cells.append(
            f"<button class='prompt{here}' data-go='group={index}' title='{escape(tip)}'>"
            f"<i style='height:{100 * share:.0f}%'></i><span>{right}/{len(responses)}</span></button>"
        )
    return "".join(cells)


def _response(record: Mapping[str, Any]) -> str:
    verdict = str(record["verdict"])
    kind = verdict if verdict in VERDICT_MARKS else "cut"
    cut = "<span class='chip cut'>cut</span>" if record["stop_reason"] == "length" else ""
    return (
        "<article class='card'><div class='badges'>"
        f"<span class='chip {kind}'>{escape(VERDICT_MARKS.get(verdict, f'! {verdict}'))}</span>"
        f"<span class='chip'>{record['length']:,} tokens</span>"
        f"<span class='chip'>reward {record['reward']:.2f}</span>"
        f"<span class='chip'>advantage {record['advantage']:+.2f}</span>{cut}</div>"
        f"<div class='text' tabindex='0'>{math_html(record['text'] or '')}</div>"
        f"<p class='quiet'>{escape(str(record['reason'] or ''))}</p></article>"
    )
