"""The command line `vlm-rl`. Its commands are added and run in vlm_rl.commands.

A UserError is printed as its message and exits with 2 (commands.refusal), and so does a full disk. Any other
exception is our fault and keeps its traceback. Heavy imports happen inside the function that runs a command, never
before the arguments are parsed.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import vlm_rl
from vlm_rl.commands import measuring, papers, preparing, reporting, training
from vlm_rl.commands.examples import examples_of
from vlm_rl.commands.missing_library import install_advice
from vlm_rl.commands.refusal import refuse
from vlm_rl.errors import DISK_ERRORS, FILE_LIMITS, UserError, is_any_of
from vlm_rl.untrusted.plain_files import check_plain, in_home

# Where the error names a path: missing rights, and a file in the place of a folder or the other way round.
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without arguments, those of the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _refuse_hub_kernels()
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and "overrides" in options and all("=" in word and not word.startswith("-") for word in rest):
        options.overrides += rest  # key=value after an option: argparse no longer expects a positional argument there
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if output := getattr(options, "output", None):
        os.environ["VLM_RL_OUTPUT"] = output  # read by run/terminal.py, and before libraries are imported
    try:
        _settle_paths(options)
        options.command(options)
        _leave_ranks_at_exit()
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
    except BrokenPipeError:  # `vlm-rl ... | head`: the reader has left
        _discard_output()
        return 141  # what a shell reports for a process ended by SIGPIPE
    except UserError as error:
        return refuse(str(error))
    except ModuleNotFoundError as error:
        if (advice := install_advice(error.name or "")) is None:
            raise
        return refuse(advice)
    except Exception as error:
        advice = "free some space, make the place writable, or choose a different one"
        number = error.errno if isinstance(error, OSError) else None
        if is_any_of(DISK_ERRORS, error):
            _discard_output()  # it may be what could not be written
        elif is_any_of(FILE_LIMITS, error):
            advice = "allow more open files (ulimit -n), then give this command again"
        elif isinstance(error, FileNotFoundError) and number is None:  # safetensors': a file did not open
            advice = "put the file in its place, or allow more open files (ulimit -n)"
        elif number not in PATH_ERRORS or getattr(error, "filename", None) is None:
            raise
        return refuse(f"{' '.join(str(error).split())}: {advice}")
    except KeyboardInterrupt as stop:
        if not stop.args:  # where it was caught, nobody has said what is kept and how to continue
            print("vlm-rl: interrupted", file=sys.stderr)
        return 130
    return 0


def _settle_paths(options: argparse.Namespace) -> None:
    """Let ~ and $HOME begin the path of an option. Raise UserError for a pipe, a device or a socket in its place.

    Reading one may wait for ever or never end, and a result would be moved into the place of a device.
    """
    for name, value in vars(options).items():
        setattr(options, name, [*map(_settled, value)] if isinstance(value, list) else _settled(value))


def _settled(value: Any) -> Any:
    if isinstance(value, str):
        return in_home(value)
    if isinstance(value, Path):
        value = Path(in_home(str(value)))
        check_plain(value)
    return value


def _refuse_hub_kernels() -> None:
    """Let the package `kernels` count as not installed: with it transformers downloads compiled code and runs it.

    A model's configuration can ask for that with a word such as flash_attention_2.
    """
    os.environ["USE_HUB_KERNELS"] = "NO"  # for processes that this one starts
    sys.modules["kernels"] = None  # pyright: ignore[reportArgumentType]


def _leave_ranks_at_exit() -> None:
    """Let this process leave the ranks that a command joined. A command without ranks loads no torch for this.

    Not before: another engine in this process would still look for its groups.
    """
    if "torch" in sys.modules:
        from vlm_rl.distributed import leave_ranks

        atexit.register(leave_ranks)


def _discard_output() -> None:
    """Let what is still to be printed go nowhere: another failure at the interpreter's exit would hide the first."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of an option, where it has one and the help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_said = "default" in (action.help or "") or action.default in (None, False, "", [], argparse.SUPPRESS)
        return action.help if is_said else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the lines of examples, which are there to be copied."""
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class _CommandParser(argparse.ArgumentParser):
    """A parser, and those of its commands, whose help shows defaults."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **options})
        self.epilog = self.epilog or examples_of(self.prog)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuse an option that `eval` does not have: argparse would read its value as the name of an action."""
        actions = next((a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)
        if args is not None and actions is not None and not actions.required:
            own = takewhile(lambda word: word not in actions.choices, args)
            for name in (word.partition("=")[0] for word in own if word.startswith("--")):
                if not any(known.startswith(name) for known in self._option_string_actions):
                    near = get_close_matches(name, self._option_string_actions, n=1)
                    self.error(f"there is no {name}; {f'did you mean {near[0]}?' if near else '--help lists all'}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Ask for the name that was meant, where one of those that may stand here is close to the one given."""
        if action.choices is not None and value not in action.choices:
            near = get_close_matches(str(value), [str(choice) for choice in action.choices], n=1)
            if near:
                raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near[0]!r}?")
        super()._check_value(action, value)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, in the order in which a new user meets them."""
    parser = _CommandParser(prog="vlm-rl", description="Reinforcement learning with verifiable rewards.")
    parser.add_argument("--version", action="version", version=f"vlm-rl {vlm_rl.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        preparing.add_prepare,
        preparing.add_init,
        preparing.add_config,
        preparing.add_plan,
        training.add_sft,
        training.add_train,
        training.add_serve,
        measuring.add_eval,
        measuring.add_score,
        measuring.add_grade,
        training.add_study,
        papers.add_paper,
        reporting.add_report,
        reporting.add_demo,
        reporting.add_track,
        reporting.add_export,
        training.add_quickstart,
        preparing.add_doctor,
    ):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
