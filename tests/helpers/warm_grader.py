"""Comparison servers of the grader, forked from a process that has read the grammar already.

Each start of symbolic_server.py imports sympy and reads a dozen formulas: more than a second for every grader of a
test and for every run that it makes. Here a small program does that once, and forks for each server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Any

from vlm_rl.grading import symbolic_server
from vlm_rl.grading.symbolic_client import SymbolicClient

_MAX_FILES = 4096  # descriptors that a process of a test may have open
_LAUNCH = SymbolicClient._launch


class ForkedServer:
    """What SymbolicClient uses of a subprocess.Popen."""

    def __init__(self, warm: socket.socket, options: dict[str, Any]) -> None:
        """Ask the process behind `warm` for a server with these options."""
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_pid, theirs_pid) = os.pipe(), os.pipe(), os.pipe()
        theirs = [theirs_in, theirs_out, theirs_pid]
        socket.send_fds(warm, [json.dumps(options).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        with os.fdopen(ours_pid) as said:
            self.pid = int(said.read())
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def wait(self) -> None:
        """Wait until it has ended; its parent, which is not this process, reaps it."""
        with suppress(ProcessLookupError):
            while True:
                os.kill(self.pid, 0)
                time.sleep(0.01)


@cache
def _warm_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks the servers; returns the socket on which it is asked for one, and it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "tests.helpers.warm_grader", str(theirs.fileno())]
    process = subprocess.Popen(
        words,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": "0"},  # as symbolic_client.py sets it
    )
    theirs.close()
    return ours, process


def use_warm_grader(*, at_once: bool = False) -> None:
    """Let every SymbolicClient of this process and its later children get its server from a warm process.

    That is started with the first server, or `at_once`, so that later children share it.
    """

    def launch(client: SymbolicClient) -> Any:
        client._server = ForkedServer(_warm_process()[0], client.options)  # type: ignore[assignment]
        return client._server

    if at_once:
        _warm_process()
    SymbolicClient._launch = launch  # type: ignore[method-assign]


def use_own_grader() -> None:
    """Let every SymbolicClient of this process start its server as a user's does: as a child of its own."""
    SymbolicClient._launch = _LAUNCH  # type: ignore[method-assign]


def _serve(requests: socket.socket) -> None:
    """Fork a server for each request, until all processes that can send one are gone."""
    symbolic_server.load_grammar()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    while True:
        options, descriptors, *_ = socket.recv_fds(requests, 1 << 16, 3)
        if not options:
            return
        if os.fork() == 0:
            _become_a_server(options.decode(), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become_a_server(options: str, stdin: int, stdout: int, pid: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.write(pid, str(os.getpid()).encode())
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, _MAX_FILES)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv[1:] = [options]
    symbolic_server.main()
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
