"""How the answers of checks become a page and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_rl import cli
from vlm_rl.doctor import command
from vlm_rl.doctor.check import Check, exit_code, run_checks
from vlm_rl.doctor.machine import versions
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
