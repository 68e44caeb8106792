"""Is the final answer of a response the gold? One grader for training, evaluation and the demo.

    grader    Grader, GradeTask, task_of, GRADER_VERSION
    command   `vlm-rl grade`

Other rooms import these two modules. The rest is the grader's own: exact comparison first (equality, choices and the
modules that they use), then math-verify in processes that can be killed (symbolic_client, symbolic_server).
This room imports nothing of the project but errors, types and templates, and no torch.
"""

__all__ = ["command", "grader"]
