"""A group of checks that test_apart.py runs in processes of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

from vlm_rl.doctor.check import Check, phase


def fine(subject: Path) -> Check:
    return Check("fine", "ok", f"{subject.name} on rank {os.environ.get('RANK', 'alone')}")


def raises(subject: Path) -> Check:
    raise ZeroDivisionError("no number")


def dies(subject: Path) -> Check:
    print("RuntimeError: out of luck", flush=True)
    os._exit(3)


def hangs(subject: Path) -> Check:
    phase("sleeping")
    time.sleep(1000)
    return Check("hangs", "ok", "")


def one_rank_fails(subject: Path) -> Check:
    if os.environ["RANK"] != "1":
        return hangs(subject)
    while not any('"outcome"' in answers.read_text() for answers in subject.parent.glob("*.jsonl")):
        time.sleep(0.01)  # rank 0 has yet to write down its answer to the check before
    return raises(subject)


SUBJECT = Path
WAYS = {"dies": (fine, raises, dies, fine), "hangs": (fine, hangs), "ranks": (fine, one_rank_fails, fine)}
CHECKS = WAYS[os.environ["DOCTOR_WAY"]]
