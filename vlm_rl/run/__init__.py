"""A run on disk and on the terminal.

    directory    read and write a run directory: the contract between training, report and demo
    rollout_row  a training response as it is stored
    eval_record  an evaluated response as it is stored
    checkpoint   checkpoints that are complete or absent
    trackers     TensorBoard, trackio and wandb behind one interface
    terminal     lines, progress bars and tables

Nothing is private to this room.
"""

__all__ = ["checkpoint", "directory", "eval_record", "rollout_row", "terminal", "trackers"]
