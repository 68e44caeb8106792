"""How to divide cards between learner and rollout engines: `vlm-rl plan`.

    command     the command: the divisions of some cards, a table, advice, a plot
    lengths     the lengths of a rollout batch, made up or of a run
    rates       the seconds of a decode step, an update, a sync, from assumptions about a card
    measured    those of a run
    update      what an update costs on a number of ranks, by the learner's own planner
    fleet       engines that draw groups of responses, from one response's end to the next
    steps       the steps of a run, colocated or on servers

Private to this room: divisions (which there are, which fit, what each brings) and answers (table, advice, plot).
"""

__all__ = ["command", "fleet", "lengths", "measured", "rates", "steps", "update"]
_USES = ["learner", "model_files", "planning", "report", "run", "samplers"]
