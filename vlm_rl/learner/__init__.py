"""The learner: packed rows in, log-probs, gradients and new weights out.

    packing         groups to rows, with what the loss needs of them
    planning        which rank computes which responses, in which row
    policy          the model, and the log-probs of a packed row
    learner         one DeepSpeed engine around the policy; every optimizer step
    architectures   the families of models: which it computes exactly, and their parts; all others are refused
    self_check      at start-up: its log-probs against the unmodified model's
    sync_probe      after each sync: its log-probs of what the sampler draws
    reference       the frozen policy of the KL term
    layer_patches   the switch for layers of transformers that ours may replace
    shared_prefix_attention   attention over a packed row
    sft             a supervised start on reasoning traces
    dry_run         what a run needs in memory, before anything is loaded
    out_of_memory   what to change where it was not there

Private to this room: lean_layers and vision_attention (the layers that layer_patches puts in), routing (what the
routers of experts do), guard (the gradient guard), regroup (DeepSpeed's shards for another number of ranks), and
deepspeed, the only file that imports DeepSpeed.

Two changes to transformers are outside layer_patches and always on: shared_prefix_attention registers itself as an
attention implementation, and policy replaces a vision model's `get_placeholder_mask`.
"""

__all__ = [
    "architectures",
    "dry_run",
    "layer_patches",
    "learner",
    "out_of_memory",
    "packing",
    "planning",
    "policy",
    "reference",
    "self_check",
    "sft",
    "shared_prefix_attention",
    "sync_probe",
]
