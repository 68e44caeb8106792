"""Prepared sets on their way into a model: problems, their images, their prompts.

    adapters           LoRA adapters on disk, and how they are merged
    ahead              batches that are drawn while earlier ones train
    carry_over         groups that one step begins and a later one ends
    golds              the text, type and options of a gold answer
    sets               read a prepared set, and refuse what must not be trained or scored on
    order              the order of prompts, and the ledger that accounts for each of them
    images             untrusted bytes in, RGB pixels on the model's grid out
    prompts            the only prompt builder
    vision             how the images of a prompt enter the models of each family
    hub_models         models by their name on the hub
    model_folder       refuse a model folder that would run code, and open its configuration and tokenizer
    checkpoint_layout  a model's parameters as its published checkpoints have them
    finite_weights     NaN and infinity in a file of weights
    routers            the routers of a mixture of experts, and a record of what they choose
    stored_images      the images of a prepared set, which stay on disk until they are used

Private to this room: untrusted_text (text of a question never becomes a control token), and the families of vision:
vision_qwen, vision_internvl and vision_idefics3, with what they share in vision_tiles and vision_tower. Importing
prompts loads torch; so does loading a set, where one rank checks for all.
"""

__all__ = [
    "adapters",
    "ahead",
    "carry_over",
    "checkpoint_layout",
    "finite_weights",
    "golds",
    "hub_models",
    "images",
    "model_folder",
    "order",
    "prompts",
    "routers",
    "sets",
    "stored_images",
    "vision",
]
_USES = []
