"""Norms and gated MLPs that keep less for the backward pass compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vlm_rl.learner.attention.lean_layers import _RMSNorm, _SiluTimes, install
from vlm_rl.learner.policy import Policy, load_model


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every norm and MLP of the model, by name."""
    ends = ("layernorm", "norm", "norm1", "norm2", "ln_q", "mlp")
    named = ((name, module) for name, module in model.named_modules() if name.endswith(ends))
    return {name: module for name, module in named if not isinstance(module, nn.Sequential)}  # the merger's mlp


def outcome(module: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Output, then the gradients of input and parameters under weights that tell all elements apart."""
    x = x.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    y = module(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
    (y * weights).sum().backward()
    return [y.detach(), *(tensor.grad for tensor in (x, *parameters) if tensor.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_norm_and_mlp_of_a_model_is_as_transformers_computes_it(tiny_model: Path, dtype: torch.dtype) -> None:
    theirs = layers_of(load_model(tiny_model, dtype=dtype))
    replaced = load_model(tiny_model, dtype=dtype)
    install(replaced)
    ours = layers_of(replaced)
    text, vision = replaced.config.text_config, replaced.config.vision_config
    assert len(ours) == 3 * text.num_hidden_layers + 3 * vision.depth + 2  # the last norm of each
    for name, module in ours.items():
        assert "forward" in vars(module), f"{name} was not replaced"
        for own, other in zip(module.parameters(), theirs[name].parameters(), strict=True):
            if own.ndim == 1:  # weights of one or biases of zero would hide what is left out
                own.data = other.data = torch.linspace(0.5, 1.5, own.numel()).to(dtype)
        width = next(module.parameters()).shape[-1]
        x = torch.randn(7, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        pairs = zip(
            outcome(module, x, list(module.parameters())),
            outcome(theirs[name], x, list(theirs[name].parameters())),
            strict=True,
        )
        for own, other in pairs:
            assert own.dtype == other.dtype
            gap = (own.double() - other.double()).norm() / other.double().norm()
            assert gap <= (1e-6 if dtype == torch.float32 else 8e-3), (name, gap)  # bfloat16 has 8 bits


def test_gradients_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, factor = (
        torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    weight = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 1e-2), (x, weight))
    assert torch.autograd.gradcheck(_SiluTimes.apply, (gate, factor))


def test_a_norm_by_hand() -> None:
    """Mean square of (3, 4) is 12.5; with epsilon 3.5 the root is 4."""
    y = _RMSNorm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 10.0]), 3.5)
    torch.testing.assert_close(y, torch.tensor([[1.5, 10.0]]))


def test_a_frozen_norm_passes_the_gradient_on() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    _RMSNorm.apply(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad is not None and x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept(tiny_model: Path, dtype: torch.dtype) -> None:
    """A norm keeps its input and a float32 a token; an MLP gate, factor and product beside its input."""
    policy = Policy(load_model(tiny_model, dtype=dtype), banned_ids=(), temperature=1.0)
    layer = policy.model.model.language_model.layers[0]
    tokens, text = 11, policy.model.config.text_config
    x = torch.randn(tokens, text.hidden_size).to(dtype).requires_grad_()
    size = dtype.itemsize
    expected = {
        "input_layernorm": tokens * (text.hidden_size * size + 4),
        "mlp": tokens * (text.hidden_size + 3 * text.intermediate_size) * size,
    }
    for name, num_bytes in expected.items():
        module, kept = layer.get_submodule(name), {}
        weights = {p.data_ptr() for p in module.parameters()}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            module(x)
        assert sum(kept[pointer] for pointer in kept.keys() - weights) == num_bytes, name
