"""The page that compares checkpoints and their reasoning: `vlm-rl demo`.

    server, default_runs   start the page, and choose its runs when none is named
    library                finds the runs below a folder
    bundle                 writes a comparison as static files: `vlm-rl demo --bundle`
    live, endpoints        options of the live panel

Everything else is private to this room. The folder is at the top of the repository; vlm_rl/demo is a link to it.
"""

__all__ = ["bundle", "default_runs", "endpoints", "library", "live", "server"]
_USES = ["chat_endpoint", "data", "evaluation", "grading", "report", "run", "samplers"]
