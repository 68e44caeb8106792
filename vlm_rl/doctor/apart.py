"""Checks that would disturb each other or this process, each group of them in processes of its own.

    python -m vlm_rl.doctor.apart MODULE FOLDER        # what `run_apart` starts, under torchrun where there are ranks

The module has CHECKS, and SUBJECT, which is made of FOLDER/model, a tiny model. The answers, and what is done until
then, are appended to FOLDER/MODULE.jsonl, and what is printed goes to FOLDER/MODULE.log. A group that hangs or dies
keeps no other from running: what it did not answer could not be checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import psutil

from vlm_rl.doctor.check import Check, Waiting, run_checks

_POLL_SECONDS = 0.2
_ENDING_SECONDS = 10  # for killed processes to give back what they hold


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Checks that share processes, in their order."""

    module: str
    checks: tuple[str, ...]  # their names in the module's order, for those that are never answered
    seconds: float  # limit of time for all of them
    on_every_card: bool = False  # one rank for each GPU, two on a CPU


@dataclass(frozen=True, slots=True)
class Phase:
    """What a group is doing."""

    name: str  # of the check; empty before the first
    phase: str


GROUPS = (
    CheckGroup("vlm_rl.doctor.ranks", ("collectives", "ZeRO 2", "ZeRO 3"), 300, on_every_card=True),
    CheckGroup("vlm_rl.doctor.engine", ("attention fp32", "attention bf16", "sync", "sampling"), 600),
)


def run_apart(group: CheckGroup, folder: Path, *, num_gpus: int, waiting: Waiting) -> Iterator[Check]:
    """Start a group and yield its answers as they come, then one for each check that it never answered.

    Args:
        group: the checks.
        folder: holds the tiny model; the group writes its files there.
        num_gpus: of this machine.
        waiting: called again and again with the check that is being waited for, and with what it does.
    """
    command = [sys.executable, "-m", "vlm_rl.doctor.apart", group.module, str(folder)]
    if group.on_every_card:
        ranks = ["--standalone", f"--nproc-per-node={num_gpus or 2}"]
        command[1:2] = ["-m", "torch.distributed.run", *ranks, "-m"]
    left, num_read, doing = list(group.checks), 0, Phase("", "starting its process")
    log = folder / f"{group.module}.log"
    ended = ""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment(), start_new_session=True)
    begun = time.monotonic()
    try:
        while left and not ended:
            if doing.name not in left:
                doing = Phase(left[0], "" if doing.name else doing.phase)
            waiting(doing.name, doing.phase)
            if (code := process.poll()) is not None:
                ended = f"its process ended with exit code {code}"
            elif time.monotonic() - begun > group.seconds:
                ended = f"no answer within {group.seconds:g} s" + (f", last: {doing.phase}" if doing.phase else "")
            else:
                time.sleep(_POLL_SECONDS)
            for event in _events(folder / f"{group.module}.jsonl")[num_read:]:
                num_read += 1
                if isinstance(event, Phase):
                    doing = event
                elif event.name in left:  # several ranks may say that they do not know
                    left.remove(event.name)
                    yield event
    finally:
        end_family(process)
    for name in left:
        yield Check(name, "unknown", f"{ended}{_last_words(log)}", "report this, with the versions above")


def _environment() -> dict[str, str]:
    """Return the environment without the ranks of a torchrun around this process."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in ranks}


def _events(file: Path) -> list[Check | Phase]:
    """Return the whole lines of the file, which may still be written."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Phase(**event) if "phase" in event else Check(**event) for event in events]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines
    return f"; it said: {errors[-1]:.200}" if errors else ""


def end_family(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End the process and all that it started, and wait for them; torchrun's ranks are in sessions of their own."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family = [*parent.children(recursive=True), parent]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    until = time.monotonic() + _ENDING_SECONDS
    while any(map(_is_there, family)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _is_there(process: psutil.Process) -> bool:
    """Tell whether a process still holds memory, as that of a card; a zombie, whom nobody waits for, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- inside the group's processes ---------------------------------------------------------------------


def main(name: str, folder: Path) -> int:
    """Answer the checks of a module, each as soon as it is known."""
    is_main, alone = os.environ.get("RANK", "0") == "0", os.environ.get("WORLD_SIZE", "1") == "1"

    def write(event: Check | Phase) -> None:
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def waiting(check: str, phase: str) -> None:
        if is_main:
            write(Phase(check, phase))

    waiting("", "importing torch and the libraries")
    module = import_module(name)
    for answer in run_checks(module.CHECKS, module.SUBJECT(folder / "model"), waiting=waiting):
        if is_main or answer.outcome == "unknown":
            write(answer)
        if answer.outcome == "unknown" and not alone:
            return 1  # the other ranks may wait for this one: torchrun ends them
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # what is left of an engine or of a process group need not be taken down
