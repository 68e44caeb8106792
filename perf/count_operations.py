"""Count what an update asks of a GPU, by part: operations, bytes, calls and host reads, without a GPU.

    python perf/count_operations.py                    # a minute; the tables of docs/performance_details.md
    python perf/count_operations.py --size tiny --prompt 70 --tokens 32

The real policy computes on tensors without values (torch's meta device), and every aten operation is counted: its
floating point operations, the bytes of the tensors that it reads and writes, and one call. The seconds are the larger
of the operations at --tflops and of the bytes at --tbytes, call by call: what a card of these rates could not go
below, not what it takes. One row is computed: a prompt with a square image, and --responses of --tokens each. The
optimizer's step, DeepSpeed and collectives are not counted.

- Views are free. An operation that gathers or scatters is counted by what it moves, not by the table it picks from.
- Attention is torch's flash kernel, as on a GPU; only pairs that a token may attend to are counted.
- A kernel of Liger's, or of ours, reads its inputs and writes its outputs once.
- A host read is a value of a tensor that Python asks for: on a GPU it waits until all that was asked before is done.

The ways are settings of a run. Layers: `transformers` is `model.layer_patches: auto` on a GPU, `lean` is `true`, and
`Liger` is `liger`. `kept` recomputes nothing, `all recomputed` is `model.gradient_checkpointing: true`, and a `fused
head` is `model.fused_head: true`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from gpu_learner import IMAGE, make_config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration
from weighed_groups import WeighedGroup, pack

from vlm_rl.config import LayerPatches
from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner import head as head_module
from vlm_rl.learner import policy as policy_module
from vlm_rl.learner.attention import liger_layers, shared_prefix
from vlm_rl.learner.attention import vision as vision_attention
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.losses import policy_loss
from vlm_rl.types import Prompt, Rollout

TFLOPS, TBYTES = 700.0, 3.6  # an H200's, by its first day: matrix products and copies
PARTS = ("products", "rest of the layers", "attention", "head", "tower")
LOSS = {"ratio": "sequence", "surrogate": "clip", "clip_low": 2e-3, "clip_high": 2.5e-3, "cap": 2.0}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
MOVES_OUTPUT = {"gather", "index", "index_select", "embedding", "slice", "cat", "_unsafe_index"}
MOVES_SOURCE = {"scatter_add_", "index_put_", "_index_put_impl_", "index_add_", "masked_scatter"}
MOVES_LITTLE = {"index_fill_"}
FREE = {
    *("detach", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"),
    *("_unsafe_view", "_reshape_alias", "_local_scalar_dense"),
}
READS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__bool__,
    Tensor.__index__,
    Tensor.numpy,
)


@dataclass(frozen=True)
class Way:
    """Settings of a run."""

    name: str
    layers: LayerPatches
    checkpointing: bool | Literal["mlp"]
    fused_head: bool = False
    logit_bytes: int = head_module.LOGIT_BYTES  # of a chunk of the head


WAYS = (
    Way("transformers, all recomputed", False, True),
    Way("transformers, kept", False, False),
    Way("lean, all recomputed", True, True),
    Way("lean, kept", True, False),
    Way("Liger, all recomputed", "liger", True),
    Way("Liger, all recomputed, four times the chunk", "liger", True, logit_bytes=4 * head_module.LOGIT_BYTES),
    Way("Liger, all recomputed, fused head", "liger", True, fused_head=True),
    Way("Liger, MLPs recomputed, fused head", "liger", "mlp", fused_head=True),
    Way("Liger, kept, fused head", "liger", False, fused_head=True),
)
MEASURED = {  # ms of a row of the default shape on an H200: a sixteenth of a step, and perf/gpu_update.py
    "update: transformers, all recomputed": 14_000 / 16,
    "update: Liger, kept, fused head": 656,
    "forward: transformers": 3_150 / 16,
}


@dataclass
class Work:
    """What a part of a pass asks for."""

    operations: float = 0.0  # floating point
    bytes: float = 0.0  # read and written
    calls: int = 0
    seconds: float = 0.0  # at the card's rates

    def __add__(self, other: Work) -> Work:
        mine, theirs = vars(self), vars(other)
        return Work(**{key: mine[key] + theirs[key] for key in mine})


@dataclass
class Count:
    """The work of a pass by part, and how often the host reads a tensor."""

    parts: dict[str, Work] = field(default_factory=lambda: {part: Work() for part in PARTS})
    host_reads: int = 0

    @property
    def total(self) -> Work:
        return sum(self.parts.values(), Work())


class Counting(TorchDispatchMode):
    """Adds every operation to a Count, by what it is and by the part that runs."""

    def __init__(self, count: Count, rates: tuple[float, float]) -> None:
        super().__init__()
        self.count, self.rates = count, rates
        self.part: str | None = None
        self.by_name: Counter[str] = Counter()  # bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = args, dict(kwargs or {})
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_iter((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name not in FREE and not _is_view(func):
            work = self._work(func, name, given, kwargs, out)
            part = self.part or ("products" if name in PRODUCTS else "rest of the layers")
            self.count.parts[part] += work
            self.by_name[f"{part}: {name}"] += int(work.bytes)
        return out

    def _work(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Work:
        operations = _operations(func, name, args, kwargs, out)
        moved = _bytes(func, name, args, kwargs, out)
        seconds = max(operations / self.rates[0], moved / self.rates[1])
        return Work(operations, moved, 1, seconds)

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def marks(self, function: Any, part: str) -> Any:
        """Return the function as one of that part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part):
                return function(*args, **kwargs)

        return call


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors' values."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.count.host_reads += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; one that is expanded has those of what it repeats."""
    return tensor.element_size() * prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s)


def _bytes(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    inputs = [x for x in tree_iter((args, {**kwargs, "out": None})) if isinstance(x, Tensor)]
    outputs = [x for x in tree_iter(out) if isinstance(x, Tensor)]
    if not outputs:  # written into, and not returned
        aliases = (argument.alias_info for argument in func._schema.arguments)
        outputs = [x for x, alias in zip(args, aliases, strict=False) if alias is not None and alias.is_write]
    if name in MOVES_LITTLE:
        return 0
    if name in MOVES_OUTPUT:
        return 2 * sum(map(_size, outputs))
    if name in MOVES_SOURCE:
        return 3 * min(map(_size, (x for x in inputs if x.is_floating_point())))
    return sum(map(_size, inputs if _reads_first(func) else inputs[1:])) + sum(map(_size, outputs))


def _reads_first(func: Any) -> bool:
    """Tell whether the operation reads the tensor that it writes into."""
    return func._schema.name.partition("::")[2] not in {"copy_", "fill_", "zero_"}


def _operations(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name.startswith("_flash_attention"):
        return _pairs_of_flash(name, args)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        if name in ("mm", "addmm"):  # whose formulas do not know the dtype of the output
            return float(formula(*(x for x in args if isinstance(x, Tensor)), out_val=out))
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(x.numel() for x in tree_iter(out) if isinstance(x, Tensor)))


def _pairs_of_flash(name: str, args: Any) -> float:
    """Return the operations of a call for runs of different lengths, by the pairs that attend to each other."""
    is_backward = name.endswith("backward")
    query = args[1] if is_backward else args[0]
    cuts = args[6:8] if is_backward else args[3:5]
    causal = args[11] if is_backward else args[8]
    q, k = (cut.diff().double() for cut in cuts)
    pairs = float((q * k).sum()) / (2 if causal else 1)
    return (10 if is_backward else 4) * pairs * query.shape[1] * query.shape[2]


# --- one row of the model ------------------------------------------------------------------------------


@torch.library.custom_op("count_operations::kernel", mutates_args=())
def kernel(inputs: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Stand for a kernel that reads its inputs once, and writes an output like each of the others."""
    return [torch.empty_like(x) for x in like]


kernel.register_fake(lambda inputs, like: [torch.empty_like(x) for x in like])


class _Norm(torch.autograd.Function):
    """Liger's RMS norm keeps its input and a number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        out, rate = kernel([x, weight], [x, x[..., :1].float()])
        ctx.save_for_backward(x, weight, rate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate = ctx.saved_tensors
        return *kernel([*grads, x, weight, rate], [x, weight]), *[None] * 5


class _SiLUMul(torch.autograd.Function):
    """Liger's gate times factor keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, factor: Tensor, *_: Any) -> Tensor:
        ctx.save_for_backward(gate, factor)
        return kernel([gate, factor], [gate])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *kernel([*grads, *saved], [*saved]), None, None


class _Rope(torch.autograd.Function):
    """Liger's rotation keeps cosine and sine."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(kernel([q, k, cos, sin], [q, k]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *kernel([*grads, *ctx.saved_tensors], [*grads]), *[None] * 4


def liger() -> Any:
    """Return stand-ins for Liger's kernels, which compute nothing without a GPU."""
    return SimpleNamespace(LigerRMSNormFunction=_Norm, LigerSiLUMulFunction=_SiLUMul, LigerRopeFunction=_Rope)


def make_policy(size: str, way: Way) -> Policy:
    """Return a policy without values in its weights, bfloat16."""
    config = make_config(size)
    implementation = {"text_config": shared_prefix.NAME, "vision_config": "sdpa"}
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(mock.patch.object(head_module, "has_gpu", lambda: True))
        stack.enter_context(mock.patch.object(policy_module, "has_gpu", lambda: True))
        stack.enter_context(mock.patch.object(liger_layers, "kernels", liger))
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
        policy = Policy(
            model, banned_ids=(IMAGE,), temperature=1.0, layer_patches=way.layers, fused_head=way.fused_head
        )
    vision_attention.install_attention(model.model.visual)  # which a GPU gets by `auto`
    if way.checkpointing:
        policy.enable_checkpointing(only_mlps=way.checkpointing == "mlp")
    return policy


def make_row(policy: Policy, *, prompt: int, responses: int, tokens: int) -> PackedRow:
    """Return a row of one group, of whose prompt the largest square image fits that leaves 30 tokens of text.

    All but the ids and the layout has no values.
    """
    side = 2 * int((prompt - 32) ** 0.5 / 2)
    ids = np.full(prompt, 16, dtype=np.int32)
    ids[1 : 1 + side**2] = IMAGE
    pixels, grid = torch.zeros(4 * side**2, 1176), torch.tensor([[1, 2 * side, 2 * side]])
    group = WeighedGroup(
        Prompt("0", "", "", ids, ids, (), {"pixel_values": pixels, "image_grid_thw": grid}),
        [
            Rollout("0", index, np.full(tokens, 17, np.int32), np.zeros(tokens, np.float32), "", "stop", 0)
            for index in range(responses)
        ],
        np.linspace(-1, 1, responses),
        np.full(responses, 1 / responses),
    )
    row = pack([Chunk(0, tuple(range(responses)))], [group], lambda prompt: rope_positions(policy.model, prompt))
    vision = {"pixel_values": pixels.to("meta"), "image_grid_thw": grid}
    return replace(row.to("meta"), ids_T=row.ids_T, layout=row.layout, vision=vision)


def count_pass(
    policy: Policy, row: PackedRow, *, update: bool, rates: tuple[float, float] = (TFLOPS * 1e12, TBYTES * 1e12)
) -> tuple[Count, Counter[str]]:
    """Return the work of a forward pass, in an update of the backward pass too, and the bytes by operation."""
    count = Count()
    counting = Counting(count, rates)
    with ExitStack() as stack:
        for patch in _marked_parts(counting):
            stack.enter_context(patch)
        stack.enter_context(torch.set_grad_enabled(update))
        stack.enter_context(HostReads(count))
        stack.enter_context(counting)
        with counting.inside("tower"):
            features = policy(row, only_features=True)
        leaf = features.detach().requires_grad_(update)
        logp_K, entropy_K = policy(replace(row, vision={"image_features": leaf}), with_entropy=update)
        if update:
            policy_loss(logp_K, entropy_K.detach(), row.loss, **LOSS)[0].backward()
            with counting.inside("tower"):
                features.backward(leaf.grad)
    return count, counting.by_name


def _marked_parts(counting: Counting) -> Iterator[Any]:
    """Yield patches with which head and attention say when they run, and attention is a GPU's."""
    for owner, part in ((head_module._ChunkedScore, "head"), (shared_prefix._TwoSoftmaxes, "attention")):
        for name in ("forward", "backward"):
            yield mock.patch.object(owner, name, staticmethod(counting.marks(getattr(owner, name), part)))
    yield mock.patch.object(shared_prefix, "takes_flash", lambda *_: True)
    functions = AttentionInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
    yield mock.patch.dict(functions, {vision_attention.NAME: _flash_windows})


def _flash_windows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, cu_seq_lens_q: Tensor, **__: Any
) -> tuple[Tensor, None]:
    """Attend as vision_attention.windowed_attention does on a GPU: all windows in one call."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = len(q)  # of no weight for what is counted; a GPU reads it once a row
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, 0.0, False, return_debug_mask=False
    )[0]
    return out[None], None


# --- the tables ------------------------------------------------------------------------------------------


def counted(options: argparse.Namespace) -> Iterator[tuple[str, Count]]:
    """Yield the work of an update each way, then that of a forward pass, of which checkpointing changes nothing."""
    for update, ways in ((True, WAYS), (False, WAYS[:1])):
        for way in ways:
            policy = make_policy(options.size, way)
            row = make_row(policy, prompt=options.prompt, responses=options.responses, tokens=options.tokens)
            rates = options.tflops * 1e12, options.tbytes * 1e12
            with mock.patch.object(head_module, "LOGIT_BYTES", way.logit_bytes):
                count, _ = count_pass(policy, row, update=update, rates=rates)
            yield f"update: {way.name}" if update else f"forward: {way.name.partition(',')[0]}", count


def print_tables(counts: Sequence[tuple[str, Count]], *, tokens: int, measured: Mapping[str, float]) -> None:
    print(f"| ms | {' | '.join(PARTS)} | sum | measured |\n|---|{'---|' * len(PARTS)}---|---|")
    for name, count in counts:
        cells = [f"{1e3 * count.parts[part].seconds:.0f}" for part in PARTS]
        seen = f"{measured[name]:.0f}" if name in measured else ""
        print(f"| {name} | {' | '.join(cells)} | {1e3 * count.total.seconds:.0f} | {seen} |")
    print("\n| a row | T operations | GB | KB a token | calls | host reads |\n|---|---|---|---|---|---|")
    for name, count in counts:
        total = count.total
        print(
            f"| {name} | {total.operations / 1e12:.0f} | {total.bytes / 1e9:.0f} | {total.bytes / tokens / 1e3:,.0f} "
            f"| {total.calls:,} | {count.host_reads} |"
        )


def main() -> None:
    options = arguments()
    tokens = options.prompt + options.responses * options.tokens
    print(
        f"{options.size}, bfloat16, a prompt of {options.prompt} tokens and {options.responses} responses of "
        f"{options.tokens}, at {options.tflops:g} TFLOP/s and {options.tbytes:g} TB/s\n"
    )
    shape = (options.size, options.prompt, options.responses, options.tokens)
    measured = MEASURED if shape == ("3b", 886, 8, 1024) else {}
    print_tables(list(counted(options)), tokens=tokens, measured=measured)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "3b", "7b"], default="3b")
    parser.add_argument("--prompt", type=int, default=886, help="tokens of the prompt, its image included")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--tflops", type=float, default=TFLOPS)
    parser.add_argument("--tbytes", type=float, default=TBYTES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
