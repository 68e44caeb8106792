"""Prove each wall with programs of ours, before the first program that nobody has read."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.sandbox import system_calls
from vlm_rl.sandbox.program import Program, ProgramLimits, ProgramRun

_MEMORY = 256 << 20
_THREADS = 8
_ENVIRONMENT = {"PYTHONPATH", "OPENBLAS_NUM_THREADS", "PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "LC_CTYPE"}


# Prints what it could do, as JSON.
_PUSH = f"""
import ctypes, json, os, socket, threading, time

def attempt(action):
    try:
        return action() or "done"
    except BaseException as error:
        return type(error).__name__

def threads():
    stop, count = threading.Event(), 0
    try:
        while count < 1000:
            threading.Thread(target=stop.wait, daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    stop.set()
    return str(count)

print(json.dumps({{
    "network": attempt(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
    "interfaces": attempt(lambda: " ".join(name for _, name in socket.if_nameindex()) or "none"),
    "root": sorted(os.listdir("/")),
    "folder": sorted(os.listdir("/tmp")),
    "passwd": attempt(lambda: open("/etc/passwd").read()),
    "proc": attempt(lambda: os.listdir("/proc")),
    "write": [attempt(lambda path=path: open(path, "w")) for path in ("/x", "/python/x", "/lib/x")],
    "variables": sorted(os.environ),
    "process": attempt(lambda: os.fork() or os._exit(0)),
    "threads": threads(),
    "memory": attempt(lambda: len(bytearray({_MEMORY})) and "done"),
    "unshare": str(ctypes.CDLL(None).unshare(0x10000000)),
    "ids": [os.getpid(), os.getppid()],
    "descriptors": [number for number in range(3, 200) if attempt(lambda n=number: os.fstat(n)) != "OSError"],
}}))
"""


def _pushed(run: ProgramRun) -> str:
    """Return the wall that did not hold, or ""."""
    if not run.succeeded:
        return f"the program that tests them fails ({run.reason})"
    try:
        facts = json.loads(run.stdout)
    except ValueError:
        return "the program that tests them writes more than it says"
    libraries = {"dev", "python", "tmp", "lib", "lib64", "usr"}
    passed = {
        "the network can be reached": facts["network"] != "PermissionError",
        f"there are network interfaces ({facts['interfaces']})": facts["interfaces"] not in ("lo", "PermissionError"),
        f"other folders are there ({facts['root']})": not {*facts["root"]} <= libraries | _loader_folders(),
        f"its folder is not empty ({facts['folder']})": facts["folder"] != ["main.py"],
        "files of the machine can be read": facts["passwd"] != "FileNotFoundError" or facts["proc"] == "done",
        f"files outside its folder can be written ({facts['write']})": {*facts["write"]} & {"done"} != set(),
        f"the environment is not empty ({facts['variables']})": not {*facts["variables"]} <= _ENVIRONMENT,
        "a second process can be started": facts["process"] != "PermissionError",
        f"{facts['threads']} threads can be started": int(facts["threads"]) > _THREADS,
        "more memory than its limit can be taken": facts["memory"] != "MemoryError",
        "namespaces can be made inside": facts["unshare"] != "-1",
        f"it shares the machine's process numbers ({facts['ids']})": facts["ids"] != [2, 1],
        f"descriptors are inherited ({facts['descriptors']})": bool(facts["descriptors"]),
    }
    return next((wall for wall, is_through in passed.items() if is_through), "")


def _loader_folders() -> set[str]:
    from vlm_rl.sandbox.interpreter import interpreter_files

    return {Path(target).parts[1] for _, target in interpreter_files()}


def _is_ended_by(ending: str, what: str) -> Callable[[ProgramRun], str]:
    return lambda run: "" if run.ending == ending else f"{what} is not ended ({run.reason})"


PROBES: tuple[tuple[Program, Callable[[ProgramRun], str]], ...] = (
    (Program(_PUSH, limits=ProgramLimits(memory=_MEMORY, threads=_THREADS, stack=1 << 20)), _pushed),
    (
        Program("while True: print('x' * 1000)", limits=ProgramLimits(output=1 << 16)),
        _is_ended_by("output", "endless output"),
    ),
    (
        Program("import time\nwhile True: time.sleep(1)", limits=ProgramLimits(seconds=0.2)),
        _is_ended_by("time", "a program that sleeps"),
    ),
)


def check_machine() -> None:
    """Raise UserError if the walls do not exist for this kind of machine."""
    if sys.platform != "linux":
        raise UserError(
            f"programs are not run here: the sandbox is made of Linux's namespaces, and this is {sys.platform}. "
            "Evaluate and train on code under Linux"
        )
    if not system_calls.is_known_machine():
        raise UserError(
            f"programs are not run here: the filter of system calls has no table for {platform.machine()}. "
            "Use an x86_64 or aarch64 machine"
        )


def refusal(wall: str) -> str:
    """Return the message for a wall that the kernel refuses to build, with its cause where the kernel names one."""
    causes = [
        f"{name} is {value}: set it with `sysctl {name}={wanted}`"
        for name, refusing, wanted in (
            ("user.max_user_namespaces", "0", "10000"),
            ("kernel.unprivileged_userns_clone", "0", "1"),
            ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
        )
        if (value := _setting(name)) == refusing
    ]
    next_step = (
        "; ".join(causes)
        or "in a container allow namespaces (docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --cap-add SYS_ADMIN), or use a machine outside of one"
    )
    return f"programs are not run here, because the kernel refuses a wall of the sandbox ({wall}): {next_step}"


def _setting(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return ""
