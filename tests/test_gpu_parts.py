"""perf/gpu.sh, a day with a card: its bounds and verdicts, and its parts at tiny size on a CPU."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes import processes_with
from tests.helpers.rotation import todays
from vlm_rl.config import load_config

PERF = Path(__file__).parents[1] / "perf"


@pytest.fixture(scope="module")
def parts() -> Any:
    sys.path.insert(0, str(PERF))
    try:
        yield import_module("gpu_parts")
    finally:
        sys.path.remove(str(PERF))


def test_what_only_a_card_runs_are_keys_of_a_run(parts: Any, tmp_path: Path) -> None:
    file = tmp_path / "step.yaml"
    at = parts.Setting("cuda", tmp_path)
    file.write_text(yaml.safe_dump(parts.step_config(at, tmp_path, tmp_path, tmp_path / "run")))
    for keys in (*parts.SWITCHES.values(), parts.FASTEST, parts.LORA + parts.LORA_ON_CARD):
        load_config(file, [key.format(model=tmp_path) for key in keys])


@pytest.mark.parametrize(
    ("value", "bound", "is_missed"),
    [
        (0.45, {"at_least": 0.45}, False),
        (0.449, {"at_least": 0.45}, True),
        (16, {"at_most": 16}, False),
        (16.1, {"at_most": 16}, True),
        (0.9, {"within": 0.1}, False),
        (1.11, {"within": 0.1}, True),
        *((math.nan, bound, True) for bound in ({"at_least": 0}, {"at_most": 0}, {"within": 0.1})),
    ],
)
def test_what_was_not_measured_misses_its_bound(
    parts: Any, value: float, bound: dict[str, float], is_missed: bool
) -> None:
    assert parts.misses(value, bound) == is_missed


@pytest.mark.parametrize(
    ("measured", "on_card", "last"),
    [
        ({"gap of log-probs a token": 0.01, "steps that were skipped": 0}, False, "pass"),
        (
            {"gap of log-probs a token": 0.2, "steps that were skipped": 0},
            False,
            "fall short: gap of log-probs a token",
        ),
        ({"gap of log-probs a token": 0.01}, False, "fall short: steps that were skipped"),
        (
            {"gap of log-probs a token": 0.01, "steps that were skipped": 0, "peak over planned memory": 1.2},
            True,
            "fall short: peak over planned memory",
        ),
    ],
)
def test_the_last_line_is_the_verdict(
    parts: Any, measured: dict[str, float], on_card: bool, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.print_verdict("lora-7b", measured, on_card=on_card) == (last == "pass")
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize("on_card", [False, True])
def test_a_part_of_what_is_not_installed_falls_short_on_a_card(
    parts: Any, on_card: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.print_verdict("versus-trl", None, on_card=on_card) is not on_card
    assert capsys.readouterr().out.splitlines()[-1].startswith("fall short: " if on_card else "pass: ")


@pytest.mark.parametrize("on_card", [False, True])
def test_a_part_that_failed_shows_what_it_measured_before(
    parts: Any, on_card: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"gap of log-probs a token": 0.01, "steps that were skipped": 0, "peak over planned memory": 1}
    assert not parts.print_verdict("lora-7b", measured, on_card=on_card, failed=["exit code 1"])
    lines = capsys.readouterr().out.splitlines()
    assert "| gap of log-probs a token | 0.01 | at most 0.1 |" in lines
    assert lines[-1] == "fall short: exit code 1"


# Holds the card, as an engine of the doctor's, in a session of its own, and does not end by SIGTERM.
HOLDER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[1]], start_new_session=True)
print("step 1", flush=True)
time.sleep(1000)
"""


def test_a_command_that_takes_too_long_is_ended_and_its_output_kept(parts: Any, tmp_path: Path) -> None:
    at = parts.Setting("cpu", tmp_path, limit=5)
    assert parts.command(at, "-c", HOLDER, tmp_path, log="said.txt") == "step 1\n"
    assert (tmp_path / "said.txt").read_text() == "step 1\n"
    assert at.failed == ["was ended after 5 s"]
    assert not processes_with(str(tmp_path))


def test_a_command_that_said_enough_is_ended_and_has_not_failed(parts: Any, tmp_path: Path) -> None:
    at = parts.Setting("cpu", tmp_path)
    assert parts.command(at, "-c", HOLDER, tmp_path, log="said.txt", is_enough=lambda: True) == "step 1\n"
    assert not at.failed and not processes_with(str(tmp_path))


TERMINATED = f"""
import os, sys
sys.path.insert(0, {str(PERF)!r})
import gpu_parts
words = ("-c", {HOLDER!r}, os.environ["TMPDIR"])
gpu_parts.PARTS = {{"doctor": lambda at: gpu_parts.command(at, *words, log="said.txt")}}
sys.argv[1:] = ["doctor", "--device", "cpu"]
gpu_parts.main()
"""


@pytest.mark.turn(0, days=2)
def test_a_part_that_is_terminated_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """The part after it needs the card and the disk."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED], env=environment, stdout=subprocess.PIPE, text=True
    ) as part:
        assert part.stdout is not None and part.stdout.readline() == "step 1\n"
        until = time.monotonic() + 60
        while len(processes_with(str(tmp_path))) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert [*tmp_path.glob("*/doctor")]
        part.send_signal(signal.SIGTERM)
        assert part.wait(60) == 128 + signal.SIGTERM
    assert not processes_with(str(tmp_path)) and not [*tmp_path.glob("*/doctor")]


RECORD = {"rollout/logprob_gap": 0.01, "steps/skipped": 0, "step_time": 10, "num_tokens": 500, "timing/rollout": 5}


@pytest.mark.parametrize(
    ("steps", "measured"),
    [
        (0, set()),
        (1, {"gap of log-probs a token", "steps that were skipped", "peak over planned memory"}),
        (2, {"seconds of a step", "rollout, tokens a second", "update, MFU"}),
    ],
)
def test_every_step_that_a_run_made_is_in_the_table(parts: Any, steps: int, measured: set[str]) -> None:
    found = parts.of_steps([RECORD] * steps)
    assert measured <= found.keys() and ("seconds of a step" in found) == (steps > 1)
    assert found.get("seconds of a step", 10) == 10 and found.get("rollout, tokens a second", 100) == 100


def test_output_that_is_no_text_ends_no_part(parts: Any, tmp_path: Path) -> None:
    at = parts.Setting("cpu", tmp_path)
    code = "import sys; sys.stdout.buffer.write(bytes([255, 10]))"
    assert parts.command(at, "-c", code, log="said.txt") == "\ufffd\n"
    assert not at.failed


def gpu_parts(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PERF / "gpu_parts.py", *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_folder_of_an_earlier_day_is_named(tmp_path: Path) -> None:
    done = gpu_parts("doctor", "--device", "cpu", "--work", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"--work {tmp_path} is there already: name a new folder")


@pytest.mark.slow
def test_a_machine_without_git_has_no_commit(tmp_path: Path) -> None:
    done = gpu_parts("--about", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "; no git; " in done.stdout.splitlines()[-1]


def test_the_summary_tells_a_part_that_falls_short_from_one_that_failed(parts: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *doctor*) exit {parts.SHORT};; *real*) exit 1;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", PERF / "gpu.sh", "doctor", "real", "quickstart"],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    verdicts = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert verdicts == ["falls short", "failed with exit code 1", "pass"]
    assert done.returncode == 1


def test_a_part_that_misses_a_bound_has_its_own_exit_code(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PARTS", {"doctor": lambda at: {"checks that are off": 1}})
    monkeypatch.setattr(parts, "leave_at_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_parts.py", "doctor", "--device", "cpu", "--work", str(tmp_path / "new")])
    assert parts.main() == parts.SHORT


@pytest.mark.slow
def test_ways_of_an_update_do_not_all_begin_where_their_script_was_killed() -> None:
    """Their turns come through a pipe, which then ends."""
    done = subprocess.run(
        [sys.executable, PERF / "gpu_update.py", "--device", "cpu", "--size", "tiny", "--way", "default"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_part_has_bounds_and_a_line_in_the_script(parts: Any) -> None:
    assert yaml.safe_load((PERF / "gpu_thresholds.yaml").read_text()).keys() == parts.PARTS.keys()
    assert f"all=({' '.join(parts.PARTS)})" in (PERF / "gpu.sh").read_text()


# `real` has its test in tests/real.
PAIRS = (
    ("quickstart", "check-3b"),
    ("learner-3b", "rollout-3b"),
    ("step-3b", "switches"),
    ("doctor", "lora-7b", "versus-trl"),
)


@pytest.mark.slow
@pytest.mark.parametrize("names", todays(PAIRS, days=len(PAIRS)), ids=" ".join)
def test_every_part_passes_at_tiny_size(names: Sequence[str]) -> None:
    """Some of them a day; `DEVICE=cpu bash perf/gpu.sh` runs all, in six minutes."""
    environment = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", PERF / "gpu.sh", *names], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [f"| {name} | pass |" in done.stdout for name in names] == [True] * len(names)
