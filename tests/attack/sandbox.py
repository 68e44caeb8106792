"""Attacks of programs on the sandbox that they run in (vlm_rl.sandbox).

All run in one process with limits of its own around everything (`python -m tests.attack.sandbox`), so that a wall
that does not hold cannot hurt the machine.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.attack.attack import Attack
from vlm_rl.grading.code_grader import CodeGrader
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.sandbox.program import Program, ProgramLimits, ProgramRun
from vlm_rl.sandbox.programs import Sandbox

PROMISE = "What may be hostile"
X86 = os.uname().machine == "x86_64"
MEMORY = 256 << 20
LIMITS = ProgramLimits(seconds=5.0, cpu_seconds=3, memory=MEMORY, threads=8, stack=1 << 20, num_files=500)
SHORT = ProgramLimits(seconds=0.7, cpu_seconds=1, memory=MEMORY)

# `attempt` returns what became of an action: "done", or the error's class.
HEAD = """
import ctypes, errno, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        action()
        return "done"
    except BaseException as error:
        return type(error).__name__
def call(*arguments):
    return errno.errorcode.get(ctypes.get_errno(), "?") if libc.syscall(*arguments) < 0 else "done"
def report(*words):
    print(*words)
"""


def said(run: ProgramRun) -> str:
    """Return what a program printed, and how it ended unless that is well."""
    words = run.stdout.decode(errors="replace").split()
    return " ".join([*words[:40], *([] if run.succeeded else [how(run)])])


def how(run: ProgramRun) -> str:
    """Return how a program ended, without the numbers that differ from run to run."""
    if run.ending != "ended":
        return f"killed: {run.ending}, {len(run.stdout) + len(run.stderr)} bytes"
    return f"signal {-run.code}" if run.code is not None and run.code < 0 else f"exit code {run.code}"


def bounded_memory(run: ProgramRun) -> str:
    """Return what a program printed, and whether its memory stayed below the limit."""
    return f"{said(run)}, {'below' if run.peak_bytes <= MEMORY else 'ABOVE'} the limit"


# name -> (program, limits, what is expected, how it is read)
Case = tuple[str, ProgramLimits, str, Callable[[ProgramRun], str]]
CASES: dict[str, Case] = {
    "fork bomb": (
        "while True:\n    outcome = attempt(os.fork)\n    if outcome != 'done': report(outcome); break",
        LIMITS,
        "PermissionError",
        said,
    ),
    "fork bomb without Python": (
        f"report(call({57 if os.uname().machine == 'x86_64' else 220}, 17), call(435, 0, 0), call(0x40000000 | 57))",
        LIMITS,
        "EPERM ENOSYS EPERM" if os.uname().machine == "x86_64" else "EPERM ENOSYS ENOSYS",
        said,
    ),
    "subprocess, shell, multiprocessing": (
        "import multiprocessing\n"
        "report(attempt(lambda: subprocess.run(['/bin/sh', '-c', 'id'])), os.system('id'),"
        " attempt(lambda: os.posix_spawn(sys.executable, ['x'], {})), attempt(multiprocessing.Process().start))",
        LIMITS,
        "PermissionError 32512 PermissionError PermissionError",
        said,
    ),
    "daemon that outlives its parent": (
        "report(attempt(lambda: os.fork() or os.setsid() or os.fork() or time.sleep(60)))",
        LIMITS,
        "PermissionError",
        said,
    ),
    "thread bomb": (
        "n = 0\ntry:\n"
        "    while n < 10_000: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError: report('refused', 'early' if n <= 8 else n)",
        LIMITS,
        "refused early",
        said,
    ),
    "10 GB of memory": (
        "report(attempt(lambda: bytearray(10 << 30)))",
        LIMITS,
        "MemoryError, below the limit",
        bounded_memory,
    ),
    "memory in small pieces": (
        "kept = []\ntry:\n    while True: kept.append(bytearray(1 << 20))\n"
        "except MemoryError: kept = None; report('MemoryError')",
        LIMITS,
        "MemoryError, below the limit",
        bounded_memory,
    ),
    "memory that the limit does not count": (
        "report(attempt(lambda: os.memfd_create('x')),"
        " call(29 if os.uname().machine == 'x86_64' else 194, 0, 1 << 30, 512), call(425, 8, 0), call(447, 0))",
        LIMITS,
        "PermissionError EPERM EPERM EPERM",
        said,
    ),
    "memory in sockets, also in flight": (
        "import array, socket\na, b = socket.socketpair()\n"
        "rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno()]))]\n"
        "report(attempt(lambda: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)),"
        " attempt(lambda: a.sendmsg([b'z'], rights)), attempt(lambda: a.send(b'x')))",
        LIMITS,
        "PermissionError PermissionError done",
        said,
    ),
    "what a whole machine or user shares": (
        "x86 = os.uname().machine == 'x86_64'\nslots = ctypes.byref(ctypes.c_ulong(0))\n"
        "report(call(206 if x86 else 0, 1000, slots), call(294 if x86 else 26, 0), call(458, 0, 0, 0, 0))",
        LIMITS,
        "EPERM EPERM EPERM",
        said,
    ),
    "memory in sockets of the default size": (
        "kept, held = [], 0\ntry:\n    while True:\n        a, b = socket.socketpair(); kept.append(b)\n"
        "        a.setblocking(False)\n        try:\n            while True: held += a.send(bytes(1 << 16))\n"
        "        except BlockingIOError: a.close()\n"
        "except OSError: report('refused', held + resource.getrlimit(resource.RLIMIT_AS)[0] <= (256 << 20))",
        LIMITS,
        "refused True",
        said,
    ),
    "a table of descriptors for each thread": (
        "def unshare(): outcomes.append(call(436, 4_000_000, 4_000_001, 2))\noutcomes = []\n"
        "threads = [threading.Thread(target=unshare) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "report(*sorted({*outcomes}), call(436, 4_000_000, 4_000_001, 0), call(436, 4_000_000, 4_000_001, 4),"
        " call(56 if os.uname().machine == 'x86_64' else 220, 0x10900, 0, 0, 0, 0))",
        LIMITS,
        "EPERM done done EPERM",
        said,
    ),
    "sockets of families that load modules of the kernel": (
        "pair, number = (ctypes.c_int * 2)(), 53 if os.uname().machine == 'x86_64' else 199\n"
        "report(*sorted({call(number, family, 1, 0, pair) for family in (2, 10, 16, 17, 30, 31, 38, 40, 41, 45)}),"
        " call(number, 1, 1, 0, pair))",
        LIMITS,
        "EPERM done",
        said,
    ),
    "locks, which the kernel keeps without a limit": (
        "import fcntl\nfile = open('x', 'wb')\nreport(attempt(lambda: fcntl.lockf(file, 1, 1, 0)),"
        " attempt(lambda: fcntl.flock(file, 2)))",
        LIMITS,
        "PermissionError PermissionError" if X86 else "done done",
        said,
    ),
    "calls that no program of a data set needs": (
        "numbers = (47, 72, 101, 105, 133, 149, 157, 162, 188, 206, 222, 239, 253, 256, 275, 276, 278, 282, 283,"
        " 289, 290, 298, 317, 319, 321, 322, 323, 324, 330, 333, 424, 425, 437, 449, 462)\n"
        "def get(n): ctypes.set_errno(0); return call(n, -1, -1, 0, 0, 0)\n"
        "report(*sorted({get(n) for n in numbers if os.uname().machine == 'x86_64'} or {'EPERM'}), call(500, 0))",
        LIMITS,
        "EPERM ENOSYS",
        said,
    ),
    "files, databases and threads, which are no attack": (
        "import shutil, sqlite3\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "open('a', 'w').write('x'); shutil.copy2('a', 'b'); os.mkdir('d'); shutil.make_archive('c', 'zip', 'd')\n"
        "database = sqlite3.connect(':memory:'); database.execute('create table t (x)')\n"
        "with ThreadPoolExecutor(4) as pool: numbers = list(pool.map(abs, range(-9, 0)))\n"
        "report(sum(numbers), *sorted(os.listdir()), database.execute('select count(*) from t').fetchone()[0])",
        LIMITS,
        "45 a b c.zip d main.py 0",
        said,
    ),
    "a loop of asyncio, which is no attack": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nreport(asyncio.run(f()))",
        LIMITS,
        "5",
        said,
    ),
    "memory in pipes": (
        "import fcntl\nn = 0\ntry:\n    while True:\n        a, b = os.pipe(); n += 1\n"
        "        fcntl.fcntl(b, 1031, 1 << 20)\nexcept OSError: report('refused', n <= 64)",
        LIMITS,
        "refused True",
        said,
    ),
    "endless output": ("while True: print('x' * 10_000)", LIMITS, "killed: output, 1048576 bytes", how),
    "endless output on stderr": (
        "while True: sys.stderr.write('x' * 10_000)",
        LIMITS,
        "killed: output, 1048576 bytes",
        how,
    ),
    "one line without an end": (
        "while True: os.write(1, b'x' * 65536)",
        LIMITS,
        "killed: output, 1048576 bytes",
        how,
    ),
    "SIGKILL to its parent": (
        "os.kill(os.getppid(), 9); os.kill(1, 9); time.sleep(0.1); report('alive', os.getppid())",
        LIMITS,
        "alive 1",
        said,
    ),
    "SIGSTOP and others to its parent": (
        "for number in (19, 15, 2, 1, 3, 6, 13, 14, 17, 24, 25): os.kill(1, number)\n"
        "time.sleep(0.1); report('alive', os.getppid())",
        LIMITS,
        "alive 1",
        said,
    ),
    "kill -1 and every process number": (
        "outcomes = {attempt(lambda number=number: os.kill(number, 9)) for number in (-1, *range(3, 3000))}\n"
        "report(*sorted(outcomes))",
        LIMITS,
        "ProcessLookupError",
        said,
    ),
    "stopping itself": ("os.kill(os.getpid(), 19)", SHORT, "killed: time, 0 bytes", how),
    "sleeping forever": ("time.sleep(10**6)", SHORT, "killed: time, 0 bytes", how),
    "closed descriptors, all signals ignored, sleeping forever": (
        "[attempt(lambda n=n: signal.signal(n, signal.SIG_IGN)) for n in range(1, 65)]; os.closerange(0, 100)\n"
        "while True: time.sleep(100)",
        SHORT,
        "killed: time, 0 bytes",
        how,
    ),
    "computing forever": (
        "[attempt(lambda n=n: signal.signal(n, signal.SIG_IGN)) for n in range(1, 65)]\nwhile True: pass",
        ProgramLimits(seconds=30.0, cpu_seconds=1, memory=MEMORY),
        "signal 9",
        how,
    ),
    "files of the machine": (
        "report(*{attempt(lambda path=path: os.stat(path)) for path in ('/etc/passwd', '/etc', '/proc', '/proc/self',"
        " '/proc/1/environ', '/sys', '/home', '/root', '/dev/shm', '/dev/mem', '/dev/tty', '/run', '/var', FOLDER,"
        " PROJECT)})",
        LIMITS,
        "FileNotFoundError",
        said,
    ),
    "the environment": (
        "report(*sorted(os.environ), any('SECRET' in key + value for key, value in os.environ.items()))",
        LIMITS,
        "HOME LANG LD_LIBRARY_PATH OPENBLAS_NUM_THREADS PATH PYTHONPATH False",
        said,
    ),
    "descriptors that were left open": (
        "report([n for n in range(3, 4096) if attempt(lambda n=n: os.fstat(n)) == 'done'])",
        LIMITS,
        "[]",
        said,
    ),
    "writing outside its folder": (
        "report(*sorted({attempt(lambda path=path: open(path, 'w')) for path in ('/x', '/lib/x', '/dev/x',"
        " sys.executable, os.__file__, FOLDER + '/x')}), attempt(lambda: os.remove(os.__file__)),"
        " attempt(lambda: os.rename('/tmp', '/t')))",
        LIMITS,
        "FileNotFoundError OSError OSError OSError",
        said,
    ),
    "links to the machine's files": (
        "os.symlink('/', 'root'); os.symlink(FOLDER + '/target', 'link')\n"
        "os.remove('main.py'); os.symlink('/etc', 'main.py')\n"
        "report(attempt(lambda: open('link', 'a')), attempt(lambda: os.listdir('main.py')),"
        " os.path.exists('root/etc'), attempt(lambda: os.link(os.__file__, 'hard')))",
        LIMITS,
        "FileNotFoundError FileNotFoundError False OSError",
        said,
    ),
    "a million files": (
        "n = 0\ntry:\n    while n < 10**6: open(str(n), 'w').close(); n += 1\n"
        "except OSError as error: report(errno.errorcode[error.errno], n <= 500)",
        LIMITS,
        "ENOSPC True",
        said,
    ),
    "a full disk": (
        "def fill(name):\n    with open(name, 'wb', buffering=0) as file:\n"
        "        while True: file.write(bytes(1 << 20))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "report(attempt(lambda: fill('a')), attempt(lambda: fill('b')),"
        " sum(os.stat(n).st_size for n in os.listdir()) < 17 << 20)",
        LIMITS,
        "OSError OSError True",
        said,
    ),
    "a program in its folder": (
        "import shutil; shutil.copy(sys.executable, 'x'); os.chmod('x', 0o755)\n"
        "report(attempt(lambda: os.execv('/tmp/x', ['x'])), attempt(lambda: os.execv('/bin/sh', ['sh'])))",
        LIMITS,
        "PermissionError FileNotFoundError",
        said,
    ),
    "starting again as Python": (
        "open('again.py', 'w').write('import os\\ntry: os.fork()\\nexcept OSError as error: print(error.errno)')\n"
        "os.execv(sys.executable, [sys.executable, 'again.py'])",
        LIMITS,
        "1",
        said,
    ),
    "the network": (
        "def connect(address): socket.create_connection(address, timeout=1)\n"
        "report(*{attempt(lambda a=a: connect(a)) for a in (('127.0.0.1', PORT), ('::1', PORT), ('192.0.2.1', 80))},"
        " attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),"
        " attempt(lambda: socket.socket(16, 3, 0)))",
        LIMITS,
        "PermissionError PermissionError PermissionError",
        said,
    ),
    "abstract Unix sockets": (
        "report(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)))",
        LIMITS,
        "PermissionError",
        said,
    ),
    "ptrace and memory of others": (
        "report(libc.ptrace(16, 1, 0, 0), libc.process_vm_writev(1, 0, 0, 0, 0, 0), call(438, 0, 0, 0))",
        LIMITS,
        "-1 -1 EPERM",
        said,
    ),
    "limits raised": (
        "kinds = [getattr(resource, 'RLIMIT_' + n) for n in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'CORE')]\n"
        "report(*{attempt(lambda k=k: resource.setrlimit(k, (-1, -1))) for k in kinds})",
        LIMITS,
        "ValueError",
        said,
    ),
    "limits of the process that waits for it": (
        "report(*{attempt(lambda k=k: resource.prlimit(1, k, (0, 0))) for k in range(16)})",
        LIMITS,
        "done, ended",
        lambda run: f"{run.stdout.decode().strip()}, {run.ending}",
    ),
    "mounts, namespaces, other roots": (
        "report(libc.mount(b't', b'/tmp', b'tmpfs', 0, b''), libc.umount2(b'/tmp', 2), libc.unshare(0x10000000),"
        " libc.setns(0, 0), libc.chroot(b'/tmp'), libc.unshare(0x20000), call(430, 0, 0))",
        LIMITS,
        "-1 -1 -1 -1 -1 -1 EPERM",
        said,
    ),
    "another user": (
        "report(os.getuid(), *(attempt(lambda f=f: f(0)) for f in (os.setuid, os.setgid, os.seteuid)),"
        " attempt(lambda: os.setgroups([0])), attempt(lambda: os.nice(-5)))",
        LIMITS,
        " ".join(["1000", *["PermissionError" if X86 else "OSError"] * 3, "PermissionError PermissionError"]),
        said,
    ),
    "capabilities": (
        "class H(ctypes.Structure): _fields_ = [('v', ctypes.c_uint32), ('p', ctypes.c_int)]\n"
        "data = (ctypes.c_uint32 * 6)(); libc.capget(ctypes.byref(H(0x20080522, 0)), data)\n"
        "report(*data, sum(libc.prctl(23, n, 0, 0, 0) for n in range(41)), libc.prctl(39, 0, 0, 0, 0),"
        " libc.prctl(21, 0, 0, 0, 0))",
        LIMITS,
        "0 0 0 0 0 0 0 1 2",
        said,
    ),
    "10 to the 10 to the 9": (
        "x = 10 ** 10 ** 9",
        ProgramLimits(seconds=30.0, cpu_seconds=1, memory=MEMORY),
        "signal 9",
        how,
    ),
    "a gigantic number as text": ("report(attempt(lambda: str(10 ** 10 ** 5)))", LIMITS, "ValueError", said),
    "recursion without an end": (
        "sys.setrecursionlimit(10**9)\ndef f(): return sorted([1], key=lambda _: f())\nf()",
        LIMITS,
        "signal 11",
        how,
    ),
    "a crash of the interpreter": ("ctypes.string_at(0)", LIMITS, "signal 11", how),
    "the replies of the launcher, printed": (
        """print('{"ending": "ended", "code": 0, "sizes": [0, 0]}', flush=True); os._exit(3)""",
        LIMITS,
        "exit code 3",
        how,
    ),
    "input that is not read": ("report('done')", LIMITS, "done", said),
    "a program that is not a text": ("\x00\ud800", LIMITS, "exit code 1", how),
}

# Programs that want to be called right without solving anything: `secret` maps 1 to 918273 and 2 to 645546.
SECRETS = [918273, 645546]
REPLY = "import os\nfor n in range(1, 30):\n    try: os.write(n, b'LINES')\n    except OSError: pass\n"
LINES = "".join(json.dumps({"value": value}) + "\\n" for value in (True, None, 1, [], {"opaque": "x"}))
FORGERIES = {
    "an exit": "import sys; sys.exit(0)",
    "a quick exit": "import os; os._exit(0)",
    "an exit at the end": "import atexit, os\ndef secret(x): return 0\natexit.register(lambda: os._exit(0))",
    "SystemExit(0) of the call": "def secret(x): raise SystemExit(0)",
    "equal to everything": (
        "class E:\n    def __eq__(s, o): return True\n    __hash__ = lambda s: 0\ndef secret(x): return E()"
    ),
    "a number equal to everything": (
        "class E(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
        "    __hash__ = int.__hash__\ndef secret(x): return E(5)"
    ),
    "a list equal to everything": "class E(list):\n    def __eq__(s, o): return True\ndef secret(x): return E([5])",
    "not a number": "def secret(x): return float('nan')",
    "replaced builtins": (
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda *a: 1\n"
        "builtins.all = lambda *a: True\ndef secret(x): return 0"
    ),
    "replaced JSON": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef secret(x): return 0",
    "replies of its own": REPLY.replace("LINES", LINES),
    "replies and an exit": REPLY.replace("LINES", LINES) + "os._exit(0)",
    "the words of a verdict": "print('correct'); print('passes all 2 tests')\ndef secret(x): return 'correct'",
    "a search of frames and objects": """
import gc, sys
def secret(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if str(918273) in repr(value)[:10**6].replace(repr(__doc__), ''): return [918273, 645546][x - 1]
        frame = frame.f_back
    numbers = {n for o in gc.get_objects() if type(o) is list for n in o if type(n) is int and 10**5 < n < 10**6}
    return 918273 if 918273 in numbers else 0
""",
    "a search of all that is there": """
import os
here = [(folder, name) for folder, _, names in os.walk('/') if '/python' not in folder for name in names]
def secret(x):
    wanted = str(int('817263') + 101010).encode()
    places = [os.path.join(*place) for place in here]
    found = []
    for path in [*places, '/proc/self/mem', '/proc/1/mem', '/proc/self/environ', '/proc/1/cmdline']:
        try: found += [path] if wanted in open(path, 'rb').read(1 << 22) else []
        except (OSError, MemoryError): pass
    return 918273 if [path for path in found if 'program.py' not in path] else 0
""",
}


def accepted_forgeries() -> str:
    """Return which programs are called right that solve nothing, and whether one that is right is."""
    tests = CodeTests(function="secret", inputs=[[1], [2]], outputs=SECRETS, rule="equal", seconds=4.0)
    stdin = CodeTests(inputs=["1\n", "2\n"], outputs=[f"{value}\n" for value in SECRETS], seconds=2.0)
    right = f"def secret(x): return {SECRETS}[x - 1]\nif __name__ == '__main__': print(secret(int(input())))"
    programs = {**FORGERIES, "the right one": right}
    with CodeGrader(workers=2) as grader:
        judged = grader.judge(
            [(text, {"tests": kind.packed()}) for text in programs.values() for kind in (tests, stdin)]
        )
    verdicts = dict(zip([(name, kind) for name in programs for kind in "fs"], judged, strict=True))
    return ", ".join(name for (name, _), (verdict, _) in verdicts.items() if verdict != "wrong")


def carry_out() -> dict[str, str]:
    """Run all attacks. Returns name -> what was observed."""
    limits = {"NPROC": 3000, "FSIZE": 1 << 28, "CPU": 300, "CORE": 0}
    for name, value in limits.items():  # around everything, should a wall not hold
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.environ["SECRET"] = "SECRET"
    listener, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0vlm-rl-{os.getpid()}")
    abstract.listen()
    kept_open = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(kept_open, True)
    with tempfile.TemporaryDirectory() as folder, Sandbox(workers=2) as sandbox:
        target = Path(folder) / "target"
        target.write_text("untouched")
        known: dict[str, Any] = {"PORT": listener.getsockname()[1], "ABSTRACT": f"vlm-rl-{os.getpid()}"}
        known |= {"FOLDER": folder, "PROJECT": str(Path(__file__).resolve().parents[2])}
        head = HEAD + "".join(f"{name} = {value!r}\n" for name, value in known.items())
        programs = [
            Program(head + source, stdin=b"x" * 1_000_000 if name == "input that is not read" else b"", limits=limits)
            for name, (source, limits, _, _) in CASES.items()
        ]
        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(sandbox.run, programs))
        observed = {name: CASES[name][3](run) for name, run in zip(CASES, runs, strict=True)}
        after = sandbox.run(Program("print(1 + 2)")).stdout.decode()
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"/tmp/main.py" in _text_of(path)]
        is_untouched = target.read_text() == "untouched" and [*Path(folder).iterdir()] == [target]
        observed["forged verdicts"] = accepted_forgeries()
        observed["after all of them"] = f"{after.strip()}, {len(left)} left, files {'un' * is_untouched}touched"
    return observed


def _text_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@cache
def observations() -> dict[str, str]:
    """Return what all attacks observed, from a process with limits of its own."""
    command = [sys.executable, "-m", "tests.attack.sandbox"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    return json.loads(done.stdout)


ATTACKS = tuple(
    Attack(f"a program: {name}", PROMISE, expected, lambda _folder, name=name: observations()[name], slow=True)
    for name, expected in (
        *((name, case[2]) for name, case in CASES.items()),
        ("forged verdicts", "the right one, the right one"),
        ("after all of them", "3, 0 left, files untouched"),
    )
)

if __name__ == "__main__":
    # In a thread: a launcher must not depend on who started it.
    found: list[dict[str, str]] = []
    worker = threading.Thread(target=lambda: found.append(carry_out()))
    worker.start()
    worker.join()
    print(json.dumps(found[0]))
