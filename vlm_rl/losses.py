"""The policy loss as four independent factors: advantage x ratio x surrogate x aggregation.

The loss of one optimizer step is one weighted sum over all response tokens of its mini-batch,

    loss = sum_i sum_t  weight_i * c_it * l(w_it, A_i)  +  kl_coef * KL  -  entropy_coef * H

with w the importance ratio, l the surrogate, c the detached correction for the sampler's engine
noise, and one weight per response, the same for each of its tokens, that is fixed before anything
is split (``token_weights``). KL to a frozen reference and entropy H are token means, off by default.
A micro-batch therefore returns a plain sum, and gradients cannot depend on micro-batches, packing,
accumulation or the number of ranks.

Everything here is a pure function of tensors. K counts the response tokens of one micro-batch,
laid end to end; ``response_K`` holds the response, 0 .. n - 1, that each of them belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# --- importance ratio -------------------------------------------------------------------------


def token_ratio(logp_K: Tensor, old_logp_K: Tensor, response_K: Tensor, lengths_n: Tensor) -> Tensor:
    """w_it = exp(lp_it - lp_old_it) (GRPO, arXiv 2402.03300, equation 3)."""
    return torch.exp(logp_K - old_logp_K)


def sequence_ratio(logp_K: Tensor, old_logp_K: Tensor, response_K: Tensor, lengths_n: Tensor) -> Tensor:
    """s_i = exp((1/|y_i|) sum_t (lp_it - lp_old_it)), written per token (GSPO, arXiv 2507.18071, eq. 7).

    The per-token form s_it = sg(s_i) * exp(lp_it - sg(lp_it)) (GSPO-token, equation 14) has the
    value s_i on every token; summed over a response with any weight that is constant in t its
    gradient is |y_i| times that weight times grad s_i, which is what one term s_i per response has.
    """
    mean_n = _mean_by_response((logp_K - old_logp_K).detach(), response_K, lengths_n)
    return torch.exp(mean_n)[response_K] * torch.exp(logp_K - logp_K.detach())


def _mean_by_response(values_K: Tensor, response_K: Tensor, lengths_n: Tensor) -> Tensor:
    sums_n = torch.zeros(len(lengths_n), dtype=values_K.dtype, device=values_K.device)
    return sums_n.index_add(0, response_K, values_K) / lengths_n.clamp(min=1)


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
}

# --- surrogate --------------------------------------------------------------------------------


def clip(ratio_K: Tensor, advantage_K: Tensor, logp_K: Tensor, low: float, high: float) -> Tensor:
    """l = -min(w A, clip(w, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7; DAPO's two bounds)."""
    clipped_K = ratio_K.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio_K * advantage_K, clipped_K * advantage_K)


def cispo(ratio_K: Tensor, advantage_K: Tensor, logp_K: Tensor, low: float, high: float) -> Tensor:
    """l = -sg(clip(w, 1 - low, 1 + high)) A lp (CISPO, arXiv 2506.13585, equation 4).

    low = 1 is no lower bound, since w > 0. A clipped token keeps a (bounded) gradient.
    """
    return -ratio_K.detach().clamp(1 - low, 1 + high) * advantage_K * logp_K


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
}

# --- aggregation ------------------------------------------------------------------------------


def sequence_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """1 / (N |y_i|): the mean over responses of their token means (GRPO, equation 3)."""
    return 1.0 / (lengths_PG.size * np.maximum(lengths_PG, 1))


def token_mean_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """1 / sum_j |y_j|: the mean over all tokens (DAPO, arXiv 2503.14476, equation 8)."""
    return np.full(lengths_PG.shape, 1.0 / lengths_PG.sum())


def length_weighted_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """1 / N: (1/N) sum_i |y_i| s_i A_i written per token (LUSPO, arXiv 2602.05261).

    Nothing divides by a token count, so the gradient grows with length; the paper has it so.
    """
    return np.full(lengths_PG.shape, 1.0 / lengths_PG.size)


def constant_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """1 / (N L_max): no response's length in any denominator (Dr.GRPO, arXiv 2503.20783)."""
    return np.full(lengths_PG.shape, 1.0 / (lengths_PG.size * max_tokens))


def balanced_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Token means inside each sign subset of each group, weighted by subset size (BA, arXiv 2605.04077).

    (1/P) sum_groups sum_{S in S+, S-} (|S|/G) [sum_{i in S} sum_t l_it / sum_{i in S} |y_i|], so a
    token of response i in S weighs 1 / (P G meanlen(S)). A response with A = 0 is in neither
    subset and weighs nothing, G stays the denominator, an empty subset adds nothing (ours).
    """
    weights_PG = np.zeros(lengths_PG.shape)
    for sign in (1.0, -1.0):
        member_PG = np.sign(advantages_PG) == sign
        tokens_P1 = (lengths_PG * member_PG).sum(axis=1, keepdims=True)
        size_P1 = member_PG.sum(axis=1, keepdims=True)
        weights_PG += member_PG * size_P1 / (lengths_PG.size * np.maximum(tokens_P1, 1))
    return weights_PG


AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "sequence": sequence_weights,
    "token": token_mean_weights,
    "length_weighted": length_weighted_weights,
    "constant": constant_weights,
    "balanced": balanced_weights,
}


def token_weights(name: str, lengths_PG: np.ndarray, advantages_PG: np.ndarray, *, max_tokens: int) -> np.ndarray:
    """Weight [P, G] of every token of each response, for one optimizer step over all ranks, float64.

    ``lengths_PG`` and ``advantages_PG`` cover the whole mini-batch. Degenerate groups count in P and
    N; groups that dynamic sampling dropped are not there. A response of no tokens weighs 0.
    """
    assert lengths_PG.shape == advantages_PG.shape and lengths_PG.ndim == 2, (
        lengths_PG.shape,
        advantages_PG.shape,
    )
    if lengths_PG.sum() == 0:
        return np.zeros(lengths_PG.shape)
    weights_PG = AGGREGATIONS[name](lengths_PG, advantages_PG, max_tokens)
    return np.where(lengths_PG > 0, weights_PG, 0.0)


# --- the correction for the sampler's engine --------------------------------------------------


def correction_weights(
    old_logp_K: Tensor,
    sampler_logp_K: Tensor,
    response_K: Tensor,
    lengths_n: Tensor,
    *,
    ratio: str,
    cap: float,
) -> Tensor:
    """min(exp(lp_old - lp_beh), cap), detached: truncated importance sampling for engine noise.

    lp_beh is the log-prob the sampler's engine reported. For `sequence` ratios the exponent is its
    length-normalised mean over the response, as the ratio's own is.
    """
    gap_K = (old_logp_K - sampler_logp_K).detach()
    if ratio == "sequence":
        gap_K = _mean_by_response(gap_K, response_K, lengths_n)[response_K]
    return torch.exp(gap_K).clamp(max=cap)


# --- KL to a reference ------------------------------------------------------------------------


def kl_estimate(logp_K: Tensor, reference_logp_K: Tensor) -> Tensor:
    """k3 = exp(lp_ref - lp) - (lp_ref - lp) - 1 per token: unbiased for KL(policy || reference), never negative.

    GRPO, arXiv 2402.03300, equation 4. Its value is that of the divergence; its gradient, taken through
    lp alone as GRPO takes it, is (1 - exp(lp_ref - lp)) grad lp.
    """
    gap_K = reference_logp_K - logp_K
    return torch.exp(gap_K) - gap_K - 1


# --- the loss ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What the loss needs of one micro-batch besides the current log-probs."""

    old_logp_K: Tensor | None  # None: one mini-batch per rollout batch, so they are logp_K.detach()
    sampler_logp_K: Tensor | None  # None: no correction
    response_K: Tensor  # int64, which response each token belongs to
    lengths_n: Tensor  # int64
    advantages_n: Tensor
    weights_n: Tensor  # weight of each token of the response
    mean_weight: Tensor | float = 0.0  # 1 / tokens of the optimizer step: weight of a token in KL and H
    reference_logp_K: Tensor | None = None  # the frozen reference's, where there is a KL term


def policy_loss(
    logp_K: Tensor,
    entropy_K: Tensor,
    inputs: LossInputs,
    *,
    ratio: str,
    surrogate: str,
    clip_low: float,
    clip_high: float,
    cap: float,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum of this micro-batch, and sums over its tokens for the metrics.

    Summed over all micro-batches of all ranks this is the loss of the optimizer step; nothing is
    left to divide by. The sums, detached: tokens; clipped_low (A < 0 and w < 1 - low); clipped_high
    (A > 0 and w > 1 + high); gap, |lp_old - lp_sampler|, where there is a sampler; kl, where there is
    a reference; policy_loss, the first term alone.

    KL and entropy weigh every token alike, whatever the aggregation (ours): ``balanced`` would leave out
    the tokens of A = 0, ``length_weighted`` would let them grow with length.
    """
    old_logp_K = logp_K.detach() if inputs.old_logp_K is None else inputs.old_logp_K
    ratio_K = RATIOS[ratio](logp_K, old_logp_K, inputs.response_K, inputs.lengths_n)
    advantage_K = inputs.advantages_n[inputs.response_K].to(logp_K.dtype)
    weight_K = inputs.weights_n[inputs.response_K].to(logp_K.dtype)
    if inputs.sampler_logp_K is not None:
        weight_K = weight_K * correction_weights(
            old_logp_K, inputs.sampler_logp_K, inputs.response_K, inputs.lengths_n, ratio=ratio, cap=cap
        )
    terms_K = SURROGATES[surrogate](ratio_K, advantage_K, logp_K, clip_low, clip_high)
    loss = (weight_K * terms_K).sum()
    value_K = ratio_K.detach()
    sums = {
        "tokens": torch.tensor(len(logp_K), device=logp_K.device),
        "policy_loss": loss.detach(),
        "clipped_low": ((advantage_K < 0) & (value_K < 1 - clip_low)).sum(),
        "clipped_high": ((advantage_K > 0) & (value_K > 1 + clip_high)).sum(),
    }
    if inputs.sampler_logp_K is not None:
        sums["gap"] = (old_logp_K - inputs.sampler_logp_K).abs().sum()
    if inputs.reference_logp_K is not None:
        kl_K = kl_estimate(logp_K, inputs.reference_logp_K)
        sums["kl"] = kl_K.detach().sum()
        loss = loss + kl_coef * inputs.mean_weight * kl_K.sum()
    if entropy_coef:
        loss = loss - entropy_coef * inputs.mean_weight * entropy_K.sum()
    return loss, sums


def supervised_loss(logp_K: Tensor, entropy_K: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the weighted log-likelihood: the warm start's loss."""
    weight_K = inputs.weights_n[inputs.response_K].to(logp_K.dtype)
    return -(weight_K * logp_K).sum(), {"tokens": torch.tensor(len(logp_K), device=logp_K.device)}
