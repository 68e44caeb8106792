"""From problems to the graded groups that a step trains on.

    collect       the batch of a step: rounds of sampling, what is left out, advantages
    source        where its groups come from, behind one interface

Private to this room: the sources (carry_over, ahead; source holds the one on policy), sampling (what all of them do)
and groups (responses that are not all there yet, and their file).

To add a source, write a class with the methods of source.RolloutSource and name it in source.make_source.
"""

__all__ = ["collect", "sampling", "source"]
_USES = ["data", "rewards", "samplers"]
