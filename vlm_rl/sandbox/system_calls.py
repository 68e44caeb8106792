"""A filter of system calls, installed by the launcher just before a program starts (seccomp, classic BPF).

The walls are namespaces and limits. The filter adds what those cannot: a program stays one process, so the limit of
its address space is the limit of its memory. It also takes away the memory that such a limit does not count (memfd,
System V segments, message queues, buffers of sockets and pipes beyond their default, sockets in flight, locks of
files), what all processes of a machine or a user share (slots of aio and inotify), and the parts of the kernel that a
Python program never needs.

On x86-64 it is a list of what is allowed. On aarch64 it is a list of what is refused, until the first has run there.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

# machine -> its AUDIT_ARCH
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# What Python, its standard library and NumPy call, the most frequent first.
_ALLOWED_X86 = """
    read 0 write 1 futex 202 mmap 9 munmap 11 brk 12 mprotect 10 madvise 28 clock_nanosleep 230 sched_yield 24 open 2
    close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 pread64 17 pwrite64 18 readv 19 writev 20 access 21 pipe 22
    select 23 dup 32 dup2 33 sendfile 40 fsync 74 fdatasync 75 truncate 76 ftruncate 77 getdents 78 getcwd 79
    chdir 80 fchdir 81 rename 82 mkdir 83 rmdir 84 creat 85 link 86 unlink 87 symlink 88 readlink 89 chmod 90
    fchmod 91 umask 95 utime 132 statfs 137 fstatfs 138 getxattr 191 lgetxattr 192 fgetxattr 193 listxattr 194
    llistxattr 195 flistxattr 196 getdents64 217 fadvise64 221 utimes 235 openat 257 mkdirat 258 futimesat 261
    newfstatat 262 unlinkat 263 renameat 264 linkat 265 symlinkat 266 readlinkat 267 fchmodat 268 faccessat 269
    pselect6 270 ppoll 271 utimensat 280 fallocate 285 dup3 292 pipe2 293 preadv 295 pwritev 296 renameat2 316
    copy_file_range 326 preadv2 327 pwritev2 328 statx 332 faccessat2 439 mremap 25 msync 26
    mincore 27 epoll_create 213 epoll_wait 232 epoll_ctl 233 epoll_pwait 281 epoll_create1 291 epoll_pwait2 441
    sendto 44 recvfrom 45 shutdown 48 getsockname 51 getpeername 52 getsockopt 55 rt_sigaction 13
    rt_sigprocmask 14 rt_sigreturn 15 pause 34 getitimer 36 alarm 37 setitimer 38 kill 62 rt_sigpending 127
    rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 tkill 200 restart_syscall 219 tgkill 234 nanosleep 35
    gettimeofday 96 times 100 time 201 clock_gettime 228 clock_getres 229 getpid 39 execve 59 exit 60 wait4 61
    uname 63 getrlimit 97 getrusage 98 sysinfo 99 getuid 102 getgid 104 geteuid 107 getegid 108 getppid 110
    getpgrp 111 getgroups 115 getresuid 118 getresgid 120 getpgid 121 getsid 124 capget 125 getpriority 140
    setpriority 141 sched_getparam 143 sched_getscheduler 145 sched_get_priority_max 146 sched_get_priority_min 147
    arch_prctl 158 setrlimit 160 gettid 186 sched_setaffinity 203 sched_getaffinity 204 set_tid_address 218
    exit_group 231 waitid 247 set_robust_list 273 get_robust_list 274 prlimit64 302 getcpu 309 getrandom 318 rseq 334
"""
_NEWEST_X86 = 470  # what Linux 6.18 has; the C library of a later one is told that the kernel is older

# call -> its number on aarch64
_REFUSED_ARM = """
    ptrace 117 kcmp 272 process_vm_readv 270 process_vm_writev 271 unshare 97 setns 268 mount 40 umount2 39
    pivot_root 41 chroot 51 swapon 224 acct 89 bpf 280 perf_event_open 241 userfaultfd 282 personality 92 keyctl 219
    add_key 217 request_key 218 fanotify_init 262 name_to_handle_at 264 open_by_handle_at 265 memfd_create 279
    shmget 194 semget 190 msgget 186 mq_open 180 socket 198 syslog 116 reboot 142 kexec_load 104 kexec_file_load 294
    init_module 105 finit_module 273 io_setup 0 inotify_init1 26 setsockopt 208 sendmsg 211 sendmmsg 269
"""
# From 424 on a call has one number on all machines: pidfd_send_signal, io_uring (3), open_tree, move_mount, fsopen,
# fsconfig, fsmount, fspick, pidfd_open, pidfd_getfd, mount_setattr, memfd_secret, statmount, listmount.
_REFUSED_EVERYWHERE = (*range(424, 435), 438, 442, 447, 457, 458)

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
# CLONE_VM, CLONE_FILES and CLONE_THREAD: threads share one table of descriptors, or each had as many as the limit.
_CLONE_NEEDS = (0x100, 0x400, 0x10000)
_CLOSE_RANGE = 436
_CLOSE_ON_EXEC = 4  # the flag of close_range that does not unshare the table of descriptors
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_UNIX = 1  # other families load modules of the kernel
_FOREIGN_TABLE = 0x40000000  # the bit of x86-64's second table of system calls (x32)
_FCNTL, _IOCTL, _PRCTL = {"x86_64": 72, "aarch64": 25}, 16, 157
_SET_PIPE_SIZE = 1031
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Locks are memory that nothing limits.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS, PR_SET_VMA
_PRCTL_OPTIONS = (3, 15, 16, 21, 23, 39, 0x53564D41)

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data.
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32


def is_known_machine() -> bool:
    """Tell whether there is a filter for this machine's processor."""
    return platform.machine() in _ARCHITECTURES


def filter_program() -> bytes:
    """Return the filter of this machine as classic BPF instructions of 8 bytes each."""
    machine = platform.machine()
    checks = [
        _instruction(_LOAD, value=_ARCH),
        _instruction(_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _return(_KILL),
        _instruction(_LOAD, value=_NUMBER),
        *_where(_JUMP_FROM, _FOREIGN_TABLE, _refuse()),
        # glibc falls back to clone, whose flags can be read here; those of clone3 are behind a pointer.
        *_where(_JUMP_EQUAL, _CLONE3, _refuse(errno.ENOSYS)),
        *_where(_JUMP_EQUAL, _CLONE[machine], *_all_bits(_FIRST_ARGUMENT, _CLONE_NEEDS)),
        *_where(_JUMP_EQUAL, _CLOSE_RANGE, *_where_argument(_THIRD_ARGUMENT, _JUMP_EQUAL, (0, _CLOSE_ON_EXEC))),
        *_where(_JUMP_EQUAL, _SOCKETPAIR[machine], *_where_argument(_FIRST_ARGUMENT, _JUMP_EQUAL, [_UNIX])),
    ]
    checks += _allow_list() if machine == "x86_64" else _refusal_list(_FCNTL[machine])
    return b"".join(checks)


def _allow_list() -> list[bytes]:
    """Return the checks that allow what is listed, and refuse the rest."""
    checks: list[bytes] = []
    for number in _numbers(_ALLOWED_X86):
        checks += _where(_JUMP_EQUAL, number, _return(_ALLOW))
    for number, place, values in (
        (_FCNTL["x86_64"], _SECOND_ARGUMENT, _FCNTL_COMMANDS),
        (_IOCTL, _SECOND_ARGUMENT, _IOCTL_REQUESTS),
        (_PRCTL, _FIRST_ARGUMENT, _PRCTL_OPTIONS),
    ):
        checks += _where(_JUMP_EQUAL, number, *_where_argument(place, _JUMP_EQUAL, values))
    return [*checks, *_where(_JUMP_FROM, _NEWEST_X86, _refuse(errno.ENOSYS)), _refuse()]


def _refusal_list(fcntl: int) -> list[bytes]:
    """Return the checks that refuse what is listed, and larger pipes, and allow the rest."""
    larger_pipes = _where(_JUMP_EQUAL, _SET_PIPE_SIZE, _refuse())
    checks = _where(_JUMP_EQUAL, fcntl, _instruction(_LOAD, value=_SECOND_ARGUMENT), *larger_pipes, _return(_ALLOW))
    for number in (*_numbers(_REFUSED_ARM), *_REFUSED_EVERYWHERE):
        checks += _where(_JUMP_EQUAL, number, _refuse())
    return [*checks, _return(_ALLOW)]


def _numbers(table: str) -> list[int]:
    return [int(number) for number in table.split()[1::2]]


def _where_argument(place: int, test: int, values: Iterable[int]) -> list[bytes]:
    """Return the checks that allow a call whose argument passes the test with one of the values, else refuse it."""
    checks = [_instruction(_LOAD, value=place)]
    for value in values:
        checks += _where(test, value, _return(_ALLOW))
    return [*checks, _refuse()]


def _all_bits(place: int, bits: Iterable[int]) -> list[bytes]:
    """Return the checks that allow a call whose argument has each of the bits, else refuse it."""
    checks = [_instruction(_LOAD, value=place)]
    for bit in bits:
        checks += [_instruction(_JUMP_BITS, 1, 0, bit), _refuse()]
    return [*checks, _return(_ALLOW)]


def _where(test: int, value: int, *then: bytes) -> list[bytes]:
    """Return the checks that do `then` if the loaded value passes the test, and otherwise skip it."""
    return [_instruction(test, 0, len(then), value), *then]


def _refuse(error: int = errno.EPERM) -> bytes:
    return _return(_ERRNO | error)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value=value)


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
