"""The learner: packed rows in, log-probs, gradients and new weights out.

    learner   one DeepSpeed engine around the policy; every optimizer step
    policy    the model, and the log-probs of a packed row
    packing   groups to rows under a token budget, dealt out to ranks
    reference the frozen policy of the KL term
    sft       a supervised start on reasoning traces
    dry_run   what a run needs in memory, before anything is loaded

The rest is this room's own: attention over a shared-prefix row, the layers that keep less for the backward pass, the
gradient guard, DeepSpeed's block.
"""

__all__ = ["dry_run", "learner", "packing", "policy", "sft"]
