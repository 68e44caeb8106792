"""Toys: a real Qwen2.5-VL of 0.9 million parameters, drawn tasks, and the quickstarts that make it look.

The task in plain language has a pretrained model. `vlm-rl quickstart --real` is in the room `commands`.

    quickstart         the run
    tools_quickstart   the run with a tool; the two alone call vlm_rl.train
    first_start        the engine's first start on a machine, beside the quickstart's warm start
    tiny_model         the model
    counting_squares   the quickstart's task
    small_board        the task of the run with a tool
    counting_shades    the study's task
    counting_votes     the study's task with long responses
    counting_task      what these tasks share
    word_problems      a task in plain language, with traces in four styles
    drawn_pictures     pictures of shapes and charts, with traces that say what is seen
    smollm             a pretrained language model out of a wheel
    small_vlm          a Qwen2.5-VL around it, whose vision tower is untrained
    virl_layout        writes their files as ViRL39K has them

Only first_start is private to this room. The quickstarts, the doctor, the papers' tiny runs, makers of toy data and
scripts of perf use the room, and no other.
"""

__all__ = [
    "counting_shades",
    "counting_squares",
    "counting_task",
    "counting_votes",
    "drawn_pictures",
    "quickstart",
    "small_board",
    "small_vlm",
    "smollm",
    "tiny_model",
    "tools_quickstart",
    "virl_layout",
    "word_problems",
]
_USES = ["data", "environments", "evaluation", "grading", "learner", "report", "run", "samplers"]
