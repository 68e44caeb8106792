"""A run from its first check to its last checkpoint: what the training loop is given.

session: builds, saves, restores and stops a run.
preflight: the first checks of a command, before anything heavy is imported.
recorder: what a run writes down, and the seconds of its phases.
periodic_evaluation: the policy on the sets of data.eval, while it trains.
"""

__all__ = ["periodic_evaluation", "preflight", "recorder", "session"]
_USES = ["data", "evaluation", "grading", "learner", "model_files", "rewards", "rollouts", "run", "samplers"]
