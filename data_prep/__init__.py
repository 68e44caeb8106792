"""Prepared sets, made from public data sets, benchmarks and users' own tables: `vlm-rl prepare`.

    command           the command
    quickstart_data   the quickstart's data

Everything else belongs to this room alone. The folder is at the top of the repository; vlm_rl/data_prep is a link.
"""

__all__ = ["command", "quickstart_data"]
