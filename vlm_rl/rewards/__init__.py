"""The reward of a response: a sum of parts, each a line of the registry in reward.

    reward          the registry, the sum, and the scoring of groups while others are sampled
    accuracy        the part that says what a right answer is, in evaluations too
    grounding       boxes and points, and what each family's coordinates mean
    cell_functions  functions of this process, which no other one can import
    votes           a majority vote, for users' configurations: a reward that needs no labels

Private to this room: part says what a part is. The parts are formulas (of a response's length, form and grade),
functions and function_worker (users' own, each in a separate process), judge (a model behind an endpoint),
reward_model (one that classifies) and grounding, whose boxes coordinates reads.
"""

__all__ = ["accuracy", "cell_functions", "grounding", "reward", "votes"]
_USES = ["chat_endpoint", "data", "grading"]
