"""The page about a study: every rule's curves in its own colour, final values, differences, the words.

One self-contained HTML file in the style of vlm_rl.report.run_report. What a study lacks is said in words; there is
no empty plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vlm_rl.errors import UserError
from vlm_rl.report.charts import Series
from vlm_rl.report.figures import Figure, figure_grid, missing
from vlm_rl.report.html import Section, escape, page_html
from vlm_rl.report.vega import scripts
from vlm_rl.run.directory import write_atomically
from vlm_rl.study.plan import Study
from vlm_rl.study.results import NUM_END_DECILES, Comparison, band
from vlm_rl.study.tables import cell, difference_section, final_section, look, swatch, table, table_row


def write_comparison_page(comparison: Comparison, study: Study, words: Sequence[str], out: Path) -> Path:
    """Write the page to `out` and return it. Raises UserError if it cannot be written."""
    sections = [
        final_section(comparison, study),
        difference_section(comparison),
        _reading_section(words),
        _learning_section(comparison),
        _length_section(comparison),
        _update_section(comparison),
        _time_section(comparison),
        _missing_section(comparison, study),
        _configuration_section(study),
    ]
    rules, seeds = len(comparison.rules), len(comparison.seeds)
    page = page_html(
        title=f"{rules} rules compared over {seeds} seeds · vlm-rl",
        header=_header(comparison, study),
        sections=sections,
        footer="Written by vlm-rl compare from the files of the runs.",
        key=_key(comparison),
        scripts=scripts(),
    )
    try:
        write_atomically(out, lambda place: place.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror or error}") from None
    return out


# -- the top of the page -------------------------------------------------------------------------


def _header(comparison: Comparison, study: Study) -> str:
    others = comparison.rules[1:]
    seeds = f"{len(comparison.seeds)} seed{'' if len(comparison.seeds) == 1 else 's'}"
    names = ", ".join(others) if len(others) <= 3 else f"{len(others)} rules"
    title = f"{names} against {comparison.baseline}" if others else comparison.baseline
    starts = f"{len(study.starts)} warm start{'' if len(study.starts) == 1 else 's'}"
    lead = (
        f"{len(comparison.rules)} rules × {seeds}, {comparison.num_steps} steps each. Runs of one seed share the "
        f"warm start ({starts} in all), the order of the prompts and the budget; {len(comparison.runs)} of "
        f"{len(comparison.runs) + len(comparison.missing)} runs are finished."
    )
    note = f"<p class='missing'>{_missing_line(comparison)}</p>" if comparison.missing else ""
    return f"{_banner(comparison)}<h1>{escape(title)}</h1><p class='lead'>{escape(lead)}</p>{note}"


def _banner(comparison: Comparison) -> str:
    sets = sorted({name for run in comparison.runs for name in run.contaminated})
    if not sets:
        return ""
    return (
        f"<p class='banner'><b>CONTAMINATED</b> — runs of this study were trained on rows of a benchmark "
        f"({escape(', '.join(sets))}). Their scores there say nothing about unseen problems.</p>"
    )


def _missing_line(comparison: Comparison) -> str:
    num = len(comparison.missing)
    runs = "1 run is" if num == 1 else f"{num} runs are"
    return f"{runs} missing and {'counts' if num == 1 else 'count'} nowhere below: see <a href='#runs'>Runs</a>."


def _key(comparison: Comparison) -> str:
    """The colours of the rules, in view beside every chart."""
    entries = "".join(f"<span>{swatch(comparison, rule)}{escape(rule)}</span>" for rule in comparison.rules)
    return f"<div class='key'>{entries}</div>"


def _reading_section(words: Sequence[str]) -> Section:
    return Section(
        "Token or sequence aggregation",
        "The quantities that, according to the BA paper, decide it, and what came of it here.",
        f"<ul class='reading'>{''.join(f'<li>{escape(sentence)}</li>' for sentence in words)}</ul>",
    )


# -- charts --------------------------------------------------------------------------------------

_BAND = "Bold: mean over the seeds of the lightly smoothed curves; band: the lowest and the highest seed."


def _learning_section(comparison: Comparison) -> Section:
    heldout = [
        _figure(
            comparison,
            f"heldout_accuracy/{name}",
            f"Held-out accuracy: {name}",
            percent=True,
        )
        for name in comparison.benchmarks
    ]
    nothing = missing("Held-out accuracy: no evaluation is stored (<code>eval.every</code>, <code>data.eval</code>).")
    figures = [
        _figure(comparison, "reward", "Reward of a response"),
        _figure(comparison, "accuracy", "Accuracy of the training responses", percent=True),
    ]
    body = (figure_grid(heldout) if heldout else nothing) + figure_grid(figures)
    return Section("Learning", f"{_BAND} Held-out accuracy is not smoothed.", body)


def _length_section(comparison: Comparison) -> Section:
    whole = _figure(comparison, "completions/mean_length", "Length of all training responses", y_title="tokens")
    figures = [
        _figure(comparison, "length/correct_mean", "Length of correct responses", y_title="tokens"),
        _figure(comparison, "length/wrong_mean", "Length of wrong responses", y_title="tokens"),
        _figure(comparison, "length/group_cv", "Variation of length inside a group", y_title="std / mean"),
        _figure(comparison, "length/sign_gap", "Gap in length: A > 0 minus A < 0", y_title="tokens"),
        *(
            _figure(comparison, f"heldout_length/{name}", f"Length of held-out responses: {name}", y_title="tokens")
            for name in comparison.benchmarks
        ),
        _figure(
            comparison, "length_pull/total", "Pull of the update on expected length", y_title="each rule's own scale"
        ),
    ]
    caption = f"Generated tokens, the end-of-sequence token included. {_BAND}"
    return Section("Length", caption, whole.html() + figure_grid(figures))


def _update_section(comparison: Comparison) -> Section:
    longest = f"of the longest {NUM_END_DECILES} tenths"
    figures = [
        _figure(comparison, "clip_ratio/low_mean", "Clip fraction, A < 0 (below)", percent=True, from_zero=True),
        _figure(comparison, "clip_ratio/high_mean", "Clip fraction, A > 0 (above)", percent=True, from_zero=True),
        _figure(comparison, "entropy", "Entropy of the policy", y_title="nats per token"),
        _figure(comparison, "grad_norm", "Gradient norm before clipping", log=True),
        *(
            _figure(
                comparison,
                f"gradient_mass/{sign}/longest",
                f"Gradient mass {longest}, {sign} advantage",
                percent=True,
                from_zero=True,
            )
            for sign in ("positive", "negative")
        ),
    ]
    caption = (
        "Whether the policy changes steadily, still explores, and which responses the update listens to. Gradient "
        "mass: the share of the summed |token weight × advantage|; did every response count alike, the two charts "
        f"would add up to about {10 * NUM_END_DECILES} %. Rules with a sequence ratio clip whole responses."
    )
    return Section("Updates", caption, figure_grid(figures))


def _time_section(comparison: Comparison) -> Section:
    caption = "Seconds of a training step; runs that were trained side by side shared the machine."
    return Section("Time", caption, _figure(comparison, "step_time", "Step time", y_title="s", from_zero=True).html())


def _figure(comparison: Comparison, name: str, title: str, **options: Any) -> Figure:
    """A chart with a line and a band per rule."""
    series = []
    for rule in comparison.rules:
        found = band(comparison.of(rule), name)
        if found is not None:
            color, dashed = look(comparison, rule)
            series.append(Series(rule, found.steps, found.mean, color, dashed=dashed, low=found.low, high=found.high))
    absent = f"by these runs (<code>{escape(name)}</code>)"
    return Figure(title, series, absent, options)


# -- runs and configuration ----------------------------------------------------------------------


def _missing_section(comparison: Comparison, study: Study) -> Section:
    reasons = {(one.rule, one.seed): one.reason for one in comparison.missing}
    starts = list(study.starts)
    head = [cell("th", "seed"), cell("th", "warm start"), *(cell("th", rule) for rule in comparison.rules)]
    rows = [table_row(head)]
    for place, seed in enumerate(comparison.seeds):
        states = [reasons.get((rule, seed), "finished") for rule in comparison.rules]
        rows.append(table_row([cell("td", text) for text in (str(seed), starts[place % len(starts)], *states)]))
    caption = "Which runs are in the numbers above. <code>vlm-rl compare</code> again runs what is missing."
    return Section("Runs", caption, table(rows))


def _configuration_section(study: Study) -> Section:
    rules = {name: study.rules[name] for name in study.rule_names}
    body = (
        f"<h3>What each rule changes</h3><pre>{_yaml(rules)}</pre>"
        f"<h3>Warm starts</h3><pre>{_yaml(study.starts)}</pre>"
        f"<details><summary>The configuration that all share</summary><pre>{_yaml(study.base)}</pre></details>"
    )
    return Section("Configuration", "As the study file gives it; every other key has its default.", body)


def _yaml(tree: Any) -> str:
    return escape(OmegaConf.to_yaml(OmegaConf.create(tree)))
