"""`vlm-rl doctor`: does this machine, and does a model folder, compute the right thing?

    command     the page of checks, and the exit code

Private to this room: check (what a check answers, and how checks are run), machine (checks of the machine) and model
(checks of a model folder). A check is a function that returns a Check; a new one is a line in MACHINE_CHECKS or
MODEL_CHECKS.
"""

__all__ = ["command"]
