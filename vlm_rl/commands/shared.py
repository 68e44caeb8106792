"""What several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

from vlm_rl.errors import UserError

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
SAMPLER_HELP = "auto: vllm where it is installed, else transformers"
EXPERIMENTAL = "experimental on GPUs"  # no GPU has run it: docs/gpu.md
EXPERIMENTAL_COMMAND = "Experimental on GPUs: no GPU has run this command (docs/gpu.md)."


def seed(text: str) -> int:
    """Return a random seed. numpy takes no negative ones."""
    return _whole(text, 0, 2**63 - 1)


def port(text: str) -> int:
    """Return the number of a port."""
    return _whole(text, 1, 65535)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def add_output_options(command: argparse.ArgumentParser) -> None:
    amount = command.add_mutually_exclusive_group()
    amount.add_argument(
        "-q",
        "--quiet",
        action="store_const",
        dest="output",
        const="quiet",
        help="print no stages, steps and progress",
    )
    amount.add_argument(
        "-v",
        "--verbose",
        action="store_const",
        dest="output",
        const="verbose",
        help="print what vLLM and DeepSpeed say",
    )


def add_judge_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--judge",
        metavar="URL",
        help="with --mode official: ask this OpenAI-compatible endpoint (up to /v1) what the authors ask their model",
    )
    command.add_argument("--judge-model", default="", help="its name there; not needed where there is only one")
    command.add_argument("--judge-key-env", default="", help="the environment variable that holds the API key")
    command.add_argument(
        "--judge-cache",
        type=Path,
        help="folder of replies that are not asked for again (default: beside the results)",
    )


def refuse_bare_srun() -> None:
    """Raise UserError if srun has started several tasks without torchrun: each would be a run of its own.

    The step's number of tasks is what counts. SLURM_NTASKS is set in a batch script too, which is one process.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "RANK" in os.environ:
        return
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    from vlm_rl.run.terminal import start_command

    first_node = '"$(scontrol show hostnames | head -n 1)"'
    command = start_command(sys.argv[1:], -(-tasks // nodes), num_nodes=nodes, first_node=first_node)
    raise UserError(
        f"srun has started {tasks} tasks, and each would be a run of its own: let it start one a node, and torchrun "
        f"the ranks: srun --ntasks {nodes} --ntasks-per-node 1 {command}"
    )
