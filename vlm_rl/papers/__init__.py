"""The headline tables of papers: what they need, the commands that make them, and our numbers beside the published.

    command    `vlm-rl paper`

Private to this room: catalog (the papers), downloads (models and data sets), steps (the commands, and whether each is
done) and table (published and ours).
"""

__all__ = ["command"]
_USES = ["evaluation", "run", "study"]
