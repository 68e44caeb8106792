"""Train several algorithms over the same seeds from the same start, and compare them seed by seed.

    run     `vlm-rl study`: train what is missing, then write the page
    runs    the runs of a study
    launch  how runs are started: here, on several ranks, or by a command on other machines

Private to this room: results (the numbers), findings (their words), tables and page.
"""

__all__ = ["launch", "run", "runs"]
_USES = ["model_files", "report", "run"]
