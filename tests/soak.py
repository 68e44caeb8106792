"""Run a training and the demo for long and show that neither grows: `python -m tests.soak [train] [demo]`.

Both run as a user runs them, in their own process with their own temporary folder. Sampled while they run: resident
memory, open files, threads and child processes of the whole process tree, and the files in the temporary folder. The
table compares the second tenth of the time with the last tenth. The exit code is 1 where one of them grew.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from tests.helpers.served import free_port
from tests.helpers.toy_runs import ROOT, Runner, clean_environment, make_toys

STEPS = 2_000
VISITS = 400
# What may be more at the end: allocators and caches settle late, and a pool of threads breathes. A leak of one
# object per step passes all of these.
ALLOWED = {"MiB": 1.05, "files": 1.0, "threads": 1.1, "processes": 1.0, "temporary files": 1.0}


@dataclass(frozen=True)
class Use:
    """What a process tree uses at one moment."""

    mib: float  # resident memory, in 2^20 bytes
    files: int  # open file descriptors
    threads: int
    processes: int
    temporary: int  # files in its temporary folder


def use_of(process: psutil.Process, temporary: Path) -> Use | None:
    """Return what the process and its children use, or None if one of them ended meanwhile."""
    try:
        tree = [process, *process.children(recursive=True)]
        return Use(
            mib=sum(each.memory_info().rss for each in tree) / 2**20,
            files=sum(each.num_fds() for each in tree),
            threads=sum(each.num_threads() for each in tree),
            processes=len(tree),
            temporary=sum(path.is_file() for path in temporary.rglob("*")),
        )
    except (psutil.Error, FileNotFoundError):
        return None


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """Start a command with its own temporary folder; yields process and folder, and ends it."""
    temporary = folder / "tmp"
    temporary.mkdir()
    log = (folder / "log").open("w")
    environment = clean_environment() | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid), temporary
    finally:
        process.terminate()
        code = process.wait(120)
        print(f"exit code {code}; the end of its log:\n{(folder / 'log').read_text()[-400:]}")


def sampled(process: psutil.Process, temporary: Path, is_over: Callable[[], bool], every: float) -> list[Use]:
    """Return what the process used, every so many seconds until it is over."""
    uses = []
    while not is_over() and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if (use := use_of(process, temporary)) is not None:
            uses.append(use)
        time.sleep(every)
    return uses


def is_flat(uses: list[Use], what: str) -> bool:
    """Print the second tenth of the samples beside the last, and tell whether nothing grew."""
    tenth = len(uses) // 10
    assert tenth, f"{what}: only {len(uses)} samples"
    early, late = (
        [statistics.median(values) for values in zip(*map(astuple, part), strict=True)]
        for part in (uses[tenth : 2 * tenth], uses[-tenth:])
    )
    flat = True
    print(f"\n{what}: {len(uses)} samples")
    for (name, factor), before, after in zip(ALLOWED.items(), early, late, strict=True):
        is_more = after > before * factor
        flat &= not is_more
        print(f"  {name:16} {before:9.1f} -> {after:9.1f}{'  GREW' if is_more else ''}")
    return flat


def train(folder: Path) -> bool:
    """Train the toy policy for STEPS steps."""
    from vlm_rl.toy.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model

    tiny = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
    with Runner(folder) as runner:
        toys = make_toys(folder, tiny_model=tiny, runner=runner)
    config = toys.config(
        "soak",
        train={"steps": STEPS},
        checkpoint={"every": 200, "keep_last": 1},
        data={"eval": [str(toys.heldout)]},
        eval={"every": 100},
    )
    with started([sys.executable, "-m", "vlm_rl", "train", str(config)], folder) as (process, temporary):
        uses = sampled(process, temporary, lambda: len(toys.run("soak").metrics()) >= STEPS, every=2.0)
    trained = len(toys.run("soak").metrics())
    print(f"{trained} of {STEPS} steps")
    return is_flat(uses, "training") and trained == STEPS


def demo(folder: Path) -> bool:
    """Open the demo's page on the recorded runs VISITS times, each time on a different problem, tab and search."""
    from tests.helpers.browser import open_browser, open_page
    from vlm_rl.demo.server import MAX_SESSIONS

    port = free_port()
    recorded = sorted(str(path) for path in (ROOT / "demo" / "assets" / "recorded").iterdir() if path.is_dir())
    with (
        started([sys.executable, "-m", "vlm_rl", "demo", *recorded, "--port", str(port)], folder) as (
            process,
            temporary,
        ),
        open_browser() as browser,
    ):
        wait_for_port(port)
        uses = []
        for number in range(VISITS):
            with open_page(f"http://127.0.0.1:{port}/", browser=browser) as visit:
                visit.page.wait_for_selector("#problem article >> nth=1")
                for _ in range(number % 5):
                    visit.page.get_by_role("button", name="Next").first.click()
                visit.page.get_by_role("tab").nth(number % 4).click()
                assert visit.failures == []
            if (use := use_of(process, temporary)) is not None:
                uses.append(use)
    return is_flat(uses[MAX_SESSIONS:], f"demo, after the first {MAX_SESSIONS} visits, whose values it may hold")


def wait_for_port(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit("the demo did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=("train", "demo"), default=("train", "demo"))
    outcomes = []
    for name in parser.parse_args().what:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(globals()[name](Path(folder)))
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
