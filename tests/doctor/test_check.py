"""How the answers of checks become a page and an exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vlm_rl import cli
from vlm_rl.doctor import command
from vlm_rl.doctor.check import Check, exit_code, phase, run_checks
from vlm_rl.doctor.machine import versions
from vlm_rl.doctor.waiting import SILENCE, WaitingLine
from vlm_rl.errors import UserError


def fine(subject: str) -> Check:
    return Check("fine", "ok", subject)


def broken(subject: str) -> Check:
    raise UserError(f"{subject} is broken: get it again")


def needs_it(subject: str) -> Check:
    return broken(subject)


def unable(subject: str) -> Check:
    raise ZeroDivisionError("no\nnumber")


def test_every_check_runs_whatever_the_others_do() -> None:
    answers = list(run_checks([broken, needs_it, unable, fine], "it"))
    assert [(answer.name, answer.outcome) for answer in answers] == [
        ("broken", "off"),
        ("needs it", "unknown"),
        ("unable", "unknown"),
        ("fine", "ok"),
    ]
    assert answers[0].detail == "it is broken: get it again"
    assert "'broken'" in answers[1].detail
    assert "ZeroDivisionError: no number" in answers[2].detail


@pytest.mark.parametrize(
    ("checks", "code"), [([fine], 0), ([unable, fine], 2), ([broken, unable, fine], 1), ([fine, broken], 1)]
)
def test_the_exit_code_names_the_worst(checks: list, code: int) -> None:
    assert exit_code(list(run_checks(checks, "it"))) == code


def test_answers_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MACHINE_CHECKS", (versions,))
    monkeypatch.setattr(command, "GROUPS", ())
    assert cli.main(["doctor", "--json", str(tmp_path / "answers.json")]) == 0
    (answer,) = json.loads((tmp_path / "answers.json").read_text())
    assert (answer["name"], answer["outcome"]) == ("versions", "ok")
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 1 checks pass, in ")
    assert cli.main(["doctor", "--json", str(tmp_path / "missing" / "answers.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_page_shows_each_line_and_exits_with_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hidden(_: object) -> Check:
        return Check("hidden", "off", "a \x1b[2J sign", "look again")

    monkeypatch.setattr(command, "MACHINE_CHECKS", (versions, hidden))
    monkeypatch.setattr(command, "GROUPS", ())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor"])
    assert stopped.value.code == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("ok   versions")
    assert "\x1b" not in "".join(rest)
    assert [" ".join(line.split()) for line in rest[:2]] == [r"OFF hidden a \x1b[2J sign", "next: look again"]


# --- while a check lasts ---------------------------------------------------------------------------------


def test_a_check_says_what_it_does() -> None:
    def slow(subject: str) -> Check:
        phase(f"loading {subject}")
        phase("drawing")
        return Check("slow", "ok", "")

    told: list[tuple[str, str]] = []
    answers = run_checks([slow, broken, fine], "it", waiting=lambda *about: told.append(about))
    next(answers)
    phase("between two checks")  # no check is running, so nobody waits
    list(answers)
    assert told == [("slow", ""), ("slow", "loading it"), ("slow", "drawing"), ("broken", ""), ("fine", "")]
    phase("after the last")
    assert len(told) == 5


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_after_each_silence() -> None:
    """By hand: silent until 20 s, then at 20 and 40 s of the second check, which began at 5 s."""
    clock, page = Clock(), io.StringIO()
    waiting = WaitingLine(Console(file=page, width=120), clock=clock)
    waiting.tick()  # nothing is waited for yet
    waiting("sync", "")
    clock.now += 5
    waiting("sampling", "vLLM compiles the model")
    for seconds in (14.9, 0.1, 19.9, 0.1):
        clock.now += seconds
        waiting.tick()
    assert page.getvalue().splitlines() == [
        "     sampling: vLLM compiles the model … 15 s",
        "     sampling: vLLM compiles the model … 35 s",
    ]
    waiting.answered()  # the page has a new line: silence begins again
    clock.now += SILENCE - 1
    waiting.tick()
    assert len(page.getvalue().splitlines()) == 2


def test_a_terminal_shows_the_line_live() -> None:
    clock, page = Clock(), io.StringIO()
    console = Console(file=page, width=120, force_terminal=True)
    with WaitingLine(console, clock=clock) as waiting:
        waiting("sync", "loading the model")
        clock.now += 7
        waiting.tick()
        assert waiting._status is not None
        assert str(waiting._status.status) == "sync: loading the model … 7 s"
    assert "\x1b[?25h" in page.getvalue(), "the cursor is back"


def test_the_page_of_a_log_names_a_long_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line comes from a thread, while the check keeps this one."""

    def long(_: object) -> Check:
        phase("counting")
        while "long: counting …" not in capsys.readouterr().out:
            pass
        return Check("long", "ok", "")

    monkeypatch.setattr("vlm_rl.doctor.waiting.SILENCE", 0.0)
    monkeypatch.setattr(command, "MACHINE_CHECKS", (long,))
    monkeypatch.setattr(command, "GROUPS", ())
    assert cli.main(["doctor"]) == 0
