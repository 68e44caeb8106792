"""Linear attention over a packed row: each prompt once, and each response from the state behind its prompt.

A layer of linear attention convolves each token with the few before it, and then changes a state token by token. Over
a packed row as it is, both would run from one response into the next. Here the first tokens of each prompt and
response are convolved again, with what precedes them in their own sequence, and the state is computed of batches:
first of prompts, which begin without one, then of responses, each of which begins with its prompt's. What a response
does to the gradient of that state reaches the prompt, where the responses' sum.

The layers stay transformers' own, and so do the functions that convolve and that change the state: flash linear
attention and causal-conv1d where they are installed, else loops in torch. Ours stand before them in the modules that
define such layers, and take over where a row's layout comes along, as it does to the attention of other layers. None
of it needs `cu_seqlens`, which the loops in torch drop without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
import transformers
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from vlm_rl.errors import UserError
from vlm_rl.learner.packing import RowLayout, RowSpans, TokenSpan, move

KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}  # modules and their packages
CHUNK = 64  # tokens that transformers' functions compute at a time, and the kernels that they call


# --- what follows what ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """Prompts, or responses, of about one length, side by side and filled up to the longest."""

    tokens_NL: Tensor  # int64, the row's token that each one is; what fills up repeats the row's first
    is_filler_NL: Tensor
    after_N: Tensor | None  # int64, the prompt that each response follows, numbered as in the batches; None: prompts


@dataclass(frozen=True, slots=True, eq=False)
class StateRuns:
    """What each token of a row follows in layers of linear attention."""

    first_F: Tensor  # int64, the tokens at the start of each prompt and response, as many as the window has before it
    windows_FW: Tensor  # int64, what each of these is convolved with, itself last; -1 where nothing precedes it
    batches: Sequence[StateBatch]  # those of prompts, then those of responses
    place_T: Tensor  # int64, where each token of the row is in the batches, flattened and end to end

    def to(self, device: torch.device | str) -> Self:
        """Return the runs with every tensor on the device."""
        return replace(move(self, device), batches=[move(batch, device) for batch in self.batches])


def state_runs(spans: RowSpans, width: int) -> StateRuns:
    """Return the state and window that each token of a row continues.

    Args:
        spans: of each prompt of the row and its responses.
        width: tokens of the convolution's window, the token itself included; at least 2.
    """
    nothing = np.full(width - 1, -1)
    sequences: list[tuple[TokenSpan, np.ndarray]] = []  # and the tokens before each, as many as a window has
    for prompt, responses in spans:
        end_of_prompt = np.concatenate([nothing, _tokens(prompt)])[1 - width :]
        sequences += [(prompt, nothing), *((response, end_of_prompt) for response in responses)]
    sequences = [(span, before) for span, before in sequences if span[1]]
    firsts = [_tokens(span)[: width - 1] for span, _ in sequences]
    windows = [
        sliding_window_view(np.concatenate([before, first]), width)
        for (_, before), first in zip(sequences, firsts, strict=True)
    ]
    of_prompts = _of_about_one_length([(prompt, index) for index, (prompt, _) in enumerate(spans)])
    of_responses = _of_about_one_length(
        [(response, index) for index, (_, responses) in enumerate(spans) for response in responses if response[1]]
    )
    place_T = np.empty(sum(size for (_, size), _ in sequences), dtype=np.int64)
    batches, end = [], 0
    number = {index: n for n, (_, index) in enumerate(member for batch in of_prompts for member in batch)}
    for batch in (*of_prompts, *of_responses):
        longest = max(size for (_, size), _ in batch)
        tokens_NL = np.zeros((len(batch), longest), dtype=np.int64)
        is_filler_NL = np.ones(tokens_NL.shape, dtype=bool)
        for n, (span, _) in enumerate(batch):
            tokens_NL[n, : span[1]], is_filler_NL[n, : span[1]] = _tokens(span), False
            place_T[_tokens(span)] = end + n * longest + np.arange(span[1])
        end += tokens_NL.size
        after_N = None if len(batches) < len(of_prompts) else torch.tensor([number[index] for _, index in batch])
        batches.append(StateBatch(torch.from_numpy(tokens_NL), torch.from_numpy(is_filler_NL), after_N))
    return StateRuns(
        first_F=torch.from_numpy(np.concatenate(firsts)),
        windows_FW=torch.from_numpy(np.concatenate(windows)),
        batches=batches,
        place_T=torch.from_numpy(place_T),
    )


def _tokens(span: TokenSpan) -> np.ndarray:
    return np.arange(span[0], sum(span))


def _of_about_one_length(members: Sequence[tuple[TokenSpan, int]]) -> list[list[tuple[TokenSpan, int]]]:
    """Return spans in batches, in each of which none has twice as many chunks as another.

    So the filler of a batch is less than its tokens, and what ends in the midst of a chunk. A batch for each length
    would have none; a few batches take fewer calls.
    """
    batches: dict[int, list[tuple[TokenSpan, int]]] = {}
    for span, index in members:
        num_chunks = -(-span[1] // CHUNK)
        batches.setdefault(num_chunks.bit_length(), []).append((span, index))
    return [batches[key] for key in sorted(batches)]


def missing_kernels() -> list[str]:
    """Return the packages that are not installed, in place of which transformers takes loops in torch."""
    return [package for module, package in KERNELS.items() if find_spec(module) is None]


# --- in place of transformers' functions ------------------------------------------------------------


def install(model: nn.Module) -> None:
    """Let the layers of linear attention of a transformers model read packed rows.

    The functions are those of the modules that define the layers: other models of the type call ours too, which pass
    on what comes without a row's layout.

    Raises UserError for layers that call functions of other names.
    """
    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
    for module in {sys.modules[type(layer).__module__] for layer in layers}:
        for name, ours in (("causal_conv1d_fn", _convolved), ("torch_chunk_gated_delta_rule", _ruled)):
            theirs = getattr(module, name, None)
            if theirs is None:
                raise UserError(
                    f"transformers {transformers.__version__} has no {module.__name__}.{name}, by which packed rows "
                    "reach the linear attention of this model: set model.rows=padded, or install an earlier "
                    "transformers"
                )
            if not isinstance(theirs, _OfRows):
                setattr(module, name, _OfRows(theirs, ours))


@dataclass(frozen=True, slots=True)
class _OfRows:
    """A function of transformers, and ours for packed rows, which calls it."""

    theirs: Callable[..., Any]
    ours: Callable[..., Any]

    def __call__(
        self, *args: Any, layout: RowLayout | None = None, row_states: StateRuns | None = None, **kwargs: Any
    ) -> Any:
        if layout is None:
            return self.theirs(*args, **kwargs)
        assert row_states is not None, "linear attention needs what the packed row's tokens follow"
        return self.ours(self.theirs, *args, runs=row_states, **kwargs)


def _convolved(
    convolve: Callable[..., Tensor],
    x_1CT: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    runs: StateRuns,
    **options: Any,
) -> Tensor:
    """Return the convolution of a packed row, [1, C, T]: of the row as it is, and its first tokens again.

    Args:
        convolve: transformers' function.
        x_1CT: the projections of the row's tokens.
        weight: [C, W].
        bias: [C].
        runs: of the row.
        options: of transformers' function, such as the activation behind it.
    """
    windows_FW = runs.windows_FW
    windows_FCW = x_1CT[0].index_select(1, windows_FW.clamp(min=0).flatten()).unflatten(1, windows_FW.shape)
    windows_FCW = (windows_FCW * (windows_FW >= 0)).transpose(0, 1).contiguous()
    first_FC = convolve(windows_FCW, weight, bias, **options)[:, :, -1]
    return convolve(x_1CT, weight, bias, **options).index_copy(2, runs.first_F, first_FC.T[None])


def _ruled(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    runs: StateRuns,
    initial_state: Tensor | None,
    output_final_state: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the gated delta rule's output for a packed row, [1, T, heads, head_dim], and no last state.

    What fills up a batch decays nothing (g = 0) and adds nothing (beta = 0), so that a prompt's last state is the one
    behind its last token.

    Args:
        rule: transformers' function.
        query: [1, T, heads, head_dim].
        key: like query.
        value: like query, but its head_dim may differ.
        g: [1, T, heads], the logarithm of each token's decay.
        beta: [1, T, heads], how much of each token is written.
        runs: of the row.
        initial_state: None, as without a cache.
        output_final_state: False, for the same reason.
        options: of transformers' function.
    """
    assert initial_state is None and not output_final_state, "a packed row is computed without a cache"
    outputs, states = [], []
    for batch in runs.batches:
        q, k, v, decay, share = (_taken(x, batch.tokens_NL) for x in (query, key, value, g, beta))
        decay, share = (x.masked_fill(batch.is_filler_NL[..., None], 0) for x in (decay, share))
        begin = None if batch.after_N is None else torch.cat(states).index_select(0, batch.after_N)
        output, state = rule(
            q, k, v, g=decay, beta=share, initial_state=begin, output_final_state=begin is None, **options
        )
        outputs.append(output.flatten(0, 1))
        if begin is None:
            states.append(state)
    return torch.cat(outputs).index_select(0, runs.place_T)[None], None


def _taken(x: Tensor, tokens_NL: Tensor) -> Tensor:
    """Return the tokens of the row that are in a batch, [N, L, ...] of [1, T, ...]."""
    return x[0].index_select(0, tokens_NL.flatten()).unflatten(0, tokens_NL.shape)
