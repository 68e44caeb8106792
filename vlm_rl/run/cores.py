"""How many cores this process may use, and how many of them other processes leave free."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def allowed_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores that the affinity and the container's quota of CPU time allow, at least 1."""
    count = len(_affinity())
    quota = _quota(cgroup)
    return max(1, min(count, int(quota))) if quota else count


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quota(cgroup: Path) -> float:
    """Return the cores that the control group's quota pays for; 0 if there is none."""
    try:  # version 2, then version 1
        if (file := cgroup / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0.0, float(quota) / float(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no control groups here
        return 0.0


def free_cores() -> int:
    """Return the allowed cores that are idle in the next second, at least 1."""
    usage = psutil.cpu_percent(interval=1.0, percpu=True)
    idle = sum(1 - usage[core] / 100 for core in _affinity() if core < len(usage))
    return max(1, min(allowed_cores(), round(idle)))


def set_threads() -> str:
    """Give OpenMP as many threads as cores are free, and return a line that says so; "" if all are.

    Must run before torch is imported. Threads that wait for each other in a loop make a busy machine many times
    slower. A value of OMP_NUM_THREADS that is set already stays.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return ""
    free, present = free_cores(), len(_affinity())
    if free == present:
        return ""
    os.environ["OMP_NUM_THREADS"] = str(free)
    many = "thread" if free == 1 else "threads"
    return f"{free} of {present} cores are free: taking {free} {many} (OMP_NUM_THREADS changes it)"
