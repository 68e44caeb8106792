"""The quickstart: a real Qwen2.5-VL of 0.9 million parameters learns to look before it answers, on a CPU.

    quickstart   the run
    tiny_model   the model

Nothing is private to this room. It alone calls vlm_rl.train.
"""

__all__ = ["quickstart", "tiny_model"]
_USES = ["data", "evaluation", "grading", "learner", "report", "run", "samplers"]
