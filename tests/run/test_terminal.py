"""The terminal's lines and tables, with and without a terminal."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections import defaultdict

import pytest
from rich.console import Console

from tests.helpers.example_run import build_run
from tests.helpers.rollout_rows import rollout_row
from vlm_rl.run.terminal import SAMPLES, StepLine, clock, progress, resume_command, sample_table, visible

METRICS = {
    "reward": 1.25,
    "rewards/accuracy/mean": 0.75,
    "completions/mean_length": 41.5,
    "entropy": 0.5,
    "rollout/logprob_gap": 3e-7,
    "grad_norm": 0.9,
    "step_time": 2.0,
}


ASKED_OF_ALL = defaultdict(lambda: ("Q", "7"))


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)


def text_of(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_a_step_is_one_plain_line_with_its_numbers():
    where = console()
    with StepLine(total=60, console=where) as line:
        line.phase(12, "rollout")
        line.done(12, METRICS)
    (shown,) = text_of(where).splitlines()
    for part in ("12/60", "1.250", "0.75", "41.5", "0.500", "3.0e-07", "9.00e-01", "2.0 s", "ETA"):
        assert part in shown
    assert "skipped" not in shown


def test_the_time_left_leaves_the_first_steps_one_time_costs_out(monkeypatch):
    """60 s pass before the first line, of which the step took 4; later steps take 2 s, one a save of 3 s more."""
    now = 0.0
    monkeypatch.setattr("vlm_rl.run.terminal.time.monotonic", lambda: now)
    where = console()
    with StepLine(total=10, console=where) as line:
        for step, (passed, took) in enumerate([(60, 4), (2, 2), (5, 2)], 1):
            now += passed
            line.done(step, {**METRICS, "step_time": took})
    shown = [text.rpartition("ETA ")[2] for text in text_of(where).splitlines()]
    assert shown == [clock(9 * 4), clock(8 * 2), clock(7 * 3.5)]


def test_absent_and_undefined_numbers_are_dashes_in_the_same_columns():
    where = console()
    with StepLine(total=60, console=where) as line:
        line.done(1, METRICS)
        line.done(2, {"entropy": math.nan, "steps/skipped": 2.0, "step_time": 2.0})
    full, empty = text_of(where).splitlines()
    assert empty.count("–") == 6 and "skipped 2" in empty
    assert full.index("gnorm") == empty.index("gnorm")


def test_a_terminal_sees_the_phase_and_gets_its_cursor_back():
    where = console(terminal=True)
    with pytest.raises(RuntimeError, match="boom"), StepLine(total=60, console=where) as line:
        line.phase(12, "grading")
        raise RuntimeError("boom")
    shown = text_of(where)
    assert "step 12/60  grading" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor: hidden, then shown


def test_what_happens_beside_a_phase_is_shown_behind_it_until_it_is_over():
    """The thread of a save may say it before there is a phase."""
    where = console(terminal=True)
    with StepLine(total=60, console=where) as line:
        line.beside("saving 1 of 2 GB")
        line.phase(12, "rollout")
        line.note("a line, before which the live one is drawn and removed")
        assert "step 12/60  rollout …  saving 1 of 2 GB" in text_of(where)
        line.phase(12, "update")
        line.beside("saving 2 of 2 GB")
        line.note("another")
        assert "step 12/60  update …  saving 2 of 2 GB" in text_of(where)
        line.beside("")
        shown = len(text_of(where))
        line.phase(12, "sync")
    assert "sync …" in text_of(where)[shown:] and "saving" not in text_of(where)[shown:]


def test_a_log_gets_nothing_of_what_happens_beside():
    where = console()
    with StepLine(total=60, console=where) as line:
        assert not line.is_live
        line.beside("saving 1 of 2 GB")
        line.phase(12, "rollout")
    assert text_of(where) == ""


def test_a_rollout_says_how_far_it_is_and_what_the_last_step_took():
    where = console(terminal=True)
    with StepLine(total=60, console=where) as line:
        line.done(11, {**METRICS, "timing/rollout": 60.0, "timing/update": 30.5, "timing/sync": 2.0})
        line.phase(12, "rollout")
        line.inside("312 of 1,024 responses, 4,180 tokens/s, longest 2,900")
        line.note("a line, before which the live one is drawn and removed")
        shown = text_of(where)
        assert "step 12/60  rollout …  312 of 1,024 responses, 4,180 tokens/s, longest 2,900" in shown
        assert "(last step: rollout 60.0 s, update 30.5 s, sync 2.0 s)" in shown
        line.phase(12, "update")
        line.note("another")
        assert "responses" not in text_of(where)[len(shown) :]


def test_a_log_hears_from_inside_a_step_once_a_minute(monkeypatch):
    now = 0.0
    monkeypatch.setattr("vlm_rl.run.terminal.time.monotonic", lambda: now)
    where = console()
    with StepLine(total=60, start=11, console=where) as line:
        for second in range(150):
            now = float(second)
            line.inside(f"{second} of 1,024 responses")
    assert text_of(where).splitlines() == [f"step 12/60  {second} of 1,024 responses" for second in (60, 120)]


def test_a_note_is_one_line_taken_literally_after_the_live_line_is_gone():
    where = console(terminal=True)
    with StepLine(total=60, console=where) as line:
        line.phase(12, "evaluation")
        line.note("eval toy-test: 0.75 [0.70, 0.80]\x1b[2J")
        shown = text_of(where)
    assert shown.endswith("eval toy-test: 0.75 [0.70, 0.80]<1b>[2J\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_samples_show_each_prompts_best_and_worst():
    rows = [
        rollout_row(prompt_id=f"p{i // 4}", response_index=i % 4, reward=r)
        for i, r in enumerate([0, 0, 0, 0, 1, 0, 0.5, 0] + 2 * [0, 0.5, 0.5, 0])
    ]
    where = console()
    asked = {"p0": ("Which?", "A"), "p1": ("How many?", "seven"), "p2": ("Where?", "B"), "p3": ("When?", "C")}
    sample_table(rows, asked, step=3, console=where)
    best, worst, *others = [line.split() for line in text_of(where).splitlines() if "correct" in line]
    assert best[:6] == ["p1", "How", "many?", "seven", "correct", "1.00"]
    assert len(others) == SAMPLES - 2 and "Which?" not in text_of(where)  # p0 teaches nothing
    assert worst[:3] == ["p1", "correct", "0.00"], "the question stands beside the first"


def test_a_long_id_is_its_end():
    where = console()
    sample_table([rollout_row(prompt_id="virl39k/train/00012345")], ASKED_OF_ALL, step=3, console=where)
    assert "…in/00012345  Q" in text_of(where)


def test_model_text_cannot_drive_the_terminal():
    hostile = "\x1b]0;title\x07\x1b[2J[red]x[/red]\r\n\x9b1A\u202e"
    where = console()
    row = rollout_row(text=hostile, extracted="\x1b[1m", prompt_id=hostile)
    sample_table([row], {hostile: (hostile, hostile)}, step=1, console=where)
    shown = text_of(where)
    assert not any(char in shown for char in "\x1b\x07\r\x9b\u202e")
    assert "[red]x[/red]" in shown and "<1b>" in shown
    assert visible("a\nb\x00") == "a⏎b<00>"


@pytest.mark.parametrize(
    ("ranks", "here", "start"),
    [
        ("1", "1", "vlm-rl"),
        ("8", "8", "torchrun --nproc-per-node 8 --shutdown-timeout 1800 -m vlm_rl"),
        ("16", "8", "torchrun ... --shutdown-timeout 1800 -m vlm_rl"),
    ],
)
def test_the_command_that_resumes(monkeypatch, ranks, here, start):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert resume_command("runs/a b") == f"{start} train 'runs/a b' --resume"


def test_progress_without_a_terminal_ends_with_one_line():
    where = console()
    with progress("grading [b]", total=3, console=where) as advance:
        for _ in range(3):
            advance(note="acc 0.5")
    (shown,) = text_of(where).splitlines()
    assert shown.startswith("grading [b]: 3/3 in ") and shown.endswith("acc 0.5")


def test_progress_on_a_terminal_counts():
    where = console(terminal=True)
    with progress("grading", total=3, console=where) as advance:
        advance(2)
        advance(1, note="done")
    assert "3/3" in text_of(where) and "done" in text_of(where)


def test_only_rank_0_prints():
    code = "from vlm_rl.run.terminal import make_console; make_console().print('hello')"
    for rank, expected in (("0", "hello\n"), ("1", "")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"RANK": rank, "PATH": ""}, capture_output=True, text=True, check=True
        )
        assert done.stdout == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (727, "12:07"), (11100, "3:05:00"), (-1, "0:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_stored_rows_make_a_table(tmp_path):
    run = build_run(tmp_path / "run", steps=1, eval_steps=())
    rows = [type(rollout_row())(**record) for record in run.rollouts(1).to_pylist()]
    where = console()
    sample_table(rows, ASKED_OF_ALL, step=1, console=where)
    assert text_of(where).count("toy-1-") == 6
