"""What answers the policy between its turns: tools that look again, compute, or judge a first answer.

    environment  what an environment is, and what a class of your own may return
    host         the environments of a run: opens them, keeps their limits, and answers turns as token ids
    calls        how a model writes a call
    script       episodes whose turns are written beforehand

Private to this room: zoom, python and answer_check (the shipped ones), registry (their names), own (a user's class,
in separate processes) and own_worker (what runs there).
"""

__all__ = ["calls", "environment", "host", "script"]
_USES = ["data", "grading", "rewards", "run", "samplers", "sandbox"]
