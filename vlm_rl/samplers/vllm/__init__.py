"""vLLM: the engine in this process, and what runs inside a server of it. Nothing else imports vllm.

    engine    the sampler
    options   what every vLLM is given
    start     what is done around the start of an engine
    endpoint  runs inside a server: the token, and groups of responses
    transfer  runs inside a server: how it takes weights from a learner
    nccl      weights by vLLM's NCCL engine; experimental: no GPU has run it

Private to this room: worker, which runs inside vLLM's worker; lean_steps, what a decode step does here.
"""

__all__ = ["endpoint", "engine", "nccl", "options", "start", "transfer"]
