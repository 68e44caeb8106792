"""What the demo knows of runs, as columns and numbers, and nothing of how it is shown.

    library         finds the runs below a folder, and their evaluations
    responses       one evaluation's records as columns
    token_counts    how many of a response's tokens are reasoning
    problem_table   the problems that checkpoints share: filtered, ordered
    problem_images  a problem's images
    lengths         lengths and their changes
    pairs           two checkpoints: who reasons longer, and whether it pays; problems that show it
    cut_accuracy    how often a checkpoint would be right if it were cut at T tokens
    reasoning       where a response first states the right answer, and its moves
    phrases         which phrases a checkpoint says more often
    patterns        a visitor's regular expression, counted
    url_state       what is shown, as the query of an address

Private to this room: token_worker and pattern_worker, which count for two of these, in processes with limits.
"""

__all__ = [
    "cut_accuracy",
    "lengths",
    "library",
    "pairs",
    "patterns",
    "phrases",
    "problem_images",
    "problem_table",
    "reasoning",
    "responses",
    "token_counts",
    "url_state",
]
