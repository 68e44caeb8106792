"""Rollout engines: transformers on any machine, vLLM where it is installed.

    base          what a sampler promises (Sampler, SamplingParams); loads no torch
    factory       choose an engine by name
    fingerprint   the proof that an engine holds the learner's current weights

Behind the door are the engines, transformers and vllm, and the distribution that the first draws from.
"""

__all__ = ["base", "factory", "fingerprint"]
