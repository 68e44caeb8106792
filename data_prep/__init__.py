"""Prepared sets, made from public data sets, benchmarks and users' own tables: `vlm-rl prepare`.

    command           the command
    quickstart_data   the quickstart's data
    tools_data        the same of quickstart --tools
    word_sets         the data of the quickstart in plain language
    picture_sets      pictures for a small model that learns to see

The folder readers has a door of its own: the data sets' own files, row by row.

Everything else is private to this room. The folder is at the top of the repository; vlm_rl/data_prep is a link to it.
"""

__all__ = ["command", "picture_sets", "quickstart_data", "tools_data", "word_sets"]
_USES = ["data", "evaluation", "grading", "learner", "report", "run", "sandbox", "toy"]
