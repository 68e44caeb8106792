"""Rollout engines: transformers on any machine, vLLM where it is installed.

    base          what a sampler promises (Sampler, SamplingParams); loads no torch
    factory       choose an engine by name
    fingerprint   the proof that an engine holds the learner's current weights

Private to this room: the engines (transformers, vllm), vllm_worker (what runs inside vLLM's worker) and distribution,
from which the transformers engine draws.
"""

__all__ = ["base", "factory", "fingerprint"]
