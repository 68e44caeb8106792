"""The learner: packed rows in, log-probs, gradients and new weights out.

    packing         groups to rows under a token budget, dealt out to ranks
    policy          the model, and the log-probs of a packed row
    learner         one DeepSpeed engine around the policy; every optimizer step
    reference       the frozen policy of the KL term
    layer_patches   which layers of transformers are replaced by ours
    sft             a supervised start on reasoning traces
    dry_run         what a run needs in memory, before anything is loaded

Behind the door: attention over a shared-prefix row, the layers that replace transformers' own (lean_layers,
vision_attention), the gradient guard, and DeepSpeed, which no other file imports.
"""

__all__ = ["dry_run", "layer_patches", "learner", "packing", "policy", "reference", "sft"]
