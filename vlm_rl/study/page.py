"""The page about a study: every rule's curves in its own colour, final values, differences, findings.

One self-contained HTML file in the style of vlm_rl.report.run_report. What a study lacks is said in words; there is
no empty plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from omegaconf import OmegaConf

from vlm_rl.report import vega
from vlm_rl.report.charts.lines import Series
from vlm_rl.report.figures import CurveFigure, figure_grid, metric_section
from vlm_rl.report.html import PageSection, demo_command, macros, page, write_page
from vlm_rl.study.results import NUM_END_DECILES, SeedBand, StudyResults, seed_band, thinned
from vlm_rl.study.runs import Study
from vlm_rl.study.tables import RuleStyle, difference_section, final_section, rule_styles, stability_section

_PARTS = macros("vlm_rl.study", "parts.html")
_STUDY = macros("vlm_rl.study", "study.html")


def write_study_page(results: StudyResults, study: Study, findings: Sequence[str], out: Path) -> Path:
    """Write the page of a study and return its path.

    Args:
        results: of the runs that are finished.
        study: what was asked for.
        findings: sentences, in their order.
        out: the file.

    Raises UserError if it cannot be written.
    """
    sections = [
        difference_section(results),
        final_section(results, study),
        _findings_section(findings),
        _learning_section(results),
        _length_section(results),
        _update_section(results),
        stability_section(results),
        _time_section(results),
        _every_metric_section(results),
        _runs_section(results, study),
        _configuration_section(study),
    ]
    text = page(
        title=f"{len(results.rules)} rules compared over {len(results.seeds)} seeds · vlm-rl",
        header=_header(results, study, demo_command([out.parent])),
        sections=sections,
        footer="Written by vlm-rl study from the files of the runs.",
        key=_STUDY.key(rule_styles(results)),
        scripts=vega.page_scripts(),
    )
    return write_page(text, out)


def _header(results: StudyResults, study: Study, command: str) -> Markup:
    others = results.rules[1:]
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    names = ", ".join(others) if len(others) <= 3 else f"{len(others)} rules"
    title = f"{names} against {results.baseline}" if others else results.baseline
    starts = f"{len(study.starts)} warm start{'' if len(study.starts) == 1 else 's'}"
    lead = (
        f"{len(results.rules)} rules × {seeds}, {results.num_steps} steps each. Runs of one seed share the warm "
        f"start ({starts} in all), the order of the prompts and the number of steps; {len(results.runs)} of "
        f"{len(results.runs) + len(results.missing)} runs are finished."
    )
    if len({*(responses := study.responses_per_prompt).values()}) > 1:
        counts = ", ".join(f"{rule} {count}" for rule, count in responses.items())
        lead += f" Steps do not cost the same: rules sample different numbers of responses ({counts}) to a prompt."
    contaminated = sorted({name for run in results.runs for name in run.contaminated})
    return _STUDY.header(contaminated, title, lead, len(results.missing), command)


def _findings_section(sentences: Sequence[str]) -> PageSection:
    return PageSection(
        "Token or sequence aggregation",
        "The two quantities that decide this according to the BA paper, and what the runs show.",
        _STUDY.findings(sentences),
    )


# -- charts --------------------------------------------------------------------------------------

_MAX_STEPS = 40  # of the small charts: there are about a hundred of them
_BAND = "Bold: mean over the seeds of the lightly smoothed curves; band: the lowest and the highest seed."


def _learning_section(results: StudyResults) -> PageSection:
    heldout = [
        _figure(
            results,
            f"heldout_accuracy/{name}",
            f"Held-out accuracy: {name}",
            percent=True,
        )
        for name in results.benchmarks
    ]
    figures = [
        _figure(results, "reward", "Reward of a response"),
        _figure(results, "accuracy", "Accuracy of the training responses", percent=True),
    ]
    body = (figure_grid(heldout) if heldout else _STUDY.no_evaluation()) + figure_grid(figures)
    return PageSection("Learning", f"{_BAND} Held-out accuracy is not smoothed.", body)


def _length_section(results: StudyResults) -> PageSection:
    whole = _figure(results, "completions/mean_length", "Length of all training responses", y_title="tokens")
    figures = [
        _figure(results, "length/correct_mean", "Length of correct responses", y_title="tokens"),
        _figure(results, "length/wrong_mean", "Length of wrong responses", y_title="tokens"),
        _figure(results, "length/group_cv", "Variation of length inside a group", y_title="std / mean"),
        _figure(results, "length/sign_gap", "Gap in length: A > 0 minus A < 0", y_title="tokens"),
        *(
            _figure(results, f"heldout_length/{name}", f"Length of held-out responses: {name}", y_title="tokens")
            for name in results.benchmarks
        ),
        _figure(
            results, "length_pull/total", "Pull of the update on expected length", y_title="each rule's own scale"
        ),
    ]
    caption = f"Generated tokens, the end-of-sequence token included. {_BAND}"
    return PageSection("Length", caption, whole.html() + figure_grid(figures))


def _update_section(results: StudyResults) -> PageSection:
    longest = f"of the longest {NUM_END_DECILES} tenths"
    figures = [
        _figure(results, "clip_ratio/low_mean", "Clip fraction, A < 0 (below)", percent=True, from_zero=True),
        _figure(results, "clip_ratio/high_mean", "Clip fraction, A > 0 (above)", percent=True, from_zero=True),
        _figure(results, "entropy", "Entropy of the policy", y_title="nats per token"),
        _figure(results, "grad_norm", "Gradient norm before clipping", log=True),
        *(
            _figure(
                results,
                f"gradient_mass/{sign}/longest",
                f"Gradient mass {longest}, {sign} advantage",
                percent=True,
                from_zero=True,
            )
            for sign in ("positive", "negative")
        ),
    ]
    if any("visual/dependence" in run.curves for run in results.runs):
        figures.append(
            _figure(results, "visual/dependence", "How much a blank image changes a token", y_title="mean S")
        )
    caption = (
        "These curves show whether the policy changes steadily, still explores, and which responses drive "
        "the update. Gradient mass: the share of the summed |token weight × advantage|; if every response counted "
        f"alike, the two charts would add up to about {10 * NUM_END_DECILES} %. Rules with a sequence ratio clip "
        "whole responses."
    )
    return PageSection("Updates", caption, figure_grid(figures))


def _time_section(results: StudyResults) -> PageSection:
    caption = "Seconds of a training step; runs that were trained side by side shared the machine."
    return PageSection(
        "Time", caption, _figure(results, "step_time", "Step time", y_title="s", from_zero=True).html()
    )


def _figure(results: StudyResults, name: str, title: str, **options: Any) -> CurveFigure:
    """Return a chart with a line and a band per rule."""
    bands = []
    for style in rule_styles(results):
        curves = [run.curves[name] for run in results.of(style.name) if name in run.curves]
        bands.append((style, seed_band(curves, smoothed=not name.startswith("heldout_"))))
    return CurveFigure(title, _series(bands), [name], "these runs", options)


def _series(bands: Sequence[tuple[RuleStyle, SeedBand | None]]) -> list[Series]:
    return [
        Series(style.name, band.steps, band.mean, style.color, style.dashed, low=band.low, high=band.high)
        for style, band in bands
        if band is not None
    ]


def _every_metric_section(results: StudyResults) -> PageSection:
    """Return a small chart of every metric that a run logged, with a line and a band per rule."""
    figures = []
    for name in {name for run in results.runs for name in run.logged}:
        bands = []
        for style in rule_styles(results):
            band = seed_band([run.logged[name] for run in results.of(style.name) if name in run.logged])
            bands.append((style, band and thinned(band, _MAX_STEPS)))
        figures.append(CurveFigure(name, _series(bands), [name], "these runs", {"height": 130}))
    return metric_section(figures, note=f"{_BAND} Of more than {_MAX_STEPS} steps, neighbours are averaged.")


# -- runs and configuration ----------------------------------------------------------------------


def _runs_section(results: StudyResults, study: Study) -> PageSection:
    reasons = {(run.rule, run.seed): run.reason for run in results.missing}
    starts = list(study.starts)
    rows = []
    for place, seed in enumerate(results.seeds):
        states = [reasons.get((rule, seed), "finished") for rule in results.rules]
        rows.append([str(seed), starts[place % len(starts)], *states])
    return PageSection("Runs", _STUDY.runs_caption(), _PARTS.table(["seed", "warm start", *results.rules], rows))


def _configuration_section(study: Study) -> PageSection:
    rules = {name: study.rules[name] for name in study.rule_names}
    body = _STUDY.configuration(_yaml(rules), _yaml(study.starts), _yaml(study.base))
    return PageSection("Configuration", "As the study file gives it; every other key has its default.", body)


def _yaml(tree: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))
