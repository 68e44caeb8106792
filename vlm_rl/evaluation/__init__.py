"""Measure a policy on prepared sets, and score responses by each benchmark's own rules.

    command           `vlm-rl eval`
    served            `vlm-rl eval --endpoint`: a served or closed model
    compare           `vlm-rl eval compare`
    export            `vlm-rl eval export`
    evaluate          sampler, then grader, to one record per response and a summary
    scores            the numbers of a summary, and its line
    image_controls    the same problems with blank or shuffled images
    resume            an evaluation that continues where a stopped one was
    benchmarks        one file per benchmark, and `vlm-rl score`

Private to this room: sets (opened, and answered one after the other), settings (from the command line, the run and
the protocols), results_folder (what must not be there already), records (graded responses), journal (the answers of
an unfinished evaluation) and pipeline (answers and grades at the same time).
Benchmarks and `vlm-rl score` load no torch.
"""

__all__ = ["benchmarks", "command", "compare", "evaluate", "export", "image_controls", "resume", "scores", "served"]
_USES = ["chat_endpoint", "data", "environments", "grading", "model_files", "rewards", "run", "samplers"]
