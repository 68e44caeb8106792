"""The output head: log-probs and entropies of response tokens from hidden states, holding few logits at once.

The learner must describe the distribution that the sampler samples from, so the banned ids and the temperature
apply here too: log_softmax((logits with banned ids at -inf) / temperature).

Hidden states pass through the head in chunks, and again in the backward pass, so that the memory of logits does not
grow with the row. A chunk is as large as LOGIT_BYTES allow: the fewer copies of its logits there are at a time, the
fewer chunks, each of which reads the weight and adds to its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vlm_rl.devices import has_gpu
from vlm_rl.errors import UserError

LOGIT_BYTES = 2**30  # of a chunk's logits with all their copies


def chunk_rows(vocabulary: int, dtype: torch.dtype, *, fused: bool = False, soft_cap: bool = False) -> int:
    """Return how many tokens pass through the head at a time, 1 at least.

    Args:
        vocabulary: logits of a token.
        dtype: of the weight.
        fused: whether kernels of ours compute in place (model.fused_head).
        soft_cap: whether the logits have a soft cap.
    """
    return max(1, LOGIT_BYTES // (vocabulary * bytes_per_logit(dtype, fused=fused, soft_cap=soft_cap)))


def bytes_per_logit(dtype: torch.dtype, *, fused: bool = False, soft_cap: bool = False) -> int:
    """Return the bytes that a logit takes at most, with its copies; the arguments are those of chunk_rows.

    Two float32 copies, input and output of a softmax; a third for the slope of a soft cap. Fused, the logit itself.
    """
    return dtype.itemsize if fused else 4 * (3 if soft_cap else 2)


class Head(nn.Module):
    """The model's output head, from hidden states to log-probs and entropies, as one module.

    Under ZeRO 3 a module's weight is gathered at every call, on all ranks together. Rows of different lengths
    have different numbers of chunks, so the chunks are inside the call.
    """

    def __init__(
        self,
        head: nn.Module | None,
        *,
        banned_ids: Sequence[int],
        temperature: float,
        soft_cap: float | None = None,
        fused: bool = False,
    ) -> None:
        """Share the weight of the model's own head.

        Args:
            head: the model's.
            banned_ids: ids at log-prob -inf.
            temperature: divides the logits.
            soft_cap: logits are soft_cap tanh(logits / soft_cap), as in Gemma 2; None leaves them unchanged.
            fused: model.fused_head.

        Raises UserError for a head that is more than a matrix, and if there are no fused kernels for it.
        """
        super().__init__()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise UserError(
                "the learner supports only output heads that are a matrix without a bias: use a different model"
            )
        if fused:
            _check_fused(soft_cap)
        self.weight = head.weight
        self.temperature, self.soft_cap, self.fused = temperature, soft_cap, fused
        self.banned: Tensor
        banned = torch.tensor(sorted(banned_ids), dtype=torch.int64, device=self.weight.device)
        self.register_buffer("banned", banned, persistent=False)

    def forward(
        self,
        hidden_KH: Tensor,
        target_K: Tensor,
        *,
        with_entropy: bool = True,
        ids_Kk: Tensor | None = None,
        top_k: int = 0,
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs [K] and entropies [K] of the targets, float32; None for entropies that are not wanted.

        Args:
            hidden_KH: the last layer's outputs.
            target_K: ids.
            with_entropy: whether entropies are wanted.
            ids_Kk: further ids, whose log-probs [K, k] are returned as well, differentiable.
            top_k: how many of the most likely ids [K, k] and their log-probs [K, k] are returned as well, without
                gradient.
        """
        assert not self.fused or (ids_Kk is None and not top_k), "the configuration refuses it"
        rows = chunk_rows(len(self.weight), self.weight.dtype, fused=self.fused, soft_cap=self.soft_cap is not None)
        way = _Way(self.temperature, self.soft_cap, rows, self.fused, with_entropy)
        scores = _ChunkedScore.apply(hidden_KH, self.weight, target_K, self.banned, ids_Kk, way)
        if ids_Kk is not None:
            return scores
        return (*scores[:2], *self._top(hidden_KH, top_k, way)) if top_k else scores[:2]

    @torch.no_grad()
    def _top(self, hidden_KH: Tensor, k: int, way: _Way) -> tuple[Tensor, Tensor]:
        """Return the k most likely ids [K, k], and their log-probs."""
        ids, logps = [], []
        for hidden_CH in hidden_KH.split(way.rows):
            logp_CV = torch.log_softmax(_scaled_logits(hidden_CH, self.weight, self.banned, way), dim=-1)
            logp_Ck, ids_Ck = logp_CV.topk(k)
            ids.append(ids_Ck)
            logps.append(logp_Ck)
        return torch.cat(ids), torch.cat(logps)


def _check_fused(soft_cap: float | None) -> None:
    """Raise UserError if the fused kernels cannot compute the head."""
    if soft_cap is not None:
        raise UserError("model.fused_head: this model caps its logits, which the kernels do not; leave it false")
    try:
        from vlm_rl.learner import head_kernels
    except ImportError as error:
        raise UserError(f"model.fused_head needs Triton, which is not installed ({error}); leave it false") from None
    if not has_gpu() and not head_kernels.IS_INTERPRETED:
        raise UserError("model.fused_head needs a GPU, and there is none here; leave it false")


@dataclass(frozen=True, slots=True)
class _Way:
    """How chunks are computed."""

    temperature: float
    soft_cap: float | None
    rows: int  # of a chunk
    fused: bool
    with_entropy: bool


class _ChunkedScore(torch.autograd.Function):
    """Compute log-probs and entropies of targets, holding the logits of one chunk.

    The backward pass computes the logits again. With p the softmax, g the gradient of a log-prob and e that of
    an entropy H, the gradient of the logits is (g (onehot(target) - p) - e p (log p + H)) / temperature; a further id
    is one more target. The weight gets its gradient once, whole: DeepSpeed reduces a parameter's gradient as soon as
    it arrives, and expects it to arrive once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        target_K: Tensor,
        banned: Tensor,
        ids_Kk: Tensor | None,
        way: _Way,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)  # entropies without a gradient get None, which costs nothing
        starts = range(0, max(1, len(target_K)), way.rows)
        slices = [slice(start, start + way.rows) for start in starts]
        extra = [None if ids_Kk is None else ids_Kk[part] for part in slices]
        parts = zip(
            *(
                _score(hidden_KH[part], weight_VH, target_K[part], ids_Ck, banned, way)
                for part, ids_Ck in zip(slices, extra, strict=True)
            ),
            strict=True,
        )
        logp_K, entropy_K, top_Kk, lse_K = (None if part[0] is None else torch.cat(part) for part in parts)
        ctx.way = way
        ctx.save_for_backward(hidden_KH, weight_VH, target_K, banned, entropy_K, lse_K, ids_Kk)
        assert logp_K is not None
        return logp_K, entropy_K, top_Kk

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_KH, weight_VH, target_K, banned, entropy_K, lse_K, ids_Kk = ctx.saved_tensors
        way: _Way = ctx.way
        grad_hidden_KH, grad_weight_VH = torch.empty_like(hidden_KH), None
        for start in range(0, max(1, len(target_K)), way.rows):
            part = slice(start, start + way.rows)
            hidden_CH, target_C = hidden_KH[part], target_K[part]
            rest = (None if x is None else x[part] for x in (*gradients, ids_Kk, entropy_K, lse_K))
            grad_CV = _gradient(hidden_CH, weight_VH, target_C, banned, *rest, way=way)
            grad_hidden_KH[part] = grad_CV @ weight_VH
            if ctx.needs_input_grad[1]:
                grad_weight_VH = _add_product(grad_weight_VH, grad_CV.T, hidden_CH, fused=way.fused)
            del grad_CV  # before the next chunk's logits
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_KH, grad_weight, None, None, None, None


def _score(
    hidden_CH: Tensor, weight_VH: Tensor, target_C: Tensor, ids_Ck: Tensor | None, banned: Tensor, way: _Way
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return a chunk's log-probs, entropies and log-probs of further ids where they are wanted.

    For the fused way the log-sum-exps follow.
    """
    if way.fused:
        from vlm_rl.learner.head_kernels import score_logits

        logp_C, entropy_C, lse_C = score_logits(_masked(hidden_CH, weight_VH, banned), target_C, way.temperature)
        return logp_C, entropy_C if way.with_entropy else None, None, lse_C
    logp_CV = torch.log_softmax(_scaled_logits(hidden_CH, weight_VH, banned, way), dim=-1)
    logp_C = logp_CV.gather(1, target_C[:, None])[:, 0]
    top_Ck = None if ids_Ck is None else logp_CV.gather(1, ids_Ck)
    if not way.with_entropy:
        return logp_C, None, top_Ck, None
    p_CV = logp_CV.exp()
    logp_CV.index_fill_(1, banned, 0.0)  # where p is 0, and the product of 0 and -inf would be NaN
    return logp_C, -p_CV.mul_(logp_CV).sum(-1), top_Ck, None


def _gradient(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    target_C: Tensor,
    banned: Tensor,
    grad_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    grad_top_Ck: Tensor | None,
    ids_Ck: Tensor | None,
    entropy_C: Tensor | None,
    lse_C: Tensor | None,
    *,
    way: _Way,
) -> Tensor:
    """Return the gradient of a chunk's logits [C, V], in the weight's dtype. Each pass over them counts."""
    grad_C = torch.zeros_like(target_C, dtype=torch.float32) if grad_C is None else grad_C
    if way.fused:
        from vlm_rl.learner.head_kernels import logit_gradient_

        logits_CV = _masked(hidden_CH, weight_VH, banned)
        logit_gradient_(logits_CV, target_C, lse_C, entropy_C, grad_C, grad_entropy_C, way.temperature)
        return logits_CV
    if grad_entropy_C is None and grad_top_Ck is None:
        p_CV = torch.softmax(_scaled_logits(hidden_CH, weight_VH, banned, way), dim=-1)
        p_CV.scatter_add_(1, target_C[:, None], p_CV.new_full((len(p_CV), 1), -1.0))
        factor_C1 = (-grad_C / way.temperature)[:, None]
    else:
        logp_CV = torch.log_softmax(_scaled_logits(hidden_CH, weight_VH, banned, way), dim=-1)
        p_CV = logp_CV.exp()
        constant_C1 = grad_C[:, None]  # the sum of the gradients of all log-probs
        if grad_top_Ck is not None:
            constant_C1 = constant_C1 + grad_top_Ck.sum(1, keepdim=True)
        if grad_entropy_C is None:
            p_CV.mul_(constant_C1)
        else:
            assert entropy_C is not None
            logp_CV.index_fill_(1, banned, 0.0)
            constant_C1 = constant_C1 + (grad_entropy_C * entropy_C)[:, None]
            torch.addcmul(constant_C1, logp_CV, grad_entropy_C[:, None], out=logp_CV)  # g + e (log p + H)
            p_CV.mul_(logp_CV)
        p_CV.scatter_add_(1, target_C[:, None], -grad_C[:, None])
        if grad_top_Ck is not None:
            assert ids_Ck is not None
            p_CV.scatter_add_(1, ids_Ck, -grad_top_Ck)
        del logp_CV
        factor_C1 = p_CV.new_full((1, 1), -1 / way.temperature)
    if way.soft_cap is not None:  # the slope of c tanh(x / c) is 1 - tanh^2
        p_CV.mul_(1 - linear(hidden_CH, weight_VH).float().div_(way.soft_cap).tanh_().square_())
    if p_CV.dtype == weight_VH.dtype:
        return p_CV.mul_(factor_C1)
    return torch.mul(p_CV, factor_C1, out=torch.empty_like(p_CV, dtype=weight_VH.dtype))


def _add_product(sum_VH: Tensor | None, a: Tensor, b: Tensor, *, fused: bool) -> Tensor:
    """Return sum + a b in float32 at least, in place; without a sum, the product."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == dtype:
        return a @ b if sum_VH is None else sum_VH.addmm_(a, b)
    if not fused:
        return (a @ b).to(dtype) if sum_VH is None else sum_VH.add_(a @ b)
    # A product of bfloat16 that is never rounded to it, which torch has only on CUDA.
    if sum_VH is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(sum_VH, a, b, out_dtype=dtype, out=sum_VH)


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, banned: Tensor, way: _Way) -> Tensor:
    """Return the logits over the temperature, float32, those of banned ids at -inf."""
    logits_CV = linear(hidden_CH, weight_VH)  # what follows is in place: nothing else reads them
    if way.soft_cap is not None:
        logits_CV.div_(way.soft_cap).tanh_().mul_(way.soft_cap)  # before the cast, as transformers and vLLM do
    if way.temperature == 1:
        logits_CV = logits_CV.float()
    elif logits_CV.dtype == torch.float32:
        logits_CV.div_(way.temperature)
    else:  # cast and divided in one pass
        logits_CV = logits_CV.div(logits_CV.new_full((1,), way.temperature, dtype=torch.float32)).float()
    return logits_CV.index_fill_(1, banned, float("-inf"))


def _masked(hidden_CH: Tensor, weight_VH: Tensor, banned: Tensor) -> Tensor:
    """Return the logits as the weight's product gives them, those of banned ids at -inf."""
    return linear(hidden_CH, weight_VH).index_fill_(1, banned, float("-inf"))
