"""The page that `vlm-rl doctor` prints."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from vlm_rl.doctor.apart import GROUPS, run_apart
from vlm_rl.doctor.check import Check, Waiting, exit_code, run_checks
from vlm_rl.doctor.machine import MACHINE_CHECKS
from vlm_rl.doctor.waiting import WaitingLine
from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import base_of
from vlm_rl.run.checkpoint_names import resolve_model
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.terminal import make_console
from vlm_rl.run.writing import writing
from vlm_rl.untrusted.visible_text import replace_invisible

_OUTCOMES = {"ok": ("ok", "green"), "off": ("OFF", "bold red"), "unknown": ("?", "yellow")}
_INDENT, _WIDTH = 21, 110  # columns before a detail, and of the page


def doctor(options: argparse.Namespace) -> int:
    """Print a line for each check as soon as it is known, and until then what it does. Returns the exit code.

    A model folder and a recipe are checked where they are given, otherwise the machine is. Raises UserError for a
    folder with an adapter, and if the file of --json cannot be written.
    """
    if options.json is not None and not options.json.parent.is_dir():
        raise UserError(f"--json {options.json}: there is no folder {options.json.parent}; make it first")
    begun = time.monotonic()
    known: list[Check] = []
    console = make_console()
    with _unwound_by_sigterm(), WaitingLine(console) as waiting:
        for answer in _answers(options, waiting):
            known.append(answer)
            for line in _lines(answer):
                console.print(line, soft_wrap=True)
            waiting.answered()
    console.print(Text(f"\n{_summary(known)}, in {time.monotonic() - begun:.0f} s"), soft_wrap=True)
    if options.json is not None:
        with writing(options.json):
            text = json.dumps([asdict(answer) for answer in known], indent=2) + "\n"
            write_atomically(options.json, lambda place: place.write_text(text, encoding="utf-8"))
    return exit_code(known)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise: ranks and engine are in sessions of their own, and would keep their memory of the cards."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answers(options: argparse.Namespace, waiting: Waiting) -> Iterator[Check]:
    if options.model is not None:
        folder = resolve_model(options.model)
        if (base := base_of(folder)) is not None:
            raise UserError(f"--model {options.model} holds an adapter: give its base model, {base.path}, instead")
        from vlm_rl.doctor.model import MODEL_CHECKS, ModelUnderTest

        yield from run_checks(MODEL_CHECKS, ModelUnderTest(folder), waiting=waiting)
    if options.config is not None:
        from vlm_rl.doctor.recipe import RECIPE_CHECKS, RecipeUnderTest

        subject = RecipeUnderTest(options.config, num_ranks=options.ranks or num_gpus() or 1)
        yield from run_checks(RECIPE_CHECKS, subject, waiting=waiting)
    if options.model is None and options.config is None:
        yield from _of_the_machine(options.runs, waiting)


def _of_the_machine(runs: Path, waiting: Waiting) -> Iterator[Check]:
    from vlm_rl.learner.checkpoint_size import existing

    yield from run_checks(MACHINE_CHECKS, existing(runs), waiting=waiting)
    if not GROUPS:
        return
    waiting("tiny model", "importing torch and transformers, building it")
    from vlm_rl.toy.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory(prefix="vlm-rl-doctor-") as folder:
        build_tiny_model(Path(folder) / "model", weight_std=0.1)  # predictions that depend on the prompt
        for group in GROUPS:
            yield from run_apart(group, Path(folder), num_gpus=num_gpus(), waiting=waiting)


def num_gpus() -> int:
    """Return the number of this machine's GPUs that torch can use, which is imported for it."""
    from vlm_rl import devices

    return devices.num_gpus()


def _lines(answer: Check) -> Iterator[Text]:
    word, style = _OUTCOMES[answer.outcome]
    lines = [f"{f'{word:5}{answer.name}':{_INDENT}}{answer.detail}"]
    if answer.next_step:
        lines.append(f"{'next:':>{_INDENT - 1}} {answer.next_step}")
    for index, line in enumerate(lines):
        visible = replace_invisible(line, lambda character: f"\\x{ord(character):02x}")
        filled = textwrap.fill(
            visible,
            width=_WIDTH,
            subsequent_indent=" " * _INDENT,
            break_long_words=False,  # a path, an option or a command stays in one piece, to be copied
            break_on_hyphens=False,
        )
        text = Text(filled)
        if index == 0:
            text.stylize(style, 0, len(word))
        yield text


def _summary(answers: list[Check]) -> str:
    count = Counter(answer.outcome for answer in answers)
    parts = [f"{count['ok']} of {len(answers)} checks pass"]
    if count["off"]:
        parts.append(f"{count['off']} off")
    if count["unknown"]:
        parts.append(f"{count['unknown']} could not be checked")
    return ", ".join(parts)
