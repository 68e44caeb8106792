"""A whole run from a notebook or a script: rows, a model and reward functions in, a run directory out.

    fit   `vlm_rl.fit`

Private to this room: own_rows (rows, tables and data sets as prepared sets) and settings (a call's arguments as a
configuration).
"""

__all__ = ["fit"]
_USES = ["data", "data_prep", "planning", "rewards", "run", "session"]
