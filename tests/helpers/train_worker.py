"""Starts training runs that tests kill, stop or make fail, each in its own process.

Importing everything takes longer than training the tiny model, so this program imports once and forks for each job.
A job is a JSON object on a line of standard input. The answer is a line with the exit code, or minus the number of
the signal that ended it. toy_runs.Runner is the client.

    torchrun --nproc_per_node 2 tests/helpers/train_worker.py '{"arguments": [...], "faults": {...}}'

runs a single job on several ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlm_rl import periodic_evaluation, session
from vlm_rl import train as loop
from vlm_rl.cli import main
from vlm_rl.config import ConfigSection
from vlm_rl.evaluation.journal import Journal
from vlm_rl.grading.grader import Grader
from vlm_rl.learner.deepspeed import import_deepspeed
from vlm_rl.recorder import Timings
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.types import Grade

Job = dict[str, Any]


# -- faults --------------------------------------------------------------------------------------


def kill_at_event(folder: str, number: int) -> None:
    """Kill the process (SIGKILL) just before file operation `number` below `folder`."""
    _count_events(folder, lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == number else None)


def count_events(folder: str, out: str) -> None:
    """Write the number of such file operations in a whole run to `out`."""
    _count_events(folder, lambda count: Path(out).write_text(str(count)))


def _count_events(folder: str, act: Callable[[int], Any]) -> None:
    state = {"count": 0, "busy": False}
    touching = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in touching or state["busy"] or not str(arguments[0]).startswith(folder):
            return
        state["count"] += 1
        state["busy"] = True
        act(state["count"])
        state["busy"] = False

    sys.addaudithook(hook)


def terminate_in(phase: str, step: int) -> None:
    """Send SIGTERM when the phase begins for the step-th time."""
    _before(phase, step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def interrupt_in(phase: str, step: int) -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does, when the phase begins for the step-th time."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    _before(phase, step, interrupt)


def raise_in(phase: str, step: int, rank: int) -> None:
    """Raise an error on this rank when the phase begins for the step-th time."""

    def fail() -> None:
        if os.environ["RANK"] == str(rank):
            raise RuntimeError("injected fault")

    _before(phase, step, fail)


def _before(phase: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` when the phase begins for the number-th time."""
    times = {"count": 0}

    def watched(function: Callable[..., Any], is_it: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_it(*args):
                times["count"] += 1
                if times["count"] == number:
                    act()
            return function(*args, **kwargs)

        return call

    if phase == "save":
        session.commit = watched(session.commit, lambda *_: True)
    elif phase == "evaluation":
        periodic_evaluation.evaluate_into = watched(periodic_evaluation.evaluate_into, lambda *_: True)
    else:
        Timings.phase = watched(Timings.phase, lambda _, name: name == phase)


def kill_after_answers(number: int) -> None:
    """Answer problem by problem, and kill the process once the journal holds `number` problems."""
    periodic_evaluation.evaluate_into = partial(periodic_evaluation.evaluate_into, batch_size=1)
    add, kept = Journal.add, {"count": 0}

    def counted(self: Journal, groups: Any) -> None:
        add(self, groups)
        kept["count"] += len(groups)
        if kept["count"] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.add = counted


def skip_sync(number: int) -> None:
    """Let the number-th sync of weights not reach the sampler."""

    def nothing(tensors: Iterator[Any]) -> Iterator[Any]:
        for _ in tensors:
            pass
        return iter(())

    _change_sync(number, nothing)


def drop_tensor(number: int, name: str) -> None:
    """Leave a tensor out of the number-th sync of weights."""
    _change_sync(number, lambda tensors: ((key, value) for key, value in tensors if key != name))


def _change_sync(number: int, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    load, times = TransformersSampler.load_weights, {"count": 0}

    def load_weights(self: TransformersSampler, tensors: Iterator[Any], *, version: int) -> None:
        times["count"] += 1
        load(self, change(tensors) if times["count"] == number else tensors, version=version)

    TransformersSampler.load_weights = load_weights


def undecided(index: int) -> None:
    """Let the grader fail on this response of each group."""
    grade_many = Grader.grade_many

    def judged(self: Grader, tasks: Any) -> list[Grade]:
        grades = grade_many(self, tasks)
        size = 4  # responses per prompt of the toy configuration
        return [Grade("error", None, "fault", "injected") if i % size == index else g for i, g in enumerate(grades)]

    Grader.grade_many = judged


def record_keys(out: str) -> None:
    """Write every configuration key that is read while `train` runs to `out`; checking them does not count."""
    read: set[str] = set()
    train, get = loop.train, ConfigSection.__getattribute__

    def getattribute(self: ConfigSection, name: str) -> Any:
        if name in type(self).model_fields:
            read.add(f"{type(self).__name__}.{name}")
        return get(self, name)

    def recorded(*args: Any, **kwargs: Any) -> None:
        ConfigSection.__getattribute__ = getattribute
        try:
            train(*args, **kwargs)
        finally:
            ConfigSection.__getattribute__ = get
            Path(out).write_text(json.dumps(sorted(read)))

    loop.train = recorded


FAULTS: dict[str, Callable[..., None]] = {
    "undecided": undecided,
    "kill_at_event": kill_at_event,
    "count_events": count_events,
    "terminate_in": terminate_in,
    "interrupt_in": interrupt_in,
    "kill_after_answers": kill_after_answers,
    "raise_in": raise_in,
    "skip_sync": skip_sync,
    "drop_tensor": drop_tensor,
    "record_keys": record_keys,
}

# -- jobs ----------------------------------------------------------------------------------------


def run(job: Job) -> int:
    """Run a command line with its faults and return the exit code."""
    for name, arguments in job.get("faults", {}).items():
        FAULTS[name](**arguments)
    try:
        if "warm_start" in job:
            return _warm_start(**job["warm_start"])
        return main(job["arguments"])
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _warm_start(model: str, train: str, traces: str, out: str) -> int:
    from vlm_rl.config import TrainConfig
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.data.sets import load_set
    from vlm_rl.learner.sft import Example, warm_start
    from vlm_rl.templates import TEMPLATES

    problems = {problem.id: problem for problem in load_set(train)}
    examples = [Example(problems[name], response) for name, response in json.loads(Path(traces).read_text())]
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    config = TrainConfig(lr=3e-3, warmup_steps=5, schedule="cosine", zero_stage=0)
    warm_start(examples, Path(out), model_path=Path(model), builder=builder, config=config, batch_size=4)
    return 0


def fork(job: Job) -> int:
    """Run the job in a child process and return its exit code, or minus the signal that ended it."""
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job.get("folder", "."))
        code = run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - begun > job.get("kill_after", job["deadline"]):
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def serve() -> None:
    import_deepspeed()
    torch.set_num_threads(1)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(json.loads(sys.argv[1])))
    serve()
