"""How the runs of a study are started: on this machine, or by a command of the user's on machines of a list."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.run.cores import allowed_cores

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_CARDS = Path("/proc/driver/nvidia/gpus")  # has a folder for each card


@dataclass(frozen=True, slots=True)
class Launch:
    """How runs are started, `jobs` at a time.

    Raises UserError for settings that do not go together.
    """

    jobs: int = 1
    ranks: int = 1  # of each run
    template: str = ""  # a command with {command}, and {machine} for one of `machines`; "": start it here
    machines: tuple[str, ...] = ()  # host names, or whatever {machine} stands for; each has one run at a time

    def __post_init__(self) -> None:
        for name, number in (("--jobs", self.jobs), ("--ranks", self.ranks)):
            if number < 1:
                raise UserError(f"{name} is {number}: give 1 or more")
        names = set(_PLACEHOLDER.findall(self.template))
        if unknown := names - {"command", "machine"}:
            raise UserError(
                f"--launch has the unknown placeholder {{{min(unknown)}}}: there are {{command}}, the command of a "
                "run, and {machine}"
            )
        if self.template and "command" not in names:
            raise UserError("--launch does not say where the command goes: write {command} there")
        try:
            shlex.split(self.template)
        except ValueError as error:
            raise UserError(f"--launch {self.template!r} cannot be split into words: {error}") from None
        if ("machine" in names) != bool(self.machines):
            raise UserError("--machines and {machine} in --launch go together: give both or neither")
        if self.machines and self.jobs > len(self.machines):
            raise UserError(f"--jobs is {self.jobs}, but --machines names {len(self.machines)}: one run for each")
        cards = visible_cards()
        if not self.template and self.jobs * self.ranks > len(cards) > 0:
            fewer = [name for name, number in (("--jobs", self.jobs), ("--ranks", self.ranks)) if number > 1]
            raise UserError(
                f"{self.jobs} x {self.ranks} ranks need {self.jobs * self.ranks} GPUs (visible: {len(cards)}): give "
                f"fewer {' or '.join(fewer)}; vlm-rl study also takes other machines, with --launch and --machines"
            )

    def words(self, arguments: Sequence[str], slot: int) -> list[str]:
        """Return the command that runs `vlm-rl ARGUMENTS` as the slot-th of the jobs that run at a time.

        A word {command} of the template becomes the words of the command. Inside a longer word it becomes one text
        that a shell splits again.
        """
        command = [*self._python(), "-m", "vlm_rl", *arguments]
        if not self.template:
            return command
        machine = self.machines[slot] if self.machines else ""
        words = []
        for word in shlex.split(self.template):
            filled = word.replace("{machine}", machine)
            words += command if filled == "{command}" else [filled.replace("{command}", shlex.join(command))]
        return words

    def environment(self, slot: int) -> dict[str, str]:
        """Return the variables that divide this machine's cores and GPUs among the jobs; none with a template."""
        if self.template:
            return {}
        threads = max(1, allowed_cores() // (self.jobs * self.ranks))
        cards = visible_cards()[slot * self.ranks : (slot + 1) * self.ranks]
        return {"OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {})

    def _python(self) -> list[str]:
        """Return the words that start Python on each rank, with time to save on a stop and a port of its own."""
        if self.ranks == 1:
            return [sys.executable]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
        ]
        return [*torchrun, "--shutdown-timeout", "1800"]


def visible_cards() -> list[str]:
    """Return the GPUs that a process started here may use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # CUDA stops at the first negative one: -1 hides all.
        return list(takewhile(lambda card: not card.startswith("-"), filter(None, visible.split(","))))
    return [str(number) for number in range(len(list(_CARDS.glob("*"))))]
