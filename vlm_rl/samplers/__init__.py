"""Rollout engines: transformers on any machine, vLLM where it is installed, and servers of vLLM.

    base             what a sampler promises (Sampler, SamplingParams); loads no torch
    factory          choose an engine by name
    fingerprint      the proof that an engine holds the learner's current weights
    engine_settings  what every engine is started with, whichever samples
    tags             whether a model can write the tags of its prompts, and how they are spelled
    missing_vllm     what to do where vLLM is asked for and missing; loads nothing
    watch            how far the sampling of a request is
    vllm             the engine in this process, and what runs inside a server (a folder with a door of its own)
    remote           servers of vLLM: start one, sample from several (a folder with a door of its own)

Private to this room: the engine of transformers, distribution, from which it samples, partial_batch (responses that
are sampled in several calls) and episodes (responses of several turns).
"""

__all__ = ["base", "engine_settings", "factory", "fingerprint", "missing_vllm", "remote", "tags", "vllm", "watch"]
_USES = ["data", "model_files"]
