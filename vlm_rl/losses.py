"""The policy loss as five independent factors: advantage x ratio x surrogate x aggregation x credit.

The loss of one optimizer step is one weighted sum over all response tokens of its mini-batch,

    loss = sum_i sum_t  weight_i * credit_it * c_it * l(w_it, A_i)  +  kl_coef * KL  -  entropy_coef * H

with w the importance ratio, l the surrogate, c the detached correction for the sampler's engine noise, and one weight
per response, the same for each of its tokens, that is fixed before anything is split (``token_weights``). The credit
of a token is 1, or that of ``vlm_rl.credit``, fixed before the split too. KL to a frozen reference and entropy H are
token means, off by default. A micro-batch therefore returns a plain sum, and gradients cannot depend on
micro-batches, packing, accumulation or the number of ranks.

Everything here is a pure function of tensors. K counts the response tokens of one micro-batch, end to end;
``response_K`` holds the response, 0 .. n - 1, that each of them belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vlm_rl.types import NUM_TENTHS, LossInputs

# --- importance ratio -------------------------------------------------------------------------


def token_ratio(logp_K: Tensor, old_logp_K: Tensor, response_K: Tensor, lengths_n: Tensor) -> Tensor:
    """Return w_it = exp(lp_it - lp_old_it) [K] (GRPO, arXiv 2402.03300, equation 3).

    Args:
        logp_K: current log-probs.
        old_logp_K: those at the weights that sampled the responses.
        response_K: the response that each token belongs to; not used by this ratio.
        lengths_n: tokens of each response; not used by this ratio.
    """
    return torch.exp(logp_K - old_logp_K)


def sequence_ratio(logp_K: Tensor, old_logp_K: Tensor, response_K: Tensor, lengths_n: Tensor) -> Tensor:
    """Return s_i = exp((1/|y_i|) sum_t (lp_it - lp_old_it)), written per token [K] (GSPO, arXiv 2507.18071, eq. 7).

    The per-token form s_it = sg(s_i) * exp(lp_it - sg(lp_it)) (GSPO-token, equation 14) has the value s_i on
    every token. Summed over a response with any weight that is constant in t, its gradient is |y_i| times that
    weight times grad s_i: the gradient of a single term s_i per response. The arguments are those of token_ratio.
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


def clip(
    ratio_K: Tensor, advantage_K: Tensor, logp_K: Tensor, low: float, high: float, *, dual: float | None = None
) -> Tensor:
    """Return l = -min(w A, clip(w, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7; DAPO's two bounds).

    With `dual`, l = -max(min(w A, clip(w) A), dual A) where A < 0 (dual-clip PPO, arXiv 1912.09729).
    Without it w A has no bound there as w grows.

    Args:
        ratio_K: the importance ratio w.
        advantage_K: A of each token's response.
        logp_K: current log-probs; not used by this surrogate.
        low: distance of the lower bound from 1.
        high: distance of the upper bound from 1.
        dual: the largest ratio where A < 0, above 1 + high; None for no bound.
    """
    clipped_K = ratio_K.clamp(1 - low, 1 + high)
    if dual is not None:
        ratio_K = torch.where(advantage_K < 0, ratio_K.clamp(max=dual), ratio_K)
    return -torch.minimum(ratio_K * advantage_K, clipped_K * advantage_K)


def cispo(ratio_K: Tensor, advantage_K: Tensor, logp_K: Tensor, low: float, high: float) -> Tensor:
    """Return l = -sg(clip(w, 1 - low, 1 + high)) A lp (CISPO, arXiv 2506.13585, equation 4).

    low = 1 is not a lower bound, since w > 0. A clipped token keeps a (bounded) gradient. The arguments are those of
    clip.
    """
    return -ratio_K.detach().clamp(1 - low, 1 + high) * advantage_K * logp_K


def sapo(
    ratio_K: Tensor,
    advantage_K: Tensor,
    logp_K: Tensor,
    low: float,
    high: float,
    *,
    temperatures: tuple[float, float] = (1.0, 1.05),
) -> Tensor:
    """Return l = -A (4 / t) sigmoid(t (w - 1)), with t by the sign of A (SAPO, arXiv 2511.20347).

    At w = 1 its gradient is that of -w A. It fades on both sides, sooner where t is larger, and is never cut off.

    Args:
        ratio_K: the importance ratio w.
        advantage_K: A of each token's response.
        logp_K: current log-probs; not used by this surrogate.
        low: not used by this surrogate.
        high: not used by this surrogate.
        temperatures: t where A > 0, and t elsewhere.
    """
    positive, other = (ratio_K.new_full((), t) for t in temperatures)
    t_K = torch.where(advantage_K > 0, positive, other)
    return -advantage_K * (4 / t_K) * torch.sigmoid(t_K * (ratio_K - 1))


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
}

# --- aggregation ------------------------------------------------------------------------------


def sequence_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return 1 / (N |y_i|): the mean over responses of their token means (GRPO, equation 3)."""
    return 1.0 / (lengths_PG.size * np.maximum(lengths_PG, 1))


def token_mean_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return 1 / sum_j |y_j|: the mean over all tokens of the mini-batch, as trainers compute DAPO's equation 8."""
    return np.full(lengths_PG.shape, 1.0 / lengths_PG.sum())


def group_token_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return 1 / (P sum_{j in group} |y_j|): token means of the groups, averaged (DAPO, 2503.14476, eq. 8).

    The equation is an expectation over prompts, with the mean inside. In `token` a group of long responses weighs
    more than one of short responses; here all groups weigh the same. It is what BA calls token aggregation.
    """
    tokens_P1 = lengths_PG.sum(axis=1, keepdims=True)
    return np.broadcast_to(1.0 / (len(lengths_PG) * np.maximum(tokens_P1, 1)), lengths_PG.shape)


def length_weighted_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return 1 / N: (1/N) sum_i |y_i| s_i A_i written per token (LUSPO, arXiv 2602.05261).

    Each token weighs 1/N, so a response weighs in proportion to its length.
    """
    return np.full(lengths_PG.shape, 1.0 / lengths_PG.size)


def constant_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return 1 / (N L_max): no response's length in any denominator (Dr.GRPO, arXiv 2503.20783)."""
    return np.full(lengths_PG.shape, 1.0 / (lengths_PG.size * max_tokens))


def variance_weights(
    lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int, *, exponent: float = 0.75
) -> np.ndarray:
    """Return |y_i|^-a / (L_max sum_j |y_j|^-a): little weight for terms of high variance (VL Norm, 2509.07558).

    The variance of a response's gradient grows with its length; these weights keep the mean and lower the variance.
    a = 0 is `constant`; a = 1 is `sequence` times N / (L_max sum_j 1/|y_j|), one factor for the whole mini-batch. The
    sum goes over the N responses of the mini-batch; one of no tokens counts as the average of the others (ours).
    """
    there_PG = lengths_PG > 0
    powers_PG = np.maximum(lengths_PG, 1.0) ** -exponent
    return powers_PG / (max_tokens * lengths_PG.size * powers_PG[there_PG].mean())


def balanced_weights(lengths_PG: np.ndarray, advantages_PG: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the weights of token means inside each sign subset of a group, by subset size (BA, arXiv 2605.04077).

    The loss is (1/P) sum_groups sum_{S in S+, S-} (|S|/G) [sum_{i in S} sum_t l_it / sum_{i in S} |y_i|], so a
    token of response i in S weighs 1 / (P G meanlen(S)). Ours, since the paper does not say: a response with
    A = 0 is in neither subset and weighs nothing, G stays the denominator, and an empty subset adds nothing. If
    tokens have a credit, lengths are sums of credits: the means are weighted, and S keeps its mass |S|/G.
    """
    weights_PG = np.zeros(lengths_PG.shape)
    for sign in (1.0, -1.0):
        member_PG = np.sign(advantages_PG) == sign
        tokens_P1 = (lengths_PG * member_PG).sum(axis=1, keepdims=True)
        size_P1 = member_PG.sum(axis=1, keepdims=True)
        weights_PG += member_PG * size_P1 / (lengths_PG.size * np.where(tokens_P1 > 0, tokens_P1, 1))
    return weights_PG


AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "sequence": sequence_weights,
    "token": token_mean_weights,
    "group_token": group_token_weights,
    "length_weighted": length_weighted_weights,
    "constant": constant_weights,
    "variance": variance_weights,
    "balanced": balanced_weights,
}


def token_weights(
    name: str, lengths_PG: np.ndarray, advantages_PG: np.ndarray, *, max_tokens: int, exponent: float = 0.75
) -> np.ndarray:
    """Return the weight [P, G] of every token of each response, for one optimizer step over all ranks, float64.

    Groups whose rewards are all equal count in P and N; groups that dynamic sampling dropped are not in the
    mini-batch. A response of no tokens weighs 0.

    Args:
        name: a key of AGGREGATIONS.
        lengths_PG: response lengths of the whole mini-batch, in tokens.
        advantages_PG: their advantages.
        max_tokens: L_max, the longest response allowed.
        exponent: of the lengths; only `variance` uses it.
    """
    assert lengths_PG.shape == advantages_PG.shape and lengths_PG.ndim == 2, (
        lengths_PG.shape,
        advantages_PG.shape,
    )
    if lengths_PG.sum() == 0:
        return np.zeros(lengths_PG.shape)
    weigh = partial(variance_weights, exponent=exponent) if name == "variance" else AGGREGATIONS[name]
    weights_PG = weigh(lengths_PG, advantages_PG, max_tokens)
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
    """Return min(exp(lp_old - lp_sampler), cap) [K], detached: truncated importance sampling for engine noise.

    lp_sampler is the log-prob that the sampler's engine reported. For `sequence` ratios the exponent is its
    mean over the response, as in the ratio itself.

    Args:
        old_logp_K: the learner's log-probs at the weights that sampled the responses.
        sampler_logp_K: the sampler's.
        response_K: the response that each token belongs to.
        lengths_n: tokens of each response.
        ratio: a key of RATIOS.
        cap: the largest weight.
    """
    gap_K = (old_logp_K - sampler_logp_K).detach()
    if ratio == "sequence":
        gap_K = _mean_by_response(gap_K, response_K, lengths_n)[response_K]
    return torch.exp(gap_K).clamp(max=cap)


def kept_tokens(
    old_logp_K: Tensor,
    sampler_logp_K: Tensor,
    response_K: Tensor,
    lengths_n: Tensor,
    *,
    level: str,
    bounds: tuple[float, float],
) -> Tensor:
    """Return which tokens [K] train: those whose learner / sampler ratio is within the bounds, both included.

    The ratio is exp(lp_old - lp_sampler) of each token, or of the whole response the exponential of the sum of these
    gaps (`sequence`) or of their mean (`geometric`): verl's token_k1, seq_sum_k1 and seq_mean_k1.

    Args:
        old_logp_K: the learner's log-probs at the weights that sampled the responses.
        sampler_logp_K: the sampler's.
        response_K: the response that each token belongs to.
        lengths_n: tokens of each response.
        level: token, sequence or geometric.
        bounds: the smallest and the largest ratio that train.
    """
    gap_K = (old_logp_K - sampler_logp_K).detach()
    if level != "token":
        mean_n = _mean_by_response(gap_K, response_K, lengths_n)
        gap_K = (mean_n * lengths_n if level == "sequence" else mean_n)[response_K]
    ratio_K = torch.exp(gap_K)
    return (ratio_K >= bounds[0]) & (ratio_K <= bounds[1])


# --- KL to a reference ------------------------------------------------------------------------


def kl_estimate(logp_K: Tensor, reference_logp_K: Tensor) -> Tensor:
    """Return k3 = exp(lp_ref - lp) - (lp_ref - lp) - 1 per token [K] (GRPO, arXiv 2402.03300, equation 4).

    It is an unbiased estimate of KL(policy || reference) and never negative. Its gradient, taken through lp
    only as GRPO does, is (1 - exp(lp_ref - lp)) grad lp.
    """
    gap_K = reference_logp_K - logp_K
    return torch.exp(gap_K) - gap_K - 1


def divergence(logp_K: Tensor, other_logp_K: Tensor) -> Tensor:
    """Return k3 of KL(policy || other) per token [K], with a gradient that is the divergence's on average.

    The gradient is (lp - lp_other) grad lp, that of k2 = (lp - lp_other)^2 / 2. Averaged over tokens that the policy
    samples it is grad KL(policy || other), while that of `kl_estimate` is grad KL(other || policy).
    """
    gap_K = (other_logp_K - logp_K).detach()
    return torch.exp(gap_K) - gap_K - 1 - gap_K * (logp_K - logp_K.detach())


# --- distillation -----------------------------------------------------------------------------

SMALLEST_TAIL = 1e-6  # float32 cannot tell a smaller rest of a sum of probabilities from 0


def top_divergence(top_logp_Kk: Tensor, teacher_top_Kk: Tensor) -> Tensor:
    """Return KL(policy || teacher) per token [K], over k ids and one bucket for all others.

        D = sum_{v of the k} p_v log(p_v / q_v) + p_rest log(p_rest / q_rest),   rest = 1 - sum of the k

    Distributions over fewer outcomes diverge less, so 0 <= D <= the KL over the whole vocabulary. Without the bucket
    D would fall as the policy leaves the k ids. A rest below SMALLEST_TAIL counts as SMALLEST_TAIL, and an id that
    the policy never samples (a banned one, of a teacher that knows no bans) as p_v = 0.

    Args:
        top_logp_Kk: the policy's log-probs of the k ids, with gradient.
        teacher_top_Kk: the teacher's.
    """
    p_Kk = top_logp_Kk.exp()
    rest_K = (1 - p_Kk.sum(-1)).clamp(min=SMALLEST_TAIL)
    teacher_rest_K = (1 - teacher_top_Kk.exp().sum(-1)).clamp(min=SMALLEST_TAIL)
    gap_Kk = (top_logp_Kk - teacher_top_Kk).masked_fill(top_logp_Kk.isneginf(), 0.0)
    return (p_Kk * gap_Kk).sum(-1) + rest_K * (rest_K / teacher_rest_K).log()


# --- the loss ---------------------------------------------------------------------------------


def policy_loss(
    logp_K: Tensor,
    entropy_K: Tensor,
    inputs: LossInputs,
    top_logp_Kk: Tensor | None = None,
    *,
    ratio: str,
    surrogate: str,
    clip_low: float,
    clip_high: float,
    cap: float,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    clip_dual: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    perception_coef: float = 0.0,
    rejection: str | None = None,
    rejection_bounds: tuple[float, float] = (0.0, 3.0),
    distillation_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch, a weighted sum, and sums over its tokens for the metrics.

    Added up over all micro-batches of all ranks this is the loss of the optimizer step; nothing is left to
    divide by. The sums, detached, are:

        tokens         response tokens
        policy_loss    the first term of the loss
        clipped_low    tokens with A < 0 and w < 1 - clip_low
        clipped_high   tokens with A > 0 and w > 1 + clip_high
        clipped_dual   tokens with A < 0 and w > clip_dual, if it is set
        by_length      [4, 10], if tenths by length are given: of each tenth the tokens with A < 0, those of them
                       with w < 1 - clip_low, the tokens with A > 0, those of them with w > 1 + clip_high
        gap            |lp_old - lp_sampler| of fresh tokens, given the sampler's log-probs; if these are lp_old,
                       |lp - lp_sampler|
        fresh_tokens   how many these are, if not all tokens are measured
        rejected       tokens that do not train because learner and sampler differ too much, with `rejection`
        kl             the KL estimate, with a reference
        perception     k3 between with and without the image, over tokens of prompts with images, with blind log-probs
        seeing_tokens  how many these are
        teacher_kl     the estimate of KL(policy || teacher), with a teacher
        teacher_mass   the policy's probability of the teacher's k most likely ids, if the loss is over them

    A teacher's log-probs go into the advantage, A_it = A_i + distillation_coef (lp_teacher - lp_old). With its k most
    likely ids A_it stays A_i, and the loss has the term distillation_coef D instead (`top_divergence`).

    D, KL and entropy weigh every token alike, whatever the aggregation (ours): ``balanced`` would leave out the
    tokens of A = 0, and ``length_weighted`` would let them grow with length.

    Args:
        logp_K: current log-probs, with gradient.
        entropy_K: current entropies.
        inputs: the rest that the loss needs of the micro-batch.
        top_logp_Kk: current log-probs of the ids inputs.teacher_ids_Kk, with gradient; None if there are none.
        ratio: a key of RATIOS.
        surrogate: a key of SURROGATES.
        clip_low: distance of the ratio's lower bound from 1.
        clip_high: distance of its upper bound from 1.
        cap: the largest correction weight.
        kl_coef: weight of the KL term.
        entropy_coef: weight of the entropy bonus.
        clip_dual: the largest ratio where A < 0; only `clip` uses it.
        sapo_temperatures: t where A > 0 and t elsewhere; only `sapo` uses them.
        rejection: token, sequence or geometric: the ratio of learner and sampler by which tokens are left out; None
            for none.
        rejection_bounds: the smallest and the largest such ratio that trains.
        perception_coef: weight of the divergence from the policy without the image, which the loss rewards.
        distillation_coef: weight of the divergence from the teacher.
    """
    old_logp_K = logp_K.detach() if inputs.old_logp_K is None else inputs.old_logp_K
    ratio_K = RATIOS[ratio](logp_K, old_logp_K, inputs.response_K, inputs.lengths_n)
    advantage_K = inputs.advantages_n[inputs.response_K].to(logp_K.dtype)
    if inputs.teacher_logp_K is not None and top_logp_Kk is None:
        advantage_K = advantage_K + distillation_coef * (inputs.teacher_logp_K - old_logp_K)
    weight_K = inputs.weights_n[inputs.response_K].to(logp_K.dtype)
    if inputs.credit_K is not None:
        weight_K = weight_K * inputs.credit_K.to(logp_K.dtype)
    if inputs.sampler_logp_K is not None:
        weight_K = weight_K * correction_weights(
            old_logp_K, inputs.sampler_logp_K, inputs.response_K, inputs.lengths_n, ratio=ratio, cap=cap
        )
    kept_K = None
    if rejection is not None and inputs.sampler_logp_K is not None:
        layout = inputs.response_K, inputs.lengths_n
        kept_K = kept_tokens(old_logp_K, inputs.sampler_logp_K, *layout, level=rejection, bounds=rejection_bounds)
        weight_K = weight_K * kept_K
    options = {"clip": {"dual": clip_dual}, "sapo": {"temperatures": sapo_temperatures}}.get(surrogate, {})
    terms_K = partial(SURROGATES[surrogate], **options)(ratio_K, advantage_K, logp_K, clip_low, clip_high)
    loss = (weight_K * terms_K).sum()
    value_K = ratio_K.detach()
    negative_K, positive_K = advantage_K < 0, advantage_K > 0
    low_K, high_K = negative_K & (value_K < 1 - clip_low), positive_K & (value_K > 1 + clip_high)
    sums = {
        "tokens": torch.full((), len(logp_K), device=logp_K.device),  # not torch.tensor: the host would wait
        "policy_loss": loss.detach(),
        "clipped_low": low_K.sum(),
        "clipped_high": high_K.sum(),
    }
    if inputs.tenth_n is not None:
        counted_4K = torch.stack([negative_K, low_K, positive_K, high_K]).long()
        empty = torch.zeros(4, NUM_TENTHS, dtype=torch.int64, device=logp_K.device)
        sums["by_length"] = empty.index_add(1, inputs.tenth_n[inputs.response_K], counted_4K)
    if kept_K is not None:
        sums["rejected"] = (~kept_K).sum()
    if clip_dual is not None:
        sums["clipped_dual"] = (negative_K & (value_K > clip_dual)).sum()
    if inputs.sampler_logp_K is not None:
        measured_K = logp_K.detach() if inputs.old_is_sampler else old_logp_K
        gap_K = (measured_K - inputs.sampler_logp_K).abs()
        if inputs.fresh_K is not None:
            gap_K = gap_K[inputs.fresh_K]
            sums["fresh_tokens"] = inputs.fresh_K.sum()
        sums["gap"] = gap_K.sum()
    if inputs.reference_logp_K is not None:
        kl_K = kl_estimate(logp_K, inputs.reference_logp_K)
        sums["kl"] = kl_K.detach().sum()
        loss = loss + kl_coef * inputs.mean_weight * kl_K.sum()
    if inputs.blind_logp_K is not None:
        seeing_K = ~torch.isnan(inputs.blind_logp_K)
        divergence_K = divergence(logp_K[seeing_K], inputs.blind_logp_K[seeing_K])
        sums["perception"], sums["seeing_tokens"] = divergence_K.detach().sum(), seeing_K.sum()
        loss = loss - perception_coef * inputs.mean_weight * divergence_K.sum()
    if top_logp_Kk is not None:
        assert inputs.teacher_top_Kk is not None
        teacher_kl_K = top_divergence(top_logp_Kk, inputs.teacher_top_Kk)
        sums["teacher_kl"], sums["teacher_mass"] = teacher_kl_K.detach().sum(), top_logp_Kk.detach().exp().sum()
        loss = loss + distillation_coef * inputs.mean_weight * teacher_kl_K.sum()
    elif inputs.teacher_logp_K is not None:
        sums["teacher_kl"] = (old_logp_K - inputs.teacher_logp_K).sum()
    if entropy_coef:
        loss = loss - entropy_coef * inputs.mean_weight * entropy_K.sum()
    return loss, sums


def supervised_loss(logp_K: Tensor, entropy_K: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return minus the weighted log-likelihood, the warm start's loss, and its number of tokens for the metrics."""
    weight_K = inputs.weights_n[inputs.response_K].to(logp_K.dtype)
    return -(weight_K * logp_K).sum(), {"tokens": torch.full((), len(logp_K), device=logp_K.device)}
