"""Checks of the rollout engine: what a sync brings into it, and what it samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare

from vlm_rl.data.prompts import rope_positions
from vlm_rl.devices import default_device, has_gpu
from vlm_rl.doctor.attention import ATTENTION_CHECKS
from vlm_rl.doctor.check import Check, phase
from vlm_rl.doctor.model import ModelUnderTest, start_sampler, sync_and_compare
from vlm_rl.learner.packing import Chunk, pack_row
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.self_check import group_of
from vlm_rl.learner.sync_probe import RESPONSES
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.fingerprint import StaleWeightsError
from vlm_rl.types import Prompt, Rollout

CYCLES = 3
BFLOAT16_LIMIT = 0.05  # nats per token; in float32 the limit is the self-check's
SAMPLED, LEAST_P = 10_000, 1e-4  # a sound engine is called off once in 10^4 machines
LEAST_EXPECTED = 5  # times a token is expected, below which Pearson's statistic is not chi-square distributed
GRAPHS: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, RESPONSES, 2 * RESPONSES]},
}
"""The engine of a run has CUDA graphs, so this one has too, though its model is small; each size takes time."""

_WAY_OUT = "set rollout.sampler=transformers; with vLLM, try VLLM_USE_V2_MODEL_RUNNER=0 in the environment"


class EngineUnderTest(ModelUnderTest):
    """A model folder, the policy, and an engine that several checks share."""

    @cached_property
    def engine(self) -> Sampler:
        """Return the engine that a run would take, asleep or awake as the last check left it."""
        options = GRAPHS if default_device().type == "cuda" else None
        return start_sampler(self, self.policy[0], batch_size=256, vllm_options=options)


def sync(subject: EngineUnderTest) -> Check:
    """Let the engine sleep, wake it with changed weights, prove them, and compare its log-probs: three times."""
    engine, (policy, _, limit) = subject.engine, subject.policy
    limit = BFLOAT16_LIMIT if engine.dtype == torch.bfloat16 else limit
    gaps = []
    try:
        for version in range(1, CYCLES + 1):
            move(policy, seed=version)
            engine.sleep()
            gaps.append(sync_and_compare(engine, policy, subject.prompts, version=version))
    except StaleWeightsError as error:
        return Check("sync", "off", f"cycle {len(gaps) + 1} of {CYCLES}: {error}", _WAY_OUT)
    cycle = "asleep, awake and synced" if has_gpu() else "synced (nothing sleeps on a CPU)"
    detail = f"{CYCLES} times {cycle}, {engine.name} holds the learner's weights, and its log-probs "
    gap = float(np.max(gaps))  # NaN where one is
    detail += f"are within {gap:.1e} of the learner's (limit {limit:.0e})"
    good = gap <= limit
    return Check("sync", "ok" if good else "off", detail, "" if good else _WAY_OUT)


def move(policy: Policy, *, seed: int) -> None:
    """Change every weight by a tenth of its own size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(0.1 * noise * weight.std(correction=0))


def sampling(subject: EngineUnderTest) -> Check:
    """Compare how often the engine samples each first token with the learner's probabilities."""
    engine, (policy, *_) = subject.engine, subject.policy
    prompt = subject.prompts[-1]
    sync_and_compare(engine, policy, [prompt], version=CYCLES + 1)
    params = SamplingParams(temperature=1.0, max_tokens=1, responses=SAMPLED)
    phase(f"sampling {SAMPLED:,} tokens")
    (rollouts,) = engine.generate(SampleRequest([prompt], params, seed=0, step=0))
    probabilities = _first_token(policy, prompt, vocabulary=len(subject.builder.tokenizer))
    counts = np.bincount([int(rollout.ids[0]) for rollout in rollouts], minlength=len(probabilities))
    if banned := int(counts[probabilities == 0].sum()):
        return Check("sampling", "off", f"{engine.name} sampled a token of probability 0 {banned} times", _WAY_OUT)
    p = p_value(counts, probabilities)
    detail = f"{SAMPLED:,} tokens sampled by {engine.name}, against the learner's softmax: chi-square p = {p:.2g} "
    detail += f"(limit {LEAST_P:.0e})"
    good = p >= LEAST_P
    return Check("sampling", "ok" if good else "off", detail, "" if good else _WAY_OUT)


@torch.no_grad()
def _first_token(policy: Policy, prompt: Prompt, *, vocabulary: int) -> np.ndarray:
    """Return the learner's probability of each token as the first of a response, float64."""
    rollout = Rollout(prompt.problem_id, 0, np.zeros(1, np.int32), np.zeros(1, np.float32), "", "length", 0)
    row = pack_row(
        [Chunk(0, (0,))],
        groups=[group_of(prompt, [rollout])],
        prompts={0: prompt},
        weights_PG=np.zeros((1, 1)),
        positions=partial(rope_positions, policy.model),
    ).to(policy.model.device)
    hidden_1H = policy.hidden_states(row)[row.predictor_K]
    tokens_V = torch.arange(vocabulary, device=hidden_1H.device)
    logp_V, _ = policy.head(hidden_1H.expand(vocabulary, -1), tokens_V)
    return logp_V.double().exp().cpu().numpy()


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square test; tokens with a small expected count are pooled."""
    expected = counts.sum() * probabilities / probabilities.sum()
    order = np.argsort(expected)
    reaching = 1 + int((expected[order].cumsum() < LEAST_EXPECTED).sum())
    rare = max(reaching, int((expected < LEAST_EXPECTED).sum()))
    observed, wanted = (np.append(x[order[rare:]], x[order[:rare]].sum()) for x in (counts, expected))
    return float(chisquare(observed, wanted).pvalue)


CHECKS = (*ATTENTION_CHECKS, sync, sampling)
SUBJECT = EngineUnderTest
