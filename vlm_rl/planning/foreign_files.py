"""Files of other trainers as flat settings: YAML, and the shell scripts by which people start them.

    file = read_foreign(Path("grpo.sh"))
    file.trainer, file.settings        # "ms-swift", {"num_generations": 8, "model": "Qwen/Qwen2.5-7B-Instruct", ...}

A script is read, never run: assignments of plain values are put in for its variables, and the words of the command
that starts the trainer are its settings. What a shell would compute, or takes from its environment, is no value here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_rl.config import leaves
from vlm_rl.config.foreign_names import trainer_of
from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import in_home, read_small
from vlm_rl.untrusted.yaml_text import read_yaml

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
_COMPUTED = re.compile(r"\$\(\(.*?\)\)|\$\([^()]*\)?|`[^`]*`?")
_WORDS = re.compile(r"\$\w+|\$\{[^}]*\}")
_BLANK = "\N{NO-BREAK SPACE}"  # in place of a blank of these
_LEFT_TO_THE_SHELL = re.compile(r"\$[\w{(@*]|`")  # in a value: the shell would put something in its place
_COMMANDS = {  # words of a script -> whose it is
    r"swift\s+rlhf|swift\.cli|megatron\s+rlhf": "ms-swift",
    r"openrlhf\.cli\.train_ppo": "OpenRLHF",
    r"verl\.trainer\.main_\w+": "verl",
    r"verl\.trainer\.main\b": "EasyR1",
    r"\btrl\s+grpo\b|grpo\w*\.py": "TRL",
}
_COMMAND = "|".join(_COMMANDS)
_ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "MAX_PIXELS", "MIN_PIXELS")  # variables that are settings
_LONGEST_TEXT = 200  # lines between quotes
_LAUNCHERS = {  # words before the trainer's that say how many processes there are: torchrun's, accelerate's
    "nproc_per_node": "NPROC_PER_NODE",
    "nproc-per-node": "NPROC_PER_NODE",
    "num_processes": "NPROC_PER_NODE",  # of all machines
    "nnodes": "NNODES",
}
_ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "&>"}  # of a command
_SWIFT_KEYS = {"rlhf_type", "train_type", "tuner_type", "reward_funcs", "lora_rank"}
_TRL_KEYS = {"model_name_or_path", "num_generations", "max_completion_length", "use_peft", "vllm_mode"}


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of another trainer."""

    path: Path
    trainer: str  # one of foreign_names.TRAINERS
    settings: Mapping[str, Any]  # by dotted key
    unread: Mapping[str, str] = field(default_factory=dict)  # by key: what has no value in the file, and where


def read_foreign(path: Path) -> ForeignFile:
    """Read a file of another trainer. Raises UserError if it cannot be read, or is none that is known."""
    if not path.is_file():
        raise UserError(f"--from {path} is not there: give a YAML file or a shell script of another trainer")
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path)
    try:
        return _read_script(path, read_small(path))
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--from {path} cannot be read as a shell script: {error}") from None


def _read_yaml(path: Path) -> ForeignFile:
    try:
        tree = read_yaml(read_small(path))
    except (OSError, ValueError) as error:
        raise UserError(f"--from {path} cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"--from {path} is no mapping of settings: give the file that the other trainer was started with"
        )
    flat = {str(key): value for key, value in leaves(tree)}
    unread = {key: str(value) for key, value in flat.items() if "${" in str(value)}
    if _SWIFT_KEYS & {*tree} and "model" in tree and not isinstance(tree["model"], dict):
        trainer = "ms-swift"
    elif _TRL_KEYS & {*tree}:
        trainer = "TRL"
    elif (trainer := trainer_of(tree)) is None:
        raise UserError(
            f"--from {path} looks like none of the files that are known: EasyR1 has a section worker, verl "
            "actor_rollout_ref, TRL keys such as num_generations, ms-swift rlhf_type; OpenRLHF is started by a script"
        )
    settings = {key: _scalar(value) for key, value in flat.items() if key not in unread}
    return ForeignFile(path, trainer, settings, unread)


def _read_script(path: Path, text: str) -> ForeignFile:
    known = {"HOME": str(Path.home())}
    for line in _lines(text):
        command = next((name for pattern, name in _COMMANDS.items() if re.search(pattern, line)), None)
        if command is None:
            if match := _ASSIGNMENT.fullmatch(line):
                known.pop(match[1], None)
                if not _COMPUTED.search(line) and not match[2].startswith("("):
                    known[match[1]] = _filled(" ".join(shlex.split(match[2], comments=True)), known)
                elif match[1] in _ENVIRONMENT:
                    known[match[1]] = match[2]
            continue
        whole = _COMPUTED.sub(lambda match: match[0].replace(" ", _BLANK), _filled(line, known))
        words = [word.replace(_BLANK, " ") for word in shlex.split(whole)]
        begin = next(place for place in range(len(words)) if re.search(_COMMAND, " ".join(words[: place + 1])))
        before = {_LAUNCHERS.get(key, key): value for key, value in _settings_of(words[:begin])}
        outside = {**known, **{key: value for key, value in before.items() if key in _ENVIRONMENT}}
        settings = {key: _scalar(outside[key]) for key in _ENVIRONMENT if key in outside}
        settings |= dict(_settings_of(words[begin + 1 :]))
        unread = {key: shown for key, value in settings.items() if (shown := _left_to_the_shell(key, value, text))}
        settings = {key: value for key, value in settings.items() if key not in unread}
        base = settings.pop("config", None)  # EasyR1 reads a YAML file, and the words change it
        if isinstance(base, str) and command == "EasyR1":
            below = next((folder / base for folder in (Path(), *path.parents) if (folder / base).is_file()), None)
            if below is None:
                unread[f"the file {base}"] = "it is not beside the script"
            else:
                file = _read_yaml(below)
                unread |= {key: shown for key, shown in file.unread.items() if key not in settings}
                settings = {key: value for key, value in {**file.settings, **settings}.items() if key not in unread}
        return ForeignFile(path, command, settings, unread)
    raise UserError(
        f"--from {path}: no line starts a trainer that is known: swift rlhf, openrlhf.cli.train_ppo_ray, "
        "verl.trainer.main_ppo, verl.trainer.main (EasyR1), trl grpo"
    )


def _left_to_the_shell(key: str, value: Any, script: str) -> str:
    """Return a value that a shell would complete, and the line that says how; "" for any other."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if not _LEFT_TO_THE_SHELL.search(text):
        return ""
    lines = [*enumerate(map(str.strip, script.split("\n")), 1)]

    def first(pattern: str) -> int | None:
        return next((number for number, line in lines if re.search(pattern, line)), None)

    for name in (match[1] for match in _VARIABLE.finditer(text)):
        assigned = [f"line {number} says {line}" for number, line in lines if re.match(rf"(export\s+)?{name}=", line)]
        if assigned:
            return f"{text}  ({assigned[-1]})"
        if number := first(rf"\$\{{?{name}\b"):
            return f"{text}  (line {number}; the file gives {name} no value)"
    number = first(rf"(^|[\s-]){re.escape(key)}\b")
    return f"{text}  ({f'line {number}; ' if number else ''}only a shell can compute it)"


def _lines(text: str) -> Iterator[str]:
    """Yield the script's commands without comments, each on one line but for the text between quotes."""
    kept = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    lines = "\n".join(kept).replace("\\\n", " ").split("\n")
    place = 0
    while place < len(lines):
        last = min(len(lines), place + _LONGEST_TEXT)
        ends = (end for end in range(place + 1, last + 1) if _is_closed("\n".join(lines[place:end])))
        end = next(ends, place + 1)
        if stripped := "\n".join(lines[place:end]).strip():
            yield stripped
        place = end


def _is_closed(text: str) -> bool:
    """Tell whether every quote of a text has its end."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _filled(text: str, known: Mapping[str, str]) -> str:
    """Return a text with the values of variables in their place; one without a value stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = known.get(match[1], match[2])
        return match[0] if found is None else found

    return _VARIABLE.sub(value, text)


def _settings_of(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a command: --key value, --key (true), key=value, and variables of its environment."""
    words = [word for word in words if word not in ("$@", "$*", "${@}", "\\")]
    words = words[: next((place for place, word in enumerate(words) if word in _ENDS), len(words))]
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            while not equals and place < len(words) and not re.match(r"--\w", words[place]):
                if values and _WORDS.fullmatch(words[place]):
                    yield f"the words {words[place]}", words[place]  # more settings, not more values of this one
                else:
                    values.append(words[place])
                place += 1
            yield key, _scalar(values[0] if len(values) == 1 else values or True)
        elif match := re.fullmatch(r"\+*([\w.]+)=(.*)", word, re.DOTALL):
            yield match[1], _scalar(match[2])
        elif _WORDS.fullmatch(word):
            yield f"the words {word}", word


def _scalar(value: Any) -> Any:
    """Return a text as the number, truth value or list that it writes; 1e-6 is a number, which YAML 1.1 denies."""
    if isinstance(value, list):
        return [_scalar(item) for item in value]
    if not isinstance(value, str):
        return value
    if (path := in_home(value)) != value:
        return path
    try:
        return float(value) if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)", value, re.I) else read_yaml(value)
    except ValueError:
        return value
