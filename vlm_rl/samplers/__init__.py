"""Rollout engines: transformers on any machine, vLLM where it is installed.

    base      what a sampler promises (Sampler, SamplingParams), and the proof that it holds the current weights
    factory   choose an engine by name

Both engines draw from the distribution that the learner describes (distribution, this room's own).
"""

__all__ = ["base", "factory"]
