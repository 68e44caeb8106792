"""Attacks on training runs and their files: bad weights, second writers, full disks, damaged and hostile files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.attack.attack import Attack
from tests.attack.toys import toys
from tests.helpers.toy_runs import (
    DEADLINE,
    WORKER,
    ExitResult,
    assert_equal_runs,
    assert_sound,
    clean_environment,
    metrics_of,
)
from vlm_rl.run.directory import RunDirectory

STEPS = 2
CHANGES: dict[str, Any] = {"train": {"steps": STEPS}, "checkpoint": {"every": 1}, "eval": {"every": STEPS}}
# The lease of a process on another machine, whose clock is an hour behind, on a file system without kernel locks.
RENEWING = """
import json, sys, time
from pathlib import Path
path = Path(sys.argv[1])
lease = {"host": "elsewhere", "pid": 7, "machine": "m2", "holder": "h2"}
lease["since"] = time.strftime("%Y-%m-%d %H:%M:%S+00:00", time.gmtime(time.time() - 3600))
for renewals in range(100_000):
    path.with_name("next").write_text(json.dumps({**lease, "renewals": renewals}))
    path.with_name("next").replace(path)
    print(flush=True)
    time.sleep(0.1)
"""


def changes() -> dict[str, Any]:
    return {**CHANGES, "data": {"eval": [str(toys().heldout)]}}


@cache
def base_run() -> RunDirectory:
    """Return a finished run, trained once for all attacks."""
    return toys().train_run("base", **changes())


def start(folder: Path, **faults: Any) -> ExitResult:
    """Train a run in this folder."""
    config = toys().config("attacked", **changes(), out=str(folder / "run"))
    return toys().runner("train", str(config), faults=faults)


def copy_of_base(folder: Path) -> RunDirectory:
    """Return a copy of the finished run, which resumes in its own place."""
    base, run = base_run(), RunDirectory(folder / "run")
    shutil.copytree(base.path, run.path)
    text = run.config_text().replace(str(base.path), str(run.path))
    (run.path / "config.yaml").write_text(text)
    return run


def resume(run: RunDirectory) -> ExitResult:
    return toys().runner("train", str(run.path), "--resume")


def ended(result: ExitResult, *words: object) -> str:
    """Return the exit code, and whether the output holds the words and no traceback that a user's mistake has not."""
    missing = [str(word) for word in words if str(word) not in result.output]
    if missing or (result.code == 2 and "Traceback" in result.output):
        return f"exit code {result.code}, without {missing} in {result.output[-2000:]}"
    return f"exit code {result.code}"


def files_of(run: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


# -- weights ---------------------------------------------------------------------------------------


def nan_before_a_save(folder: Path, *, what: str, name: str) -> str:
    from vlm_rl.run.checkpoint import newest_verified

    result = start(folder, poison={"what": what, "number": 2})
    newest = newest_verified(folder / "run" / "checkpoints")
    said = ended(result, "NonFiniteError: step 2: ", name, "holds NaN or infinity", "resume from it")
    return f"{said}, newest {newest[0].name if newest else None}"


def rewritten(run: RunDirectory, change: Callable[[Path], None]) -> Path:
    """Change the newest checkpoint's files and give it a manifest that matches them."""
    from vlm_rl.run.checkpoint import commit, saving
    from vlm_rl.run.manifest import MANIFEST, read_manifest

    step, path = run.checkpoints()[-1]
    info = read_manifest(path).info
    with saving(path.parent, step=step) as work:
        shutil.copytree(path, work, dirs_exist_ok=True)
        (work / MANIFEST).unlink()
        change(work)
        return commit(work, path.parent, step=step, info=info)


def nan_in_the_newest_checkpoint(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    def damage(work: Path) -> None:
        weights = load_file(work / "model.safetensors")
        next(iter(weights.values())).view(-1)[-1] = float("nan")
        save_file(weights, work / "model.safetensors", {"format": "pt"})

    run = copy_of_base(folder)
    damaged = rewritten(run, damage)
    result = resume(run)
    said = ended(result, f"PASSED OVER, falling back to an older one: {damaged}", "from step-000001 (step 2 of 2")
    assert_equal_runs(run, base_run())
    return f"{said}, equal to the run without"


def code_in_the_optimizers_state(folder: Path) -> str:
    import torch

    marker = folder / "marker"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    run = copy_of_base(folder)
    damaged = rewritten(run, lambda work: torch.save({"module": Payload()}, next((work / "learner").rglob("*.pt"))))
    name = next((damaged / "learner").rglob("*.pt"))
    said = ended(resume(run), f"vlm-rl: {name} is not a file that DeepSpeed wrote (it names posix.system)")
    return f"{said}, {'code ran' if marker.exists() else 'no code ran'}"


def only_damaged_checkpoints(folder: Path) -> str:
    run = copy_of_base(folder)
    for _, path in run.checkpoints():
        (path / "config.json").write_text("{}")
    before = files_of(run)
    said = ended(resume(run), "none of its 2 checkpoints verifies, and nothing was changed", "starts over at step 1")
    return f"{said}, {'the same files' if files_of(run) == before else 'other files'}"


# -- second writers ----------------------------------------------------------------------------------


def two_resumes_at_once(folder: Path) -> str:
    run, signs = copy_of_base(folder), [folder / name for name in ("begun", "until")]
    shutil.rmtree(run.checkpoints()[-1][1])  # step 2 is trained again
    faults = {"pause_in": {"phase": "update", "step": 1, "begun": str(signs[0]), "until": str(signs[1])}}
    job = json.dumps({"arguments": ["train", str(run.path), "--resume"], "faults": faults})
    words = [sys.executable, "-m", WORKER, job]
    first = subprocess.Popen(words, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(signs[0].exists)
        before = files_of(run)
        second = ended(resume(run), f"vlm-rl: {run.path}: another process (host ", f"pid {first.pid}, since ")
        same = files_of(run) == before
    finally:
        signs[1].touch()
        first.communicate(timeout=DEADLINE)
    assert_equal_runs(run, base_run())
    return f"second {second}, {'nothing written' if same else 'written'}; first exit code {first.returncode}"


def resume_while_another_machine_trains(folder: Path) -> str:
    run = copy_of_base(folder)
    renewing = subprocess.Popen(
        [sys.executable, "-c", RENEWING, str(run.path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert renewing.stdout is not None and renewing.stdout.readline()
        return ended(resume(run), "another process (host elsewhere, pid 7, since ", "writes here")
    finally:
        renewing.kill()
        renewing.communicate()


def evaluation_into_a_run_in_training(folder: Path) -> str:
    from vlm_rl.run.lock import RunLock

    run = copy_of_base(folder)
    with RunLock(run.path) as lock:
        lock.acquire()
        result = evaluate(run.path, run.checkpoints()[0][1])
    return ended(result, f"vlm-rl: {run.path}: another process (host ", f"pid {os.getpid()}, since ")


def evaluate(out: Path, model: Path, **faults: Any) -> ExitResult:
    made = toys()
    words = ["eval", "--model", model, "--data", made.heldout, "--out", out, "--sampler", "transformers"]
    words += ["--max-tokens", 8, "--max-prompt-tokens", 160, "--batch-size", 1]
    return made.runner(*map(str, words), faults=faults)


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


# -- disks and signals -------------------------------------------------------------------------------


def full_disk(folder: Path, *, what: str, file: str) -> str:
    result = start(folder, full_disk_at={"what": what})
    return ended(result, f"vlm-rl: {folder / 'run' / file}", "could not be written: ", "No space left on device")


def failing_disk(folder: Path, **faults: Any) -> str:
    """Train on a disk that fails for good, then resume on a sound one."""
    run = folder / "run"
    for name, options in faults.items():
        faults[name] = {**options, "folder": str(run)} if name == "fail_disk" else options
    failed = start(folder, **faults)
    said = ended(failed, f"vlm-rl: {run}", "make sure that the folder is there")
    lines = failed.output.splitlines()
    in_one = "in one line" if str(run) in lines[-1] and "vlm-rl: " in lines[-1] else f"not in one line: {lines[-3:]}"
    assert_resumed(RunDirectory(run))
    return f"{said}, {in_one}; resumed as if it had not been"


def assert_resumed(run: RunDirectory) -> None:
    """Resume a run that has failed; it must equal the one that was left alone."""
    resumed = resume(run)
    assert resumed.code == 0, resumed.output[-2000:]
    assert_equal_runs(run, base_run())
    assert_sound(run)


def vanished_folder(folder: Path) -> str:
    run = folder / "run"
    result = start(folder, remove_run_in={"phase": "update", "step": 1, "folder": str(run)})
    said = ended(result, f"vlm-rl: {run / 'rollouts'} could not be written: No such file", "the folder is there")
    return f"{said}, {'made again' if run.exists() else 'not made again'}"


def sigterm_in_an_evaluation(folder: Path) -> str:
    model, children = toys().model, folder / "children"
    fault = {"number": 2, "sent": "SIGTERM", "children": str(children)}
    stopped = evaluate(folder / "out", model, kill_after_answers=fault)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in json.loads(children.read_text())))
    again, whole = evaluate(folder / "out", model), evaluate(folder / "whole", model)
    (ours,), (theirs,) = (RunDirectory(folder / name).evals() for name in ("out", "whole"))
    same = ours.rows().to_pylist() == theirs.rows().to_pylist() and ours.summary == theirs.summary
    said = f"{ended(stopped, 'stopped by SIGTERM')}; again {ended(again)}, whole {ended(whole)}"
    return f"{said}; {'the same result' if same else 'a different result'}"


# -- logs and clocks ---------------------------------------------------------------------------------


def damaged_logs(folder: Path) -> str:
    run = copy_of_base(folder)
    shutil.rmtree(run.checkpoints()[-1][1])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe\x00\n[[[\n{"step": Infinity, "attempt": 1}\n{"step": 2, "attempt": 99999999999999}\n{"cut'
        )
    (run.path / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    (run.path / "eval" / f".heldout-{STEPS:06d}-0.jsonl").write_bytes(b"\xff\n[[\n")
    (run.path / "eval" / "heldout" / f"step-{STEPS:06d}.json").unlink()
    said = ended(resume(run), "from step-000001")
    assert_equal_runs(run, base_run())
    return f"{said}, equal to the run without"


def damaged_summary(folder: Path) -> str:
    run = copy_of_base(folder)
    (run.path / "eval" / "heldout" / f"step-{STEPS:06d}.json").write_text("{")
    return ended(resume(run), f"step-{STEPS:06d}.json is damaged", "restore it from a copy, or remove it")


def clock_turned_back(folder: Path) -> str:
    result = start(folder, turn_clock_back_in={"phase": "update", "step": 1})
    run, times = RunDirectory(folder / "run"), ("step_time", "timing/")
    assert metrics_of(run) == metrics_of(base_run())
    negative = any(value < 0 for row in run.metrics() for key, value in row.items() if key.startswith(times))
    return f"{ended(result)}, {'negative times' if negative else 'the same run'}"


DISK, STOP = "Stopping and resuming", "What stops a run by itself"
CHECKPOINTS, WRITER = "Checkpoints", "One writer"

slow = partial(Attack, slow=True)  # each trains

ATTACKS = (
    slow(
        "a NaN in a weight when a checkpoint is due",
        STOP,
        "exit code 1, newest step-000001",
        partial(nan_before_a_save, what="weight", name="weight"),
    ),
    slow(
        "a NaN in Adam's second moments when a checkpoint is due",
        STOP,
        "exit code 1, newest step-000001",
        partial(nan_before_a_save, what="exp_avg_sq", name="the optimizer's exp_avg_sq"),
    ),
    slow(
        "a NaN in the newest checkpoint, whose manifest matches",
        CHECKPOINTS,
        "exit code 0, equal to the run without",
        nan_in_the_newest_checkpoint,
    ),
    slow(
        "code in the optimizer's state, whose manifest matches",
        CHECKPOINTS,
        "exit code 2, no code ran",
        code_in_the_optimizers_state,
    ),
    slow(
        "a resume where every checkpoint is damaged",
        CHECKPOINTS,
        "exit code 2, the same files",
        only_damaged_checkpoints,
    ),
    slow(
        "two resumes of one run at once",
        WRITER,
        "second exit code 2, nothing written; first exit code 0",
        two_resumes_at_once,
    ),
    slow(
        "a resume while a machine with another clock trains",
        WRITER,
        "exit code 2",
        resume_while_another_machine_trains,
    ),
    slow(
        "an evaluation into a folder that another process writes into",
        WRITER,
        "exit code 2",
        evaluation_into_a_run_in_training,
    ),
    *(
        slow(f"a disk that is full at the {what}", DISK, "exit code 2", partial(full_disk, what=what, file=file))
        for what, file in {
            "rollouts": "rollouts",
            "metrics": "metrics.jsonl",
            "journal": "eval/.heldout",
            "evaluation": "eval/heldout",
        }.items()
    ),
    *(
        slow(name, DISK, "exit code 2, in one line; resumed as if it had not been", partial(failing_disk, **faults))
        for name, faults in {
            "a disk that fails (EIO) at the log": {"fail_disk": {"error": "EIO", "file": "log.txt"}},
            "a quota that ends (EDQUOT) in a checkpoint": {
                "fail_disk": {"error": "EDQUOT", "file": "step-000002"},
            },
            "a file system that turns read-only (EROFS) at the second step": {
                "fail_disk": {"error": "EROFS", "file": "step-000002.parquet"},
            },
            "no more open files from an update on": {"allow_files_in": {"phase": "update", "step": 2, "more": 0}},
        }.items()
    ),
    slow("a run folder that vanishes in an update", DISK, "exit code 2, not made again", vanished_folder),
    slow(
        "SIGTERM in `vlm-rl eval`",
        DISK,
        "exit code 75; again exit code 0, whole exit code 0; the same result",
        sigterm_in_an_evaluation,
    ),
    slow("damaged logs on a resume", DISK, "exit code 0, equal to the run without", damaged_logs),
    slow("a damaged summary of an evaluation on a resume", DISK, "exit code 2", damaged_summary),
    slow("a clock that goes back by an hour in a step", DISK, "exit code 0, the same run", clock_turned_back),
)
