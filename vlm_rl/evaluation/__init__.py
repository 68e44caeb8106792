"""Measure a policy on prepared sets, and score answers by each benchmark's own rules.

evaluate     sampler, then grader, to one record per response and a summary
resume       an evaluation that continues where a stopped one was
paired       two evaluations of the same problems, compared problem by problem
command, compare, export   `vlm-rl eval`, `vlm-rl eval compare`, `vlm-rl eval export`
benchmarks   one file per benchmark, and `vlm-rl score`
"""

__all__ = ["benchmarks", "command", "compare", "evaluate", "export", "image_controls", "paired", "resume"]
