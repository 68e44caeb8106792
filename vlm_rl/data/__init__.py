"""Prepared sets on their way into a model: problems, their images, their prompts.

    golds          the text, type and options of a gold answer
    sets           read a prepared set, and refuse what must not be trained or scored on
    order          the order of prompts, and the ledger that accounts for each of them
    images         hostile bytes in, RGB pixels on the model's grid out
    prompts        the only prompt builder
    model_folder   refuse a model folder that would run code, and open its configuration and tokenizer

Images stay on disk until they are used (stored_images); text of a question never becomes a control token
(untrusted_text). These two belong to this room alone. Only prompts loads torch.
"""

__all__ = ["golds", "images", "model_folder", "order", "prompts", "sets"]
