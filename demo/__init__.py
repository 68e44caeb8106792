"""The page that compares checkpoints and their reasoning: `vlm-rl demo`.

    server         starts the page, behind its guard (request_guard); app lays it out
    background     serves it in a thread, for a notebook
    default_runs   chooses its runs when none is named

Its folders have doors of their own, from the lowest: numbers, web, panels, live, files. The folder is at the top of
the repository; vlm_rl/demo is a link to it.
"""

__all__ = ["background", "default_runs", "files", "live", "numbers", "server"]
_USES = ["chat_endpoint", "data", "evaluation", "grading", "model_files", "report", "run", "samplers", "sandbox"]
