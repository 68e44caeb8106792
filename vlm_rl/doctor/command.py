"""The page that `vlm-rl doctor` prints."""

from __future__ import annotations

import argparse
import textwrap

from vlm_rl.data.adapters import base_of
from vlm_rl.doctor.check import Check, exit_code, run_checks
from vlm_rl.doctor.machine import MACHINE_CHECKS
from vlm_rl.doctor.model import MODEL_CHECKS, ModelUnderTest
from vlm_rl.errors import UserError
from vlm_rl.visible_text import replace_invisible

_OUTCOMES = {"ok": "ok", "off": "OFF", "unknown": "?"}
_INDENT, _WIDTH = 21, 110  # columns before a detail, and of the page


def doctor(options: argparse.Namespace) -> int:
    """Print a line for each check as soon as it is known. Returns the exit code.

    With a model folder the model is checked, otherwise the machine. Raises UserError for a folder with an adapter.
    """
    if options.model is not None:
        if (base := base_of(options.model)) is not None:
            raise UserError(f"--model {options.model} holds an adapter: give its base model, {base.path}, instead")
        answers = run_checks(MODEL_CHECKS, ModelUnderTest(options.model))
    else:
        answers = run_checks(MACHINE_CHECKS)
    known = []
    for answer in answers:
        known.append(answer)
        _print(answer)
    return exit_code(known)


def _print(answer: Check) -> None:
    label = f"{_OUTCOMES[answer.outcome]:5}{answer.name}"
    lines = [f"{label:{_INDENT}}{answer.detail}"]
    if answer.next_step:
        lines.append(f"{'next:':>{_INDENT - 1}} {answer.next_step}")
    for line in lines:
        visible = replace_invisible(line, lambda character: f"\\x{ord(character):02x}")
        print(textwrap.fill(visible, width=_WIDTH, subsequent_indent=" " * _INDENT), flush=True)
