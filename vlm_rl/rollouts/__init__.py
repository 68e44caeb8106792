"""From problems to the graded groups that a step trains on.

    collect       the batch of a step: rounds of sampling, dropped groups, advantages
    source        where its groups come from, behind one interface
    sampling      the parts that every source is built from
    prompt_order  the order of prompts, and the ledger that accounts for each of them

Private to this room: the sources carry_over and ahead (source holds the one on policy), groups (those with
unfinished responses, and their file) and no_signal (steps that teach nothing).

To add a source, write a class with the methods of source.RolloutSource and name it in source.make_source.
"""

__all__ = ["collect", "prompt_order", "sampling", "source"]
_USES = ["data", "environments", "rewards", "samplers"]
