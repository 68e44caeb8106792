"""Starts training runs that tests kill, stop or make fail, each in its own process.

Importing everything takes longer than training the tiny model, so this program imports once and forks for each job.
A job is a JSON object on a line of standard input: a command line, or the arguments of the `main` of a `module`. The
answer is a line with the exit code, or minus the number of the signal that ended it. toy_runs.Runner is the client.
A job of a `tokenizer` alone tries it here.

    torchrun --nproc_per_node 2 tests/helpers/train_worker.py '{"arguments": [...], "faults": {...}}'

runs a single job on several ranks.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers import crash_points
from tests.helpers.processes import children_of
from tests.helpers.quick_configs import use_quick_configs
from tests.helpers.served import free_port
from tests.helpers.warm_grader import use_own_grader, use_warm_grader
from vlm_rl import train as loop
from vlm_rl.cli import main
from vlm_rl.config import ConfigSection
from vlm_rl.data import tokenizer_trial
from vlm_rl.evaluation.evaluate import Asking
from vlm_rl.evaluation.journal import Journal
from vlm_rl.grading.grader import Grader
from vlm_rl.learner import saving
from vlm_rl.learner.checkpoint_files import CheckpointFiles
from vlm_rl.learner.deepspeed import import_deepspeed
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.policy import Policy
from vlm_rl.rollouts.ahead import Ahead
from vlm_rl.run import lock
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SampleRequest
from vlm_rl.samplers.remote.servers import ServerSampler, ServersGoneError
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.session import periodic_evaluation, session, watch
from vlm_rl.session.recorder import Timings
from vlm_rl.types import Grade, NamedTensors

Job = dict[str, Any]


# -- faults --------------------------------------------------------------------------------------


def die_at_point(folder: str, number: int) -> None:
    """Kill the process (SIGKILL) at its number-th operation on a file below `folder`, or fork; see crash_points.c."""
    _with_points_of_a_user()
    crash_points.arm(folder, number=number)


def list_points(folder: str, log: str) -> None:
    """Write a line for each such operation to `log`."""
    _with_points_of_a_user()
    crash_points.arm(folder, log=log)


def fail_disk(folder: str, error: str, number: int = 0, file: str = "") -> None:
    """Let the disk fail below `folder` from such an operation on, for good: the number-th, or the first on `file`."""
    _with_points_of_a_user()
    crash_points.fail(folder, error=error, number=number, file=file)


def allow_files_in(phase: str, step: int, more: int) -> None:
    """Let the process open only so many more files than it has open when the phase begins for the step-th time."""

    def allow() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))

    _before(phase, step, allow)


def _with_points_of_a_user() -> None:
    """Start the grader's server with a fork, try the tokenizer, and never renew the run's lock: how often depends on
    the machine."""
    use_own_grader()
    tokenizer_trial._faults.clear()
    lock.RENEWAL_SECONDS = 1e6


def terminate_in(phase: str, step: int) -> None:
    """Send SIGTERM when the phase begins for the step-th time."""
    _before(phase, step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def press_ctrl_c_in(phase: str, step: int, presses: int = 1) -> None:
    """Send SIGINT when the phase begins for the step-th time, where Python drops what the second one raises."""

    class Destroyed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(10))  # the handler runs between two instructions

    def interrupt() -> None:
        for _ in range(presses):
            Destroyed()
            time.sleep(0.5)  # two signals at once are one press

    _before(phase, step, interrupt)


def remove_run_in(phase: str, step: int, folder: str) -> None:
    """Remove the run's folder when the phase begins for the step-th time."""
    _before(phase, step, lambda: shutil.rmtree(folder))


def pause_in(phase: str, step: int, begun: str, until: str) -> None:
    """When the phase begins for the step-th time, make the file `begun` and wait for the file `until`."""

    def pause() -> None:
        Path(begun).touch()
        while not Path(until).exists():
            time.sleep(0.02)

    _before(phase, step, pause)


def lose_lease_in(phase: str, step: int, folder: str) -> None:
    """Let another machine take over the run's folder when the phase begins for the step-th time, and be noticed."""
    lock.RENEWAL_SECONDS = 0.05

    def take_over() -> None:
        lease = Path(folder) / "lease"
        lease.write_text(json.dumps({"host": "elsewhere", "pid": 7, "holder": "another"}))
        lease.replace(lease.with_name(lock.LOCK))
        (renewing,) = (thread for thread in threading.enumerate() if thread.name == "run-lock")
        renewing.join()

    _before(phase, step, take_over)


def lose_servers_in(phase: str, step: int) -> None:
    """Raise what a sampler raises that has lost all its servers when the phase begins for the step-th time."""

    def lose() -> None:
        raise ServersGoneError("no rollout server has worked")

    _before(phase, step, lose)


def lose_servers_of(rank: int, evaluation: int) -> None:
    """Let the sampler of one rank raise, in the so-many-th evaluation, what it raises without any server left."""
    evaluate_into, numbers = periodic_evaluation.evaluate_into, count(1)

    def generate(*_: Any, **__: Any) -> Any:
        raise ServersGoneError("no rollout server has worked")

    def evaluated(run: RunDirectory, name: str, problems: Any, asking: Asking, *args: Any, **of_call: Any) -> Any:
        if next(numbers) == evaluation and int(os.environ["RANK"]) == rank:
            asking.sampler.generate = generate
        return evaluate_into(run, name, problems, asking, *args, **of_call)

    periodic_evaluation.evaluate_into = evaluated


def lose_servers_of_rollout(rank: int, step: int) -> None:
    """Let the sampler of one rank raise, in the rollout of this step, what it raises without any server left."""
    generate = TransformersSampler.generate

    def losing(self: TransformersSampler, request: SampleRequest, **of_call: Any) -> Any:
        if request.step + 1 == step and int(os.environ["RANK"]) == rank:
            raise ServersGoneError("no rollout server has worked")
        return generate(self, request, **of_call)

    TransformersSampler.generate = losing


def turn_clock_back_in(phase: str, step: int) -> None:
    """Set the clock that Python reads back by an hour when the phase begins for the step-th time."""

    def turn_back() -> None:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() - 3600
        time.time_ns = lambda: now_ns() - 3600 * 10**9

    _before(phase, step, turn_back)


def poison(what: str, number: int) -> None:
    """Put a NaN into a weight, or into a moment of the optimizer, just before the number-th save."""
    save, times = session.Session.save, {"count": 0}

    def poisoned(self: session.Session, state: session.SessionState) -> None:
        times["count"] += 1
        if times["count"] == number:
            weight = next(iter(self.policy.parameters()))
            moments = next(iter(self.learner._optimizer.state.values()))
            (weight if what == "weight" else moments[what]).data.view(-1)[0] = math.nan
        save(self, state)

    session.Session.save = poisoned


def hold_save(number: int, phase: str, step: int, then: str = "") -> None:
    """Let the thread of the number-th save write nothing before the phase begins for the step-th time.

    Then it continues, or writes one file and kills the process (`then` is "SIGKILL"), or finds no folder ("vanish").
    """
    write, times, begun = CheckpointFiles.write, {"count": 0}, threading.Event()
    _before(phase, step, begun.set)

    def held(self: CheckpointFiles) -> Any:
        times["count"] += 1
        if times["count"] == number:
            begun.wait()
            if then == "SIGKILL":
                self._jobs.popleft()()
                os.kill(os.getpid(), signal.SIGKILL)
            if then == "vanish":
                shutil.rmtree(self.folder)
        return write(self)

    CheckpointFiles.write = held


def full_disk_at(what: str) -> None:
    """Let the first write of rollouts, metrics, an evaluation or its journal meet a full disk, which /dev/full is."""
    method = {"rollouts": "write_rollouts", "metrics": "append_metrics", "evaluation": "write_eval"}

    def with_full_disk(write: Callable[..., Any], file: Callable[..., Path]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = file(*args)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("/dev/full")
            return write(*args, **kwargs)

        return call

    def temporary(folder: Path, name: str) -> Path:
        return folder / f".{name}.{os.getpid()}.tmp"

    files: dict[str, Callable[..., Path]] = {
        "rollouts": lambda run, step, *_: temporary(run.path / "rollouts", f"step-{step:06d}.parquet"),
        "metrics": lambda run, *_: run.path / "metrics.jsonl",
        "evaluation": lambda run, name, step, *_: temporary(run.path / "eval" / name, f"step-{step:06d}.parquet"),
        "journal": lambda path, *_: path.with_name(f"{path.name}.new"),
    }
    if what == "journal":
        Journal.open = with_full_disk(Journal.open, files[what])
    else:
        setattr(RunDirectory, method[what], with_full_disk(getattr(RunDirectory, method[what]), files[what]))


def leave_free(size: int) -> None:
    """Let every disk have so many bytes free."""
    shutil.disk_usage = lambda _: SimpleNamespace(free=size)  # type: ignore[assignment]


def end_memory(where: str, rows: Sequence[int], rank: int = 0) -> None:
    """Let memory end in the forward or the backward pass of these rows of updates, counted from 1, on this rank.

    In the backward pass it ends at the first layer: the later ones have their gradients by then.
    """
    forward, number = Policy.forward, count(1)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. This is injected.")

    def watched(self: Policy, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or os.environ["RANK"] != str(rank) or next(number) not in rows:
            return forward(self, *args, **kwargs)
        first = getattr(self.model.model, "language_model", self.model.model).layers[0].mlp
        if where == "forward":
            handle = first.register_forward_pre_hook(fail)
        else:
            handle = first.register_full_backward_pre_hook(lambda *_: (handle.remove(), fail()))
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    Policy.forward = watched


def hang_in(phase: str, step: int, rank: int) -> None:
    """Let this rank hang when the phase begins for the step-th time."""

    def hang() -> None:
        while os.environ["RANK"] == str(rank):
            time.sleep(0.1)

    _before(phase, step, hang)


def ignore_others(rank: int) -> None:
    """Let this rank wait on when a collective fails, as NCCL waits for a rank that has ended; 3 s at most."""
    watch.GRACE_SECONDS = 3.0
    gather = torch.distributed.all_gather_object

    def waiting(*args: Any, **kwargs: Any) -> None:
        try:
            gather(*args, **kwargs)
        except RuntimeError:
            while os.environ["RANK"] == str(rank):
                time.sleep(0.1)
            raise

    torch.distributed.all_gather_object = waiting


def raise_in(phase: str, step: int, rank: int) -> None:
    """Raise an error on this rank when the phase begins for the step-th time."""

    def fail() -> None:
        if os.environ["RANK"] == str(rank):
            raise RuntimeError("injected fault")

    _before(phase, step, fail)


def finish_batches_first() -> None:
    """Let a step train only once the batches of later steps are drawn: each is then of one version, in every run."""
    begin = Ahead.begin

    def waiting(self: Ahead, step: int, phase: Any) -> AbstractContextManager[None]:
        beside_update = begin(self, step, phase)
        while any(None in self._sampler.sampled(batch.step) for batch in self.batches):
            time.sleep(0.01)
        return beside_update

    Ahead.begin = waiting


def kill_servers(of_step: dict[str, int], hung: Sequence[str] = ()) -> None:
    """SIGKILL a rollout server, by its process id, once the first group of this step has arrived.

    In steps of `hung` it does not go on before that, so that it cannot have sent all of its own groups.
    """
    generate = ServerSampler.generate

    def killing(self: ServerSampler, request: SampleRequest, *, on_group: Any = None) -> Any:
        step = str(request.step)

        def kill_after(index: int, group: Any) -> None:
            if pid := of_step.pop(step, None):
                os.killpg(pid, signal.SIGKILL)
            on_group(index, group)

        if step in hung and step in of_step:
            os.killpg(of_step[step], signal.SIGSTOP)
        return generate(self, request, on_group=kill_after if on_group else None)

    ServerSampler.generate = killing


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
        saving.commit = watched(saving.commit, lambda *_: True)
    elif phase == "evaluation":
        periodic_evaluation.evaluate_into = watched(periodic_evaluation.evaluate_into, lambda *_: True)
    else:
        Timings.phase = watched(Timings.phase, lambda _, name: name == phase)


def kill_after_answers(number: int, sent: str = "SIGKILL", children: str = "") -> None:
    """Answer problem by problem, and send the process a signal once the journal holds `number` problems.

    The process ids of its children are written to the file `children` before.
    """
    if children:
        use_own_grader()
    periodic_evaluation.evaluate_into = partial(periodic_evaluation.evaluate_into, batch_size=1)
    add, kept = Journal.add, {"count": 0}

    def counted(self: Journal, groups: Any) -> None:
        add(self, groups)
        kept["count"] += len(groups)
        if kept["count"] == number:
            if children:
                Path(children).write_text(json.dumps(children_of(os.getpid())))
            os.kill(os.getpid(), signal.Signals[sent])

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


def rescale_attention(number: int) -> None:
    """Let the sampler attend more sharply from its number-th sync on; no weight and no buffer shows it."""
    load, times = TransformersSampler.load_weights, {"count": 0}

    def load_weights(self: TransformersSampler, tensors: NamedTensors, *, version: int) -> None:
        load(self, tensors, version=version)
        times["count"] += 1
        if times["count"] == number:
            for module in self._model.model.language_model.modules():
                if hasattr(module, "scaling"):
                    module.scaling *= 2

    TransformersSampler.load_weights = load_weights


def _change_sync(number: int, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    load, times = TransformersSampler.load_weights, {"count": 0}

    def load_weights(self: TransformersSampler, tensors: NamedTensors, *, version: int) -> None:
        times["count"] += 1
        load(self, change(iter(tensors)) if times["count"] == number else tensors, version=version)

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


def record_card(out: str) -> None:
    """Note in `out`, in order, what the engine and the learner do, each with what of the optimizer is on the host."""
    learners: list[Learner] = []

    def note(doing: str) -> None:
        states = learners[-1].engine.optimizer.offloaded_states if learners else ()
        with Path(out).open("a") as file:
            file.write(json.dumps([doing, sorted(state.value for state in states)]) + "\n")

    def noted(owner: type, name: str, doing: str) -> None:
        function = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if owner is Learner and self not in learners:
                learners.append(self)
            note(doing)
            return function(self, *args, **kwargs)

        setattr(owner, name, call)

    def started(self: Learner, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        learners.append(self)

    start, Learner.__init__ = Learner.__init__, started
    for name, doing in {"__init__": "start", "load_weights": "wake", "generate": "draw", "sleep": "sleep"}.items():
        noted(TransformersSampler, name, doing)
    for name, doing in {"load": "restore", "update": "train", "save": "save"}.items():
        noted(Learner, name, doing)


def pretend_gpu(*, engine_on_cpu: bool = False) -> None:
    """Let the process compute on a pretended GPU (tests.helpers.pretended_cuda), its vLLM on the CPU where asked."""
    from tests.helpers.pretended_cuda import PretendedCuda

    if engine_on_cpu:
        from vlm_rl.samplers.vllm import engine

        engine.has_gpu = lambda: False
    PretendedCuda().__enter__()


FAULTS: dict[str, Callable[..., None]] = {
    "pretend_gpu": pretend_gpu,
    "undecided": undecided,
    "die_at_point": die_at_point,
    "fail_disk": fail_disk,
    "allow_files_in": allow_files_in,
    "list_points": list_points,
    "poison": poison,
    "hold_save": hold_save,
    "full_disk_at": full_disk_at,
    "leave_free": leave_free,
    "remove_run_in": remove_run_in,
    "pause_in": pause_in,
    "lose_lease_in": lose_lease_in,
    "lose_servers_in": lose_servers_in,
    "lose_servers_of": lose_servers_of,
    "lose_servers_of_rollout": lose_servers_of_rollout,
    "turn_clock_back_in": turn_clock_back_in,
    "terminate_in": terminate_in,
    "press_ctrl_c_in": press_ctrl_c_in,
    "finish_batches_first": finish_batches_first,
    "kill_servers": kill_servers,
    "kill_after_answers": kill_after_answers,
    "end_memory": end_memory,
    "hang_in": hang_in,
    "ignore_others": ignore_others,
    "raise_in": raise_in,
    "skip_sync": skip_sync,
    "rescale_attention": rescale_attention,
    "drop_tensor": drop_tensor,
    "record_card": record_card,
    "record_keys": record_keys,
}

# -- jobs ----------------------------------------------------------------------------------------


def run(job: Job) -> int:
    """Run a command line with its faults and return the exit code."""
    of_ranks = job.get("faults_of_ranks")
    faults = of_ranks[int(os.environ.get("RANK", "0"))] if of_ranks else job.get("faults", {})
    for name, arguments in faults.items():
        FAULTS[name](**arguments)
    try:
        if "module" in job:
            return importlib.import_module(job["module"]).main(*job["arguments"])
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
    """Run the job in a child process for each rank, and return the exit code, or minus the signal that ended one.

    As under torchrun, the others are ended after the first that fails, if they do not end by themselves.
    """
    end = time.monotonic() + job["deadline"]
    running = {_fork_rank(job, variables) for variables in _rank_variables(job.get("ranks", 1))}
    first_failure = 0
    while running:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in running:
            running.remove(done)
            if not first_failure and (first_failure := os.waitstatus_to_exitcode(status)):
                end = min(end, time.monotonic() + 30)
        if time.monotonic() > end:
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return first_failure


def _rank_variables(ranks: int) -> list[dict[str, str]]:
    """Return what torchrun would set for each rank; nothing for a single one, which needs no torchrun."""
    if ranks == 1:
        return [{}]
    of_all = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | of_all for rank in range(ranks)]


def _fork_rank(job: Job, variables: dict[str, str]) -> int:
    """Run the job in a child process with these variables, and return its process id."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job.get("folder", "."))
        os.environ.update(job.get("environment", {}))
        os.environ.update(variables)
        code = run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def load_everything() -> None:
    """Import what nearly every job needs; each would spend seconds on it."""
    import pandas  # noqa: F401
    import qwen_vl_utils.vision_process  # noqa: F401
    import scipy.stats  # noqa: F401
    from PIL import Image
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

    use_quick_configs()
    import_deepspeed()
    importlib.import_module("deepspeed.module_inject.auto_ep_layer")  # an engine asks whether it has experts
    importlib.import_module("transformers.tokenization_mistral_common")  # a processor, what its tokenizer is
    for name in (
        "qwen2_5_vl.modeling_qwen2_5_vl",
        "qwen2_5_vl.processing_qwen2_5_vl",
        "qwen2_vl.image_processing_qwen2_vl",
    ):
        importlib.import_module(f"transformers.models.{name}")
    Image.preinit()
    VIDEO_PROCESSOR_MAPPING.values()  # opening any processor imports them all


def serve_vllm(jobs: Connection) -> None:
    """Serve the jobs that sample with vLLM, which leaves its settings in the process that imports it."""
    importlib.import_module("tests.helpers.loaded_vllm")
    with suppress(EOFError):
        while True:
            jobs.send(fork(jobs.recv()))


def samples_with_vllm(job: Job) -> bool:
    """Return whether a configuration or an option of the command line names vLLM."""
    words = job.get("arguments", ())
    files = [Path(word) for word in words if word.endswith(".yaml")]
    return "vllm" in words or any("vllm" in path.read_text() for path in files if path.is_file())


def try_tokenizer(model: str) -> int:
    """Try a model's tokenizer: what this process knows, its jobs know."""
    tokenizer_trial.check_expressions(model)
    tokenizer_trial._worker.close()  # it belongs to this process
    return 0


def serve() -> None:
    """Answer jobs until standard input closes."""
    use_warm_grader(at_once=True)
    load_everything()
    torch.set_num_threads(1)
    gc.freeze()  # no collection of a job looks through what was imported
    gc.enable()
    print(json.dumps("ready"), flush=True)
    vllm_jobs: Connection | None = None
    for line in sys.stdin:
        job = json.loads(line)
        if "tokenizer" in job:
            code = try_tokenizer(job["tokenizer"])
        elif not samples_with_vllm(job):
            code = fork(job)
        else:
            if vllm_jobs is None:
                vllm_jobs, theirs = Pipe()
                get_context("fork").Process(target=serve_vllm, args=(theirs,), daemon=True).start()
                theirs.close()
            vllm_jobs.send(job)
            code = vllm_jobs.recv()
        print(json.dumps(code), flush=True)


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
