"""Folders with models: what is in them, whether it may be opened, and what it must not be.

    model_folder       refuse a folder that would run code or is damaged; open its configuration and tokenizer
    weights            whole, finite, and as a learner names them
    hub_models         models by their name on the hub
    adapters           LoRA adapters on disk, and how they are merged
    checkpoint_layout  a model's parameters as its published checkpoints have them
    finite_weights     NaN and infinity in a file of weights
    fp8                weights in FP8, as a rollout engine rounds them
    tag_spelling       tags that are single tokens: were they trained, and how to spell them as plain text
    routers            the routers of a mixture of experts, and a record of what they choose

Private to this room: tokenizer_growth, which refuses a tokenizer that makes a short text too long for the memory.
"""

__all__ = [
    "adapters",
    "checkpoint_layout",
    "finite_weights",
    "fp8",
    "hub_models",
    "model_folder",
    "routers",
    "tag_spelling",
    "weights",
]
_USES = []
