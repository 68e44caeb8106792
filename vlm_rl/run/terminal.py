"""What a run shows in the terminal: a line per step, a table of samples, progress bars.

A terminal shows the current phase live; a log file or a pipe gets only plain, finished lines. Only rank 0 prints.
Model text is hostile here too: control characters, which could move the cursor or retitle the window, become visible,
and markup is never interpreted.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from vlm_rl.run.best import Best
from vlm_rl.run.rollout_row import RolloutRow
from vlm_rl.untrusted.visible_text import replace_invisible

SAMPLES = 6  # responses of a table
_VERDICT_STYLES = {"correct": "green", "wrong": "red", "no_answer": "red"}
_SECONDS_BETWEEN_PLAIN_LINES = 10.0
_SECONDS_INSIDE = 60.0  # between two plain lines from inside a step
_ID_SHOWN = 12  # characters of a problem's id
_PHASES_SHOWN = 4  # of the last step: those that took longest

# label, metric, format: the numbers that show at a glance whether a run is healthy
_NUMBERS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward", lambda v: f"{v:6.3f}"),
    ("acc", "rewards/accuracy/mean", lambda v: f"{v:4.2f}"),
    ("len", "completions/mean_length", lambda v: f"{v:6.1f}"),
    ("ent", "entropy", lambda v: f"{v:5.3f}"),
    ("gap", "rollout/logprob_gap", lambda v: f"{v:7.1e}"),
    ("gnorm", "grad_norm", lambda v: f"{v:8.2e}"),
)


class Advance(Protocol):
    """Advances a progress bar by `amount` and shows `note` next to it."""

    def __call__(self, amount: int = 1, *, note: str = "") -> None: ...


def is_main() -> bool:
    """Tell whether this process is rank 0, the only one that may print."""
    return os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    """Return this process's console: standard output on rank 0, silent on the others and after --quiet."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    is_quiet = not is_main() or os.environ.get("VLM_RL_OUTPUT") == "quiet"
    return Console(quiet=is_quiet, highlight=False, markup=False, width=width)


class Stages:
    """A line for each stage of a start, with its seconds.

    stages = Stages()
    problems = load()
    stages.done("data", f"{len(problems)} problems")     # data        0.4 s  1,024 problems
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._begun = time.monotonic()
        self.lines: list[str] = []

    def done(self, name: str, detail: str = "") -> None:
        """Print that the stage since the last call, or the start, is over."""
        now = time.monotonic()
        line = f"{name:<10}{now - self._begun:6.1f} s  {visible(detail)}".rstrip()
        self._begun = now
        self.lines.append(line)
        self._console.print(Text(line), soft_wrap=True)


def next_commands(out: str | Path, evaluated: Sequence[str], *, best: Best | None = None) -> str:
    """Return where a finished run is, which checkpoint is the best, and the commands that look at it.

    Args:
        out: the run directory.
        evaluated: the sets that it was evaluated on.
        best: its best checkpoint, which is then the one to evaluate. Where none is better than the model that the run
            began with, another evaluation would say no more, and none is proposed.
    """
    run = shlex.quote(str(out))
    lines = [] if best is None else [best.sentence()]
    lines += [
        f"the run is in {run}; next:",
        f"  vlm-rl report {run} --out {shlex.quote(str(Path(out) / 'report.html'))}",
        f"  vlm-rl demo {run}",
    ]
    if best is not None and best.step == 0 and best.last_step > 0:
        lines.append(
            "no evaluated step is more accurate than the model that the run began with: the report shows whether the "
            "reward rose meanwhile, and what became of lengths, entropy and gradient norm; a lower train.lr is the "
            "first key to try"
        )
        return "\n".join(lines)
    data = shlex.quote(evaluated[0]) if evaluated else "SET"
    results = shlex.quote(f"{str(out).rstrip('/')}-eval")
    model = shlex.quote(str(Path(out) / "best")) if best is not None and best.checkpoint is not None else run
    return "\n".join([*lines, f"  vlm-rl eval --model {model} --data {data} --out {results}"])


def start_command(words: Sequence[str], ranks: int, *, num_nodes: int = 1, first_node: str = "FIRST_NODE") -> str:
    """Return the command of `vlm-rl WORDS` on so many ranks of each node, as one types it there.

    `first_node` is its name, or what a shell makes its name of. After a signal torchrun waits for the ranks to save:
    on several nodes to a folder that they share, so for longer.
    """
    if ranks == num_nodes == 1:
        return f"vlm-rl {shlex.join(words)}"
    launch = f"torchrun --nproc-per-node {ranks} --shutdown-timeout {1800 if num_nodes == 1 else 3600}"
    if num_nodes > 1:
        launch += f" --nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint {first_node}:29500"
    return f"{launch} -m vlm_rl {shlex.join(words)}"


def resume_command(out: str | Path, *, command: str = "train") -> str:
    """Return the command that resumes the run in this folder on the same number of ranks."""
    ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    words = [command, str(out), "--resume"]
    if here == ranks:
        return start_command(words, int(ranks))
    # Several nodes need the options that started them.
    return f"torchrun ... --shutdown-timeout 1800 -m vlm_rl {shlex.join(words)}"


class StepLine:
    """A line per training step, live while the step runs.

    with StepLine(total=60) as line:
        line.phase(1, "rollout")
        line.done(1, metrics)
    """

    def __init__(self, *, total: int, start: int = 0, console: Console | None = None) -> None:
        self._total = total
        self._console = console or make_console()
        self._status: Status | None = None
        self._phase = self._inside = self._beside = self._last_seconds = ""
        self._told = 0.0  # when a log file last got a line from inside a step
        self._last_step = start
        self._last_time = time.monotonic()
        self._pace: list[float] = []  # seconds of each step, with the save and evaluation before it

    def __enter__(self) -> StepLine:
        self._last_time = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live line. Always call this, or the terminal's cursor stays hidden."""
        self._stop()

    @property
    def is_live(self) -> bool:
        """Return whether there is a terminal to show a phase on."""
        return self._console.is_terminal

    def phase(self, step: int, name: str) -> None:
        """Show the phase of the current step; a log file does not get it."""
        if not self.is_live:
            return
        self._phase, self._inside = f"step {step}/{self._total}  {name} …", ""
        if self._status is None:
            self._status = self._console.status("", spinner="dots")
            self._status.start()
        self._status.update(self._live_text())

    def inside(self, text: str) -> None:
        """Show how far the current phase is. A log file gets it once a minute."""
        self._inside = text
        if self._status is not None:
            self._status.update(self._live_text())
        elif not self.is_live and (now := time.monotonic()) - max(self._told, self._last_time) >= _SECONDS_INSIDE:
            self._told = now
            self._console.print(Text(f"step {self._last_step + 1}/{self._total}  {text}"), soft_wrap=True)

    def beside(self, text: str) -> None:
        """Show what happens meanwhile behind the phases until it is "", such as a save. Any thread may call this."""
        self._beside = text
        if (status := self._status) is not None:
            status.update(self._live_text())

    def _live_text(self) -> Text:
        shown = (self._phase, self._inside, self._beside, self._last_seconds)
        return Text("  ".join(text for text in shown if text), style="dim")

    def done(self, step: int, metrics: Mapping[str, float]) -> str:
        """Print the step's line and return it. A metric that is absent or not finite shows as a dash."""
        self._stop()
        now = time.monotonic()
        seconds = metrics.get("step_time", now - self._last_time)
        self._pace.append((now - self._last_time) / max(1, step - self._last_step))
        self._last_time, self._last_step = now, step
        phases = sorted((-value, name) for name, value in metrics.items() if name.startswith("timing/"))[
            :_PHASES_SHOWN
        ]
        longest = ", ".join(f"{name.removeprefix('timing/')} {-value:.1f} s" for value, name in phases)
        self._last_seconds = longest and f"(last step: {longest})"
        # The first step pays once for caches and a first evaluation.
        pace = self._pace[1:][-20:] or [seconds]
        left = (self._total - step) * sum(pace) / len(pace)
        line = Text(f"step {step:>{len(str(self._total))}}/{self._total}", style="bold")
        for label, name, write in _NUMBERS:
            line.append(f"  {label} ", style="dim not bold")
            line.append(_number(metrics, name, write), style="not bold")
        skipped = metrics.get("steps/skipped", 0.0)
        if math.isfinite(skipped) and skipped > 0:
            line.append(f"  skipped {skipped:.0f}", style="not bold yellow")
        line.append(f"  {seconds:.1f} s", style="not bold")
        line.append(f"  ETA {clock(left)}", style="dim not bold")
        self._console.print(line, soft_wrap=True)
        return line.plain

    def note(self, text: str) -> None:
        """Print a line between those of the steps, such as the result of an evaluation; a warning in yellow."""
        self._stop()
        style = "yellow" if "warning: " in text else ""
        self._console.print(Text(visible(text), style=style), soft_wrap=True)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _number(metrics: Mapping[str, float], name: str, write: Callable[[float], str]) -> str:
    value = metrics.get(name, math.nan)
    width = len(write(1.0))
    return write(value) if math.isfinite(value) else "–".rjust(width)


def sample_table(
    rows: Sequence[RolloutRow],
    asked: Mapping[str, tuple[str, str]],
    *,
    step: int,
    console: Console | None = None,
) -> None:
    """Print the responses with the highest and the lowest reward of a few prompts, at most SAMPLES of them.

    Args:
        rows: of one step.
        asked: the question and the gold answer of each problem, by its id.
        step: for the title.
        console: where to print; None for this process's output.
    """
    console = console or make_console()
    table = Table(title=f"step {step}: samples", box=SIMPLE_HEAD, title_justify="left", expand=True)
    table.add_column("problem", ratio=3, overflow="fold")
    table.add_column("gold", ratio=1, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("answer", ratio=1, overflow="fold")
    table.add_column("response", ratio=6, overflow="fold")
    shown = ""
    for row in contrasts(rows, SAMPLES):
        question, gold = asked[row.prompt_id] if row.prompt_id != shown else ("", "")  # once for both responses
        shown = row.prompt_id
        table.add_row(
            Text(f"{_short_id(visible(shown))}  {shortened(visible(question), 120)}".rstrip()),
            Text(shortened(visible(gold), 40)),
            Text(row.verdict, style=_VERDICT_STYLES.get(row.verdict, "yellow")),
            Text(f"{row.reward:.2f}"),
            Text(f"{row.length}{' (cut)' if row.stop_reason == 'length' else ''}"),
            Text(visible(row.extracted or "–")),
            Text(shortened(visible(row.text), 300)),
        )
    console.print(table)


def _short_id(name: str) -> str:
    """Return the end of a long id: its beginning is often that of the whole set."""
    return name if len(name) <= _ID_SHOWN else f"…{name[1 - _ID_SHOWN :]}"


class _Rewarded(Protocol):
    @property
    def prompt_id(self) -> str: ...
    @property
    def reward(self) -> float: ...


_RewardedRow = TypeVar("_RewardedRow", bound=_Rewarded)


def contrasts(rows: Iterable[_RewardedRow], limit: int) -> list[_RewardedRow]:
    """Return each prompt's best and worst response, the prompts with the widest gap first."""
    groups: dict[str, list[_RewardedRow]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row)
    pairs = [sorted(group, key=lambda row: row.reward) for group in groups.values()]
    pairs.sort(key=lambda group: group[0].reward - group[-1].reward)
    chosen = [row for group in pairs for row in ((group[-1], group[0]) if len(group) > 1 else group)]
    return chosen[:limit]


def visible(text: str) -> str:
    """Return the text on one line, safe to print: line ends as ⏎, other invisible characters as their code."""
    return replace_invisible(text, lambda character: "⏎" if character == "\n" else f"<{ord(character):02x}>")


def shortened(text: str, limit: int) -> str:
    """Return the text, or only its beginning and end if it is longer than about `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"


@contextmanager
def progress(description: str, *, total: int, console: Console | None = None) -> Iterator[Advance]:
    """Show a progress bar; a log file gets a plain line every ten seconds.

    with progress("evaluating toy-test", total=256) as advance:
        advance(8, note="accuracy 0.41")
    """
    console = console or make_console()
    if not console.is_terminal:
        yield _plain_progress(description, total, console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(amount: int = 1, *, note: str = "") -> None:
            bar.update(task, advance=amount, note=note) if note else bar.update(task, advance=amount)

        yield advance


def _plain_progress(description: str, total: int, console: Console) -> Advance:
    begun = last = time.monotonic()
    done = 0

    def advance(amount: int = 1, *, note: str = "") -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if done >= total or now - last >= _SECONDS_BETWEEN_PLAIN_LINES:
            last = now
            tail = f", {note}" if note else ""
            line = f"{description}: {done}/{total} in {now - begun:.1f} s{tail}"
            console.print(Text(visible(line)), soft_wrap=True)

    return advance


def clock(seconds: float) -> str:
    """Format seconds as 0:42, 12:07 or 3:05:00."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
