"""The learner: packed rows in, log-probs, gradients and new weights out.

    packing         groups to rows, with what the loss needs of them
    planning        which rank computes which responses, in which row
    quantization    a base model in 4 bits, under adapters
    policy          the model, and the log-probs of a packed row
    learner         one DeepSpeed engine around the policy; every optimizer step
    architectures   the families of models: which it computes exactly, and their parts; all others are refused
    self_check      at start-up: its log-probs against the unmodified model's
    sync_probe      after each sync: its log-probs of what the sampler draws
    reference       the frozen policy of the KL term
    layer_patches   the switch for layers of transformers that ours may replace
    shared_prefix_attention   attention over a packed row
    loading         from folders to prompt builder and policy
    saving          the learner's state, to checkpoints and back
    sft             the steps of supervised fine-tuning, and a pass over examples in order
    sft_run         a run of `vlm-rl sft`
    dry_run         what a run needs, before anything is loaded
    memory_plan     the bytes of a rank, by formula
    dry_run_page    the tables of a dry run
    fit             whether that fits on a card, and which settings would make it
    out_of_memory   what to change where it was not there

Private to this room: lean_layers and vision_attention (the layers that layer_patches puts in), routing (what the
routers of experts do), guard (the gradient guard), regroup (DeepSpeed's shards for a different number of ranks),
checkpoint_files (what a rank writes into a checkpoint, at once or later), and deepspeed, the only file that imports
DeepSpeed.

A change to transformers is outside layer_patches and always on: shared_prefix_attention registers itself as an
attention implementation.
"""

__all__ = [
    "architectures",
    "dry_run",
    "dry_run_page",
    "fit",
    "layer_patches",
    "learner",
    "loading",
    "memory_plan",
    "out_of_memory",
    "packing",
    "planning",
    "policy",
    "quantization",
    "reference",
    "saving",
    "self_check",
    "sft",
    "sft_run",
    "shared_prefix_attention",
    "sync_probe",
]
