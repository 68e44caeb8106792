"""Build the walls around programs, and run one program after another inside them.

A program of its own: `python -I -S -B launcher.py PLAN`, with an empty environment and the standard library alone, so
that nothing of vlm-rl is in its memory. It reads requests from its standard input and writes replies to its standard
output, each one line of JSON and the bytes that the line announces.

    launcher    in a root folder that holds only Python's files, without rights; one per core
      keeper    one per program: makes fresh namespaces, reads the output, keeps the time
        init    process 1 of the program's own process namespace: when it ends, the kernel kills what is left there
          program

Only the last one runs text that nobody has read. It starts by execve, with three descriptors, no environment of ours,
no capabilities, limits, and a filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_MOUNT, _NEW_PID, _NEW_NET = 0x10000000, 0x00020000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_UTS = 0x08000000, 0x04000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_RECURSIVE, _PRIVATE = 16384, 1 << 18
_DETACH = 2
_PR_DEATH_SIGNAL, _PR_DUMPABLE, _PR_FILTER, _PR_DROP_BOUND, _PR_NO_NEW_RIGHTS = 1, 4, 22, 24, 38
_FILTER_OF_CALLS = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_USER_INSIDE = 1000
_CHUNK = 1 << 16
_LOCKED_FLAGS = {os.ST_NOEXEC: _NO_EXEC, os.ST_NOSUID: _NO_SUID, os.ST_NODEV: _NO_DEVICES}


class RefusedError(Exception):
    """Raised where the kernel refuses a wall; the message says which."""


def main() -> None:
    setup = json.loads(sys.argv[1])
    try:
        proc = enter(setup["files"])
    except (RefusedError, OSError) as error:
        reply({"refused": str(error)})
        return
    reply({"ready": True})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        files = {name: read_exactly(size) for name, size in request["files"].items()}
        stdin = read_exactly(request["stdin"])
        keeper = os.fork()
        if keeper == 0:
            run_as_child(lambda request=request, files=files, stdin=stdin: keep(setup, request, files, stdin, proc))
        _, status = os.waitpid(keeper, 0)
        if status:
            reply({"failed": f"the keeper of a program ended with {os.waitstatus_to_exitcode(status)}"})


def run_as_child(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process and end it without touching what it shares with its parent."""
    code = 1
    try:
        work()
        code = 0
    except RefusedError as error:
        reply({"refused": str(error)})
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            reply({"failed": f"{type(error).__name__}: {error}"})
            code = 0
    finally:
        os._exit(code)


def reply(header: dict[str, Any], *parts: bytes) -> None:
    """Write one reply whole."""
    data = memoryview(
        json.dumps({**header, "sizes": [len(part) for part in parts]}).encode() + b"\n" + b"".join(parts)
    )
    while data:
        data = data[os.write(1, data) :]


def read_exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        os._exit(0)  # whoever asked is gone
    return data


# -- the root folder, once per launcher --------------------------------------------------------------


def enter(files: list[tuple[str, str]]) -> int:
    """Move this process into a root folder that holds `files` alone, without rights over the machine.

    Returns a descriptor of /proc, which the keepers need and close. Raises RefusedError.
    """
    is_root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    if is_root:
        call("a mount namespace", _LIBC.unshare, _NEW_MOUNT)
    else:
        call("a user namespace", _LIBC.unshare, _NEW_USER | _NEW_MOUNT)
        map_user("/proc/self", None, user, group, inside=user)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    build_root(files)
    if is_root:
        # The kernel counts no processes of root. A number that nobody has, and no other launcher.
        number = 0x70000000 + os.getpid()
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
        _LIBC.prctl(_PR_DUMPABLE, 1, 0, 0, 0)  # otherwise its files in /proc are root's
    _LIBC.prctl(_PR_NO_NEW_RIGHTS, 1, 0, 0, 0)
    return proc


def build_root(files: list[tuple[str, str]]) -> None:
    mount("private mounts", None, "/", None, _RECURSIVE | _PRIVATE)
    # By descriptor: the new root covers /tmp, where the files themselves may be.
    sources = [(os.open(source, os.O_PATH), target) for source, target in files]
    null = os.open("/dev/null", os.O_PATH)
    mount("a file system in memory", "tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for source, target in sources:
        place = f"/tmp{target}"
        is_folder = Path(f"/proc/self/fd/{source}").is_dir()
        make_place(place, is_folder=is_folder)
        bind(source, place)
        for name in ("site-packages", "dist-packages"):
            if is_folder and Path(place, name).is_dir():
                mount("an empty folder", "tmpfs", f"{place}/{name}", "tmpfs", _READ_ONLY, "size=4k")
    make_place("/tmp/dev/null", is_folder=False)
    mount("/dev/null", f"/proc/self/fd/{null}", "/tmp/dev/null", None, _BIND)
    Path("/tmp/tmp").mkdir(exist_ok=True)  # where Python itself is installed below /tmp
    Path("/tmp/old").mkdir()
    os.chdir("/tmp")
    call("a root folder of its own", _LIBC.syscall, _PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    call("leaving the machine's files", _LIBC.umount2, b"/old", _DETACH)
    Path("/old").rmdir()
    mount("a read-only root", None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    for source, _ in sources:
        os.close(source)
    os.close(null)


def make_place(place: str, *, is_folder: bool) -> None:
    path = Path(place)
    (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
    if not is_folder:
        path.touch()


def bind(source: int, place: str) -> None:
    """Show an open file or folder at a place, read-only."""
    mount(f"the files at {place}", f"/proc/self/fd/{source}", place, None, _BIND)
    kept = sum(flag for bit, flag in _LOCKED_FLAGS.items() if os.statvfs(place).f_flag & bit)
    flags = kept | _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES
    mount(f"read-only files at {place}", None, place, None, flags)


# -- one program -----------------------------------------------------------------------------------


def keep(setup: dict[str, Any], request: dict[str, Any], files: dict[str, bytes], stdin: bytes, proc: int) -> None:
    """Run one program in fresh namespaces and reply how it ended and what it wrote.

    Args:
        setup: of the launcher.
        request: has the limits of the program.
        files: name -> content, in the folder that it starts in.
        stdin: what it reads.
        proc: a descriptor of /proc, which is closed.

    Raises RefusedError if a wall cannot be built.
    """
    limits = request["limits"]
    user, group = os.geteuid(), os.getegid()
    everything = _NEW_USER | _NEW_MOUNT | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS
    call("fresh namespaces for a program", _LIBC.unshare, everything)
    _LIBC.prctl(_PR_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    map_user("self", proc, user, group, inside=_USER_INSIDE)
    os.close(proc)
    room = limits["files"] + sum(len(data) + 8192 for data in files.values())
    size = f"size={room},nr_inodes={limits['num_files'] + len(files) + 1},mode=700"
    mount("a folder of its own", "tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, size)
    _LIBC.sethostname(b"sandbox", 7)
    for name, data in files.items():
        Path("/tmp", name).write_bytes(data)
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "status", "go")}
    init = os.fork()
    if init == 0:
        run_as_child(lambda: be_init(setup, limits, pipes))
    for mine, name in ((1, "stdin"), (0, "stdout"), (0, "stderr"), (0, "status"), (1, "go")):
        os.close(pipes[name][1 - mine])
    start = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        os.write(pipes["go"][1], b"g")
    ending, written, status = watch(init, pipes, stdin, limits)
    seconds = time.monotonic() - start
    os.waitpid(init, 0)
    # Where the program could not start, that comes first, and how its process ended second.
    report = json.JSONDecoder().raw_decode(status.decode())[0] if status else {}
    if "refused" in report:
        raise RefusedError(report["refused"])
    reply({**report, "ending": ending, "seconds": seconds}, written["stdout"], written["stderr"])


def watch(
    init: int, pipes: dict[str, tuple[int, int]], stdin: bytes, limits: dict[str, Any]
) -> tuple[str, dict[str, bytes], bytes]:
    """Feed and read a program until it ends, its time is over, or it has written too much; then kill what is left.

    Args:
        init: its process 1, whose end is that of all.
        pipes: name -> (reading end, writing end); this process has one end of each.
        stdin: what it reads.
        limits: seconds of its time, and bytes of its output.

    Returns how it ended (ended, time or output), what it wrote, and the report of its process 1.
    """
    deadline = time.monotonic() + limits["seconds"]
    written = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
    reading = {pipes[name][0]: name for name in written}
    writing, left = pipes["stdin"][1], memoryview(stdin)
    for descriptor in (*reading, writing):
        os.set_blocking(descriptor, False)
    poll = select.poll()
    for descriptor in reading:
        poll.register(descriptor, select.POLLIN)
    poll.register(writing, select.POLLOUT)
    ending, is_dead = "ended", False
    while reading:
        now = time.monotonic()
        if not is_dead and now >= deadline:
            ending, is_dead = "time", kill(init)
        for descriptor, _ in poll.poll(None if is_dead else max(0.0, deadline - now) * 1000 + 1):
            if descriptor == writing:
                try:
                    left = left[os.write(writing, left[:_CHUNK]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    left = memoryview(b"")
                if not left:
                    poll.unregister(writing)
                    os.close(writing)
                continue
            name, chunk = reading[descriptor], os.read(descriptor, _CHUNK)
            if not chunk:
                poll.unregister(descriptor)
                del reading[descriptor]
                # Its process 1 is gone, and with it everything; what is in the pipes is still read.
                is_dead = is_dead or (name == "status" and kill(init))
            room = limits["output"] - len(written[name])
            written[name] += chunk[:room]
            if len(chunk) > room and not is_dead:
                ending, is_dead = "output", kill(init)
    return ending, {name: bytes(data) for name, data in written.items()}, bytes(written["status"])


def kill(init: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)
    return True


def be_init(setup: dict[str, Any], limits: dict[str, Any], pipes: dict[str, tuple[int, int]]) -> None:
    """Start the program, wait for it, and report how it ended. Process 1: no signal of the program reaches it."""
    _LIBC.prctl(_PR_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python's own handlers would let those in
    status = pipes["status"][1]
    os.close(pipes["go"][1])
    if os.read(pipes["go"][0], 1) != b"g":
        return  # the keeper died before it could be followed
    program = os.fork()
    if program == 0:
        try:
            become_program(setup, limits, pipes)
        except BaseException as error:
            os.write(status, json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        os._exit(127)
    _LIBC.prctl(_PR_DUMPABLE, 0, 0, 0, 0)
    os.dup2(os.open("/dev/null", os.O_RDWR), 1)
    for descriptor in {end for pipe in pipes.values() for end in pipe} - {status}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _, code, usage = os.wait4(program, 0)
    cpu = usage.ru_utime + usage.ru_stime
    report = {"code": os.waitstatus_to_exitcode(code), "cpu_seconds": cpu, "peak_kib": usage.ru_maxrss}
    os.write(status, json.dumps(report).encode())


def become_program(setup: dict[str, Any], limits: dict[str, Any], pipes: dict[str, tuple[int, int]]) -> NoReturn:
    """Give up every right and turn into the program. What fails here is written into the pipe `status`."""
    os.setsid()
    status = pipes["status"][1]
    os.dup2(pipes["stdin"][0], 0)
    os.dup2(pipes["stdout"][1], 1)
    os.dup2(pipes["stderr"][1], 2)
    os.closerange(3, status)
    os.closerange(status + 1, 4096)  # `status` closes itself at execve
    os.chdir("/tmp")
    for number in range(64):
        _LIBC.prctl(_PR_DROP_BOUND, number, 0, 0, 0)
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call("giving up all capabilities", _LIBC.capset, header, empty)
    call("no new rights", _LIBC.prctl, _PR_NO_NEW_RIGHTS, 1, 0, 0, 0)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    for name, value in (
        ("AS", limits["memory"]),
        ("CPU", limits["cpu_seconds"]),
        ("NPROC", limits["threads"] + 3),  # the keeper twice, which came into the namespace, and process 1
        ("FSIZE", limits["files"]),
        ("NOFILE", limits["open_files"]),
        ("STACK", limits["stack"]),
        ("CORE", 1),  # 0 still starts a program of the machine that collects core dumps, 1 does not
        *(("MEMLOCK", 0), ("MSGQUEUE", 0), ("RTPRIO", 0), ("SIGPENDING", 256)),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
    install_filter(bytes.fromhex(setup["filter"]))
    environment = {"PATH": "/python/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": setup["libraries"]}
    environment |= {"PYTHONPATH": setup["packages"], "OPENBLAS_NUM_THREADS": "1"}
    os.execve(setup["python"], [setup["python"], "-P", "-s", "-B", "-X", "utf8", "/tmp/main.py"], environment)


# -- system calls ----------------------------------------------------------------------------------


def install_filter(program: bytes) -> None:
    """Filter the system calls of this process from here on, and of what it turns into."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    call("the filter of system calls (seccomp)", _LIBC.prctl, _PR_FILTER, _FILTER_OF_CALLS, header, 0, 0)


def call(what: str, function: Any, *arguments: Any) -> None:
    """Make a call of the C library. Raises RefusedError if it fails."""
    if function(*arguments):
        raise RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(what: str, source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, as mount(2) does.

    Args:
        what: is mounted, for the message.
        source: of the mount; None if it has none.
        target: the folder.
        kind: of the file system; None if it is known.
        flags: MS_...
        options: of the file system.

    Raises RefusedError if it fails.
    """
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    call(what, _LIBC.mount, *encoded, ctypes.c_ulong(flags), options.encode() or None)


def map_user(folder: str, proc: int | None, user: int, group: int, *, inside: int) -> None:
    """Make a user of the outside the only user of this namespace.

    Args:
        folder: of the process in /proc.
        proc: a descriptor of /proc, where `folder` is relative to it.
        user: number of the user outside.
        group: number of the group outside.
        inside: number of both in the namespace.

    Raises RefusedError if the kernel does not allow it.
    """
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {user} 1"),
        ("gid_map", f"{inside} {group} 1"),
    ):
        try:
            descriptor = os.open(f"{folder}/{name}", os.O_WRONLY, dir_fd=proc)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RefusedError(f"a user of its own ({name}): {error.strerror}") from None


if __name__ == "__main__":
    main()
