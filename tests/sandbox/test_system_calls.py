"""The filter of system calls as the kernel reads it, on both processors, by an interpreter of its instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from vlm_rl.sandbox import system_calls

ALLOWED, KILLED = "allowed", "killed"


def outcome(program: bytes, arch: int, number: int, *arguments: int) -> str:
    """Run a filter on one call, as seccomp(2) and the kernel's table of classic BPF say."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    instructions = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    loaded, place = 0, 0
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        if code == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value) or errno.errorcode[value & 0xFFFF]
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        else:
            passes = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            place += if_true if passes else if_false


X86, ARM = ("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)
CASES = [
    (X86, 0, (), ALLOWED),  # read
    (X86, 59, (), ALLOWED),  # execve, by which the program starts
    (X86, 334, (), ALLOWED),  # rseq
    (X86, 57, (), "EPERM"),  # fork
    (X86, 56, (17,), "EPERM"),  # clone of a process
    (X86, 56, (0x3D0F00,), ALLOWED),  # clone of a thread, as glibc makes it
    (X86, 435, (), "ENOSYS"),  # clone3
    (X86, 0x40000000, (), "EPERM"),  # read of x32
    (X86, 72, (3, 4), ALLOWED),  # F_SETFL
    (X86, 72, (3, 6), "EPERM"),  # F_SETLK
    (X86, 72, (3, 1031), "EPERM"),  # F_SETPIPE_SZ
    (X86, 16, (3, 0x5421), ALLOWED),  # FIONBIO
    (X86, 16, (3, 0x5412), "EPERM"),  # TIOCSTI
    (X86, 157, (15,), ALLOWED),  # PR_SET_NAME
    (X86, 157, (22,), "EPERM"),  # PR_SET_SECCOMP
    (X86, 41, (), "EPERM"),  # socket
    (X86, 54, (), "EPERM"),  # setsockopt
    (X86, 206, (), "EPERM"),  # io_setup
    (X86, 253, (), "EPERM"),  # inotify_init
    (X86, 458, (), "EPERM"),  # listmount
    (X86, 600, (), "ENOSYS"),  # a call of a later kernel
    (ARM, 63, (), ALLOWED),  # read
    (ARM, 220, (17,), "EPERM"),  # clone of a process
    (ARM, 220, (0x3D0F00,), ALLOWED),
    (ARM, 435, (), "ENOSYS"),
    (ARM, 25, (3, 1031), "EPERM"),
    (ARM, 25, (3, 6), ALLOWED),
    (ARM, 198, (), "EPERM"),  # socket
    (ARM, 0, (), "EPERM"),  # io_setup
    (ARM, 26, (), "EPERM"),  # inotify_init1
    (ARM, 458, (), "EPERM"),
]


@pytest.mark.parametrize(("machine", "number", "arguments", "expected"), CASES)
def test_what_becomes_of_a_call(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, int], number: int, arguments: tuple[int, ...], expected: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine[0])
    program = system_calls.filter_program()
    assert outcome(program, machine[1], number, *arguments) == expected
    assert outcome(program, 0x40000003, number, *arguments) == KILLED  # by the table of another processor
