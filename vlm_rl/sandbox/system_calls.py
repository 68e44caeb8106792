"""A filter of system calls, installed by the launcher just before a program starts (seccomp, classic BPF).

The walls are namespaces and limits. The filter adds what those cannot: a program stays one process, so the limit of
its address space is the limit of its memory. It also takes away the memory that such a limit does not count (memfd,
System V segments, message queues, buffers of sockets and pipes beyond their default, sockets in flight), what all
processes of a machine or a user share (slots of aio and inotify), and the parts of the kernel that a Python program
never needs.
"""

from __future__ import annotations

import errno
import platform
import struct

# machine -> its AUDIT_ARCH
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# call -> its numbers on x86-64 and on aarch64; "-" where there is no such call
_REFUSED = """
    fork 57 -                vfork 58 -              ptrace 101 117         kcmp 312 272
    process_vm_readv 310 270 process_vm_writev 311 271
    unshare 272 97           setns 308 268           mount 165 40           umount2 166 39
    pivot_root 155 41        chroot 161 51           swapon 167 224         acct 163 89
    bpf 321 280              perf_event_open 298 241 userfaultfd 323 282    personality 135 92
    keyctl 250 219           add_key 248 217         request_key 249 218    fanotify_init 300 262
    name_to_handle_at 303 264                        open_by_handle_at 304 265
    memfd_create 319 279     shmget 29 194           semget 64 190          msgget 68 186
    mq_open 240 180          socket 41 198           syslog 103 116         reboot 169 142
    kexec_load 246 104       kexec_file_load 320 294 init_module 175 105    finit_module 313 273
    modify_ldt 154 -         ioperm 173 -            iopl 172 -
    io_setup 206 0           inotify_init 253 -      inotify_init1 294 26
    setsockopt 54 208        sendmsg 46 211          sendmmsg 307 269
"""
# From 424 on a call has one number on all machines: pidfd_send_signal, io_uring (3), open_tree, move_mount, fsopen,
# fsconfig, fsmount, fspick, pidfd_open, pidfd_getfd, mount_setattr, memfd_secret, statmount, listmount.
_REFUSED_EVERYWHERE = (*range(424, 435), 438, 442, 447, 457, 458)
_CLONE = {"x86_64": 56, "aarch64": 220}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_SET_PIPE_SIZE = 1031
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_FOREIGN_TABLE = 0x40000000  # the bit of x86-64's second table of system calls (x32)

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data


def is_known_machine() -> bool:
    """Tell whether there is a filter for this machine's processor."""
    return platform.machine() in _ARCHITECTURES


def filter_program() -> bytes:
    """Return the filter of this machine as classic BPF instructions of 8 bytes each."""
    machine = platform.machine()
    column = 1 + [*_ARCHITECTURES].index(machine)
    words = _REFUSED.split()
    refused = {int(number) for number in words[column::3] if number != "-"}
    numbers = sorted({*refused, *_REFUSED_EVERYWHERE})
    deny = _instruction(_RETURN, value=_ERRNO | errno.EPERM)
    checks = [
        _instruction(_LOAD, value=_ARCH),
        _instruction(_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _instruction(_RETURN, value=_KILL),
        _instruction(_LOAD, value=_NUMBER),
        _instruction(_JUMP_FROM, 0, 1, _FOREIGN_TABLE),
        deny,
        # glibc falls back to clone, whose flags can be read here; those of clone3 are behind a pointer.
        _instruction(_JUMP_EQUAL, 0, 1, _CLONE3),
        _instruction(_RETURN, value=_ERRNO | errno.ENOSYS),
        _instruction(_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        _instruction(_LOAD, value=_FIRST_ARGUMENT),
        _instruction(_JUMP_BITS, len(numbers) + 5, 0, _CLONE_THREAD),  # a thread: to the end, which allows it
        deny,
        _instruction(_JUMP_EQUAL, 0, 3, _FCNTL[machine]),
        _instruction(_LOAD, value=_SECOND_ARGUMENT),
        _instruction(_JUMP_EQUAL, 0, len(numbers) + 1, _SET_PIPE_SIZE),
        deny,
    ]
    for index, number in enumerate(numbers):
        checks.append(_instruction(_JUMP_EQUAL, len(numbers) - index, 0, number))
    return b"".join([*checks, _instruction(_RETURN, value=_ALLOW), deny])


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
