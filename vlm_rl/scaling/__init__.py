"""How to divide cards between learner and rollout engines: `vlm-rl plan`.

    command     the command: the divisions of some cards, a table, advice, a plot
    hours       about how long a run takes, for its dry run
    lengths     the lengths of a rollout batch, made up or of a run
    rates       the seconds of a decode step, an update, a sync, from assumptions about a card
    measured    those of a run
    update      what an update costs on a number of ranks, by the learner's own planner
    simulator   the steps of a run, colocated or on servers, from one response's end to the next

Private to this room: divisions (which there are, which fit, what each brings) and answers (table, advice, plot).
"""

__all__ = ["command", "hours", "lengths", "measured", "rates", "simulator", "update"]
_USES = ["learner", "model_files", "planning", "report", "run", "samplers"]
