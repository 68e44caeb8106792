"""A pretended GPU: tensors that are computed on the CPU and follow CUDA's rules about devices.

    with PretendedCuda() as gpu:
        model.to("cuda")              # a copy, whose device is cuda:0
        model(ids_on_the_cpu)         # RuntimeError, as on a GPU
        gpu.host_reads                # where the host waited for the device

    python -m tests.helpers.pretended_cuda train run.yaml      # a whole command of vlm-rl

Values and gradients are real, so that they can be compared with those of a plain run on the CPU. Each storage has a
mark that says whether it is on the GPU. torch's modes put the marks on what factories, copies and operations return,
answer `.device` and `.is_cuda` by them, and raise where an operation gets tensors of both kinds.

The rules, each with a test in tests/test_pretended_cuda.py:

- `.to`, `.cuda` and `.cpu` copy where the device changes, and gradients go back to the device that they belong to;
- factories make tensors where `device` says, on the CPU without it; results are where the inputs are;
- an operation on both kinds raises, except for copies, for one CPU tensor without dimensions that a pointwise
  operation reads, and for indices of the CPU into a tensor of the GPU;
- a gradient is where its tensor is, and that which a function of ours returns where the one that it got is;
- the CPU's own kernels, called by name, take nothing of the GPU;
- NumPy cannot read a tensor of the GPU, which cannot be pinned either;
- the host waits where it reads a value, and for a copy between the devices, unless the copy is of pinned memory or to
  the host and asked not to wait; torch.tensor copies what it is given;
- a generator of the CPU draws nothing on the GPU;
- DeepSpeed's accelerator is this rank's GPU, `vlm_rl.devices.has_gpu()` is true, and NCCL is gloo;
- the histogram of integers is computed, which the CPU has no kernel for;
- flash attention takes what it takes from Ampere on, and computes what tests/helpers/flash_reference.py has.

Threads that begin inside are on the same GPU, and so are hooks on saved tensors. Not pretended: kernels and their
rounding, streams and graphs, NCCL, the card's memory, storages that C++ makes past the dispatcher, vLLM's worker.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.flash_reference import flash_attention_on_cpu

CARD_BYTES = 80 * 2**30
_MARK, _PINNED = "_is_on_pretended_gpu", "_is_pinned_beside_pretended_gpu"

# Operations that take tensors of both devices: copies, and what reads one.
_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "_copy_from", "_copy_from_and_resize", "is_same_size"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_TAKES_A_NUMBER = {"fill_", "masked_fill", "masked_fill_", "_foreach_mul_", "_foreach_mul", "_foreach_div_"}
_FLASH = {"_flash_attention_forward", "_flash_attention_backward", "_varlen_attn", "_varlen_attn_backward"}
_READS = {
    *("_local_scalar_dense", "nonzero", "equal", "allclose", "masked_select", "unique_consecutive", "_unique2"),
    "bincount",
}


def this_gpu() -> torch.device:
    """Return the GPU of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def is_on_gpu(tensor: Tensor) -> bool:
    """Tell whether the tensor's storage has the mark."""
    return bool(_mark_of(tensor))


def _mark_of(tensor: Tensor) -> bool | None:
    """Return the mark; None for what C++ made, in a backward pass, on a device that is not known here."""
    with torch._C.DisableTorchFunction():
        try:
            return getattr(tensor.untyped_storage(), _MARK, False)
        except NotImplementedError:  # a tensor without storage
            return False


def _mark(tensor: Tensor, on_gpu: bool | None) -> None:
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta:
            setattr(tensor.untyped_storage(), _MARK, on_gpu)


def _is_pinned(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return getattr(tensor.untyped_storage(), _PINNED, False)


def _pinned(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        setattr(tensor.untyped_storage(), _PINNED, True)
    return tensor


def _waits_for_copy(source: Tensor, to_gpu: bool, *, non_blocking: bool) -> bool:
    """Tell whether the host waits for a copy between the devices: the GPU reads memory that is not pinned late."""
    return not non_blocking or (to_gpu and not _is_pinned(source))


def _is_cuda(device: Any) -> bool | None:
    """Tell whether a `device` argument means the GPU; None where it is no device."""
    if isinstance(device, bool) or device is None:
        return None
    if isinstance(device, int):
        return True
    if isinstance(device, str | torch.device):
        kind = torch.device(device).type if isinstance(device, str) else device.type
        return {"cuda": True, "cpu": False}.get(kind)
    return None


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tuple, a list or a dict and of those in it: tree_iter takes a fifth of a run for it."""
    found = []
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += _tensors(value)
    return found


class _Move(torch.autograd.Function):
    """A copy to the other device, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool) -> Tensor:
        ctx.to_gpu = to_gpu
        return _moved(tensor, to_gpu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _moved(grad, not ctx.to_gpu), None


def _moved(tensor: Tensor, to_gpu: bool) -> Tensor:
    copy = tensor.detach().clone()
    _mark(copy, to_gpu)
    return copy


class _Operations(TorchDispatchMode):
    """Every operation, below autograd: refuses a mix of devices, and marks the results."""

    def __init__(self, gpu: PretendedCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        inputs = _tensors((args, kwargs))
        if namespace == "c10d":
            return func(*args, **kwargs)
        if not inputs:
            out = func(*args, **kwargs)
            for tensor in _tensors((out,)):
                _mark(tensor, None)  # _Functions knows better, where it was called
            return out
        marks = [_mark_of(x) for x in inputs]
        storages = [x for x in args if isinstance(x, torch.UntypedStorage)]
        if marks[0] is not None and any(bool(getattr(x, _MARK, False)) != marks[0] for x in storages):
            raise RuntimeError("Attempted to set the storage of a tensor to a storage on the other device")
        if any(marks):
            for index in (i for i, mark in enumerate(marks) if mark is None):
                _mark(inputs[index], True)
                marks[index] = True
        if any(marks) and name in _FLASH and inputs[0].dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if any(marks) and name not in _COPIES:
            self._check(func, name, inputs, marks, _written(func, args, kwargs))
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if any(marks) and self._waits(func, name, args, kwargs, marks):
            self.gpu.count_read(name)
        out = self._compute(func, name, args, kwargs) if any(marks) else func(*args, **kwargs)
        on_gpu = marks[0] if name in _COPIES | _INDEXING else any(marks)
        if on_gpu:
            for tensor in _tensors((out,)):
                if not any(tensor is x for x in inputs):
                    _mark(tensor, True)
        return out

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute what the CPU's kernel does not take, and CUDA's does, as the CPU can."""
        if name == "histc" and not args[0].is_floating_point():
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def _waits(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], marks: list[bool | None]) -> bool:
        """Tell whether the host waits for the GPU in this operation."""
        if name == "copy_":
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return marks[0] != marks[1] and _waits_for_copy(args[1], bool(marks[0]), non_blocking=non_blocking)
        if name in _INDEXING and marks[0]:
            indices = [x for x in args[1] if x is not None]
            if any(not _mark_of(x) for x in indices):
                return True  # copied to the GPU
            fills = "put" in name and len(indices) == 1 and not args[2].dim() and not _mark_of(args[2])
            return not fills and any(x.dtype == torch.bool for x in indices)
        if name == "where":
            return not all(marks)  # a number of the CPU is copied
        if name == "repeat_interleave":
            return func._overloadname == "Tensor" and kwargs.get("output_size") is None
        return bool(marks[0]) and name in _READS

    def _check(
        self, func: Any, name: str, inputs: list[Tensor], marks: list[bool | None], written: list[Tensor]
    ) -> None:
        if all(marks):
            return
        if name in _INDEXING and marks[0]:  # indices may be of the CPU, values may not
            values = [m for x, m in zip(inputs[-1:], marks[-1:], strict=True) if "put" in name and x.dim()]
            if all(values):
                return
        elif name != "equal" and (torch.Tag.pointwise in func.tags or name in _TAKES_A_NUMBER):
            others = [x for x, m in zip(inputs, marks, strict=True) if not m]
            is_read = not any(x.dim() or any(x is y for y in written) for x in others)
            if is_read and (len(others) == 1 or name == "where"):
                return
        where = ", ".join(f"{'cuda:0' if m else 'cpu'} {tuple(x.shape)}" for x, m in zip(inputs, marks, strict=True))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices: {name} got {where}"
        )


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return _tensors([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


class _Functions(TorchFunctionMode):
    """Every call of torch's functions: devices are asked for here, and answered."""

    def __init__(self, gpu: PretendedCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and (answer := _ANSWERS.get(func.__self__)) is not None:
            return answer(func, args[0])
        if name == "__set__" and func.__self__ is Tensor.grad:
            _check_grad(*args)
        if (handler := _METHODS.get(func)) is not None:
            return handler(self, func, args, kwargs)
        if isinstance(func, OpOverloadPacket) and "_for_cpu" in name and any(map(is_on_gpu, _tensors(args))):
            raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend.")
        if isinstance(func, torch._ops.OpOverload):  # of another mode that watches operations: _Operations sees it
            return func(*args, **kwargs)
        with self.gpu.inside(self):
            if name == "type_as":
                return self._to("to", args[0], list(args[1:]), kwargs)
            if name in ("to", "cuda", "cpu") and isinstance(args[0], Tensor):
                return self._to(name, args[0], list(args[1:]), kwargs)
            return self._call(func, args, kwargs)

    def _to(self, name: str, tensor: Tensor, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """Handle `.to`, `.cuda` and `.cpu`: first dtype and layout, then the device."""
        if name != "to":
            to_gpu, given = name == "cuda", dict(zip(("device", "non_blocking"), args, strict=False)) | kwargs
        else:
            first = args[0] if args else None
            names = ["dtype"] if isinstance(first, torch.dtype) else ["other"] if isinstance(first, Tensor) else []
            names = [*(names or ["device", "dtype"]), "non_blocking", "copy"]
            given = dict(zip(names, args, strict=False)) | kwargs
            if (other := given.pop("other", None)) is not None:
                to_gpu, given["dtype"] = is_on_gpu(other), other.dtype
            else:
                to_gpu = _is_cuda(given.get("device"))
        non_blocking = given.pop("non_blocking", False)
        given.pop("device", None)
        given = {key: value for key, value in given.items() if value is not None}
        out = tensor.to(**given) if given and name == "to" else tensor
        if to_gpu is None or to_gpu == is_on_gpu(tensor) or tensor.is_meta:
            return out
        if _waits_for_copy(tensor, to_gpu, non_blocking=non_blocking):
            self.gpu.count_read(f"to {'cuda' if to_gpu else 'cpu'}")
        return _Move.apply(out, to_gpu) if out.requires_grad and torch.is_grad_enabled() else _moved(out, to_gpu)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Handle any other function, with a `device` that may be asked for."""
        on_gpu = _is_cuda(kwargs.get("device"))
        if on_gpu:
            kwargs["device"] = "cpu"
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        pins = kwargs.get("pin_memory")
        if pins:
            if on_gpu or (on_gpu is None and any(map(is_on_gpu, _tensors(args)))):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            kwargs["pin_memory"] = False
        if on_gpu is None and func in _LIKE_DATA and isinstance(args[-1], Tensor):
            on_gpu = is_on_gpu(args[-1])
        elif on_gpu is None and func is Tensor.new_tensor:
            on_gpu = is_on_gpu(args[0])
        copies = func in _LIKE_DATA or func is Tensor.new_tensor
        if copies and on_gpu and not any(map(is_on_gpu, _tensors(args[-1:]))):
            self.gpu.count_read("torch.tensor")
        out = func(*args, **kwargs)
        if pins:
            _pinned(out)
        if on_gpu is None or not isinstance(out, Tensor):
            for tensor in _tensors((out,)):
                if _mark_of(tensor) is None:
                    _mark(tensor, False)
            return out
        if on_gpu != is_on_gpu(out):
            shared = func in _LIKE_DATA or any(isinstance(a, Tensor) and _same_storage(a, out) for a in args)
            out = _moved(out, on_gpu).requires_grad_(out.requires_grad) if shared else out
            _mark(out, on_gpu)
        return out


_LIKE_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return not (a.is_meta or b.is_meta) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _backward(mode: _Functions, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Go straight to the engine, with this mode on: hooks and functions of the backward pass are in it."""
    first, *rest = args
    roots = (first,) if isinstance(first, Tensor) else tuple(first)
    grads = rest[0] if rest else kwargs.get("gradient", kwargs.get("grad_tensors"))
    retain = kwargs.get("retain_graph", rest[1] if len(rest) > 1 else None)
    create = bool(kwargs.get("create_graph", rest[2] if len(rest) > 2 else False))
    inputs = kwargs.get("inputs") or ()
    _run_engine(mode, roots, grads, retain, create, inputs, accumulate=True)


def _grad(mode: _Functions, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = dict(zip(names, args, strict=False)) | kwargs
    roots, inputs = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (given["outputs"], given["inputs"]))
    create, retain = bool(given.get("create_graph")), given.get("retain_graph")
    return _run_engine(
        mode, roots, given.get("grad_outputs"), retain, create, inputs, unused=bool(given.get("allow_unused"))
    )


def _run_engine(
    mode: _Functions, roots: Any, grads: Any, retain: Any, create: bool, inputs: Any,
    *, accumulate: bool = False, unused: bool = True,
) -> Any:  # fmt: skip
    grads = (grads,) if isinstance(grads, Tensor) else tuple(grads or [None] * len(roots))
    with mode:
        grads = tuple(
            torch.ones_like(x) if g is None and x.requires_grad else g for x, g in zip(roots, grads, strict=True)
        )
        retain = create if retain is None else retain
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        return torch.autograd.Variable._execution_engine.run_backward(
            roots, grads, retain, create, inputs, allow_unreachable=unused, accumulate_grad=accumulate
        )


def _numpy(mode: _Functions, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if is_on_gpu(args[0]):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return func(*args, **kwargs)


def _pin_memory(mode: _Functions, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    if is_on_gpu(args[0]):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return _pinned(args[0].clone())


def _check_grad(tensor: Tensor, grad: Tensor | None) -> None:
    if grad is not None and is_on_gpu(grad) != is_on_gpu(tensor):
        raise RuntimeError("assigned grad has data located on a different device")


def _tolist(mode: _Functions, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if is_on_gpu(args[0]):
        mode.gpu.count_read("tolist")
    return func(*args, **kwargs)


_PIN_MEMORY = torch._C.TensorBase.pin_memory
_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    _PIN_MEMORY: _pin_memory,
    Tensor.is_pinned: lambda _mode, _func, args, _kwargs: _is_pinned(args[0]),
    Tensor.tolist: _tolist,
    Tensor.get_device: lambda _mode, _func, args, _kwargs: this_gpu().index if is_on_gpu(args[0]) else -1,
}
_ANSWERS: dict[Any, Callable[[Any, Tensor], Any]] = {
    Tensor.device: lambda get, x: this_gpu() if is_on_gpu(x) else get(x),
    Tensor.is_cuda: lambda get, x: is_on_gpu(x) or get(x),
    Tensor.is_cpu: lambda get, x: not is_on_gpu(x) and get(x),
}


class PretendedCuda:
    """The pretended GPU, for the length of a `with` block."""

    def __init__(self) -> None:
        self.host_reads: Counter[str] = Counter()  # "operation at file:line of the project" -> times
        self._here = threading.local()
        self._stack = ExitStack()

    def __enter__(self) -> PretendedCuda:
        stack = self._stack
        for patch in self._patches():
            stack.enter_context(patch)
        stack.enter_context(flash_attention_on_cpu())
        self._enter_modes(stack)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def count_read(self, what: str) -> None:
        """Remember that the host waits for the device, and where."""
        frames = [f for f in traceback.extract_stack() if "/vlm_rl/" in f.filename]
        where = f"{frames[-1].filename.rpartition('/vlm_rl/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
        self.host_reads[f"{what} at {where}"] += 1

    @contextmanager
    def inside(self, mode: _Functions) -> Iterator[None]:
        """Remember, in a `with` block, the mode that torch has taken off while it calls it."""
        before = getattr(self._here, "mode", None)
        self._here.mode = mode
        try:
            yield
        finally:
            self._here.mode = before

    def _enter_modes(self, stack: ExitStack) -> None:
        stack.enter_context(_Functions(self))
        stack.enter_context(_Operations(self))

    def _hooked(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a hook on saved tensors, which torch calls in the middle of a function, with the mode on."""

        def call(x: Any) -> Any:
            mode = getattr(self._here, "mode", None)
            if mode is None:
                return hook(x)
            self._here.mode = None
            try:
                with mode:
                    return hook(x)
            finally:
                self._here.mode = mode

        return call

    def _pinning(self, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return torch's own hook, which pins only where there is a GPU, and asks torch."""

        def call(x: Any) -> Any:
            self._here.is_asked = True
            try:
                return pack(x)
            finally:
                self._here.is_asked = False

        return call

    def _patches(self) -> Iterator[Any]:
        from vlm_rl import devices
        from vlm_rl.learner.attention import shared_prefix as shared_prefix_attention

        yield _answering(devices.has_gpu, True)
        for name, answer in _TORCH_CUDA.items():
            yield mock.patch.object(torch.cuda, name, answer)
        # Other libraries would look for a driver; ours ask vlm_rl.devices.
        yield mock.patch.object(torch.cuda, "is_available", lambda: getattr(self._here, "is_asked", False))
        yield mock.patch.object(Tensor, "pin_memory", _PIN_MEMORY)  # vLLM's CPU worker replaces it for good
        yield mock.patch.object(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None)
        yield mock.patch.object(shared_prefix_attention, "can_use_flash_attention", _takes_flash)
        yield mock.patch.object(torch.distributed, "init_process_group", _init_process_group)
        hooks = torch.autograd.graph.saved_tensors_hooks
        own_init = hooks.__init__

        def init(this: Any, pack: Any, unpack: Any) -> None:
            pack = self._pinning(pack) if isinstance(this, save_on_cpu) else pack
            own_init(this, self._hooked(pack), self._hooked(unpack))

        yield mock.patch.object(hooks, "__init__", init)
        apply = BackwardCFunction.apply

        def apply_checked(function: Any, *grads: Any) -> Any:
            out = apply(function, *grads)
            if not isinstance(function, _Move._backward_cls) and any(map(is_on_gpu, _tensors(grads))):
                for grad in _tensors(out if isinstance(out, tuple) else (out,)):
                    if _mark_of(grad) is False:
                        raise RuntimeError(
                            f"Function {type(function).__name__} returned an invalid gradient - "
                            "expected device cuda:0 but got cpu"
                        )
            return out

        yield mock.patch.object(BackwardCFunction, "apply", apply_checked)
        yield mock.patch.object(torch.UntypedStorage, "device", property(_device_of_storage))
        yield mock.patch.object(torch.UntypedStorage, "clone", _cloned_storage)
        own_run = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            with ExitStack() as stack:
                self._enter_modes(stack)
                own_run(thread)

        yield mock.patch.object(threading.Thread, "run", run)
        yield mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"})
        yield _deepspeed_on_gpu()


_storage_device: Any = vars(torch._C.StorageBase)["device"]


def _device_of_storage(storage: torch.UntypedStorage) -> torch.device:
    return this_gpu() if getattr(storage, _MARK, False) else _storage_device.__get__(storage)


def _cloned_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes()).copy_(storage)
    setattr(copy, _MARK, getattr(storage, _MARK, False))
    return copy


@contextmanager
def _answering(function: Any, answer: bool) -> Iterator[None]:
    """Let the function return True or False. Modules hold the function itself, so its code is what is replaced."""
    code = function.__code__
    function.__code__ = (lambda: True).__code__ if answer else (lambda: False).__code__
    try:
        yield
    finally:
        function.__code__ = code


@contextmanager
def _deepspeed_on_gpu() -> Iterator[None]:
    from vlm_rl.learner.deepspeed import import_deepspeed

    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    with (
        mock.patch.object(
            accelerator, "device_name", lambda self, index=None: "cuda" if index is None else f"cuda:{index}"
        ),
        mock.patch.object(accelerator, "current_device_name", lambda self: str(this_gpu())),
        mock.patch.object(accelerator, "on_accelerator", lambda self, tensor: tensor.is_cuda),
    ):
        yield


_init = torch.distributed.init_process_group


def _init_process_group(backend: str, *, device_id: torch.device, **options: Any) -> None:
    """Check what a GPU's process group is given, and make one of gloo."""
    assert backend == "cpu:gloo,cuda:nccl" and device_id.type == "cuda", (backend, device_id)
    _init("gloo", **options)


def _takes_flash(params: Any) -> bool:
    """Answer as torch does on a card from Ampere on."""
    query, key, value = params.query, params.key, params.value
    assert all(map(is_on_gpu, (query, key, value)))
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256


_TORCH_CUDA: dict[str, Any] = {
    "set_device": lambda device: None,
    "current_device": lambda: this_gpu().index,
    "device_count": lambda: 1,
    "mem_get_info": lambda device=None: (CARD_BYTES, CARD_BYTES),
    "get_device_name": lambda device=None: "pretended",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=CARD_BYTES, major=8, minor=0),
    "empty_cache": lambda: None,
    "synchronize": lambda device=None: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: CARD_BYTES // 2,
    "max_memory_reserved": lambda device=None: CARD_BYTES // 2,
    "memory_snapshot": list,
    "memory_reserved": lambda device=None: CARD_BYTES // 4,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": None,
}


def main(arguments: list[str]) -> int:
    """Run a command of vlm-rl on the pretended GPU."""
    from vlm_rl.cli import main as command

    sys.argv = ["vlm-rl", *arguments]
    with PretendedCuda() as gpu:
        try:
            code = command()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    print(f"pretended GPU: {sum(gpu.host_reads.values())} host reads", file=sys.stderr)
    return code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
