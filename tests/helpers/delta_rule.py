"""The gated delta rule in float64, for comparisons that transformers' own in float32 is too coarse for."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlm_rl.learner.policy import Policy


def functions_of(policy: Policy) -> Any:
    """Return the module that defines the layers, whose functions they call."""
    layers = [layer for layer in policy.model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
    return sys.modules[type(layers[0]).__module__]


def use_exact_rule(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all models of the policy's type compute the rule in float64: in float32 it rounds by 4e-5 of a log-prob."""
    functions = functions_of(policy)
    exact = replace(functions.torch_chunk_gated_delta_rule, theirs=exact_rule)
    monkeypatch.setattr(functions, "torch_chunk_gated_delta_rule", exact)


def exact_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what transformers' function does, token by token and in float64, as the rule is defined.

    With a = exp(g), and q and k of norm 1, q over the root of their width:
    S' = a S, S = S' + k (beta (v - S'^T k))^T, and the output is S^T q.
    """
    q, k, v, g, beta = (x.double() for x in (query, key, value, g, beta))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    state = q.new_zeros(len(k), *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    states = []
    decays, betas = (x[..., None, None].unbind(1) for x in (g.exp(), beta))
    keys, values = (x.unsqueeze(-2).unbind(1) for x in (k, v))
    for k_t, v_t, a_t, beta_t in zip(keys, values, decays, betas, strict=True):
        state = a_t * state
        state = state + k_t.mT * (beta_t * (v_t - k_t @ state))
        states.append(state)
    outputs = (q.unsqueeze(-2) @ torch.stack(states, dim=1)).squeeze(-2)
    return outputs.to(query.dtype), state if output_final_state else None
