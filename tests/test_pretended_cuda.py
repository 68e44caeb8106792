"""The rules of the pretended GPU, each of them CUDA's, and three planted faults that it finds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from tests.helpers.pretended_cuda import PretendedCuda, is_on_gpu
from vlm_rl import devices
from vlm_rl.doctor.attention import AttentionKernels
from vlm_rl.learner.head import Head
from vlm_rl.learner.policy import load_model

# Operations that torch advises against are cases too.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct", "ignore:The use of `x.T`")
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def gpu() -> Iterator[PretendedCuda]:
    with PretendedCuda() as pretended:
        yield pretended


def test_outside_nothing_is_pretended() -> None:
    with PretendedCuda():
        tensor = torch.zeros(2, device="cuda")
    assert tensor.device.type == "cpu" and not tensor.is_cuda
    assert devices.has_gpu() == torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device=torch.device("cuda", 0)),
        lambda: torch.arange(2, device=0),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(torch.float64).to(device="cuda", dtype=torch.float32),
        lambda: torch.zeros(2).cuda(),
        lambda: torch.zeros(2).to(torch.ones(1, device="cuda")),
        lambda: torch.as_tensor(np.ones(2), device="cuda"),
        lambda: torch.ones(2, device="cuda") * torch.tensor(3.0),
        lambda: torch.empty_like(torch.ones(2, device="cuda")),
        lambda: torch.ones(2, device="cuda").new_tensor([1.0, 2.0]),
        lambda: torch.ones(2, device="cuda").new_zeros(2),
        lambda: torch.tensor(torch.ones(2, device="cuda")),
        lambda: torch.ones(2, 3, device="cuda")[:, 0].T.view(2).detach(),
        lambda: nn.Linear(2, 2).to("cuda").weight[0],
        lambda: nn.Parameter(torch.ones(2, device="cuda")).data,
        lambda: deepcopy(torch.ones(2, device="cuda")),
        lambda: torch.ones(2).type_as(torch.ones(2, device="cuda")),
        lambda: torch.empty(0, device="cuda").set_(torch.ones(2, device="cuda").untyped_storage()),
    ],
)
def test_on_the_gpu(gpu: PretendedCuda, make) -> None:
    tensor = make()
    assert tensor.device == torch.device("cuda", 0) and tensor.is_cuda and not tensor.is_cpu
    assert tensor.get_device() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2),
        lambda: torch.zeros(2, device="cpu"),
        lambda: torch.ones(2, device="cuda").cpu(),
        lambda: torch.empty_like(torch.ones(2, device="cuda"), device="cpu"),
        lambda: torch.from_numpy(np.ones(2)),
        lambda: torch.ones(2).to(torch.ones(2)),
        lambda: torch.empty(0).set_(torch.ones(2, device="cuda").untyped_storage().cpu()),
    ],
)
def test_on_the_cpu(gpu: PretendedCuda, make) -> None:
    tensor = make()
    assert tensor.device.type == "cpu" and not tensor.is_cuda and tensor.get_device() == -1


def test_a_meta_tensor_stays_one(gpu: PretendedCuda) -> None:
    assert torch.empty(2, device="meta").device.type == "meta"


def test_a_move_is_a_copy(gpu: PretendedCuda) -> None:
    here = torch.ones(2)
    there = here.to("cuda")
    here.add_(1)
    assert there.tolist() == [1, 1] and there.to("cuda") is there
    memory = np.ones(2)
    there = torch.as_tensor(memory, device="cuda")
    memory += 1
    assert there.tolist() == [1, 1]


def test_gradients_return_to_their_device(gpu: PretendedCuda) -> None:
    weight = torch.ones(2, requires_grad=True)
    (weight.to("cuda") * torch.tensor([2.0, 3.0], device="cuda")).sum().backward()
    assert weight.grad is not None and not weight.grad.is_cuda and weight.grad.tolist() == [2, 3]
    assert torch.autograd.grad((weight.cuda() ** 2).sum(), weight)[0].tolist() == [2, 2]


@pytest.mark.parametrize(
    "operation",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: there @ here,
        lambda there, here: there.index_fill_(0, here.long(), 1.0),
        lambda there, here: there.index_select(0, here.long()),
        lambda there, here: there.gather(0, here.long()),
        lambda there, here: there.masked_fill(here > 0, 0.0),
        lambda there, here: here[there.long()],
        lambda there, here: there.__setitem__(torch.tensor([0, 1]), here),
        lambda there, here: nn.functional.embedding(here.long(), there[:, None]),
        lambda there, here: here + there.sum(),  # without dimensions, but of the GPU
        lambda there, here: there.clamp_(max=here),
        lambda there, here: there.index_fill_(0, torch.tensor(0), 1.0),  # no dimensions, but no pointwise operation
        lambda there, here: torch.equal(there, here),
        lambda there, here: torch.equal(there.sum(), here.sum()),  # no pointwise operation, though torch tags it so
        lambda there, here: here.sum().add_(there.sum()),  # written, which is no number any more
        lambda there, here: torch.add(there.sum(), there.sum(), out=here.sum()),
        lambda there, here: there.clamp(here.sum(), here.sum() + 1),  # more than one
        lambda there, here: torch.where(here > 0, there, there),
        lambda there, here: torch._foreach_add([there], [here]),
        lambda there, here: nn.functional.layer_norm(there, (2,), here),
        lambda there, here: there.index_put((torch.tensor([0, 1]),), here),
        lambda there, here: torch.addmm(here, there[:, None], there[None]),
        lambda there, here: nn.functional.cross_entropy(there[None], torch.tensor([0])),
        lambda there, here: there.repeat_interleave(here.long()),
    ],
)
def test_an_operation_on_both_devices_raises(gpu: PretendedCuda, operation) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        operation(torch.ones(2, device="cuda"), torch.ones(2))


@pytest.mark.parametrize(
    "operation",
    [
        lambda there, here: there.copy_(here),
        lambda there, here: here.copy_(there),
        lambda there, here: there[here.long()],
        lambda there, here: there[here > 0],
        lambda there, here: there.__setitem__(here.long(), torch.tensor(3.0)),
        lambda there, here: there * here.sum(),
        lambda there, here: there.clamp(max=here.sum()),
        lambda there, here: torch.where(there > 0, there, here.sum()),
        lambda there, here: there.masked_fill(there > 0, here.sum()),
        lambda there, here: torch._foreach_copy_([there], [here]),
        lambda there, here: torch.where(there > 0, here.sum(), here.sum() + 1),  # which moves both
        lambda there, here: torch._foreach_mul_([there], here.sum()),
        lambda there, here: there.__setitem__(slice(0, 2), here),
        lambda there, here: there.__setitem__(here > 0, 1.0),
    ],
)
def test_what_cuda_takes_of_both_devices(gpu: PretendedCuda, operation) -> None:
    there, here = torch.zeros(2, device="cuda"), torch.ones(2)
    operation(there, here)
    assert there.is_cuda and not here.is_cuda


def test_numpy_reads_only_the_cpu(gpu: PretendedCuda) -> None:
    there = torch.ones(2, device="cuda")
    for read in (lambda: there.numpy(), lambda: np.asarray(there)):
        with pytest.raises(TypeError, match=r"Tensor\.cpu"):
            read()
    assert there.cpu().numpy().tolist() == [1, 1]


def test_only_the_cpu_is_pinned(gpu: PretendedCuda) -> None:
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(2, device="cuda").pin_memory()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(2, device="cuda", pin_memory=True)
    for make in (torch.empty_like, lambda x, **how: x.new_empty(2, **how)):
        with pytest.raises(RuntimeError, match="pin"):
            make(torch.ones(2, device="cuda"), pin_memory=True)
        assert make(torch.ones(2), pin_memory=True).is_pinned()
    assert not torch.ones(2).is_pinned() and torch.ones(2).pin_memory().is_pinned()
    assert torch.empty_like(torch.ones(2, device="cuda"), device="cpu", pin_memory=True).is_pinned()
    assert torch.ones(2).pin_memory().to("cuda", non_blocking=True).is_cuda


def test_a_generator_of_the_cpu_draws_nothing_on_the_gpu(gpu: PretendedCuda) -> None:
    generator = torch.Generator()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device="cuda", generator=generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(2, device="cuda").uniform_(generator=generator)
    assert torch.randn(2, generator=generator).to("cuda").is_cuda


def test_a_module_on_the_cpu_refuses_the_gpu(gpu: PretendedCuda) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        nn.Linear(2, 2)(torch.ones(1, 2, device="cuda"))


def test_hooks_of_a_backward_pass_are_on_the_gpu(gpu: PretendedCuda) -> None:
    weight, seen = nn.Parameter(torch.ones(2, device="cuda")), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(torch.zeros_like(p.grad).device.type))
    (weight * 2).sum().backward()
    assert seen == ["cuda"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_saved_tensors_go_to_the_host_and_back(gpu: PretendedCuda, reentrant: bool) -> None:
    layer, x = nn.Linear(3, 3).to("cuda"), torch.ones(1, 3, device="cuda", requires_grad=True)
    kept: list[str] = []

    class Seen(save_on_cpu):
        def __init__(self) -> None:
            super().__init__(pin_memory=True)

    with Seen():
        out = checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=reentrant)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.device.type) or t, lambda t: t):
        layer(x)
    out.sum().backward()
    assert {*kept} == {"cuda"} and x.grad is not None and x.grad.is_cuda


def test_threads_are_on_the_gpu(gpu: PretendedCuda) -> None:
    seen: list[str] = []

    def work() -> None:
        seen.append(torch.zeros(2, device="cuda").device.type)
        with suppress(RuntimeError):
            torch.ones(2, device="cuda") + torch.ones(2)
            seen.append("mixed")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["cuda"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda there, here: there.sum().item(),
        lambda there, here: bool(there.sum()),
        lambda there, here: here[: there.sum().long()],
        lambda there, here: there.tolist(),
        lambda there, here: there.nonzero(),
        lambda there, here: torch.allclose(there, there),
        lambda there, here: torch.bincount(there.long(), minlength=4),
        lambda there, here: there.repeat_interleave(there.long()),
        lambda there, here: there[there > 0],  # how many are there?
        lambda there, here: there.__setitem__(there > 0, there.clone()),
        lambda there, here: there[here > 0],
        lambda there, here: there[[0, 1]],
        lambda there, here: there.cpu(),
        lambda there, here: here.copy_(there),
        lambda there, here: there.copy_(here),
        lambda there, here: here.to("cuda"),
        lambda there, here: here.to("cuda", non_blocking=True),  # it is not pinned
        lambda there, here: here.pin_memory().to("cuda"),
        lambda there, here: torch.where(there > 0, there, here.sum()),
        lambda there, here: torch.tensor(1.0, device="cuda"),
        lambda there, here: torch.as_tensor([1.0], device="cuda"),
        lambda there, here: there.new_tensor(1.0),
    ],
)
def test_the_host_waits_once(gpu: PretendedCuda, wait) -> None:
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    wait(there, here)
    assert sum(gpu.host_reads.values()) == 1, gpu.host_reads


@pytest.mark.parametrize(
    "go_on",
    [
        lambda there, here: there.to("cpu", non_blocking=True),
        lambda there, here: here.copy_(there, non_blocking=True),
        lambda there, here: here.pin_memory().to("cuda", non_blocking=True),
        lambda there, here: there.copy_(here.pin_memory(), non_blocking=True),
        lambda there, here: there.copy_(there),
        lambda there, here: here.sum().item(),
        lambda there, here: here[here > 0],
        lambda there, here: there[there.long()],
        lambda there, here: there.__setitem__(there > 0, 0.0),
        lambda there, here: there.masked_fill(there > 0, 0.0),
        lambda there, here: there.repeat_interleave(2),
        lambda there, here: there.repeat_interleave(there.long(), output_size=3),
        lambda there, here: there * here.sum(),
        lambda there, here: (torch.full((), 1.0, device="cuda"), there.new_full((), 1.0)),
        lambda there, here: torch.tensor(there),
    ],
)
def test_the_host_does_not_wait(gpu: PretendedCuda, go_on) -> None:
    go_on(torch.ones(3, device="cuda"), torch.ones(3))
    assert not gpu.host_reads


class Halved(torch.autograd.Function):
    """A function with a gradient on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full((2,), 0.5)


def test_a_gradient_is_where_its_tensor_is(gpu: PretendedCuda) -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    with pytest.raises(RuntimeError, match="different device"):
        weight.grad = torch.ones(2)
    weight.grad = torch.ones(2, device="cuda")
    weight.grad = None
    with pytest.raises(RuntimeError, match="invalid gradient"):
        Halved.apply(weight).sum().backward()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_what_an_optimizer_keeps_is_where_its_weights_are(gpu: PretendedCuda, kind) -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(2, device="cuda")
    optimizer.step()
    assert weight.is_cuda and {x.is_cuda for x in optimizer.state[weight].values() if x.dim()} == {True}


def test_a_storage_is_where_its_tensors_are(gpu: PretendedCuda) -> None:
    there = torch.ones(2, device="cuda").untyped_storage()
    assert there.device.type == there.clone().device.type == "cuda" and there.is_cuda
    assert there.cpu().device.type == torch.ones(2).untyped_storage().device.type == "cpu"
    with pytest.raises(RuntimeError, match="other device"):
        torch.empty(0).set_(there)


def test_kernels_take_what_they_take_on_a_gpu(gpu: PretendedCuda) -> None:
    query = torch.ones(1, 2, 4, 8, device="cuda")
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    cuts = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    packed = query[0].transpose(0, 1)
    for dtype, taken in ((torch.bfloat16, nullcontext()), (torch.float32, pytest.raises(RuntimeError, match="fp16"))):
        with taken:
            varlen_attn(*[packed.to(dtype)] * 3, cuts, cuts, 4, 4)
    assert nn.functional.scaled_dot_product_attention(query, query, query).is_cuda


def test_a_mark_ends_with_its_storage(gpu: PretendedCuda) -> None:
    """torch gives a storage's memory to another one: 10,000 of each, one after the other."""
    for _ in range(10_000):
        assert torch.zeros(4, device="cuda").is_cuda
        assert not torch.zeros(4).is_cuda


def test_our_question_and_torchs_are_answered(gpu: PretendedCuda) -> None:
    assert devices.has_gpu() and devices.num_gpus() == 1
    assert devices.default_device() == torch.device("cuda", 0)
    assert devices.model_dtype(devices.default_device()) == torch.bfloat16
    assert not torch.cuda.is_available()  # libraries would look for a driver


def test_what_the_backward_pass_makes_itself_is_where_it_is_used(gpu: PretendedCuda) -> None:
    """C++ makes zeros here, on the device of the values that it takes out of the gradient."""
    x, values = (torch.ones(n, 2, device="cuda", requires_grad=True) for n in (3, 2))
    x.index_put([torch.tensor([0, 2], device="cuda")], values).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 1, 0] and x.grad.is_cuda


def test_what_the_backward_pass_makes_under_another_mode_is_where_it_is_used(gpu: PretendedCuda) -> None:
    """A mode that watches operations calls each of them itself, also those of C++."""
    x = torch.ones(3, 2, device="cuda", requires_grad=True)
    with AttentionKernels():
        x[torch.tensor([True, False, True], device="cuda")].sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 0, 1] and x.grad.is_cuda


def test_integers_are_counted(gpu: PretendedCuda) -> None:
    counted = torch.histc(torch.tensor([0, 2, 2], dtype=torch.int32, device="cuda"), bins=3, min=0, max=2)
    assert counted.tolist() == [1, 0, 2] and counted.is_cuda and counted.dtype == torch.int32


# --- planted faults -----------------------------------------------------------------------------------


def test_a_buffer_left_on_the_cpu_is_found(gpu: PretendedCuda) -> None:
    """The fault that ended each run of the first GPU."""
    head = Head(nn.Linear(4, 8, bias=False).to("cuda"), banned_ids=[1], temperature=1.0)
    states, targets = torch.ones(2, 4, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    assert head(states, targets)[0].is_cuda
    head.banned = head.banned.cpu()
    with pytest.raises(RuntimeError, match="index_fill_ got cuda:0"):
        head(states, targets)


def test_rotary_frequencies_left_on_the_cpu_are_found(gpu: PretendedCuda, tiny_model: Path) -> None:
    """The fault that ended the doctor's ZeRO 3: no one moves the buffers of a model in shards."""
    model: Any = load_model(tiny_model, dtype=torch.float32)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cuda"}
    pixels = torch.zeros(4, 1176, device="cuda"), torch.tensor([[1, 2, 2]], device="cuda")
    assert model.model.get_image_features(*pixels).pooler_output[0].is_cuda
    rotary = model.model.visual.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.cpu()
    with pytest.raises(RuntimeError, match=MIXED):
        model.model.get_image_features(*pixels)


def test_a_total_on_the_cpu_is_found(gpu: PretendedCuda) -> None:
    values = [torch.ones((), device="cuda"), torch.ones((), device="cuda")]
    total = torch.zeros(1)
    with pytest.raises(RuntimeError, match=MIXED):
        for value in values:
            total += value
    total = torch.zeros(())  # without dimensions
    with pytest.raises(RuntimeError, match=MIXED):
        total += values[0]
    assert is_on_gpu(sum(values, torch.zeros((), device="cuda")))
