"""The policy's weights to the sampler, and the proof that it computes what the learner computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from vlm_rl.distributed import all_gather
from vlm_rl.learner.architectures import naming_untested
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.sync_probe import RESPONSES, TOKENS, probe_gap
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.fingerprint import (
    Fingerprint,
    FingerprintBuilder,
    StaleWeightsError,
    check_fresh,
    fingerprint,
)
from vlm_rl.types import Prompt


@dataclass(frozen=True)
class WeightSync:
    """Sends the learner's weights and checks what arrived."""

    learner: Learner
    sampler: Sampler
    adapter_alone: bool  # the engine has the base model, and gets the adapter beside it
    probe: Prompt  # what the sampler answers after each sync, on all ranks at once
    params: SamplingParams  # of the run's responses
    seed: int  # of the run
    limit: float  # the largest gap of the probe, per token

    def __call__(self) -> Fingerprint:
        """Stream the weights into the sampler and return their fingerprint.

        Raises StaleWeightsError unless exactly these arrived, and the sampler computes what the learner computes.
        """
        sent = FingerprintBuilder(dtype=self.sampler.dtype, quantization=self.sampler.quantization)
        stream = self.learner.stream_adapters() if self.adapter_alone else self.learner.stream_weights()
        self.sampler.load_weights(sent.watch(stream), version=self.learner.num_updates)
        weights = sent.result()
        if self.adapter_alone:  # beside the base model, which must be there whole
            weights = weights + self._base_fingerprint
        check_fresh(self.sampler, weights)
        self._check_by_a_probe()
        return weights

    @cached_property
    def _base_fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the model without adapters, which no update changes."""
        return fingerprint(self.learner.stream_base_weights(), dtype=self.sampler.dtype)

    def _check_by_a_probe(self) -> None:
        """Raise StaleWeightsError if the sampler's log-probs of a few tokens are not the learner's."""
        params = replace(self.params, max_tokens=min(TOKENS, self.params.max_tokens), responses=RESPONSES)
        request = SampleRequest([self.probe], params, seed=self.seed, step=-1, together=True)
        with naming_untested(self.learner.policy.model.config):
            (rollouts,) = self.sampler.generate(request)
        policy, ranks = self.learner.policy, self.learner.policy.ranks
        # Ranks that compute rows together score the answers of all of their engines, one after the other.
        answers = [rollouts] if ranks.size == 1 else all_gather(rollouts)[ranks.members]
        gaps = [probe_gap(self.learner.log_probs, policy.model, self.probe, answer) for answer in answers]
        gap = next((gap for gap in gaps if not gap <= self.limit), None)  # NaN too
        if gap is not None:
            raise StaleWeightsError(
                f"sampler {self.sampler.name!r} (policy version {self.sampler.policy_version}) holds the learner's "
                f"weights, but its log-probs of the probe {self.probe.problem_id!r} differ from the learner's "
                f"by {gap:.3g} per token, above {self.limit:.3g}: it computes with something that no sync brings, or "
                f"differently; compare {other_setting(self.sampler)}"
            )


def other_setting(sampler: Sampler) -> str:
    """Return the setting to compare with if sampler and learner disagree."""
    return "model.layer_patches=false" if sampler.name == "transformers" else "rollout.sampler=transformers"
