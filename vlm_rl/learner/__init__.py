"""The learner: packed rows in, log-probs, gradients and new weights out.

    packing            groups to rows, with what the loss needs of them
    row_plan           which rank computes which responses, in which row
    lora               adapters on linear layers
    quantization       a base model in 4 bits, under adapters
    policy             the model, and the log-probs of a packed row
    sequence_parallel  rows whose tokens are divided over ranks
    head               its output head: log-probs and entropies in chunks, and what memory they take
    learner            one DeepSpeed engine around the policy; every optimizer step
    learning_rate      the schedule of its rate, and what a resume makes of it
    deepspeed          the only file that imports DeepSpeed: its engine, its options, and checks of them
    architectures      the families of models: which it computes exactly, and their parts; all others are refused
    self_check         at start-up: its log-probs against the unmodified model's
    sync_probe         after each sync: its log-probs of a few sampled tokens
    reference          the frozen policy of the KL term
    attention          layers that compute what transformers' do, with less work (a folder with a door of its own)
    loading            from folders to prompt builder and policy
    saving             the learner's state, to checkpoints and back
    checkpoint_size    how large checkpoints are, and whether the disk has room for those that are kept
    row_budget         how many tokens a row may have, and an update repeated in shorter rows after memory ran out
    row_sums           the sums of the gradients of a step's rows, on one rank
    save_progress      how far a save is, for logs and terminals
    sft                the steps of supervised fine-tuning, and a pass over examples in order

Private to this room: head_kernels (the head in Triton), routing (what the routers of experts do), guard (the gradient
guard), discard (gradients that no step applies), regroup (DeepSpeed's state for a different number of ranks or a
different stage) and checkpoint_files (what a rank writes into a checkpoint).
"""

__all__ = [
    "architectures",
    "attention",
    "checkpoint_size",
    "deepspeed",
    "head",
    "learner",
    "learning_rate",
    "loading",
    "lora",
    "packing",
    "policy",
    "quantization",
    "reference",
    "row_budget",
    "row_plan",
    "row_sums",
    "save_progress",
    "saving",
    "self_check",
    "sequence_parallel",
    "sft",
    "sync_probe",
]
_USES = ["data", "model_files", "run"]
