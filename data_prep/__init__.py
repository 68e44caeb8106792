"""Prepared sets out of public data sets, benchmarks and users' own tables: `vlm-rl prepare`.

    command    the command
    golds      the kind of answer that a gold is
    toy_sets   the quickstart's data

The rest is this room's own. It lies at the top of the repository; vlm_rl/data_prep is a link to it.
"""

__all__ = ["command", "golds", "toy_sets"]
