"""Check, before a run begins, that the learner gives the log-probs of the unmodified model.

The reference knows nothing of packed rows, of our attention or of replaced layers: every response alone after its
prompt, through transformers' own attention, with the model's own positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlm_rl.data.prompts import rope_positions
from vlm_rl.data.vision.family import vision_of
from vlm_rl.errors import UserError
from vlm_rl.learner.deepspeed import gathered_where_used
from vlm_rl.learner.packing import Chunk, pack_row
from vlm_rl.learner.policy import Policy
from vlm_rl.model_files.model_folder import own_attention
from vlm_rl.types import Group, Problem, Prompt, Rollout

LENGTHS = (5, 9)  # tokens of the responses to each prompt
FLOAT32_LIMIT = 1e-3  # nats: largest difference of a token's log-prob
NOISE_FACTOR = 4.0  # bfloat16: how much more than the model's own noise the mean difference may be
ROUNDING = 2**-9  # of a log-prob: half of what rounding one logit of its size to bfloat16 may change


class SelfCheck:
    """The reference's log-probs of random responses to a few prompts, and the comparison with a policy's.

    Build it on the loaded model, before Policy changes it; then call `compare` with the policy.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Prompt], *, banned_ids: Sequence[int], temperature: float
    ) -> None:
        """Make the random responses and compute the reference's log-probs [R] of each.

        Args:
            model: as it was loaded.
            prompts: of the responses to sample.
            banned_ids: ids at log-prob -inf, which are never sampled.
            temperature: divides the logits.
        """
        rng = np.random.default_rng(0)
        allowed = np.setdiff1d(np.arange(model.config.get_text_config().vocab_size), np.array(banned_ids, dtype=int))
        self.prompts = prompts
        self.responses = [[rng.choice(allowed, size=n).astype(np.int32) for n in LENGTHS] for _ in prompts]
        reference = own_attention(model.config)
        score = partial(_unpacked, model, banned_ids=banned_ids, temperature=temperature)
        with torch.no_grad(), _evaluating(model), gathered_where_used(model):
            with _attention_of(model, reference):
                self.expected = self._each(score)
            self.noise, self.is_rounded = 0.0, model.dtype != torch.float32
            if self.is_rounded:  # two ways of transformers itself, whose difference is rounding
                if reference == "eager":
                    score = partial(score, behind=1)
                with _attention_of(model, "eager"):
                    self.noise = float((self.expected - self._each(score)).abs().mean())

    def compare(self, policy: Policy, *, path: object) -> float:
        """Return by how much the policy's packed row differs from the reference, in nats per token.

        Raises UserError if that is above `limit`.
        """
        groups = [_group(prompt, ids) for prompt, ids in zip(self.prompts, self.responses, strict=True)]
        row = pack_row(
            [Chunk(index, tuple(range(len(LENGTHS)))) for index in range(len(groups))],
            groups=groups,
            prompts=dict(enumerate(self.prompts)),
            weights_PG=np.zeros((len(groups), len(LENGTHS))),
            positions=partial(rope_positions, policy.model),
        )
        with torch.no_grad(), gathered_where_used(policy):
            logp_K, _ = policy(row.to(self.expected.device))
        difference_K = (logp_K - self.expected).abs()
        gap = float(difference_K.max() if policy.model.dtype == torch.float32 else difference_K.mean())
        if not gap <= (limit := self.limit):
            raise UserError(
                f"model.path {path}: the learner's log-probs differ from the unmodified model's by {gap:.3g} "
                f"per token, above {limit:.3g}: it computes this {policy.model.config.model_type} model wrongly. "
                "Try model.layer_patches=false; if the difference stays, the model is not supported"
            )
        return gap

    @property
    def limit(self) -> float:
        """Return the largest difference of log-probs that rounding explains, in nats per token.

        In bfloat16 two ways of computing a few tokens may agree by chance, and their noise then says too little. So
        the limit is never below what rounding of the logits explains.
        """
        if not self.is_rounded:
            return FLOAT32_LIMIT
        return max(FLOAT32_LIMIT, NOISE_FACTOR * self.noise, ROUNDING * float(self.expected.abs().mean()))

    def _each(self, score: Any) -> Tensor:
        pairs = zip(self.prompts, self.responses, strict=True)
        return torch.cat([score(prompt, ids) for prompt, responses in pairs for ids in responses])


def _unpacked(
    model: PreTrainedModel,
    prompt: Prompt,
    ids: np.ndarray,
    *,
    banned_ids: Sequence[int],
    temperature: float,
    behind: int = 0,
) -> Tensor:
    """Return the log-probs [R] of a response's tokens, the response alone after its prompt.

    Tokens `behind` it, which it does not see, change nothing but how the kernels round.
    """
    tokens = torch.from_numpy(np.concatenate([prompt.ids, ids, ids[:behind]]).astype(np.int64)).to(model.device)
    extra: dict[str, Any] = {key: tensor.to(model.device) for key, tensor in prompt.vision.items()}
    if (family := vision_of(model.config)) is not None:
        model.model.rope_deltas = None  # what an earlier call left behind
        extra = {**family.vision_inputs(extra), **family.token_types(model.config, tokens)}
    if prompt.videos:  # transformers gives their positions differently (rope_positions)
        positions = rope_positions(model, prompt)
        following = torch.arange(len(tokens) - positions.shape[1]) + positions.max() + 1
        extra["position_ids"] = torch.cat([positions, following.expand(3, -1)], 1)[:, None].to(model.device)
    output = model(input_ids=tokens[None], use_cache=False, logits_to_keep=len(ids) + 1 + behind, **extra)
    logits_RV = output.logits[0, : len(ids)].float() / temperature
    logits_RV[:, list(banned_ids)] = float("-inf")
    return logits_RV.log_softmax(-1).gather(1, tokens[len(prompt.ids) :][: len(ids), None])[:, 0]


def group_of(prompt: Prompt, rollouts: Sequence[Rollout]) -> Group:
    """Return responses to a prompt as a group that was never graded."""
    problem = Problem(id=prompt.problem_id, question="", images=(), answer="", answer_type="text")
    return Group(problem, tuple(rollouts), (), np.zeros(len(rollouts)))


def _group(prompt: Prompt, responses: Sequence[np.ndarray]) -> Group:
    rollouts = [
        Rollout(prompt.problem_id, index, ids, np.zeros(len(ids), np.float32), "", "stop", 0)
        for index, ids in enumerate(responses)
    ]
    return group_of(prompt, rollouts)


@contextmanager
def _attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the text layers attend by one of transformers' own implementations."""
    is_vision = hasattr(model.config, "vision_config")
    before: Any = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation({"text_config": name} if is_vision else name)
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config": before} if is_vision else before)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
