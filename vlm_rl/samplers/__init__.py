"""Rollout engines: transformers on any machine, vLLM where it is installed, and servers of vLLM.

    base          what a sampler promises (Sampler, SamplingParams); loads no torch
    factory       choose an engine by name
    fingerprint   the proof that an engine holds the learner's current weights
    missing_vllm  what to do where vLLM is asked for and missing; loads nothing
    schedule      which server draws which group; loads nothing
    serve         start a vLLM server for a run
    servers       the rollout engine on such servers

Private to this room: the engines (transformers, vllm), vllm_start (what is done around the start of vLLM),
vllm_worker (what runs inside vLLM's worker), vllm_options (what every vLLM is given), distribution, from which the
transformers engine draws, and partial_batch (responses that are drawn in several calls). vllm_endpoint and
vllm_transfer run inside a server; server_client, server_push, server_fleet, server_drawing, server_background and
gloo_link are the parts of `servers`.
"""

__all__ = ["base", "factory", "fingerprint", "missing_vllm", "schedule", "serve", "servers"]
_USES = ["data"]
