"""The page that compares checkpoints and their reasoning: `vlm-rl demo`.

    server, recorded   start the page, and what it opens when it is told nothing
    live, endpoints    options of the live panel

The rest is this room's own. It lies at the top of the repository; vlm_rl/demo is a link to it.
"""

__all__ = ["endpoints", "live", "recorded", "server"]
