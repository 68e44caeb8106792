"""Parts of the reward that need more than a formula; vlm_rl.rewards adds them up.

    functions  your own functions, each in a process of its own
    judge      a model behind an OpenAI-compatible endpoint
    grounding  boxes and points against a gold box

Each gives an outcome for each response: a number, or the reason why there is none (vlm_rl.types.Outcome). Private to
this room: function_worker (what runs in a function's process).
"""

__all__ = ["functions", "grounding", "judge"]
_USES = ["chat_endpoint", "data"]
