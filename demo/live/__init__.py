"""The live panel: one question, asked to several models side by side.

    panel       the panel and its options
    endpoints   servers that the operator named
    backends    checkpoints in this process

Private to this room: ask_queue, context, grading, html and replies.
"""

__all__ = ["backends", "endpoints", "panel"]
