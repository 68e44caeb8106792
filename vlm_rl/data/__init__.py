"""Prepared sets on their way into a model: problems, their images, their prompts.

    golds              the text, type and options of a gold answer
    sets               read a prepared set, and refuse what must not be trained or scored on
    images             untrusted bytes in, RGB pixels on the model's grid out
    prompts            the only prompt builder
    turns              what stands between two turns of an episode
    vision             how the images of a prompt enter the models of each family (a folder with a door of its own)
    stored_images      the images of a prepared set, which stay on disk until they are used

Private to this room: untrusted_text (text of a question never becomes a control token), chat_templates (a model's
chat template is rendered in a process with limits) and tokenizer_trial (its tokenizer is tried in one). Importing
prompts loads torch; so does loading a set, where one rank checks for all.
"""

__all__ = [
    "golds",
    "images",
    "prompts",
    "sets",
    "stored_images",
    "turns",
    "vision",
]
_USES = ["model_files", "sandbox"]
