"""A run from its first check to its last checkpoint: what the training loop is given.

    run                   its lock, its checkpoints, its trackers, and what stops it; of a supervised run as well
    session               the parts of a run that reinforces: builds, saves, restores and closes them
    sft                   a run of `vlm-rl sft`
    preflight             the first checks of a command, before anything heavy is imported
    mini_batches          the packed rows of a step, with the log-probs that precede its first update
    token_credit          the credit of a step's tokens, for the rows of every rank
    recorder              what a run writes down, and the seconds of its phases
    periodic_evaluation   the policy on the sets of data.eval, while it trains

Private to this room: start_from (a new run that begins with another's weights and optimizer), watch (whether other
ranks have failed, and whether none makes progress), recomputation (what model.gradient_checkpointing=auto keeps, by
the plan and the card), weight_sync (the weights to the sampler, and the proof that it has them), teacher (a frozen
model that scores the responses, and what it reads), parts (problems, reference and engine, by the configuration),
alarms (what goes wrong while a run looks alive) and speed (tokens a second, MFU and memory of each step).
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
