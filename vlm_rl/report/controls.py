"""What accuracy would be without looking, and without training: the controls of a run, and what they allow to say.

`controls.json` of a run, if there is one, holds accuracies in [0, 1] under these keys, each optional: trained (the
trained policy on the real images), blank_images, shuffled_images, blank_crops (its tool shows nothing), without_tool
(made to answer without it), best_constant (the best constant guess), untrained (before training, free) and
forced_scan (before training, the first words of a careful trace forced).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from vlm_rl.errors import UserError
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.report.sections import percent_text

_PARTS = macros("vlm_rl.report", "parts.html")

_CONTROLS = {
    "trained": "trained policy, the problem's own images",
    "blank_images": "trained policy, blank images",
    "shuffled_images": "trained policy, a different problem's images",
    "blank_crops": "trained policy, a tool that shows blank crops",
    "without_tool": "trained policy, made to answer without its tool",
    "best_constant": "best constant guess",
    "untrained": "before training",
    "forced_scan": "before training, first words of the careful trace forced",
}


def controls_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return the bars of each run's controls, and what they allow to say."""
    cards = []
    for run in runs:
        if values := controls_of(run):
            rows = [
                (text, percent_text(values[key]), values[key]) for key, text in _CONTROLS.items() if key in values
            ]
            heading = run.name if len(runs) > 1 else ""
            cards.append(_PARTS.bars(rows, heading, sentences=control_sentences(values)))
    caption = "What the accuracy would be without looking, and without training."
    return PageSection("Controls", caption, Markup("").join(cards))


def controls_of(run: RunCurves) -> dict[str, float]:
    """Return the controls that the page knows. Raises UserError for one that is no accuracy."""
    values = {key: value for key, value in run.run.controls().items() if key in _CONTROLS}
    for key, value in values.items():
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise UserError(
                f"{run.run.path / 'controls.json'}: {key} is {value!r} and not a number in [0, 1]; "
                "correct it, or remove the file"
            )
    return values


_CLEAR = 0.05  # a smaller difference of two controls says nothing


def control_sentences(values: Mapping[str, float]) -> list[str]:
    """Return the sentences that the controls allow; none about a control that was not measured."""
    said = (_blind_sentence(values), _tool_sentence(values), _forced_sentence(values))
    return [sentence for sentence in said if sentence]


def _blind_sentence(values: Mapping[str, float]) -> str:
    """Say whether the trained policy's accuracy comes from the picture."""
    blind = [values[key] for key in ("blank_images", "shuffled_images") if key in values]
    if not blind or "best_constant" not in values:
        return ""
    best, guess, trained = max(blind), values["best_constant"], values.get("trained")
    against = f"the best constant guess ({percent_text(guess)})"
    if trained is not None and trained <= guess + _CLEAR:
        return (
            f"The trained policy scores {percent_text(trained)} with the right image, no more than 5 points above "
            f"{against}: it shows no use of the picture."
        )
    if best > guess + _CLEAR:
        return (
            f"Without the right image the trained policy still scores {percent_text(best)}, more than 5 points "
            f"above {against}: part of its accuracy does not come from the picture."
        )
    said = (
        f"Without the right image the trained policy scores at most {percent_text(best)}, no more than 5 points "
        f"above {against}"
    )
    return f"{said}." if trained is None else f"{said}: its {percent_text(trained)} comes from the picture."


def _tool_sentence(values: Mapping[str, float]) -> str:
    """Say whether the trained policy's accuracy comes from what its tool shows."""
    if not {"trained", "blank_crops", "without_tool", "best_constant"} <= values.keys():
        return ""
    best, guess, trained = (
        max(values["blank_crops"], values["without_tool"]),
        values["best_constant"],
        values["trained"],
    )
    against = f"the best constant guess ({percent_text(guess)})"
    if trained <= guess + _CLEAR:
        return f"The trained policy scores {percent_text(trained)}, no more than 5 points above {against}."
    if best > guess + _CLEAR:
        return (
            f"Without what its tool shows the trained policy still scores {percent_text(best)}, more than 5 points "
            f"above {against}: part of its accuracy does not come from the tool."
        )
    return (
        f"Without what its tool shows the trained policy scores at most {percent_text(best)}, no more than 5 points "
        f"above {against}: its {percent_text(trained)} comes from looking closer."
    )


def _forced_sentence(values: Mapping[str, float]) -> str:
    """Say what training added to a way of working that the model had."""
    if "forced_scan" not in values or "trained" not in values:
        return ""
    forced, trained, untrained = values["forced_scan"], values["trained"], values.get("untrained")
    already = f"Forcing the first words of the careful trace before training already gives {percent_text(forced)}"
    if untrained is not None and trained <= untrained + _CLEAR:
        change = "did not raise" if trained >= untrained - _CLEAR else "lowered"
        return (
            f"{already}, but training {change} the accuracy: {percent_text(untrained)} before, "
            f"{percent_text(trained)} after. So nothing was learned that this could explain."
        )
    if trained < forced - _CLEAR:
        return (
            f"{already}; training reaches only {percent_text(trained)}. The model has a way of working that training "
            "did not make its own."
        )
    if trained <= forced + _CLEAR:
        return (
            f"{already}, against {percent_text(trained)} after it. So training moved probability from guessing "
            "to a way of working that the model had; it did not teach it to see."
        )
    if untrained is not None and forced <= untrained + _CLEAR:
        return (
            f"Forcing the first words of the careful trace before training gives {percent_text(forced)}, no more "
            f"than 5 points above {percent_text(untrained)} without them; training reaches {percent_text(trained)}. "
            "What was learned is more than these words."
        )
    return (
        f"{already}; training reaches {percent_text(trained)}. The first part is probability moved from "
        "guessing to a way of working that the model had; the rest was learned on top."
    )
