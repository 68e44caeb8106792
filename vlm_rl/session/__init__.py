"""A run from its first check to its last checkpoint: what the training loop is given.

run: its lock, its checkpoints, its trackers, and what stops it; of a supervised run as well.
session: the parts of a run that reinforces: builds, saves, restores and closes them.
sft: a run of `vlm-rl sft`.
start_from: a new run that begins with another's weights and optimizer.
preflight: the first checks of a command, before anything heavy is imported.
watch: whether other ranks have failed, and whether none makes progress.
recomputation: what model.gradient_checkpointing=auto keeps, by the plan and the card.
mini_batches: the packed rows of a step, with the log-probs that precede its first update.
recorder: what a run writes down, and the seconds of its phases.
teacher: a frozen model that scores the responses, and what it reads.
speed: tokens a second, MFU and memory of each step.
periodic_evaluation: the policy on the sets of data.eval, while it trains.
"""

__all__ = ["mini_batches", "periodic_evaluation", "preflight", "recorder", "run", "session", "sft", "token_credit"]
_USES = [
    "data",
    "environments",
    "evaluation",
    "grading",
    "learner",
    "model_files",
    "planning",
    "rewards",
    "rollouts",
    "run",
    "samplers",
]
