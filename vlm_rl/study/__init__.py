"""Several rules trained over the same seeds from the same start, compared in pairs.

    run    `vlm-rl study`: train what is missing, then write the page

The plan, the numbers, the findings and the page are this room's own.
"""

__all__ = ["run"]
