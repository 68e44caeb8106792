"""What is done around the start of a vLLM engine in this process, which has a learner and a run of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields
from functools import partialmethod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import torch
from pydantic import ValidationError
from transformers import PreTrainedConfig

from vlm_rl.devices import has_gpu
from vlm_rl.distributed import from_main
from vlm_rl.errors import UserError, near

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_REFUSAL = "VLM_RL_SERVER_REFUSAL"  # for workers: the file of a message, the model, and what may be done instead
_COMPILER = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS")  # the second, on a CPU


PHASES = (
    ("vllm.v1.worker.gpu.model_runner", "Loading model from scratch", "vLLM reads the weights"),
    ("vllm.v1.worker.cpu_model_runner", "Starting to load model", "vLLM reads the weights"),
    ("vllm.compilation.monitor", "Starting torch.compile", "vLLM compiles the model, up to a minute the first time"),
    ("vllm.compilation.decorators", "Directly load AOT", "vLLM takes the compiled model from its cache"),
    ("vllm.compilation.monitor", "torch.compile took", "vLLM measures what memory it needs"),
    ("vllm.model_executor.warmup.kernel_warmup", "warmup starting", "vLLM compiles its kernels"),
    ("vllm.model_executor.warmup.kernel_warmup", "warmup finished", "vLLM captures CUDA graphs"),
)
"""The module of vLLM's that logs, what it then logs, and what vLLM does from then on."""


@contextmanager
def starting(phase: Callable[[str], Any]) -> Iterator[None]:
    """Keep the start of an engine from changing this process, and tell `phase` what vLLM is doing."""
    with (
        _memory_left_alone(),
        _llvmlite_left_alone(),
        threads_kept(),
        compiler_kept(),
        _own_shared_memory(),
        _model_class_described_here(),
        folders_left_out_of_the_key(),
        phases_told(phase),
        bars_hidden(),
    ):
        yield


def check_known(options: Iterable[str], arguments: type[EngineArgs]) -> None:
    """Raise UserError for an option that is no argument of vLLM's engine; its command would take a part of a name."""
    known = [field.name for field in fields(arguments)]
    for key in options:
        if key not in known:
            hint = near(key, known, otherwise="see vLLM's engine arguments")
            raise UserError(f"rollout.vllm.{key}: vLLM has no such option; {hint}")


@contextmanager
def refusals_in_words(
    model_path: str, *, instead: str, options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Turn vLLM's refusals, and the keys that it misses in a config.json, into UserErrors.

    Args:
        model_path: the folder that it opens.
        instead: what the user can do about a refusal of the model.
        options: rollout.vllm, any of which may be what it refuses.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:  # for a model or an option that it does not support
        reason, given = _reason(error), _shown(options)
        if refused := _refused(error, reason, options):
            raise UserError(_refusal(refused, reason)) from error
        raise UserError(
            f"vLLM cannot run the model at {model_path}{f' with {given}' if given else ''}: {reason:.300}; "
            f"{'leave that out, or ' if given else ''}{instead}"
        ) from error
    except AttributeError as error:
        # Of published folders that omit a key: vLLM's classes may read it where transformers' have no default.
        if not isinstance(error.obj, PreTrainedConfig):
            raise
        section = error.obj.base_config_key
        raise UserError(
            f"{Path(model_path) / 'config.json'}: vLLM reads {f'{section}.' if section else ''}{error.name}, "
            "which is not there, and transformers has no default for it in models of type "
            f"{error.obj.model_type!r}: write the value there with which the model was trained, or {instead}"
        ) from error


def _reason(error: Exception) -> str:
    """Return vLLM's words in one line; of pydantic's, the field and what it must be."""
    words = str(error)
    if isinstance(error, ValidationError):
        words = ", ".join(f"{'.'.join(map(str, each['loc']))} {each['msg']}" for each in error.errors())
    return " ".join(words.split())


def _refused(error: Exception, reason: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that vLLM's refusal names, by their keys or their values."""
    inputs = [each["input"] for each in error.errors()] if isinstance(error, ValidationError) else []
    words = set(re.findall(r"\w+", reason.replace("-", "_").replace("__", " ")))  # of flags too
    return {key: value for key, value in options.items() if key in words} or {
        key: value
        for key, value in options.items()
        if any(leaf in inputs or (isinstance(leaf, str) and repr(leaf) in reason) for leaf in _leaves(value))
    }


def _leaves(value: Any) -> Iterator[Any]:
    """Yield a value, or those inside of it, with the keys that lead there."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    else:
        yield value


def _refusal(options: Mapping[str, Any], reason: str) -> str:
    """Return the message for options that vLLM does not know, or does not take with these values."""
    return f"vLLM refuses {_shown(options)}: {reason:.300}; give a different value, or leave it out"


def _shown(options: Mapping[str, Any]) -> str:
    """Return the options as a user may write them."""
    return ", ".join(f"rollout.vllm.{key}={value!r}" for key, value in options.items())


@contextmanager
def refusals_of_a_server(model_path: str, *, instead: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Let the server that this process becomes end as refusals_in_words says, also for what its workers cannot load.

    These are other processes, of which vLLM tells this one only that they failed. They leave their message in a file;
    what fails there for another reason, such as a cache that has no room, is only in vLLM's log.
    What the parser of vLLM's command refuses can only be of `options`: it would print a thousand lines of usage.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    check_known(options, AsyncEngineArgs)

    def refuse(self: FlexibleArgumentParser, message: str) -> NoReturn:
        if not options:
            exit_with_usage(self, message)
        fault = ValueError(message)
        raise UserError(_refusal(_refused(fault, _reason(fault), options) or options, _reason(fault)))

    exit_with_usage, FlexibleArgumentParser.error = FlexibleArgumentParser.error, refuse
    file = Path(tempfile.gettempdir(), f"vlm-rl-refusal-{uuid4().hex}")
    os.environ[_REFUSAL] = json.dumps([str(file), model_path, instead])
    try:
        with refusals_in_words(model_path, instead=instead, options=options):
            yield
    except RuntimeError as error:
        if file.is_file():
            raise UserError(file.read_text(encoding="utf-8")) from error
        if "Engine core initialization failed" not in str(error):
            raise
        given = _shown(options)
        raise UserError(
            f"vLLM's engine did not start{f' with {given}' if given else ''}: its own words above say why; "
            f"{'leave that out, or ' if given else ''}{instead}"
        ) from error
    finally:
        file.unlink(missing_ok=True)
        FlexibleArgumentParser.error = exit_with_usage


def leave_refusals() -> None:
    """Let a model that this process, a worker of such a server, cannot load be left for the server to say."""
    if _REFUSAL not in os.environ:
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    file, model_path, instead = json.loads(os.environ.pop(_REFUSAL))
    load = BaseModelLoader.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        try:
            with refusals_in_words(model_path, instead=instead):
                return load(*args, **kwargs)
        except UserError as error:
            with suppress(FileExistsError), Path(file).open("x", encoding="utf-8") as left:  # by the first worker
                left.write(str(error))
            raise

    BaseModelLoader.load_model = load_model


@contextmanager
def folders_left_out_of_the_key() -> Iterator[None]:
    """Let every folder with this model's configuration have the same key in vLLM's cache of compiled models.

    vLLM's key holds the configuration, and the path of the folder, but nothing of the weights: these are arguments of
    what is compiled. With the path, each checkpoint of a run would be compiled again, at a resume and an evaluation.
    A compiled vision tower keeps it, since it may depend on the processor's files too.
    """
    from vllm.config import VllmConfig

    method = VllmConfig.compute_hash

    def compute_hash(self: VllmConfig, *args: Any, **kwargs: Any) -> str:
        if self.compilation_config.compile_mm_encoder:
            return method(self, *args, **kwargs)
        same, model = copy(self), copy(self.model_config)
        object.__setattr__(model, "model", "")  # past pydantic's checks
        object.__setattr__(same, "model_config", model)
        return method(same, *args, **kwargs)

    VllmConfig.compute_hash = compute_hash
    try:
        yield
    finally:
        VllmConfig.compute_hash = method


@contextmanager
def phases_told(phase: Callable[[str], Any]) -> Iterator[None]:
    """Call `phase` with what vLLM is doing, as its log says.

    What it shows of its log stays the same: the handler that shows it has a level of its own.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            for name, words, text in PHASES:
                if record.name == name and words in message:
                    phase(text)

    configure_logging_if_needed(LoggingConfig())  # or the engine does so, and takes all handlers away
    handler, loggers = Told(), {name: logging.getLogger(name) for name, *_ in PHASES}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
            logger.removeHandler(handler)


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Hide vLLM's progress bars, a line for each CUDA graph, unless what it says is shown too.

    No option of vLLM's does so in its second model runner. `phase` says what it is doing.
    """
    import tqdm

    bar: Any = tqdm.tqdm
    init = bar.__init__
    if os.environ.get("VLM_RL_OUTPUT") != "verbose":
        bar.__init__ = partialmethod(init, disable=True)
    try:
        yield
    finally:
        bar.__init__ = init


@contextmanager
def _memory_left_alone() -> Iterator[None]:
    """Keep vLLM's CPU worker from binding this process's memory, the learner's too, to one NUMA node."""
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operators.init_cpu_memory_env  # torch looks it up again at its next use


@contextmanager
def _llvmlite_left_alone() -> Iterator[None]:
    """Hide numba's compiler while vLLM's CPU worker looks for its kernels in every module of this process.

    vLLM reads the `__dict__` of whatever a module holds. llvmlite's library answers with one of its functions, and
    the engine does not start. Numba is there once an engine has drafted by n-grams, or a user has imported it.
    """
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_elsewhere(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llvmlite"}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = rebind_elsewhere
    try:
        yield
    finally:
        dispatcher._rebind_kernels = rebind


@contextmanager
def _model_class_described_here() -> Iterator[None]:
    """Let vLLM ask what a model's class can do in this process, where there is no GPU.

    By itself it asks another process at the first start of each class, so that CUDA is not initialized here. That one
    imports torch and all of vLLM again. Either way it keeps the answer in its cache.
    """
    from vllm.model_executor.models import registry

    run: Any = registry._run_in_subprocess
    if not has_gpu():
        registry._run_in_subprocess = lambda describe: describe()
    try:
        yield
    finally:
        registry._run_in_subprocess = run


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, and the function that sets it, which vLLM's CPU worker replaces.

    On a GPU vLLM leaves one thread to this process, in which an offloaded optimizer computes on the host.
    """
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)


def start_numba() -> None:
    """Start the threads with which vLLM looks for drafts, inside `threads_kept`.

    Otherwise they start at Numba's first parallel call, in a batch, and set torch's number of threads to that of the
    cores: the first batch would be summed in another order than later ones.
    """
    import numba

    numba.get_num_threads()


@contextmanager
def compiler_kept() -> Iterator[None]:
    """Restore what vLLM sets for torch's compiler: one process that compiles, here and in what is started from here.

    These are variables of the environment, which torch itself has read by the time that this file is imported.
    """
    before = {name: os.environ.get(name) for name in _COMPILER}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Give this run's engines shared memory of their own.

    Without a GPU the ranks of an engine reduce in shared memory, which vLLM names after the end of the address where
    they meet. To a launcher's ranks that is env:// in every run, so two runs on a machine would share it, and what a
    killed run left behind would keep every later one from starting. The name goes once all ranks have joined.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    method = ExecutorWithExternalLauncher._distributed_args
    name = from_main(lambda: f"vlm-rl-{uuid4().hex}")

    def with_name(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = method(self)
        return f"env://:{name}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = with_name
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = method
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)
