"""`vlm-rl doctor`: does this machine, a model folder or a recipe compute the right thing?

    command     the page of checks, and the exit code
    attention   the kernels of attention that a computation calls

Private to this room: check (what a check answers, and how checks are run), waiting (what the page shows until they
answer), machine (what this machine has), apart (groups of checks that run in separate processes: attention, ranks and
engine), model (checks of a model folder) and recipe (checks of a configuration).

A check is a function that returns a Check. A new one is a line in one of the tuples *_CHECKS, and where it runs apart
also its name in apart.GROUPS.
"""

__all__ = ["attention", "command"]
_USES = ["data", "grading", "learner", "model_files", "planning", "run", "samplers", "sandbox", "toy"]
