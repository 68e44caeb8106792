"""Checks in processes of their own: whatever these do, every check has an answer, and no process is left behind.

Until then they say what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import processes_with
from vlm_rl.doctor import apart
from vlm_rl.doctor.apart import CheckGroup, Phase, run_apart
from vlm_rl.doctor.check import Check

MODULE = "tests.helpers.doctor_checks"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a way of the helper's checks."""

    def run(way: str, group: CheckGroup) -> tuple[list[Check], list[tuple[str, str]]]:
        monkeypatch.setenv("DOCTOR_WAY", way)
        monkeypatch.setenv("RANK", "7")  # as if the doctor itself were a rank
        waited: list[tuple[str, str]] = []
        known = list(run_apart(group, tmp_path, num_gpus=0, waiting=lambda *told: waited.append(told)))
        assert not processes_with(str(tmp_path))
        return known, waited

    return run


def test_a_group_that_dies_answers_for_what_it_did_before(answers) -> None:
    group = CheckGroup(MODULE, ("fine", "raises", "dies", "later"), 60)
    known, waited = answers("dies", group)
    assert [(answer.name, answer.outcome) for answer in known] == [
        ("fine", "ok"),
        ("raises", "unknown"),
        ("dies", "unknown"),
        ("later", "unknown"),
    ]
    assert known[0].detail == "model on rank alone"
    assert "ZeroDivisionError: no number" in known[1].detail
    assert known[2].detail == "its process ended with exit code 3; it said: RuntimeError: out of luck"
    assert waited[0] == ("fine", "starting its process")
    assert {name for name, _ in waited} <= {*group.checks}


def test_ranks_that_do_not_know_the_same_thing_answer_once(answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks fail in one check, and each writes it down; the check after it has no answer."""
    written = [Check("fine", "ok", ""), *[Check("raises", "unknown", "out of memory")] * 2]
    monkeypatch.setattr(apart, "_events", lambda _: written)
    known, _ = answers("dies", CheckGroup(MODULE, ("fine", "raises", "dies"), 60))
    assert [answer.name for answer in known] == ["fine", "raises", "dies"]
    assert known[:2] == written[:2] and known[2].outcome == "unknown"


def test_a_group_that_hangs_is_ended(answers) -> None:
    known, waited = answers("hangs", CheckGroup(MODULE, ("fine", "hangs"), 3))
    assert [(answer.name, answer.outcome) for answer in known][-1] == ("hangs", "unknown")
    assert known[-1].detail.startswith("no answer within 3 s, last: ")
    if known[0].outcome == "ok":  # its process was there in time
        assert known[-1].detail == "no answer within 3 s, last: sleeping"
        assert ("hangs", "sleeping") in waited


DOCTOR = f"""
import argparse
from pathlib import Path
from vlm_rl.doctor import command
from vlm_rl.doctor.apart import CheckGroup
command.MACHINE_CHECKS, command.GROUPS = (), (CheckGroup({MODULE!r}, ("fine", "hangs"), 60),)
command.doctor(argparse.Namespace(model=None, config=None, json=None, runs=Path.cwd()))
"""


@pytest.mark.turn(1, days=2)
def test_a_doctor_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its group is in a session of its own, and would keep a card's memory."""
    environment = {**os.environ, "DOCTOR_WAY": "hangs", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", DOCTOR], env=environment, stdout=subprocess.DEVNULL) as doctor:
        until = time.monotonic() + 120
        while not any("sleeping" in events.read_text() for events in tmp_path.glob("*/*.jsonl")):
            assert doctor.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        assert processes_with(str(tmp_path))
        doctor.send_signal(signal.SIGTERM)
        assert doctor.wait(60) == 128 + signal.SIGTERM
    assert not processes_with(str(tmp_path))
    assert not [*tmp_path.glob("vlm-rl-doctor-*")]


def test_what_a_check_does_is_told_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process of the group, which writes it down, and to the page, which reads it."""
    monkeypatch.setenv("DOCTOR_WAY", "dies")
    written = tmp_path / f"{MODULE}.jsonl"
    written.write_text('{"name": "", "phase": "importing"}\n')
    assert apart._events(written) == [Phase("", "importing")]
    with written.open("a") as file:
        file.write('{"name": "fine", "pha')  # still being written
    assert apart._events(written) == [Phase("", "importing")]
    steps = iter(
        [
            [Phase("", "importing")],
            [Phase("", "importing"), Phase("fine", "counting"), Check("fine", "ok", "")],
        ]
    )
    last = [Phase("", "importing"), Phase("fine", "counting"), Check("fine", "ok", ""), Phase("raises", "dividing")]
    monkeypatch.setattr(apart, "_events", lambda _: next(steps, last))
    monkeypatch.setattr(apart, "_POLL_SECONDS", 0)
    told: list[tuple[str, str]] = []
    group = CheckGroup(MODULE, ("fine", "raises"), 60)
    assert [answer.name for answer in run_apart(group, tmp_path, num_gpus=0, waiting=lambda *t: told.append(t))] == [
        "fine",
        "raises",
    ]
    assert list(dict.fromkeys(told))[:4] == [
        ("fine", "starting its process"),
        ("fine", "importing"),
        ("raises", ""),
        ("raises", "dividing"),
    ]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(answers) -> None:
    known, _ = answers("ranks", CheckGroup(MODULE, ("fine", "one rank fails", "last"), 300, on_every_card=True))
    assert [(answer.name, answer.outcome) for answer in known] == [
        ("fine", "ok"),
        ("one rank fails", "unknown"),
        ("last", "unknown"),
    ]
    assert known[0].detail == "model on rank 0"
    assert "ZeroDivisionError" in known[1].detail and "exit code" in known[2].detail


def test_the_names_are_those_of_the_checks() -> None:
    from vlm_rl.doctor import engine, ranks

    modules = {module.__name__: module for module in (ranks, engine)}
    for group in apart.GROUPS:
        names = [check.__name__.replace("_", " ") for check in modules[group.module].CHECKS]
        assert tuple(names) == group.checks
        assert max(map(len, names)) < 16, "the page has 16 columns for a name"
